"""The nursery: workers forked from it are like fresh ones, and whichever agent comes learns of them all."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cluster import wire
from paceline.cluster.nursing import Born, Closed, Exited, Fork, Nursery, Ready, Refused, Told
from paceline.launch import nursery as nursery_module
from paceline.launch.environment import nursery_environment
from tests.launch.visiting import DEADLINE_S, SECRET, Visitor, ended, visiting, wait_for_end

THREADS = 2
"""More than one: OpenBLAS then starts threads at its import, and must have none at a fork."""


def environment() -> dict[str, str]:
    return nursery_environment(os.environ, THREADS)


def new_address() -> str:
    return f"paceline-test-{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a nursery listens that all tests of this file share: starting one takes seconds."""
    where = new_address()
    nursery = Nursery.start(environment(), tmp_path_factory.mktemp("nursery") / "log", where, SECRET)
    yield where
    nursery.quit()


@pytest.fixture
def visitor(address: str, tmp_path: Path) -> Iterator[Visitor]:
    with visiting(Nursery.connect(address, SECRET), tmp_path) as found:
        yield found


# a worker


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
        [sys.executable, "-m", "paceline.launch.boot", script, "--epochs", "3 4"],
        env={**environment(), **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=DEADLINE_S,
    )
    forked, started = json.loads(log), json.loads(fresh.stdout)
    del forked["environment"]["TORCHINDUCTOR_CACHE_DIR"]  # the import sets it, in a fresh process somewhat later
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


def wait_in(fifo: Path) -> str:
    """A script that tells the test it has come this far, and waits for its word."""
    if not fifo.exists():
        os.mkfifo(fifo)
    return f"print(open({str(fifo)!r}).read())"


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


# clients


def test_a_client_that_comes_later_learns_of_everyone(visitor: Visitor, address: str, tmp_path: Path) -> None:
    gone = visitor.ask("raise SystemExit(5)")
    staying = visitor.ask(wait_in(tmp_path / "gate"))
    pids = {worker: visitor.wait(Born, worker) for worker in (gone, staying)}
    assert visitor.wait(Exited, gone).status == 5
    with visiting(Nursery.connect(address, SECRET), tmp_path) as later:
        later.nursery.ask_for_children()
        later.wait(Told)
        for worker, first in pids.items():
            born = later.wait(Born, worker)
            assert born.pid == first.pid and ended(born.pidfd) == (worker == gone)
            os.close(born.pidfd)
            os.close(first.pidfd)
        assert later.wait(Exited, gone).status == 5
        assert not [e for e in later.events if isinstance(e, Exited) and e.worker == staying]
        (tmp_path / "gate").write_text("go")
        assert later.wait(Exited, staying).status == visitor.wait(Exited, staying).status == 0, "all are told"


AGENT = """
import os, secrets, select, sys
from pathlib import Path
from paceline.cluster.nursing import Born, Fork, Nursery
from paceline.launch.environment import nursery_environment
address, folder = sys.argv[1], Path(sys.argv[2])
nursery = Nursery.start(nursery_environment(os.environ, 1), folder / "nursery.log", address, bytes(range(32)))
nursery.ask(Fork(4, {}, str(folder / "worker-4.log"), False, [str(folder / "script.py")]))
events = []
while not any(isinstance(event, Born) for event in events):
    select.select([nursery], [], [])
    events += nursery.on_ready()
os.kill(os.getpid(), 9)
"""


