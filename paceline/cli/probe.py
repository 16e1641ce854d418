"""Does a collective tell the truth? Run by `paceline doctor`, with two workers a transport.

    python -m paceline run -n 2 --transport shm -m paceline.cli.probe

Small whole numbers are added through the real machinery and compared with arithmetic.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from paceline.data.order import mix
from paceline.errors import PacelineError
from paceline.tensors.layout import Layout
from paceline.tensors.peers import Peers
from paceline.tensors.tree import Plan
from paceline.worker.session import Session

_NUMBERS = 500_000


def probe(peers: Peers) -> float:
    """Seconds for one reduce of 2 MB, after checking sums and messages; raises on a wrong answer."""
    layout = Layout.of([torch.empty(_NUMBERS)])
    plan = Plan.of(2 * peers.size, peers.size)
    ramp = torch.arange(_NUMBERS, dtype=torch.float32, device=peers.device) % 1024
    best = float("inf")
    for turn in range(20):
        peers.open(plan, layout, 1)
        parts = peers.parts()
        for number, (a, b) in enumerate(plan.parts(peers.rank)):
            parts[number][0].copy_(ramp * sum(leaf + turn for leaf in range(a, b)))
        start = time.perf_counter()
        for bucket in range(len(layout.buckets)):
            peers.post(bucket)
        rows = peers.exchange(mix(turn), np.array([peers.rank + turn], dtype=np.int64))
        out = peers.total(0, 1.0)
        best = min(best, time.perf_counter() - start)
        want = ramp * sum(leaf + turn for leaf in range(plan.leaves))
        if not torch.equal(out[0], want):
            raise PacelineError(f"sum number {turn} is wrong in {int((out[0] != want).sum())} of {_NUMBERS} places")
        if rows[:, 0].tolist() != [worker + turn for worker in range(peers.size)]:
            raise PacelineError(f"lanes of turn {turn} are wrong: {rows[:, 0].tolist()}")
    said = peers.gather(mix(99), f"worker {peers.rank}".encode() * 1000)
    if said != [f"worker {worker}".encode() * 1000 for worker in range(peers.size)]:
        raise PacelineError("messages did not come back as they were sent")
    return best


def main() -> None:
    session = Session({})
    session.board.main_ready = True
    peers = session.peers()
    seconds = probe(peers)
    if session.is_main:
        session.folder.write_json(session.folder.summary, {"exit": "finished", "probe_s": seconds})
    peers.close()
    session.leave()
    os._exit(0)  # this is no script: there is a session, and no run to be ended


if __name__ == "__main__":
    main()
