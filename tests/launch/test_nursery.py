"""The nursery: workers forked from it are like fresh ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.launch.nursing import Born, Exited, Fork, Refused
from tests.launch.visiting import DEADLINE_S, Visitor, ended, environment, wait_in

LOOK_AROUND = """
import gc, json, multiprocessing, os, signal, sys, threading
import __main__
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "flags": list(sys.flags),
    "cwd": os.getcwd(), "environment": {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
    "name": [__name__, __file__, __main__.__dict__ is globals(), str(__main__.__spec__)],
    "stdin": os.readlink("/proc/self/fd/0"),
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "out": [sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.fileno()],
    "alone": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "main thread": threading.current_thread() is threading.main_thread(),
    "signals": [status[name].strip()[-8:] for name in ("SigBlk", "SigIgn", "SigCgt")],  # without glibc's own
    "handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "processes": [multiprocessing.get_start_method(), multiprocessing.parent_process()],
    "gc": [gc.isenabled(), gc.get_threshold()],
    "umask": os.umask(0),
    "sets": list({"one", "two", "three", "four", "five"}),
}))
"""


def test_a_fork_is_what_a_fresh_process_is(visitor: Visitor) -> None:
    own = {"PACELINE_TEST": "größe", "CUDA_VISIBLE_DEVICES": "7"}
    status, log = visitor.run(LOOK_AROUND, "--epochs", "3 4", environment=own)
    assert status == 0, log
    script = json.loads(log)["argv"][0]
    fresh = subprocess.run(
        [sys.executable, "-P", "-m", "paceline.launch.boot", script, "--epochs", "3 4"],
        env={**environment(), **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=DEADLINE_S,
    )
    forked, started = json.loads(log), json.loads(fresh.stdout)
    for seen in (forked, started):  # importing torch sets it: in a fresh process later, unless this one had it already
        seen["environment"].pop("TORCHINDUCTOR_CACHE_DIR", None)
    assert forked == started
    assert forked["environment"]["PACELINE_TEST"] == "größe"


def test_a_module_is_run_as_by_python_m(visitor: Visitor) -> None:
    worker = 10_000
    visitor.nursery.ask(Fork(worker, {}, str(visitor.log(worker)), False, ["-m", "this"]))
    os.close(visitor.wait(Born, worker).pidfd)
    assert visitor.wait(Exited, worker).status == 0
    assert "Namespaces are one honking great idea" in visitor.log(worker).read_text()


def test_files_beside_the_script_come_before_what_is_imported_already(visitor: Visitor) -> None:
    """A folder of that name does not, nor do they replace what Python has built in."""
    for name in ("profile.py", "sympy/__init__.py", "queue/notes.txt", "time.py"):
        (visitor.folder / name).parent.mkdir(exist_ok=True)
        (visitor.folder / name).write_text("mine = True")
    script = """
        import profile, queue, sympy, time, torch, torch.profiler
        print([getattr(m, "mine", False) for m in (profile, sympy, queue, time)], queue.Queue.__name__)
    """
    assert visitor.run(script) == (0, "[True, True, False, False] Queue\n")


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("raise KeyError('x')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("def", 1),
    ],
)
def test_how_a_worker_ended_is_told(visitor: Visitor, script: str, status: int) -> None:
    assert visitor.run(script)[0] == status


def test_a_missing_script_is_said_to_be_missing(visitor: Visitor) -> None:
    worker = 10_004
    visitor.nursery.ask(Fork(worker, {}, str(visitor.log(worker)), False, ["nowhere/train.py"]))
    os.close(visitor.wait(Born, worker).pidfd)
    assert visitor.wait(Exited, worker).status == 1
    assert "No such file or directory: '" in (log := visitor.log(worker).read_text()) and "train.py" in log


def test_an_exception_is_in_the_log(visitor: Visitor) -> None:
    _, log = visitor.run("print('before')\nraise KeyError('x')")
    assert log.startswith("before\nTraceback (most recent call last):\n  File")
    assert log.endswith("KeyError: 'x'\n") and "nursery" not in log


@pytest.mark.parametrize(("append", "expected"), [(True, "old\nnew\n"), (False, "new\n")])
def test_a_log_is_continued_or_begun_anew(visitor: Visitor, append: bool, expected: str) -> None:
    worker = 10_001 + append
    visitor.log(worker).write_text("old\n")
    script = visitor.folder / "script.py"
    script.write_text("print('new')")
    visitor.nursery.ask(Fork(worker, {}, str(visitor.log(worker)), append, [str(script)]))
    os.close(visitor.wait(Born, worker).pidfd)
    visitor.wait(Exited, worker)
    assert visitor.log(worker).read_text() == expected


def test_a_worker_that_cannot_be_made_is_refused_and_may_be_asked_for_again(visitor: Visitor) -> None:
    visitor.folder /= "missing"
    fork = Fork(10_003, {}, str(visitor.log(10_003)), False, ["-m", "this"])
    visitor.nursery.ask(fork)
    assert "No such file or directory" in visitor.wait(Refused, 10_003).why
    visitor.folder.mkdir()
    visitor.nursery.ask(fork)
    os.close(visitor.wait(Born, 10_003).pidfd)
    assert visitor.wait(Exited, 10_003).status == 0


TRAIN = """
import hashlib, torch
torch.set_num_threads(1)
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(37, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(5):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(48, 37)), torch.randint(0, 5, (48,))).backward()
    optimizer.step()
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


