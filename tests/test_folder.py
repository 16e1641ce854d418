"""The run folder: all or nothing, one line a write, found by name."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline import folder as folder_module
from paceline.errors import UsageError
from paceline.folder import RunFolder, new_id, plain, write_atomically


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


# all or nothing


def test_a_file_is_written_whole_with_the_folders_above_it(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "file.bin"
    write_atomically(target, b"\x00one")
    write_atomically(target, b"two")
    assert target.read_bytes() == b"two"
    assert names(target.parent) == ["file.bin"]


class _Full:
    """A file on a disk that is full after two bytes."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data[:2])
        self._file.flush()
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"old")
    real = open
    monkeypatch.setattr(folder_module, "open", lambda path, mode: _Full(real(path, mode)), raising=False)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, b"new and longer")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_an_error_on_the_way_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, error: BaseException
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(type(error)):
        write_atomically(tmp_path / "file", b"data")
    assert names(tmp_path) == []


def test_a_reader_sees_the_old_or_the_new_never_half(tmp_path: Path) -> None:
    target = tmp_path / "file"
    sizes = [1 << 16, 1 << 17]
    write_atomically(target, b"a" * sizes[0])
    code = (
        "import sys; from pathlib import Path; from paceline.folder import write_atomically as w\n"
        f"[w(Path(sys.argv[1]), b'ab'[k % 2:k % 2 + 1] * {sizes}[k % 2]) for k in range(60)]"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(target)])
    seen = set()
    while writer.poll() is None:
        data = target.read_bytes()
        seen.add((data[:1], len(data), data.count(data[:1]) == len(data)))
    assert writer.returncode == 0
    assert seen <= {(b"a", sizes[0], True), (b"b", sizes[1], True)}


# names


def test_a_run_gets_its_folder_and_its_logs(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", "mine")
    assert run.id == "mine" and run.path == tmp_path / "runs" / "mine"
    assert names(run.path) == ["logs"]
    assert run.log_of("worker", 3) == run.path / "logs" / "worker-3.log"


def test_a_run_without_a_name_gets_one_of_its_own(tmp_path: Path) -> None:
    ids = [RunFolder.create(tmp_path, None).id for _ in range(5)]
    assert len(set(ids)) == 5
    assert all(len(name) == len(new_id()) for name in ids)


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "mine")
    with pytest.raises(
        UsageError,
        match=r"a run named 'mine' is in .* already: choose another --name, `paceline resume mine`, or remove",
    ):
        RunFolder.create(tmp_path, "mine")


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "-dash", "with space", "x" * 101, "new\nline"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="use letters, digits"):
        RunFolder.create(tmp_path, name)
    assert names(tmp_path) == []


def test_a_place_that_cannot_hold_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot make the run folder .*: Not a directory"):
        RunFolder.create(tmp_path / "file", "mine")


def make(runs: Path, *wanted: str) -> list[RunFolder]:
    """Runs made one after the other, far enough apart for the file system's clock."""
    made: list[RunFolder] = []
    for name in wanted:
        run = RunFolder.create(runs, name)
        run.event("started", "a test")
        run.write_json(run.config, {"started": time.time()})
        _wait_for_a_later_time(runs, run.path.stat().st_ctime)
        made.append(run)
    return made


def _wait_for_a_later_time(runs: Path, than: float) -> None:
    mark = runs / "mark"
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        mark.touch()
        later = mark.stat().st_ctime > than
        mark.unlink()
        if later:
            return
        time.sleep(0.002)
    raise AssertionError("the file system's clock stands still")


def test_runs_are_found_by_name_beginning_path_and_last(tmp_path: Path) -> None:
    make(tmp_path, "zebra", "apple-1", "apple-10", "middle")
    find = RunFolder.find
    assert find(tmp_path, "zebra").id == "zebra"
    assert find(tmp_path, "z").id == "zebra"
    assert find(tmp_path, "apple-1").id == "apple-1", "a whole name wins over a beginning"
    assert find(tmp_path, "last").id == "middle"
    assert find(tmp_path, str(tmp_path / "zebra")).path == tmp_path / "zebra"
    assert [run.id for run in RunFolder.all(tmp_path)] == ["zebra", "apple-1", "apple-10", "middle"]


