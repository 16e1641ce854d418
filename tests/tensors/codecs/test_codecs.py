"""What every codec promises: its size, its error, the same bits again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.tensors.codecs import TABLE, parse
from paceline.tensors.codecs.base import Codec, Shapes
from paceline.tensors.codecs.powersgd import orthonormal
from paceline.tensors.codecs.randomk import drawn_places
from paceline.tensors.codecs.topk import largest_places
from tests.tensors.codecs.drawn import NAMES, kinds, seeds, shapes, some_values, tries

MLP = [(2048, 784), (2048,), (2048, 2048), (2048,), (10, 2048), (10,)]
FP32 = 4 * 5_824_522


def decoded(codec: Codec, message: torch.Tensor, shapes: Shapes, like: torch.Tensor, seed: int) -> torch.Tensor:
    out = torch.full_like(like, 7.0)
    codec.decode(message, shapes, seed, out)
    return out


@given(tries())
def test_what_is_decoded_is_within_the_stated_error(drawn: tuple[Codec, Shapes, torch.Tensor, int]) -> None:
    codec, shapes, values, seed = drawn
    given = values.clone()
    message = codec.encode(values, shapes, seed, codec.start(shapes))
    assert torch.equal(values, given), "encoding changes nothing"
    back = decoded(codec, message, shapes, values, seed)
    assert torch.isfinite(back).all()
    assert ((back.double() - values.double()).abs() <= codec.bound(values, shapes).double()).all()


@given(tries())
def test_a_message_has_the_stated_size(drawn: tuple[Codec, Shapes, torch.Tensor, int]) -> None:
    codec, shapes, values, seed = drawn
    message = codec.encode(values, shapes, seed, codec.start(shapes))
    assert message.dtype == torch.uint8 and message.dim() == 1
    assert message.numel() == codec.nbytes(shapes)


@given(tries())
def test_the_same_values_give_the_same_bits(drawn: tuple[Codec, Shapes, torch.Tensor, int]) -> None:
    codec, shapes, values, seed = drawn
    once, twice = (codec.encode(values.clone(), shapes, seed, codec.start(shapes)) for _ in range(2))
    assert torch.equal(once, twice)
    first, second = (decoded(codec, once, shapes, values, seed) for _ in range(2))
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@given(shapes, kinds, seeds, st.sampled_from([name for name in NAMES if parse(name).summable]))
def test_sums_of_messages_mean_sums_of_values(shapes: Shapes, kind: str, seed: int, name: str) -> None:
    codec = parse(name)
    left, right = some_values(shapes, seed, kind), some_values(shapes, seed + 1, kind)
    a, b = (codec.encode(values, shapes, seed, codec.start(shapes)) for values in (left, right))
    together = (a.view(torch.float32) + b.view(torch.float32)).view(torch.uint8)
    want = codec.encode(left + right, shapes, seed, codec.start(shapes))
    assert torch.equal(together, want)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_is_not_hidden(name: str) -> None:
    """A run that diverges must show it."""
    codec = parse(name)
    for bad in (float("nan"), float("inf")):
        values = torch.ones(600)
        values[300] = bad
        if name.startswith("randomk") or (name, bad) == ("fp16", float("inf")):
            continue  # one looks elsewhere, the other stops at 65504
        message = codec.encode(values, [(20, 30)], 1, codec.start([(20, 30)]))
        assert not torch.isfinite(decoded(codec, message, [(20, 30)], values, 1)).all()


@pytest.mark.parametrize(
    ("name", "most"),
    [("fp16", 0.5), ("bf16", 0.5), ("int8", 0.27), ("fp8", 0.27), ("topk:0.01", 0.025), ("randomk:0.01", 0.0101), ("powersgd:2", 0.02), ("onebit", 0.035)],
)  # fmt: skip
def test_sizes_on_the_mlp(name: str, most: float) -> None:
    assert parse(name).nbytes(MLP) <= most * FP32


# each kind's own


@given(seeds, st.integers(1, 70), st.integers(0, 70), kinds)
def test_the_largest_are_found_and_the_first_of_equal_ones(seed: int, total: int, number: int, kind: str) -> None:
    values = some_values([(total,)], seed, kind)
    number = min(number, total)
    sizes = values.abs().tolist()
    want = sorted(sorted(range(total), key=lambda place: (-sizes[place], place))[:number])
    assert largest_places(values, number).tolist() == want


@given(st.integers(0, 3000), st.integers(0, 3000), seeds)
def test_drawn_places_are_distinct_and_in_order(total: int, number: int, seed: int) -> None:
    number = min(number, total)
    places = drawn_places(total, number, seed).tolist()
    assert len(places) == number and places == sorted(set(places))
    assert all(0 <= place < total for place in places)


def test_drawn_places_reach_everything_and_follow_the_seed() -> None:
    seen = {place for seed in range(400) for place in drawn_places(100, 10, seed).tolist()}
    assert seen == set(range(100))
    assert drawn_places(1000, 10, 1).tolist() != drawn_places(1000, 10, 2).tolist()


@given(seeds, st.integers(1, 5))
def test_powersgd_sends_a_matrix_of_few_directions_whole(seed: int, rank: int) -> None:
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(50, rank, generator=random) @ torch.randn(rank, 60, generator=random)
    codec, shapes = parse(f"powersgd:{rank}"), [(50, 60)]
    memory = codec.start(shapes)
    for _ in range(3):
        message = codec.encode(matrix.view(-1), shapes, seed, memory)
    back = decoded(codec, message, shapes, matrix.view(-1), seed)
    assert (back.view(50, 60) - matrix).norm() <= 2e-3 * matrix.norm()


def test_powersgd_learns_the_largest_direction() -> None:
    """What is remembered makes each message better: a step of a power iteration."""
    random = torch.Generator().manual_seed(3)
    matrix = torch.randn(80, 90, generator=random)
    matrix += 4 * torch.randn(80, 1, generator=random) @ torch.randn(1, 90, generator=random)
    codec, shapes = parse("powersgd:1"), [(80, 90)]
    memory, errors = codec.start(shapes), []
    for _ in range(6):
        back = decoded(codec, codec.encode(matrix.view(-1), shapes, 0, memory), shapes, matrix.view(-1), 0)
        errors.append(float((back.view(80, 90) - matrix).norm()))
    best = float(torch.linalg.svdvals(matrix)[1:].norm())
    assert errors[-1] < errors[0] and errors[-1] <= 1.001 * best


def test_powersgd_goes_on_behind_a_gradient_of_zeros() -> None:
    codec, shapes = parse("powersgd:2"), [(20, 30)]
    memory = codec.start(shapes)
    codec.encode(torch.zeros(600), shapes, 0, memory)
    values = torch.randn(600, generator=torch.Generator().manual_seed(1))
    assert decoded(codec, codec.encode(values, shapes, 0, memory), shapes, values, 0).abs().sum() > 0


@given(seeds, st.integers(1, 6), kinds)
def test_orthonormal_rows(seed: int, rows: int, kind: str) -> None:
    matrix = orthonormal(some_values([(rows, 40)], seed, kind).view(rows, 40))
    product = matrix @ matrix.t()
    lengths = product.diagonal()
    assert ((lengths - lengths.round()).abs() < 1e-5).all() and (lengths < 1.1).all()
    assert (product - torch.diag(lengths)).abs().max() < 1e-5


# names


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_says_its_name(name: str) -> None:
    assert parse(name).name == name


def test_every_name_of_the_table_can_be_written_as_it_says() -> None:
    for name, entry in TABLE.items():
        assert parse(name + entry.number).name == name + entry.number


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int9", "There are: fp16 .*onebit"),
        ("int8:3", "takes no number; write int8$"),
        ("topk", "needs a number; write topk:0.01"),
        ("topk:2", "at most 1; write topk:0.01"),
        ("randomk:x", "at most 1; write randomk:0.01"),
        ("powersgd:0", "from 1 on; write powersgd:2"),
        ("powersgd:1.5", "from 1 on"),
    ],
)
def test_refusals_say_what_to_write(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(text)


def test_a_message_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes came where 268 are due"):
        parse("int8").decode(torch.zeros(3, dtype=torch.uint8), [(260,)], 0, torch.empty(260))
