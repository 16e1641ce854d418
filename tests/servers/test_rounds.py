"""The register of rounds: whatever dies when, a client counts once, what has arrived stays, rounds only go forward."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.servers.messages import Begin, Centre, Done, Enter, Hold, Lay, Lost, Notes, Ongoing, Turn, Turned
from paceline.servers.outer import SGD
from paceline.servers.register import Delivered
from paceline.servers.round_registry import RoundRegistry
from paceline.servers.rounds import Closed, Rounds

TOTAL, GRACE = 6, 2.0


def delivered(leaf: int) -> Delivered:
    return Delivered(leaf, samples=20 + leaf, ids=20 + leaf, digest=leaf, weight=10 + leaf, moved=5)


class Workers(RuleBasedStateMachine):
    """Workers that take clients, bring them, say it again, and die; some have the data of some clients only. The register
    is written and read as at a failover, or goes over to a new life from a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds, self.alive, self.newest = Rounds(1), set[int](), -1
        self.in_hand: dict[int, int] = {}
        self.arrived: set[int] = set()
        """Of the round in hand."""
        self.number = 0
        self.quorum = 4
        self.seen: list[Closed] = []
        self.rounds.begin(0, TOTAL)

    @precondition(lambda self: len(self.alive) < 3)
    @rule(only=st.none() | st.sets(st.integers(0, TOTAL - 1)))
    def come(self, only: set[int] | None) -> None:
        self.newest += 1
        self.alive.add(self.newest)
        self.rounds.begin(self.number, TOTAL)
        self.rounds.enter(self.newest)
        if only is not None:
            self.rounds.here[self.newest] = sorted(only)

    @precondition(lambda self: self.alive - set(self.in_hand))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive - set(self.in_hand))))
        leaves = self.rounds.lease(worker, 1)
        assert self.rounds.lease(worker, 1) == leaves
        assert not leaves or leaves[0] not in self.arrived | set(self.in_hand.values())
        assert not leaves or leaves[0] in self.rounds.here.get(worker, range(TOTAL))
        if leaves:
            self.in_hand[worker] = leaves[0]

    @precondition(lambda self: self.in_hand)
    @rule(data=st.data(), twice=st.booleans())
    def bring(self, data: st.DataObject, twice: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.in_hand)))
        leaf = self.in_hand.pop(worker)
        open_before = self.rounds.closed is None
        assert self.rounds.finish(worker, [delivered(leaf)]) == open_before
        if twice:
            assert not self.rounds.finish(worker, [delivered(leaf)])
        if open_before:
            self.arrived.add(leaf)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(worker)
        late = self.in_hand.pop(worker, None)
        self.rounds.lose(worker)
        if late is not None:
            assert not self.rounds.finish(worker, [delivered(late)]), "it comes too late"

    @rule(waited=st.floats(0, 4))
    def look(self, waited: float) -> None:
        if self.rounds.closed or not self.rounds.due(self.quorum, GRACE, waited):
            return
        enough = len(self.arrived) >= self.quorum
        assert len(self.arrived) == TOTAL or (enough and waited >= GRACE) or self._stranded
        self.rounds.close(self.quorum)
        closed = self.rounds.closed
        assert closed is not None
        assert closed.arrived == ([(leaf, 10 + leaf) for leaf in sorted(self.arrived)] if enough else [])
        assert closed.lacking == sorted(set(range(TOTAL)) - self.arrived)
        self.seen.append(closed)

    @property
    def _stranded(self) -> bool:
        """Nobody who is there has the data of those that are missing."""
        can = {leaf for worker in self.alive for leaf in self.rounds.here.get(worker, range(TOTAL))}
        return not can & (set(range(TOTAL)) - self.arrived)

    @precondition(lambda self: self.rounds.closed)
    @rule()
    def next_round(self) -> None:
        self.number += 1
        self.arrived, self.in_hand = set(), {}
        self.rounds.begin(self.number, TOTAL)
        for worker in sorted(self.alive):
            self.rounds.enter(worker)

    @rule()
    def fail_over(self) -> None:
        self.rounds = Rounds.decode(self.rounds.encode())

    @rule()
    def resume(self) -> None:
        self.rounds = Rounds.decode(self.rounds.at_rest().encode())
        self.alive, self.in_hand, self.newest = set(), {}, -1

    @invariant()
    def nothing_is_lost_and_nothing_goes_back(self) -> None:
        rounds = self.rounds
        assert rounds.count == rounds.steps == len(self.seen)
        assert rounds.closed is not None or set(rounds.arrived) == self.arrived
        counted = [leaf for closed in self.seen for leaf, _ in closed.arrived]
        open_ = [] if rounds.closed else self.arrived
        assert rounds.samples == sum(20 + leaf for leaf in [*counted, *open_])


