"""A server's optimizer gives the bits that the script's own gives on whole tensors."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import OneCycleLR

from paceline.errors import MismatchError, UsageError
from paceline.servers.carried import OPTIMIZERS, Carried, describe, hyper, refuse_closure
from paceline.servers.optimizers import Engine, cut, join
from paceline.servers.pieces import Piece
from tests.servers.cutting import Servers
from tests.tensors.arithmetic import same

SHAPES = [(), (1,), (5,), (64,), (3, 1000), (130, 129), (8, 5, 3, 3), (70_001,), (0,)]
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (SGD, {}),
    (SGD, {"weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "dampening": 0.3}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.9, "maximize": True}),
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (Adam, {"amsgrad": True, "maximize": True}),
    (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "eps": 1e-3}),
    (AdamW, {}),
    (AdamW, {"amsgrad": True, "weight_decay": 0.2}),
    (AdamW, {"maximize": True, "weight_decay": 0}),
    (Adagrad, {}),
    (Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2}),
    (Adagrad, {"maximize": True, "eps": 1e-2}),
    (RMSprop, {}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (RMSprop, {"centered": True, "weight_decay": 0.1, "alpha": 0.9}),
    (RMSprop, {"momentum": 0.5, "maximize": True}),
]
KINDS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]
    tensors[6] = tensors[6].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(tensor) for tensor in tensors]


def draw(params: list[nn.Parameter], absent: set[int]) -> list[torch.Tensor | None]:
    """Sums as servers get them: halves in fp32, in each parameter's own order in memory."""
    wide = {torch.float64: torch.float64}
    return [
        None
        if number in absent
        else torch.randn_like(param, dtype=wide.get(param.dtype, torch.float32)) * 10.0 ** (number - 4)
        for number, param in enumerate(params)
    ]


def step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], sums: list[torch.Tensor | None]) -> None:
    for param, gradient in zip(params, sums, strict=True):
        param.grad = None if gradient is None else gradient.to(param.dtype, copy=True)
    optimizer.step()


def over_the_wire(carried: Carried) -> Carried:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(carried), type=Carried)


def assert_equal(params: list[nn.Parameter], servers: Servers) -> None:
    pulled = [torch.full_like(param, float("nan")) for param in params]
    servers.pull(pulled)
    for number, (param, other) in enumerate(zip(params, pulled, strict=True)):
        assert same(param.detach(), other), f"parameter {number}"


def there_is(
    optimizer_kind: type[torch.optim.Optimizer], options: dict[str, Any], kind: str, dtype: torch.dtype
) -> bool:
    """torch has no fused RMSprop; what is refused is tested below."""
    refused = optimizer_kind is SGD and "momentum" in options and kind != "loop" and dtype == torch.bfloat16
    return not refused and (optimizer_kind, kind) != (RMSprop, "fused")


ALL = [
    (*case, kind, dtype)
    for case in CASES
    for kind in KINDS
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    if there_is(*case, kind, dtype)
]


