"""Membership as a state machine: whatever happens in whatever order, views follow each other by the rules."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.cluster.membership import GiveUp, Instruction, Kill, Membership, Publish, Standing, Start
from paceline.wires.view import View


class Runs(RuleBasedStateMachine):
    """Agents' events at random, beside a model of what workers would do with the instructions."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership.begin(wanted=4, starts_left=6)
        self.alive = set(range(4))
        self.starting: set[int] = set()
        self.published = [View(1, (0, 1, 2, 3))]
        self.after_death: dict[int, View] = {}
        self.over = False
        self.killed: list[int] = []

    def follow(self, instructions: list[Instruction]) -> None:
        self.carry_out(instructions)
        while self.killed:
            self.carry_out(self.membership.died(self.killed.pop(), "was killed by SIGKILL"))

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            assert getattr(instruction, "why", None), "every instruction has its reason"
            match instruction:
                case Publish(view, agreed, _):
                    assert view.term > self.published[-1].term, "terms only grow"
                    assert set(view.members) <= self.alive, "a published view names nobody who is dead"
                    assert len(set(view.members)) == len(view.members)
                    if not agreed:
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
                    self.killed.append(worker)
                case GiveUp():
                    self.over = True

    @initialize(spares=st.integers(0, 2))
    def it_begins(self, spares: int) -> None:
        self.membership = Membership.begin(wanted=4, starts_left=6, spares=spares)
        self.starting = set(range(4, 4 + spares))
        self.alive |= self.starting

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
    def the_pending_change_happens(self) -> None:
        settled, pending = self.membership.settled, self.membership.pending
        assert pending is not None
        if len(pending.members) > len(settled.members):
            self.follow(self.membership.healed(pending.members[-1]))
            assert self.membership.settled == pending
            return
        for leaver in [member for member in settled.members if member not in pending.members]:
            self.alive.discard(leaver)
            self.follow(self.membership.left(leaver))
        assert self.membership.settled.members == pending.members, (
            "in a newer term, if a death had overtaken the change"
        )

    @precondition(lambda self: not self.over)
    @rule(data=st.data())
    def someone_is_told_to_go(self, data: st.DataObject) -> None:
        self.follow(self.membership.leave(data.draw(st.sampled_from(sorted(self.alive)))))

    @precondition(lambda self: not self.over)
    @rule(wanted=st.integers(1, 6))
    def another_number_is_asked_for(self, wanted: int) -> None:
        self.follow(self.membership.scale(wanted))

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
            joins = pending.members[:-1] == settled.members
            assert joins or (set(pending.members) < set(settled.members) and pending.members), "one change at a time"
            # Whoever is in the settled view and whoever is in the pending one find the same view after a death.
            assert settled.term not in self.after_death and pending.term not in self.after_death

    @invariant()
    def replacements_come_while_there_are_spares(self) -> None:
        membership = self.membership
        if not self.over and membership.starts_left:
            known = (Standing.STARTING, Standing.READY, Standing.MEMBER, Standing.LEAVING)
            there = sum(1 for standing in membership.standing.values() if standing in known)
            assert there >= membership.wanted + membership.spares

    @invariant()
    def a_spare_waits_only_while_nobody_is_missing(self) -> None:
        membership = self.membership
        if self.over:
            return
        missing = len(membership.settled.members) < membership.wanted
        if membership.pending is None:
            assert not (missing and Standing.READY in membership.standing.values())
        elif len(membership.pending.members) > len(membership.settled.members):
            staying = [m for m in membership.settled.members if membership.standing[m] is Standing.MEMBER]
            assert len(staying) < membership.wanted, "nobody joins a run that is whole"

    @invariant()
    def who_cannot_come_is_not_waited_for(self) -> None:
        """Whoever waits for a whole run may rely on it: as many as can be reached are there or will be."""
        membership = self.membership
        if not self.over:
            assert membership.reach <= membership.wanted
            full = sum(1 for s in membership.standing.values() if s is Standing.MEMBER) >= membership.wanted
            assert not full or membership.reach == membership.wanted


Runs.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestMembership = Runs.TestCase


def test_a_death_is_answered_by_the_rest_and_a_replacement() -> None:
    out = Membership.begin(wanted=3, starts_left=1).died(1, "was killed by SIGKILL")
    assert out == [
        Publish(View(2, (0, 2)), False, "worker 1 was killed by SIGKILL"),
        Start(3, "worker 1 was killed by SIGKILL"),
    ]