def test_a_fork_computes_the_bits_of_a_fresh_process(visitor: Visitor) -> None:
    status, log = visitor.run(TRAIN)
    assert status == 0, log
    (visitor.folder / "fresh.py").write_text(TRAIN)
    fresh = subprocess.run(
        [sys.executable, str(visitor.folder / "fresh.py")],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )
    assert len(log) == 65 and log == fresh.stdout


LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 12
    def __getitem__(self, index): return torch.tensor(index ** 2)

if __name__ == "__main__":
    for context in ("fork", "spawn"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=context)
        print(context, torch.cat(list(loader)).tolist() == [i ** 2 for i in range(12)])
"""


def test_loader_processes_work_forked_and_spawned(visitor: Visitor) -> None:
    assert visitor.run(LOADERS) == (0, "fork True\nspawn True\n")


def test_many_threads_and_products_work_in_a_fork(visitor: Visitor) -> None:
    script = """
        import numpy, torch
        torch.set_num_threads(2)
        assert (torch.ones(700, 700) @ torch.ones(700, 700) == 700).all()
        assert (numpy.ones((700, 700)) @ numpy.ones((700, 700)) == 700).all()
    """
    assert visitor.run(script) == (0, "")


def test_unseeded_numbers_differ_between_workers(visitor: Visitor) -> None:
    script = "import random, numpy, os; print(random.random(), numpy.random.random())"
    drawn = [number for _ in range(2) for number in visitor.run(script)[1].split()]
    assert len(set(drawn)) == 4


def test_twenty_at_once(visitor: Visitor) -> None:
    workers = [visitor.ask(f"print({number}); raise SystemExit({number})") for number in range(20)]
    for number, worker in enumerate(workers):
        os.close(visitor.wait(Born, worker).pidfd)
        assert visitor.wait(Exited, worker).status == number
        assert visitor.log(worker).read_text().splitlines()[0] == str(number)


def test_asked_again_it_answers_with_the_same_worker(visitor: Visitor, tmp_path: Path) -> None:
    worker = visitor.ask(wait_in(tmp_path / "gate"))
    first = visitor.wait(Born, worker)
    again = Fork(worker, {}, "/missing/log", False, ["nothing.py"])
    visitor.nursery.ask(again)
    second = visitor.wait(Born, worker)
    assert second.pid == first.pid and second.pidfd != first.pidfd and not ended(second.pidfd)
    (tmp_path / "gate").write_text("go")
    assert visitor.wait(Exited, worker).status == 0
    visitor.nursery.ask(again)
    third = visitor.wait(Born, worker)
    assert third.pid == first.pid and ended(third.pidfd)
    assert visitor.wait(Exited, worker).status == 0, "and its end is told again"
    for born in (first, second, third):
        os.close(born.pidfd)
    assert visitor.log(worker).read_text() == "go\n"


def test_where_a_worker_is_can_be_asked_by_signal(visitor: Visitor, tmp_path: Path) -> None:
    worker = visitor.ask(wait_in(tmp_path / "gate"))
    born = visitor.wait(Born, worker)
    with open(tmp_path / "gate", "w"):  # opens when the script has come to it
        signal.pidfd_send_signal(born.pidfd, signal.SIGUSR1)
        deadline = time.monotonic() + DEADLINE_S
        while "most recent call first" not in visitor.log(worker).read_text() and time.monotonic() < deadline:
            os.sched_yield()
    assert visitor.wait(Exited, worker).status == 0
    assert f"script_{worker}.py" in visitor.log(worker).read_text()
    os.close(born.pidfd)


def test_a_workers_processes_die_with_it(visitor: Visitor, tmp_path: Path) -> None:
    """Only the worker itself is killed, by its pidfd; the nursery sees to its group."""
    os.mkfifo(tmp_path / "held")
    command = f"exec 3>{tmp_path / 'held'}; echo here >&3; exec sleep 600"
    worker = visitor.ask(f"import subprocess; subprocess.run({command!r}, shell=True)")
    born = visitor.wait(Born, worker)
    with open(tmp_path / "held") as held:
        assert held.readline() == "here\n"
        signal.pidfd_send_signal(born.pidfd, signal.SIGKILL)
        assert visitor.wait(Exited, worker).status == -signal.SIGKILL
        assert held.read() == "", "the end of the file comes when its last writer has gone"
    os.close(born.pidfd)
