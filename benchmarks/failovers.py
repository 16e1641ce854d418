"""A primary gets SIGKILL: python -m benchmarks.failovers [--seeds 30] [--workers 2] [--servers 3] [--out FILE]

Each seed is one run of `benchmarks/rehearsed.py` with servers, one of which is killed at a random step. Printed: how long
it took until its backups were told to take over, until a whole step that began after the kill was done (all parameters
pushed and pulled), and whether the final weights are those of a run of one worker without servers: then no update that
was acknowledged is lost. Ends with 1 if a step took longer than a second so, or weights differ.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.served_bits import STEPS, reference
from benchmarks.tables import campaign, teller
from benchmarks.turns import HERE
from tests.end_to_end.launching import Going, ended, going

_SCRIPT = HERE / "benchmarks" / "rehearsed.py"
LIMIT_S = 1.0


@dataclass(frozen=True)
class Failover:
    server: int
    step: int
    leads: int
    """Bytes of parameters for which it was the primary."""
    promoted_s: float
    """From the kill to the layout in which others lead."""
    gap_s: float
    """From the kill to the end of the first step that began after it."""
    step_s: float
    """The median step of this run."""
    weights: str


def gap_s(killed: float, steps: list[dict[str, Any]]) -> float:
    """The step in hand may have had its parameters already; the one behind it has not.

    >>> gap_s(10.0, [{"time": 9.9}, {"time": 10.1}, {"time": 10.3}, {"time": 10.4}])
    0.3
    """
    _, first, *_ = [line["time"] for line in steps if line["time"] >= killed]
    return round(first - killed, 6)


def fail_over(folder: Path, seed: int, workers: int, servers: int, optimizer: str = "adamw") -> Failover:
    dice = random.Random(f"failover {seed}")
    flags = ("--strategy", "ps", "-n", str(workers), "--servers", str(servers), "--slots", "4", "--steps", str(STEPS))
    with going(folder, _SCRIPT.read_text(), *flags, args=(optimizer,)) as run:
        leads = run.wait_for(run.event("layout"), "a layout")["leads"]
        server = dice.choice([int(name) for name, nbytes in leads.items() if nbytes])
        pid = run.wait_for(run.event("server started", server=server), "its process")["pid"]
        step = dice.randrange(5, STEPS - 20)
        run.wait_for_step(step)
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        result = ended(run)
    gap, median = gap_s(killed, run.lines("metrics.jsonl")), float(result.summary.get("median_step_s", 0.0))
    weights = str(result.summary["weights_sha256"]) if result.code == 0 else result.last_line[-200:]
    return Failover(server, step, leads[str(server)], _promoted(run, killed), gap, median, weights)


def _promoted(run: Going, killed: float) -> float:
    return next(e["time"] - killed for e in run.lines("events.jsonl") if e["event"] == "layout" and e["time"] > killed)


def main() -> int:
    parser = campaign(__doc__, seeds=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=3)
    options = parser.parse_args()
    tell, want = teller(options.out), reference("adamw")
    tell(f"{options.workers} workers, {options.servers} servers; all-reduce comes to {want[:16]}")
    tell("seed  server  step   leads  promoted       gap  a step  weights")
    gaps, wrong = [], 0
    for seed in range(options.first, options.first + options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            it = fail_over(Path(folder), seed, options.workers, options.servers)
        gaps.append(it.gap_s)
        wrong += it.weights != want
        verdict = "same" if it.weights == want else f"DIFFERENT: {it.weights}"
        times = "  ".join(f"{seconds * 1e3:5.0f} ms" for seconds in (it.promoted_s, it.gap_s, it.step_s))
        tell(f"{seed:4}  {it.server:6}  {it.step:4}  {it.leads:6}  {times}  {verdict}")
    late = sum(gap > LIMIT_S for gap in gaps)
    tell(
        f"{len(gaps)} primaries killed: gap median {statistics.median(gaps) * 1e3:.0f} ms, worst {max(gaps) * 1e3:.0f} ms, "
        f"{late} over {LIMIT_S:g} s; {len(gaps) - wrong} of {len(gaps)} with the weights of all-reduce"
    )
    return 1 if wrong or late else 0


if __name__ == "__main__":
    sys.exit(main())