def test_the_last_run_is_the_one_started_last_even_if_an_older_one_ends_later(tmp_path: Path) -> None:
    older, newer = make(tmp_path, "older", "newer")
    _wait_for_a_later_time(tmp_path, newer.path.stat().st_ctime)
    older.write_json(older.summary, {"exit": "finished"})
    assert RunFolder.find(tmp_path, "last").id == "newer"


def test_runs_that_cannot_be_told_apart_or_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run 'last' in .*`paceline runs` lists them"):
        RunFolder.find(tmp_path / "nowhere", "last")
    make(tmp_path, "apple-1", "apple-2")
    with pytest.raises(UsageError, match="'app' begins several runs: apple-1, apple-2"):
        RunFolder.find(tmp_path, "app")
    with pytest.raises(UsageError, match="no run 'pear'"):
        RunFolder.find(tmp_path, "pear")


def test_other_folders_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    assert RunFolder.all(tmp_path) == []


# lines


def test_events_carry_their_why(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    before = time.time()
    run.event("worker ended", "killed by SIGKILL", worker=2, exit_code=-9, speed=math.inf, place=tmp_path)
    run.event("finished", "all steps are done")
    first, second = run.read_lines(run.events)
    assert before <= first.pop("time") <= time.time()
    assert first == {
        "event": "worker ended",
        "why": "killed by SIGKILL",
        "worker": 2,
        "exit_code": -9,
        "speed": "inf",
        "place": str(tmp_path),
    }
    assert second["event"] == "finished"
    assert run.events.read_text().count("\n") == 2


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_metrics_that_are_no_numbers_are_still_json(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.metric(3, 1, {"loss": math.nan, "accuracy": 0.5})
    (line,) = run.metrics.read_text().splitlines()
    record = strict(line)
    assert (record["step"], record["epoch"], record["loss"], record["accuracy"]) == (3, 1, "nan", 0.5)


def test_a_summary_with_a_loss_that_is_no_number_is_still_json(tmp_path: Path) -> None:
    """`run.metrics` goes into the summary as it is; a diverged run's must be readable by other tools too."""
    run = RunFolder.create(tmp_path, "mine")
    run.write_json(run.summary, {"exit": "finished", "metrics": {"loss": math.nan, "norms": [math.inf, 1.0]}})
    assert strict(run.summary.read_text())["exit"] == "finished"


@pytest.mark.parametrize(
    ("value", "kept"), [(math.nan, "nan"), (-math.inf, "-inf"), (1.5, 1.5), ("x", "x"), (None, None)]
)
def test_plain_values(value: Any, kept: Any) -> None:
    assert plain(value) == kept


def test_an_event_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    RunFolder(tmp_path / "gone").event("finished", "nobody can read this")
    assert names(tmp_path) == []


def test_several_processes_may_write_one_file(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    code = (
        "import sys; from pathlib import Path; from paceline.folder import RunFolder\n"
        "run = RunFolder(Path(sys.argv[1]))\n"
        "for k in range(200): run.event('e', 'w' * 300, who=int(sys.argv[2]), k=k)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(run.path), str(who)]) for who in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    records = list(run.read_lines(run.events))
    assert len(records) == 600
    for who in range(3):
        assert [record["k"] for record in records if record["who"] == who] == list(range(200))


def test_broken_lines_and_files_are_skipped(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    assert list(run.read_lines(run.events)) == [] and run.read_json(run.summary) == {}
    run.events.write_bytes(b'{"event": "a"}\n{"event": "b\n\x00\x00\n{"event": "c"}\n{"ev')
    assert [record["event"] for record in run.read_lines(run.events)] == ["a", "c"]
    run.summary.write_text("[1, 2]")
    assert run.read_json(run.summary) == {}
    run.summary.write_text('{"exit": ')
    assert run.read_json(run.summary) == {}
    run.write_json(run.summary, {"exit": "finished", "path": tmp_path})
    assert run.read_json(run.summary) == {"exit": "finished", "path": str(tmp_path)}
