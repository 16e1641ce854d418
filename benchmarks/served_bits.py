"""Servers give the bits of all-reduce: python -m benchmarks.served_bits [--seeds 1] [--optimizers sgd,adamw] [--out FILE]

`benchmarks/rehearsed.py` (dropout, BatchNorm, clipping by the global norm, a cosine schedule) with SGD and momentum and
with AdamW, at 1 to 4 workers and 1 to 3 servers. Each pair runs once left alone, and once a seed with a worker and a
server killed at random steps. A worker is killed where there is another one. A single server's death takes the only copy,
so that run goes back to a checkpoint. One line a pair; ends with 1 if any hash is not that of one all-reduce worker.
With --codec, `ps+CODEC` beside `allreduce+CODEC`. On two cores one optimizer takes about four minutes a seed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import campaign, teller
from benchmarks.turns import HERE
from tests.end_to_end.launching import launch

_SCRIPT = HERE / "benchmarks" / "rehearsed.py"
STEPS = 120


@dataclass(frozen=True)
class Case:
    optimizer: str
    workers: int
    servers: int
    codec: str = ""

    def __str__(self) -> str:
        return f"{self.optimizer:6} {self.workers} workers {self.servers} servers"

    def plan(self, seed: int) -> list[str]:
        """Who is killed when."""
        dice = random.Random(f"{self} {seed}")
        first, second = sorted(dice.sample(range(5, STEPS - 20), 2))
        server, worker = f"kill server:{dice.randrange(self.servers)}", f"kill worker:{dice.randrange(self.workers)}"
        if self.workers == 1:
            return [f"{server} @step {first}"]
        if self.servers > 1 and dice.random() < 0.5:
            return [f"{server} @step {first}", f"{worker} @step {second}"]
        return [f"{worker} @step {first}", f"{server} @step {second}"]  # a run that has gone back has other workers


def reference(optimizer: str, codec: str = "") -> str:
    """What one worker comes to by all-reduce."""
    return weights(optimizer, 0, "-n", "1", "--strategy", joined("allreduce", codec))


def joined(strategy: str, codec: str) -> str:
    return f"{strategy}+{codec}" if codec else strategy


def trained(case: Case, plan: list[str]) -> str:
    """The weights of a run with servers, or why there are none."""
    faults = [word for fault in plan for word in ("--fault", fault)]
    counts = ("-n", str(case.workers), "--servers", str(case.servers))
    strategy = ("--strategy", joined("ps", case.codec))
    return weights(case.optimizer, len(plan), *strategy, "--checkpoint-every", "20", *counts, *faults)


def weights(optimizer: str, kills: int, *flags: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = launch(Path(folder), _SCRIPT, "--slots", "4", "--steps", str(STEPS), *flags, args=(optimizer,))
        except subprocess.TimeoutExpired:
            return "it did not end"
        if done.code:
            return done.last_line[-200:]
        carried_out = [e for e in done.events() if e["event"] == "fault" and "passed over" not in e["why"]]
        if len(carried_out) < kills:
            return f"only {len(carried_out)} of {kills} kills were carried out"
        return str(done.summary["weights_sha256"])


def compared(case: Case, want: str, seeds: range, tell: Callable[[str], None]) -> bool:
    """Whether all runs of a case came to the same; told in one line."""
    plans = [[], *(case.plan(seed) for seed in seeds)]
    words = {" + ".join(plan) or "left alone": trained(case, plan) for plan in plans}
    odd = [f"{name}: {got}" for name, got in words.items() if got != want]
    verdict = f"DIFFERENT: {'; '.join(odd)}" if odd else "same"
    tell(f"{case}  {len(plans)} runs: {verdict:6} ({', '.join(words)})")
    return not odd


def main() -> int:
    parser = campaign(__doc__, seeds=1)
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--codec", default="", help="the codec of both sides")
    parser.add_argument("--workers", default="1,2,3,4")
    parser.add_argument("--servers", default="1,2,3")
    options = parser.parse_args()
    tell, wrong, count = teller(options.out), 0, 0
    for optimizer in options.optimizers.split(","):
        want = reference(optimizer, options.codec)
        tell(f"{optimizer:6} 1 worker all-reduce    {want[:16]}  {options.codec}".rstrip())
        for workers in map(int, options.workers.split(",")):
            for servers in map(int, options.servers.split(",")):
                seeds = range(options.first, options.first + options.seeds)
                count += 1
                wrong += not compared(Case(optimizer, workers, servers, options.codec), want, seeds, tell)
    tell(f"{count - wrong} of {count} pairs came to the weights of all-reduce, with and without kills")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
