"""Step time under a flood of strangers: python -m benchmarks.flood [--messages 1000000]

One run of LeNet with two workers. In every other turn `benchmarks/flooder.py` attacks its control socket;
between, it is stopped. Compared are the steps of a turn with the flood and of the turn before it. It goes on
until all messages are sent. The flooder has the lowest priority, for it has no core of its own. Ends with 1 if
the limit of 1.10 is missed, or if the run did not survive.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.statistics import median_ratio, words
from benchmarks.turns import HERE, Side
from paceline.cluster.rendezvous import Rendezvous
from paceline.cluster.store import LocalStore
from paceline.folder import RunFolder
from paceline.wires import wire

_LIMIT = 1.10
_STEPS = 20


@contextmanager
def flooder(place: Rendezvous, messages: int, per_s: float, seed: int, out: Path) -> Iterator[subprocess.Popen[str]]:
    """Stopped until it is let go."""
    command = ["-m", "benchmarks.flooder", _leader(place), str(messages), str(per_s), str(seed), str(out)]
    process = subprocess.Popen([sys.executable, *command], cwd=HERE, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(place.secret.hex() + "\n")
    process.stdin.flush()
    process.send_signal(signal.SIGSTOP)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def _leader(place: Rendezvous) -> str:
    """Its address."""
    return f"{place.address}-{place.fence()}"


class Watched:
    """A side's turns, with how much of a core the agent took in them."""

    def __init__(self, side: Side, agent: int) -> None:
        self._side, self._agent = side, agent
        self.steps: list[float] = []
        self._cpu_s = self._wall_s = 0.0

    def take_turn(self) -> None:
        cpu, wall = _cpu_s(self._agent), time.monotonic()
        self.steps.append(self._side.take_turn())
        self._cpu_s += _cpu_s(self._agent) - cpu
        self._wall_s += time.monotonic() - wall

    @property
    def share(self) -> str:
        return f"{self._cpu_s / self._wall_s:.1%} of a core in {self._wall_s:.0f} s"


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _honest_s(place: Rendezvous) -> float:
    """Until one who knows the secret is in, in the middle of it all."""
    start = time.monotonic()
    wire.connect(_leader(place), place.secret).close()
    return time.monotonic() - start


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds a step, with the flood and without, turn by turn."""
    runs, out = folder / "runs", folder / "sent.json"
    script = ["benchmarks/step_side.py", "paceline", "lenet", "128", str(_STEPS), str(folder)]
    flags = ["-n", "2", "--threads", "1", "--runs", str(runs), "--name", "flooded"]
    side = Side("paceline", ["-m", "paceline", "run", *flags, *script], folder)
    run, slowest_s = RunFolder(runs / "flooded"), 0.0
    try:
        side.take_turn()
        place = Rendezvous.of(run)
        agent = LocalStore(place.store).read().pid
        flooded, quiet = Watched(side, agent), Watched(side, agent)
        with flooder(place, options.messages, options.per_second, options.seed, out) as attacker:
            while attacker.poll() is None and len(flooded.steps) < options.pairs:
                quiet.take_turn()
                attacker.send_signal(signal.SIGCONT)
                flooded.take_turn()
                slowest_s = max(slowest_s, _honest_s(place))
                if attacker.poll() is None:
                    attacker.send_signal(signal.SIGSTOP)
        side.take_turn()  # it still trains
    finally:
        side.end()
    print("sent:", ", ".join(f"{count} {name}" for name, count in json.loads(out.read_text()).items()))
    refused = [event["why"] for event in run.read_lines(run.events) if event["event"] == "refused"]
    print(f"told in the run's events: {len(refused)} lines; the last: {refused[-1]}")
    print(f"an honest connection was let in after at most {slowest_s * 1e3:.0f} ms")
    print(f"the agent took {flooded.share} with the flood, {quiet.share} without")
    return flooded.steps, quiet.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--per-second", type=float, default=1000.0, help="connections that the flooder tries")
    parser.add_argument("--pairs", type=int, default=1000, help="stop after so many, whatever is sent by then")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        flooded, quiet = measure(options, Path(temporary))
    print(words(f"LeNet, 2 workers, seed {options.seed}, flooded against quiet", flooded, quiet, _LIMIT))
    sys.exit(1 if median_ratio(flooded, quiet)[2] > _LIMIT else 0)


if __name__ == "__main__":
    main()
