"""A mesh: what is swapped arrives whole, whoever is slow is named, and a lost connection is no error by itself."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from paceline.errors import PeerLostError
from paceline.tensors import mesh
from paceline.tensors.mesh import Line, Lines, Mesh, meet
from paceline.tensors.meshed import MeshPeers
from paceline.tensors.peers import TermEnded
from paceline.wires import wire
from paceline.wires.listener import Call, Listener
from paceline.wires.tls import Identity

SECRET = bytes(range(32))


class Watch:
    """Ends a wait for those who are gone; notes for whom it was asked."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.asked: list[tuple[float, int]] = []
        self.on_check: Callable[[], None] = lambda: None

    def check(self, seconds: float, laggard: int) -> None:
        self.asked.append((seconds, laggard))
        self.on_check()
        if laggard in self.gone:
            raise TermEnded(f"worker {laggard} is gone")

    def mismatch(self, others: list[int]) -> NoReturn:
        raise AssertionError(f"mismatch with {others}")


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.make()


@pytest.fixture(params=["tcp", "tls"])
def doors(request: pytest.FixtureRequest, identity: Identity) -> Iterator[list[Listener]]:
    found = [Listener("127.0.0.1", SECRET, identity if request.param == "tls" else None) for _ in range(4)]
    yield found
    for door in found:
        door.close()


def lines_of(doors: list[Listener], rank: int, size: int) -> Lines:
    return Lines(doors[rank], [door.address for door in doors[:size]], SECRET)


def together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What each of so many threads came to; the first exception is raised again."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001  it is raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return results


def meshes(doors: list[Listener], size: int, name: str = "group") -> tuple[list[Mesh], list[Watch]]:
    watches = [Watch() for _ in range(size)]
    return together(size, lambda rank: meet(name, rank, lines_of(doors, rank, size), watches[rank])), watches


def cut(whole: bytearray, sizes: list[int]) -> list[memoryview]:
    """Stretches of these sizes."""
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [memoryview(whole)[end - size : end] for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_that_is_sent_arrives_where_it_should(doors: list[Listener], size: int, seed: int) -> None:
    """Stretches of any size, cut otherwise on the two sides; several swaps behind each other."""
    dice = random.Random(seed)
    made, _ = meshes(doors, size)
    for _ in range(4):
        scale = dice.choice([3, 1000, 1_000_000])
        said = {
            (a, b): dice.randbytes(dice.choice([0, 1, dice.randrange(scale)])) for a in range(size) for b in range(size)
        }
        got = {pair: bytearray(len(bytes_)) for pair, bytes_ in said.items()}

        def pieces(whole: bytearray) -> list[memoryview]:
            sizes = [len(whole)]
            for _ in range(dice.choice([0, 1, 100])):
                part = dice.randrange(sizes[-1] + 1)
                sizes[-1:] = [part, sizes[-1] - part]
            return cut(whole, sizes)

        out = [[pieces(bytearray(said[a, b])) for b in range(size)] for a in range(size)]
        into = [[pieces(got[b, a]) for b in range(size)] for a in range(size)]
        together(size, lambda rank, out=out, into=into: made[rank].swap(out[rank], into[rank]))  # type: ignore[misc]
        assert all(got[a, b] == said[a, b] for a, b in said if a != b)
    for each in made:
        each.close()


def test_it_is_woken_for_a_lot_while_more_is_to_come_and_for_anything_near_the_end() -> None:
    def wakes_at(line: Line) -> int:
        return ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) if line.want[1] else 0

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        ours.setblocking(False)
        line, whole = Line(1, ours), bytearray(5 * mesh._LOT)
        assert wakes_at(line) == 0
        line.load([], [memoryview(whole)[: mesh._LOT], memoryview(whole)[mesh._LOT :]])
        theirs.settimeout(20)
        for left in (5, 4, 3, 2, 1):
            assert wakes_at(line) == (mesh._LOT if left > 2 else 1), f"{left} lots are to come"
            theirs.sendall(bytes(mesh._LOT))
            had = line._due
            while line._due > had - mesh._LOT:
                line.move()
        assert line.done and wakes_at(line) == 0
        line.load([], [memoryview(whole)[:1]])
        assert wakes_at(line) == 1
        line.close()


def test_a_group_can_be_met_while_another_is_in_use(doors: list[Listener]) -> None:
    first, _ = meshes(doors, 3, "first")
    second, _ = meshes(doors, 3, "second")
    for made in (second, first):
        peers = [MeshPeers(each, Watch()) for each in made]
        said = together(3, lambda rank, peers=peers: peers[rank].gather(1, bytes([rank])))  # type: ignore[misc]
        assert said == [[b"\0", b"\1", b"\2"]] * 3
        for each in peers:
            each.close()


def test_the_laggard_is_named(doors: list[Listener]) -> None:
    """Workers 0 and 1 have exchanged all; worker 2 comes only when both have asked about it a few times."""
    made, watches = meshes(doors, 3)
    for watch in watches:
        watch.asked.clear()
    both = threading.Barrier(3)

    def swap(rank: int) -> None:
        if rank == 2:
            both.wait(20)
        else:
            watches[rank].on_check = lambda: len(watches[rank].asked) == 5 and both.wait(20)  # type: ignore[assignment]
        big = bytes(1000)
        made[rank].swap([[memoryview(big)]] * 3, [[memoryview(bytearray(1000))] for _ in range(3)])

    together(3, swap)
    for watch in watches[:2]:
        assert {laggard for _, laggard in watch.asked[1:]} == {2}, (
            "the first question may come before the other is done"
        )
        seconds = [second for second, _ in watch.asked]
        assert seconds == sorted(seconds)
    assert made[0].waited_s > 0.03
    for each in made:
        each.close()


