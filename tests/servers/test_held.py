"""One fragment at a server: whatever comes in whatever order, it comes to the same bits, and so does a copy of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.servers.carried import describe, hyper
from paceline.servers.fragments import cut
from paceline.servers.held import Held, Said, as_bytes
from paceline.servers.messages import ABSENT, BY_VALUE, Apply, Lay, Part, Summed, Update, Value
from paceline.tensors.layout import Layout
from paceline.tensors.snapshot import Snapshot
from paceline.tensors.tree import Range
from tests.servers.test_parts import nodes, tree_sum
from tests.tensors.arithmetic import bits

LEAVES = 5
Spoken = tuple[Said, bytes]


class Script:
    """Two optimizers over one fragment, as a script has them: SGD with momentum on halves, and AdamW."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.params = [nn.Parameter(torch.randn(90)), nn.Parameter(torch.randn(40).bfloat16())]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(self.params[:1], lr=0.1),
            torch.optim.SGD(self.params[1:], lr=0.1, momentum=0.9),
        ]
        layout = Layout.of(self.params)
        (self.fragment,) = cut(layout, 2)
        self.carried = [describe(optimizer, self.params) for optimizer in self.optimizers]
        self.flats = layout.allocate()
        self.views = layout.views(self.flats)
        for view, param in zip(self.views, self.params, strict=True):
            view.copy_(param.detach())

    def held(self) -> Held:
        return Held(self.fragment, torch.float32, self.carried, since=1)

    def laid(self) -> Spoken:
        return Lay([0], 0), bytes(as_bytes(self.flats[0])) + bytes(Snapshot([[{}], [{}]]).packed())

    def update(self, optimizer: int, step: int, source: int, touched: Sequence[int] = ()) -> bytes:
        values = hyper(self.optimizers[optimizer], self.carried[optimizer])
        made = Update(optimizer, step, values, {optimizer: source}, {0: 2.0, 1: 3.0}, list(touched))
        return msgspec.msgpack.encode(made)


def say(held: Held, said: Said, body: bytes | memoryview) -> None:
    with held.changed:
        if not held.knows(said, memoryview(bytearray(body))):
            held.do(said, memoryview(bytearray(body)))


def bring(held: Held, part: Range, body: memoryview, leaves: int = LEAVES) -> None:
    """As a primary does it with a worker's part."""
    message = Part(1, 0, leaves, *part, [0])
    with held.changed:
        point = held.point(message)
        total = None if point.total is not None else point.add(part, held.read(body))
        if total is not None:
            held.do(Summed(1, 0, leaves, [0]), as_bytes(total))


def known(held: Held) -> tuple[object, ...]:
    """All that anybody could ever be answered."""
    totals = {at: bits(point.total) for at, point in held.points.items() if point.total is not None}
    return held.version, bits(held.value), bytes(held.states().packed()), totals


def copy_of(script: Script, held: Held) -> Held:
    fresh = script.held()
    for said, bodies in held.all_said():
        say(fresh, said, b"".join(bodies))
    return fresh


# sums


@given(st.integers(1, 12), st.integers(0, 2**31), st.data())
def test_parts_in_any_order_and_overlap_come_to_the_sum_in_tree_order(
    leaves: int, seed: int, data: st.DataObject
) -> None:
    script = Script()
    held = script.held()
    size = script.fragment.stop
    values = list(torch.randn(leaves, size, generator=torch.Generator().manual_seed(seed)) * 1e3)
    come: set[int] = set()
    for part in [*data.draw(st.lists(st.sampled_from(nodes(0, leaves)), max_size=20)), (0, leaves)]:
        come |= set(range(*part))
        bring(held, part, as_bytes(tree_sum(values, *part)), leaves)
        assert held.sealed(1, 0) == (len(come) == leaves)
    want = tree_sum(values, 0, leaves)
    assert bits(held.over(1, 0, 1.0)) == bits(want) and bits(held.over(1, 0, 7.0)) == bits(want / 7.0)


def test_sums_are_kept_for_whoever_is_a_step_behind_and_no_longer() -> None:
    held, zeros = Script().held(), bytes(4 * Script().fragment.stop)
    for step in (1, 2, 3):
        say(held, Summed(step, 0, LEAVES, [0]), zeros)
    assert not held.sealed(1, 0) and held.sealed(2, 0) and held.sealed(3, 0)
    with pytest.raises(ValueError, match="the sum of step 1, point 0 is not there"):
        held.over(1, 0, 1.0)


# optimizer steps


