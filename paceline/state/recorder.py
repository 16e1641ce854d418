"""Taking a run's state at the end of a step at the least cost to the next one.

Most of the state is copied at once, by two threads: the writer's begins with the models' tensors while the script's still puts
the rest of the state together, then both take what is left. An optimizer's own tensors
(two thirds of it, with Adam) are copied beside the next step's forward and backward: nothing changes them before an
optimizer's next step(), and a hook holds that up until the copy is done. Should the script change one by hand
meanwhile, its version counter tells, the checkpoint is thrown away, and from then on everything is copied at once.
Parameters are never copied late: scripts do change them between steps, and through `.data` no counter tells.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from paceline.state.writer import Writer
from paceline.tensors.memory import on_huge_pages
from paceline.tensors.snapshot import Copy, Snapshot, copies, room_for

_WORTH_IT = 64 << 10  # bytes: a smaller tensor is copied sooner than handed over
_STRETCH = 2 << 20  # bytes: two threads that take turns at these end within a fraction of a millisecond of each other
_EARLY_STRETCH = 32 << 20
_SPARE = 1 << 20
_CHANGED = "the optimizer's state was changed by hand between two steps; the next step is taken instead"
_FAILED = "its state could not be put together"


class Recorder:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._memory = on_huge_pages(1)
        self._taken: _Taken | None = None
        self._late = True

    def has_time(self, step: int) -> bool:
        """Whether this step's state can be taken now; told, if not: the one before is still being written."""
        if self._writer.busy:
            self._writer.leave_out(step)
            return False
        return True

    def take(
        self,
        step: int,
        optimizers: Iterable[torch.optim.Optimizer],
        first: Sequence[torch.Tensor],
        capture: Callable[[], Snapshot],
        ends: bool = False,
    ) -> None:
        """Have this state written, with whether a loop ends here. The writer's thread copies those tensors that it has `first`
        while the script's puts the rest together: so nothing of the script's own may run in `capture`."""
        early = [copy for copy in self._copied_early(first) if _plain(copy.source)]
        self._taken = taken = _Taken(early)
        try:
            self._writer.write(step, taken, ends)
            snapshot = capture()
            if len(self._memory) < snapshot.nbytes:
                early = taken.recall()
                # Kept: fresh pages cost six times the copy (measured). The next one's plain values may take more room.
                self._memory = on_huge_pages(snapshot.nbytes + _SPARE)
            self._lay(taken, snapshot, {id(copy.source) for copy in early}, optimizers)
        except BaseException:
            taken.fail()
            raise
        taken.copy()

    def _copied_early(self, first: Sequence[torch.Tensor]) -> list[Copy]:
        return copies(first, memoryview(self._memory)) if room_for(first) <= len(self._memory) else []

    def _lay(
        self, taken: _Taken, snapshot: Snapshot, early: Container[int], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        quiet = {id(tensor) for tensor in _quiet(optimizers)} if self._late else set()
        memory = memoryview(self._memory)[: snapshot.nbytes]
        now: list[Copy] = []
        late: list[Copy] = []
        for copy in snapshot.lay(memory):
            if id(copy.source) in early:
                continue
            if id(copy.source) in quiet:
                late.append(copy)
            elif _plain(copy.source):
                now += copy.stretches(_STRETCH)
            else:
                copy.make()  # here: only this thread knows on which stream of a GPU its tensors are computed
        taken.lay(memory, now, late)

    def settle(self) -> bool:
        """The script is back in our hands: decide on the state that is being copied. False: take another one."""
        taken, self._taken = self._taken, None
        why_not = taken.close() if taken is not None else ""
        if why_not == _CHANGED:
            self._late = False
        return not why_not

    def finish(self) -> None:
        self.settle()
        self._writer.wait()


class _Taken:
    """Memory with a state, of which some tensors are still to come."""

    def __init__(self, early: Iterable[Copy]) -> None:
        self.memory = memoryview(b"")
        # The largest first, and few: between two copies the thread needs the interpreter, which the script's has.
        largest = sorted(early, key=lambda copy: -copy.target.nbytes)
        self._now = deque(stretch for copy in largest for stretch in copy.stretches(_EARLY_STRETCH))
        self._late: list[Copy] = []
        self._versions: list[int] = []
        self._helping, self._laid, self._copied = threading.Lock(), threading.Event(), threading.Event()
        self._filled, self._settled = threading.Event(), threading.Event()
        self._why_not = ""
        self._hook: RemovableHandle | None = None

    # in the script's thread

    def recall(self) -> list[Copy]:
        """Nothing counts as copied: the memory was too small. What is, none."""
        self._now.clear()
        with self._helping:
            return []

    def lay(self, memory: memoryview, now: Iterable[Copy], late: list[Copy]) -> None:
        """All that is to be copied is known."""
        self.memory, self._late = memory, late
        self._now.extend(now)
        self._versions = [copy.source._version for copy in late]
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._laid.set()

    def copy(self) -> None:
        """The script goes on once all that must not be late is copied."""
        try:
            _make(self._now)
            with self._helping:
                pass  # the other one's last stretch
        except BaseException:
            self._why_not = _FAILED
            raise
        finally:
            self._copied.set()

    def fail(self) -> None:
        self._why_not = _FAILED
        self._now.clear()
        for event in (self._laid, self._copied, self._settled):
            event.set()

    def close(self) -> str:
        """Why the state is not that of one moment, or nothing. Not inside a step(): a hook cannot be removed while hooks run."""
        if self._hook is not None:
            self._hook.remove()
        self._settle()
        return self._why_not

    def _settle(self) -> None:
        """A change that the script has begun has been counted by now."""
        if not self._settled.is_set():
            self._filled.wait()
            if [copy.source._version for copy in self._late] != self._versions:
                self._why_not = _CHANGED
            self._late = []
            self._settled.set()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._settle()

    # in the writer's

    def fill(self) -> None:
        try:
            with self._helping:
                _make(self._now)
            self._laid.wait()
            with self._helping:
                _make(self._now)
            for copy in self._late:
                copy.make()
            self._copied.wait()
        finally:
            self._filled.set()

    def why_not(self) -> str:
        self._settled.wait()
        return self._why_not


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
