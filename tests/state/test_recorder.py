"""A state taken at a step's end is that moment's, whatever the script does next, though part of it is copied later."""

from __future__ import annotations

import _thread
import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _global_optimizer_pre_hooks

from paceline.state import recorder as recorder_module
from paceline.state.checkpoint import listed
from paceline.state.recorder import Recorder
from paceline.state.writer import Writer
from paceline.tensors.onepass import Copying
from paceline.tensors.snapshot import Snapshot
from tests.tensors.test_snapshot import alike


class Gate:
    """Holds the thread that copies late until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        fill = recorder_module._Taken.fill

        def gated(taken: Any) -> None:
            if taken._late:
                self.reached.set()
                assert self.open.wait(30)
            fill(taken)

        monkeypatch.setattr(recorder_module._Taken, "fill", gated)
        self.held_up = threading.Event()
        before_step = recorder_module._Taken._before_step

        def seen(taken: Any, *arguments: Any) -> None:
            self.held_up.set()
            before_step(taken, *arguments)

        monkeypatch.setattr(recorder_module._Taken, "_before_step", seen)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


class Training:
    """Two models with an optimizer each, an average, and a recorder."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200)) for _ in range(2)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.average = torch.optim.swa_utils.AveragedModel(self.models[0])
        self.told: list[str] = []
        self.address = str(folder)
        self.recorder = Recorder(Writer(self.address, 9, lambda: True, self.told.append))
        for number in range(2):
            self.backward(number)
            self.optimizers[number].step()

    def backward(self, number: int) -> None:
        self.models[number](torch.randn(8, 200)).square().mean().backward()

    def state(self) -> Any:
        return {
            "models": [dict(model.state_dict()) for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "average": dict(self.average.state_dict()),
        }

    def frozen(self) -> Any:
        """The state as it is now, in memory of its own."""
        return copy.deepcopy(self.state())

    def take(self, step: int) -> bool:
        free = self.recorder.has_time(step)
        if free:
            self.recorder.take(step, self.optimizers, Snapshot(self.state()))
        return free

    def written(self) -> dict[int, Any]:
        return {found.step: Snapshot.read(found.read()).tree for found in listed(self.address)}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path / "checkpoints")
    yield made
    made.recorder.finish()
    assert not _global_optimizer_pre_hooks, "no hook stays behind"


def test_what_is_taken_is_what_comes_back(training: Training) -> None:
    expected = training.frozen()
    assert training.take(1)
    training.recorder.finish()
    assert alike(training.written()[1], expected) and training.told == []


@pytest.mark.parametrize("number", [0, 1])
def test_every_optimizers_step_waits_for_the_copy(training: Training, gate: Gate, number: int) -> None:
    """A GAN: the one steps while the other's state is still being copied."""
    expected = training.frozen()
    assert training.take(1)
    assert gate.reached.wait(30)
    training.backward(number)  # running statistics move: they were copied at once
    stepped = threading.Event()
    stepping = threading.Thread(target=lambda: (training.optimizers[number].step(), stepped.set()))
    stepping.start()
    assert gate.held_up.wait(30) and not stepped.is_set()
    gate.open.set()
    stepping.join()
    training.average.update_parameters(training.models[0])
    training.recorder.finish()
    assert alike(training.written()[1], expected) and training.told == []


def test_an_optimizer_nobody_knows_of_waits_too(training: Training, gate: Gate) -> None:
    expected = training.frozen()
    assert training.take(1)
    other = torch.optim.SGD(training.models[0].parameters(), lr=1.0)
    training.backward(0)
    stepping = threading.Thread(target=other.step)
    stepping.start()
    assert gate.held_up.wait(30)
    gate.open.set()
    stepping.join()
    training.recorder.finish()
    assert alike(training.written()[1], expected)


def clamp_through_data(training: Training) -> None:
    for param in training.models[0].parameters():
        param.data.clamp_(-0.01, 0.01)


def renormalise(training: Training) -> None:
    with torch.no_grad():
        next(training.models[1].parameters()).mul_(0.5)


def load_weights(training: Training) -> None:
    training.models[0].load_state_dict(training.models[1].state_dict())


def load_optimizer(training: Training) -> None:
    training.optimizers[0].load_state_dict(training.optimizers[1].state_dict())


def forget_state(training: Training) -> None:
    training.optimizers[0].state.clear()


