"""Memory for large stretches of bytes."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from paceline.tensors.memory import on_huge_pages

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(memory: mmap.mmap) -> list[str]:
    """Of the mapping it lies in, as the kernel lists them."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(word, 16) for word in mapping.split(" ", 1)[0].split("-"))
        if start <= address < end:
            return re.findall(r"VmFlags: (.*)", mapping)[0].split()
    raise AssertionError("it lies nowhere")


@pytest.mark.skipif(not HUGE.exists(), reason="a kernel without huge pages")
def test_it_may_lie_on_huge_pages_and_is_nobody_elses() -> None:
    flags = flags_of(on_huge_pages(4 << 20))
    assert "hg" in flags and "sh" not in flags


def test_it_is_empty_and_can_be_written() -> None:
    memory = on_huge_pages(100)
    assert bytes(memory) == bytes(100)
    memory[:3] = b"abc"
    assert memory[:4] == b"abc\0"
