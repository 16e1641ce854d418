"""Passes over the loader beside the training one, and several loops over epochs."""

from __future__ import annotations

from pathlib import Path

from tests.alone import Alone
from tests.end_to_end.launching import BODY, HEAD, launch, paceline

LOOKS = (
    HEAD
    + """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    x, y = next(iter(loader))
    for x, y in loader:
        break
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
    with torch.no_grad():
        seen = [(len(y), float(F.cross_entropy(model(x), y))) for x, y in loader]
    assert [n for n, _ in seen] == [24] * 4, seen
    print("seen", seen)
"""
)


def test_what_is_only_looked_at_is_not_trained_and_a_second_pass_sees_all(tmp_path: Path, alone: Alone) -> None:
    """With one slot, where nobody is met in a step and only the optimizer tells; and with two workers."""
    for slots in (1, 2):
        plain = alone(tmp_path, HEAD + BODY, slots=slots, name=f"plain-{slots}")
        looks = alone(tmp_path, LOOKS, slots=slots, name=f"looks-{slots}") if slots == 1 else None
        looks = looks or launch(tmp_path, LOOKS, "-n", "2", "--slots", "2", "--show", "all")
        assert looks.weights == plain.weights
        assert looks.summary["samples"] == 192 and looks.summary["steps"] == 8
        assert "(×2)" in looks.out or slots == 1, "both workers have seen the same"
        assert paceline("verify", looks.folder.name, "--runs", "runs", cwd=tmp_path).returncode == 0


def test_to_train_in_a_second_pass_is_refused(tmp_path: Path, alone: Alone) -> None:
    again = BODY[BODY.index("    for batch") :]
    result = alone(tmp_path, HEAD + BODY + again)
    assert result.code == 2 and "run.slots() outside a step" in result.last_line, result.err


PHASES = (
    HEAD
    + """
run.prepare(model, optimizer, loader)
for phase, count in enumerate((1, 2, 1)):
    for epoch in run.epochs(count):
        for batch in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step(); optimizer.zero_grad()
            print("trained", phase, epoch)
            if run.step == 8 and not run.resumed and STOPS:
                run.stop("seen enough")
"""
)


def test_each_loop_over_epochs_trains_as_many_as_it_asks_for_also_after_a_resume(tmp_path: Path, alone: Alone) -> None:
    whole = alone(tmp_path, PHASES.replace("STOPS", "False"), slots=2)
    assert whole.summary["steps"] == 16 and whole.summary["epochs"] == 4
    assert whole.out.split("\n")[:-1] == [
        f"trained {phase} {epoch}" for phase, epoch in [(0, 0), (1, 1), (1, 2), (2, 3)] for _ in range(4)
    ]
    half = launch(tmp_path, PHASES.replace("STOPS", "True"), "-n", "2", "--slots", "2", "--checkpoint-every", "100")
    assert half.summary["exit"].startswith("seen enough") and half.summary["steps"] == 10
    assert "trained 2" not in half.out
    done = paceline("resume", "it", "--runs", "runs", "-n", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split("│")[-1].strip() for line in done.stdout.splitlines() if "trained " in line] == [
        *["trained 1 2"] * 2, *["trained 2 3"] * 4
    ]  # fmt: skip
    assert f'"{whole.weights}"' in (half.folder / "summary.json").read_text()
