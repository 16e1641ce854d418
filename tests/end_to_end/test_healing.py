"""A newcomer heals over a thin link while the others train: nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end import machines
from tests.end_to_end.launching import ended, finish
from tests.end_to_end.machines import Spread, spread
from tests.network import Network

pytestmark = pytest.mark.needs_root
FLAGS = ("-n", "3", "--slots", "4", "--lease", "2")
LINK = 10e6 / 8
"""Bytes a second."""

SCRIPT = machines.SCRIPT.replace(
    "run.prepare(model,",
    """
frozen = nn.Linear(FROZEN, 250, bias=False).requires_grad_(False)
model = nn.Sequential(nn.Linear(13, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.prepare(model, frozen,""",
).replace(
    "        for x, y in",
    """
        if not go.exists():
            time.sleep(0.07)
        for x, y in""",
)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as made:
        yield made


def gaps(run: Spread, first: float, last: float) -> list[float]:
    """Seconds between the steps of this time."""
    times = [line["time"] for line in run.lines("metrics.jsonl") if first <= line["time"] <= last]
    return [b - a for a, b in zip([first, *times], [*times, last], strict=True)]


@pytest.mark.parametrize(
    ("frozen", "width", "state", "gradient"),
    [
        pytest.param(2000, 16, 2.0e6, 2e3, id="little of the state moves"),
        pytest.param(1, 6000, 1.0e6, 0.55e6, id="all of it moves"),
    ],
)
def test_joining_over_a_thin_link(
    tmp_path: Path, network: Network, frozen: int, width: int, state: float, gradient: float, alone: Alone
) -> None:
    """The others step on while the state is on its way. Where every step's gradient is large, they go at the link's
    pace then, or half of it, as long as the newcomer is far behind; as they will with it as one of them."""
    script = SCRIPT.replace("FROZEN", str(frozen)).replace("WIDTH", str(width))
    want = alone(tmp_path, script.replace("go.exists()", "True"), slots=4).weights
    with spread(tmp_path, script, 3, *FLAGS, network=network) as run:
        run.wait_for_step(10)
        network.machines[2].thin("10mbit")
        (victim,) = run.workers_on(2)
        run.kill(victim)
        newcomer = run.wait_for(lambda: [n for n in run.workers_on(2) if n != victim], "another worker")[0]
        sign = run.folder / f"coming-{newcomer}"
        began = run.wait_for(lambda: sign.exists() and sign.stat(), "its loop").st_mtime
        near = run.wait_for(run.event("caught up", worker=newcomer), "it comes near")["time"]
        joined = run.wait_for(run.event("joined", worker=newcomer), "it joins")["time"]
        network.machines[2].widen()
        finish(run)
        result = ended(run)
    assert result.weights == want
    longest, transfer = max(gaps(run, began, near)), state / LINK
    print(
        f"{near - began:.2f} s to come near, longest gap {longest:.2f} s; the join's {max(gaps(run, near, joined)):.2f} s"
    )
    assert near - began > transfer, "the link was not thin"
    assert longest < max(transfer / 2, 8 * gradient / LINK)
    lost = [event["why"] for event in result.events() if event["event"] == "view" and "join" not in event["why"]]
    assert lost == [f"worker {victim} was killed by SIGKILL"]
