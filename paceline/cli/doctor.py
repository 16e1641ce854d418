"""paceline doctor"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from paceline.cluster.memory import available_bytes, words
from paceline.folder import RunFolder
from paceline.launch.environment import visible_gpus


@click.command("doctor")
def command() -> int:
    """Check this machine: cores, memory, GPUs, and whether each collective tells the truth.

    Every transport that is there adds up numbers between two real workers; the result is compared with
    arithmetic. Ends with 1 if anything that is there gives a wrong answer.
    """
    for name, value in _facts():
        click.echo(f"{name:12} {value}")
    good = True
    for transport, why_not in _transports():
        if why_not:
            click.echo(f"{transport:12} not here: {why_not}")
            continue
        fine, text = _probe(transport)
        good = good and fine
        click.echo(f"{transport:12} {text}")
    return 0 if good else 1


def _facts() -> list[tuple[str, str]]:
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return [
        ("python", platform.python_version()),
        ("torch", _torch_version()),
        ("cores", f"{len(os.sched_getaffinity(0))} ({platform.machine()})"),
        ("memory", f"{words(available_bytes())} free (gradients are shared there, by memfd)"),
        ("/dev/shm", f"{words(shm.free)} free (loader processes use it)" if shm else "missing: use num_workers=0"),
        ("GPUs", ", ".join(visible_gpus()) or "none"),
    ]


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return "missing: pip install torch"


def _transports() -> list[tuple[str, str]]:
    gpus = len(visible_gpus())
    return [
        ("shm", "" if platform.machine() == "x86_64" else "its memory order is known on x86-64 only"),
        ("gloo", ""),
        ("nccl", "" if gpus > 1 else f"it needs two GPUs, there are {gpus}"),
    ]


def _probe(transport: str) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as runs:
        flags = ["-n", "2", "--transport", transport, "--runs", runs, "--name", "probe", "--show", "none"]
        if transport != "nccl":
            flags += ["--device", "cpu"]
        command = [sys.executable, "-P", "-m", "paceline", "run", *flags, "-m", "paceline.cli.probe"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return False, "no answer within 60 s"
        folder = RunFolder(Path(runs) / "probe")
        seconds = folder.read_json(folder.summary).get("probe_s")
        if done.returncode or seconds is None:
            return False, f"WRONG: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'no answer'}"
        return True, f"true (2 MB between 2 workers in {seconds * 1e3:.2f} ms)"