TestWorkers = Workers.TestCase


# at a server


class Server:
    """The register at one, whose clock is set by hand."""

    def __init__(self, quorum: int, grace: float) -> None:
        self.now = 100.0
        self.registry = RoundRegistry(Centre(quorum, grace, SGD()), since=1, now=lambda: self.now)

    def ask(self, message: object) -> object:
        """None: it has to wait."""
        answer, state = self.registry.draft(message, memoryview(b""))  # type: ignore[arg-type]
        if state:
            self.registry._become(Rounds.decode(state), self.registry.version + 1)
        return None if answer is None else answer[0]

    def turn(self, worker: int, *leaves: int) -> Turned | None:
        answer = self.ask(Turn(worker, 0, 1, [delivered(leaf) for leaf in leaves]))
        assert answer is None or isinstance(answer, Turned)
        return answer

    def begin(self, *workers: int, total: int = 3) -> None:
        for worker in workers:
            self.ask(Begin(worker, 0, total, 0, 0, list(workers)))

    def in_hand(self, worker: int, *leaves: int) -> list[int]:
        turned = self.turn(worker, *leaves)
        assert turned is not None
        return turned.numbers


def test_a_round_waits_for_all_and_a_dead_worker_s_client_is_another_s() -> None:
    server = Server(quorum=0, grace=0.0)
    server.begin(0, 1)
    assert server.in_hand(0) == [0] and server.in_hand(1) == [1]
    assert server.in_hand(0, 0) == [2]
    server.now += 1000
    assert server.turn(0, 2) is None, "worker 1 has one in hand"
    server.ask(Lost([1]))
    assert server.in_hand(0, 2) == [1]
    over = server.turn(0, 1)
    assert over is not None and over.numbers == [] and over.count == 1
    assert over.closed == Closed([(0, 10), (1, 11), (2, 12)], [], 15)


def test_the_grace_window_begins_with_the_quorum_and_anew_after_a_failover() -> None:
    server = Server(quorum=2, grace=5.0)
    server.begin(0, 1)
    assert [server.in_hand(0), server.in_hand(1), server.in_hand(0, 0)] == [[0], [1], [2]]
    server.now += 100
    assert server.turn(0, 2) is None, "now there is a quorum"
    server.now += 4.9
    assert server.turn(0, 2) is None
    assert server.ask(Ongoing(0)) == Done(True)
    other = Server(quorum=2, grace=5.0)
    other.registry._become(server.registry._register, 1)
    assert other.turn(0, 2) is None, "who takes over does not know since when"
    server.now += 0.1
    over = server.turn(0, 2)
    assert over is not None and over.closed == Closed([(0, 10), (2, 12)], [1], 10)
    assert server.ask(Ongoing(0)) == Done(False)
    late = server.turn(1, 1)
    assert late is not None and late.closed == over.closed, "what comes later is dropped"


def test_without_a_quorum_a_round_counts_for_nothing_and_the_next_one_comes() -> None:
    server = Server(quorum=2, grace=0.0)
    server.begin(0, total=1)
    server.in_hand(0)
    over = server.turn(0, 0)
    assert over is not None and over.closed == Closed([], [], 5) and (over.count, over.samples) == (1, 0)


def test_a_client_whose_data_nobody_has_is_not_waited_for_once_all_are_there() -> None:
    server = Server(quorum=0, grace=0.0)
    server.ask(Begin(0, 0, 2, 0, 0, [0, 1], here=[0]))
    assert server.in_hand(0) == [0]
    assert server.turn(0, 0) is None, "worker 1 may have it"
    server.ask(Begin(1, 0, 2, 0, 0, [0, 1], here=[]))
    over = server.turn(0, 0)
    assert over is not None and over.closed == Closed([(0, 10)], [1], 5)


