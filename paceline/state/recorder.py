"""Taking a run's state at the end of a step at the least cost to the next one.

Most of the state is copied at once. An optimizer's own tensors (two thirds of it, with Adam) are copied by the writer's
thread beside the next step's forward and backward: nothing changes them before an
optimizer's next step(), and a hook holds that up until the copy is done. Should the script change one by hand
meanwhile, its version counter tells, the checkpoint is thrown away, and from then on everything is copied at once.
Parameters are never copied late: scripts do change them between steps, and through `.data` no counter tells.

Each of the two is one call, with what is to be copied laid out before (`Copying`): the interpreter is the training's meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.state.writer import Writer
from paceline.tensors.memory import on_huge_pages
from paceline.tensors.snapshot import Copy, Snapshot, copying, is_plain

_WORTH_IT = 64 << 10  # bytes: a smaller tensor is copied sooner than handed over
_SPARE = 1 << 20
_CHANGED = "the optimizer's state was changed by hand between two steps; the next step is taken instead"


class Recorder:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._memory = on_huge_pages(1)
        self._taken: _Taken | None = None
        self._late = True

    @property
    def busy(self) -> bool:
        """Whether the one before is still being written."""
        return self._writer.busy

    def has_time(self, step: int) -> bool:
        """Whether this step's state can be taken now; told, if not: the one before is still being written."""
        if self._writer.busy:
            self._writer.leave_out(step)
            return False
        return True

    def take(
        self, step: int, optimizers: Iterable[torch.optim.Optimizer], snapshot: Snapshot, ends: bool = False
    ) -> None:
        """Have this state written, with whether a loop ends here."""
        if len(self._memory) < snapshot.nbytes:
            # Kept: fresh pages cost six times the copy (measured). The next one's plain values may take more room.
            self._memory = on_huge_pages(snapshot.nbytes + _SPARE)
        memory = memoryview(self._memory)[: snapshot.nbytes]
        quiet = {id(tensor) for tensor in _quiet(optimizers)} if self._late else set()
        copies = snapshot.lay(memory)
        copying((copy for copy in copies if id(copy.source) not in quiet), memory).make()
        taken = _Taken(memory, [copy for copy in copies if id(copy.source) in quiet])
        self._writer.write(step, taken, ends)
        taken.watch()
        self._taken = taken

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

    def __init__(self, memory: memoryview, late: Sequence[Copy]) -> None:
        self.memory, self._late = memory, late
        self._copying = copying(late, memory)
        self._begun_with = [_mark(copy.source) for copy in late]
        self._filled, self._settled = threading.Event(), threading.Event()
        self._why_not = ""

    # in the script's thread

    def watch(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> str:
        """Why the state is not that of one moment, or nothing. Not inside a step(): a hook cannot be removed while hooks run."""
        self._hook.remove()
        self._settle()
        return self._why_not

    def _settle(self) -> None:
        """A change that the script has begun has been counted by now."""
        if not self._settled.is_set():
            self._filled.wait()
            if [_mark(copy.source) for copy in self._late] != self._begun_with:
                self._why_not = _CHANGED
            self._late = ()
            self._settled.set()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._settle()

    # in the writer's

    def fill(self) -> None:
        try:
            self._copying.make()
        except BaseException as error:
            self._why_not = f"its state could not be copied: {error}"
            raise
        finally:
            self._filled.set()

    def why_not(self) -> str:
        self._settled.wait()
        return self._why_not


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one if it was changed, or was given other memory."""
    return tensor._version, tensor.data_ptr()


def _quiet(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    """Tensors of the optimizers' own, which only their step() changes, as plain memory."""
    for optimizer in optimizers:
        shared = {param.untyped_storage().data_ptr() for group in optimizer.param_groups for param in group["params"]}
        for values in optimizer.state.values():
            for value in values.values():
                if (
                    type(value) is torch.Tensor
                    and is_plain(value)
                    and not value.requires_grad
                    and value.nbytes >= _WORTH_IT
                    and value.untyped_storage().data_ptr() not in shared
                ):
                    yield value
