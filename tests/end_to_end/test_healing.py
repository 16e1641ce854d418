"""A newcomer heals over a thin link while the others train: nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.launching import HEAD, ended, launch
from tests.end_to_end.machines import Spread, spread
from tests.end_to_end.test_coordinator import finish
from tests.network import Network

pytestmark = pytest.mark.needs_root
FLAGS = ("-n", "3", "--slots", "4", "--lease", "2")
LINK = 10e6 / 8
"""Bytes a second."""
STEP_S = 0.07

SCRIPT = (
    HEAD
    + """
import time
go, coming = run.dir / "go", run.dir / f"coming-{run._session.worker}"
frozen = nn.Linear(FROZEN, 250, bias=False).requires_grad_(False)
model = nn.Sequential(nn.Linear(13, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.prepare(model, frozen, optimizer, loader)
if run._session.joining:
    coming.touch()
for epoch in run.epochs(100):
    for batch in loader:
        if not go.exists():
            time.sleep(STEP_S)
        for x, y in run.slots():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step(); optimizer.zero_grad()
        run.log(loss=loss.item())
        if coming.exists() and not run._session.joining:
            coming.unlink()
        while run.step == 300 and not go.exists() and not any(run.dir.glob("coming-*")):
            time.sleep(0.001)
"""
).replace("STEP_S", str(STEP_S))
KINDS = {"little of it moves": (1000, 16), "all of it moves": (1, 7000)}
"""Of a state of 1 MB, how many numbers of 1000 bytes are frozen, and how wide is what is trained."""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as made:
        yield made


def gaps(run: Spread, first: float, last: float) -> list[float]:
    """Seconds between the steps of this time."""
    times = [line["time"] for line in run.lines("metrics.jsonl") if first <= line["time"] <= last]
    return [b - a for a, b in zip([first, *times], [*times, last], strict=True)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_joining_over_a_thin_link(tmp_path: Path, network: Network, kind: tuple[int, int]) -> None:
    frozen, width = kind
    script = SCRIPT.replace("FROZEN", str(frozen)).replace("WIDTH", str(width))
    want = launch(tmp_path, script.replace("go.exists()", "True"), "-n", "1", "--slots", "4", name="clean").weights
    with spread(tmp_path, script, 3, *FLAGS, network=network) as run:
        run.wait_for_step(10)
        network.machines[2].thin("10mbit")
        (victim,) = run.workers_on(2)
        run.kill(victim)
        newcomer = run.wait_for(lambda: [n for n in run.workers_on(2) if n != victim], "another worker")[0]
        run.wait_for((run.folder / f"coming-{newcomer}").exists, "its loop")
        began = (run.folder / f"coming-{newcomer}").stat().st_mtime
        near = run.wait_for(run.event("caught up", worker=newcomer), "it catches up")["time"]
        joined = run.wait_for(run.event("joined", worker=newcomer), "it joins")["time"]
        network.machines[2].widen()
        finish(run)
        result = ended(run)
    assert result.weights == want
    print("healing", near - began, max(gaps(run, began, near)), "joining", joined - near, max(gaps(run, near, joined)))
    print([round(g, 3) for g in gaps(run, began, joined)])
    words = [event["why"] for event in result.events() if event["event"] in ("machine", "worker ended", "view")]
    print(words)
