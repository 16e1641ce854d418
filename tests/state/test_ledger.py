"""Receipts in files: twice is once, half is nothing, and an error ends no run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.data.dealing import Dealing
from paceline.data.receipts import STEP, Receipt
from paceline.state import ledger
from paceline.state.ledger import Head, Ledger, read

DEALING = Dealing("batches", 2, 7, 10, "shuffled", 10, 4)


def receipt(step: int) -> Receipt:
    return Receipt(step, 0, 0, step, 4, 4, -step)


def begun(folder: Path, lineage: int = 0, first: int = 0) -> Ledger:
    def fail(text: str) -> None:
        pytest.fail(text)

    it = Ledger(folder, fail)
    it.begin(lineage, Head(first, 3, (DEALING,)))
    return it


def write(it: Ledger, *steps: int) -> None:
    for step in steps:
        it.add(receipt(step))
        it.write()


def add_as_main(it: Ledger, step: int) -> None:
    if it.add(receipt(step)):
        it.write()


def steps_in(folder: Path) -> list[int]:
    found: list[int] = read(folder).table()[:, STEP].tolist()
    return found


def test_what_was_written_is_read(tmp_path: Path) -> None:
    it = begun(tmp_path)
    write(it, 0, 1, 2)
    it.close()
    (lineage,) = read(tmp_path).lineages
    assert lineage.head == Head(0, 3, (DEALING,))
    assert [Receipt(*row) for row in lineage.receipts.tolist()] == [receipt(0), receipt(1), receipt(2)]


def test_main_writes_several_at_once_or_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(ledger.time, "monotonic", lambda: now)
    it = begun(tmp_path)
    for step in range(ledger._AT_ONCE):
        assert steps_in(tmp_path) == []
        add_as_main(it, step)
    assert steps_in(tmp_path) == list(range(ledger._AT_ONCE))
    add_as_main(it, ledger._AT_ONCE)
    assert len(steps_in(tmp_path)) == ledger._AT_ONCE
    now = 2 * ledger._EVERY_S
    add_as_main(it, ledger._AT_ONCE + 1)
    assert len(steps_in(tmp_path)) == ledger._AT_ONCE + 2
    it.close()


def test_the_next_main_fills_in_and_doubles_nothing(tmp_path: Path) -> None:
    first, second = begun(tmp_path), begun(tmp_path)
    for step in range(5):
        second.add(receipt(step))  # it keeps what it hears, and writes only once it is main
        if step < 3:
            write(first, step)
    first.close()
    write(second, 5)
    second.close()
    assert steps_in(tmp_path) == list(range(6))


def test_half_a_record_is_cut_off_and_written_again(tmp_path: Path) -> None:
    first, second = begun(tmp_path), begun(tmp_path)
    for step in range(4):
        second.add(receipt(step))
        write(first, step)
    first.close()
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 9)
    assert steps_in(tmp_path) == [0, 1, 2]
    second.close()
    assert steps_in(tmp_path) == [0, 1, 2, 3]


def test_a_resume_hides_what_it_trains_again(tmp_path: Path) -> None:
    old = begun(tmp_path)
    write(old, *range(10))
    old.close()
    assert old.next_lineage() == 1
    new = begun(tmp_path, 1, first=6)
    new.add(receipt(6)._replace(digest=99))
    new.close()
    book = read(tmp_path)
    assert book.resumes == [6]
    assert book.table()[:, STEP].tolist() == list(range(7)) and book.table()[6].tolist()[-1] == 99


def test_a_full_disk_is_told_once_and_leaves_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    it = Ledger(tmp_path / "receipts", told.append)
    it.begin(0, Head(0, 3, (DEALING,)))
    write(it, 0)
    monkeypatch.setattr(ledger.os, "pwrite", lambda fd, data, at: 5)
    write(it, *range(1, 2 * ledger._KEPT))
    monkeypatch.undo()
    write(it, 2 * ledger._KEPT)
    it.close()
    assert len(told) == 1 and "No space left" in told[0] and "step 1" in told[0]
    missing = set(range(2 * ledger._KEPT + 1)) - set(steps_in(tmp_path / "receipts"))
    assert missing == set(range(1, ledger._KEPT + 1)), "the last ones were still in memory"


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "receipts").write_text("a file in its place")
    it = Ledger(tmp_path / "receipts", told.append)
    it.begin(0, Head(0, 3, ()))
    write(it, 0, 1)
    it.close()
    assert len(told) == 1 and read(tmp_path / "receipts").lineages == ()


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b'{"first": 0, "seed": 0, "dealings": [{"what": 1}]}\n', b"\x00" * 99]
)
def test_a_damaged_head_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lineage-000.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"lineage-000\.bin"):
        read(tmp_path)


def test_nothing_is_there(tmp_path: Path) -> None:
    assert len(read(tmp_path / "none").table()) == 0
