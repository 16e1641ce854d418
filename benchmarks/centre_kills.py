"""The federated centre gets SIGKILL: python -m benchmarks.centre_kills [--seeds 30] [--workers 2] [--servers 2] [--machines 1] [--out FILE]

Each seed is one run of `benchmarks/federated_script.py` for every moment of a round; in a random round the server that leads the
register is killed there. Printed: how long until others were told to lead, and until the round was over; whether rounds went
forward one by one with all their clients in them; and whether the final weights are those of one worker, left alone. Ends
with 1 if any of that does not hold, or another led after more than 3 s only.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import campaign, teller
from benchmarks.turns import HERE
from tests.end_to_end.launching import Result, ended, launch
from tests.end_to_end.machines import spread

SCRIPT = HERE / "benchmarks" / "federated_script.py"
ROUNDS, LIMIT_S = 6, 3.0
STRATEGY = f"federated:rounds={ROUNDS},clients=8,sample=5,alpha=0.5,epochs=2,outer=adam,lr=0.05"
MOMENTS = ("begin_stretch", "take", "bring", "halfway", "turn", "_end_round", "pull", "whole")


@dataclass(frozen=True)
class Kill:
    """What became of one."""

    led_s: float
    """From the kill to the layout in which another leads."""
    round_s: float
    """To the end of the round."""
    odd: str
    """What does not hold, if anything."""


def reference() -> str:
    """What one worker comes to, left alone."""
    with tempfile.TemporaryDirectory() as folder:
        return launch(Path(folder), SCRIPT, "-n", "1", "--strategy", STRATEGY).weights


def killed(folder: Path, seed: int, moment: str, workers: int, servers: int, want: str, machines: int = 1) -> Kill:
    number = random.Random(f"centre {seed} {moment}").randrange(1, ROUNDS - 1)
    flags = ("-n", str(workers), "--servers", str(servers), "--strategy", STRATEGY, "--checkpoint-every", "1")
    try:
        done = _launched(folder, flags, ("0.002", f"{number}:{moment}"), machines)
    except subprocess.TimeoutExpired:
        return Kill(-1, -1, "it did not end")
    if done.code or not (done.folder / "killed.json").exists():
        return Kill(-1, -1, done.last_line[-200:] if done.code else "nobody was killed")
    note, events = json.loads((done.folder / "killed.json").read_text()), done.events()
    led = next(event["time"] for event in events if event["event"] == "layout" and event["time"] > note["time"])
    over = [event["time"] for event in events if event["event"] == "round" and event["time"] > note["time"]]
    odd = "" if done.weights == want else f"weights {done.weights[:16]}"
    odd = odd or _odd_rounds([event for event in events if event["event"] == "round"], done.summary["by_round"])
    return Kill(led - note["time"], (over[0] if over else led) - note["time"], odd)


def _launched(folder: Path, flags: tuple[str, ...], args: tuple[str, ...], machines: int) -> Result:
    """With several machines: each has agents of its own, and they meet over loopback."""
    if machines == 1:
        return launch(folder, SCRIPT, *flags, args=args)
    with spread(folder, SCRIPT.read_text(), machines, *flags, args=args) as run:
        return ended(run)


def _odd_rounds(told: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> str:
    """Whether a round was gone back to, or lacks a client."""
    if [event["round"] for event in told] != list(range(ROUNDS)):
        return f"rounds {[event['round'] for event in told]}"
    lacking = [each for each in rounds if each["lacking"] or len(each["clients"]) != 5]
    return f"round {lacking[0]}" if lacking or len(rounds) != ROUNDS else ""


def main() -> int:
    parser = campaign(__doc__, seeds=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--machines", type=int, default=1)
    options = parser.parse_args()
    tell, want, kills = teller(options.out), reference(), []
    there = f"{options.workers} workers, {options.servers} servers" + (
        f", {options.machines} machines" if options.machines > 1 else ""
    )
    tell(f"{there}, {STRATEGY}; one worker comes to {want[:16]}")
    tell("seed  moment           led     round over  verdict")
    for seed in range(options.first, options.first + options.seeds):
        for moment in MOMENTS:
            with tempfile.TemporaryDirectory() as folder:
                it = killed(Path(folder), seed, moment, options.workers, options.servers, want, options.machines)
            kills.append(it)
            verdict = it.odd or ("same" if it.led_s <= LIMIT_S else "LATE")
            tell(f"{seed:4}  {moment:13}  {it.led_s * 1e3:6.0f} ms  {it.round_s * 1e3:8.0f} ms  {verdict}")
    wrong = sum(bool(it.odd) for it in kills)
    late = sum(it.led_s > LIMIT_S for it in kills)
    worst = max(it.led_s for it in kills)
    tell(
        f"{len(kills)} centres killed: another led after {worst * 1e3:.0f} ms at most, {late} over {LIMIT_S:g} s; "
        f"{len(kills) - wrong} of {len(kills)} with the weights of one worker, all rounds in turn and all clients in them"
    )
    return 1 if wrong or late else 0


if __name__ == "__main__":
    sys.exit(main())
