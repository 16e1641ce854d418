"""Taking a run's state at the end of a step at the least cost to the next one.

Most of the state is copied at once, by two threads: the script's and the writer's. An optimizer's own tensors
(two thirds of it, with Adam) are copied beside the next step's forward and backward: nothing changes them before an
optimizer's next step(), and a hook holds that up until the copy is done. Should the script change one by hand
meanwhile, its version counter tells, the checkpoint is thrown away, and from then on everything is copied at once.
Parameters are never copied late: scripts do change them between steps, and through `.data` no counter tells.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.state.snapshot import Copy, Snapshot
from paceline.state.writer import Writer
from paceline.tensors.memory import on_huge_pages

_WORTH_IT = 64 << 10  # bytes: a smaller tensor is copied sooner than handed over
_STRETCH = 2 << 20  # bytes: two threads that take turns at these end within a fraction of a millisecond of each other


class Recorder:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._memory = on_huge_pages(1)
        self._taken: _Taken | None = None
        self._late = True

    def free(self, step: int) -> bool:
        """Whether this step's state can be taken now, and not only once the one before is written."""
        if self._writer.busy:
            self._writer.leave_out(step)
            return False
        return True

    def take(
        self, step: int, snapshot: Snapshot, optimizers: Iterable[torch.optim.Optimizer], ends: bool = False
    ) -> None:
        """Have this state written, with whether a loop ends here."""
        if len(self._memory) < snapshot.nbytes:
            self._memory = on_huge_pages(snapshot.nbytes)  # kept: fresh pages cost six times the copy (measured)
        quiet = {id(tensor) for tensor in _quiet(optimizers)} if self._late else set()
        memory = memoryview(self._memory)[: snapshot.nbytes]
        now: list[Copy] = []
        late: list[Copy] = []
        for copy in snapshot.lay(memory):
            if id(copy.source) in quiet:
                late.append(copy)
            elif _plain(copy.source):
                now += copy.stretches(_STRETCH)
            else:
                copy.make()  # here: only this thread knows on which stream of a GPU its tensors are computed
        self._taken = _Taken(memory, now, late)
        self._writer.write(step, self._taken, ends)
        self._taken.copy()

    def settle(self) -> bool:
        """The script is back in our hands: decide on the state that is being copied. False: take another one."""
        taken, self._taken = self._taken, None
        if taken is None or taken.close():
            return True
        self._late = False
        return False

    def finish(self) -> None:
        self.settle()
        self._writer.wait()


class _Taken:
    """Memory with a state, of which some tensors are still to come."""

    def __init__(self, memory: memoryview, now: Iterable[Copy], late: list[Copy]) -> None:
        self.memory = memory
        self._now, self._late = deque(now), late
        self._versions = [copy.source._version for copy in late]
        self._helping, self._copied = threading.Lock(), threading.Event()
        self._filled, self._settled = threading.Event(), threading.Event()
        self._sound = True
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def copy(self) -> None:
        """In the script's thread: it goes on once all that must not be late is copied."""
        try:
            _make(self._now)
            with self._helping:
                pass  # the other one's last stretch
        except BaseException:
            self._sound = False
            raise
        finally:
            self._copied.set()

    def fill(self) -> None:
        try:
            with self._helping:
                _make(self._now)
            for copy in self._late:
                copy.make()
            self._copied.wait()
        finally:
            self._filled.set()

    def sound(self) -> bool:
        self._settled.wait()
        return self._sound

    def close(self) -> bool:
        """Whether the state is that of one moment. Not inside a step(): a hook cannot be removed while hooks run."""
        self._hook.remove()
        self._settle()
        return self._sound

    def _settle(self) -> None:
        """In the script's thread: a change that it has begun has been counted by now."""
        if not self._settled.is_set():
            self._filled.wait()
            versions = [copy.source._version for copy in self._late]
            self._sound, self._late = self._sound and versions == self._versions, []
            self._settled.set()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._settle()


def _make(copies: deque[Copy]) -> None:
    """All of them, with whoever else is at it."""
    while copies:
        try:
            copy = copies.popleft()
        except IndexError:  # the other one has taken the last
            return
        copy.make()


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it is memory of this process, as it lies there."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()


def _quiet(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    """Tensors of the optimizers' own, which only their step() changes, as plain memory."""
    for optimizer in optimizers:
        shared = {param.untyped_storage().data_ptr() for group in optimizer.param_groups for param in group["params"]}
        for values in optimizer.state.values():
            for value in values.values():
                if (
                    type(value) is torch.Tensor
                    and _plain(value)
                    and not value.requires_grad
                    and value.nbytes >= _WORTH_IT
                    and value.untyped_storage().data_ptr() not in shared
                ):
                    yield value
