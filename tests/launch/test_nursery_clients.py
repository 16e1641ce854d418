"""The nursery's clients: whichever agent comes learns of every worker, and whoever else comes disturbs nobody."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paceline.launch import nursery as nursery_module
from paceline.launch.nursing import Born, Closed, Exited, Nursery, Ready, Told, end_silent
from paceline.wires import wire
from tests.launch.visiting import (
    DEADLINE_S,
    SECRET,
    Visitor,
    ended,
    environment,
    new_address,
    visiting,
    wait_for_end,
    wait_in,
)


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
from paceline.launch.nursing import Born, Fork, Nursery
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


def test_a_nursery_that_says_nothing_is_ended_and_another_one_has_its_address(tmp_path: Path) -> None:
    """It still imports from a slow disk, or is frozen; meanwhile the agent that started it has died."""
    address = new_address()
    silent = Nursery.start(environment(), tmp_path / "log", address, SECRET)
    pidfd = silent.pidfd()
    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    with pytest.raises(OSError, match="timed out"):
        Nursery.connect(address, SECRET, patience_s=0.05)
    with pytest.raises(OSError, match="in use"):
        Nursery.start(environment(), tmp_path / "log", address, SECRET)
    end_silent(pidfd)
    assert ended(pidfd)
    os.close(pidfd)
    assert silent._process is not None and silent._process.wait() == -signal.SIGKILL
    silent.close()
    with visiting(Nursery.start(environment(), tmp_path / "log", address, SECRET), tmp_path) as visitor:
        assert visitor.wait(Ready)
        visitor.nursery.quit()


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