@pytest.mark.parametrize(
    "optimizer_kind,options,kind,dtype", ALL, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_pieces_on_servers_come_to_the_bits_of_whole_tensors(
    optimizer_kind: type[torch.optim.Optimizer], options: dict[str, Any], kind: str, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    dice = random.Random(seed)
    params = parameters(dtype)
    groups = [{"params": params[::2], "lr": 0.02}, {"params": params[1::2], "weight_decay": 0.05}]
    optimizer = optimizer_kind(groups, **options, **KINDS[kind])
    carried = over_the_wire(describe(optimizer, params))
    servers = Servers(carried, params, 3, dice, optimizer.state_dict())
    late = 5 if (optimizer_kind, kind) != (SGD, "fused") else -1  # torch's fused SGD cannot have one that comes late
    for turn in range(4):
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
        sums = draw(params, {late} if turn == 0 else {7} if turn == 2 else set())
        values = msgspec.msgpack.decode(msgspec.msgpack.encode(hyper(optimizer, carried)))
        assert all(set(changed) == {"lr"} for changed in values)
        servers.apply(sums, values)
        step(optimizer, params, sums)
    assert_equal(params, servers)
    assert_same_state(join(carried, hyper(optimizer), servers.held()), optimizer.state_dict())


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, theirs in other["state"].items():
        assert one["state"][number].keys() == theirs.keys()
        for name, item in theirs.items():
            mine = one["state"][number][name]
            assert same(mine, item) if isinstance(item, torch.Tensor) else mine == item, (number, name)


@pytest.mark.parametrize("optimizer_kind", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_run_goes_on_with_another_number_of_servers_from_a_whole_state(
    optimizer_kind: type[torch.optim.Optimizer], seed: int
) -> None:
    torch.manual_seed(seed)
    dice = random.Random(seed)
    params = parameters()
    optimizer = optimizer_kind(params, **({"momentum": 0.9} if optimizer_kind in (SGD, RMSprop) else {}))
    carried = describe(optimizer, params)
    servers = Servers(carried, params, 1, dice, optimizer.state_dict())
    for count in (3, 2, 5):
        sums = draw(params, {3})
        servers.apply(sums, hyper(optimizer, carried))
        step(optimizer, params, sums)
        now = [param.detach().clone() for param in params]
        servers.pull(now)
        servers = Servers(carried, now, count, dice, join(carried, hyper(optimizer), servers.held()))
    assert_equal(params, servers)
    # Out of the servers into the script's own optimizer, which goes on alone.
    alone = [nn.Parameter(tensor) for tensor in now]
    own = optimizer_kind(alone)
    own.load_state_dict(join(carried, hyper(optimizer), servers.held()))
    sums = draw(params, set())
    step(own, alone, sums)
    step(optimizer, params, sums)
    assert all(same(a.detach(), b.detach()) for a, b in zip(alone, params, strict=True))


def test_a_fragment_moves_with_its_state() -> None:
    param = nn.Parameter(torch.randn(1000))
    optimizer = Adam([param])
    carried = describe(optimizer, [param])
    pieces = [Piece(0, 0, 512), Piece(0, 512, 1000)]
    values = [param.detach()[piece.lo : piece.hi].clone() for piece in pieces]
    first = Engine(carried, pieces, values)
    gradients = torch.randn(3, 1000)

    def parts(turn: int) -> list[torch.Tensor]:
        return [gradients[turn, piece.lo : piece.hi].clone() for piece in pieces]

    first.apply(parts(0), hyper(optimizer))
    second = Engine(carried, pieces[1:], [values[1].clone()])
    second.restore(first.capture()[1:])
    for turn in (1, 2):
        first.apply(parts(turn), hyper(optimizer))
        second.apply(parts(turn)[1:], hyper(optimizer))
    assert same(first.capture()[1]["exp_avg"], second.capture()[0]["exp_avg"])
    assert float(second.capture()[0]["step"]) == 3
    assert same(values[1], second._values[0])


def test_schedulers_of_momentum_and_of_tensor_learning_rates_work(seed: int) -> None:
    torch.manual_seed(seed)
    params = parameters()
    optimizer = AdamW(params, lr=torch.tensor(0.01))
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    carried = over_the_wire(describe(optimizer, params))
    servers = Servers(carried, params, 2, random.Random(seed), optimizer.state_dict())
    for _ in range(6):
        sums = draw(params, set())
        servers.apply(sums, msgspec.msgpack.decode(msgspec.msgpack.encode(hyper(optimizer, carried))))
        step(optimizer, params, sums)
        scheduler.step()
    assert_equal(params, servers)


def test_a_step_is_repeated_from_its_own_values_alone() -> None:
    param = nn.Parameter(torch.zeros(64))
    optimizer = SGD([param], lr=0.5)
    carried = describe(optimizer, [param])
    value = torch.zeros(64)
    engine = Engine(carried, [Piece(0, 0, 64)], [value])
    optimizer.param_groups[0]["lr"] = 0.25
    engine.apply([torch.ones(64)], hyper(optimizer, carried))
    optimizer.param_groups[0]["lr"] = 0.5
    assert hyper(optimizer, carried) == [{}]
    engine.apply([torch.ones(64)], [{}])
    assert value.tolist() == [-0.75] * 64


def test_clipping_multiplies_as_on_the_workers() -> None:
    param = nn.Parameter(torch.randn(200).bfloat16())
    optimizer = SGD([param], lr=0.1)
    value = param.detach().clone()
    gradient = torch.randn(200)
    Engine(describe(optimizer, [param]), [Piece(0, 0, 200)], [value]).apply([gradient.clone()], hyper(optimizer), 0.3)
    param.grad = gradient.bfloat16().mul_(0.3)
    optimizer.step()
    assert same(value, param.detach())


def test_a_server_without_pieces_of_a_group_or_of_any_steps_all_the_same() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    optimizer = Adam([{"params": params[:1]}, {"params": params[1:]}])
    carried = describe(optimizer, params)
    Engine(carried, [], []).apply([], hyper(optimizer))
    value = torch.ones(4)
    Engine(carried, [Piece(1, 0, 4)], [value]).apply([torch.ones(4)], hyper(optimizer))
    assert value[0] != 1


def test_counts_of_steps_are_in_the_scripts_default_type() -> None:
    param = nn.Parameter(torch.ones(3))
    torch.set_default_dtype(torch.float64)
    try:
        optimizer = Adam([param])
        carried = describe(optimizer, [param])
    finally:
        torch.set_default_dtype(torch.float32)
    engine = Engine(carried, [Piece(0, 0, 3)], [torch.ones(3)])
    engine.apply([torch.ones(3)], hyper(optimizer))
    assert engine.capture()[0]["step"].dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_frozen_parameters_keep_their_places_in_the_state() -> None:
    params = [
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(4), requires_grad=False),
        nn.Parameter(torch.ones(5)),
    ]
    trained = [params[0], params[2]]
    optimizer = Adam(params)
    carried = describe(optimizer, trained)
    assert carried.groups[0].params == [0, None, 1]
    engine = Engine(carried, [Piece(1, 0, 5)], [torch.ones(5)])
    engine.apply([torch.ones(5)], hyper(optimizer))
    whole = join(carried, hyper(optimizer), [(Piece(0, 0, 3), {}), (Piece(1, 0, 5), engine.capture()[0])])
    assert list(whole["state"]) == [2]
    assert cut(whole, carried, [Piece(1, 0, 5)])[0]["exp_avg"].shape == (5,)


def test_pieces_that_do_not_make_a_whole_are_refused() -> None:
    param = nn.Parameter(torch.ones(200))
    optimizer = Adam([param])
    carried = describe(optimizer, [param])
    state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(64)}
    with pytest.raises(MismatchError, match="do not cover"):
        join(carried, hyper(optimizer), [(Piece(0, 0, 64), state)])
    rest = {"step": torch.tensor(2.0), "exp_avg": torch.ones(136)}
    with pytest.raises(MismatchError, match="same step"):
        join(carried, hyper(optimizer), [(Piece(0, 0, 64), state), (Piece(0, 64, 200), rest)])


class _Own(SGD):
    pass


@pytest.mark.parametrize(
    "build,words",
    [
        (torch.optim.LBFGS, "LBFGS: they run torch's own SGD, Adam, AdamW, Adagrad, RMSprop"),
        (torch.optim.NAdam, "NAdam: they run"),
        (_Own, "_Own: they run"),
        (lambda params: Adam(params, differentiable=True), r"differentiable=True\) cannot be carried"),
        (lambda params: Adam(params, capturable=True), r"capturable=True\) cannot be carried"),
        (lambda params: SGD(params, lr=torch.tensor(0.1, device="meta")), "lr cannot be carried .* on meta"),
        (lambda params: SGD(params, lr=torch.tensor(0.1, requires_grad=True)), "with a gradient"),
        (lambda params: SGD(params, lr=np.float32(0.1)), "numpy.float32"),
        (lambda params: SGD([*params, nn.Parameter(torch.ones(7))]), "belongs to no prepared model"),
    ],
)
def test_what_servers_cannot_do_the_same_way_is_refused_before_the_first_step(build: Any, words: str) -> None:
    params = [nn.Parameter(torch.ones(3))]
    optimizer = build(params) if "meta" not in words else _with_meta_rate(params)
    with pytest.raises(UsageError, match=words):
        describe(optimizer, params)


def _with_meta_rate(params: list[nn.Parameter]) -> SGD:
    """As if on another device; torch looks at its value when it is given to the constructor."""
    optimizer = SGD(params)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    return optimizer


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_momentum_on_halves_is_refused_where_torch_does_not_go_element_by_element(kind: str) -> None:
    params = [nn.Parameter(torch.ones(3).bfloat16())]
    optimizer = SGD(params, **KINDS[kind])
    carried = describe(optimizer, params)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(UsageError, match=f"Leave {kind} out"):
        describe(optimizer, params)
    with pytest.raises(UsageError, match=f"Leave {kind} out"):
        hyper(optimizer, carried)


def test_parameters_with_gaps_are_refused() -> None:
    param = nn.Parameter(torch.ones(4, 6)[:, ::2])
    with pytest.raises(UsageError, match="contiguous"):
        describe(SGD([param]), [param])


def test_groups_that_come_while_a_run_trains_are_refused_with_what_to_do() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = SGD(params[:1])
    carried = describe(optimizer, params)
    optimizer.add_param_group({"params": params[1:]})
    with pytest.raises(UsageError, match="put all into it before the loop"):
        hyper(optimizer, carried)


def test_numpy_doubles_and_the_scripts_own_entries_come_along() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = SGD([{"params": [param], "layer": 3, "fn": print}], lr=np.float64(0.1))
    options = over_the_wire(describe(optimizer, [param])).groups[0].options
    assert type(options["lr"]) is float and options["layer"] == 3 and "fn" not in options


def test_a_closure_is_refused() -> None:
    refuse_closure(None)
    with pytest.raises(UsageError, match="closure"):
        refuse_closure(lambda: 0.0)
