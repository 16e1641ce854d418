"""Many members: python -m benchmarks.members [--members 1000] [--rounds 20] [--seed 0]

One process is the coordinator: the real agent with its standby, store and board, but for members that are
no processes (`members_leader.py`). Another holds the members: each has a connection of its own and speaks
the real protocol. In every round one dies, the others agree on the view without it, a newcomer takes its
place, and all enter the view with it. In every other round they have asked for the next view beforehand; in
the rest they ask when the board shows the death, as workers do. Ends with 1 if a death took longer than a second to
be agreed on by all, or if the coordinator fell silent for a lease.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.members_clients import Members, raise_descriptors
from benchmarks.turns import HERE
from paceline.cli.asking import ask
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.store import LocalStore
from paceline.folder import RunFolder
from paceline.settings import Settings
from paceline.wires import messages
from paceline.wires.board import Stop

_LIMIT_S = 1.0
_REST_S = 3.0


def start(folder: RunFolder, members: int) -> tuple[subprocess.Popen[bytes], Rendezvous]:
    """The coordinator, once it leads."""
    flags = {"workers": members, "slots": members}
    Job("(simulated)", [], False, flags, os.getcwd(), []).write(folder)
    place = Rendezvous.create(folder)
    command = [sys.executable, "-m", "benchmarks.members_leader", str(folder.path)]
    with open(folder.logs / "agent.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=HERE, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    while not any(event["event"] == "standby" for event in folder.read_lines(folder.events)):
        if process.poll() is not None:
            raise SystemExit(f"the coordinator ended:\n{(folder.logs / 'agent.log').read_text()[-3000:]}")
        time.sleep(0.05)
    return process, place


class Rounds:
    """A death and a join, time and again."""

    def __init__(self, members: Members, coordinator: subprocess.Popen[bytes], dice: random.Random) -> None:
        self._members, self._coordinator, self._dice = members, coordinator, dice
        self._term, self._newest = 1, max(members.of)
        self.deaths_s: dict[bool, list[float]] = {True: [], False: []}
        """How long each took to be agreed on, by whether all had asked beforehand."""
        self.joins_s: list[float] = []

    def one(self, asked_before: bool) -> None:
        victim = self._dice.choice(sorted(self._members.of))
        if asked_before:
            self._members.ask(set(self._members.of) - {victim}, messages.After(self._term))
        self._members.leave(victim)
        others = list(self._members.of)
        began = time.monotonic()
        self._report(victim)
        if not asked_before:
            self._members.wait_for_burial(victim)
            self._members.ask(others, messages.After(self._term))
        self._enter(self._members.answers(others), without=victim)
        self.deaths_s[asked_before].append(time.monotonic() - began)
        self._replace(others)

    def _report(self, victim: int) -> None:
        assert self._coordinator.stdin is not None
        self._coordinator.stdin.write(f"{victim}\n".encode())
        self._coordinator.stdin.flush()

    def _replace(self, others: list[int]) -> None:
        self._newest += 1
        newcomer = [self._newest]
        began = time.monotonic()
        self._members.join(newcomer)
        self._members.ask(newcomer, messages.Ready())
        (view,) = self._members.answers(newcomer)
        self._members.ask(others, messages.Entering(view.term))
        self._enter([view, *self._members.answers(others)], without=-1)
        self._members.ask(newcomer, messages.Healed())
        self._members.answers(newcomer)
        self.joins_s.append(time.monotonic() - began)

    def _enter(self, views: list[messages.Next], without: int) -> None:
        """All must have been told the same."""
        first = views[0]
        assert all(view == first for view in views), "members were told different views"
        assert set(first.members) == set(self._members.of) and without not in first.members
        self._term = first.term


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _words(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds) * 1e3:.3g} ms, longest {max(seconds) * 1e3:.3g} ms"


def _journal_words(place: Rendezvous) -> str:
    store = LocalStore(place.store)
    journal = Journal.decode(store.read().state)
    store.close()
    times_s = []
    for _ in range(11):
        began = time.perf_counter()
        size = len(journal.encode())
        times_s.append(time.perf_counter() - began)
    return f"the journal has {size / 1024:.0f} KiB after {len(journal.views)} views; {_words(times_s)} to encode"


def measure(options: argparse.Namespace, folder: RunFolder) -> bool:
    """Print the figures; whether the limits hold."""
    coordinator, place = start(folder, options.members)
    try:
        members = Members(f"{place.address}-1", place.secret)
        began = time.monotonic()
        members.join(range(options.members))
        print(f"{options.members} members were let in and greeted in {time.monotonic() - began:.2f} s")
        assert members.board is not None
        cpu = _cpu_s(coordinator.pid)
        members.rest(_REST_S)
        print(f"at rest the coordinator takes {(_cpu_s(coordinator.pid) - cpu) / _REST_S:.1%} of a core")
        rounds = Rounds(members, coordinator, random.Random(options.seed))
        for number in range(options.rounds):
            rounds.one(asked_before=number % 2 == 0)
        print(f"a death, agreed on by all who had asked before: {_words(rounds.deaths_s[True])}")
        print(f"a death, agreed on by all who then ask: {_words(rounds.deaths_s[False])}")
        print(f"a newcomer, from its first byte until all are in its view: {_words(rounds.joins_s)}")
        print(_journal_words(place))
        lease, leads = Settings().lease, members.board.leader
        print(
            f"longest silence of the coordinator: {members.longest_silence_s:.2f} s (lease {lease:g} s), fence {leads}"
        )
        longest = max(*rounds.deaths_s[True], *rounds.deaths_s[False])
        return longest < _LIMIT_S and members.longest_silence_s < lease and leads == 1
    finally:
        ask(folder, messages.Stop(Stop.COMMAND, kill=True))
        coordinator.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    raise_descriptors()
    print(f"{options.members} members, {options.rounds} deaths and joins, seed {options.seed}")
    with tempfile.TemporaryDirectory() as temporary:
        holds = measure(options, RunFolder.create(Path(temporary), "members"))
    print(f"limit {_LIMIT_S:g} s: {'holds' if holds else 'MISSED'}")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