def test_a_lost_connection_waits_for_the_watch(doors: list[Listener]) -> None:
    made, watches = meshes(doors, 2)
    made[1].close()
    asked = watches[0].asked
    asked.clear()

    def third_time() -> None:
        if len(asked) == 3:
            watches[0].gone.add(1)

    watches[0].on_check = third_time
    with pytest.raises(TermEnded):
        made[0].swap([[memoryview(bytes(10_000_000))]] * 2, [[memoryview(bytearray(10))]] * 2)
    assert len(asked) == 3
    made[0].close()


def test_a_lost_connection_that_nobody_explains_is_an_error_in_the_end(
    doors: list[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_LOST_S", 0.05)
    made, _ = meshes(doors, 2)
    made[1].close()
    with pytest.raises(PeerLostError, match="the connection to machine 1 broke"):
        made[0].swap([[], [memoryview(b"hello")]], [[], [memoryview(bytearray(10))]])
    made[0].close()


def test_who_has_all_he_needs_goes_on_though_the_other_is_gone(doors: list[Listener]) -> None:
    """It had sent its part, and was killed before it took ours."""
    made, watches = meshes(doors, 2)
    made[1]._lines[0].load([memoryview(b"my part")], [])
    assert made[1]._lines[0].move()
    made[1].close()
    watches[0].gone.add(1)
    got = bytearray(7)
    made[0].swap([[], [memoryview(bytes(20_000_000))]], [[], [memoryview(got)]])
    assert got == b"my part"
    with pytest.raises(TermEnded):
        made[0].swap([[], []], [[], [memoryview(bytearray(1))]])
    made[0].close()


def test_a_member_that_does_not_come_is_waited_for_until_it_is_gone(doors: list[Listener]) -> None:
    """From both sides: the one who calls, and the one who is called. Nothing stays open."""
    doors[0].close()
    for rank, missing in ((1, 0), (0, 1)):
        watch = Watch()
        watch.on_check = lambda watch=watch, missing=missing: len(watch.asked) == 8 and watch.gone.add(missing)  # type: ignore[misc]
        lines = Lines(doors[rank + 1], [doors[0].address, doors[0].address], SECRET)
        with pytest.raises(TermEnded):
            meet("group", rank, lines, watch)
        assert {laggard for _, laggard in watch.asked} == {missing}


def test_one_who_refuses_for_a_while_is_called_again(doors: list[Listener]) -> None:
    """A door under a flood of strangers may send a worker away, too."""
    first = wire.listen_tcp()
    made: list[Mesh] = []

    def call() -> None:
        made.append(meet("group", 1, Lines(doors[1], [address, doors[1].address], SECRET), Watch()))

    scheme = doors[0].address.partition("://")[0]
    address = f"{scheme}://127.0.0.1:{first.getsockname()[1]}"
    caller = threading.Thread(target=call)
    caller.start()
    for _ in range(2):
        first.accept()[0].close()
    passed_on = threading.Thread(target=_pass_on, args=(first, doors[0].address))
    passed_on.start()
    doors[0].take(Call("group", 1), lambda: None).close()
    caller.join()
    assert len(made) == 1
    made[0].close()
    passed_on.join()
    first.close()


def _pass_on(server: socket.socket, address: str) -> None:
    """The next visitor, to this address."""
    visitor, _ = server.accept()
    onward = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
    back = threading.Thread(target=_pump, args=(onward, visitor))
    back.start()
    _pump(visitor, onward)
    back.join()
    visitor.close()
    onward.close()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(65536):
            target.sendall(piece)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def test_nobody_to_call_is_an_error_in_the_end(doors: list[Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_LOST_S", 0.1)
    doors[0].close()
    with pytest.raises(PeerLostError, match=r"machine 0 does not answer at t.*refused"):
        meet("group", 1, lines_of(doors, 1, 2), Watch())


def test_abandoning_waits_for_nobody(doors: list[Listener]) -> None:
    """Though the other does not read what is on its way to it; a mesh that is dropped closes itself."""
    made, watches = meshes(doors, 2)
    watches[0].on_check = lambda: watches[0].gone.add(1)
    with pytest.raises(TermEnded):
        made[0].swap([[], [memoryview(bytes(50_000_000))]], [[], []])
    before = time.monotonic()
    made[0].close()
    made.clear()
    assert time.monotonic() - before < 1.0


def test_a_message_of_another_meeting_is_never_taken_for_this_one() -> None:
    """Numbers are compared, and not only keys: here one side has met once more than the other."""
    told: list[list[int]] = []

    class Telling(Watch):
        def mismatch(self, others: list[int]) -> NoReturn:
            told.append(others)
            raise TermEnded

    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    peers = [MeshPeers(Mesh(rank, [Line(1 - rank, end)], Telling()), Telling()) for rank, end in enumerate(ends)]
    peers[1]._number = 1

    def gather(rank: int) -> None:
        with pytest.raises(TermEnded):
            peers[rank].gather(5, b"")

    together(2, gather)
    assert sorted(told) == [[0], [1]]
    for each in peers:
        each.close()
