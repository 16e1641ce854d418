"""Whichever machine is lost: its replicas are on another one, and no further back than others can help them from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.state.buddies import NONE, buddy, foremost, keeper, newest

MACHINES = st.sets(st.integers(0, 20), min_size=2, max_size=8)


@given(MACHINES)
def test_each_machine_has_the_copies_of_one_other(machines: set[int]) -> None:
    assert sorted(buddy(machine, machines) for machine in machines) == sorted(machines)  # type: ignore[type-var]
    assert all(buddy(machine, machines) != machine for machine in machines)


@given(MACHINES, st.data())
def test_a_loss_gives_only_the_one_before_it_another_buddy(machines: set[int], data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(sorted(machines)))
    for machine in machines - {lost}:
        if buddy(machine, machines) != lost:
            assert buddy(machine, machines - {lost}) == buddy(machine, machines)


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 5), min_size=1), st.integers(0, 5), st.integers(0, 40))
def test_whoever_takes_a_copy_in_is_on_the_buddy(homes: dict[int, int], machine: int, slot: int) -> None:
    worker = keeper(slot, machine, homes)
    assert (None if worker is None else homes[worker]) == buddy(machine, homes.values())


class Losses(RuleBasedStateMachine):
    """Replicas on machines: who exchanges has its copy on the buddy; copies come late, machines are lost, one at a time."""

    @initialize(machines=st.integers(2, 4), slots=st.integers(1, 5))
    def begin(self, machines: int, slots: int) -> None:
        self.lies = {machine: [NONE] * slots for machine in range(machines)}
        self.homes = {slot: slot % machines for slot in range(slots)}
        self.rounds = [0] * slots
        self.copied = False
        for slot, home in self.homes.items():
            self.lies[home][slot] = 0

    def _buddy(self, slot: int) -> int | None:
        return buddy(self.homes[slot], self.lies)

    @rule(slot=st.integers(0, 4))
    def a_copy_arrives(self, slot: int) -> None:
        slot %= len(self.rounds)
        there = self._buddy(slot)
        if there is not None:
            self.lies[there][slot] = self.lies[self.homes[slot]][slot]

    @rule(late=st.sets(st.integers(0, 4)))
    def they_exchange(self, late: set[int]) -> None:
        """All have left the state behind the last one, and it is on the buddy; who has missed that was given it. Those who are
        late have left none behind this one yet."""
        self.rounds = [max(self.rounds)] * len(self.rounds)
        for slot, home in self.homes.items():
            self.lies[home][slot] = self.rounds[slot]
            self.a_copy_arrives(slot)
        self.copied = True
        for slot, home in self.homes.items():
            self.rounds[slot] += 1
            if slot not in late:
                self.lies[home][slot] = self.rounds[slot]

    @precondition(lambda self: self.copied and len(self.lies) > 1)
    @rule(which=st.integers(0, 3), whither=st.integers(0, 3))
    def a_machine_is_lost(self, which: int, whither: int) -> None:
        lost = sorted(self.lies)[which % len(self.lies)]
        before = max(self.rounds)
        del self.lies[lost]
        home = sorted(self.lies)[whither % len(self.lies)]
        for slot in [slot for slot, at in self.homes.items() if at == lost]:
            machine, rounds = newest(self.lies, slot, home)
            assert before - 1 <= rounds == self.lies[machine][slot]
            self.homes[slot], self.rounds[slot], self.lies[home][slot] = home, rounds, rounds
        self.copied = False  # they are copied again before the next one is lost

    @invariant()
    def no_state_is_of_an_exchange_that_was_not(self) -> None:
        assert foremost(self.lies) <= max(self.rounds)


TestLosses = Losses.TestCase
