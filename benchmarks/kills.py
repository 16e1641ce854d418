"""Random kills against a clean reference: python -m benchmarks.kills [--seeds 10] [--workers 4] [--kills 3]

Each seed is one run of `benchmarks/kills_script.py` in which workers are killed (SIGKILL) at random steps,
sometimes two at once, but never all. Printed for each: whether weights and samples are those of a run
that nobody disturbed, the terms it went through, and the longest gap between two steps less the median
step. Ends with 1 if any differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.turns import HERE

_SLOTS = 12
_LIMIT_S = 180


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that is still being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def living(folder: Path) -> dict[int, int]:
    """Workers and their pids, as the events tell."""
    events = lines(folder / "events.jsonl")
    gone = {event["worker"] for event in events if event["event"] == "worker ended"}
    return {e["worker"]: e["pid"] for e in events if e["event"] == "worker started" and e["worker"] not in gone}


def members(folder: Path, first: int) -> set[int]:
    views = [event["workers"] for event in lines(folder / "events.jsonl") if event["event"] == "view"]
    return set(views[-1]) if views else set(range(first))


def train(runs: Path, name: str, workers: int, plan: Sequence[int], dice: random.Random) -> dict[str, Any]:
    """One run, with kills at these steps; its summary, who was killed, and its gaps."""
    folder, plan, killed = runs / name, list(plan), []
    command = ["-m", "paceline", "run", "-n", str(workers), "--slots", str(_SLOTS), "--runs", str(runs), "--name", name]
    with open(runs / f"{name}.out", "wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command, "benchmarks/kills_script.py"], cwd=HERE, stdout=out, stderr=out
        )
    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
        steps = lines(folder / "metrics.jsonl") if plan else []
        if plan and steps and steps[-1]["step"] >= plan[0]:
            plan.pop(0)
            candidates = sorted(members(folder, workers) & set(living(folder)))
            count = min(dice.choice([1, 1, 2]), len(candidates) - 1)  # somebody must be left
            for worker in dice.sample(candidates, max(0, count)):
                pid = living(folder).get(worker)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(worker)
        time.sleep(0.005)
    times = [line["time"] for line in lines(folder / "metrics.jsonl")]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    stall = max(gaps) - statistics.median(gaps) if gaps else float("nan")
    summary = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else {}
    return {**summary, "code": process.returncode, "killed": killed, "stall_s": stall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    options = parser.parse_args()
    wrong, stalls = 0, []
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary)
        clean = train(runs, "clean", 1, [], random.Random(0))
        print(
            f"undisturbed: {clean['steps']} steps, {clean['samples']} samples, {clean['weights_sha256'][:16]}",
            flush=True,
        )
        for seed in range(options.first, options.first + options.seeds):
            dice = random.Random(seed)
            plan = sorted(dice.randrange(5, clean["steps"] - 20) for _ in range(options.kills))
            got = train(runs, f"seed-{seed}", options.workers, plan, dice)
            same = all(got.get(name) == clean[name] for name in ("weights_sha256", "samples", "steps"))
            wrong += not same
            stalls.append(got["stall_s"])
            print(
                f"seed {seed:3}: {'same' if same else 'DIFFERS'}, killed {got['killed']}, {got.get('terms')} terms, "
                f"longest stall {got['stall_s']:.2f} s{'' if same else ' ' + str(got.get('exit'))}",
                flush=True,
            )
    print(
        f"{options.seeds - wrong} of {options.seeds} the same; stall median {statistics.median(stalls):.2f} s, worst {max(stalls):.2f} s"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
