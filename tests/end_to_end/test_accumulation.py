"""Gradients that a script adds up over several batches are part of the run's state: for a newcomer, and for a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import HEAD, launch, paceline

SCRIPT = (
    HEAD
    + """
import sys, time
from paceline.state.checkpoint import listed
hold = [int(number) for number in sys.argv[1:]]
def written():   # a checkpoint of the steps before this one
    return any(found.step == run.step - 1 for found in listed(str(run.dir / "checkpoints")))
run.prepare(model, optimizer, loader)
for epoch in run.epochs(12):
    for batch in loader:
        if run.step % 5 == 0:
            optimizer.zero_grad()
        while run.step in hold and not run._session.board.next_term and run._session.view.term < 3:
            time.sleep(0.001)   # until a newcomer is announced
        while run.step in (6, 10, 14) and run.settings.checkpoint_every and not run.resumed and not written():
            time.sleep(0.001)
        if run.step in (6, 10):
            run._keeping.settle()   # main still removes older ones, and leaves out the next if that takes until then
        for x, y in run.slots():
            (F.cross_entropy(model(x), y) / 5).backward()
        if run.step % 5 == 4:
            optimizer.step()
"""
)
SLOTS = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> str:
    return alone(tmp_path_factory.mktemp("alone"), SCRIPT, slots=SLOTS).weights


@pytest.mark.parametrize("flags", [(), ("--strategy", "ps", "--servers", "2")], ids=["allreduce", "ps"])
def test_a_newcomer_goes_on_with_them(tmp_path: Path, flags: tuple[str, ...], undisturbed: str) -> None:
    """It comes in behind the second of five batches."""
    fault = ("--fault", "kill worker:1 @step 8")
    result = launch(tmp_path, SCRIPT, "-n", "2", "--slots", str(SLOTS), *flags, *fault, args=("11",))
    assert result.weights == undisturbed, result.err
    joined = [event for event in result.events() if event["event"] == "joined"]
    assert [event["worker"] for event in joined] == [2]


def test_a_resume_goes_on_with_them(tmp_path: Path, undisturbed: str) -> None:
    flags = ("-n", "2", "--slots", str(SLOTS), "--checkpoint-every", "4", "--fault", "kill everything @step 15")
    assert launch(tmp_path, SCRIPT, *flags).code != 0
    done = paceline("resume", "it", "-n", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "going on from step 13" in done.stderr
    assert json.loads((tmp_path / "runs" / "it" / "summary.json").read_text())["weights_sha256"] == undisturbed
