"""Two machines on a thin link: time to a test accuracy, against plain DDP on the same link.

    python -m benchmarks.thin_link --rate 100mbit --strategy diloco:50+int8

Needs root: the machines are network namespaces, and the link between them a token bucket (`tc tbf`), each way. One worker a
machine; the MLP 784-2048-2048-10 on Fashion-MNIST, batch 64 a worker. DDP would take hours there, so its time is its
step's median on the link times the steps that it needs: those of `allreduce`, whose gradients are DDP's, counted off the link.
Accuracy is looked at after each epoch, so steps and times are those of whole epochs.
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
from pathlib import Path
from typing import Any

from tests.network import Network

ROOT = Path(__file__).parents[1]
PACELINE = [sys.executable, "-m", "paceline"]
SCRIPT = str(ROOT / "benchmarks" / "thin_link_script.py")
PATIENCE_S = 3600.0


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def ddp_step_s(network: Network, steps: int) -> list[float]:
    """Of DDP between the two machines."""
    one, two = network.machine(1), network.machine(2)
    sides = [
        machine.popen(
            [sys.executable, "-m", "benchmarks.thin_link_ddp", str(rank), one.address, str(steps)],
            cwd=ROOT,
            env=environment() | {"GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate((one, two))
    ]
    said = [side.communicate(timeout=PATIENCE_S)[0] for side in sides]
    return [float(line) for line in said[0].split()]


def off_the_link(folder: Path, strategy: str, target: float, epochs: int) -> dict[str, Any]:
    flags = ["--runs", str(folder), "--name", "off", "-n", "2", "--slots", "2", "--strategy", strategy]
    command = [*PACELINE, "run", *flags, "--target", f"accuracy>={target}", SCRIPT, "2", str(epochs)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=PATIENCE_S)
    return dict(json.loads((folder / "off" / "summary.json").read_text()))


def on_the_link(network: Network, folder: Path, strategy: str, target: float, epochs: int) -> dict[str, Any]:
    """The whole run, from its first step: its summary and events."""
    one, two = network.machine(1), network.machine(2)
    flags = ["--runs", str(folder), "--name", "on", "-n", "2", "--slots", "2", "--strategy", strategy]
    several = ["--machines", "2", "--listen", one.address, "--target", f"accuracy>={target}"]
    options: dict[str, Any] = {"cwd": ROOT, "env": environment(), "stdout": subprocess.DEVNULL}
    run = one.popen([*PACELINE, "run", *flags, *several, SCRIPT, "2", str(epochs)], **options)
    events = folder / "on" / "events.jsonl"
    address = ""
    while not address:
        assert run.poll() is None, "the run has ended before its other machine came"
        time.sleep(0.05)
        lines = events.read_text().splitlines() if events.exists() else []
        address = next((json.loads(line)["address"] for line in lines if '"awaiting"' in line), "")
    secret = str(folder / "on" / "secret")
    two.popen([*PACELINE, "agent", "--join", address, "--secret-file", secret, "--runs", str(folder)], **options)
    assert run.wait(PATIENCE_S) == 0
    return dict(json.loads((folder / "on" / "summary.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it")
    parser.add_argument("--strategy", default="diloco:50+int8")
    parser.add_argument("--target", type=float, default=0.88)
    parser.add_argument("--epochs", type=int, default=12, help="at most")
    parser.add_argument("--ddp-steps", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Network(2) as network:
        network.machine(1).thin(args.rate)
        steps = ddp_step_s(network, args.ddp_steps)
        print(
            f"DDP on {args.rate}: {statistics.median(steps):.3f} s a step (of {', '.join(map(str, steps))})", flush=True
        )
        mine = on_the_link(network, Path(folder), args.strategy, args.target, args.epochs)
        print(
            f"{args.strategy} on {args.rate}: accuracy {mine['metrics']['accuracy']:.4f} after {mine['steps']} steps, "
            f"{mine['wall_s']:.1f} s; {mine['wire_bytes'] / 1e6:.1f} MB sent, workers lost {mine['recoveries']}, {mine['exit']}",
            flush=True,
        )
        other = off_the_link(Path(folder), "allreduce", args.target, args.epochs)
        print(f"allreduce off the link: accuracy {other['metrics']['accuracy']:.4f} after {other['steps']} steps")
        ddp_s = statistics.median(steps) * other["steps"]
        print(f"DDP would take {ddp_s:.0f} s: {ddp_s / mine['wall_s']:.1f} times as long")


if __name__ == "__main__":
    main()
