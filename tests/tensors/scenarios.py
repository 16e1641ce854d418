"""What the workers of the contract tests of Peers do: (peers, watch, what was asked) → a result.

They run in processes of `peers_worker`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from paceline.errors import PeerLostError
from paceline.tensors import mirror
from paceline.tensors.codecs import parse
from paceline.tensors.coded import CodedReducer
from paceline.tensors.layout import Layout
from paceline.tensors.mesh import Line
from paceline.tensors.peers import Peers, TermEnded, Trading
from paceline.tensors.segment import Words
from paceline.tensors.tree import Plan
from tests.tensors.arithmetic import same, tree_sum

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Mismatch(Exception):
    """The watch was told of a mismatch."""


class Ended(Exception):
    """The watch ended a wait."""


class Common:
    """What all workers of a scenario and their parent see, whoever dies."""

    def __init__(self, size: int) -> None:
        words = np.frombuffer(mmap.mmap(-1, 16 * size), dtype=np.int64)
        self.gone, self.entered = words[:size], words[size:]


class Watch:
    """Says who was killed. Counts its calls; ends a wait once `patience` of them have been made, or it is that late."""

    def __init__(self, common: Common) -> None:
        self.common = common
        self.calls, self.laggards, self.patience = 0, set[int](), 1 << 60
        self.over: Path | None = None

    def check(self, seconds: float, laggard: int) -> None:
        self.calls += 1
        self.laggards.add(laggard)
        if self.common.gone[laggard]:
            raise TermEnded(f"worker {laggard} is gone")
        if self.calls >= self.patience or (self.over is not None and self.over.exists()):
            raise Ended

    def mismatch(self, others: list[int]) -> NoReturn:
        raise Mismatch(json.dumps(others))


def leaf_value(shape: tuple[int, ...], dtype: torch.dtype, *which: int) -> torch.Tensor:
    """What a leaf contributes: any process can draw it again."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(which).encode()).digest()[:6]))
    return torch.randn(shape, generator=generator, dtype=dtype) * 10.0 ** (which[-1] % 5)


def tensors_of(ask: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=DTYPES[dtype]) for shape, dtype in ask["tensors"]]