def test_a_death_while_another_joins_goes_on_without_the_newcomer() -> None:
    membership = Membership.begin(wanted=3, starts_left=9)
    membership.died(1, "x")
    assert membership.ready(3) == [Publish(View(3, (0, 2, 3)), True, "worker 3 is ready to join")]
    out = membership.died(0, "y")
    assert Kill(3, "its join was overtaken by the death of worker 0") in out
    assert Publish(View(4, (2,)), False, "worker 0 y") in out
    assert [i.worker for i in out if isinstance(i, Start)] == [4, 5]


def test_a_death_after_the_join_keeps_the_newcomer() -> None:
    membership = Membership.begin(wanted=2, starts_left=9)
    membership.died(1, "x")
    membership.ready(2)
    membership.healed(2)
    assert membership.died(0, "y")[0] == Publish(View(4, (2,)), False, "worker 0 y")


def test_a_newcomer_that_dies_as_it_joins_leaves_a_view_of_the_old_members() -> None:
    membership = Membership.begin(wanted=2, starts_left=9)
    membership.died(1, "x")
    membership.ready(2)
    out = membership.died(2, "y")
    assert out[0] == Publish(View(4, (0,)), False, "worker 2 y")
    assert isinstance(out[1], Start)


def test_the_last_one_gone_is_the_end() -> None:
    assert Membership.begin(wanted=1, starts_left=5).died(0, "x") == [GiveUp("worker 0 x, and no worker is left")]


def test_a_leave_is_a_change_that_all_agree_on() -> None:
    membership = Membership.begin(wanted=3, starts_left=9)
    assert membership.leave(0) == [Publish(View(2, (1, 2)), True, "worker 0 leaves")]
    assert membership.left(0) == [Start(3, "worker 0 left")]
    assert membership.settled == View(2, (1, 2)) and membership.pending is None


def test_a_death_overtakes_a_leave_and_the_leave_is_announced_again() -> None:
    membership = Membership.begin(wanted=3, starts_left=0)
    membership.leave(2)
    out = membership.died(1, "x")
    assert out == [
        Publish(View(3, (0, 2)), False, "worker 1 x"),
        Publish(View(4, (0,)), True, "worker 2 leaves"),
    ]


def test_who_has_left_already_when_a_death_overtakes_is_waited_for_once_more() -> None:
    membership = Membership.begin(wanted=3, starts_left=0)
    membership.leave(2)
    membership.died(1, "x")
    membership.pending = None  # as if the death had come before the second announcement
    assert membership.left(2) == [Publish(View(4, (0,)), False, "worker 2 left")]


def test_a_leave_by_the_overtaken_change_is_not_taken_for_one_by_the_second() -> None:
    """The others are in the view that followed the death, and wait in it for who has left."""
    membership = Membership.begin(wanted=4, starts_left=0)
    membership.leave(3)
    assert membership.died(1, "x")[0] == Publish(View(3, (0, 2, 3)), False, "worker 1 x")
    assert membership.left(3) == [Publish(View(5, (0, 2)), False, "worker 3 left")]
    assert membership.settled == View(5, (0, 2)) and membership.pending is None


def test_scaling_down_keeps_main_and_scaling_up_starts_more() -> None:
    membership = Membership.begin(wanted=2, starts_left=9)
    assert [type(i) for i in membership.scale(4)] == [Start, Start]
    assert [i.worker for i in membership.scale(1) if isinstance(i, Kill)] == [3, 2]
    assert membership.pending == View(2, (0,))


def test_leavers_stay_if_whoever_was_to_stay_dies() -> None:
    membership = Membership.begin(wanted=4, starts_left=9)
    membership.scale(1)
    assert membership.died(0, "x") == [
        Publish(View(3, (1, 2, 3)), False, "worker 0 x"),
        Publish(View(4, (1,)), True, "worker 2, 3 leaves"),
    ]


def test_when_all_are_told_to_go_nobody_does() -> None:
    membership = Membership.begin(wanted=2, starts_left=9)
    membership.leave(0)
    membership.leave(1)
    assert membership.all_leave


def test_a_spare_waits_until_somebody_is_missing_and_is_followed_by_another() -> None:
    membership = Membership.begin(wanted=2, starts_left=9, spares=1)
    assert membership.ready(2) == []
    assert membership.died(1, "x") == [
        Publish(View(2, (0,)), False, "worker 1 x"),
        Start(3, "worker 1 x"),
        Publish(View(3, (0, 2)), True, "worker 2 is ready to join"),
    ]
    assert membership.healed(2) == [] and membership.ready(3) == []
    assert membership.settled == View(3, (0, 2))


