"""The flags of `paceline rehearse`, without a run; real rehearsals are in tests/faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import paceline.cli.rehearse as verb
from paceline.cli import cli
from paceline.errors import UsageError
from paceline.faults.judge import Outcome, Verdict, judge
from paceline.faults.plan import Fault
from paceline.faults.rehearsal import Rehearsal
from paceline.folder import RunFolder

SUMMARY = {"weights_sha256": "ab" * 32, "samples": 1000, "steps": 100, "exit": "finished"}


def call(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["rehearse", "--runs", str(folder), *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kinds", "kill,maim", "x.py"], "'maim' is none of kill, freeze, cut, slow"),
        (["--roles", "agent", "x.py"], "'agent' is none of worker, server, main,"),
        (["-n", "1", "x.py"], "1 is not in the range x>=2"),
        ([], "Missing argument 'SCRIPT'"),
        (["--kinds", "slow", "--roles", "nursery", "x.py"], "--kinds slow can hit none of --roles nursery"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path: Path, arguments: list[str], says: str) -> None:
    result = call(tmp_path, *arguments)
    assert says in result.output + str(result.exception) and result.exit_code
    assert list(tmp_path.iterdir()) == []


FLAGS = ["-n", "3", "--servers", "2", "--replicas", "1", "-m", "--slots", "6", "--strategy", "ps", "--share-gpus"]
FLAGS += ["--steps", "9"]


class Fake(Rehearsal):
    """Runs that come out as they should, except with seed 4."""

    def reference(self) -> Outcome:
        return Outcome(0, SUMMARY, 5.0)

    def rehearse(self, seed: int, faults: Sequence[Fault], reference: Outcome) -> Verdict:
        assert list(self.flags) == FLAGS
        assert list(self.target) == ["pkg.train", "--steps", "a b"]
        return judge(reference.summary, Outcome(int(seed == 4), SUMMARY, 6.0), seed, faults)


def test_flags_are_handed_on_and_verdicts_told_in_the_order_of_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "Rehearsal", Fake)
    flags = [*FLAGS, "--jobs", "3"]
    for first, code in ((1, 0), (3, 1)):
        runner = CliRunner()
        seeds = ["--seeds", "3", "--first-seed", str(first)]
        arguments = ["rehearse", "--runs", str(tmp_path), *flags, *seeds, "pkg.train", "--steps", "a b"]
        result = runner.invoke(cli, arguments, standalone_mode=False)
        assert result.return_value == code, result.output
        rows = [line.split() for line in result.stdout.splitlines()]
        assert [words[0] for words in rows[1:4]] == [str(seed) for seed in range(first, first + 3)]
        assert ("pkg.train --steps 'a b'" in result.stdout) == ("exit code 1" in result.stdout) == bool(code)


def test_only_servers_of_a_run_that_can_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is known from the run without faults: a script may say it too."""

    def reference(self: Rehearsal) -> Outcome:
        run = RunFolder.create(self.folder, "reference")
        run.write_json(run.config, {"settings": {"servers": 1, "replicas": 2}})
        return Outcome(0, SUMMARY, 5.0)

    monkeypatch.setattr(Rehearsal, "reference", reference)
    result = call(tmp_path, "--roles", "server", "--strategy", "ps", "x.py")
    assert isinstance(result.exception, UsageError)
    assert "--servers 1 --replicas 2 bears no server's death" in str(result.exception)
