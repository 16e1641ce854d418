"""The store: versions, what a push does, what is refused, and that a pull is one version, whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch

from benchmarks.servers_noise import send_noise
from paceline.servers import kv
from paceline.servers.calling import Lines, RefusedError
from paceline.servers.kv import Keys, Push, Store
from paceline.servers.serving import Answer, Caller
from paceline.tensors.channel import memory_of
from tests.servers.attending import attended

SOMEBODY = Caller("test", "here")


@pytest.fixture
def keys() -> Iterator[Keys]:
    with attended(kv.Call, Store().handle) as channel:
        lines = Lines([channel], kv.Replies)
        yield Keys(lines)
        lines.close()


def test_a_key_is_made_by_assigning_it(keys: Keys) -> None:
    values = torch.randn(3, 5)
    assert keys.push("w", values, "assign").result() == (1, None)
    version, found = keys.pull("w").result()
    assert version == 1 and found is not None and torch.equal(found, values)


@pytest.mark.parametrize("combine", ["sum", "max", "min", "assign"])
def test_a_push_is_combined_with_what_is_there(keys: Keys, combine: str) -> None:
    ours, theirs = torch.randn(100), torch.randn(100)
    want = {"sum": ours + theirs, "max": ours.maximum(theirs), "min": ours.minimum(theirs), "assign": theirs}[combine]
    keys.push("w", ours, "assign")
    assert keys.push("w", theirs, combine).result().version == 2
    found = keys.pull("w").result().tensor
    assert found is not None and torch.equal(found, want)


def test_a_pull_goes_into_memory_that_is_given(keys: Keys) -> None:
    into = torch.zeros(10)
    keys.push("w", torch.arange(10.0), "assign")
    assert keys.pull("w", into).result().tensor is into
    assert into.tolist() == list(range(10))


def test_push_pull_gives_what_came_of_this_push(keys: Keys) -> None:
    keys.push("w", torch.zeros(10), "assign")
    futures = [keys.push_pull("w", torch.ones(10)) for _ in range(5)]
    found = [future.result() for future in futures]
    assert [version for version, _ in found] == [2, 3, 4, 5, 6]
    assert [tensor is not None and tensor.unique().tolist() for _, tensor in found] == [[n] for n in range(1, 6)]


def test_an_old_version_is_not_sent_again(keys: Keys) -> None:
    keys.push("w", torch.zeros(10), "assign")
    assert keys.pull("w", if_newer_than=1).result() == (1, None)
    assert keys.pull("w", if_newer_than=0).result().tensor is not None


@pytest.mark.parametrize("dtype", list(kv.DTYPES))
def test_every_dtype_comes_back(keys: Keys, dtype: str) -> None:
    values = torch.arange(7).to(kv.DTYPES[dtype])
    keys.push("w", values, "assign")
    found = keys.push_pull("w", values).result().tensor
    assert found is not None and found.dtype == values.dtype and torch.equal(found, values + values)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0), (1,)])
def test_odd_shapes_come_back(keys: Keys, shape: tuple[int, ...]) -> None:
    keys.push("w", torch.ones(shape), "assign")
    found = keys.push_pull("w", torch.ones(shape)).result().tensor
    assert found is not None and torch.equal(found, torch.full(shape, 2.0))


def test_keys_are_dealt_out_to_the_lines() -> None:
    store = Store()
    with attended(kv.Call, store.handle) as one, attended(kv.Call, store.handle) as other:
        lines = Lines([one, other], kv.Replies)
        both = Keys(lines)
        for number in range(6):
            both.push(f"w{number}", torch.full((10,), number), "assign")
        found = [both.push_pull(f"w{number}", torch.full((10,), 1)).result() for number in range(6)]
        assert [tensor is not None and tensor.unique().tolist() for _, tensor in found] == [[n] for n in range(1, 7)]
        lines.close()


# what is refused


def test_a_refusal_says_what_is_wrong_and_the_connection_goes_on(keys: Keys) -> None:
    keys.push("w", torch.zeros(2, 3), "assign").result()
    for future, sentence in (
        (keys.push("w", torch.zeros(3, 2)), r"w is float32 of shape \(2, 3\), and float32 of \(3, 2\) was pushed"),
        (keys.push("w", torch.zeros(2, 3).double()), "w is float32 .* and float64"),
        (keys.push("w", torch.zeros(2), "assign"), r"w is float32 of shape \(2, 3\)"),
        (keys.push("v", torch.zeros(1)), "there is no key 'v'; it is made by a push with assign"),
        (keys.pull("v"), "there is no key 'v'"),
        (keys.push("w", torch.zeros(2, 3), "mean"), "there is no combine 'mean'; there are assign, sum, max, min"),
        (keys.push("", torch.zeros(1), "assign"), "a key has 1 to 200 printable characters"),
        (keys.push("a\nb", torch.zeros(1), "assign"), "a key has 1 to 200 printable characters"),
    ):
        with pytest.raises(RefusedError, match=sentence):
            future.result()
    found = keys.pull("w").result()
    assert found.version == 1 and found.tensor is not None and not found.tensor.any()


@pytest.mark.parametrize(
    ("push", "sentence"),
    [
        (Push("w", "float32", (2,), "assign"), r"float32 of shape \(2,\) is not 4 bytes"),
        (Push("w", "float32", (-1, -1), "assign"), "no tensor has the shape"),
        (Push("w", "float32", (2**62, 2**62), "assign"), "is not 4 bytes"),
        (Push("w", "complex64", (1,), "assign"), "there is no dtype 'complex64'"),
        (kv.Pull("w"), "a pull brings nothing, and 4 bytes came"),
    ],
)
def test_a_body_must_be_what_it_is_said_to_be(push: msgspec.Struct, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Store().handle(SOMEBODY, push, memoryview(bytes(4)))  # type: ignore[arg-type]


def test_a_tensor_of_a_dtype_that_cannot_travel_is_told_at_once(keys: Keys) -> None:
    with pytest.raises(ValueError, match=r"w is torch.complex64"):
        keys.push("w", torch.zeros(1, dtype=torch.complex64))


# versions


def push(store: Store, value: float, combine: str = "sum", pull: bool = False) -> Answer:
    body = memory_of(torch.full((1000,), value))
    return store.handle(SOMEBODY, Push("w", "float32", (1000,), combine, pull), body)


def values(answer: Answer) -> list[float]:
    return torch.frombuffer(answer.buffers[0], dtype=torch.float32).unique().tolist()


def test_what_is_being_sent_is_not_written() -> None:
    """However many pushes come while however many pullers are slow."""
    store = Store()
    push(store, 0.0, "assign")
    answers = [push(store, 1.0, pull=True) for _ in range(5)]
    assert [values(answer) for answer in answers] == [[1.0], [2.0], [3.0], [4.0], [5.0]]
    for answer in answers:
        assert answer.sent is not None
        answer.sent()
    assert values(push(store, 1.0, pull=True)) == [6.0]


def test_memory_is_used_again_when_nobody_reads_it() -> None:
    store, places = Store(), set()
    push(store, 0.0, "assign")
    for _ in range(10):
        slow = push(store, 1.0, pull=True)
        quick = push(store, 1.0, pull=True)
        for answer in (slow, quick):
            assert answer.sent is not None
            places.add(torch.frombuffer(answer.buffers[0], dtype=torch.float32).data_ptr())
            answer.sent()
    assert len(places) == 2


def test_pulls_beside_pushes_never_see_half_of_one() -> None:
    store = Store()
    push(store, 0.0, "assign")
    over = threading.Event()
    torn: list[list[float]] = []

    def pull() -> None:
        while not over.is_set():
            answer = store.handle(SOMEBODY, kv.Pull("w"), memoryview(b""))
            if len(values(answer)) != 1:
                torn.append(values(answer))
            assert answer.sent is not None
            answer.sent()

    pullers = [threading.Thread(target=pull) for _ in range(3)]
    for puller in pullers:
        puller.start()
    for _ in range(300):
        push(store, 1.0)
    over.set()
    for puller in pullers:
        puller.join()
    assert torn == [] and values(push(store, 0.0, pull=True)) == [300.0]


@pytest.mark.parametrize("messages", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_noise_is_refused_or_ends_its_own_connection(
    messages: int, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """`python -m benchmarks.servers --noise 1000000` is the full set."""
    words = send_noise(messages, seed)
    assert "Refusal" in words and f"{messages // 100} connection ended" in words
    assert "Traceback" not in capfd.readouterr().err
