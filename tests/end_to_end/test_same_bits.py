"""The promise: one hash at any worker count. Small here; benchmarks/same_bits.py has the full set."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import BODY, HEAD, Result, launch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bits_script.py"


def train(folder: Path, kind: str, workers: int, slots: int, *flags: str, loaders: int = 0) -> Result:
    name = f"{kind}-{workers}-{slots}-{loaders}-{'-'.join(f.strip('-') for f in flags)}"
    given = ("-n", str(workers), "--slots", str(slots), "--steps", "7", *flags)
    return launch(folder, SCRIPT, *given, args=(kind, "--num-workers", str(loaders)), name=name)


def train_alone(alone: Alone, folder: Path, kind: str, slots: int) -> Result:
    return alone(folder, SCRIPT, args=(kind, "--num-workers", "0"), slots=slots, steps=7)


def flattened(script: str) -> str:
    """The same script without its inner loop."""
    inner = re.compile(r"for batch in loader:\n {8}for x, y in run\.slots\(\):\n((?: {12}.*\n)+)")
    flat = inner.sub(lambda found: "for x, y in loader:\n" + found[1].replace(" " * 12, " " * 8), script)
    assert "run.slots" not in flat
    return flat


@pytest.mark.parametrize("kind", ["lenet", "cnn", "lstm", "transformer", "gan", "tail"])
def test_one_hash_at_1_and_3_workers(tmp_path: Path, kind: str, alone: Alone) -> None:
    one = train_alone(alone, tmp_path, kind, 6)
    three = train(tmp_path, kind, 3, 6)
    assert one.summary["steps"] == three.summary["steps"] == 7
    assert one.weights == three.weights
    assert one.summary["samples"] == three.summary["samples"]


def test_one_hash_through_uneven_deals_transports_and_loader_processes(tmp_path: Path, alone: Alone) -> None:
    hashes = {
        "1": train_alone(alone, tmp_path, "tail", 12).weights,
        "5": train(tmp_path, "tail", 5, 12).weights,
        "gloo": train(tmp_path, "tail", 3, 12, "--transport", "gloo").weights,
        "2 loader processes": train(tmp_path, "tail", 2, 12, loaders=2).weights,
    }
    assert len(set(hashes.values())) == 1, hashes


def test_augmentation_does_not_depend_on_loader_processes(tmp_path: Path, alone: Alone) -> None:
    assert train_alone(alone, tmp_path, "cnn", 4).weights == train(tmp_path, "cnn", 2, 4, loaders=2).weights


def test_a_flat_loop_equals_the_nested_loop(tmp_path: Path, alone: Alone) -> None:
    """Where every worker carries one slot, `.grad` is whole when backward() returns."""
    flat = HEAD + flattened(BODY)
    want = alone(tmp_path, HEAD + BODY, slots=3).weights
    assert launch(tmp_path, flat, "-n", "3", "--slots", "3", name="flat").weights == want
    assert launch(tmp_path, flat, "-n", "3", "--slots", "3", "--transport", "gloo", name="gloo").weights == want


def test_a_flat_loop_whose_last_batch_is_smaller_than_the_slots(tmp_path: Path, alone: Alone) -> None:
    tail = HEAD.replace("(96", "(50") + "{}"
    one = alone(tmp_path, tail.format(BODY), slots=3)
    three = launch(tmp_path, tail.format(flattened(BODY)), "-n", "3", "--slots", "3", name="flat")
    assert one.weights == three.weights
    assert one.summary["samples"] == three.summary["samples"] == 100


def test_draws_before_the_first_forward_of_a_flat_loop(tmp_path: Path, alone: Alone) -> None:
    """A share begins with its step once the script is known to be flat. Until then, which is in the first step, it
    begins with the first forward: the script may still come to run.slots(), so all draw the same before."""
    nested = """
import json, pathlib
run.prepare(model, optimizer, loader)
drawn = []
for epoch in run.epochs(1):
    for batch in loader:
        for x, y in run.slots():
            before, output, after = float(torch.rand(())), model(x), float(torch.rand(()))
            drawn.append((before, after))
            F.cross_entropy(output, y).backward()
        optimizer.step(); optimizer.zero_grad()
pathlib.Path(f"drawn-{run._session.worker}.json").write_text(json.dumps(drawn))
"""
    flat = flattened(nested)
    alone(tmp_path, HEAD + nested, slots=2)
    shares = json.loads((tmp_path / "drawn-0.json").read_text())
    launch(tmp_path, HEAD + flat, "-n", "2", "--slots", "2", name="flat")
    workers = [json.loads((tmp_path / f"drawn-{worker}.json").read_text()) for worker in range(2)]
    assert workers[0][0][0] == workers[1][0][0]
    for slot, drawn in enumerate(workers):
        of_slot = shares[slot::2]
        assert drawn[0][1] == of_slot[0][0], "the first number after the forward is the share's first"
        assert drawn[1:] == of_slot[1:] and len(drawn) == 4


def test_an_extra_backward_after_a_bucket_left_is_noticed(tmp_path: Path, alone: Alone) -> None:
    """The counts are learned in the first step; later a second backward comes behind them."""
    script = (
        HEAD
        + """
run.prepare(model, optimizer, loader)
for epoch in run.epochs(2):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
            if run.step in (3, 5):
                (0.1 * model(x)).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
"""
    )
    want = alone(tmp_path, script, slots=4).weights
    for transport in ("shm", "gloo"):
        got = launch(tmp_path, script, "-n", "2", "--slots", "4", "--transport", transport, name=transport)
        assert got.weights == want


GRADIENT = (
    HEAD
    + """
whole = F.cross_entropy(model(data.tensors[0]), data.tensors[1])
exact = torch.autograd.grad(whole, list(model.parameters()))
loader = DataLoader(data, batch_size=96, shuffle=True)
run.prepare(model, optimizer, loader)
for epoch in run.epochs(1):
    for batch in loader:
        for x, y in run.slots():
            F.cross_entropy(model(x), y).backward()
        difference = torch.cat([(p.grad - g).flatten() for p, g in zip(model.parameters(), exact)]).double().norm()
        size = torch.cat([g.flatten() for g in exact]).double().norm()
        if run.is_main:
            print("relative", float(difference / size))
        optimizer.step()
"""
)


def test_the_reduced_gradient_is_the_full_batch_gradient(tmp_path: Path, alone: Alone) -> None:
    """Of one worker and of five; that other counts come to these bits is said above."""
    one, five = alone(tmp_path, GRADIENT, slots=7), launch(tmp_path, GRADIENT, "-n", "5", "--slots", "7")
    assert one.weights == five.weights
    for result in (one, five):
        line = next(line for line in result.out.splitlines() if "relative" in line)
        assert float(line.split()[-1]) <= 1e-6
