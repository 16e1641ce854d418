"""Fault plans: what the words mean, when a fault is due, and that each is carried out once."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.faults.plan import HITS, KINDS, NUMBERED, Action, Fault, Plan

THOUSANDTHS = st.integers(1, 999_999).map(lambda n: n / 1000)


@st.composite
def faults(draw: st.DrawFn, steps: int = 999_999_999, number: int = 999) -> Fault:
    kind = draw(st.sampled_from(KINDS))
    role = draw(st.sampled_from(HITS[kind]))
    whens = ["step", "time", "start"] if kind == "slow" else ["step", "time"]
    when = draw(st.sampled_from(whens))
    lasts = draw(st.booleans()) if kind == "slow" else kind != "kill"
    return Fault(
        kind,
        role,
        draw(st.integers(0, number)) if role in NUMBERED else None,
        draw(st.integers(0, steps)) if when == "step" else None,
        draw(st.integers(0, 20_000).map(lambda n: n / 1000)) if when == "time" else None,
        draw(THOUSANDTHS) if lasts else None,
        draw(st.integers(1001, 99_999).map(lambda n: n / 1000)) if kind == "slow" else None,
    )


def deeds(actions: list[Action]) -> list[tuple[str, str, int | None]]:
    return [(action.kind, action.role, action.number) for action in actions]


def plan(*texts: str) -> Plan:
    return Plan(map(Fault.parse, texts))


# words


@given(faults())
def test_a_fault_is_read_as_it_is_written(fault: Fault) -> None:
    assert Fault.parse(str(fault)) == fault
    assert str(Fault.parse(str(fault))) == str(fault)


@pytest.mark.parametrize(
    "text",
    [
        "kill worker:2 @step 120",
        "freeze worker:1 @step 200 for 10s",
        "kill server:1 @step 120",
        "freeze server:0 @step 200 for 10s",
        "kill coordinator @time 20s",
        "cut worker:3 @step 300 for 8s",
        "slow worker:0 x4",
        "slow main x1.5 @time 0.25s for 3s",
        "kill everything @step 9",
        "freeze nursery @time 1s for 2s",
    ],
)
def test_the_words_of_the_documents(text: str) -> None:
    assert str(Fault.parse(f"  {text.replace(' ', '  ')} ")) == text


@pytest.mark.parametrize(
    ("text", "says", "example"),
    [
        ("", "say what, whom and when", "kill worker:2 @step 120"),
        ("kill", "say what, whom and when", "kill worker:2 @step 120"),
        ("freeze worker:1 for 3s @step 2", "say what, whom and when", "freeze worker:1 @step 200 for 10s"),
        ("kill worker:1 @step x", "say what", "kill worker:2 @step 120"),
        ("kill worker:1 @time 20", "say what", "kill worker:2 @step 120"),
        ("maim worker:1 @step 1", "'maim' is none of kill, freeze, cut, slow", "kill worker:2"),
        ("cut agent:1 @step 1 for 2s", "'agent' is none of worker:K, server:K, main,", "cut worker:3"),
        ("cut server:1 @step 1 for 2s", "cut hits one of worker, main, coordinator, standby", "cut worker:3"),
        ("slow server:1 x4", "slow hits one of worker, main", "slow worker:0 x4"),
        ("kill server @step 1", "which server?", "kill worker:2"),
        ("kill worker @step 1", "which worker?", "kill worker:2"),
        ("kill main:1 @step 1", "only a worker or a server has a number", "kill worker:2"),
        ("kill worker:1", "when?", "kill worker:2"),
        ("kill worker:1 @step 1 for 2s", "for good", "kill worker:2"),
        ("freeze worker:1 @step 1", "for how long?", "freeze worker:1"),
        ("freeze worker:1 @step 1 for 0s", "'for 0s'", "freeze worker:1"),
        ("cut nursery @step 1 for 2s", "cut hits one of worker, main, coordinator, standby", "cut worker:3"),
        ("slow worker:1 @step 1", "a factor above 1", "slow worker:0 x4"),
        ("slow worker:1 x1", "a factor above 1", "slow worker:0 x4"),
        ("kill worker:1 x4 @step 1", "only slow has a factor", "kill worker:2"),
    ],
)
def test_other_words_are_refused_in_one_line_with_an_example(text: str, says: str, example: str) -> None:
    with pytest.raises(UsageError) as error:
        Fault.parse(text)
    words = str(error.value)
    assert words.startswith(f"--fault {text!r}: ") and says in words and example in words and "\n" not in words


# when and whom


def test_a_step_is_reached_by_anybody_and_a_time_by_the_clock() -> None:
    both = plan("kill worker:2 @step 12", "kill worker:1 @time 1.5s")
    assert both.due(11, 1.4, [0, 1, 2]) == []
    assert deeds(both.due(12, 1.4, [0, 1, 2])) == [("kill", "worker", 2)]
    assert deeds(both.due(12, 1.5, [0, 1])) == [("kill", "worker", 1)]
    assert both.due(99, 99.0, [0]) == [] and both.over


def test_main_is_the_first_member_at_that_time_and_stays_the_one_that_was_hit() -> None:
    frozen = plan("freeze main @step 1 for 2s")
    assert frozen.due(1, 0.0, []) == [], "nobody is there yet"
    assert deeds(frozen.due(1, 5.0, [3, 1])) == [("stop", "worker", 3)]
    assert frozen.due(9, 6.9, [1]) == []
    assert deeds(frozen.due(9, 7.0, [1])) == [("continue", "worker", 3)]


def test_slow_begins_at_once_and_for_good_or_for_a_while() -> None:
    slow = plan("slow worker:0 x4", "slow worker:1 x2.5 for 1s")
    first = slow.due(0, 0.0, [0, 1])
    assert [(a.kind, a.number, a.factor) for a in first] == [("slow", 0, 4.0), ("slow", 1, 2.5)]
    assert deeds(slow.due(0, 1.0, [0, 1])) == [("unslow", "worker", 1)]
    assert slow.over


def test_a_worker_that_is_gone_is_passed_over_once_and_one_to_come_is_waited_for() -> None:
    both = plan("kill worker:1 @step 5", "kill worker:3 @step 5")
    assert both.due(4, 0.0, [0, 1, 2]) == []
    (passed,) = both.due(5, 0.0, [0, 2])
    assert passed.kind == "pass" and passed.why == "kill worker:1 @step 5: passed over, worker 1 is gone"
    assert both.due(6, 0.0, [0, 2]) == []
    assert both.missed(6, 9.0) == ["the fault 'kill worker:3 @step 5' never came: there was no worker 3"]
    assert deeds(both.due(7, 0.0, [0, 2, 3])) == [("kill", "worker", 3)]
    assert both.missed(7, 9.0) == [], "what was passed over has been told"


def test_what_came_too_late_is_told_with_the_runs_end() -> None:
    late = plan("kill worker:1 @step 9", "kill main @time 60s", "kill worker:7 @step 9", "kill worker:0 @step 8")
    late.due(8, 5.0, [0, 1])
    assert late.missed(8, 5.1) == [
        f"the fault '{fault}' never came: the run was over at step 8"
        for fault in ("kill worker:1 @step 9", "kill main @time 60s", "kill worker:7 @step 9")
    ]


def test_a_server_is_passed_over_or_waited_for_by_numbers_of_its_own() -> None:
    both = plan("kill server:1 @step 5", "kill server:2 @step 5", "freeze server:0 @step 5 for 1s")
    assert both.due(5, 0.0, [0, 1, 2, 3]) == [], "a worker of that number is somebody else"
    assert deeds(both.due(5, 0.0, [0], [0, 1])) == [("kill", "server", 1), ("stop", "server", 0)]
    assert deeds(both.due(5, 1.0, [0], [])) == [("continue", "server", 0)]
    (passed,) = both.due(6, 2.0, [0], [3])
    assert passed.kind == "pass" and passed.why == "kill server:2 @step 5: passed over, server 2 is gone"
    assert both.over


def test_whoever_carries_out_the_plan_is_hit_last_and_once_each_time() -> None:
    """What came behind its death would be lost."""
    hard = plan(
        "kill coordinator @step 1", "kill coordinator @step 1", "kill worker:0 @step 1", "cut main @step 1 for 1s"
    )
    first = hard.due(1, 0.0, [0, 1])
    assert deeds(first) == [("kill", "worker", 0), ("cut", "worker", 0), ("kill", "coordinator", None)]
    second = Plan.restore(hard.state())
    assert deeds(second.due(1, 0.1, [1])) == [("kill", "coordinator", None)]
    third = Plan.restore(second.state())
    assert third.due(1, 0.2, [1]) == []
    assert deeds(third.due(1, 1.0, [1])) == [("mend", "worker", 0)] and third.over


ENDS = {"stop": "continue", "cut": "mend", "slow": "unslow"}


def carried_out(planned: list[Fault], draw: random.Random) -> list[Action]:
    """A run in which workers and servers come and go and the leader changes often, until nothing can be due any more."""
    schedule, seen, seconds = Plan(planned), list[Action](), 0.0
    members, servers, newest_worker, newest_server = [0, 1, 2], [0, 1], itertools.count(3), itertools.count(2)
    while not schedule.over:
        assert seconds < 10_000, schedule.state()
        for numbers, newest in ((members, newest_worker), (servers, newest_server)):
            if draw.random() < 0.05 and len(numbers) > 1:
                numbers.remove(draw.choice(numbers))
            if draw.random() < 0.1:
                numbers.append(next(newest))
        seen += (now := schedule.due(int(seconds), seconds, members, servers))
        ends = [action.kind in ENDS.values() for action in now]
        assert ends == sorted(ends, reverse=True), "what is over ends before anything begins"
        own = [action.role in ("coordinator", "everything") for action in now if action.kind not in ENDS.values()]
        assert own in ([False] * len(own), [False] * (len(own) - 1) + [True]), "whoever carries it out is hit last"
        if draw.random() < 0.3:
            schedule = Plan.restore(json.loads(json.dumps(schedule.state())))
        seconds += draw.random() * 20
    return seen


@given(st.lists(faults(steps=100, number=5), max_size=6), st.integers(0, 1 << 32))
def test_each_fault_is_carried_out_once_however_often_the_leader_changes(planned: list[Fault], seed: int) -> None:
    seen = carried_out(planned, random.Random(seed))
    begun = [action.why for action in seen if action.kind not in (*ENDS.values(), "pass")]
    passed = [action.why.split(": passed over")[0] for action in seen if action.kind == "pass"]
    assert sorted(begun + passed) == sorted(map(str, planned))
    for begins, ends in ENDS.items():
        opened = [(a.why, a.role, a.number) for a in seen if a.kind == begins and a.for_s is not None]
        closed = [(a.why.split(": its time")[0], a.role, a.number) for a in seen if a.kind == ends]
        assert sorted(opened, key=str) == sorted(closed, key=str)
    assert all(action.role != "main" for action in seen)
