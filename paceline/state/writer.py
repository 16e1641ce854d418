"""Writing checkpoints beside the training: one thread, one checkpoint at a time. No torch in here."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from xxhash import xxh3_128

from paceline.state.checkpoint import SHARD, Manifest, Shard, listed, name_of
from paceline.state.places import Draft, Place, place

_PIECE = 8 << 20  # bytes: a disk's requests are up to some MB each
_LOW_PRIORITY = 10


class Body(Protocol):
    """What is to be written. Both methods are called in the writer's thread."""

    @property
    def memory(self) -> memoryview: ...

    def fill(self) -> None:
        """Copy what has not been copied yet."""

    def why_not(self) -> str:
        """Why the memory does not hold the state of one moment, or nothing; waits until that is known."""


class Writer:
    """An error is told and ends nothing: training goes on, and what was written before stays."""

    def __init__(
        self,
        address: str,
        keep: int,
        may_publish: Callable[[], bool],
        tell: Callable[[str], None],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`before`: what has to be on the disk first."""
        self._place: Place = place(address)
        self._keep, self._may_publish, self._tell, self._before = keep, may_publish, tell, before
        self._idle = threading.Event()
        self._idle.set()
        self._told = ""

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def write(self, step: int, body: Body, ends: bool = False) -> None:
        """Begin to write; waits for the one before. `ends`: a loop does with this step."""
        self.wait()
        self._idle.clear()
        try:
            # Not a `Thread`, whose start() waits until it runs: what it does first is the training's to wait for.
            _thread.start_new_thread(self._work, (step, body, ends))
        except BaseException:
            self._idle.set()
            raise

    def wait(self) -> None:
        self._idle.wait()

    def leave_out(self, step: int) -> None:
        """A step for which there is no time: the checkpoint before is still under way."""
        self._say(step, "the one before is still being written")

    def _work(self, step: int, body: Body, ends: bool) -> None:
        try:
            self._write(step, body, ends)
        finally:
            self._idle.set()

    def _write(self, step: int, body: Body, ends: bool) -> None:
        draft: Draft | None = None
        try:
            body.fill()
            # From here on nobody waits for this thread: it takes what time the training leaves.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
            draft = self._place.begin(name_of(step))
            manifest = Manifest(step, time.time(), list(_write_shards(draft, body.memory)), ends)
            self._before()
            draft.seal(manifest.encode())
            if self._must_not_publish(
                step, body
            ):  # waits for the script's next optimizer step: beside it little is done
                draft.drop()
                return
            draft.publish()
        except Exception as error:  # noqa: BLE001  a store's client raises kinds of its own; none may end the training
            if draft is not None:
                with suppress(Exception):  # what cannot be written can often not be removed either
                    draft.drop()
            self._say(step, _why(error))
            return
        self._told = ""
        try:
            self._tidy(step)
        except Exception as error:  # noqa: BLE001  as above
            self._tell(f"older checkpoints than that of step {step} could not be removed: {_why(error)}")

    def _must_not_publish(self, step: int, body: Body) -> bool:
        if why := body.why_not():
            self._say(step, why)
            return True
        if not self._may_publish():
            self._say(step, "another worker writes them now")
            return True
        return False

    def _tidy(self, step: int) -> None:
        """Keep the newest few up to this one. A later step's is a damaged one that the run will come past."""
        self._place.sweep()
        done = [found for found in listed(self._place.address) if found.step <= step]
        for old in done[: -self._keep]:
            self._place.remove(old.name)

    def _say(self, step: int, why: str) -> None:
        """Once for each reason, until a checkpoint is written again."""
        if why != self._told:
            self._told = why
            self._tell(f"no checkpoint at step {step}: {why}; training goes on, older checkpoints stay")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _write_shards(draft: Draft, memory: memoryview) -> Iterator[Shard]:
    for number, first in enumerate(range(0, len(memory), SHARD)):
        shard, file = memory[first : first + SHARD], f"state-{number:04d}.bin"
        pieces = _Checked(shard)
        draft.add(file, pieces)
        yield Shard(file, len(shard), pieces.checksum.hexdigest())


class _Checked:
    """Memory in pieces; its checksum, once all have been taken."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self.checksum = memory, xxh3_128()

    def __iter__(self) -> Iterator[memoryview]:
        for first in range(0, len(self._memory), _PIECE):
            piece = self._memory[first : first + _PIECE]
            self.checksum.update(piece)
            yield piece
