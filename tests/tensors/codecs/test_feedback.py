"""Error feedback: nothing is lost, whatever a codec leaves out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors.codecs import parse
from paceline.tensors.codecs.base import Shapes, count
from paceline.tensors.codecs.feedback import kept_at_first, kept_count, send
from tests.tensors.codecs.drawn import NAMES, WITH_FEEDBACK, seeds, shapes, some_values

steady = st.sampled_from(["normal", "zeros", "equal", "large"])


@given(st.sampled_from(WITH_FEEDBACK), shapes, st.lists(steady, min_size=1, max_size=6), seeds)
def test_what_was_sent_and_what_is_kept_is_what_was_given(
    name: str, shapes: Shapes, kinds: list[str], seed: int
) -> None:
    codec, total = parse(name), count(shapes)
    kept, out = kept_at_first(codec, shapes), torch.empty(total)
    sent, given, largest = torch.zeros(total, dtype=torch.float64), torch.zeros(total, dtype=torch.float64), 0.0
    for step, kind in enumerate(kinds):
        values = some_values(shapes, seed + step, kind)
        given += values.double()
        new = torch.empty_like(kept)
        message = send(codec, values, shapes, step, kept, new)
        codec.decode(message, shapes, step, out)
        sent, kept = sent + out.double(), new
        largest = max([largest, *values.abs().tolist(), *out.abs().tolist()])
    difference = (sent + kept[:total].double() - given).abs()
    assert (difference <= 1e-6 * largest * len(kinds)).all()


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_shown_once_and_not_kept(name: str, odd: float) -> None:
    """A script that leaves out a step with such a gradient goes on behind it, as it would without a codec."""
    codec, shapes = parse(name), [torch.Size((40, 30)), torch.Size((7,))]
    old, out = kept_at_first(codec, shapes), torch.empty(count(shapes))
    seen = []
    for step, value in enumerate((1.0, odd, 1.0, 1.0)):
        values = some_values(shapes, step, "normal")
        values[::5] = value
        new = torch.empty_like(old)
        codec.decode(send(codec, values, shapes, step, old, new), shapes, step, out)
        assert new.isfinite().all()
        seen.append(bool(out.isfinite().all()))
        old = new
    assert [seen[0], *seen[2:]] == [True, True, True]
    assert not seen[1] or name.startswith("randomk"), "of what is drawn at random some may not be sent"


@given(st.sampled_from(["topk:0.3", "randomk:0.5"]), shapes, seeds)
def test_what_is_sent_as_it_is_leaves_no_rounding(name: str, shapes: Shapes, seed: int) -> None:
    codec, total = parse(name), count(shapes)
    kept = kept_at_first(codec, shapes)
    values = some_values(shapes, seed, "mixed")
    given, out, new = values.clone(), torch.empty(total), torch.empty_like(kept)
    codec.decode(send(codec, values, shapes, 1, kept, new), shapes, 1, out)
    assert torch.equal(out + new[:total], given)


@given(st.sampled_from(NAMES), shapes, seeds)
def test_the_same_can_be_sent_again_and_goes_on_from_what_was_written_down(
    name: str, shapes: Shapes, seed: int
) -> None:
    """A share that is computed again starts from what was kept before; so does a run from a checkpoint."""
    codec = parse(name)
    first = kept_at_first(codec, shapes)
    assert first.numel() == kept_count(codec, shapes)
    second, third = torch.empty_like(first), torch.empty_like(first)
    send(codec, some_values(shapes, seed, "normal"), shapes, 1, first, second)
    message = send(codec, some_values(shapes, seed + 1, "normal"), shapes, 2, second, third)
    captured = second.numpy().tobytes()
    restored = torch.frombuffer(bytearray(captured), dtype=torch.float32) if captured else torch.empty(0)
    again = torch.empty_like(first)
    assert torch.equal(send(codec, some_values(shapes, seed + 1, "normal"), shapes, 2, restored, again), message)
    assert torch.equal(again, third)


@pytest.mark.parametrize("name", ["topk:0.01", "randomk:0.01", "powersgd:1", "onebit"])
def test_every_value_is_sent_in_the_end(name: str) -> None:
    """However little is sent of each: what stays behind does not grow."""
    codec, shapes, total = parse(name), [(12, 10), (10,)], 130
    values, out = some_values(shapes, 5, "normal"), torch.empty(total)
    kept, sent = kept_at_first(codec, shapes), torch.zeros(total)
    for step in range(520):
        new = torch.empty_like(kept)
        codec.decode(send(codec, values.clone(), shapes, step, kept, new), shapes, step, out)
        sent, kept = sent + out, new
    assert (sent / 520 - values).norm() < 0.4 * values.norm()
