"""Gradients that travel coded: the same bits at any worker count, through deaths and joins, and from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alone import Alone
from tests.end_to_end.launching import launch
from tests.end_to_end.test_kills import SCRIPT, SLOTS, check, learned

CODED = SCRIPT.replace(
    """        if f"{run._session.worker}:{run.step}:open" in orders:""",
    """        if f"{run._session.worker}:{run.step}:gather" in orders:
            dies_inside("gather")
        if f"{run._session.worker}:{run.step}:open" in orders:""",
)
ORDERS = {
    "int8": ("3:6:gather", "0:9:second share", "hold:20:4", "1:30:second loop"),
    "powersgd:2": ("2:0:backward", "1:7:total", "hold:20:4", "0:40:reduced"),
}
"""Four workers become two, one comes, and one more dies."""


@pytest.mark.parametrize("codec", ORDERS)
def test_the_same_bits_whoever_dies(tmp_path: Path, codec: str, alone: Alone) -> None:
    """Each redone share goes on from what the last committed step has kept of it; a newcomer finds that where it is."""
    strategy = f"allreduce+{codec}"
    one = alone(tmp_path, CODED, slots=12, strategy=strategy, args=("small", "0"))
    orders = ORDERS[codec]
    flags = ("-n", "4", *SLOTS, "--strategy", strategy)
    check(launch(tmp_path, CODED, *flags, args=("small", "0", *orders)), learned(one), tmp_path, 3)