def test_a_round_waits_for_the_word_of_a_machine_that_comes_into_it() -> None:
    server = Server(quorum=0, grace=0.0)
    for worker in (0, 1):
        server.ask(Begin(worker, 0, 2, 0, 0, [0, 1], here=[worker]))
    with server.registry.changed:
        server.registry.do(Notes(0, []), memoryview(b"what a newcomer needs to know"))
    assert server.in_hand(0) == [0]
    assert server.ask(Enter(2)) == Done()
    server.ask(Lost([1]))
    assert server.turn(0, 0) is None, "worker 2 has not said what it has"
    server.ask(Begin(2, 0, 2, 0, 0, [0, 1], here=[1]))
    assert server.in_hand(2) == [1]


def test_nothing_arrives_while_a_checkpoint_is_taken() -> None:
    server = Server(quorum=0, grace=0.0)
    server.begin(0, 1, total=1)
    server.in_hand(1)
    server.ask(Hold(0, yes=True))
    assert server.turn(1, 0) is None and not server.registry._register.samples
    server.ask(Hold(0, yes=False))
    over = server.turn(1, 0)
    assert over is not None and over.closed is not None


def test_the_window_ends_by_the_clock_though_all_have_a_client_in_hand() -> None:
    server = Server(quorum=2, grace=1.0)
    server.begin(0, 1, total=5)
    assert [server.in_hand(0), server.in_hand(1)] == [[0], [1]]
    assert [server.in_hand(0, 0), server.in_hand(1, 1)] == [[2], [3]]
    server.now += 0.9
    assert server.ask(Ongoing(0)) == Done(True)
    server.now += 0.2
    over = server.turn(0, 2)
    assert over is not None and over.closed == Closed([(0, 10), (1, 11)], [2, 3, 4], 10), "it came behind the window"
    assert server.ask(Ongoing(0)) == Done(False)


def test_who_asks_whether_a_round_goes_on_ends_it_when_its_time_is_over() -> None:
    server = Server(quorum=1, grace=1.0)
    server.begin(0, 1)
    assert [server.in_hand(0), server.in_hand(1), server.in_hand(0, 0)] == [[0], [1], [2]]
    server.now += 1.1
    server.ask(Hold(0, yes=True))
    assert server.ask(Ongoing(0)) == Done(True), "no round ends while everything is held"
    server.ask(Hold(0, yes=False))
    assert server.ask(Ongoing(0)) == Done(False)


def test_another_life_s_workers_are_not_waited_for_and_have_other_data() -> None:
    """A run that stopped within a round goes on with fewer workers, of whom one has all the folders now."""
    server = Server(quorum=0, grace=0.0)
    for worker in (0, 1):
        server.ask(Begin(worker, 0, 4, 0, 0, [0, 1], here=[worker, worker + 2]))
    assert server.in_hand(0) == [0]
    server.registry._become(Rounds.decode(server.registry._register.at_rest().encode()), 1)
    server.ask(Begin(0, 0, 4, 0, 0, [0], here=[0, 2]))
    assert server.in_hand(0) == [0] and server.in_hand(0, 0) == [2]
    over = server.turn(0, 2)
    assert over is not None and over.closed == Closed([(0, 10), (2, 12)], [1, 3], 10)
    again = Server(quorum=0, grace=0.0)
    again.ask(Begin(0, 0, 2, 0, 0, [0], here=[0]))
    again.ask(Begin(0, 0, 2, 0, 0, [0]))
    assert again.in_hand(0) == [0] and again.in_hand(0, 0) == [1], "it can train all now"


def test_a_death_that_is_told_before_the_register_is_laid_is_not_the_first_of_it() -> None:
    """What main lays then is that of a checkpoint: it must not pass for known already."""
    server = Server(quorum=0, grace=0.0)
    assert server.ask(Lost([1])) == Done() and server.registry.version == 0
    lay, laid = Lay([], 5), Rounds(1, count=5, steps=5)
    assert not server.registry.knows(lay, memoryview(laid.encode()))
    with server.registry.changed:
        server.registry.do(lay, memoryview(laid.encode()))
    assert server.registry._register.steps == 5
