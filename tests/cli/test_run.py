"""`paceline run` and plain `python`, where a script or its arguments are not as they should be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.run import _tell_strays
from paceline.launch.boot import _after_exit
from tests.alone import Alone
from tests.end_to_end.launching import BODY, HEAD, environment, launch, write_script

pytestmark = pytest.mark.usefixtures("warm")
PARSER = (
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--seed')\np.add_argument('--lr')\np.parse_args()\n"
)


def test_a_flag_after_the_script_is_pointed_at_when_the_script_refuses_it(tmp_path: Path) -> None:
    result = launch(tmp_path, PARSER, args=("--lr", "1", "--slots", "4"))
    assert result.code == 2
    assert "--slots 4 stands after the script" in result.last_line
    assert "paceline run --slots 4 SCRIPT" in result.last_line


@pytest.mark.parametrize(
    ("flags", "given", "pointed_at"),
    [
        ({}, ("--slots", "4"), "--slots 4"),
        ({}, ("--slots=4",), "--slots=4"),
        ({}, ("--lr", "1", "--share-gpus"), "--share-gpus"),
        ({}, ("--lr", "1", "--bogus"), ""),
        ({"seed": 1}, ("--seed", "2", "--bogus"), ""),
    ],
)
def test_which_refused_argument_is_pointed_at(
    capsys: pytest.CaptureFixture[str], flags: dict[str, int], given: tuple[str, ...], pointed_at: str
) -> None:
    _tell_strays(given, flags)
    said = capsys.readouterr().err
    assert said.startswith(f"paceline: {pointed_at} stands after the script") if pointed_at else said == ""


def test_other_refused_arguments_get_no_hint(tmp_path: Path) -> None:
    result = launch(tmp_path, PARSER, "--seed", "1", args=("--seed", "2", "--bogus"))
    assert result.code == 2 and "stands after the script" not in result.err


def test_a_script_that_fails_otherwise_gets_no_hint(tmp_path: Path) -> None:
    result = launch(tmp_path, PARSER + "import sys; sys.exit(3)", args=("--seed", "1"))
    assert result.code == 3 and "stands after the script" not in result.err


def test_a_script_may_print_its_own_help(tmp_path: Path) -> None:
    result = launch(tmp_path, PARSER, "-n", "2", args=("--help",))
    assert result.code == 0 and "show this help message" in result.out
    assert "paceline.init()" not in result.err
    assert _after_exit(SystemExit(0), ["-h"]) == 0


def test_an_exit_with_0_without_init_is_still_a_mistake(tmp_path: Path) -> None:
    result = launch(tmp_path, PARSER + "import sys; sys.exit(0)", "-n", "2")
    assert result.code == 2 and "without paceline.init()" in result.last_line


WRONG = {
    "strategy='alreduce'": "unknown strategy 'alreduce'; did you mean 'allreduce'? There are: allreduce, .*`paceline strategies` says what they do",
    "slot=4": "paceline.init() has no setting 'slot'; did you mean 'slots'? There are: .*workers",
}


def is_one_line(said: str, argument: str) -> None:
    begin, end = WRONG[argument].split(".*")
    assert "Traceback" not in said
    (line,) = [line for line in said.strip().splitlines() if "are still starting" not in line]
    assert f"train.py:5: {begin}" in line and line.endswith(end)


@pytest.mark.parametrize("argument", WRONG)
def test_a_wrong_argument_of_init_is_one_line(tmp_path: Path, argument: str, alone: Alone) -> None:
    result = alone(tmp_path, HEAD.replace("init()", f"init({argument})") + BODY)
    assert result.code == 2, result.err
    is_one_line(result.err, argument)


def test_so_it_is_of_several_workers(tmp_path: Path) -> None:
    result = launch(tmp_path, HEAD.replace("init()", "init(slot=4)") + BODY, "-n", "2")
    assert result.code == 2, result.err
    is_one_line(result.err, "slot=4")


@pytest.mark.parametrize(("flags", "code"), [((), 2), (("-i",), 0)])
def test_a_mistake_under_plain_python_ends_with_2_but_not_a_prompt(
    tmp_path: Path, flags: tuple[str, ...], code: int
) -> None:
    script = """
    import atexit
    from paceline.errors import UsageError
    from paceline.launch.boot import tell_usage_errors_shortly
    tell_usage_errors_shortly()
    atexit.register(print, "the end")
    raise UsageError("no")
    """
    path = write_script(tmp_path, script)
    done = subprocess.run(
        [sys.executable, *flags, str(path)], input="", env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, "the end\n")
    assert done.stderr.startswith("paceline: no\n") and "Traceback" not in done.stderr


def test_other_errors_under_plain_python_are_left_to_python(tmp_path: Path) -> None:
    code = "import paceline.launch.boot as b; b.tell_usage_errors_shortly(); raise ValueError('no')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ValueError: no" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-n", "1", "--spares", "1"), "--spares with one worker"),
        (("-n", "2", "--spares", "-1"), "--spares must be 0 or more"),
    ],
)
def test_spares_that_could_never_help_are_refused(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    result = launch(tmp_path, HEAD + BODY, *flags)
    assert result.code == 2 and words in result.last_line
    assert not result.folder.exists()


def test_a_spare_needs_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    result = launch(tmp_path, HEAD + BODY, "-n", "2", "--spares", "1")
    assert result.code == 2 and "2 workers and 1 spare(s) for 2 GPU(s)" in result.last_line
