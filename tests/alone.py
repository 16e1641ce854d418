"""Scripts by themselves, as plain `python` runs them, without two seconds of imports each.

`python -m tests.alone` is a process that has imported torch, as a run's nursery has, and forks itself for every
script. Each test process starts one when the first test asks for the fixture `alone`. For what one worker comes to:
what other counts of workers are compared with, and mistakes that one worker is enough for.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import paceline
from paceline.launch import boot
from paceline.launch.environment import nursery_environment
from paceline.launch.nursery import prepare
from tests.end_to_end.launching import TIMEOUT_S, Result, environment, write_script
from tests.forked import whole_life

ROOT = Path(__file__).resolve().parents[1]


class Alone:
    def __init__(self) -> None:
        self._host = subprocess.Popen(
            [sys.executable, "-m", "tests.alone"], cwd=ROOT, env=nursery_environment(environment(), 1),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __call__(
        self, folder: Path, script: str | Path, *, args: tuple[str, ...] = (), name: str = "alone", **settings: Any
    ) -> Result:
        """The script to its end, with these settings as if it had given them to init(); its run is named `name`."""
        path = script if isinstance(script, Path) else write_script(folder, script)
        runs, own = folder / "runs", folder / f"runs-of-{name}"
        out, err = folder / f"{name}.out", folder / f"{name}.err"
        ask = {"folder": folder, "runs": own, "out": out, "err": err, "arguments": [path, *args], "settings": settings}
        code = self._ask(json.dumps(ask, default=str))
        run = runs / name
        if own.exists():
            runs.mkdir(exist_ok=True)
            (made,) = own.iterdir()
            made.rename(run)
            own.rmdir()
        kept = run / "summary.json"
        summary = json.loads(kept.read_text()) if kept.exists() else {}
        return Result(code, out.read_text(), err.read_text(), run, summary)

    def _ask(self, line: str) -> int:
        assert self._host.stdin is not None and self._host.stdout is not None
        self._host.stdin.write(line + "\n")
        self._host.stdin.flush()
        if not select.select([self._host.stdout], [], [], TIMEOUT_S)[0]:
            os.killpg(self._host.pid, signal.SIGKILL)
            raise TimeoutError(f"the script has not ended within {TIMEOUT_S} s: {line}")
        return int(self._host.stdout.readline())

    def close(self) -> None:
        self._host.communicate()


def main() -> None:
    prepare()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            be(json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def be(ask: dict[str, Any]) -> NoReturn:
    """The script's process, from the fork to its end."""
    with whole_life():
        _take_descriptors(ask["out"], ask["err"])
        os.chdir(ask["folder"])
        os.environ["PACELINE_RUNS"] = ask["runs"]
        vars(paceline)["init"] = functools.partial(paceline.init, **ask["settings"])
        target, *rest = ask["arguments"]
        boot._run_target(target, rest, as_module=False)
    raise AssertionError("it is over")


def _take_descriptors(out: str, err: str) -> None:
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (path, flags) in enumerate([(os.devnull, os.O_RDONLY), (out, new), (err, new)]):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)


if __name__ == "__main__":
    main()