def test_the_agents_death_is_survived_and_the_end_of_the_run_is_everybodys(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(wait_in(tmp_path / "gate"))
    address = new_address()
    agent = subprocess.run([sys.executable, "-c", AGENT, address, str(tmp_path)], timeout=DEADLINE_S)
    assert agent.returncode == -signal.SIGKILL
    with visiting(Nursery.connect(address, SECRET), tmp_path) as successor:
        successor.wait(Ready)
        successor.nursery.ask_for_children()
        old = successor.wait(Born, 4)
        assert successor.wait(Told) and not ended(old.pidfd)
        assert successor.run("print(1)") == (0, "1\n"), "it makes workers for the successor too"
        assert successor.nursery.alive and not ended(old.pidfd)
        successor.nursery.quit()
    wait_for_end(old.pidfd)
    os.close(old.pidfd)
    assert (tmp_path / "worker-4.log").read_text() == "", "it still waited, and was ended"
    assert (tmp_path / "nursery.log").read_text() == ""


def test_a_nursery_that_dies_is_seen_at_once(tmp_path: Path) -> None:
    """Also while it is still importing."""
    with visiting(Nursery.start(environment(), tmp_path / "log", new_address(), SECRET), tmp_path) as visitor:
        assert visitor.nursery.alive
        process = visitor.nursery._process
        assert process is not None
        process.kill()
        visitor.wait(Closed)
        process.wait()
        assert not visitor.nursery.alive
        visitor.nursery.ask_for_children()
        assert visitor.wait(Closed)


def test_a_nursery_that_cannot_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: file too short')")
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env.get('PYTHONPATH', '')}"
    with visiting(Nursery.start(env, tmp_path / "log", new_address(), SECRET), tmp_path) as visitor:
        visitor.ask("print(1)")
        visitor.wait(Closed)
        assert visitor.nursery._process is not None and visitor.nursery._process.wait(DEADLINE_S) == 1
    assert (tmp_path / "log").read_text().endswith("ImportError: libtorch.so: file too short\n")


def test_strangers_hold_up_nobody(visitor: Visitor, address: str) -> None:
    """One says nothing, one has another secret, one leaves at once."""
    silent, wrong, brief = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3))
    with silent, wrong, brief:
        for sock in (silent, wrong, brief):
            sock.connect("\0" + address)
        wrong.sendall(bytes(200))
        brief.close()
        assert visitor.run("print(1)") == (0, "1\n")
        wrong.settimeout(DEADLINE_S)
        try:
            while wrong.recv(1000):
                pass
        except ConnectionResetError:
            pass  # closed with what it sent unread


@pytest.mark.parametrize(
    "raw",
    [b"\xff" * 64, struct.pack("<I", 3) + b"\xc1\xc1\xc1", struct.pack("<I", 100) + b"half"],
    ids=["oversized", "garbage", "half a message"],
)
def test_nonsense_from_a_client_closes_that_client_only(
    visitor: Visitor, address: str, raw: bytes, tmp_path: Path
) -> None:
    with visiting(Nursery.connect(address, SECRET), tmp_path) as other:
        other.wait(Ready)
        other.nursery._socket.sendall(raw)
        other.wait(Closed)
    assert visitor.run("print(1)") == (0, "1\n")


# by itself


def test_with_nobody_left_it_ends() -> None:
    with wire.listen(new_address()) as door:
        nursery = nursery_module.Nursery(door, SECRET, orphaned_s=0.01)
        ours, theirs = socket.socketpair()
        nursery.welcome(theirs)
        ours.close()
        nursery.serve()
        assert nursery._clients == [] and nursery._alone(), "it has let the last one go, and come to its end"
        nursery._leave()


PREPARE = """
import os, sys, threading
import torch

def refuse(*arguments):
    raise AssertionError("the nursery called CUDA")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, refuse)
from paceline.launch.nursery import prepare
prepare()
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
before = set(sys.modules)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print([name for name in sys.modules if name not in before])
"""


def test_after_its_imports_a_fork_is_safe_and_a_step_needs_few_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PREPARE)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.replace("'", '"'))) < 5, done.stdout


def test_it_refuses_to_fork_beside_threads() -> None:
    script = """
        import threading
        from paceline.launch import nursery
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        nursery.PREPARED = ("json",)
        nursery.prepare()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 1 and "after importing json there are 2 threads" in done.stderr
