"""run.kv without sockets: what a script sees, and that no push is lost or counted twice, whichever servers die."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.servers import kv as store
from paceline.servers.calling import Reply
from paceline.servers.direct import OwnServer
from paceline.servers.keys_client import KeyValues
from paceline.servers.keys_messages import FRAGMENTS, fragment_of
from paceline.servers.keys_shelf import KeyShelf
from paceline.servers.lines import REDIAL_S, Server
from tests.servers.shelves import PATIENCE_S, World


@pytest.fixture
def kv() -> Iterator[KeyValues]:
    """Of a run of one."""
    keys = KeyValues(OwnServer(KeyShelf()), 0, lambda: None)
    yield keys
    keys.close()


def values(kv: KeyValues, key: str) -> list[float]:
    found = kv.pull(key).result().tensor
    assert found is not None
    return [float(value) for value in found]


def test_a_worker_reads_what_it_has_written(kv: KeyValues) -> None:
    """Without waiting for any of it."""
    kv.push("w", torch.zeros(3), "assign")
    for _ in range(50):
        kv.push("w", torch.ones(3))
    version, found = kv.pull("w").result()
    assert version == 51 and found is not None and found.tolist() == [50.0] * 3


def test_push_pull_gives_what_came_of_this_push(kv: KeyValues) -> None:
    kv.push("w", torch.zeros(2), "assign")
    calls = [kv.push_pull("w", torch.ones(2)) for _ in range(4)]
    found = kv.wait(*calls)
    assert [version for version, _ in found] == [2, 3, 4, 5]
    assert [tensor is not None and tensor.tolist() for _, tensor in found] == [[float(n)] * 2 for n in (1, 2, 3, 4)]


def test_what_is_not_newer_is_not_sent(kv: KeyValues) -> None:
    kv.push("w", torch.zeros(2), "assign")
    assert kv.pull("w", if_newer_than=1).result() == (1, None)
    kv.push("w", torch.ones(2))
    assert kv.pull("w", if_newer_than=1).result().version == 2


def test_a_server_that_ends_every_line_at_once_is_not_called_at_full_speed() -> None:
    class Ending(OwnServer):
        dialled = 0

        def dial(self, address: str) -> Server:
            self.dialled += 1
            if self.dialled > 10:
                return super().dial(address)
            return Server(_Broken(), _Broken())

    servers, begun = Ending(KeyShelf()), time.monotonic()
    keys = KeyValues(servers, 0, lambda: None)
    keys.push("w", torch.zeros(3), "assign").result()
    keys.close()
    assert time.monotonic() - begun >= 10 * REDIAL_S and servers.dialled == 11


class _Broken:
    over = True

    def call(self, message: Any, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_exception(ConnectionError("the line has broken"))
        return future

    def close(self) -> None:
        pass


@pytest.mark.parametrize("dtype", list(store.DTYPES))
def test_every_dtype_is_added_up_in_itself(kv: KeyValues, dtype: str) -> None:
    ones = torch.ones(5, dtype=store.DTYPES[dtype])
    kv.push("w", ones, "assign")
    found = kv.push_pull("w", ones * 2).result().tensor
    assert found is not None and found.dtype == ones.dtype and found.tolist() == [3] * 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("combine", "want"), [("sgd", 4 - 0.5 * 2), ("blend", 4 + 0.5 * (2 - 4))])
def test_combines_with_a_rate(kv: KeyValues, combine: str, want: float, dtype: torch.dtype) -> None:
    kv.push("w", torch.full((3,), 4.0, dtype=dtype), "assign")
    found = kv.push_pull("w", torch.full((3,), 2.0, dtype=dtype), combine, rate=0.5).result().tensor
    assert found is not None and found.tolist() == [want] * 3


def test_a_pull_goes_into_any_tensor(kv: KeyValues) -> None:
    """A parameter, a column of something, one that is not there yet."""
    kv.push("w", torch.arange(4.0), "assign")
    parameter, column = torch.nn.Parameter(torch.zeros(4)), torch.zeros(4, 2)[:, 0]
    before = parameter._version
    assert kv.pull("w", parameter).result().tensor is parameter and parameter._version > before
    kv.wait(kv.pull("w", into=column))
    assert parameter.tolist() == column.tolist() == values(kv, "w") == [0, 1, 2, 3]


def test_what_is_pushed_may_also_be_where_the_result_goes(kv: KeyValues) -> None:
    mine = torch.ones(4)
    kv.push("w", torch.ones(4), "assign")
    kv.wait(kv.push_pull("w", mine, into=mine))
    assert mine.tolist() == [2.0] * 4


def test_odd_shapes(kv: KeyValues) -> None:
    for number, shape in enumerate([(), (0,), (2, 0), (1, 2, 3)]):
        kv.push(f"w{number}", torch.ones(shape), "assign")
        found = kv.push_pull(f"w{number}", torch.ones(shape)).result().tensor
        assert found is not None and torch.equal(found, torch.full(shape, 2.0))


def test_keys_are_spread_over_all_fragments() -> None:
    found = Counter(fragment_of(f"layer{k}.weight") for k in range(100 * FRAGMENTS))
    assert len(found) == FRAGMENTS and max(found.values()) < 200


# what is refused


@pytest.mark.parametrize(
    ("key", "tensor", "combine", "rate", "sentence"),
    [
        ("w", torch.zeros(3, 2), "sum", None, r"^w is float32 of shape \(2, 3\), and float32 of \(3, 2\) was pushed"),
        ("w", torch.zeros(2, 3).double(), "sum", None, "^w is float32 .* and float64"),
        ("v", torch.zeros(1), "sum", None, "^there is no key 'v'; it is made by a push with assign"),
        ("w", torch.zeros(2, 3), "mean", None, "^w: there is no combine 'mean'; there are assign, sum, max, min, sgd"),
        ("w", torch.zeros(2, 3), "sgd", None, "^w: sgd .* needs a rate, and has None"),
        ("w", torch.zeros(2, 3), "sgd", float("nan"), "^w: sgd .* needs a rate, and has nan"),
        ("w", torch.zeros(2, 3), "sum", 0.1, "^w: sum takes no rate"),
        ("n", torch.zeros(1, dtype=torch.int64), "sgd", 0.1, "^n is int64, and sgd is for floating point"),
        ("", torch.zeros(1), "assign", None, "^a key has 1 to 200 printable characters"),
        (
            "w",
            torch.zeros(2, 3, dtype=torch.complex64),
            "sum",
            None,
            "^w is torch.strided of torch.complex64; keys are",
        ),
        ("w", torch.zeros(2, 3).to_sparse(), "sum", None, "^w is torch.sparse_coo"),
    ],
)
def test_a_push_that_cannot_be_is_refused_and_counts_for_nothing(
    kv: KeyValues, key: str, tensor: torch.Tensor, combine: str, rate: float | None, sentence: str
) -> None:
    kv.push("w", torch.zeros(2, 3), "assign")
    kv.push("n", torch.zeros(1, dtype=torch.int64), "assign")
    with pytest.raises(UsageError, match=sentence):
        kv.push(key, tensor, combine, rate=rate).result()
    assert kv.push("w", torch.ones(2, 3)).result().version == 2
    assert kv.push("n", torch.ones(1, dtype=torch.int64)).result().version == 2


def test_a_pull_into_something_else_is_refused(kv: KeyValues) -> None:
    kv.push("w", torch.zeros(2), "assign")
    with pytest.raises(UsageError, match=r"^w is float32 of shape \(2,\), and cannot go into int32 of \(2,\)"):
        kv.pull("w", torch.zeros(2, dtype=torch.int32)).result()
    with pytest.raises(UsageError, match=r"^w is torch\.strided of torch\.bool"):
        kv.pull("w", torch.zeros(2, dtype=torch.bool))


def test_an_error_that_nobody_looked_at_is_raised_once_by_wait(kv: KeyValues) -> None:
    kv.push("nothing", torch.zeros(2))
    with pytest.raises(UsageError, match="there is no key 'nothing'"):
        kv.barrier()
    kv.barrier()
    looked_at = kv.pull("nothing")
    assert isinstance(looked_at.exception(), UsageError)
    kv.wait()


def test_a_tensor_that_changes_while_it_is_pushed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one still waits for the first, which waits in the server."""
    shelf = KeyShelf()
    begun, go, handle = threading.Event(), threading.Event(), shelf.handle

    def slow(*arguments: object) -> object:
        begun.set()
        assert go.wait(10)
        return handle(*arguments)  # type: ignore[arg-type]

    kv = KeyValues(OwnServer(shelf), 0, lambda: None)
    monkeypatch.setattr(shelf, "handle", slow)
    mine = torch.zeros(2)
    first, second = kv.push("w", torch.zeros(2), "assign"), kv.push("w", mine)
    assert begun.wait(10)
    mine.add_(1)
    go.set()
    with pytest.raises(UsageError, match="w was changed while it was being pushed"):
        second.result()
    assert first.result().version == 1
    kv.close()


