"""What a sparse model costs, by examples/ctr.py in real runs: python -m benchmarks.ctr [--samples 500000] [--batch-size 8192] [--workers 2]

    bytes    what main moves for each row that its shares touch, at three batch sizes: it should be the same, 8 + 4·dim
    memory   what a server's private memory has grown by at its highest, over rows touched × (value + optimizer's state)
    speed    rows that a server has moved, over the CPU seconds that it has used from the first step to the end: its
             reads, its share of the connections and the dense part are in it, and so are rows that begin
    AUC      the same model over few ids, beside an nn.Embedding in one process

Ids are drawn from 10^8 by Zipf's law; see examples/ctr_data.py. One server, without a backup.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.turns import HERE, python_path

EXAMPLE = HERE / "examples" / "ctr.py"
FEW = 20_000
_LOOK_S = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """Of a server process, as last looked at."""

    cpu_s: float = 0.0
    bytes: int = 0


def look(pid: int) -> Seen | None:
    """The CPU that it has used and its private memory; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    private = [line for line in status.splitlines() if line.startswith("RssAnon")]
    if not private:
        return None
    return Seen((int(fields[11]) + int(fields[12])) / _TICKS, int(private[0].split()[1]) << 10)


@dataclass
class Trained:
    summary: dict[str, Any]
    cpu_s: float = 0.0
    """Of the server, while training."""
    bytes: int = 0
    """By which its memory has grown at most."""

    @property
    def metrics(self) -> dict[str, float]:
        return self.summary["metrics"]  # type: ignore[no-any-return]


def lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def train(folder: Path, name: str, flags: list[str], arguments: list[str]) -> Trained:
    """One run, its server watched from when the rows are laid to the end."""
    command = [sys.executable, "-m", "paceline", "run", "--runs", str(folder), "--name", name, *flags]
    env = os.environ | {"PYTHONPATH": python_path(HERE)}
    with open(folder / f"{name}.out", "wb") as out:
        process = subprocess.Popen([*command, str(EXAMPLE), *arguments], env=env, stdout=out, stderr=out)
    pid, first, last, most = 0, None, None, 0
    while process.poll() is None:
        events = lines(folder / name / "events.jsonl") if first is None else []
        started = {event["event"]: event for event in events}
        if "layout" in started and "server started" in started:
            pid = started["server started"]["pid"]
        trained = any("moved" in line for line in lines(folder / name / "metrics.jsonl")[-8:])
        seen = look(pid) if pid and not trained else None  # behind that, the rows are hashed
        if seen is not None:
            first, last = first or seen, seen
            most = max(most, seen.bytes)
        time.sleep(_LOOK_S)
    if process.returncode:
        raise SystemExit((folder / f"{name}.out").read_text())
    summary = json.loads((folder / name / "summary.json").read_text())
    if first is None or last is None:
        return Trained(summary)
    return Trained(summary, last.cpu_s - first.cpu_s, most - first.bytes)


def per_row(folder: Path, options: argparse.Namespace, servers: list[str]) -> None:
    for batch in (512, 2048, 8192):
        arguments = ["--samples", str(12 * batch), "--batch-size", str(batch)]
        metrics = train(folder, f"bytes-{batch}", servers, arguments).metrics
        print(
            f"batch {batch}: main touched {metrics['touched'] / 12:,.0f} rows a step (its reads for the test in it), "
            f"{metrics['sent'] / metrics['touched']:.1f} bytes for each",
            flush=True,
        )


def large(folder: Path, options: argparse.Namespace, servers: list[str]) -> None:
    trained = train(
        folder, "large", servers, ["--samples", str(options.samples), "--batch-size", str(options.batch_size)]
    )
    metrics, summary = trained.metrics, trained.summary
    rows, moved = metrics["rows"], metrics["moved"]
    floor = rows * 64 * 4 * 2
    print(
        f"{rows:,.0f} rows of 10^8 ids after {summary['steps']} steps, AUC {metrics['auc']:.4f}; the server's memory has grown by "
        f"{trained.bytes / 1e6:.0f} MB at most, {trained.bytes / floor:.2f} × rows × (value + state) = {floor / 1e6:.0f} MB; its "
        f"tables have {metrics['held'] / 1e6:.0f} MB\n"
        f"{moved:,.0f} row updates in {trained.cpu_s:.2f} s of the server's CPU: {moved / trained.cpu_s / 1e3:,.0f} k row updates/s "
        f"a core, reads and all; {moved / summary['wall_s'] / 1e3:,.0f} k/s by the clock, from start to end",
        flush=True,
    )


def areas(folder: Path, options: argparse.Namespace, servers: list[str]) -> None:
    few = ["--ids", str(FEW), "--samples", str(options.few_samples)]
    sparse = train(folder, "sparse", servers, few).metrics["auc"]
    dense = train(folder, "dense", ["-n", "1"], [*few, "--dense"]).metrics["auc"]
    print(
        f"AUC over {FEW:,} ids: {sparse:.5f} sparse, {dense:.5f} dense in one process; {abs(sparse - dense):.5f} apart"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=500_000)
    parser.add_argument("--batch-size", type=int, default=8192, help="of the run over many ids")
    parser.add_argument("--few-samples", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=("bytes", "large", "auc"))
    options = parser.parse_args()
    servers = ["-n", str(options.workers), "--strategy", "ps", "--servers", "1"]
    with tempfile.TemporaryDirectory() as name:
        for what, part in (("bytes", per_row), ("large", large), ("auc", areas)):
            if options.only in (None, what):
                part(Path(name), options, servers)


if __name__ == "__main__":
    main()
