"""Real worker processes for the contract tests of Peers.

Started once a module as `python -m tests.tensors.peers_worker`: it imports torch, then forks the workers
of each scenario, so that a scenario costs milliseconds. A line of JSON on stdin asks for one; a line of
JSON on stdout answers when its workers are gone. Each worker leaves its result in a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.tensors.group import GroupPeers, gloo
from paceline.tensors.machines import build as build_machines
from paceline.tensors.mesh import Lines
from paceline.tensors.peers import Peers
from paceline.tensors.shared import SharedPeers
from paceline.wires.listener import Listener
from paceline.wires.tls import Identity
from tests.tensors.scenarios import SCENARIOS, Common, Watch

SECRET = bytes(range(32))
PLACES = ["group", *(f"group/machine-{machine}/{way}" for machine in range(2) for way in ("in", "out"))]
SEGMENTS = [f"{place}/memory-{number}" for place in PLACES for number in range(1, 65)]


def machine_sizes(kind: str, size: int) -> tuple[int, ...]:
    """Workers of each machine: "mesh" gives each its own, "machines" cuts in two halves, "machines-1" leaves
    the first one a single worker."""
    if kind.startswith("mesh"):
        return (1,) * size
    first = 1 if kind.startswith("machines-1") else (size + 1) // 2
    return (first, size - first) if size > first else (size,)


def addresses(folder: Path, rank: int, size: int, own: str) -> list[str]:
    """Everybody's, by way of files."""
    written = folder / f"{rank}.writing"
    written.write_text(own)
    written.rename(folder / f"{rank}.address")
    files = [folder / f"{other}.address" for other in range(size)]
    while not all(file.exists() for file in files):
        time.sleep(0.001)
    return [file.read_text() for file in files]


def build(ask: dict[str, Any], rank: int, watch: Watch, segments: dict[str, int]) -> Peers:
    size, device = ask["size"], torch.device("cpu")

    def allocate(name: str, bytes_needed: int) -> int:
        fd = segments[name]
        os.ftruncate(fd, bytes_needed)
        return os.dup(fd)

    if ask["kind"] == "shared":
        return SharedPeers(rank, size, "group", allocate, watch)
    if ask["kind"] != "gloo":
        listener = Listener("127.0.0.1", SECRET, Identity.make() if ask["kind"].endswith("-tls") else None)
        sizes = machine_sizes(ask["kind"], size)
        everyone = addresses(Path(ask["folder"]), rank, size, listener.address)
        leaders = [everyone[sum(sizes[:machine])] for machine in range(len(sizes))]
        return build_machines(rank, sizes, "group", allocate, Lines(listener, leaders, SECRET), watch)
    store = dist.FileStore(str(Path(ask["folder"], "store")), size)
    control = gloo(dist.PrefixStore("control", store), rank, size)
    data = gloo(dist.PrefixStore("data", store), rank, size)
    return GroupPeers(rank, size, data, control, watch, device)


def work(ask: dict[str, Any], rank: int, segments: dict[str, int], common: Common) -> None:
    code = 0
    result: dict[str, Any] = {}
    try:
        torch.set_num_threads(1)
        watch = Watch(common)
        peers = build(ask, rank, watch, segments)
        peers.gather(-1, b"")  # all are connected: who leaves soon breaks nobody's building of the group
        result["value"] = SCENARIOS[ask["scenario"]](peers, watch, ask)
        if ask["scenario"] in ("totals", "gather", "rounds", "changes"):
            peers.close()
    except BaseException:  # noqa: BLE001  it is told to the test
        result["error"] = traceback.format_exc()
        code = 1
    finally:
        torch.save(result, Path(ask["folder"], f"{rank}.pt"))
        os._exit(code)


def serve(ask: dict[str, Any]) -> dict[str, Any]:
    """Fork the workers, wait for all; those still there at the deadline are killed and named."""
    segments = {name: os.memfd_create(name) for name in SEGMENTS}
    common = Common(ask["size"])
    pids = []
    for rank in range(ask["size"]):
        pid = os.fork()
        if pid == 0:
            work(ask, rank, segments, common)
        pids.append(pid)
    for fd in segments.values():
        os.close(fd)
    living = dict(enumerate(pids))
    deadline = time.monotonic() + ask["limit_s"]
    hung: list[int] = []
    while living:
        for rank, pid in list(living.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del living[rank]
                common.gone[rank] = os.WIFSIGNALED(status)
        if living and not hung and time.monotonic() > deadline:
            hung = sorted(living)
            for pid in living.values():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return {"hung": hung}


def main() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        answer = serve(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
