"""Shared memory on demand: made once, within limits, and refused in words."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cluster import memory
from paceline.cluster.kept import Kept
from paceline.cluster.memory import Segments, available_bytes, words
from paceline.wires.messages import Granted, Refused

MIB = 1 << 20


@pytest.fixture
def segments() -> Iterator[Segments]:
    kept = Kept()
    made = Segments(8 * MIB, kept)
    yield made
    kept.close()


def test_the_first_who_asks_makes_it_and_the_rest_share_it(segments: Segments) -> None:
    answer, fd = segments.grant("term-1/meet", MIB, 2)
    again, same = segments.grant("term-1/meet", MIB, 2)
    assert answer == again == Granted(MIB)
    assert fd is not None and fd == same
    assert os.fstat(fd).st_size == MIB
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:paceline-term-1-meet")
    assert not os.get_inheritable(fd)
    with mmap.mmap(fd, MIB) as one, mmap.mmap(fd, MIB) as two:
        one[MIB - 3 :] = b"end"
        assert two[MIB - 3 :] == b"end" and two[:4] == b"\0\0\0\0"


def test_the_pages_are_taken_at_once(segments: Segments) -> None:
    """A machine that runs out later would end a worker with SIGBUS in the middle of a step."""
    _, fd = segments.grant("a", MIB, 2)
    assert fd is not None
    assert os.fstat(fd).st_blocks * 512 >= MIB


def test_other_names_are_other_memory(segments: Segments) -> None:
    fds = [segments.grant(name, 4096, 2)[1] for name in ("term-1/meet", "term-1/slabs-0", "term-2/meet")]
    assert None not in fds
    assert len({os.fstat(fd).st_ino for fd in fds if fd is not None}) == 3


def test_workers_that_disagree_are_told_both_sizes(segments: Segments) -> None:
    segments.grant("term-1/slabs-0", 4096, 2)
    answer, fd = segments.grant("term-1/slabs-0", 8192, 2)
    assert fd is None
    assert answer == Refused("workers disagree on the size of term-1/slabs-0: 4096 and 8192 bytes")


def test_the_limit_is_for_all_segments_together(segments: Segments) -> None:
    assert segments.grant("a", 5 * MIB, 4)[1] is not None
    answer, fd = segments.grant("b", 4 * MIB, 4)
    assert fd is None and isinstance(answer, Refused)
    for part in (
        "shared memory is too small",
        "4 workers need 4 MiB",
        "3 MiB is free",
        "--shm-limit",
        "--transport gloo",
    ):
        assert part in answer.why
    assert segments.grant("a", 5 * MIB, 4)[0] == Granted(5 * MIB), "what was granted stays"
    assert segments.grant("c", 3 * MIB, 4)[0] == Granted(3 * MIB), "a refusal takes nothing"
    answer, fd = segments.grant("d", 1, 4)
    assert fd is None and isinstance(answer, Refused) and "0 B is free" in answer.why


def test_what_the_machine_has_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * MIB)
    for limit in (0, 100 * MIB):
        kept = Kept()
        segments = Segments(limit, kept)
        answer, fd = segments.grant("a", 3 * MIB, 2)
        assert fd is None and isinstance(answer, Refused) and "2 MiB is free" in answer.why
        assert segments.grant("a", 2 * MIB, 2)[0] == Granted(2 * MIB)
        kept.close()


def test_a_kernel_that_says_no_is_quoted_and_nothing_leaks(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    answer, fd = segments.grant("a", MIB, 2)
    assert fd is None and isinstance(answer, Refused)
    assert "1 MiB asked for, the kernel said No space left on device" in answer.why and "--transport gloo" in answer.why
    monkeypatch.undo()
    assert segments.grant("a", MIB, 2)[0] == Granted(MIB), "it can be asked for again"


def test_what_is_forgotten_can_be_given_again(segments: Segments) -> None:
    """Groups of terms that are over; their room is free, and the name stands for new memory."""
    fds = {name: segments.grant(name, 3 * MIB, 2)[1] for name in ("group-2/memory-1", "group-3/memory-1")}
    assert isinstance(segments.grant("group-4/memory-1", 3 * MIB, 2)[0], Refused)
    segments.forget_before(4, pending=False)
    old, kept = fds["group-2/memory-1"], fds["group-3/memory-1"]
    assert old is not None and kept is not None
    with pytest.raises(OSError):
        os.fstat(old)
    assert segments.grant("group-3/memory-1", 3 * MIB, 2) == (Granted(3 * MIB), kept), "the other one stays"
    assert segments.grant("group-4/memory-1", 3 * MIB, 2)[0] == Granted(3 * MIB)
    segments.forget_before(6, pending=True)
    assert segments.grant("group-3/memory-1", MIB, 2)[0] == Granted(MIB), "of another size, too"
    assert isinstance(segments.grant("state-6", 8 * MIB, 2)[0], Refused)
    segments.forget_before(9, pending=False)
    segments.forget_before(9, pending=False)
    assert segments.grant("state-9", 8 * MIB, 2)[0] == Granted(8 * MIB)
    segments.forget_before(9, pending=True)
    assert segments.grant("state-9", 8 * MIB, 2)[0] == Granted(8 * MIB), "somebody may still come for it"
    segments.forget_before(9, pending=False)
    assert segments.grant("group-9", 8 * MIB, 2)[0] == Granted(8 * MIB)


def test_whoever_has_a_forgotten_segment_mapped_keeps_it(segments: Segments) -> None:
    _, fd = segments.grant("group-1", 4096, 2)
    assert fd is not None
    with mmap.mmap(fd, 4096) as held:
        held[:4] = b"held"
        segments.forget_before(3, pending=False)
        _, again = segments.grant("group-1", 4096, 2)
        assert again is not None
        with mmap.mmap(again, 4096) as fresh:
            assert fresh[:4] == b"\0\0\0\0"
        assert held[:4] == b"held"


def test_closing_gives_everything_back() -> None:
    kept = Kept()
    segments = Segments(0, kept)
    fds = [segments.grant(name, 4096, 1)[1] for name in "abc"]
    kept.close()
    for fd in fds:
        assert fd is not None
        with pytest.raises(OSError):
            os.fstat(fd)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (4 * MIB, "4 MiB"),
        (1234567, "1.18 MiB"),
        (3 << 30, "3 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes_in_words(size: int, text: str) -> None:
    assert words(size) == text


@pytest.mark.parametrize("size", [1000, 1023, 1010 * MIB, 1023 << 30, 5000 << 40])
def test_sizes_are_never_written_with_an_exponent(size: int) -> None:
    assert "e" not in words(size), words(size)


# what is free


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of /proc and /sys, made up."""
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n")
    return tmp_path