def move_average(training: Training) -> None:
    training.average.update_parameters(training.models[0])
    for tensor in training.average.parameters():
        tensor.data.zero_()


@pytest.mark.parametrize(
    "change",
    [clamp_through_data, renormalise, load_weights, load_optimizer, forget_state, move_average],
    ids=lambda change: change.__name__,
)
def test_what_the_script_changes_by_hand_is_not_in_it(
    training: Training, gate: Gate, change: Callable[[Training], None]
) -> None:
    expected = training.frozen()
    assert training.take(1)
    change(training)
    gate.open.set()
    assert training.recorder.settle()
    training.recorder.finish()
    assert alike(training.written()[1], expected) and training.told == []


def test_an_optimizers_state_changed_by_hand_costs_that_checkpoint(training: Training, gate: Gate) -> None:
    gate.open.set()
    assert training.take(1)
    first = next(iter(training.optimizers[0].state.values()))
    first["exp_avg"].mul_(0.5)
    assert not training.recorder.settle(), "another one is owed"
    training.recorder.finish()
    assert training.written() == {} and "changed by hand" in training.told[0]
    gate.reached.clear()
    expected = training.frozen()
    assert training.take(2)
    first["exp_avg"].mul_(0.5)
    assert training.recorder.settle(), "from now on everything is copied at once"
    training.recorder.finish()
    assert alike(training.written()[2], expected) and not gate.reached.is_set()


def test_an_optimizers_state_that_gets_other_memory_costs_that_checkpoint(training: Training, gate: Gate) -> None:
    """A script that brings it elsewhere between two steps: no counter tells, and nobody but us needs the old memory."""
    assert training.take(1)
    values = next(iter(training.optimizers[0].state.values()))["exp_avg"]
    old = StorageWeakRef(values.untyped_storage())
    values.data = torch.zeros_like(values)
    lasts = not old.expired()
    gate.open.set()
    assert lasts, "it is read until it is copied"
    assert not training.recorder.settle()
    training.recorder.finish()
    assert training.written() == {} and "changed by hand" in training.told[0]


def test_a_state_that_is_a_view_of_a_parameter_is_copied_at_once(training: Training, gate: Gate) -> None:
    param = next(training.models[0].parameters())
    training.optimizers[0].state[param]["seen"] = param.data.view(-1)
    expected = training.frozen()
    assert training.take(1)
    param.data.zero_()
    gate.open.set()
    assert training.recorder.settle()
    training.recorder.finish()
    assert alike(training.written()[1], expected)


def test_training_does_not_wait_for_a_slow_writer(training: Training, gate: Gate) -> None:
    expected = training.frozen()
    assert training.take(1)
    assert not training.take(2)
    assert "step 2: the one before is still being written" in training.told[0]
    gate.open.set()
    training.recorder.finish()
    assert list(training.written()) == [1] and alike(training.written()[1], expected)


def test_a_thread_that_cannot_be_started_leaves_nothing_waiting(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(_thread, "start_new_thread", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            training.take(1)
    training.recorder.finish()
    expected = training.frozen()
    assert training.take(2)
    training.recorder.finish()
    assert list(training.written()) == [2] and alike(training.written()[2], expected)


def test_a_state_that_could_not_be_copied_is_not_kept(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must not be late raises in the script's thread, what may be is told by the writer's."""
    make, script = Copying.make, threading.get_ident()

    def broken(one: Copying, here: bool) -> None:
        if (threading.get_ident() == script) == here:
            raise MemoryError("no memory")
        make(one)

    monkeypatch.setattr(Copying, "make", lambda one: broken(one, here=True))
    with pytest.raises(MemoryError):
        training.take(1)
    training.recorder.finish()
    assert training.written() == {} and not training.told
    monkeypatch.setattr(Copying, "make", lambda one: broken(one, here=False))
    assert training.take(2)
    assert not training.recorder.settle(), "another one is owed"
    training.recorder.finish()
    assert training.written() == {} and training.told == [
        "no checkpoint at step 2: no memory; training goes on, older checkpoints stay"
    ]


def test_memory_is_used_again_and_grows_when_it_must(training: Training) -> None:
    for step, width in ((1, 3), (2, 300), (3, 5)):
        training.models.append(nn.Sequential(nn.Linear(width, width)))
        if step == 3:
            del training.models[3]
        expected = training.frozen()
        assert training.take(step)
        training.recorder.finish()
        assert alike(training.written()[step], expected)