def history(script: Script, dice: random.Random, steps: int) -> list[list[Spoken]]:
    """What is said in each step, in one of the orders in which it can come: both optimizers, gradients that the script
    has left alone, changed or taken away, and weights that it has changed."""
    size = script.fragment.stop
    generator = torch.Generator().manual_seed(dice.randrange(1 << 31))

    def body() -> bytes:
        return bytes(as_bytes(torch.randn(size, generator=generator)))

    told: list[list[Spoken]] = []
    for step in range(1, steps + 1):
        said: list[Spoken] = [(Summed(step, call, LEAVES, [0]), body()) for call in range(2)]
        for optimizer in range(2):
            count, source = 2 * step - 1 + optimizer, dice.choice([0, 1, BY_VALUE, ABSENT])
            touched = [optimizer] * dice.randrange(2)
            said.append((Apply(count, [0]), script.update(optimizer, step, source, touched)))
            said += [(Value(count, False, [0]), body())] * (source == BY_VALUE)
            said += [(Value(count, True, [0]), body())] * len(touched)
        dice.shuffle(said)
        told.append(said)
    return told


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_steps_wait_for_what_they_need_and_come_to_the_same_in_any_order(first: int, second: int) -> None:
    script = Script()
    one, other = script.held(), script.held()
    for held in (one, other):
        say(held, *script.laid())
    order = random.Random(second)
    for said in history(script, random.Random(first), 3):
        for each in said:
            say(one, *each)
        again = [*said, *order.sample(said, 2)]
        order.shuffle(again)
        for each in again:
            say(other, *each)
        assert known(one) == known(other)
    assert one.version == 6


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.data())
def test_at_any_moment_a_copy_can_be_made_that_stays_equal(seed: int, data: st.DataObject) -> None:
    script, dice = Script(), random.Random(seed)
    spoken = [script.laid(), *(each for said in history(script, dice, 3) for each in said)]
    held = script.held()
    moment = data.draw(st.integers(0, len(spoken)))
    for each in spoken[:moment]:
        say(held, *each)
    copy = copy_of(script, held)
    assert known(copy) == known(held)
    for each in [*dice.sample(spoken[:moment], min(2, moment)), *spoken[moment:]]:
        say(held, *each)
        say(copy, *each)
        assert known(copy) == known(held)
    assert held.version == 6


def test_a_copy_that_was_begun_and_broken_off_is_completed_by_the_next_attempt() -> None:
    script = Script()
    held, copy = script.held(), script.held()
    spoken = [script.laid(), *(each for said in history(script, random.Random(1), 2) for each in said)]
    say(held, *spoken[0])
    said, bodies = next(iter(held.all_said()))
    say(copy, said, b"".join(bodies))
    for each in spoken[1:]:
        say(held, *each)
    for said, bodies in held.all_said():
        say(copy, said, b"".join(bodies))
    assert known(copy) == known(held) and held.version == 4


def test_a_step_gives_what_the_script_s_own_optimizers_give() -> None:
    script = Script()
    held, generator = script.held(), torch.Generator().manual_seed(4)
    say(held, *script.laid())
    for step in range(1, 5):
        summed = torch.randn(script.fragment.stop, generator=generator)
        say(held, Summed(step, 0, LEAVES, [0]), as_bytes(summed))
        for number, (param, optimizer) in enumerate(zip(script.params, script.optimizers, strict=True)):
            (piece,) = (piece for piece in script.fragment.pieces if piece.param == number)
            param.grad = (summed[piece.at : piece.at + param.numel()] / 2.0).to(param.dtype)
            optimizer.step()
            say(held, Apply(2 * step - 1 + number, [0]), script.update(number, step, 0))
            assert bits(held.value[piece.at : piece.at + param.numel()].to(param.dtype)) == bits(param)
    assert held.version == 8


def test_a_step_waits_for_the_one_before_it() -> None:
    script = Script()
    held = script.held()
    say(held, *script.laid())
    say(held, Apply(2, [0]), script.update(1, 1, ABSENT))
    assert held.version == 0
    say(held, Apply(1, [0]), script.update(0, 1, ABSENT))
    assert held.version == 2


def test_nothing_happens_before_values_are_laid_and_laying_them_again_changes_nothing() -> None:
    script = Script()
    held = script.held()
    say(held, Apply(1, [0]), script.update(0, 1, ABSENT))
    assert held.version == -1
    say(held, *script.laid())
    assert held.version == 1
    before = known(held)
    say(held, *script.laid())
    assert known(held) == before


# what is refused


@pytest.mark.parametrize(
    "said",
    [Lay([0], 0), Summed(1, 0, LEAVES, [0]), Value(1, False, [0])],
    ids=lambda said: type(said).__name__,
)
@pytest.mark.parametrize("size", [0, 4, 4096])
def test_a_body_of_another_size_is_refused_and_changes_nothing(said: Said, size: int) -> None:
    script = Script()
    held = script.held()
    before = known(held)
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        say(held, said, bytes(size))
    assert known(held) == before


def test_a_part_of_another_size_is_refused() -> None:
    held = Script().held()
    with pytest.raises(ValueError, match="12 bytes for a fragment of"):
        bring(held, (0, 1), memoryview(bytes(12)))


def test_another_number_of_leaves_is_refused() -> None:
    script = Script()
    held, body = script.held(), memoryview(bytearray(4 * script.fragment.stop))
    bring(held, (0, 1), body)
    with pytest.raises(ValueError, match="8 leaves at a point of 5"):
        bring(held, (0, 1), body, leaves=8)
    with pytest.raises(ValueError, match="no subtree"):
        bring(held, (1, 4), body)


def test_two_workers_that_say_different_things_of_one_step() -> None:
    script = Script()
    held = script.held()
    say(held, Apply(1, [0]), script.update(0, 1, 0))
    with pytest.raises(ValueError, match="workers do not agree on optimizer step 1"):
        say(held, Apply(1, [0]), script.update(0, 1, 1))


def test_a_step_that_nobody_can_read_is_refused() -> None:
    script = Script()
    held = script.held()
    say(held, *script.laid())
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        say(held, Apply(1, [0]), b"\xc1 nonsense")
    assert held.version == 0
    say(held, Apply(1, [0]), script.update(0, 1, ABSENT))
    assert held.version == 1