def limit(machine: Path, most: str, now: int, reclaimable: int = 0) -> None:
    group = machine / "sys/fs/cgroup"
    (group / "memory.max").write_text(most + "\n")
    (group / "memory.current").write_text(f"{now}\n")
    (group / "memory.stat").write_text(f"anon {now - reclaimable}\nfile {reclaimable}\ninactive_file {reclaimable}\n")


def test_this_machine_has_something() -> None:
    assert 0 < available_bytes() < 1 << 62


def test_without_a_cgroup_the_machine_is_the_limit(machine: Path) -> None:
    assert available_bytes() == 8000 * 1024
    limit(machine, "max", 5)
    assert available_bytes() == 8000 * 1024


def test_a_cgroup_can_be_tighter_than_the_machine(machine: Path) -> None:
    limit(machine, str(1000 * 1024), 400 * 1024)
    assert available_bytes() == 600 * 1024
    limit(machine, str(1 << 50), 0)
    assert available_bytes() == 8000 * 1024


def test_cached_files_of_a_cgroup_are_as_good_as_free(machine: Path) -> None:
    """Reading a data set fills a container with page cache, which the kernel gives back when asked."""
    limit(machine, str(1000 * 1024), 990 * 1024, reclaimable=900 * 1024)
    assert available_bytes() >= 900 * 1024


def test_files_that_cannot_be_read_limit_nothing(machine: Path) -> None:
    (machine / "proc/meminfo").unlink()
    assert available_bytes() == 1 << 62
    (machine / "proc/meminfo").write_text("MemAvailable: 5 kB\n")
    (machine / "sys/fs/cgroup/memory.max").write_text("not a number")
    assert available_bytes() == 5 * 1024
