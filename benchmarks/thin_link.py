"""Two machines on a thin link: time to a test accuracy, against plain DDP on the same link.

    python -m benchmarks.thin_link steps --rate 100mbit       seconds of DDP's steps on the link
    python -m benchmarks.thin_link ddp                        DDP off the link: the accuracy after each epoch
    python -m benchmarks.thin_link run --rate 100mbit         the run on the link, from its first step to its last
    python -m benchmarks.thin_link bytes --strategy allreduce+int8     a few steps: what went over the link, by three counts
    python -m benchmarks.thin_link pace --rate 100mbit --strategy streaming:50,4 --tree DIR     steps a second, of the code in DIR
    python -m benchmarks.thin_link report                     what they come to

Needs root: the machines are network namespaces, and the link between them a token bucket (`tc tbf`), each way. One worker a
machine, with one thread; the MLP 784-2048-2048-10 on Fashion-MNIST, SGD with momentum 0.9, a learning rate that falls to 0 by
a cosine. DDP would take hours on such a link, so its time is its step's median there times the steps that it needs, counted off
the link; no evaluation is in it. In a run's time there is everything from its first step on, evaluations too. Accuracy is
looked at after each epoch, on both sides. Each part adds a line to the records, and `report` reads them: the newest of a kind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.models import mlp
from paceline.tensors.codecs import parse
from tests.network import Machine, Network

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "thin-link.jsonl"
PACELINE = [sys.executable, "-m", "paceline"]
SCRIPT = str(ROOT / "benchmarks" / "thin_link_script.py")
PATIENCE_S = 3600.0
OFF = "off"
"""The rate of a link that is as fast as it can be."""


def environment(tree: Path = ROOT, **more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree), **more}


def ddp(machines: tuple[Machine, Machine], *words: str) -> list[Any]:
    """What DDP between them says."""
    sides = [
        machine.popen(
            [sys.executable, "-m", "benchmarks.thin_link_ddp", str(rank), machines[0].address, *words],
            cwd=ROOT,
            env=environment(GLOO_SOCKET_IFNAME="eth0"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(machines)
    ]
    said = [side.communicate(timeout=PATIENCE_S)[0] for side in sides]
    assert not any(side.returncode for side in sides), "DDP has failed"
    return [json.loads(line) for line in said[0].splitlines()]


def run(
    machines: tuple[Machine, Machine], strategy: str, words: Sequence[str], *more: str, tree: Path = ROOT
) -> dict[str, Any]:
    """A run between them: its curve of (steps, seconds, accuracy), and what its summary says. `tree`: whose code."""
    one, two = machines
    with tempfile.TemporaryDirectory() as runs:
        flags = ["--runs", runs, "--name", "it", "-n", "2", "--slots", "2", "--strategy", strategy, "--show", "none"]
        flags += more
        several = ["--machines", "2", "--listen", one.address]
        options: dict[str, Any] = {"cwd": tree, "env": environment(tree), "stdout": subprocess.DEVNULL}
        going = one.popen([*PACELINE, "run", *flags, *several, SCRIPT, *words], **options)
        folder = Path(runs) / "it"
        join = ["--join", _address(folder, going), "--secret-file", str(folder / "secret"), "--runs", runs]
        two.popen([*PACELINE, "agent", *join], **options)
        assert going.wait(PATIENCE_S) == 0, "the run has failed"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
    curve = [[line["step"], round(line["time"] - lines[0]["time"], 2), line["accuracy"]] for line in lines]
    told = (
        "exit",
        "recoveries",
        "rounds",
        "participants",
        "drift",
        "wire_bytes",
        "compression",
        "median_step_s",
        "time_split",
        "weights_sha256",
    )
    return {"curve": curve, **{name: summary[name] for name in told if name in summary}}


def pace(
    machines: tuple[Machine, Machine], strategy: str, words: Sequence[str], steps: int, tree: Path
) -> dict[str, Any]:
    """Steps a second, without evaluations: by what main's time went to from its first step to the last exchange."""
    uncopied = ["--no-state-copies"] if tree == ROOT else []  # code before had no copies of replicas' states
    found = run(machines, strategy, words, "--steps", str(steps), *uncopied, tree=tree)
    commit = subprocess.run(
        ["git", "-C", tree, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    )
    seconds = sum(found["time_split"].values())
    told = {name: found[name] for name in ("rounds", "wire_bytes", "time_split", "weights_sha256")}
    return {"commit": commit.stdout.strip(), "steps": steps, "steps_a_second": round(steps / seconds, 3), **told}


def sent(machines: tuple[Machine, Machine], strategy: str, steps: int) -> dict[str, Any]:
    """Bytes a step, of both workers together: as the documents say, as the run counts, and as the link's ends do, with the
    headers of all packets and the run's whole start."""
    codec, shapes = parse(strategy.partition("+")[2]), [param.shape for param in mlp().parameters()]
    found = run(machines, strategy, ("64", "1", "0.05"), "--steps", str(steps), "--no-state-copies")
    link = sum(machine.sent_bytes for machine in machines)
    return {
        "strategy": strategy,
        "steps": steps,
        "stated": 2 * codec.nbytes(shapes),
        "counted": round(found["wire_bytes"] / steps),
        "on_link": round(link / steps),
        "fp32": 2 * 4 * sum(map(prod, shapes)),
    }


def _address(folder: Path, going: subprocess.Popen[Any]) -> str:
    """Where it waits for its other machine."""
    events = folder / "events.jsonl"
    while True:
        assert going.poll() is None, "the run has ended before its other machine came"
        for line in events.read_text().splitlines() if events.exists() else []:
            if '"awaiting"' in line:
                return str(json.loads(line)["address"])
        time.sleep(0.05)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    words = (str(args.batch), str(args.epochs), str(args.lr))
    record = {"part": args.part, "rate": args.rate, "batch": args.batch, "load": round(os.getloadavg()[0], 1)}
    recipe = {"epochs": args.epochs, "lr": args.lr}
    with Network(2) as network:
        machines = network.machine(1), network.machine(2)
        if args.rate != OFF:
            machines[0].thin(args.rate)
        if args.part == "steps":
            return {**record, "step_s": ddp(machines, *words, str(args.steps + 1))[-1]}
        if args.part == "ddp":
            return {**record, **recipe, "curve": ddp(machines, *words)}
        if args.part == "bytes":
            return {**record, **sent(machines, args.strategy, args.steps)}
        if args.part == "pace":
            found = pace(machines, args.strategy, words, args.steps, args.tree)
            return {**record, "strategy": args.strategy, **found}
        return {**record, **recipe, "strategy": args.strategy, **run(machines, args.strategy, words)}


def report(records: list[dict[str, Any]], target: float) -> list[str]:
    """A line for each run's newest record, beside DDP's newest steps on the same link, by the recipe that takes the fewest of them."""
    newest = {(each["part"], each["rate"], each.get("strategy")): each for each in records}
    lines = [bytes_words(each) for each in newest.values() if each["part"] == "bytes"]
    lines += pace_words([each for each in records if each["part"] == "pace"])
    curves = [each["curve"] for each in records if each["part"] == "ddp"]
    curves = [curve for curve in curves if any(accuracy >= target for _, accuracy in curve)]
    for mine in (each for each in newest.values() if each["part"] == "run"):
        steps = newest.get(("steps", mine["rate"], None))
        reached = next(([n, s] for n, s, accuracy in mine["curve"] if accuracy >= target), None)
        last = mine["curve"][-1]
        words = f"{mine['rate']:8} {mine['strategy']}: {last[2]:.4f} after {last[0]} steps, {last[1]:.0f} s, "
        words += f"{mine['wire_bytes'] / 1e6:.0f} MB, {mine['recoveries']} lost"
        if steps is not None and curves and reached is not None:
            needed, whole = min((next(n for n, found in curve if found >= target), curve[-1][1]) for curve in curves)
            step_s = statistics.median(steps["step_s"])
            words += f"; {target} after {reached[0]} steps, {reached[1]:.1f} s. DDP: {whole:.4f}; {target} after {needed} steps "
            words += f"of {step_s:.3f} s, {needed * step_s:.0f} s: {needed * step_s / reached[1]:.1f} times as long"
        lines.append(words)
    return lines


def bytes_words(record: dict[str, Any]) -> str:
    stated, counted, link, fp32 = (record[name] for name in ("stated", "counted", "on_link", "fp32"))
    return (
        f"{record['strategy']}: {counted} bytes a step of {record['steps']}, {counted / stated - 1:+.2%} of the {stated} stated, "
        f"{counted / fp32:.4f} of fp32; {link} on the link with all headers, {link / stated - 1:+.2%}"
    )


def pace_words(records: list[dict[str, Any]]) -> list[str]:
    """A line for each strategy and commit on each link: the median of its runs, and where their time went in the mean."""
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for each in sorted(records, key=lambda each: float(each["steps_a_second"])):
        runs.setdefault((each["rate"], each["strategy"], each["commit"]), []).append(each)
    lines = []
    for (rate, strategy, commit), found in sorted(runs.items()):
        paces = [each["steps_a_second"] for each in found]
        means = {name: statistics.mean(each["time_split"][name] for each in found) for name in found[0]["time_split"]}
        split = ", ".join(f"{name} {seconds:.1f}" for name, seconds in means.items())
        hashes = " ".join(sorted({each["weights_sha256"][:12] for each in found}))
        lines.append(
            f"{rate:8} {strategy} at {commit}: {statistics.median(paces):.2f} steps a second ({', '.join(map(str, paces))}) over "
            f"{found[0]['steps']}; {split} s; {found[0]['wire_bytes'] / 1e6:.0f} MB; weights {hashes}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["steps", "ddp", "run", "bytes", "pace", "report"])
    parser.add_argument("--rate", default=OFF, help="of the link, as tc writes it")
    parser.add_argument("--strategy", default="diloco:50+int8")
    parser.add_argument("--target", type=float, default=0.88)
    parser.add_argument("--batch", type=int, default=64, help="of each worker")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=5, help="of DDP on the link, of `bytes` or of `pace`")
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose code `pace` runs")
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args()
    if args.part == "report":
        records = [json.loads(line) for line in args.records.read_text().splitlines()]
        print("\n".join(report(records, args.target)))
        return
    record = json.dumps(measured(args))
    with open(args.records, "a") as file:
        file.write(record + "\n")
    print(record)


if __name__ == "__main__":
    main()
