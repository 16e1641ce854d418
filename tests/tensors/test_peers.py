"""The contract of Peers: every transport, between real processes, gives the tree's bits and keeps rounds apart."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.tensors.codecs import parse
from paceline.tensors.layout import Layout, sum_dtype
from paceline.tensors.peers import Alone, check_keys
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import same, tree_sum
from tests.tensors.scenarios import CODED_SHAPES, coded, leaf_value, payload, tensors_of

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0
KINDS = ["shared", "gloo", "mesh", "machines", "machines-1"]


@pytest.fixture(scope="module")
def host() -> Iterator[subprocess.Popen[str]]:
    """The process that has imported torch and forks workers."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tensors.peers_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        cwd=ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


Run = Callable[..., list[Any]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(host: subprocess.Popen[str], kind: str, tmp_path: Path) -> Run:
    """Runs a scenario on so many workers of the transport in hand; their results, in order."""

    def run(scenario: str, size: int, **ask: Any) -> list[Any]:
        assert host.stdin is not None and host.stdout is not None
        folder = tmp_path / scenario
        folder.mkdir()
        whole = {"scenario": scenario, "kind": kind, "size": size, "folder": str(folder), "limit_s": LIMIT_S, **ask}
        host.stdin.write(json.dumps(whole) + "\n")
        host.stdin.flush()
        answer = json.loads(host.stdout.readline())
        results = []
        for rank in range(size):
            file = folder / f"{rank}.pt"
            result = torch.load(file, weights_only=True) if file.exists() else {}
            assert "error" not in result, f"worker {rank}:\n{result['error']}"
            results.append(result.get("value", "gone"))
        assert not answer["hung"], f"workers {answer['hung']} hung"
        return results

    return run


def wanted(ask: dict[str, Any]) -> list[list[torch.Tensor]]:
    """The one-process tree over the same leaves, for each turn."""
    return [
        [
            tree_sum([leaf_value(tuple(t.shape), sum_dtype(t.dtype), turn, index, leaf) for leaf in range(leaves)])
            / ask["divisor"]
            for index, t in enumerate(tensors_of(ask))
        ]
        for turn, leaves in enumerate(ask["leaves"])
    ]


def check_totals(run: Run, size: int, **ask: Any) -> None:
    want = wanted(ask)
    for results in run("totals", size, **ask):
        for turn, (result, tensors) in enumerate(zip(results, want, strict=True)):
            for got, tensor in zip(result["views"], tensors, strict=True):
                assert same(got, tensor), f"leaves {ask['leaves'][turn]}, workers {size}"
            assert result["rows"] == [[worker * 10 + turn, -1 << 62] for worker in range(size)]


SMALL = [([7], "float32"), ([3, 5], "float64"), ([], "float32"), ([0], "float32")]
LARGE = [([100_003], "float32"), ([31], "float32"), ([20_001], "float64")]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_totals_are_the_trees_for_even_and_uneven_deals(run: Run, size: int) -> None:
    leaves = [size, 2 * size, 4, 8, 5, 7, 13]
    check_totals(run, size, tensors=SMALL, leaves=[n for n in leaves if n >= size], divisor=3.0, bucket_bytes=64)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_totals_of_a_large_layout_are_the_trees(run: Run, size: int) -> None:
    """Over 256 KiB: with three workers and more, each adds a segment of its own."""
    check_totals(run, size, tensors=LARGE, leaves=[size, 7, 8], divisor=1.0)


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_workers_without_a_leaf_still_get_the_total(run: Run, tensors: Any) -> None:
    check_totals(run, 4, tensors=tensors, leaves=[2, 1, 3], divisor=1.0)


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_buckets_that_left_too_early_are_sent_again(run: Run, tensors: Any) -> None:
    check_totals(run, 3, tensors=tensors, leaves=[3, 7, 4], divisor=1.0, early=True, bucket_bytes=1 << 16)


@pytest.mark.parametrize("lost", [[0], [1], [3], [1, 2]])
def test_totals_are_the_trees_when_those_who_remain_carry_a_lost_ones_leaves(run: Run, lost: list[int]) -> None:
    check_totals(run, 3, tensors=SMALL, leaves=[8, 13], divisor=3.0, lost=lost)


def test_a_bucket_of_nothing_is_no_obstacle(run: Run) -> None:
    """A model whose only buffer is empty (`register_buffer("device", torch.empty(0))`) has such a bucket."""
    tensors = [([4], "float32"), ([0], "float32")]
    check_totals(run, 2, tensors=tensors, leaves=[2, 3], divisor=1.0, count=1)


def test_payloads_come_back_in_order_whatever_their_size(run: Run) -> None:
    sizes = [
        [0, 0, 0],
        [5, 0, 1],
        [0, 3_000_001, 17],
        [1 << 18, (1 << 18) - 8, (1 << 18) - 7],
        [1 << 20] * 3,
        [1, 2, 3],
    ]
    want = [
        [[size, hashlib.sha256(payload(rank, size)).hexdigest()] for rank, size in enumerate(turn)] for turn in sizes
    ]
    assert run("gather", 3, sizes=sizes) == [want] * 3


def test_who_has_a_partner_gets_what_that_one_brings_and_sends_to_nobody_else(run: Run, kind: str) -> None:
    turns = [
        [[1, 0, 3, 2], 5],
        [[3, None, None, 0], 3_000_000],
        [[2, 3, 0, 1], 0],
        [[None] * 4, 7],
        [[2, None, 0, None], 70_000],
    ]
    everyone = run("trade", 4, turns=turns)
    for turn, (partners, size) in enumerate(turns):
        for rank, other in enumerate(partners):
            want = b"" if other is None else payload(other, size + other)
            length, digest, sent = everyone[rank][turn]
            assert (length, digest) == (len(want), hashlib.sha256(want).hexdigest())
            if not kind.startswith("machines"):  # where a leader sends for all
                assert sent <= size + rank + 4096 * (0 if kind == "shared" else 1) + 64
        if kind.startswith("machines"):
            brought = sum(size + rank for rank, other in enumerate(partners) if other is not None)
            assert sum(everyone[rank][turn][2] for rank in range(4)) <= brought + 4 * 4096


@pytest.mark.parametrize("codec", ["int8", "randomk:0.1"])
def test_coded_gradients_come_to_the_same_bits_and_the_stated_bytes(run: Run, kind: str, codec: str) -> None:
    want = coded(Alone(torch.device("cpu")), None, {"codec": codec, "leaves": 6})  # type: ignore[arg-type]
    everyone = run("coded", 3, codec=codec, leaves=6)
    for results in everyone:
        for got, alone in zip(results, want, strict=True):
            assert all(same(a, b) for a, b in zip(got["views"], alone["views"], strict=True))
    messages = 3 if parse(codec).summable else 6
    times = {"gloo": 2, "mesh": 2}.get(kind, 1)  # to each of the others; else to another machine, or into memory, once
    stated = messages * times * parse(codec).nbytes(CODED_SHAPES)
    for step in range(3):
        sent = sum(results[step]["sent"] for results in everyone)
        assert stated <= sent <= 1.05 * stated + 6 * 1024


def test_one_worker_gathers_from_itself(run: Run) -> None:
    want = [[size, hashlib.sha256(payload(0, size)).hexdigest()] for size in (0, 9)]
    assert run("gather", 1, sizes=[[0], [9]]) == [[[want[0]], [want[1]]]]


@pytest.mark.parametrize(("size", "large"), [(2, 3), (4, 3), (3, 70_000)])
def test_many_rounds_never_mix(run: Run, size: int, large: int, seed: int) -> None:
    assert run("rounds", size, rounds=150, large=large, seed=seed) == [[]] * size


@pytest.mark.parametrize("way", ["reduce", "gather"])
def test_different_keys_name_the_workers_that_came_elsewhere(run: Run, way: str, kind: str) -> None:
    told = run("keys", 3, keys=[5, 5, 6], ways=[way] * 3)
    check_told(kind, told, [[2], [2], [0, 1]])


def check_told(kind: str, told: list[Any], want: list[list[int]]) -> None:
    """Within a machine everybody is told of everybody; another machine may only learn that the run ends."""
    if not kind.startswith("machines"):
        assert told == want
        return
    named = [who for who in told if who != "gave up"]
    assert named, "nobody was told who is elsewhere"
    assert all(set(who) <= set(all_of) for who, all_of in zip(told, want, strict=True) if who != "gave up")


def test_equal_keys_are_no_mismatch(run: Run) -> None:
    assert run("keys", 2, keys=[5, 5], ways=["reduce"] * 2) == ["met"] * 2


def test_a_reduce_that_meets_a_message_is_a_mismatch_too(run: Run, kind: str) -> None:
    """One worker left the loop early and is at the end of the epoch, the others are at a reduce point."""
    told = run("keys", 3, keys=[5, 6, 5], ways=["reduce", "gather", "reduce"])
    check_told(kind, told, [[1], [0, 2], [1]])


def test_the_watch_can_end_a_wait(run: Run) -> None:
    """`check` is called at least every 10 ms; here its third call raises."""
    result = run("ended", 2, patience_s=3.0)[0]
    assert result["how"] == "ended by the watch"
    assert result["seconds"] < 1.0
    assert result["laggards"] == [1]


def test_a_death_ends_the_others_wait(run: Run) -> None:
    results = run("death", 3)
    assert results[2] == "gone"
    assert set(results[:2]) <= {"peer lost", "ended by the watch"}


# a death in the middle, of groups that live between machines

SEVERAL = ["mesh", "mesh-tls", "machines", "machines-1", "machines-tls"]


@pytest.mark.parametrize("kind", ["shared", *SEVERAL], indirect=True)
@pytest.mark.parametrize("turn", range(3))
def test_a_kill_in_the_middle_of_anything_ends_the_term_for_all(run: Run, kind: str, seed: int, turn: int) -> None:
    """Those who remain have completed the same meetings, or one more, and nothing of them is wrong."""
    dice = random.Random(f"{seed} {kind} {turn}")
    size = dice.choice([2, 3, 4])
    victim, count = dice.randrange(size), dice.choice([100, 1_000_000])
    actions = dice.randrange(1, 400 if count > 100 else 100)
    print(f"{size} workers, worker {victim} dies at action {actions}, {count} elements")
    results = run("killed", size, victim=victim, count=count, actions=actions)
    assert results.pop(victim) == "gone"
    assert [result["wrong"] for result in results] == [[]] * len(results)
    done = [result["done"] for result in results]
    assert max(done) - min(done) <= (0 if kind == "shared" else 1)


@pytest.mark.parametrize("kind", ["mesh-tls", "machines-tls"], indirect=True)
def test_under_tls_it_is_the_same(run: Run, seed: int) -> None:
    check_totals(run, 3, tensors=LARGE, leaves=[3, 7], divisor=3.0)
    assert run("rounds", 3, rounds=30, large=70_000, seed=seed) == [[]] * 3


# results that scripts change in place

WAYS = ["leave", "scale", "data", "numpy", "one", "half"]


def check_changes(run: Run, size: int, turns: int, calls: int, ways: list[list[str]], **ask: Any) -> list[list[int]]:
    """Every sum is right and every change stays with its worker; where the results lay, for each worker."""
    results = run("changes", size, tensors=LARGE, turns=turns, calls=calls, ways=ways, **ask)
    assert [result["wrong"] for result in results] == [[]] * size
    return [result["places"] for result in results]


@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_place_stays_with_its_worker(run: Run, way: str) -> None:
    check_changes(run, 3, turns=4, calls=1, ways=[["leave"] * 4, [way] * 4, ["leave"] * 4])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_changes_of_any_kind_at_any_point_stay_with_their_worker(run: Run, size: int, seed: int) -> None:
    dice = random.Random(seed)
    turns, calls = 6, 2
    # Some of them rarely change anything, so that results of both kinds are in use for a while.
    ways = [
        [dice.choice(WAYS) if dice.random() < rate else "leave" for _ in range(turns * calls)]
        for rate in (dice.choice([0.1, 0.4, 1.0]) for _ in range(size))
    ]
    check_changes(run, size, turns, calls, ways, blind=[0] if dice.random() < 0.3 else [])


@pytest.mark.parametrize("kind", ["shared"], indirect=True)
def test_who_changes_much_gets_a_result_of_its_own_at_the_second_next_point(run: Run) -> None:
    """The first change is seen at the next point of that number, and asked for at the one behind it."""
    turns = 5
    places = check_changes(run, 4, turns, 2, [[way, "leave"] * turns for way in ("leave", "scale", "one", "half")])
    moved = [[place != of_worker[call] for place in of_worker[call::2]] for of_worker in places for call in (0, 1)]
    stays, goes = [False] * turns, [False, False, True, True, True]
    assert moved == [stays, stays, goes, stays, stays, stays, goes, stays]


@pytest.mark.parametrize("kind", ["shared"], indirect=True)
def test_a_worker_that_cannot_see_its_changes_gets_a_result_of_its_own(run: Run) -> None:
    places = check_changes(run, 2, 4, 1, [["one"] * 4] * 2, blind=[1])
    assert [len(set(of_worker)) for of_worker in places] == [1, 2]


def test_a_death_leaves_the_others_what_they_made_of_their_results(run: Run) -> None:
    results = run("death_behind_a_change", 3, tensors=LARGE)
    assert results == [[[6.5], [6.5]], [[7.5], [7.5]], "gone"]


# the group of one, and what all groups share


def test_a_group_of_one_keeps_the_contract() -> None:
    peers = Alone(torch.device("cpu"))
    layout = Layout.of([torch.empty(5)])
    peers.open(Plan.of(3, 1), layout, 2)
    parts = peers.parts()
    assert len(parts) == 1
    parts[0][0].copy_(torch.arange(16.0))
    peers.post(0)
    peers.repost([0])
    assert peers.exchange(1, np.array([4, 5])).tolist() == [[4, 5]]
    out = peers.total(0, 2.0)
    assert out[0].tolist() == (torch.arange(16.0) / 2).tolist()
    parts[0][0].zero_()
    assert out[0][15] == 7.5, "the result is private"
    assert peers.gather(1, b"x") == [b"x"]
    peers.close()


def test_keys_are_compared_with_ones_own() -> None:
    told: list[list[int]] = []

    class Watch:
        def mismatch(self, others: list[int]) -> None:
            told.append(others)

    for rank in range(4):
        check_keys([7, 7, 8, 7], rank, Watch())  # type: ignore[arg-type]
    check_keys([7, 7], 0, Watch())  # type: ignore[arg-type]
    assert told == [[2], [2], [0, 1, 3], [2]]
