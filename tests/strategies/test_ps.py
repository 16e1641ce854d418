"""Parameter servers whose sums lie on another device than the model, as with a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.servers.direct import OwnServer
from paceline.servers.shelf import Shelf
from paceline.state.replica import Replica
from paceline.strategies.base import Point
from paceline.strategies.ps import ParameterServers
from paceline.tensors.peers import Alone
from paceline.tensors.tree import Plan
from tests.servers.test_shelf import Nobody, seat

CPU = torch.device("cpu")
OTHER = torch.device("cpu", 0)
"""The same memory under another name: not the device that servers' sums are on."""
LEAVES, STEPS = 3, 4


def trained(device: torch.device, touch: Callable[[nn.Module], object]) -> list[torch.Tensor]:
    """What a few steps make of a model whose gradients the script touches."""
    strategy = ParameterServers()
    strategy.reach(OwnServer(Shelf()), Nobody(), seat(0, 1, LEAVES))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    replica = Replica(CPU)
    replica.add_model(model)
    replica.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    strategy.attach(replica, Alone(CPU), True, None)
    strategy._reducer._device = device
    strategy.lay()
    strategy.begin()
    for step in range(STEPS):
        strategy.begin_step()
        point, plan = Point(step, 0, LEAVES), Plan.of(LEAVES, 1)
        strategy.open(point, plan, flat=False)
        for leaf in range(LEAVES):
            strategy.weigh(1.0 + leaf)
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + leaf))
            model(x).square().mean().backward()
            strategy.fold(leaf)
        strategy.commit(point, step, [0, 0, 0])
        touch(model)
        replica.optimizers[0].step()
        replica.optimizers[0].zero_grad()
    strategy.close()
    return [tensor.clone() for tensor in model.state_dict().values()]


def looked_at(model: nn.Module) -> None:
    assert all(bool(param.grad.any()) for param in model.parameters() if param.grad is not None)


@pytest.mark.parametrize(
    "touch", [lambda model: None, looked_at, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)]
)
def test_the_gradient_is_brought_to_where_the_model_is(touch: Callable[[nn.Module], object]) -> None:
    here, there = trained(CPU, touch), trained(OTHER, touch)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
