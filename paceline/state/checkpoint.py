"""Checkpoints: the run's state in files, whole or not at all. No torch in here: the agent picks one to resume from.

A checkpoint is a folder, `step-00000120/`: a snapshot's bytes cut into shards, and `manifest.json` with each
shard's size and checksum (XXH3, at the speed of memory), and its own. The manifest is written last: without a good one there is no checkpoint.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_128

from paceline.errors import UsageError
from paceline.state.places import MANIFEST, Place, place

SHARD = 64 << 20
_PIECE = 4 << 20
_NAME = re.compile(r"step-(\d{8,})")
_FORMAT = 9


class Shard(msgspec.Struct, frozen=True):
    file: str
    bytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True):
    step: int
    written: float
    """Seconds since 1970."""
    shards: list[Shard]
    ends: bool = False
    """Whether a loop over a loader ends with this step: a run that goes on from here has nothing left of it."""
    format: int = _FORMAT
    crc32: int = 0
    """Of this manifest, with a 0 here."""

    @property
    def size(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def encode(self) -> bytes:
        crc = zlib.crc32(_json(msgspec.structs.replace(self, crc32=0)))
        return _json(msgspec.structs.replace(self, crc32=crc))

    @staticmethod
    def decode(raw: bytes) -> Manifest:
        """Raises ValueError for anything but the very bytes that `encode` gave."""
        manifest = msgspec.json.decode(raw, type=Manifest)
        if manifest.format != _FORMAT:
            raise ValueError(f"it has format {manifest.format}, this version reads {_FORMAT}")
        if manifest.encode() != raw:
            raise ValueError("its checksum does not fit")
        return manifest


def _json(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no checkpoint's name; they are like {name_of(120)}")
    return int(match[1])


class Removed(ValueError):
    """Its run has removed a checkpoint while somebody read it."""


@dataclass(frozen=True)
class Checkpoint:
    place: Place
    step: int

    @property
    def name(self) -> str:
        return name_of(self.step)

    @property
    def address(self) -> str:
        return f"{self.place.address}/{self.name}"

    def manifest(self) -> Manifest:
        """What there should be; raises ValueError, with the reason, if that cannot be said."""
        try:
            with self.place.open(self.name, MANIFEST) as file:
                manifest = Manifest.decode(file.read())
        except FileNotFoundError:
            raise ValueError(f"{self.address} has no manifest: it was never finished, or has lost it") from None
        except OSError as error:
            raise ValueError(f"{self.address}: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"{self.address} is damaged: its manifest cannot be read ({error})") from None
        if manifest.step != self.step:
            raise ValueError(f"{self.address} is the checkpoint of step {manifest.step}, under another's name")
        return manifest

    def sized(self) -> Manifest:
        """The quick look: every shard is there, and as long as it should be."""
        manifest = self.manifest()
        for shard in manifest.shards:
            try:
                size = self.place.size(self.name, shard.file)
            except OSError as error:
                raise ValueError(f"{self.address}: {shard.file}: {error.strerror or error}") from None
            if size != shard.bytes:
                raise ValueError(f"{self.address} is damaged: {shard.file} has {size} of {shard.bytes} bytes")
        return manifest

    def check(self) -> Manifest:
        """Read it through; raises ValueError, with the reason, if it is not what was written."""
        manifest = self.manifest()
        for _ in self._pieces(manifest):
            pass
        return manifest

    def read(self) -> memoryview:
        """The snapshot's bytes, checked."""
        manifest = self.manifest()
        whole, at = memoryview(bytearray(manifest.size)), 0
        for piece in self._pieces(manifest):
            whole[at : at + len(piece)] = piece
            at += len(piece)
        return whole

    def _pieces(self, manifest: Manifest) -> Iterator[bytes]:
        """All bytes in order. Whoever takes them to the end has seen every checksum compared."""
        try:
            yield from self._compared(manifest)
        except ValueError:
            if self._is_gone:
                raise Removed(f"{self.address} was removed while it was read: its run keeps the newest few") from None
            raise

    @property
    def _is_gone(self) -> bool:
        try:
            return self.name not in self.place.names()
        except OSError:
            return False

    def _compared(self, manifest: Manifest) -> Iterator[bytes]:
        for shard in manifest.shards:
            checksum, left = xxh3_128(), shard.bytes
            try:
                with self.place.open(self.name, shard.file) as file:
                    while left and (piece := file.read(min(left, _PIECE))):
                        checksum.update(piece)
                        left -= len(piece)
                        yield piece
                    longer = bool(file.read(1))
            except OSError as error:
                raise ValueError(f"{self.address}: {shard.file}: {error.strerror or error}") from None
            if left or longer:
                raise ValueError(f"{self.address} is damaged: {shard.file} does not have its {shard.bytes} bytes")
            if checksum.hexdigest() != shard.checksum:
                raise ValueError(f"{self.address} is damaged: the checksum of {shard.file} does not fit")


def listed(address: str) -> list[Checkpoint]:
    """What stands at an address under a checkpoint's name, good or not, the oldest first."""
    where = place(address)
    try:
        names = where.names()
    except OSError as error:
        raise UsageError(f"no checkpoint can be looked for at {address}: {error.strerror or error}") from None
    matches = filter(None, map(_NAME.fullmatch, names))
    return sorted((Checkpoint(where, int(match[1])) for match in matches), key=lambda found: found.step)


def sweep(address: str) -> None:
    """Nobody writes there any more: what lies aside for a next one goes."""
    with suppress(OSError):
        if "://" not in address:  # nothing lies aside in a store
            place(address).sweep()


def newest_good(address: str, tell: Callable[[str], None], inside: bool = False, above: int = -1) -> Checkpoint | None:
    """The newest checkpoint that can be read; each damaged one that is passed over is told about. `inside`: rather an older
    one than one where a loop ends. Those up to step `above` are not looked at."""
    at_an_end = None
    for checkpoint in reversed([found for found in listed(address) if found.step > above]):
        try:
            manifest = checkpoint.check()
        except ValueError as error:
            tell(f"{error}; trying the one before")
            continue
        if not (inside and manifest.ends):
            return checkpoint
        at_an_end = at_an_end or checkpoint
    return at_an_end
