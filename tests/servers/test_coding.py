"""Messages cut for fragments: what servers decode is what the message decodes to, wherever parameters are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.servers.coded import coding
from paceline.servers.coding import Excerpts
from paceline.servers.fragments import cut
from paceline.servers.held import Held
from paceline.servers.messages import Part, Stage
from paceline.tensors.codecs import parse
from paceline.tensors.codecs.feedback import kept_at_first
from paceline.tensors.encoding import Encoder, seed_of
from paceline.tensors.layout import Layout
from tests.tensors.codecs.drawn import NAMES
from tests.tensors.test_coded import PARAMS, TENSORS, share

LAYOUT = Layout.of(TENSORS, PARAMS)
FRAGMENTS = cut(LAYOUT, PARAMS)


@settings(max_examples=40)
@given(st.sampled_from(NAMES), st.integers(0, 1000), st.integers(1, 4))
def test_fragments_get_what_the_message_decodes_to(name: str, number: int, servers: int) -> None:
    encoder, seed = Encoder(TENSORS, PARAMS, parse(name)), seed_of(number, 0)
    grads, weight = share(number, 0)
    kept = kept_at_first(encoder.codec, encoder.shapes)
    message = encoder.encode(grads, weight, seed, kept, torch.empty_like(kept))
    whole = torch.zeros(encoder.elements)
    encoder.codec.decode(message.raw, encoder.shapes, seed, whole)
    wanted = LAYOUT.allocate()
    for view, index, value in zip(
        [LAYOUT.views(wanted)[index] for index in encoder.coded], encoder.coded, encoder.windows(whole), strict=True
    ):
        if grads[index] is not None:
            view.copy_(value)
    excerpts = Excerpts(coding(name, encoder), FRAGMENTS)
    assert {piece.param for k in excerpts.covered for piece in FRAGMENTS[k].pieces} == set(encoder.coded)
    batches = [excerpts.covered[:servers], excerpts.covered[servers:]]
    for batch in batches:
        body = excerpts.written(message, batch, seed)
        for fragment in (FRAGMENTS[k] for k in batch):
            got = excerpts.read(body, batch, fragment, seed)
            want = wanted[fragment.flat][fragment.start : fragment.stop]
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_excerpts_are_few_bytes_more_than_the_message() -> None:
    """The MLP of the benchmarks at two servers: each piece costs a word, and what its first and last block have in common
    with others; of PowerSGD's matrices each server gets one factor whole."""
    tensors = [torch.empty(shape) for shape in ((2048, 784), (2048,), (2048, 2048), (2048,), (10, 2048), (10,))]
    fragments = cut(Layout.of(tensors))
    for name, most in {"int8": 1.001, "onebit": 1.001, "topk:0.01": 1.001, "bf16": 1.001, "powersgd:2": 1.51}.items():
        encoder = Encoder(tensors, len(tensors), parse(name))
        kept = kept_at_first(encoder.codec, encoder.shapes)
        grads: list[torch.Tensor | None] = [torch.randn_like(tensor) for tensor in tensors]
        message = encoder.encode(grads, 1.0, 1, kept, torch.empty_like(kept))
        excerpts = Excerpts(coding(name, encoder), fragments)
        sent = sum(len(excerpts.written(message, excerpts.covered[half::2], 1)) for half in range(2))
        assert encoder.size < sent < most * encoder.size, name
        assert sent <= {"powersgd:2": 0.02, "topk:0.01": 0.025, "int8": 0.27}.get(name, 0.5001) * 4 * encoder.elements


@settings(max_examples=200)
@given(st.sampled_from(NAMES), st.binary(max_size=200), st.booleans())
def test_what_cannot_be_read_is_refused_in_a_sentence(name: str, raw: bytes, staged: bool) -> None:
    encoder = Encoder(TENSORS, PARAMS, parse(name))
    excerpts = Excerpts(coding(name, encoder), FRAGMENTS)
    number = excerpts.covered[0]
    held = Held(FRAGMENTS[number], torch.float32, [], since=1, excerpts=excerpts)
    message = Stage(0, 1, [0], coded=[number]) if staged else Part(0, 0, 4, 0, 1, [0], coded=[number])
    try:
        held.gradient(message, memoryview(bytearray(raw)))
    except ValueError:
        return
    words = 4 * len(FRAGMENTS[number].pieces)
    assert (len(raw) == words and not any(raw)) or len(raw) > words


def test_a_fragment_that_travels_as_it_is_takes_no_excerpts() -> None:
    excerpts = Excerpts(coding("int8", Encoder(TENSORS, PARAMS, parse("int8"))), FRAGMENTS)
    plain = next(k for k in range(len(FRAGMENTS)) if k not in excerpts.covered)
    held = Held(FRAGMENTS[plain], torch.float64, [], since=1, excerpts=excerpts)
    for numbers in ([plain], [99], [-1]):
        with pytest.raises(ValueError, match="as they are"):
            held.gradient(Part(0, 0, 4, 0, 1, [0], coded=numbers), memoryview(bytearray(8)))
