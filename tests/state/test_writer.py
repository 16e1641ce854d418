"""Writing checkpoints: whole or not there, the newest few, by whom it may be; an error ends nothing."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from paceline.errors import UsageError
from paceline.state import places
from paceline.state import writer as writer_module
from paceline.state.checkpoint import SHARD, Removed, listed, name_of, newest_good, sweep
from paceline.state.writer import Writer
from tests.state.disk import Disk, small_disk
from tests.state.writing import Whole, body_of, write


def steps(address: str | Path) -> list[int]:
    return [checkpoint.step for checkpoint in listed(str(address))]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert steps(tmp_path) == [4, 5]


def test_a_good_one_never_makes_room_for_a_damaged_later_one(tmp_path: Path) -> None:
    """The run went on from step 4 because 9 is damaged: 5 is newer in the run's own order, until 9 comes again."""
    write(tmp_path, 4, 9)
    (tmp_path / "step-00000009" / "state-0000.bin").write_bytes(b"")
    write(tmp_path, 5, keep=1)
    assert steps(tmp_path) == [5, 9]
    write(tmp_path, 9, keep=1)
    found = newest_good(str(tmp_path), print)
    assert steps(tmp_path) == [9] and found is not None and bytes(found.read()) == body_of(9)


class Held(Whole):
    """A body whose soundness is not known until the test says so."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)
        self.settled = threading.Event()

    def why_not(self) -> str:
        return "" if self.settled.wait(30) else "nobody settled it"


def shards(folder: Path) -> set[int]:
    return {file.stat().st_ino for file in folder.glob("state-*.bin")}


def test_a_removed_one_is_written_over_by_the_next(tmp_path: Path) -> None:
    """Longer, shorter, of fewer files: what is there in the end is what was written, whole pages of it past the page cache."""
    writer = Writer(str(tmp_path), 1, lambda: True, print)
    reused = []
    for step, size in enumerate((3 * SHARD // 2, 100, 5000, 0, 2 * SHARD), 1):
        before = {inode for folder in tmp_path.glob(".*.removed") for inode in shards(folder)}
        memory = mmap.mmap(-1, size or 1)
        memory.write(random.Random(step).randbytes(size))
        body = Whole(b"")
        body.memory = memoryview(memory)[:size]
        writer.write(step, body)
        writer.wait()
        (only,) = listed(str(tmp_path))
        assert only.step == step and only.read() == body.memory
        assert len(os.listdir(tmp_path / only.name)) == 1 + -(-size // SHARD), "no file of the one before stays"
        reused.append(len(before & shards(tmp_path / only.name)))
    assert reused == [0, 0, 1, 0, 1], (
        "the first two had nothing to take, the fourth has no shard, the fifth took the third's"
    )
    sweep(str(tmp_path))
    assert os.listdir(tmp_path) == [name_of(5)]


def link_to_it(shard: Path, kept: Path) -> None:
    os.link(shard, kept)


def leave_a_link(shard: Path, kept: Path) -> None:
    shard.rename(kept)
    shard.symlink_to(kept)


def leave_a_link_to_the_folder(shard: Path, kept: Path) -> None:
    archive = kept.with_name("archive")
    shard.parent.rename(archive)
    shard.parent.symlink_to(archive)
    kept.symlink_to(archive / shard.name)


def read_it(shard: Path, kept: Path) -> None:
    kept.symlink_to(f"/proc/self/fd/{os.open(shard, os.O_RDONLY)}")


def map_it(shard: Path, kept: Path) -> None:
    with open(shard, "rb") as file:
        MAPPED[kept] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


MAPPED: dict[Path, mmap.mmap] = {}


@pytest.mark.parametrize("keep", [link_to_it, leave_a_link, leave_a_link_to_the_folder, read_it, map_it])
def test_what_somebody_has_of_a_removed_one_is_not_written_over(
    tmp_path: Path, keep: Callable[[Path, Path], None]
) -> None:
    """A backup by `cp --link`, an archive with links in its place, a copy that is being made."""
    kept = tmp_path / "mine.bin"
    write(tmp_path / "it", 1)
    keep(tmp_path / "it" / name_of(1) / "state-0000.bin", kept)
    assert write(tmp_path / "it", 2, 3, 4, keep=1) == []
    assert steps(tmp_path / "it") == [4] and bytes(listed(str(tmp_path / "it"))[0].read()) == body_of(4)
    try:
        assert (MAPPED[kept][:] if kept in MAPPED else kept.read_bytes()) == body_of(1)
    finally:
        if keep is read_it:
            os.close(int(os.readlink(kept).rpartition("/")[2]))
        elif keep is map_it:
            MAPPED.pop(kept).close()


def spoil_with_a_folder(shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


def spoil_with_a_pipe(shard: Path) -> None:
    shard.unlink()
    os.mkfifo(shard)


@pytest.mark.parametrize("spoil", [spoil_with_a_folder, spoil_with_a_pipe])
def test_what_is_odd_in_a_removed_one_costs_no_checkpoint(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    write(tmp_path, 1)
    spoil(tmp_path / name_of(1) / "state-0000.bin")
    assert write(tmp_path, 2, 3, keep=1) == []
    assert steps(tmp_path) == [3] and bytes(listed(str(tmp_path))[0].read()) == body_of(3)


def test_a_draft_that_somebody_else_has_swept_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Main was thought lost, and another one writes: what it sweeps away must not be missing in a published one."""
    told: list[str] = []
    body = Held(body_of(2))
    writer = Writer(str(tmp_path), 3, lambda: True, told.append)
    writer.write(2, body)
    deadline = time.monotonic() + 30
    while not (drafts := list(tmp_path.glob(".step-*/state-0000.bin"))):
        assert time.monotonic() < deadline
    drafts[0].unlink()
    body.settled.set()
    writer.wait()
    assert "somebody else has removed" in told[0] and steps(tmp_path) == []


