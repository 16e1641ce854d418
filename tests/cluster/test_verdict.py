"""On whom a run waits: rows in, one sentence out."""

from __future__ import annotations

from typing import Any

from paceline.cluster.verdict import QUIET_S, START_QUIET_S, stuck, verdict
from paceline.wires.board import Phase, Seen

LONG = QUIET_S + 3.0


def row(worker: int, phase: Phase, since_s: float = LONG, **more: Any) -> Seen:
    rest = {
        "pid": 1,
        "step": 7,
        "epoch": 0,
        "total_steps": 0,
        "samples": 0,
        "metric": 0.0,
        "place": "",
        "waits_for": None,
    }
    return Seen(worker=worker, phase=phase, since_s=since_s, **{**rest, **more})


def test_nothing_is_said_while_all_compute() -> None:
    assert verdict([row(0, Phase.COMPUTE, 1e6), row(1, Phase.DATA, 1e6)]) is None
    assert verdict([row(0, Phase.COMPUTE, 1e6)]) is None


def test_nothing_is_said_of_a_short_wait() -> None:
    assert verdict([row(0, Phase.REDUCE, QUIET_S), row(1, Phase.COMPUTE, 60)]) is None


def test_before_the_first_step_a_longer_wait_is_usual() -> None:
    def rows(since_s: float, step: int) -> list[Seen]:
        return [row(0, Phase.REDUCE, since_s, step=step, waits_for=1), row(1, Phase.SCRIPT, 2.0, step=0)]

    assert verdict(rows(START_QUIET_S, step=0)) is None
    assert verdict(rows(START_QUIET_S + 0.1, step=0)) is not None
    assert verdict(rows(QUIET_S + 0.1, step=1)) is not None


def test_the_one_that_is_waited_for_is_named_with_what_it_does() -> None:
    found = verdict([row(0, Phase.REDUCE, 8.4, waits_for=1), row(1, Phase.DATA, 12.2, step=6)])
    assert found == (1, "worker 0 waited 8 s for worker 1, which has been loading data for 12 s (step 6)")


def test_who_is_waited_for_and_waits_itself_is_not_the_one() -> None:
    rows = [row(0, Phase.REDUCE, 9.0, waits_for=1), row(1, Phase.REDUCE, 8.0, waits_for=2), row(2, Phase.COMPUTE, 20.0)]
    found = verdict(rows)
    assert found == (2, "workers 0, 1 waited 9 s for worker 2, which has been computing for 20 s (step 7)")


def test_nobody_is_to_blame_where_they_wait_for_each_other() -> None:
    """Many bytes on a thin link (seen at 10 Mbit/s, where one was blamed for waiting)."""
    rows = [row(0, Phase.REDUCE, 45.0, waits_for=1), row(1, Phase.REDUCE, 44.8, waits_for=0)]
    words = "workers 0, 1 have been exchanging with each other for 45 s (step 7): the link between them is slow, or cut"
    assert verdict(rows) == (0, words)
    one = verdict([rows[0], row(1, Phase.REDUCE, 2.0, waits_for=0)])
    assert one is not None and one[1].startswith("worker 0 has been exchanging with the others for 45 s")


def test_several_who_wait_are_named_together_and_the_longest_counts() -> None:
    rows = [
        row(0, Phase.REDUCE, 6.0, waits_for=2),
        row(1, Phase.REDUCE, 9.0, waits_for=2),
        row(2, Phase.COMPUTE, 9.5),
        row(3, Phase.REDUCE, 1.0),
    ]
    found = verdict(rows)
    assert found == (2, "workers 0, 1 waited 9 s for worker 2, which has been computing for 10 s (step 7)")


def test_whom_a_worker_waits_for_may_be_guessed_from_the_others() -> None:
    rows = [row(0, Phase.REDUCE), row(1, Phase.COMPUTE, 3.0), row(2, Phase.COMPUTE, 30.0)]
    found = verdict(rows)
    assert found is not None and found[0] == 2


def test_the_finished_and_the_failed_are_not_guessed() -> None:
    rows = [row(0, Phase.REDUCE), row(1, Phase.FINISHED, 100.0), row(2, Phase.FAILED, 100.0)]
    assert verdict(rows) is None


def test_a_script_outside_a_step_is_placed() -> None:
    rows = [row(0, Phase.REDUCE, waits_for=1), row(1, Phase.SCRIPT, place="train.py:12")]
    found = verdict(rows)
    assert found is not None and found[1].endswith("(step 7), in train.py:12")
    rows[1] = row(1, Phase.COMPUTE, place="old.py:1")
    found = verdict(rows)
    assert found is not None and "old.py" not in found[1], "a place of another phase is not news"


def test_those_who_wait_for_main_wait_for_worker_0() -> None:
    rows = [row(0, Phase.SCRIPT, 20.0, place="train.py:3"), row(1, Phase.WAITING_FOR_MAIN)]
    found = verdict(rows)
    assert found is not None and found[0] == 0
    assert "worker 1 waited 8 s for worker 0, which has been running the script outside a step for 20 s" in found[1]


def test_a_start_that_takes_long_is_told() -> None:
    rows = [row(0, Phase.STARTING, 6.0), row(1, Phase.STARTING, 7.0)]
    assert verdict(rows) == (0, "all workers are still starting after 6 s")
    assert verdict([row(0, Phase.STARTING, 6.0), row(1, Phase.COMPUTE, 7.0)]) is None


def test_a_flat_loop_that_waits_for_a_replacement() -> None:
    found = verdict([row(0, Phase.REFILL, QUIET_S + 1), row(2, Phase.REFILL, QUIET_S + 1)])
    assert found == (0, "workers 0, 2 waited 6 s for a worker in place of a lost one (step 7)")
    assert verdict([row(0, Phase.REFILL, QUIET_S - 1)]) is None


def test_who_does_not_go_on_is_stuck() -> None:
    def rows(waited_s: float, since_s: float, **more: Any) -> list[Seen]:
        return [row(0, Phase.REDUCE, waited_s, waits_for=1), row(1, Phase.COMPUTE, since_s, **more)]

    assert stuck(rows(31, 40), 30) == 1
    assert stuck(rows(29, 40), 30) is None, "not waited for long enough"
    assert stuck(rows(31, 2), 30) is None, "it does something"
    assert stuck(rows(31, 40, step=0), 30) is None, "its first step"
    assert stuck(rows(31, 40, waits_for=0), 30) is None, "it waits itself: nobody knows for whom"
    assert stuck(rows(1e6, 1e6), 0) is None, "for ever"
