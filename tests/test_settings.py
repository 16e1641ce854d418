"""Settings: who wins, where each came from, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.settings import Settings, StopRules, Target, merge, next_power_of_two


def test_a_flag_wins_over_an_argument_and_that_over_the_default() -> None:
    settings, origins = merge({"seed": 1, "workers": 2}, {"seed": 2, "threads": 3})
    assert (settings.seed, settings.threads, settings.strategy) == (1, 3, "allreduce")
    assert {name: origins[name] for name in ("seed", "workers", "threads", "strategy")} == {
        "seed": "flag",
        "workers": "flag",
        "threads": "argument",
        "strategy": "default",
    }


def test_every_setting_has_an_origin() -> None:
    _, origins = merge({}, {})
    assert set(origins) == {field.name for field in dataclasses.fields(Settings)}
    assert origins.pop("slots") == "derived"
    assert set(origins.values()) == {"default"}


def test_an_argument_of_none_is_not_given() -> None:
    settings, origins = merge({}, {"threads": None, "seed": 0})
    assert settings.threads == Settings().threads
    assert origins["threads"] == "default" and origins["seed"] == "argument"


@pytest.mark.parametrize(("workers", "slots"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_slots_follow_from_the_workers_unless_given(workers: int, slots: int) -> None:
    settings, origins = merge({"workers": workers}, {})
    assert settings.slots == slots
    assert origins["slots"] == "derived"
    settings, origins = merge({"workers": workers}, {"slots": 24})
    assert (settings.slots, origins["slots"]) == (24, "argument")


def test_a_folder_for_checkpoints_means_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings(checkpoints="kept").resolved().checkpoints == str(tmp_path / "kept")
    assert Settings(checkpoints="s3://bucket/kept").resolved().checkpoints == "s3://bucket/kept"
    assert Settings().resolved().checkpoints == ""


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (1023, 1024), (1024, 1024), (1025, 2048)])
def test_powers_of_two(n: int, power: int) -> None:
    assert next_power_of_two(n) == power


def test_settings_can_not_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().workers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"workers": 0}, "--workers must be 1 or more; it is 0"),
        ({"threads": 0}, "--threads must be 1 or more"),
        ({"slots": -1}, "--slots must be 0 or more"),
        ({"steps": -5}, "--steps must be 0 or more; it is -5"),
        ({"epochs": -1}, "--epochs must be"),
        ({"seconds": -0.5}, "--seconds must be"),
        ({"workers": 4, "slots": 3}, r"4 workers for 3 slots.*pass -n 3; or a new run with --slots 4"),
        (
            {"workers": 3, "slots": 2, "strategy": "gossip:4"},
            r"which is one slot; pass -n 2; or a new run with --slots 3$",
        ),
        (
            {"workers": 3, "slots": 2, "strategy": "federated:clients=8"},
            r"train clients are no more than the slots; pass -n 2; or a new run with --slots 3 or more",
        ),
        ({"precision": "fp8"}, "'fp8' is none of: fp32, bf16, fp16"),
        ({"transport": "smoke"}, "'smoke' is none of: auto, shm, gloo, nccl"),
        ({"device": "tpu"}, "'tpu' is none of: auto, cpu, cuda"),
        ({"strategy": "telepathy"}, r"unknown strategy 'telepathy'; there are: .*allreduce"),
        ({"target": "accuracy"}, "'accuracy' is no goal"),
        ({"on_death": "drop"}, r"--on-death drop is for replicas .* --strategy allreduce .*: leave it out"),
        (
            {"on_death": "drop", "strategy": "ssp:3"},
            r"--on-death drop is for replicas .* --strategy ssp:3 .*: leave it out",
        ),
        ({"on_death": "forget"}, r"--on-death 'forget' is none of: replay, drop"),
        ({"on_death": "drop", "strategy": "local:4"}, r"--min-workers 2 of 1: .*; pass -n 2, or --min-workers 1"),
        ({"strategy": "local:4", "drop_after": -1}, r"--drop-after must be 0 or more"),
    ],
)
def test_wrong_values_are_refused_with_a_way_out(flags: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        merge(flags, {})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"strategy": "ps", "servers": -1}, r"--servers must be 0 or more; it is -1"),
        ({"strategy": "ps", "replicas": 0}, r"--replicas must be 1 or more; it is 0"),
        ({"strategy": "ps", "servers": "two"}, r"--servers must be a number; it is 'two'"),
        ({"strategy": "pss"}, r"^unknown strategy 'pss'; did you mean 'ps'\? There are: .*ps, "),
    ],
)
def test_servers_that_cannot_be_are_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        merge(flags, {})


def test_a_strategy_at_servers_has_one_unless_told_otherwise() -> None:
    assert merge({"strategy": "ps"}, {})[0].servers == 1
    assert merge({"strategy": "ps", "servers": 3}, {})[0].servers == 3
    assert merge({}, {})[0].servers == 0


def test_an_unknown_argument_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no setting 'sead'; did you mean 'seed'\? There are: .*seed"):
        merge({}, {"sead": 1})


@pytest.mark.parametrize(
    ("flags", "arguments", "near"),
    [
        ({}, {"slot": 4}, "slots"),
        ({}, {"strategy": "alreduce"}, "allreduce"),
        ({"strategy": "dilocoo:20"}, {}, "diloco"),
        ({"strategy": "asynch+damp:2"}, {}, "async"),
        ({"strategy": "allreduce+int9"}, {}, "int8"),
        ({"precision": "bf61"}, {}, "bf16"),
        ({}, {"transport": "glo"}, "gloo"),
    ],
)
def test_a_misspelt_name_gets_the_near_one(flags: dict[str, object], arguments: dict[str, object], near: str) -> None:
    with pytest.raises(UsageError, match=rf"^[^;]*; did you mean '{near}'\?( There are: |$)"):
        merge(flags, arguments)


def test_a_name_far_from_all_gets_none() -> None:
    with pytest.raises(UsageError, match="telepathy") as caught:
        merge({"strategy": "telepathy"}, {})
    assert "did you mean" not in str(caught.value)


def test_a_known_name_with_a_wrong_number_gets_none() -> None:
    with pytest.raises(UsageError, match="write ssp:3") as caught:
        merge({"strategy": "ssp:x"}, {})
    assert "did you mean" not in str(caught.value)


def test_a_mistake_in_an_argument_begins_with_the_line_that_gave_it() -> None:
    for arguments in ({"slot": 4}, {"strategy": "x"}, {"slots": 1}):
        with pytest.raises(UsageError, match=r"^test_settings\.py:\d+: "):
            merge({"workers": 2}, arguments)
    with pytest.raises(UsageError, match=r"^--threads must be"):
        merge({"threads": 0}, {})


@pytest.mark.parametrize("arguments", [{"slots": "4"}, {"steps": [1]}, {"seconds": "soon"}])
def test_a_value_of_the_wrong_kind_is_a_usage_error(arguments: dict[str, object]) -> None:
    """`paceline.init(slots="4")`: the user must hear which setting, not "'<' not supported"."""
    with pytest.raises(UsageError, match=next(iter(arguments))):
        merge({}, arguments)


def test_a_time_limit_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="seconds"):
        merge({}, {"seconds": math.nan})


# goals


@pytest.mark.parametrize(
    ("text", "metric", "relation", "value"),
    [
        ("accuracy>=0.9", "accuracy", ">=", 0.9),
        ("loss<1e-3", "loss", "<", 1e-3),
        ("  val/top-5.acc  <=  -2  ", "val/top-5.acc", "<=", -2.0),
        ("x>.5", "x", ">", 0.5),
    ],
)
def test_goals_are_parsed(text: str, metric: str, relation: str, value: float) -> None:
    assert Target.parse(text) == Target(metric, relation, value)


@pytest.mark.parametrize(
    "text", ["accuracy", "accuracy=0.9", "=>0.9", "accuracy>=", "accuracy>=high", "a>=1e", "a>b>1"]
)
def test_what_is_no_goal_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"write it like accuracy>=0\.9"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("goal", "value", "reached"),
    [
        ("a>=1", 1.0, True),
        ("a>=1", 0.999, False),
        ("a>1", 1.0, False),
        ("a>1", 1.1, True),
        ("a<=1", 1.0, True),
        ("a<1", 1.0, False),
        ("a<1", -5.0, True),
        ("a<1", math.nan, False),
        ("a>1", math.nan, False),
    ],
)
def test_a_goal_is_reached_by_its_relation(goal: str, value: float, reached: bool) -> None:
    assert Target.parse(goal).reached({"a": value, "b": 100.0}) is reached
    assert Target.parse(goal).reached({"b": value}) is False


# stopping


def test_no_rules_never_stop() -> None:
    assert StopRules().due(10**9, 1e9, {"loss": 0.0}) is None


def test_a_step_limit_is_due_at_its_step() -> None:
    rules = StopRules(steps=10)
    assert rules.due(9, 1e9, {}) is None
    assert rules.due(10, 0.0, {}) == "step limit 10 reached"
    assert rules.due(11, 0.0, {}) is not None


def test_a_time_limit_is_due_when_its_time_has_passed() -> None:
    rules = StopRules(seconds=2.5)
    assert rules.due(10, 2.4999, {}) is None
    assert rules.due(0, 2.5, {}) == "time limit 2.5 s reached"


def test_a_goal_is_due_when_its_metric_gets_there() -> None:
    rules = StopRules.of(merge({"target": "loss < 0.1"}, {})[0])
    assert rules.due(1, 1.0, {}) is None
    assert rules.due(1, 1.0, {"loss": 0.1}) is None
    assert rules.due(1, 1.0, {"loss": 0.05}) == "target loss<0.1 reached"


def test_rules_are_read_from_settings() -> None:
    settings, _ = merge({"steps": 4, "seconds": 9.0}, {"target": "a>1"})
    assert StopRules.of(settings) == StopRules(4, 9.0, Target("a", ">", 1.0))
    assert StopRules.of(Settings()) == StopRules()
