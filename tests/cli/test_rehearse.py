"""The flags of `paceline rehearse`, without a run; real rehearsals are in tests/faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import paceline.cli.rehearse as verb
from paceline.cli import cli
from paceline.faults.judge import Outcome, Verdict, judge
from paceline.faults.plan import Fault
from paceline.faults.rehearsal import Rehearsal

SUMMARY = {"weights_sha256": "ab" * 32, "samples": 1000, "steps": 100, "exit": "finished"}


def call(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["rehearse", "--runs", str(folder), *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kinds", "kill,maim", "x.py"], "'maim' is none of kill, freeze, cut, slow"),
        (["--roles", "server", "x.py"], "'server' is none of worker, main,"),
        (["-n", "1", "x.py"], "1 is not in the range x>=2"),
        ([], "Missing argument 'SCRIPT'"),
        (["--kinds", "slow", "--roles", "nursery", "x.py"], "--kinds slow can hit none of --roles nursery"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path: Path, arguments: list[str], says: str) -> None:
    result = call(tmp_path, *arguments)
    assert says in result.output + str(result.exception) and result.exit_code
    assert list(tmp_path.iterdir()) == []


class Fake(Rehearsal):
    """Runs that come out as they should, except with seed 4."""

    def reference(self) -> Outcome:
        return Outcome(0, SUMMARY, 5.0)

    def rehearse(self, seed: int, faults: Sequence[Fault], reference: Outcome) -> Verdict:
        assert list(self.flags) == ["-n", "3", "-m", "--slots", "6", "--share-gpus", "--steps", "9"]
        assert list(self.target) == ["pkg.train", "--steps", "a b"]
        return judge(reference.summary, Outcome(int(seed == 4), SUMMARY, 6.0), seed, faults)


def test_flags_are_handed_on_and_verdicts_told_in_the_order_of_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "Rehearsal", Fake)
    flags = ["-n", "3", "--steps", "9", "-m", "--slots", "6", "--share-gpus", "--jobs", "3"]
    for first, code in ((1, 0), (3, 1)):
        runner = CliRunner()
        seeds = ["--seeds", "3", "--first-seed", str(first)]
        arguments = ["rehearse", "--runs", str(tmp_path), *flags, *seeds, "pkg.train", "--steps", "a b"]
        result = runner.invoke(cli, arguments, standalone_mode=False)
        assert result.return_value == code, result.output
        rows = [line.split() for line in result.stdout.splitlines()]
        assert [words[0] for words in rows[1:4]] == [str(seed) for seed in range(first, first + 3)]
        assert ("pkg.train --steps 'a b'" in result.stdout) == ("exit code 1" in result.stdout) == bool(code)
