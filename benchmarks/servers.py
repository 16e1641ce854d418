"""One worker and one server that adds: python -m benchmarks.servers [BYTES [REPEAT [MODE]]]

    push_then_pull   all fragments are pushed; when all are in, all are pulled
    push_pull        each fragment is pushed and comes back as it is then
    push             they are pushed

Through shared memory it is compared with copying the same bytes once in and once out in this process, on one core;
over TCP with a bare socket to another process over which the same bytes go both ways, in the same order. Both are
measured between the rounds of the server. What is pushed lies in memory that is lent (`tensors/lending.py`), as that of
the strategies does; with `--plain` anywhere, as a script's own tensors, and goes through a ring. `--rivals` sets torch RPC, and a Ray actor where Ray is installed, beside
it on the same work. `--noise N` sends N messages of noise to a server instead. Ends with 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from benchmarks.servers_noise import send_noise
from benchmarks.servers_sides import both, read, started
from benchmarks.statistics import median_ratio
from benchmarks.turns import Side
from paceline.servers import kv
from paceline.servers.calling import Lines, dial
from paceline.tensors import lending
from paceline.tensors.channel import memory_of
from paceline.tensors.streamed import tune

MODES = ("push_then_pull", "push_pull", "push")
LIMITS = {"shared": 0.45, "tcp": 0.85}
CONNECTIONS = {"shared": 2, "tcp": 4}
"""By two, one fragment is added while another one still comes. Over TCP answers wait for room, too."""
RIVAL_LIMIT = 3.0
WARM = 3
"""Rounds that are not counted."""


class Work:
    """What is pushed, and where what is pulled goes."""

    def __init__(self, nbytes: int, fragments: int, mode: str, lent: bool = True) -> None:
        self.mode, self.fragments, self.floats = mode, fragments, nbytes // 4 // fragments
        self.nbytes = self.floats * 4 * fragments
        self.moved = self.nbytes if mode == "push" else 2 * self.nbytes
        self.plain, self.into, self._copies = (torch.ones(fragments, self.floats) for _ in range(3))
        self.out = lending.empty((fragments, self.floats), torch.float32).fill_(1) if lent else self.plain
        """As strategies have what they push: in memory that a server of this machine reads where it lies."""

    def copy(self) -> None:
        """Once in and once out, by the fragment: torch copies these faster than libc does."""
        for values, copy in zip(self.plain, self._copies, strict=True):
            copy.copy_(values)
        if self.mode != "push":
            for values, copy in zip(self._copies, self.into, strict=True):
                copy.copy_(values)


@contextmanager
def ours(work: Work, carrier: str) -> Iterator[Callable[[], None]]:
    """A round with our server; what comes back is looked at once, at the end."""
    out = work.out if carrier == "shared" else work.plain
    with started("server", carrier) as (address, secret):
        lines = Lines([dial(address, secret, "worker") for _ in range(CONNECTIONS[carrier])], kv.Replies)
        keys = kv.Keys(lines)
        names = [f"fragment-{number}" for number in range(work.fragments)]
        for name, values in zip(names, out, strict=True):
            keys.push(name, torch.zeros_like(values), "assign").result()
        rounds = 0

        def play() -> None:
            nonlocal rounds
            rounds += 1
            triples = list(zip(names, out, work.into, strict=True))
            if work.mode == "push_pull":
                futures = [keys.push_pull(name, values, into=into) for name, values, into in triples]
            else:
                futures = [keys.push(name, values) for name, values, _ in triples]
            if work.mode == "push_then_pull":
                for future in futures:
                    future.result()
                futures = [keys.pull(name, into) for name, _, into in triples]
            for future in futures:
                future.result()

        yield play
        for name in names:
            found = keys.pull(name).result().tensor
            assert found is not None and found.min() == found.max() == rounds
        lines.close()


@contextmanager
def bare(work: Work) -> Iterator[Callable[[], None]]:
    with started("bare", str(work.nbytes), work.mode) as (port, _):
        sock = socket.create_connection(("127.0.0.1", int(port)))
        tune(sock)
        out, into = memory_of(work.plain), memory_of(work.into)

        def play() -> None:
            sock.send(b"\1")
            if work.mode == "push_pull":
                both(sock, out, into)
            else:
                sock.sendall(out)
                read(sock, into if work.mode == "push_then_pull" else into[:1])

        yield play
        sock.close()


def seconds(play: Callable[[], None]) -> float:
    start = time.perf_counter()
    play()
    return time.perf_counter() - start


def compare(work: Work, carrier: str, repeat: int) -> bool:
    """Whether the limit holds."""
    with ExitStack() as stack:
        play = stack.enter_context(ours(work, carrier))
        other = work.copy if carrier == "shared" else stack.enter_context(bare(work))
        times = [(seconds(play), seconds(other)) for _ in range(repeat + WARM)][WARM:]
    mine, theirs = (list(side) for side in zip(*times, strict=True))
    ratio, low, high = median_ratio(theirs, mine)
    ranked = sorted(mine)
    p50, p99 = ranked[len(ranked) // 2], ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)]
    what = "copying" if carrier == "shared" else "a bare socket"
    verdict = "holds" if low >= LIMITS[carrier] else "MISSED"
    print(
        f"{carrier}{' from plain memory' if carrier == 'shared' and work.out is work.plain else ''}, {work.mode}, {work.nbytes / 1e6:.0f} MB in {work.fragments} fragments, {repeat} rounds: "
        f"p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, goodput {work.moved * repeat / sum(mine) / 1e9:.2f} GB/s; "
        f"{what} {sorted(theirs)[len(theirs) // 2] * 1e3:.2f} ms, ratio {ratio:.3f} [{low:.3f}, {high:.3f}]  "
        f"limit {LIMITS[carrier]}: {verdict}",
        flush=True,
    )
    return low >= LIMITS[carrier]


def beside(work: Work, turns: int) -> bool:
    """Whether we are as much faster than each of the others as we should be, through shared memory."""
    sizes = [work.mode, str(work.fragments), str(work.floats)]
    good = True
    for name in ("torch-rpc", "ray"):
        if name == "ray" and importlib.util.find_spec("ray") is None:
            print("ray: left out, it is not installed (pip install ray)")
            continue
        with tempfile.TemporaryDirectory() as folder, ours(work, "shared") as play:
            module = ["-m", "benchmarks.servers_sides", name]
            role = ["worker"] if name == "torch-rpc" else []
            sides = [Side(name, [*module, *role, *sizes, folder], Path(folder))]
            if role:
                sides.append(Side(f"{name}-server", [*module, "server", *sizes, folder], Path(folder)))
            mine, theirs = [], []
            try:
                for _ in range(turns + 1):
                    theirs.append(sides[0].take_turn())
                    with ExitStack() as stack:
                        for side in sides:
                            stack.enter_context(side.frozen())
                        mine.append(sorted(seconds(play) for _ in range(3))[1])
            finally:
                for side in sides:
                    side.end()
        ratio, low, high = median_ratio(theirs[1:], mine[1:])
        good &= low >= RIVAL_LIMIT
        print(
            f"{name}, {work.mode}{' from plain memory' if work.out is work.plain else ''}: {sorted(theirs[1:])[turns // 2] * 1e3:.1f} ms against our "
            f"{sorted(mine[1:])[turns // 2] * 1e3:.2f} ms, ratio {ratio:.1f} [{low:.1f}, {high:.1f}]  "
            f"limit {RIVAL_LIMIT}: {'holds' if low >= RIVAL_LIMIT else 'MISSED'}",
            flush=True,
        )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bytes", type=int, nargs="?", default=64 << 20)
    parser.add_argument("repeat", type=int, nargs="?", default=50)
    parser.add_argument("mode", choices=(*MODES, "all"), nargs="?", default="all")
    parser.add_argument("--fragments", type=int, default=16)
    parser.add_argument("--carrier", choices=(*LIMITS, "all"), default="all")
    parser.add_argument("--rivals", action="store_true")
    parser.add_argument("--turns", type=int, default=30, help="of each rival and of ours beside it")
    parser.add_argument("--plain", action="store_true", help="push from memory that is not lent")
    parser.add_argument("--noise", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.noise:
        print(send_noise(options.noise, options.seed))
        return
    good = True
    for mode in MODES if options.mode == "all" else [options.mode]:
        work = Work(options.bytes, options.fragments, mode, not options.plain)
        for carrier in LIMITS if options.carrier == "all" else [options.carrier]:
            good &= compare(work, carrier, options.repeat)
        if options.rivals:
            good &= beside(work, options.turns)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
