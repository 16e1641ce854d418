"""Checkpoints as files: checked when read, whatever happens to them, and the newest good one is used."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.state import writer
from paceline.state.checkpoint import Manifest, Shard, listed, newest_good
from tests.state.writing import Whole, body_of, write


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert write(tmp_path / "checkpoints", 10, 200) == []
    found = listed(str(tmp_path / "checkpoints"))
    assert [checkpoint.step for checkpoint in found] == [10, 200]
    assert bytes(found[1].read()) == body_of(200)
    assert found[1].check() == found[1].sized() == found[1].manifest()
    assert [str(path.relative_to(tmp_path)) for path in files(tmp_path)] == [
        "checkpoints/step-00000010/manifest.json",
        "checkpoints/step-00000010/state-0000.bin",
        "checkpoints/step-00000200/manifest.json",
        "checkpoints/step-00000200/state-0000.bin",
    ]


@given(st.binary(max_size=300), st.integers(1, 90))
def test_any_bytes_in_shards_of_any_size(body: bytes, shard: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(os, "fsync", lambda fd: None)  # hundreds of examples: no power cut is tried here
        patch.setattr(writer, "SHARD", shard)
        patch.setattr(writer, "_PIECE", 7)
        told: list[str] = []
        one = writer.Writer(folder, 1, lambda: True, told.append)
        one.write(5, Whole(body))
        one.wait()
        (found,) = listed(folder)
        assert bytes(found.read()) == body and told == []
        assert len(found.manifest().shards) == -(-len(body) // shard)


@given(
    body=st.binary(min_size=1, max_size=200),
    which=st.integers(0, 99),
    kind=st.sampled_from(["flip", "cut", "grow", "remove"]),
    at=st.integers(0, 9999),
    bit=st.integers(0, 7),
)
def test_any_flip_or_cut_of_any_file_is_found(body: bytes, which: int, kind: str, at: int, bit: int) -> None:
    """Of a manifest too, down to its blanks; and a file that is gone, or has grown."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(os, "fsync", lambda fd: None)  # hundreds of examples: no power cut is tried here
        patch.setattr(writer, "SHARD", 40)
        one = writer.Writer(folder, 1, lambda: True, print)
        one.write(3, Whole(body))
        one.wait()
        found = files(Path(folder))
        path = found[which % len(found)]
        raw = bytearray(path.read_bytes())
        at %= len(raw)
        if kind == "flip":
            raw[at] ^= 1 << bit
        elif kind == "cut":
            del raw[at:]
        else:
            raw += bytes([bit])
        path.write_bytes(raw)
        if kind == "remove":
            path.unlink()
        (damaged,) = listed(folder)
        for look in (damaged.check, damaged.read):
            with pytest.raises(ValueError, match="step-00000003"):
                look()


def test_a_checkpoint_under_another_ones_name_is_found(tmp_path: Path) -> None:
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
    with pytest.raises(ValueError, match="checkpoint of step 1, under another's name"):
        listed(str(tmp_path))[1].check()


def test_a_format_of_the_future_is_named() -> None:
    raw = Manifest(1, 0.0, [Shard("a", 1, "2")], format=99).encode()
    with pytest.raises(ValueError, match="format 99"):
        Manifest.decode(raw)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flip": (lambda folder: flip(folder / "state-0000.bin"), "checksum of state-0000.bin does not fit"),
    "cut": (lambda folder: (folder / "state-0000.bin").write_bytes(b"st"), "does not have its 15 bytes"),
    "no shard": (lambda folder: (folder / "state-0000.bin").unlink(), "state-0000.bin: No such file"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest"),
    "manifest flipped": (lambda folder: flip(folder / "manifest.json"), "its manifest cannot be read"),
    "manifest empty": (lambda folder: (folder / "manifest.json").write_bytes(b""), "its manifest cannot be read"),
    "a file instead": (lambda folder: (shutil.rmtree(folder), folder.write_text("x")), "Not a directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_one_is_passed_over_aloud(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 1, 2)
    do, words = DAMAGES[damage]
    do(tmp_path / "step-00000002")
    told: list[str] = []
    found = newest_good(str(tmp_path), told.append)
    assert found is not None and found.step == 1
    (text,) = told
    assert words in text and "step-00000002" in text and "trying the one before" in text


@pytest.mark.parametrize(
    ("damage", "seen"), [("cut", True), ("no shard", True), ("no manifest", True), ("flip", False)]
)
def test_the_quick_look_sees_what_sizes_tell(tmp_path: Path, damage: str, seen: bool) -> None:
    write(tmp_path, 2)
    DAMAGES[damage][0](tmp_path / "step-00000002")
    (found,) = listed(str(tmp_path))
    if seen:
        with pytest.raises(ValueError, match="step-00000002"):
            found.sized()
    else:
        found.sized()


def test_none_good_is_none_and_nothing_is_deleted(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step-0000000{step}" / "state-0000.bin")
    told: list[str] = []
    before = files(tmp_path)
    assert newest_good(str(tmp_path), told.append) is None
    assert len(told) == 2 and files(tmp_path) == before


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for name in ("step-1", "step-00000001.old", "notes", ".step-00000002.77"):
        (tmp_path / name).mkdir()
    assert [checkpoint.step for checkpoint in listed(str(tmp_path))] == [1]


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert listed(str(tmp_path / "nowhere")) == []
    assert newest_good(str(tmp_path / "nowhere"), print) is None