def test_a_newcomer_is_needed_while_somebody_is_missing() -> None:
    membership = Membership.begin(3, starts_left=5, spares=2)
    assert not membership.needs(3) and not membership.needs(4)
    membership.died(1, "was killed")
    assert membership.needs(3) and not membership.needs(4), "the spare that came first"
    membership.died(3, "was killed")
    assert membership.needs(4)
    membership.ready(4)
    assert not membership.needs(4) and not membership.needs(5), "it is about to come in"
    membership.healed(4)
    assert membership.settled.members == (0, 2, 4)
    assert not any(map(membership.needs, membership.standing))


def test_scaling_keeps_the_spares() -> None:
    membership = Membership.begin(wanted=3, starts_left=9, spares=1)
    membership.ready(3)
    membership.scale(2)
    assert membership.pending == View(2, (0, 1)) and membership.standing[3] is Standing.READY
    membership.left(2)
    out = membership.scale(3)
    assert out == [Start(4, "3 workers were asked for"), Publish(View(3, (0, 1, 3)), True, "worker 3 is ready to join")]


def test_how_many_can_be_reached() -> None:
    membership = Membership.begin(wanted=3, starts_left=1)
    membership.died(1, "x")
    assert membership.reach == 3
    membership.died(3, "x")
    assert membership.reach == 2


def test_who_has_finished_is_not_in_the_view_after_a_death() -> None:
    """On several machines one may have missed the last meeting, which others have completed and gone."""
    membership = Membership.begin(3, 0)
    assert membership.finished(0, 1) == []
    assert membership.died(2, "was killed") == [Publish(View(2, (1,)), False, "worker 2 was killed")]
    assert membership.died(1, "was killed") == [], "somebody has finished: the run is not lost"


def test_who_finishes_in_an_older_term_than_the_view_after_a_death_will_not_come_to_it() -> None:
    membership = Membership.begin(3, 0)
    membership.died(2, "was killed")
    (left_out,) = membership.finished(0, 1)
    assert isinstance(left_out, Publish) and left_out.view == View(3, (1,)) and not left_out.agreed
    assert membership.finished(1, 3) == []


def test_who_finishes_in_the_newest_term_changes_nothing() -> None:
    membership = Membership.begin(3, 5)
    instructions = [each for worker in range(3) for each in membership.finished(worker, 1)]
    assert instructions == [] and membership.settled == View(1, (0, 1, 2))


def test_no_more_are_started_than_the_machines_have_room_for() -> None:
    membership = Membership.begin(4, 10)
    membership.room = 2  # a machine is lost, with two of them
    assert [each for each in membership.died(2, "was lost") if isinstance(each, Start)] == []
    assert [each for each in membership.died(3, "was lost") if isinstance(each, Start)] == []
    assert membership.reach == 2 and membership.reach_with_room == 4
    back = membership.make_room(4, "it is back")
    assert [each.worker for each in back if isinstance(each, Start)] == [4, 5] and membership.reach == 4


def test_all_begin_again_in_a_term_of_their_own() -> None:
    membership = Membership.begin(wanted=2, starts_left=9, spares=1)
    membership.died(1, "was killed")
    membership.ready(2)
    assert membership.pending == View(3, (0, 2))
    membership.end()
    for words in (membership.died(0, "was killed"), membership.ready(3), membership.healed(2), membership.leave(0)):
        assert words == [], "nothing that happens to those of before matters"
    published, *started = membership.begin_again("all was lost")
    assert published == Publish(View(4, (4, 5)), False, "all was lost")
    assert [start.worker for start in started if isinstance(start, Start)] == [4, 5, 6]
    assert membership.starts_left == 9 - 1 - 3 and membership.standing[6] is Standing.STARTING
    assert membership.died(4, "was killed")[0] == Publish(View(5, (5,)), False, "worker 4 was killed")


@pytest.mark.parametrize(("room", "members", "spares"), [(1, 1, 0), (3, 3, 0), (4, 4, 0), (5, 4, 1), (9, 4, 2)])
def test_as_many_begin_again_as_the_machines_have_room_for(room: int, members: int, spares: int) -> None:
    membership = Membership.begin(wanted=4, starts_left=20, spares=2)
    membership.room = room
    membership.end()
    published, *started = membership.begin_again("all was lost")
    assert isinstance(published, Publish) and len(published.view.members) == members
    assert len(started) == members + spares and membership.starts_left == 20 - members - spares
    more = membership.make_room(9, "another machine has come")
    assert sum(isinstance(each, Start) for each in more) == 6 - members - spares