# all of it


def test_keys_go_on_from_a_state_where_they_were(kv: KeyValues) -> None:
    for key, count in (("a", 1), ("b", 5), ("half", 2)):
        for _ in range(count):
            kv.push(key, torch.full((3,), count, dtype=torch.float16 if key == "half" else torch.float32), "assign")
    state = kv.state_dict()
    another = KeyValues(OwnServer(KeyShelf()), 0, lambda: None)
    another.push("b", torch.zeros(3), "assign")
    another.push("other", torch.zeros(3), "assign")
    another.load_state_dict(state)
    assert {key: another.pull(key).result().version for key in state} == {"a": 1, "b": 5, "half": 2}
    assert values(another, "b") == [5.0] * 3 and values(another, "half") == [2.0] * 3
    assert values(another, "other") == [0.0] * 3, "keys that are not in it stay"
    another.load_state_dict(state)
    assert another.pull("b").result().version == 6, "versions only ever grow"
    another.close()


# servers die


@pytest.mark.parametrize("case", range(12))
@pytest.mark.parametrize(("servers", "replicas"), [(2, 2), (4, 3)])
def test_every_push_that_was_answered_counts_once(seed: int, case: int, servers: int, replicas: int) -> None:
    world = World(seed + case, servers, replicas, deaths=4, new_shelf=KeyShelf)
    keys = [f"key {k}" for k in range(5)]
    counted: list[Counter[str]] = []
    begun = threading.Barrier(3, timeout=PATIENCE_S)

    def work(worker: int) -> None:
        dice, mine = random.Random(f"{seed} {case} {worker}"), Counter[str]()
        kv = KeyValues(world, worker, lambda: None)
        if not worker:
            kv.wait(*[kv.push(key, torch.zeros(100, dtype=torch.int64), "assign") for key in keys])
        begun.wait()
        seen = dict.fromkeys(keys, 0)
        for _ in range(60):
            key = dice.choice(keys)
            mine[key] += 1
            kv.push(key, torch.ones(100, dtype=torch.int64))
            if dice.random() < 0.3:
                version, found = kv.pull(key).result()
                assert found is not None and found.min() == found.max() == version - 1, "one version, whole"
                assert version > max(seen[key], mine[key]), "its own pushes are in it, and it never goes back"
                seen[key] = version
        kv.close()
        counted.append(mine)

    world.live([threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(3)])
    world.settle()
    total = sum(counted, Counter[str]())
    assert len(counted) == 3, world.log
    reader = KeyValues(world, 3, lambda: None)
    for key in keys:
        version, found = reader.pull(key).result()
        assert found is not None and found.unique().tolist() == [total[key]] and version == total[key] + 1, world.log
        holders = world._now().holders[fragment_of(key)]
        copies = [world.shelves[server]._held[fragment_of(key)]._store.pull(store.Pull(key)) for server in holders]
        assert len({(copy.message, bytes(copy.buffers[0])) for copy in copies}) == 1, world.log
    reader.close()
    world.close()
