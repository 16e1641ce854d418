"""Placement: whatever dies or comes, data stays where it can be found, and loads become even again."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.servers.goals import Server
from paceline.servers.placement import Act, Copies, Placement, balance, place
from tests.servers.models import MODELS, sizes_of


def on_one_machine(count: int) -> list[Server]:
    return [Server(number, machine=0) for number in range(count)]


def led(nbytes: list[int], placement: Placement, servers: list[Server]) -> list[int]:
    loads: Counter[int] = Counter()
    for size, copies in zip(nbytes, placement.copies, strict=True):
        loads[copies.primary] += size
    return sorted(loads[server.number] for server in servers)


def held(nbytes: list[int], placement: Placement, servers: list[Server]) -> list[int]:
    loads: Counter[int] = Counter()
    for size, copies in zip(nbytes, placement.copies, strict=True):
        loads.update(dict.fromkeys(copies.holders, size))
    return sorted(loads[server.number] for server in servers)


def settle(
    nbytes: list[int], servers: list[Server], replicas: int, placement: Placement
) -> tuple[Placement, Counter[int]]:
    """Steps towards balance, and every copy filled, until nothing changes; the bytes that each server was sent."""
    sent: Counter[int] = Counter()
    for _ in range(20):
        then = balance(nbytes, servers, replicas, placement)
        for change in then.changes:
            if change.act is Act.FILL:
                sent[change.server] += nbytes[change.fragment]
        for fragment, copies in enumerate(then.copies):
            for server in copies.backups:
                then = then.fill(fragment, server)
        if then == placement:
            return placement, sent
        placement = then
    raise AssertionError("it never comes to rest")


@pytest.mark.parametrize("name", MODELS)
def test_four_servers_lead_and_hold_the_same_bytes_within_a_tenth(name: str) -> None:
    nbytes, servers = sizes_of(name), on_one_machine(4)
    placement = place(nbytes, servers)
    for loads in (led(nbytes, placement, servers), held(nbytes, placement, servers)):
        assert loads[-1] <= 1.1 * loads[0]
    assert placement.settled
    assert balance(nbytes, servers, 2, placement) == placement


@pytest.mark.parametrize("name", MODELS)
def test_what_a_dead_server_led_is_spread_over_the_others(name: str) -> None:
    nbytes, servers = sizes_of(name), on_one_machine(4)
    first = place(nbytes, servers)
    for dead in range(4):
        rest = [server for server in servers if server.number != dead]
        after = place(nbytes, rest, before=first)
        loads = led(nbytes, after, rest)
        assert loads[-1] <= 1.35 * loads[0], "before anything else has moved"
        after, _ = settle(nbytes, rest, 2, after)
        for loads in (led(nbytes, after, rest), held(nbytes, after, rest)):
            assert loads[-1] <= 1.1 * loads[0]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_newcomer_is_sent_its_share_and_nobody_else_anything(name: str, replicas: int) -> None:
    nbytes, servers = sizes_of(name), on_one_machine(4)
    before = place(nbytes, servers[:3], replicas)
    joined = place(nbytes, servers, replicas, before)
    assert joined == before, "nothing is missing"
    after, sent = settle(nbytes, servers, replicas, joined)
    assert after.settled
    for loads in (led(nbytes, after, servers), held(nbytes, after, servers)):
        assert loads[-1] <= 1.1 * loads[0]
    share = replicas * sum(nbytes) / 4
    assert sum(sent.values()) <= share + 2 * max(nbytes)
    assert sent[3] >= 0.9 * sum(sent.values())


def test_backups_are_on_another_machine_where_there_is_one() -> None:
    servers = [Server(number, machine=number // 2) for number in range(4)]
    placement = place([100] * 64, servers)
    assert all({server // 2 for server in copies.holders} == {0, 1} for copies in placement.copies)
    assert held([100] * 64, placement, servers) == [3200] * 4


def test_backups_move_to_another_machine_once_there_is_one() -> None:
    servers = [Server(0, machine=0), Server(1, machine=0), Server(2, machine=1)]
    before = place([100] * 64, servers[:2])
    after, _ = settle([100] * 64, servers, 2, place([100] * 64, servers, 2, before))
    assert all(2 in copies.holders for copies in after.copies)
    loads = led([100] * 64, after, servers)
    assert loads[-1] <= 1.1 * loads[0]


def test_a_second_server_gets_the_backups_that_were_missing() -> None:
    both = on_one_machine(2)
    alone = place([100] * 4, both[:1])
    assert all(copies.backups == () for copies in alone.copies)
    together = place([100] * 4, both, 2, alone)
    assert list(together.copies) == [Copies(0, (1,), frozenset(), (0, 1))] * 4
    assert {change.why for change in together.changes} == {"it has too few copies"}


def test_a_copy_that_is_not_filled_is_never_promoted_and_the_loss_is_told() -> None:
    both = on_one_machine(2)
    together = place([100] * 4, both, 2, place([100] * 4, both[:1])).fill(1, 1).fill(3, 1)
    after = place([100] * 4, both[1:], 2, together)
    assert after.lost == (0, 2)
    assert {copies.primary for copies in after.copies} == {1}
    assert [change.act for change in after.changes] == [Act.LOSE, Act.PROMOTE, Act.LOSE, Act.PROMOTE]
    assert after.changes[0].why == "server 0 is gone, and no other had a filled copy"
    again = place([100] * 4, [Server(2, machine=0)], 2, after)
    assert again.lost == (0, 1, 2, 3)
    assert again.restored().lost == ()


def test_a_leaving_server_keeps_what_it_has_until_others_have_it() -> None:
    servers = on_one_machine(3)
    before = place([100] * 60, servers)
    going = [*servers[:2], Server(2, machine=0, leaving=True)]
    planned = place([100] * 60, going, 2, before)
    assert planned.holds(2)
    assert {change.why for change in planned.changes} == {"server 2 is to leave"}
    after, sent = settle([100] * 60, going, 2, planned)
    assert not after.holds(2)
    assert after.settled
    assert sum(sent.values()) == 0, "place has planned all of it"
    assert led([100] * 60, after, going[:2]) == [3000, 3000]


def test_the_only_copy_of_a_leaving_server_moves_by_way_of_a_filled_one() -> None:
    going = [Server(0, machine=0, leaving=True), Server(1, machine=0)]
    planned = place([100], going, 1, place([100], on_one_machine(1), 1))
    assert planned.copies == (Copies(0, (1,), frozenset(), (1,)),)
    moved = balance([100], going, 1, planned.fill(0, 1))
    assert moved.copies == (Copies(1, (), frozenset(), (1,)),)
    assert [change.act for change in moved.changes] == [Act.PROMOTE, Act.DROP]


def test_with_nobody_there_nothing_is_placed() -> None:
    with pytest.raises(ValueError, match="no server"):
        place([100], [])


def test_a_placement_travels_as_plain_values() -> None:
    first = place([100] * 5, on_one_machine(3))
    after = place([100] * 5, on_one_machine(3)[1:], 2, first)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(after), type=Placement)
    assert again == after
    assert again.changes == after.changes


def test_a_word_about_a_copy_that_is_not_wanted_any_more_changes_nothing() -> None:
    placement = place([100], on_one_machine(2))
    assert placement.fill(0, 7) == placement


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=120),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_a_first_placement_is_even_as_far_as_fragments_allow(
    nbytes: list[int], count: int, machines: int, replicas: int
) -> None:
    servers = [Server(number, machine=number % machines) for number in range(count)]
    placement = place(nbytes, servers, replicas)
    assert placement.settled
    loads = led(nbytes, placement, servers)
    assert loads[-1] <= max(1.1 * loads[0], loads[0] + max(nbytes))
    for copies in placement.copies:
        assert len({*copies.holders}) == min(replicas, count)
        assert len({server % machines for server in copies.holders}) == min(replicas, count, machines)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=120),
    st.integers(2, 7),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_few_bytes_move_to_a_newcomer_whatever_there_was_before(
    nbytes: list[int], count: int, replicas: int, deaths: int
) -> None:
    servers = on_one_machine(count + deaths)
    placement = place(nbytes, servers, replicas)
    for _ in range(deaths):
        servers = servers[1:]
        placement, _ = settle(nbytes, servers, replicas, place(nbytes, servers, replicas, placement).restored())
    servers = [*servers, Server(count + deaths, machine=0)]
    joined = place(nbytes, servers, replicas, placement)
    after, sent = settle(nbytes, servers, replicas, joined)
    assert after.settled
    gaps = sum(nbytes) * (min(replicas, count + 1) - min(replicas, count))
    share = sum(nbytes) * min(replicas, count + 1) / (count + 1)
    assert sum(sent.values()) <= max(1.2 * share - gaps, 0) + 3 * max(nbytes)


class Servers(RuleBasedStateMachine):
    """Servers die, join, leave and are filled in any order; what each really holds is kept beside the placement."""

    @initialize(
        nbytes=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
        machines=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        replicas=st.integers(1, 3),
    )
    def begin(self, nbytes: list[int], machines: list[int], replicas: int) -> None:
        self.nbytes, self.replicas = nbytes, replicas
        self.servers = [Server(number, machine) for number, machine in enumerate(machines)]
        self.number = len(machines)
        self.placement = place(nbytes, self.servers, replicas)
        self.data = [{*copies.holders} for copies in self.placement.copies]

    @property
    def staying(self) -> list[Server]:
        return [server for server in self.servers if not server.leaving]

    def take(self, placement: Placement) -> None:
        """What the servers do when they are told of a placement."""
        for change in placement.changes:
            assert change.why
            holders = self.data[change.fragment]
            if change.act is Act.DROP:
                holders.discard(change.server)
            elif change.act is Act.PROMOTE:
                assert change.server in holders, "only who has the data is promoted"
            elif change.act is Act.LOSE:
                assert not holders
            else:
                assert change.server not in holders
                assert change.server in {server.number for server in self.staying}
        self.placement = placement

    def place(self) -> None:
        before = self.placement
        self.take(place(self.nbytes, self.servers, self.replicas, before))
        there = {server.number for server in self.staying}
        enough = min(self.replicas, len(there))
        for old, new in zip(before.copies, self.placement.copies, strict=True):
            if {*old.holders, *old.goal} <= there and len(old.goal) == enough:
                assert new.goal == old.goal, "nothing else moves"

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        dead = data.draw(st.sampled_from(self.servers))
        rest = [server for server in self.servers if server is not dead]
        if any(not server.leaving for server in rest):
            self.servers = rest
            for holders in self.data:
                holders.discard(dead.number)
            self.place()

    @rule(machine=st.integers(0, 2))
    def join(self, machine: int) -> None:
        if len(self.servers) < 7:
            self.servers.append(Server(self.number, machine))
            self.number += 1
            self.place()

    @precondition(lambda self: len(self.staying) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        going = data.draw(st.sampled_from(self.staying))
        self.servers[self.servers.index(going)] = Server(going.number, going.machine, leaving=True)
        self.place()

    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        empty = [
            (fragment, server)
            for fragment, copies in enumerate(self.placement.copies)
            for server in copies.backups
            if server not in copies.filled and fragment not in self.placement.lost
        ]
        for fragment, server in data.draw(st.lists(st.sampled_from(empty), unique=True)) if empty else []:
            self.data[fragment].add(server)
            self.placement = self.placement.fill(fragment, server)

    @rule()
    def step(self) -> None:
        self.take(balance(self.nbytes, self.servers, self.replicas, self.placement))

    @rule()
    def restore(self) -> None:
        for fragment in self.placement.lost:
            self.data[fragment] = {self.placement.copies[fragment].primary}
        self.placement = self.placement.restored()

    @rule()
    def come_to_rest(self) -> None:
        self.restore()
        self.take(balance(self.nbytes, self.servers, self.replicas, self.placement))
        goals = [copies.goal for copies in self.placement.copies]
        for _ in range(3):
            for fragment, copies in enumerate(self.placement.copies):
                for server in copies.backups:
                    self.data[fragment].add(server)
                    self.placement = self.placement.fill(fragment, server)
            self.take(balance(self.nbytes, self.servers, self.replicas, self.placement))
        assert self.placement.settled
        assert goals == [copies.goal for copies in self.placement.copies], "decided once, then carried out"
        assert not self.placement.changes
        assert not any(self.placement.holds(server.number) for server in self.servers if server.leaving)
        self.is_even(led(self.nbytes, self.placement, self.staying))
        if len({server.machine for server in self.staying}) == 1:
            self.is_even(held(self.nbytes, self.placement, self.staying))
        machine = {server.number: server.machine for server in self.staying}
        most = min(self.replicas, len({*machine.values()}), len(machine))
        assert all(len({machine[server] for server in copies.holders}) == most for copies in self.placement.copies)

    def is_even(self, loads: list[int]) -> None:
        assert loads[-1] <= max(1.1 * loads[0], loads[0] + max(self.nbytes))

    @invariant()
    def data_is_where_it_is_looked_for(self) -> None:
        alive = {server.number for server in self.servers}
        for fragment, (copies, holders) in enumerate(zip(self.placement.copies, self.data, strict=True)):
            assert len({*copies.holders}) == len(copies.holders), "no two copies on a server"
            assert {*copies.holders} <= alive
            assert copies.filled <= {*copies.backups}
            assert (fragment in self.placement.lost) == (not holders)
            assert copies.filled <= holders
            if holders:
                assert copies.primary in holders, "never a primary without data while a filled copy lives"
            assert {*copies.goal} <= {server.number for server in self.staying}
            assert len({*copies.goal}) == len(copies.goal) == min(self.replicas, len(self.staying))


TestServers = Servers.TestCase
TestServers.settings = settings(max_examples=150, stateful_step_count=30)


def test_each_step_towards_balance_leaves_no_fragment_with_fewer_filled_copies() -> None:
    nbytes, servers = [100] * 64, on_one_machine(5)
    steps = [place(nbytes, servers[:2])]
    for step in range(6):
        now = balance(nbytes, servers, 2, steps[-1])
        for fragment, copies in enumerate(now.copies):
            for server in copies.backups if fragment % 2 == step % 2 else ():
                now = now.fill(fragment, server)
        steps.append(now)
    for earlier, later in pairwise(steps):
        for old, new in zip(earlier.copies, later.copies, strict=True):
            assert len(new.whole) >= min(2, len(old.whole))
    assert steps[-1].settled