def totals(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """One reduce point for each number of leaves; everybody's result and lanes."""
    tensors = tensors_of(ask)
    layout = Layout.of(tensors, ask.get("count"), bucket_bytes=ask.get("bucket_bytes", 1 << 18))
    results = []
    for turn, leaves in enumerate(ask["leaves"]):
        lost = frozenset(ask.get("lost", ()))
        plan = Plan.of(leaves, peers.size + len(lost)).without(lost)
        peers.open(plan, layout, 2)
        parts = peers.parts()
        if ask.get("early"):
            for flats in parts:
                for flat in flats:
                    flat.fill_(-1.0)
            _post_all(peers, layout)
        for flats, (a, b) in zip(parts, plan.parts(peers.rank), strict=True):
            for index, view in enumerate(layout.views(flats)):
                values = [leaf_value(tuple(view.shape), view.dtype, turn, index, leaf) for leaf in range(a, b)]
                view.copy_(tree_sum(values))
        if not ask.get("early"):
            _post_all(peers, layout)
        rows = peers.exchange(turn, np.array([peers.rank * 10 + turn, -1 << 62], dtype=np.int64))
        if ask.get("early"):
            peers.repost(range(len(layout.buckets)))
        out = peers.total(turn, ask["divisor"])
        # The result is private: another's writing in the next turn must not reach it.
        results.append({"views": layout.views(out), "rows": rows.tolist()})
    for result in results:
        result["views"] = [view.contiguous() for view in result["views"]]
    return results


def _post_all(peers: Peers, layout: Layout) -> None:
    for bucket in range(len(layout.buckets)):
        peers.post(bucket)


def payload(rank: int, size: int) -> bytes:
    return hashlib.shake_128(bytes([rank])).digest(size)


def gather(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    said = []
    for turn, sizes in enumerate(ask["sizes"]):
        got = peers.gather(turn, payload(peers.rank, sizes[peers.rank]))
        assert all(type(part) is bytes for part in got)
        said.append([[len(part), hashlib.sha256(part).hexdigest()] for part in got])
    return said


def trade(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """What came from each turn's partner, and how much this worker has sent for it."""
    assert isinstance(peers, Trading)
    said = []
    for turn, (partners, size) in enumerate(ask["turns"]):
        before = peers.sent_bytes
        got = peers.trade(turn, partners[peers.rank], payload(peers.rank, size + peers.rank))
        said.append([len(got), hashlib.sha256(got).hexdigest(), peers.sent_bytes - before])
    return said


def rounds(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """Sums and messages in turn, each worker late by its own small random delays; the rounds it got wrong."""
    rng = random.Random(ask["seed"] * 100 + peers.rank)
    layout = Layout.of([torch.empty(5), torch.empty(ask["large"])])
    wrong = []
    for turn in range(ask["rounds"]):
        kind = turn % 3
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.003)
        if kind == 2:
            got = peers.gather(turn, f"{turn}:{peers.rank}".encode() * (1 + turn % 5))
            if got != [f"{turn}:{worker}".encode() * (1 + turn % 5) for worker in range(peers.size)]:
                wrong.append(turn)
            continue
        leaves = peers.size + turn % 4
        plan = Plan.of(leaves, peers.size)
        peers.open(plan, layout, 1)
        parts = peers.parts()
        for flats, (a, b) in zip(parts, plan.parts(peers.rank), strict=True):
            flats[0].fill_(sum(leaf + turn for leaf in range(a, b)))
        _post_all(peers, layout)
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.003)
        rows = peers.exchange(turn, np.array([turn * 100 + peers.rank], dtype=np.int64))
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.003)
        out = peers.total(turn % 2, 1.0)
        want = float(sum(leaf + turn for leaf in range(leaves)))
        fine = bool((out[0] == want).all())
        if not fine or rows[:, 0].tolist() != [turn * 100 + worker for worker in range(peers.size)]:
            wrong.append(turn)
    return wrong


def keys(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """Every worker comes to the meeting of its own key, by a reduce point or by a gather."""
    key, way = ask["keys"][peers.rank], ask["ways"][peers.rank]
    told = Path(ask["folder"], "told")
    if ask["kind"].startswith("machines"):
        watch.over = told  # where the machine that knows is another one, the run's abort word would end the wait
    try:
        if way == "gather":
            peers.gather(key, b"hello")
        else:
            layout = Layout.of([torch.empty(3)])
            peers.open(Plan.of(peers.size, peers.size), layout, 6)
            peers.post(0)
            peers.exchange(key, np.arange(6, dtype=np.int64))
    except (PeerLostError, Ended):
        return "gave up"
    except Mismatch as error:
        told.touch()
        return json.loads(str(error))
    return "met"


def ended(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """Worker 0 waits and its watch soon ends the wait; the others come only when it is over, or never."""
    over = Path(ask["folder"], "over")
    if peers.rank:
        deadline = time.monotonic() + ask["patience_s"]
        while not over.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return None
    watch.calls, watch.patience = 0, 3
    start = time.monotonic()
    try:
        peers.gather(1, b"")
        how = "met"
    except Ended:
        how = "ended by the watch"
    except PeerLostError:
        how = "peer lost"
    took = time.monotonic() - start
    over.touch()
    return {"how": how, "seconds": took, "laggards": sorted(watch.laggards), "waited_s": peers.waited_s}


def death(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """The last worker dies before a meeting; what the others' wait comes to."""
    peers.gather(1, b"")
    if peers.rank == peers.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    watch.calls, watch.patience = 0, 50  # half a second of waiting, where the transport cannot know
    try:
        peers.gather(2, b"")
    except PeerLostError:
        return "peer lost"
    except (Ended, TermEnded):
        return "ended by the watch"
    return "met"


def _change(way: str, flats: list[torch.Tensor], point: int) -> None:
    """What a script does to its gradients."""
    for flat in flats:
        match way:
            case "scale":
                flat.mul_(0.5)
            case "data":
                flat.data.fill_(float("nan"))
            case "numpy":
                flat.numpy()[:] = -1.0
            case "one":
                flat.numpy()[point * 1100 % len(flat)] = float("nan")
            case "half":
                flat[: len(flat) // 2].zero_()
            case _:
                assert way == "leave", way


def changes(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """Steps of several reduce points. After each, every worker changes its result in its own way.

    `ways`: for each worker and point. Returns what was wrong, and where the results lay.
    """
    layout, calls = Layout.of(tensors_of(ask)), ask["calls"]
    plan = Plan.of(peers.size + 1, peers.size)
    wrong: list[str] = []
    places = []
    kept: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    if peers.rank in ask.get("blind", []):
        mirror._PAGEMAP = "/dev/null"
    drawn = [
        [leaf_value((count,), dtype, number, leaf) for leaf in range(plan.leaves)]
        for number, (dtype, count) in enumerate(layout.flats)
    ]

    def sum_of(flat: int, point: int, a: int, b: int) -> torch.Tensor:
        return tree_sum([value * (1.0 + point) for value in drawn[flat][a:b]])

    for point in range(ask["turns"] * calls):
        call = point % calls
        peers.open(plan, layout, 1)
        for flats, part in zip(peers.parts(), plan.parts(peers.rank), strict=True):
            for number, flat in enumerate(flats):
                flat.copy_(sum_of(number, point, *part))
        _post_all(peers, layout)
        peers.exchange(point, np.zeros(1, dtype=np.int64))
        out = peers.total(call, 2.0)
        if not all(same(flat, sum_of(number, point, 0, plan.leaves) / 2.0) for number, flat in enumerate(out)):
            wrong.append(f"the sum of point {point}")
        _change(ask["ways"][peers.rank][point], out, point)
        kept[call] = out, [flat.clone() for flat in out]
        places.append(out[0].data_ptr())
        peers.gather(point, b"")  # all have made their changes
        for other, (flats, copies) in kept.items():
            if not all(same(flat, copy) for flat, copy in zip(flats, copies, strict=True)):
                wrong.append(f"what this worker made of call {other}, behind point {point}")
    return {"wrong": wrong, "places": places}


def death_behind_a_change(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """All change their results; the last one dies before the next point. What became of the others' results."""
    layout, plan = Layout.of(tensors_of(ask)), Plan.of(peers.size, peers.size)
    for turn in range(3):
        peers.open(plan, layout, 1)
        for flat in peers.parts()[0]:
            flat.fill_(turn + 1)
        _post_all(peers, layout)
        if turn == 2 and peers.rank == peers.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if turn == 2:
                watch.calls, watch.patience = 0, 50
            peers.exchange(turn, np.zeros(1, dtype=np.int64))
            out = peers.total(0, 1.0)
        except (PeerLostError, Ended, TermEnded):
            return [flat.unique().tolist() for flat in out]
        for flat in out:
            flat.add_(0.5 + peers.rank)
        peers.gather(turn, b"")
    return "met"


def _die_at(number: int) -> None:
    """This process is killed at its so-manieth small action in a meeting: a call of the kernel, a word said."""
    actions = iter(range(1, number + 1))

    def counted(action: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            if next(actions) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return action(*args)

        return counting

    Line.move = counted(Line.move)  # type: ignore[method-assign]
    Words.say = counted(Words.say)  # type: ignore[method-assign]


def killed(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """Meetings without end, until a worker is killed in the middle of one. How many this one completed, and
    what was wrong: a result, a meeting complete before all had entered it, a part that did not stay as it was."""
    layout, plan = Layout.of([torch.empty(ask["count"])]), Plan.of(peers.size + 1, peers.size)
    wrong: list[str] = []
    entered = watch.common.entered
    if peers.rank == ask["victim"]:
        _die_at(ask["actions"])
    for meeting in count():
        kept: list[tuple[torch.Tensor, int]] = []
        try:
            if meeting % 3 == 2:
                entered[peers.rank] = meeting + 1
                said = peers.gather(meeting, bytes([meeting % 251]) * ask["count"])
                fine = said == [bytes([meeting % 251]) * ask["count"]] * peers.size
            else:
                peers.open(plan, layout, 1)
                for (flat,), (a, b) in zip(peers.parts(), plan.parts(peers.rank), strict=True):
                    kept.append((flat.fill_(sum(leaf + meeting for leaf in range(a, b))), int(flat[0])))
                entered[peers.rank] = meeting + 1
                peers.exchange(meeting, np.zeros(1, dtype=np.int64))
                (out,) = peers.total(0, 1.0)
                fine = bool((out == sum(leaf + meeting for leaf in range(plan.leaves))).all())
        except TermEnded:
            peers.close()
            wrong += [f"a part, in meeting {meeting}" for flat, value in kept if not bool((flat == value).all())]
            return {"done": meeting, "wrong": wrong}
        if not fine:
            wrong.append(f"the result of meeting {meeting}")
        if int(entered.min()) <= meeting:
            wrong.append(f"meeting {meeting} was complete, and not everybody had entered it")
    return None


CODED_SHAPES = [(300, 200), (1001,)]


def coded(peers: Peers, watch: Watch, ask: dict[str, Any]) -> Any:
    """Reduce points whose gradients travel coded; what came of each, and the bytes that it took."""
    reducer = CodedReducer([torch.empty(shape) for shape in CODED_SHAPES], 2, peers, parse(ask["codec"]))
    plan, results = Plan.of(ask["leaves"], peers.size), []
    for step in range(3):
        before = peers.sent_bytes
        reducer.begin(step, 0)
        reducer.open(plan, 1)
        for leaf in plan.leaves_of(peers.rank):
            grads = [leaf_value(shape, torch.float32, step, index, leaf) for index, shape in enumerate(CODED_SHAPES)]
            reducer.fold(leaf, grads, 1.0)
        views = reducer.commit(step, 0, [0], True, 1.0).views
        results.append({"views": [view.clone() for view in views], "sent": peers.sent_bytes - before})
    return results


SCENARIOS: dict[str, Callable[[Peers, Watch, dict[str, Any]], Any]] = {
    function.__name__: function
    for function in (totals, gather, trade, rounds, changes, keys, ended, death, death_behind_a_change, killed, coded)
}
