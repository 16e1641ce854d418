"""Membership as a state machine: whatever happens in whatever order, views follow each other by the rules."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.cluster.membership import GiveUp, Instruction, Kill, Membership, Publish, Standing, Start, View


class Runs(RuleBasedStateMachine):
    """Agents' events at random, beside a model of what workers would do with the instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(wanted=4, spare_starts=6)
        self.alive = set(range(4))
        self.starting: set[int] = set()
        self.published = [View(1, (0, 1, 2, 3))]
        self.after_death: dict[int, View] = {}
        self.over = False

    def follow(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert getattr(instruction, "why", None), "every instruction has its reason"
            match instruction:
                case Publish(view, joins, _):
                    assert view.term > self.published[-1].term, "terms only grow"
                    assert set(view.members) <= self.alive, "a published view names nobody who is dead"
                    assert len(set(view.members)) == len(view.members)
                    if not joins:
                        for term in range(1, view.term):
                            self.after_death.setdefault(term, view)
                    self.published.append(view)
                case Start(worker, _):
                    assert worker not in self.alive and worker not in self.starting
                    self.alive.add(worker)
                    self.starting.add(worker)
                case Kill(worker, _):
                    self.alive.discard(worker)
                    self.starting.discard(worker)
                case GiveUp():
                    self.over = True

    @precondition(lambda self: not self.over and self.alive)
    @rule(data=st.data())
    def someone_dies(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(worker)
        self.starting.discard(worker)
        self.follow(self.membership.died(worker, "was killed by SIGKILL"))

    @precondition(lambda self: not self.over and self.starting)
    @rule(data=st.data())
    def a_newcomer_is_ready(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.discard(worker)
        self.follow(self.membership.ready(worker))

    @precondition(lambda self: not self.over and self.membership.pending is not None)
    @rule()
    def the_join_happens(self) -> None:
        pending = self.membership.pending
        assert pending is not None
        self.follow(self.membership.healed(pending.members[-1]))
        assert self.membership.settled == pending

    @rule(worker=st.integers(0, 12))
    def a_late_word_changes_nothing(self, worker: int) -> None:
        if self.membership.standing.get(worker) in (Standing.GONE, Standing.MEMBER, None):
            before = (self.membership.settled, self.membership.pending)
            assert self.membership.ready(worker) == []
            assert self.membership.healed(worker) == []
            assert before == (self.membership.settled, self.membership.pending)

    @invariant()
    def members_are_alive_and_the_next_view_after_a_death_is_one_for_all(self) -> None:
        if self.over:
            return
        settled, pending = self.membership.settled, self.membership.pending
        assert set(settled.members) <= self.alive
        if pending is not None:
            assert pending.members[:-1] == settled.members, "a join adds one, at the end"
            # Whoever is in the settled view and whoever is in the pending one find the same view after a death.
            assert settled.term not in self.after_death and pending.term not in self.after_death
        coming = sum(1 for s in self.membership.standing.values() if s in (Standing.STARTING, Standing.READY))
        assert len(settled.members) + coming <= self.membership.wanted

    @invariant()
    def replacements_come_while_there_are_spares(self) -> None:
        if not self.over and self.membership.spare_starts:
            coming = sum(1 for s in self.membership.standing.values() if s in (Standing.STARTING, Standing.READY))
            assert len(self.membership.settled.members) + coming == self.membership.wanted


Runs.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMembership = Runs.TestCase


def test_a_death_is_answered_by_the_rest_and_a_replacement() -> None:
    out = Membership(wanted=3, spare_starts=1).died(1, "was killed by SIGKILL")
    assert out == [
        Publish(View(2, (0, 2)), False, "worker 1 was killed by SIGKILL"),
        Start(3, "worker 1 was killed by SIGKILL"),
    ]


def test_a_death_while_another_joins_goes_on_without_the_newcomer() -> None:
    membership = Membership(wanted=3, spare_starts=9)
    membership.died(1, "x")
    assert membership.ready(3) == [Publish(View(3, (0, 2, 3)), True, "worker 3 is ready to join")]
    out = membership.died(0, "y")
    assert Kill(3, "its join was overtaken by the death of worker 0") in out
    assert Publish(View(4, (2,)), False, "worker 0 y") in out
    assert [i.worker for i in out if isinstance(i, Start)] == [4, 5]


def test_a_death_after_the_join_keeps_the_newcomer() -> None:
    membership = Membership(wanted=2, spare_starts=9)
    membership.died(1, "x")
    membership.ready(2)
    membership.healed(2)
    assert membership.died(0, "y")[0] == Publish(View(4, (2,)), False, "worker 0 y")


def test_a_newcomer_that_dies_as_it_joins_leaves_a_view_of_the_old_members() -> None:
    membership = Membership(wanted=2, spare_starts=9)
    membership.died(1, "x")
    membership.ready(2)
    out = membership.died(2, "y")
    assert out[0] == Publish(View(4, (0,)), False, "worker 2 y")
    assert isinstance(out[1], Start)


def test_the_last_one_gone_is_the_end() -> None:
    assert Membership(wanted=1, spare_starts=5).died(0, "x") == [GiveUp("worker 0 x, and no worker is left")]
