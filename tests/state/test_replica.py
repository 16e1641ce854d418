"""A newcomer's replica after restore() is the donor's, whatever a script has done to its model and optimizer since."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.state.replica import Replica
from paceline.strategies.buffers import Buffers
from paceline.tensors.snapshot import Snapshot


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, width)
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("mask", torch.zeros(1))
        self.register_buffer("dropped", torch.zeros(2))


def replica_of(*models: nn.Module) -> Replica:
    replica = Replica(torch.device("cpu"))
    for model in models:
        replica.add_model(model)
    return replica


def handed_over(donor: Replica, newcomer: Replica) -> None:
    newcomer.restore(Snapshot.read(memoryview(Snapshot(donor.capture()).packed())).tree)


def test_buffers_that_were_filled_grew_or_came_later_are_handed_over() -> None:
    donor, newcomer = (replica_of(Net(), Net()) for _ in range(2))
    for number, model in enumerate(donor.models):
        model.table = torch.full((5,), 1.0 + number)
        model.mask = torch.ones(7, dtype=torch.float64)
        model.dropped = None
        model.linear.register_buffer("late", torch.arange(3))
        model.norm.running_mean += 2
    handed_over(donor, newcomer)
    for mine, theirs in zip(newcomer.models, donor.models, strict=True):
        for name, buffer in theirs.named_buffers():
            assert torch.equal(buffer, mine.get_buffer(name)) and buffer.dtype == mine.get_buffer(name).dtype
        assert mine.dropped is None
        assert mine.state_dict().keys() == theirs.state_dict().keys()
    assert newcomer.weights_sha256() == donor.weights_sha256()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Net(5), "linear.weight has the shape (5, 3) here, and (4, 3) in the run's state"),
        (nn.Sequential(Net()), "has a parameter"),
    ],
)
def test_another_model_is_refused(other: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        handed_over(replica_of(Net()), replica_of(other))


def test_what_cannot_be_trained_here_is_refused_by_name() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(UsageError, match="1 is a SyncBatchNorm"):
        replica_of(model)


def test_shares_start_from_a_buffer_that_was_put_in_anothers_place() -> None:
    model = Net()
    replica = replica_of(model)
    buffers = Buffers(replica.buffers, replica.buffer_homes)
    model.mask, model.norm.running_mean = torch.tensor([0.5]), torch.arange(3.0)
    buffers.begin()
    for _ in range(2):
        assert model.mask.item() == 0.5
        model.norm.running_mean = model.norm.running_mean + 1
        moves = dict(zip([name for _, name in replica.buffer_homes], buffers.take(), strict=True))
        assert torch.equal(moves["running_mean"], torch.ones(3)) and moves["mask"] is None
        assert torch.equal(model.norm.running_mean, torch.arange(3.0))


def test_a_buffer_that_grows_in_a_share_stays_as_it_is() -> None:
    model = Net()
    buffers = Buffers((replica := replica_of(model)).buffers, replica.buffer_homes)
    for size in (3, 6):
        buffers.begin()
        grown = model.mask = torch.ones(size)
        with buffers.as_begun():
            assert model.mask is grown
        assert not any(move is not None for move in buffers.take())
        buffers.settle([torch.ones(1)] * 9, [False] * 9, 1.0)
        buffers.put(buffers.values())
        assert model.mask is grown


def trained(*groups: str) -> tuple[Replica, torch.optim.Optimizer]:
    """A model with an optimizer of these modules, a group each."""
    model = Net()
    replica = replica_of(model)
    optimizer = torch.optim.SGD(
        [{"params": model.get_submodule(name).parameters()} for name in groups], 0.1, momentum=0.9
    )
    replica.optimizers.append(optimizer)
    return replica, optimizer


def test_groups_that_were_added_in_training_are_handed_over() -> None:
    donor, optimizer = trained("linear")
    optimizer.add_param_group({"params": list(donor.models[0].norm.parameters()), "lr": 0.01})
    for param in donor.params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    newcomer, own = trained("linear")
    handed_over(donor, newcomer)
    assert [group["lr"] for group in own.param_groups] == [0.1, 0.01]
    for mine, theirs in zip(newcomer.params, donor.params, strict=True):
        assert torch.equal(own.state[mine]["momentum_buffer"], optimizer.state[theirs]["momentum_buffer"])
    assert newcomer.digest_of_settings() == donor.digest_of_settings()


def test_groups_that_nobody_can_make_again_are_refused() -> None:
    donor, optimizer = trained("linear")
    with pytest.raises(UsageError, match="has 2 groups of parameters, and 1 in the run's state"):
        handed_over(donor, trained("linear", "norm")[0])
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(UsageError, match=r"group 1 of the SGD was added .* give its module to run.prepare"):
        handed_over(donor, trained("linear")[0])
