"""The fleet as a state machine: whatever comes in whatever order, whoever is made primary has the data."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.cluster.answering import _placed
from paceline.cluster.fleet import Address, Fleet
from paceline.cluster.journal import Journal

Word = tuple[int, dict[int, int]]


def written_and_read(fleet: Fleet) -> Fleet:
    journal = Journal.begin(2, 0, 1, 0.0)
    journal.fleet = fleet
    return Journal.decode(journal.encode()).fleet


class Servers(RuleBasedStateMachine):
    """The coordinator's events, beside a model of what servers know: how many operations each copy has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.alive: set[int] = set()
        self.homes: dict[int, int] = {}
        """The machine of each server."""
        self.dead: set[int] = set()
        self.fragments = 0
        self.done: list[int] = []
        """Operations that were answered, by fragment."""
        self.seen: dict[tuple[int, int, int], int] = {}
        """How many of them a copy knows: (fragment, server, since)."""
        self.by: dict[int, set[tuple[int, int, int]]] = {}
        """The copies that each server has filled, as it remembers it."""
        self.words: list[Word] = []
        """Said to the coordinator at some time; it may hear them late, and twice."""
        self.newest = self.last = 0
        self.over = False

    @initialize(wanted=st.integers(1, 4), replicas=st.integers(1, 3), fragments=st.integers(0, 4))
    def it_begins(self, wanted: int, replicas: int, fragments: int) -> None:
        """With a layout at once, mostly."""
        self.fleet = Fleet(wanted, replicas)
        if fragments:
            for _ in range(wanted):
                self.a_server_is_ready()
            self.main_tells_the_sizes([10] * fragments)

    def holders(self, fragment: int) -> tuple[int, ...]:
        assert self.fleet.placement is not None
        return self.fleet.placement.copies[fragment].holders

    def copy(self, fragment: int, server: int) -> tuple[int, int, int]:
        return fragment, server, self.fleet.since[fragment][server]

    def told(self, fragment: int) -> list[int]:
        """Whom the primary tells of an operation before it answers."""
        assert self.fleet.placement is not None
        primary, *backups = self.holders(fragment)
        filled, own = self.fleet.placement.copies[fragment].filled, self.by.get(primary, set())
        return [server for server in backups if server in filled or self.copy(fragment, server) in own]

    @property
    def going(self) -> bool:
        return self.fleet.placement is not None and not self.over

    def follow(self) -> None:
        """Servers get the layout; those of a room's first one begin with nothing, and that is all there is."""
        if self.fleet.number:
            for fragment in range(len(self.done), self.fragments):
                self.done.append(0)
                self.seen |= {self.copy(fragment, server): 0 for server in self.holders(fragment)}

    # what happens

    @precondition(lambda self: not self.over)
    @rule(machine=st.integers(0, 2))
    def a_server_is_ready(self, machine: int = 0) -> None:
        self.alive.add(self.newest)
        self.homes[self.newest] = machine
        self.fleet.came(self.newest, Address(f"at {self.newest}", machine=machine))
        self.newest += 1
        self.follow()

    @precondition(lambda self: not self.over and self.alive)
    @rule(data=st.data())
    def a_server_says_again_that_it_is_ready(self, data: st.DataObject) -> None:
        """The leader that heard it did not come to say so."""
        server, before = data.draw(st.sampled_from(sorted(self.alive))), self.fleet.number
        self.fleet.came(server, Address(f"at {server}", machine=self.homes[server]))
        assert self.fleet.number == before

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def a_dead_server_is_heard_to_be_ready(self, data: st.DataObject) -> None:
        """It was killed as it said so, and its end was seen first."""
        server, before = data.draw(st.sampled_from(sorted(self.dead))), self.fleet.number
        self.fleet.came(server, Address(f"at {server}"))
        assert self.fleet.number == before and server not in self.fleet.addresses

    @precondition(lambda self: not self.over)
    @rule(nbytes=st.lists(st.integers(1, 100), min_size=1, max_size=6))
    def main_tells_the_sizes(self, nbytes: list[int], room: str = "parameters") -> None:
        self.fleet.sized(nbytes, room)
        self.fragments = len(self.fleet.nbytes)
        self.follow()

    @precondition(lambda self: not self.over and self.fleet.addresses)
    @rule(nbytes=st.lists(st.integers(1, 100), min_size=1, max_size=4))
    def somebody_wants_keys(self, nbytes: list[int]) -> None:
        self.main_tells_the_sizes(nbytes, "keys")

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def an_operation_is_answered(self, data: st.DataObject) -> None:
        fragment = data.draw(st.integers(0, self.fragments - 1))
        told = self.told(fragment)
        self.done[fragment] += 1
        for server in (self.holders(fragment)[0], *told):
            self.seen[self.copy(fragment, server)] = self.done[fragment]

    @precondition(lambda self: self.going)
    @rule(data=st.data())
    def a_primary_fills_a_backup(self, data: st.DataObject) -> None:
        fragment = data.draw(st.integers(0, self.fragments - 1))
        primary, *backups = self.holders(fragment)
        if not backups:
            return
        copy = self.copy(fragment, data.draw(st.sampled_from(backups)))
        if copy not in self.by.setdefault(primary, set()):
            self.seen[copy] = self.done[fragment]
            self.by[primary].add(copy)
        self.words.append((copy[1], {fragment: copy[2]}))

    @precondition(lambda self: self.going and self.words)
    @rule(data=st.data())
    def the_coordinator_hears_of_it(self, data: st.DataObject) -> None:
        """Whoever said it or whom it was about may be gone, or primary, or a backup anew."""
        self.fleet.filled(*data.draw(st.sampled_from(self.words)))

    @precondition(lambda self: not self.over and self.alive)
    @rule(data=st.data())
    def a_server_dies(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(sorted(self.alive)))
        placement = self.fleet.placement
        left = [copies.whole - {server} for copies in placement.copies] if placement is not None else []
        self.alive.discard(server)
        self.dead.add(server)
        assert self.fleet.died(server) == all(left), "the run goes on exactly if a filled copy of everything is left"
        self.over = not all(left)

    @precondition(lambda self: not self.over)
    @rule(wanted=st.integers(1, 5))
    def another_number_is_asked_for(self, wanted: int) -> None:
        self.fleet.scale(wanted, sorted(self.alive))
        self.follow()
        staying = self.alive - {*self.fleet.leaving}
        assert len(staying) <= wanted and self.fleet.short(sorted(self.alive)) == wanted - len(staying)

    @precondition(lambda self: not self.over)
    @rule(here=st.sets(st.integers(0, 2), min_size=1))
    def machines_come_and_go(self, here: set[int]) -> None:
        self.fleet.spread({server: self.homes[server] for server in self.alive}, here)
        self.follow()
        staying = [self.homes[server] for server in self.alive - {*self.fleet.leaving}]
        assert {*staying} <= here
        assert len(staying) <= 1 or max(map(staying.count, here)) <= -(-len(self.alive) // len(here))

    @precondition(lambda self: not self.over)
    @rule()
    def who_holds_nothing_any_more_goes(self) -> None:
        idle = set(self.fleet.dismiss())
        self.alive -= idle
        self.dead |= idle

    @rule()
    def another_leader_takes_over(self) -> None:
        before = self.fleet
        self.fleet = written_and_read(before)
        assert self.fleet == before

    # what holds

    @invariant()
    def numbers_only_grow(self) -> None:
        assert self.fleet.number >= self.last
        self.last = self.fleet.number

    @invariant()
    def whoever_could_be_primary_has_everything_that_was_answered(self) -> None:
        if not self.going or self.fleet.placement is None:
            return
        for fragment, copies in enumerate(self.fleet.placement.copies):
            for server in copies.whole:
                assert self.seen.get(self.copy(fragment, server)) == self.done[fragment], (
                    f"server {server} lacks something of fragment {fragment}"
                )

    @invariant()
    def somebody_stays_or_is_started(self) -> None:
        assert not self.going or self.alive - {*self.fleet.leaving} or self.fleet.short(sorted(self.alive))

    @invariant()
    def nothing_is_laid_on_who_is_not_there(self) -> None:
        assert set(self.fleet.addresses) == self.alive
        if not self.going or self.fleet.placement is None:
            return
        for fragment, copies in enumerate(self.fleet.placement.copies):
            assert set(copies.holders) <= self.alive
            assert self.fleet.since[fragment].keys() == set(copies.holders)
            assert max(self.fleet.since[fragment].values()) <= self.fleet.number


class MoreServers(Servers):
    """The same, for longer."""


TestFleet, TestFleetForLonger = Servers.TestCase, pytest.mark.long(MoreServers.TestCase)
TestFleet.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestFleetForLonger.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


def three_servers(replicas: int = 2, fragments: int = 3) -> Fleet:
    fleet = Fleet(3, replicas)
    for server in range(3):
        fleet.came(server, Address(f"at {server}"))
    fleet.sized([100] * fragments)
    return fleet


def test_a_room_that_is_asked_for_later_gets_fragments_behind_those_that_are_there() -> None:
    fleet = three_servers(fragments=2)
    fleet.died(0)
    before = fleet.placement
    assert before is not None
    fleet.sized([1] * 4, "keys")
    fleet.sized([9], "keys")
    assert fleet.rooms == {"parameters": (0, 2), "keys": (2, 4)} and fleet.placement is not None
    assert fleet.placement.copies[:2] == before.copies
    placed = _placed(fleet, 0)
    keys = placed.of("keys")
    assert keys.number == placed.number and keys.holders == placed.holders[2:] and len(keys.since) == 4
    assert all({*holders} == {1, 2} for holders in keys.holders), "and both of them begin with nothing, as a copy"
    assert keys.filled == [holders[1:] for holders in keys.holders]
    assert placed.of("rows").holders == []


def test_nothing_is_laid_out_before_all_servers_are_there_and_the_sizes_are_known() -> None:
    fleet = Fleet(2, 2)
    fleet.came(0, Address("a"))
    fleet.sized([10, 10])
    assert fleet.number == 0 and fleet.placement is None
    fleet.came(1, Address("b"))
    assert fleet.number == 1 and fleet.placement is not None
    assert [copies.whole for copies in fleet.placement.copies] == [{0, 1}, {0, 1}], "all begin with nothing"


def test_a_server_that_dies_before_there_is_a_layout_is_waited_for_no_more() -> None:
    fleet = Fleet(2, 2)
    fleet.came(0, Address("a"))
    assert fleet.died(0)
    fleet.sized([10, 10])
    fleet.came(1, Address("b"))
    assert fleet.number == 0
    fleet.came(2, Address("c"))
    assert fleet.number == 1 and fleet.placement is not None
    assert all(set(copies.holders) == {1, 2} for copies in fleet.placement.copies)


def test_one_copy_only_and_its_server_dies() -> None:
    assert not three_servers(replicas=1).died(1)


def test_the_last_server_dies() -> None:
    fleet = Fleet(1, 2)
    fleet.came(0, Address("a"))
    fleet.sized([10])
    assert not fleet.died(0)


def test_two_deaths_one_after_the_other_need_a_fill_in_between() -> None:
    fleet = three_servers()
    assert fleet.died(0)
    assert not fleet.died(1), "nobody has filled what server 0 left behind"
    fleet = three_servers()
    assert fleet.died(0)
    for server in (1, 2):
        fleet.filled(server, {k: since[server] for k, since in enumerate(fleet.since) if server in since})
    assert fleet.died(1)


def test_what_a_primary_filled_before_another_one_took_over_does_not_count() -> None:
    """The new one has told that backup nothing of what has happened since: it fills it anew."""
    fleet = three_servers(replicas=3, fragments=1)
    assert fleet.placement is not None
    primary, second, third = fleet.placement.copies[0].holders
    assert fleet.died(third)
    fleet.came(3, Address("at 3"))
    word = 3, {0: fleet.since[0][3]}
    assert fleet.died(primary)
    fleet.filled(*word)
    assert fleet.placement.copies[0].primary == second and 3 not in fleet.placement.copies[0].whole
    fleet.filled(3, {0: fleet.since[0][3]})
    assert 3 in fleet.placement.copies[0].whole


def test_a_layout_says_what_each_server_holds_and_how_many_copies_there_are() -> None:
    fleet = Fleet(wanted=2, replicas=2)
    for server in (0, 1):
        fleet.came(server, Address(f"address {server}"))
    fleet.sized([100, 60])
    first = fleet.described()
    assert first["bytes"] == {0: 160, 1: 160} and sorted(first["leads"].values()) == [60, 100]
    assert (first["layout"], first["copies"]) == (1, 2)
    assert fleet.died(1)
    assert fleet.described() == {"layout": 2, "bytes": {0: 160}, "leads": {0: 160}, "copies": 1}
    fleet.came(2, Address("address 2"))
    assert fleet.described()["copies"] == 1, "its copies are not filled yet"
    fleet.filled(2, {fragment: since[2] for fragment, since in enumerate(fleet.since)})
    assert fleet.described()["copies"] == 2 and fleet.described()["bytes"] == {0: 160, 2: 160}


def fill_all(fleet: Fleet) -> None:
    """As the primaries do, one round after the other, until nothing moves any more."""
    number = 0
    while fleet.number > number and fleet.placement is not None:
        number = fleet.number
        for server in sorted(fleet.addresses):
            fleet.filled(server, {k: since[server] for k, since in enumerate(fleet.since) if server in since})


def test_a_newcomer_that_was_asked_for_gets_its_part() -> None:
    fleet = three_servers(fragments=12)
    fleet.scale(4, [0, 1, 2])
    assert fleet.short([0, 1, 2]) == 1 and not fleet.settled
    fleet.came(3, Address("at 3"))
    fill_all(fleet)
    assert fleet.settled and fleet.described()["leads"] == {0: 300, 1: 300, 2: 300, 3: 300}
    assert fleet.described()["copies"] == 2 and fleet.dismiss() == []


def test_who_is_to_go_holds_what_it_has_until_others_do() -> None:
    fleet = three_servers(fragments=6)
    fleet.scale(1, [0, 1, 2])
    assert fleet.leaving == [1, 2] and fleet.dismiss() == []
    fill_all(fleet)
    assert fleet.dismiss() == [1, 2] and fleet.settled
    assert fleet.described()["bytes"] == {0: 600}
    fleet.came(2, Address("at 2"))
    assert list(fleet.addresses) == [0], "it was heard late"


def test_if_all_who_were_to_stay_die_some_of_the_others_stay() -> None:
    fleet = three_servers()
    fleet.scale(1, [0, 1, 2])
    assert not fleet.died(0), "one server shall hold everything, so the others' copies of its part are gone"
    assert fleet.leaving == [2] and fleet.short([1, 2]) == 0


def test_who_is_still_starting_goes_first_and_at_once() -> None:
    fleet = three_servers()
    fleet.scale(4, [0, 1, 2])
    fleet.scale(3, [0, 1, 2, 3])
    assert fleet.dismiss() == [3]
    fleet.came(3, Address("at 3"))
    assert sorted(fleet.addresses) == [0, 1, 2]


def test_servers_follow_the_machines() -> None:
    """Copies are on two machines as soon as there are two; nothing is let go of before it is elsewhere."""
    fleet = Fleet(2, 2)
    fleet.came(0, Address("unix-0", "tls-0", machine=0))
    fleet.came(1, Address("unix-1", "tls-1", machine=0))
    fleet.sized([100] * 4)
    fleet.spread({0: 0, 1: 0}, [0, 1])
    assert fleet.leaving == [1] and fleet.short([0, 1]) == 1 and fleet.dismiss() == []
    fleet.came(2, Address("unix-2", "tls-2", machine=1))
    fill_all(fleet)
    assert fleet.dismiss() == [1] and fleet.settled and fleet.described()["copies"] == 2
    assert _placed(fleet, 0).addresses == {0: "unix-0", 2: "tls-2"}
    assert _placed(fleet, 1).addresses == {0: "tls-0", 2: "unix-2"}
    fleet.spread({0: 0, 2: 1}, [1])
    assert fleet.leaving == [0] and fleet.dismiss() == [], "and machine 0 goes when its part is at another one"


def test_all_servers_are_on_a_machine_that_goes() -> None:
    fleet = three_servers()
    fleet.spread(dict.fromkeys(range(3), 0), [1])
    assert fleet.leaving == [0, 1, 2] and fleet.short([0, 1, 2]) == 3 and fleet.dismiss() == []
    assert fleet.died(2), "they hold what they hold meanwhile, and any of them may die"
    for server in (3, 4, 5):
        fleet.came(server, Address(f"at {server}", machine=1))
    fleet.spread(dict.fromkeys((0, 1), 0) | dict.fromkeys((3, 4, 5), 1), [1])
    fill_all(fleet)
    assert sorted(fleet.dismiss()) == [0, 1] and fleet.settled
