"""How a process enters a run: started by an agent, or alone by plain `python`.

A session knows who this process is, where the run's folder lies, what the settings are, and can build
the group of peers. It trains nothing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline import __version__
from paceline.cluster.board import Board, Phase, Row
from paceline.cluster.control import (
    Failed,
    Get,
    Granted,
    Hello,
    Link,
    Notice,
    Put,
    Refused,
    Segment,
    Value,
    Welcome,
)
from paceline.errors import MismatchError, PeerLostError, ResourceError, UsageError
from paceline.launch.environment import Ticket, ticket
from paceline.settings import Origins, Settings, merge
from paceline.tensors.peers import Alone, Peers
from paceline.watch.folder import DEFAULT_RUNS, RunFolder

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_TELL_AFTER_S = 1.0
_OTHERS_MAY_SAY_S = 2.0
_groups = 0
"""Groups of peers that this process has joined so far; the same on every worker."""


def user_line() -> str:
    """The innermost line of the user's own code that is running now, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH, "<frozen")):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"


class Session:
    """Who this process is in the run."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.ticket: Ticket | None = ticket()
        flags = self.ticket.flags if self.ticket else {}
        self.settings, self.origins = merge(flags, arguments)
        self.worker = self.ticket.worker if self.ticket else 0
        self.workers = self.settings.workers
        self.started = time.time()
        self.at = "starting"
        """What this worker is doing, in words for a message to the others."""
        self.left: str | None = None
        """Where the script left a loop over its loader before the end, if it did."""
        self.link: Link | None = None
        if self.ticket is None:
            self.folder = RunFolder.create(Path(os.environ.get("PACELINE_RUNS", DEFAULT_RUNS)), None)
            self.board = Board.create(1)
        else:
            self.folder = RunFolder(Path(self.ticket.folder))
            self.link = Link(self.ticket.address, bytes.fromhex(self.ticket.secret))
            answer, fds = self.link.ask(Hello(self.worker, os.getpid()))
            assert isinstance(answer, Welcome)
            self.board = Board(fds[0], answer.workers)
        self.row: Row = self.board.row(self.worker)
        self.row.describe(pid=os.getpid())
        self.device = _device(self.settings)
        torch.set_num_threads(self.settings.threads)

    @property
    def is_main(self) -> bool:
        return self.worker == 0

    @property
    def launched(self) -> bool:
        return self.ticket is not None

    @property
    def dry_run(self) -> bool:
        """Started only to see what the settings come to."""
        return self.ticket is not None and self.ticket.dry_run

    def write_config(self) -> None:
        config = {
            "settings": self.settings.__dict__,
            "origins": self.origins,
            "device": str(self.device),
            "script": sys.argv[0],
            "arguments": sys.argv[1:],
            "versions": {
                "paceline": __version__,
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            },
            "started": self.started,
        }
        self.folder.write_json(self.folder.config, config)

    # the others

    def wait_for_main(self) -> None:
        """Hold back until worker 0 has reached prepare(), so that a download happens once."""
        self.row.enter(Phase.WAITING_FOR_MAIN)
        while not self.board.main_ready:
            if self.board.abort:
                raise PeerLostError("the run stopped before worker 0 reached prepare()")
            time.sleep(0.002)
        self.row.enter(Phase.SCRIPT)

    def peers(self) -> Peers:
        """The group of this term."""
        if self.workers == 1 or self.dry_run:
            return Alone(self.device)
        global _groups
        _groups += 1
        self._name = f"group-{_groups}"  # a script may train twice: nothing of the first is met again
        transport = self.settings.transport
        if transport == "auto":
            transport = _best_transport(self.device, self.settings)
        if transport == "shm":
            from paceline.tensors.shared import SharedPeers

            return SharedPeers(self.worker, self.workers, self._name, self._segment, self)
        from paceline.tensors.group import GroupPeers, gloo, nccl

        store = self._store()
        control = gloo(PrefixStore("control", store), self.worker, self.workers)
        if transport == "gloo":
            data = gloo(PrefixStore("data", store), self.worker, self.workers)
            return GroupPeers(self.worker, self.workers, data, control, self, torch.device("cpu"))
        data = nccl(PrefixStore("data", store), self.worker, self.workers)
        return GroupPeers(self.worker, self.workers, data, control, self, self.device)

    def _store(self) -> Store:
        """A store on a port of its own choosing, hosted by worker 0 and announced through the agent."""
        assert self.link is not None
        if self.is_main:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.link.ask(Put(f"{self._name}/store", str(store.port)))
            return store
        answer, _ = self.link.ask(Get(f"{self._name}/store"))
        assert isinstance(answer, Value)
        return TCPStore("127.0.0.1", int(answer.value), is_master=False, wait_for_workers=False)

    def _segment(self, name: str, size: int) -> int:
        assert self.link is not None
        answer, fds = self.link.ask(Segment(name, size))
        if isinstance(answer, Refused):
            raise ResourceError(answer.why)
        assert isinstance(answer, Granted)
        return fds[0]

    # while waiting: see tensors.peers.Watch

    def where(self) -> str:
        """Where this worker is, for the others' eyes."""
        left = f", having left the loop over the loader at {self.left}" if self.left else ""
        return f"{self.at} ({user_line()}){left}"

    def check(self, seconds: float, laggard: int) -> None:
        if self.board.abort:
            raise PeerLostError(f"gave up waiting for worker {laggard}: the run is stopping")
        if seconds > _TELL_AFTER_S:
            self.row.place(self.where())
            self.row.waits_for(laggard)

    def mismatch(self, others: list[int]) -> NoReturn:
        self.row.place(self.where())
        deadline = time.monotonic() + _OTHERS_MAY_SAY_S
        while time.monotonic() < deadline and not all(self.board.see(k).place for k in others):
            time.sleep(0.001)
        there = "; ".join(f"worker {k} is at {self.board.see(k).place or 'another place'}" for k in others)
        raise MismatchError(
            f"the workers came to different places in the script: worker {self.worker} is at {self.where()}; {there}. "
            "Every worker must take the same steps: leave a loop only on a condition that is the same on all "
            "(run.stop(reason) is an agreed stop)"
        )

    # the terminal

    def notice(self, text: str) -> None:
        """A line for the user that is not the script's output."""
        if self.link is not None:
            self.link.tell(Notice(text))
        else:
            sys.stderr.write(f"paceline: {text}\n")

    def leave(self) -> None:
        """This worker is done, as it should be."""
        self.row.enter(Phase.FINISHED)
        if self.ticket is None:
            self.row.release()
            self.board.close()

    def fail(self, failed: Failed) -> None:
        if self.link is not None:
            self.row.enter(Phase.FAILED)
            self.link.tell(failed)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None


def _device(settings: Settings) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.init()  # until then there is no generator to seed
        return torch.device("cuda", 0)
    if settings.device == "cuda":
        raise UsageError("--device cuda, but torch sees no GPU here: pass --device cpu, or install a CUDA build")
    return torch.device("cpu")


def _best_transport(device: torch.device, settings: Settings) -> str:
    from paceline.tensors.shared import supported

    if device.type == "cuda" and not settings.share_gpus:
        return "nccl"
    return "shm" if supported() else "gloo"


__all__ = ["Origins", "Session", "user_line"]