@pytest.mark.parametrize("moment", ["found", "opened"])
def test_a_sweep_that_meets_a_publish_leaves_it_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Main was thought lost, and the draft it publishes has been found, or opened, by whoever sweeps."""
    body, rename, look, told = Held(body_of(2)), os.rename, os.scandir, list[str]()
    writer, sweeper = Writer(str(tmp_path), 3, lambda: True, told.append), threading.get_ident()
    writer.write(2, body)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".step-*/state-0000.bin")):
        assert time.monotonic() < deadline

    def publish_now() -> None:
        body.settled.set()
        writer.wait()

    def renaming(path: Any, to: Any) -> None:
        if threading.get_ident() == sweeper and moment == "found":
            publish_now()
        rename(path, to)

    def looking(at: Any) -> Any:
        if isinstance(at, int) and "step-" in os.readlink(f"/proc/self/fd/{at}"):
            publish_now()
        return look(at)

    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "scandir", looking)
    sweep(str(tmp_path))
    assert (
        body.settled.is_set()
        and steps(tmp_path) == ([2] if moment == "found" else [])
        and len(told) == (moment != "found")
    )
    assert [bytes(found.read()) for found in listed(str(tmp_path))] == [body_of(2)] * (moment == "found")


@pytest.mark.parametrize("kind", ["fuse.sshfs", "fuse", "fuseblk", "ext4", "nfs4"])
def test_a_file_system_of_a_process_is_known_by_its_mount(kind: str) -> None:
    mounts = f"22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n31 22 0:44 / /mnt/x rw shared:5 master:1 - {kind} me@there:/ rw\n"
    assert places.is_fuse(os.makedev(0, 44), mounts) == kind.startswith("fuse")
    assert not places.is_fuse(os.makedev(254, 0), mounts)


def test_where_others_cannot_be_seen_a_removed_one_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "is_fuse", lambda device, mounts: True)
    write(tmp_path, 1)
    before = shards(tmp_path / name_of(1))
    with open(tmp_path / name_of(1) / "state-0000.bin", "rb") as reader:
        assert write(tmp_path, 2, 3, keep=1) == []
        assert reader.read() == body_of(1)
    assert steps(tmp_path) == [3] and not before & shards(tmp_path / name_of(3))


def test_who_reads_one_that_is_removed_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SHARD", 1000)
    writer = Writer(str(tmp_path), 1, lambda: True, print)
    for step in (1, 2):
        writer.write(step, Whole(bytes(5000)))
        writer.wait()
    (second,) = listed(str(tmp_path))
    reading = second._pieces(second.manifest())
    assert next(reading) == bytes(1000)
    for step in (3, 4):
        writer.write(step, Whole(b"x" * 5000))
        writer.wait()
    with pytest.raises(Removed, match="was removed while it was read"):
        list(reading)


def test_what_a_dead_writer_left_is_swept_away(tmp_path: Path) -> None:
    (tmp_path / ".step-00000003.4711").mkdir()
    (tmp_path / ".step-00000003.4711" / "state-0000.bin").write_bytes(b"half")
    (tmp_path / ".step-00000003.4711.gone").mkdir()  # one of that name before it died while it swept
    (tmp_path / ".step-00000003.4711.gone" / "state-0000.bin").write_bytes(b"half")
    assert steps(tmp_path) == []
    write(tmp_path, 4)
    assert os.listdir(tmp_path) == ["step-00000004"]


@pytest.mark.parametrize(
    ("why_not", "allowed", "words"),
    [("it was changed by hand", True, "changed by hand"), ("", False, "another worker writes them")],
)
def test_what_may_not_be_published_leaves_nothing(tmp_path: Path, why_not: str, allowed: bool, words: str) -> None:
    write(tmp_path, 1)
    told: list[str] = []
    writer = Writer(str(tmp_path), 3, lambda: allowed, told.append)
    writer.write(2, Whole(b"x", why_not))
    writer.wait()
    assert len(told) == 1 and words in told[0]
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_nothing_is_to_be_seen_before_it_is_published(tmp_path: Path) -> None:
    told: list[str] = []
    asked = threading.Event()
    body = Held(b"x" * 1000)
    writer = Writer(str(tmp_path), 3, lambda: asked.set() is None, told.append)
    writer.write(7, body)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".step-*/state-0000.bin")):
        assert time.monotonic() < deadline
    assert steps(tmp_path) == [] and writer.busy and not asked.is_set()
    body.settled.set()
    writer.wait()
    assert steps(tmp_path) == [7] and asked.is_set() and told == [] and not writer.busy


@pytest.mark.parametrize("refusing", [False, True])
@pytest.mark.parametrize("shift", [0, 64])
def test_a_body_is_whole_whether_or_not_it_can_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int, refusing: bool
) -> None:
    """On whole pages or not, with a tail that is no whole block, on a file system that can or cannot."""
    memory = mmap.mmap(-1, 5 * mmap.PAGESIZE)
    memory.write(random.Random(shift).randbytes(len(memory)))
    body = Whole(b"")
    body.memory = memoryview(memory)[shift : 3 * mmap.PAGESIZE + 1234]
    asked, change = [], fcntl.fcntl

    def may_refuse(fd: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            asked.append(flags)
            if refusing:
                raise OSError(errno.EINVAL, "cannot")
        return change(fd, command, flags)

    monkeypatch.setattr(places.fcntl, "fcntl", may_refuse)
    told: list[str] = []
    writer = Writer(str(tmp_path), 3, lambda: True, told.append)
    writer.write(1, body)
    writer.wait()
    assert told == [] and asked
    assert listed(str(tmp_path))[0].read() == body.memory


@pytest.fixture
def disk(tmp_path: Path) -> object:
    with small_disk(tmp_path / "disk") as made:
        yield made


@pytest.mark.parametrize("trouble", ["fill", "make_read_only"])
def test_a_disk_that_takes_no_more_is_told_once_and_the_old_ones_stay(disk: Disk, trouble: str) -> None:
    told: list[str] = []
    writer = Writer(str(disk.path), 2, lambda: True, told.append)
    big = bytes(range(256)) * 2000
    writer.write(1, Whole(big))
    writer.wait()
    assert told == []
    getattr(disk, trouble)()
    for step in (2, 3):
        writer.write(step, Whole(big))
        writer.wait()
    assert len(told) == 1 and told[0].startswith("no checkpoint at step 2: "), told
    assert "training goes on, older checkpoints stay" in told[0]
    assert steps(disk.path) == [1] and bytes(listed(str(disk.path))[0].read()) == big
    disk.free()
    writer.write(4, Whole(big))
    writer.wait()
    assert len(told) == 1 and steps(disk.path) == [1, 4]
    assert not [name for name in os.listdir(disk.path) if name.startswith(".")], "nothing half-written stays"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    assert "no checkpoint at step 3" in write(tmp_path / "checkpoints", 3)[0]


# any address


@pytest.fixture(params=["memory", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    yield f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/run"
    memory = fsspec.filesystem("memory")
    if memory.exists(f"/{tmp_path.name}"):
        memory.rm(f"/{tmp_path.name}", recursive=True)


def test_any_address(address: str) -> None:
    assert steps(address) == []
    assert write(address, 1, 2, 3, keep=2) == []
    assert steps(address) == [2, 3]
    assert bytes(listed(address)[1].read()) == body_of(3)
    listed(address)[0].sized()


def test_at_an_address_an_unfinished_one_is_passed_over_and_overtaken(address: str) -> None:
    write(address, 1, 2)
    files, root = fsspec.core.url_to_fs(address)
    files.rm(f"{root}/step-00000002/manifest.json")
    told: list[str] = []
    found = newest_good(address, told.append)
    assert found is not None and found.step == 1 and "never finished" in told[0]
    assert write(address, 2) == []
    assert bytes(listed(address)[1].check().shards[0].file.encode()) == b"state-0000.bin"


def test_at_an_address_a_damaged_one_is_found(address: str) -> None:
    write(address, 1)
    files, root = fsspec.core.url_to_fs(address)
    files.pipe_file(f"{root}/step-00000001/state-0000.bin", b"State of step 1")
    with pytest.raises(ValueError, match=r"checksum of state-0000\.bin does not fit"):
        listed(address)[0].check()


def test_a_lost_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "memory://lost"
    write(address, 1)

    def refuse(*arguments: object, **more: object) -> None:
        raise TimeoutError("the store does not answer")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(fsspec.filesystem("memory").__class__, "pipe_file", refuse)
            told = write(address, 2)
        assert len(told) == 1 and "the store does not answer" in told[0]
        assert steps(address) == [1]
    finally:
        fsspec.filesystem("memory").rm("/lost", recursive=True)


@pytest.mark.parametrize("address", ["nosuchscheme://x/y"])
def test_an_unknown_scheme_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="nosuchscheme"):
        write(address, 1)
