"""Sides of a comparison that live at once and take turns, so that the machine's moods hit all alike."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
_PATIENCE_S = 180


def wait_for_turns(folder: str | Path, side: str, main: bool, measure: Callable[[], float]) -> None:
    """Inside a side's processes: measure whenever it is this side's turn, until told to stop."""
    turn, folder = 0, Path(folder)
    while True:
        while not (folder / f"{side}-{turn}").exists():
            if (folder / "stop").exists():
                return
            time.sleep(0.02)
        took = measure()
        if main:
            (folder / f"{side}-{turn}.tmp").write_text(repr(took))
            os.replace(folder / f"{side}-{turn}.tmp", folder / f"{side}-{turn}.done")
        turn += 1


def python_path(tree: Path) -> str:
    """For a process that is to import this checkout before anything else."""
    return os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])


class Side:
    """One side: a Python command that ends in `wait_for_turns`. `tree` is the checkout whose code it runs."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, tree: Path = HERE) -> None:
        self.name, self._folder, self._turn = name, folder, 0
        self._log = folder / f"{name}.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": python_path(tree)}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], cwd=tree, env=env, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def take_turn(self) -> float:
        (self._folder / f"{self.name}-{self._turn}").touch()
        done = self._folder / f"{self.name}-{self._turn}.done"
        deadline = time.monotonic() + _PATIENCE_S
        while not done.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} ended:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.02)
        self._turn += 1
        return float(done.read_text())

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """For one that takes a core while it waits, as torch RPC does: others would be measured beside it."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        (self._folder / "stop").touch()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @staticmethod
    def take_turns(sides: Sequence[Side], pairs: int) -> list[list[float]]:
        """`pairs` measurements of each side, in alternating order; the first ones warm up and are dropped."""
        times: dict[str, list[float]] = {side.name: [] for side in sides}
        try:
            for turn in range(pairs + 1):
                for side in sides if turn % 2 else sides[::-1]:
                    took = side.take_turn()
                    if turn:
                        times[side.name].append(took)
        finally:
            for side in sides:
                side.end()
        return [times[side.name] for side in sides]


def over_cases(
    about: str | None, cases: Sequence[tuple[Any, ...]], compare: Callable[..., str], pairs: int = 20
) -> None:
    """The command line of a benchmark that compares two sides in several cases; a case begins with its name."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--only", default="", help="run the cases whose name has this in it")
    options = parser.parse_args()
    for case in cases:
        if options.only.casefold() in case[0].casefold():
            print(compare(*case, options.pairs), flush=True)
