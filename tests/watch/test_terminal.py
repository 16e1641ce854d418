"""What the terminal shows: a speed without the start-up, and words only for what is known."""

from __future__ import annotations

import time

import pytest

from paceline.watch.terminal import Terminal, counted, summary_rows
from paceline.wires.board import Phase, Seen


def main_at(step: int, samples: int) -> list[Seen]:
    return [
        Seen(
            worker=0,
            pid=1,
            phase=Phase.COMPUTE,
            since_s=0.0,
            step=step,
            epoch=0,
            total_steps=100,
            samples=samples,
            metric=0.0,
            place="",
            waits_for=None,
        )
    ]


def test_the_first_speed_counts_from_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    terminal = Terminal(1)
    now += 8.5
    terminal.progress(main_at(0, 0))
    terminal.progress(main_at(1, 64))
    now += 2.0
    terminal.progress(main_at(50, 64 + 28_000))
    assert "step 50/100  epoch 1  14,000 samples/s" in capsys.readouterr().err
    terminal.close()


@pytest.mark.parametrize(
    ("seen", "speeds"),
    [
        pytest.param(
            [(1, 0), (40, 0), (50, 6_000), (80, 6_000), (80, 6_000), (100, 6_000), (100, 6_000), (100, 12_000)],
            ["", "", *5 * ["1,500 samples/s"], "600 samples/s"],
            id="replicas that train apart: over a round, whose exchange may take long",
        ),
        pytest.param(
            [(1, 64), (2, 128), (2, 128), (3, 128), (3, 192)],
            ["", "32 samples/s", "0 samples/s", "0 samples/s", "32 samples/s"],
            id="all others: who does not go on has none, whether its step is told before its samples or not",
        ),
    ],
)
def test_the_speed_follows_where_samples_count(
    monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, int]], speeds: list[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    terminal = Terminal(1)
    said = []
    for step, samples in seen:
        terminal.progress(main_at(step, samples))
        said.append(terminal._rate)
        now += 2.0
    terminal.close()
    assert said == speeds


def test_the_final_table_counts_in_words() -> None:
    rows = dict(
        summary_rows({"exit": "finished", "steps": 1200, "epochs": 1, "samples": 4800, "wall_s": 2.0}, "runs/x")
    )
    assert rows["steps"] == "1,200 (1 epoch, 4,800 samples)"
    assert rows["speed"] == "2.0 s in all"
    full = {"workers": 1, "slots": 4, "threads": 2, "strategy": "allreduce", "samples_per_s": 10.4, "wall_s": 1.0}
    rows = dict(summary_rows(full, "runs/x"))
    assert rows["workers"] == "1 worker, 4 slots, 2 threads each, allreduce"
    assert rows["speed"] == "10 samples/s, 1.0 s in all"
    rows = dict(summary_rows({**full, "servers": 2, "strategy": "ps"}, "runs/x"))
    assert rows["workers"] == "1 worker, 2 servers, 4 slots, 2 threads each, ps"
    assert "server" not in dict(summary_rows({**full, "servers": 0}, "runs/x"))["workers"]


def test_the_final_table_tells_of_rounds_and_of_what_was_sent() -> None:
    drift = {"last": 0.0125, "mean": 0.02, "most": 0.034}
    known = {"rounds": 20, "participants": {"2": 20}, "drift": drift, "wire_bytes": 236_690_038, "compression": 0.25391}
    rows = dict(summary_rows(known, "runs/x"))
    assert rows["rounds"] == "20, of 2 participants; drift at last 0.0125, mean 0.02, at most 0.034"
    assert rows["sent"] == "236.7 MB, 0.254 of what fp32 would be"
    assert (
        dict(summary_rows({"rounds": 6, "participants": {"3": 4, "5": 2}}, "runs/x"))["rounds"]
        == "6, of 3 to 5 participants"
    )
    copied = dict(summary_rows({**known, "copied_bytes": 18_100_000}, "runs/x"))
    assert copied["sent"] == "236.7 MB, 0.254 of what fp32 would be; copies of states 18.1 MB"
    assert not {"rounds", "sent"} & set(dict(summary_rows({"wire_bytes": 0, "copied_bytes": 0}, "runs/x")))


def test_who_was_lost_is_counted_by_what_it_was() -> None:
    row = dict(summary_rows({"recoveries": 2, "servers_lost": 1, "coordinators_lost": 1}, "runs/x"))["recovered"]
    assert row == "from 2 lost workers, 1 lost server, 1 lost coordinator"
    assert dict(summary_rows({"coordinators_lost": 2}, "runs/x"))["recovered"] == "from 2 lost coordinators"
    assert "recovered" not in dict(summary_rows({"recoveries": 0}, "runs/x"))


def test_where_workers_went_what_was_sent_is_said_to_be_that_of_the_others() -> None:
    sent = {"wire_bytes": 224_000_000, "terms": 1, "resumed": False}
    assert dict(summary_rows(sent, "runs/x"))["sent"] == "224.0 MB"
    assert dict(summary_rows({**sent, "terms": 3}, "runs/x"))["sent"] == "224.0 MB by the workers there at the end"
    row = dict(summary_rows({**sent, "resumed": True, "compression": 0.25}, "runs/x"))["sent"]
    assert row == "224.0 MB by the workers there at the end, since the resume, 0.25 of what fp32 would be"


def test_what_is_not_known_is_left_out() -> None:
    assert summary_rows({"exit": "failed: boom", "workers": 2}, "runs/x") == [
        ("exit", "failed: boom"),
        ("workers", "2 workers"),
        ("folder", "runs/x"),
    ]


@pytest.mark.parametrize(("number", "words"), [(0, "0 steps"), (1, "1 step"), (1234, "1,234 steps")])
def test_one_is_not_many(number: int, words: str) -> None:
    assert counted(number, "step") == words
