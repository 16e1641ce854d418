"""The leak fixture must catch what it is for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from paceline.cluster.store import runtime_folder
from tests.conftest import forget_run
from tests.leaks import Held, leaked, shared_files

pytest_plugins = ["pytester"]
BRIEF = 0.05


def test_nothing_is_found_where_nothing_is_left() -> None:
    before = Held.now()
    with socket.socket(), subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    os.close(os.memfd_create("paceline-brief"))
    assert leaked(before, BRIEF) == []


def test_a_living_child_is_found() -> None:
    before = Held.now()
    process = subprocess.Popen(["sleep", "60"])
    try:
        # Between fork and exec the child still bears this process's command.
        assert [words.split(":")[0] for words in leaked(before, BRIEF)] == [f"process {process.pid}"]
    finally:
        process.kill()
        process.wait()
    assert leaked(before, BRIEF) == []


def test_a_child_that_nobody_waited_for_is_found() -> None:
    before = Held.now()
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert leaked(before, BRIEF) == [f"process {process.pid}: a zombie: it has ended and nobody waited for it"]
    finally:
        process.wait()


def test_a_socket_is_found() -> None:
    before = Held.now()
    with socket.socket() as sock:
        (words,) = leaked(before, BRIEF)
        assert words.startswith("descriptor socket:[") and str(os.fstat(sock.fileno()).st_ino) in words
    assert leaked(before, BRIEF) == []


def test_a_memfd_is_found_though_another_of_its_name_was_there() -> None:
    first = os.memfd_create("paceline-same")
    before = Held.now()
    second = os.memfd_create("paceline-same")
    try:
        (words,) = leaked(before, BRIEF)
        assert "/memfd:paceline-same" in words and str(os.fstat(second).st_ino) in words
    finally:
        os.close(first)
        os.close(second)


def test_a_duplicated_descriptor_is_found() -> None:
    with socket.socket() as sock:
        before = Held.now()
        again = os.dup(sock.fileno())
        try:
            assert len(leaked(before, BRIEF)) == 1
        finally:
            os.close(again)


def test_a_thread_is_found_and_one_on_its_way_out_is_not() -> None:
    before = Held.now()
    go = threading.Event()
    thread = threading.Thread(target=go.wait, name="stays", daemon=True)
    thread.start()
    assert leaked(before, BRIEF) == ["thread stays"]
    go.set()
    assert leaked(before, 5.0) == []
    thread.join()


def test_threads_that_were_there_before_are_allowed() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait, daemon=True)
    thread.start()
    try:
        assert leaked(Held.now(), BRIEF) == []
    finally:
        go.set()
        thread.join()


def test_a_file_in_memory_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shm, own = tmp_path / "shm", tmp_path / "own"
    for folder in (shm, own):
        folder.mkdir()
    monkeypatch.setattr("tests.leaks._SHM", shm)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    before = Held.now()
    (shm / "torch_abc").write_bytes(b"x")
    (shm / "torch_empty").touch()
    (shm / "paceline-of-another-test-process").touch()
    (own / "paceline-1.db").touch()
    (own / "somebody-elses").touch()
    assert leaked(before, BRIEF) == [f"file {own}/paceline-1.db", f"file {shm}/torch_abc"]


def test_files_of_living_strangers_are_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.leaks._SHM", tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "torch_1_5_0").write_bytes(b"x")  # process 1 lives, and is not our child
    ours = [tmp_path / f"torch_{pid}_5_0" for pid in (os.getpid(), gone.pid)]
    for path in ours:
        path.write_bytes(b"x")
    assert shared_files() == {str(path) for path in ours}


def test_runs_keep_their_files_in_this_test_processs_own_folder() -> None:
    assert str(os.getpid()) in os.environ["XDG_RUNTIME_DIR"] and runtime_folder() == Path(os.environ["XDG_RUNTIME_DIR"])


def test_the_fixture_fails_a_test_that_leaks(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(root))
    pytester.makeconftest(
        "import tests.leaks\nfrom tests.conftest import nothing_leaks\ntests.leaks.leaked.__defaults__ = (0.05,)\n"
    )
    pytester.makepyfile(
        """
        import os, socket, subprocess, threading
        kept = []
        def test_process():
            kept.append(subprocess.Popen(["sleep", "60"]))
        def test_socket():
            kept.append(socket.socket())
        def test_memfd():
            kept.append(os.memfd_create("paceline-left"))
        def test_thread():
            thread = threading.Thread(target=threading.Event().wait, daemon=True)
            thread.start()
        def test_clean():
            kept[0].kill()
            kept[0].wait()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=5, errors=4)
    result.stdout.fnmatch_lines_random(
        ["*process *: sleep 60*", "*descriptor socket:*", "*/memfd:paceline-left*", "*thread Thread-*"]
    )


def test_a_run_is_forgotten_and_its_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("paceline.run")
    finished: list[int] = []
    run = types.SimpleNamespace(finish=lambda: finished.append(1))
    module.current = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.run", module)
    import atexit

    atexit.register(run.finish)
    forget_run()
    assert module.current is None  # type: ignore[attr-defined]
    handlers = atexit._ncallbacks()
    atexit.unregister(run.finish)
    assert atexit._ncallbacks() == handlers, "forget_run() should have unregistered it already"
    assert not finished
