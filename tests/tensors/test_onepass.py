"""Sums in one pass over memory: the bits of `TreeSum`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.tensors import onepass
from paceline.tensors.onepass import OnePass
from paceline.tensors.sums import TreeSum
from paceline.tensors.tree import Plan, Root
from tests.tensors.arithmetic import same

LINE = 64
PAIR = Root((0, 1), ((0, 1, 2),))

needs_avx = pytest.mark.skipif(not onepass._supported(), reason="no AVX here, or no leave to run code of our own")


def lines(count: int, dtype: torch.dtype = torch.float32, skip: int = 0) -> torch.Tensor:
    """Numbers that fill so many cache lines and begin `skip` bytes behind the start of one."""
    memory = torch.zeros((count + 2) * LINE, dtype=torch.uint8)
    start = -memory.data_ptr() % LINE + skip
    return memory[start : start + count * LINE].view(dtype)


def of_any_size(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """From numbers so small that they have few bits left to those whose sums overflow."""
    draw = torch.Generator().manual_seed(seed)
    numbers = lines(count, dtype)
    exponents = torch.empty_like(numbers).uniform_(-45.0, 38.5, generator=draw)
    numbers.normal_(generator=draw).mul_(10.0**exponents)
    numbers[seed % len(numbers)] = (float("inf"), float("-inf"), float("nan"), -0.0)[seed % 4]
    return numbers


def check(root: Root, sources: Sequence[torch.Tensor], outs: int, divisor: float) -> None:
    count, dtype = sources[0].nbytes // LINE, sources[0].dtype
    before = [source.clone() for source in sources]
    results, want = [lines(count, dtype) for _ in range(outs)], lines(count, dtype)
    assert OnePass.can(sources, root.steps, results)
    OnePass(sources, root.steps, results).add(divisor)
    TreeSum(sources, root.steps, [want]).add(divisor)
    for result in results:
        none = want.isnan()  # torch itself does not say with which bits
        assert torch.equal(result.isnan(), none) and same(result[~none], want[~none])
    assert all(same(a, b) for a, b in zip(sources, before, strict=True)), "sources are read only"


@needs_avx
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [1.0, 7.0, 4.0, 0.5, 0.1, 3.0 * 65536.0])
@given(leaves=st.integers(1, 24), outs=st.integers(1, 5), count=st.integers(1, 9), seed=st.integers(0, 1000))
def test_the_bits_are_those_of_the_tree_sum(
    dtype: torch.dtype, divisor: float, leaves: int, outs: int, count: int, seed: int
) -> None:
    (root,) = Plan.of(leaves, leaves).roots
    check(root, [of_any_size(count, dtype, seed + leaf) for leaf in range(leaves)], outs, divisor)


@needs_avx
@given(workers=st.integers(2, 6), lost=st.integers(0, 5), leaves=st.integers(6, 24))
def test_parts_that_were_dealt_out_anew_after_a_death_are_added_in_the_same_order(
    workers: int, lost: int, leaves: int
) -> None:
    for root in Plan.of(leaves, workers).without(frozenset({lost % workers})).roots:
        check(root, [of_any_size(2, torch.float32, number) for number in range(len(root.sources))], 2, 7.0)


@needs_avx
def test_nothing_is_written_beyond_the_outs() -> None:
    memory = lines(5)
    memory.fill_(-1.0)
    OnePass([lines(3).fill_(1.0), lines(3).fill_(2.0)], PAIR.steps, [memory[16:-16]]).add(3.0)
    assert memory.tolist() == [-1.0] * 16 + [1.0] * 48 + [-1.0] * 16


@needs_avx
@pytest.mark.parametrize(
    "odd",
    [
        lines(2, skip=32),
        lines(2)[:24],
        lines(4)[::2],
        lines(2, torch.float64),
        lines(2, torch.int32),
        lines(3),
        lines(2)[:0],
    ],
    ids=["misaligned", "part of a line", "with gaps", "of another type", "whole numbers", "longer", "empty"],
)
def test_what_it_cannot_add_it_leaves_to_others(odd: torch.Tensor) -> None:
    even = lines(2)
    assert OnePass.can([even, even], PAIR.steps, [lines(2)])
    assert not OnePass.can([even, odd], PAIR.steps, [lines(2)])
    assert not OnePass.can([even, even], PAIR.steps, [odd])


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_avx), False], ids=["native", "libc"])
@given(data=st.data(), seed=st.integers(0, 99))
def test_copies_are_the_same_bytes_and_no_more(native: bool, data: st.DataObject, seed: int) -> None:
    """Any bytes, from anywhere; past the cache where all go to the beginning of a line."""
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 31, 63, 64, 65, 640, 4096, 70_001]), max_size=5))
    skips = data.draw(st.lists(st.sampled_from([0, 1, 32]), min_size=len(sizes), max_size=len(sizes)))
    generator = torch.Generator().manual_seed(seed)
    sources = [
        lines(size // LINE + 1, torch.uint8, skip)[:size].random_(generator=generator)
        for size, skip in zip(sizes, skips, strict=True)
    ]
    memories = [lines(size // LINE + 3, torch.uint8, 0 if native else 1).fill_(7) for size in sizes]
    outs = [memory.split([LINE, size, len(memory) - LINE - size]) for memory, size in zip(memories, sizes, strict=True)]
    made = onepass.Copying(
        [(address(source), address(out[1]), len(source)) for source, out in zip(sources, outs, strict=True)]
    )
    assert (made._code is not None) == (native and any(sizes)) or not any(sizes)
    made.make()
    for source, (before, out, behind) in zip(sources, outs, strict=True):
        assert torch.equal(out, source) and before.eq(7).all() and behind.eq(7).all()


@needs_avx
def test_too_many_sources_are_left_to_others() -> None:
    (root,) = Plan.of(25, 25).roots
    assert not OnePass.can([lines(1) for _ in range(25)], root.steps, [lines(1)])


def test_a_system_that_runs_no_code_of_ours_adds_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hardened:
        @staticmethod
        def mprotect(*_: object) -> int:
            return -1

    onepass._supported.cache_clear()
    onepass._kernel.cache_clear()
    monkeypatch.setattr(onepass, "_libc", Hardened)
    try:
        assert not OnePass.can([lines(1), lines(1)], PAIR.steps, [lines(1)])
    finally:
        onepass._supported.cache_clear()


RACE = """
import threading
import numpy as np
from paceline.tensors import onepass

size = 64 << 10
memory = [np.zeros(size + 64, dtype=np.uint8) for _ in range(4)]
a, b, c, d = (raw[-raw.ctypes.data % 64 :][:size] for raw in memory)
together = threading.Barrier(2)
def copies(into, out_of):
    for _ in range(300):
        if together.wait() == 0:
            onepass._kernel.cache_clear()
        together.wait()
        assert onepass.copy_past_cache(into, out_of)
other = threading.Thread(target=copies, args=(a, b))
other.start()
copies(c, d)
other.join()
"""


@needs_avx
def test_two_threads_that_make_the_first_copy_at_once() -> None:
    """Of two kernels that are made at once a cache keeps one: the other must outlive its call all the same."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode} {done.stderr}"
