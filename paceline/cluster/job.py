"""What to run, as the user typed it: kept in the run's folder for every agent, and for `paceline resume`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from paceline.folder import RunFolder
from paceline.settings import Settings, merge


@dataclass(frozen=True)
class Job:
    target: str
    arguments: list[str]
    as_module: bool
    flags: dict[str, Any]
    directory: str
    """Where it was started."""
    gpus: list[str]
    dry_run: bool = False
    faults: list[str] = field(default_factory=list)
    """What is to go wrong on purpose."""
    resume: str = ""
    """The checkpoint to go on from."""
    given: list[str] = field(default_factory=list)
    """The verb and what follows it, as they were typed."""

    @cached_property
    def settings(self) -> Settings:
        """What the flags say. The script's init() may still set what no flag did."""
        return merge(self.flags, {})[0]

    @property
    def workers(self) -> int:
        return 1 if self.dry_run else self.settings.workers

    @property
    def spares(self) -> int:
        return 0 if self.dry_run else self.settings.spares

    @property
    def servers(self) -> int:
        return 0 if self.dry_run else self.settings.servers

    @property
    def words(self) -> str:
        """The command, as it can be typed again."""
        return shlex.join(["paceline", *self.given])

    @property
    def share_of_places(self) -> int:
        """How many workers each machine has a place for, if it does not say itself."""
        return -(-(self.workers + self.spares) // self.settings.machines)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(msgspec.to_builtins(self))

    @staticmethod
    def decode(raw: bytes) -> Job:
        return msgspec.msgpack.decode(raw, type=Job)

    def write(self, folder: RunFolder) -> None:
        folder.write_json(folder.job, msgspec.to_builtins(self))

    @staticmethod
    def read(folder: RunFolder) -> Job | None:
        known = folder.read_json(folder.job)
        return msgspec.convert(known, Job) if known else None
