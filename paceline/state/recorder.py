"""Taking a run's state at the end of a step at the least cost to the next one.

Most of the state is copied at once. An optimizer's own tensors (two thirds of it, with Adam) are copied beside
the next step's forward and backward: nothing changes them before an optimizer's next step(), and a hook holds
that up until the copy is done. Should the script change one by hand meanwhile, its version counter tells, the
checkpoint is thrown away, and from then on everything is copied at once. Parameters are never copied late:
scripts do change them between steps, and through `.data` no counter tells.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.state.snapshot import Snapshot
from paceline.state.writer import Writer
from paceline.tensors.memory import on_huge_pages

_WORTH_IT = 64 << 10  # bytes: a smaller tensor is copied sooner than handed over


class Recorder:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._memory = on_huge_pages(1)
        self._taken: _Taken | None = None
        self._late = True

    def take(self, step: int, snapshot: Snapshot, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Have this state written. Not if the one before is still being written: training does not wait for a disk."""
        if self._writer.busy:
            self._writer.leave_out(step)
            return False
        if len(self._memory) < snapshot.nbytes:
            self._memory = on_huge_pages(snapshot.nbytes)  # kept: fresh pages cost six times the copy (measured)
        late = {id(tensor) for tensor in _quiet(optimizers)} if self._late else set()
        memory = memoryview(self._memory)[: snapshot.nbytes]
        self._taken = _Taken(memory, snapshot.write(memory, late))
        self._writer.write(step, self._taken)
        return True

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

    def __init__(self, memory: memoryview, rest: list[tuple[torch.Tensor, memoryview]]) -> None:
        self.memory = memory
        self._rest = rest
        self._versions = [tensor._version for tensor, _ in rest]
        self._filled, self._settled = threading.Event(), threading.Event()
        self._sound = True
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def fill(self) -> None:
        try:
            for tensor, target in self._rest:
                np.copyto(np.frombuffer(target, np.uint8), tensor.view(-1).view(torch.uint8).numpy())
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
            versions = [tensor._version for tensor, _ in self._rest]
            self._sound, self._rest = versions == self._versions, []
            self._settled.set()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._settle()


def _quiet(optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[torch.Tensor]:
    """Tensors of the optimizers' own, which only their step() changes, as plain memory."""
    for optimizer in optimizers:
        shared = {param.untyped_storage().data_ptr() for group in optimizer.param_groups for param in group["params"]}
        for values in optimizer.state.values():
            for value in values.values():
                if (
                    type(value) is torch.Tensor
                    and value.device.type == "cpu"
                    and value.layout == torch.strided
                    and value.is_contiguous()
                    and not value.requires_grad
                    and value.nbytes >= _WORTH_IT
                    and value.untyped_storage().data_ptr() not in shared
                ):
                    yield value
