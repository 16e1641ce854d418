"""Checkpoint files: whole or not there, checked when read, the newest good one is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.state.checkpoint import Writer, listed, newest_good


def write(folder: Path, *steps: int, keep: int = 9) -> list[str]:
    told: list[str] = []
    writer = Writer(folder, keep, told.append)
    for step in steps:
        writer.write(step, bytearray(b"state of step %d" % step))
    writer.wait()
    return told


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert write(tmp_path / "checkpoints", 10, 200) == []
    found = listed(tmp_path / "checkpoints")
    assert [checkpoint.step for checkpoint in found] == [10, 200]
    assert bytes(found[1].read()) == b"state of step 200"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000010.ckpt", "step-00000200.ckpt"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert [checkpoint.step for checkpoint in listed(tmp_path)] == [4, 5]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "checksum does not fit"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "checksum does not fit"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "only the beginning"),
        (lambda path: path.write_bytes(b""), "only the beginning"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
)
def test_a_damaged_one_is_passed_over_aloud(tmp_path: Path, damage: object, words: str) -> None:
    write(tmp_path, 1, 2)
    damage(listed(tmp_path)[1].path)  # type: ignore[operator]
    told: list[str] = []
    found = newest_good(tmp_path, told.append)
    assert found is not None and found.step == 1
    assert len(told) == 1 and words in told[0] and "step-00000002" in told[0]


def test_none_good_is_none_and_nothing_is_deleted(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for checkpoint in listed(tmp_path):
        flip(checkpoint.path)
    told: list[str] = []
    assert newest_good(tmp_path, told.append) is None
    assert len(told) == 2 and len(listed(tmp_path)) == 2


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert listed(tmp_path / "nowhere") == []
    assert newest_good(tmp_path / "nowhere", print) is None


def test_a_full_disk_is_told_and_the_old_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    told = write(tmp_path, 2)
    assert len(told) == 1 and "No space left on device" in told[0] and "training goes on" in told[0]
    assert os.listdir(tmp_path) == ["step-00000001.ckpt"], "nothing half-written stays"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    assert "no checkpoint at step 3" in write(tmp_path / "checkpoints", 3)[0]
