"""Going back: something that the next step needs has no copy left, so the run begins anew at its newest checkpoint, inside itself.

Its workers are inside a step that nobody can complete any more, so all processes of the run are ended, and others
begin together in a term of their own, as after `paceline resume`. They are started when the last one has ended: it
might have been writing a checkpoint. Which one is the newest that can be read is for the new main to find out, which
takes its time; all say at which step they go on. No torch in here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.fleet import Fleet
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal
from paceline.cluster.membership import Standing
from paceline.folder import RunFolder
from paceline.strategies import survival

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Coordinator

MOST_IN_VAIN = 3
"""How often in a row a run goes back before it has trained a step: what happens then would happen again."""


class Rollback:
    """`reached()` is the step that the members have come to, those that have not trained one not counted."""

    def __init__(self, coordinator: Coordinator, job: Job, folder: RunFolder) -> None:
        self._coordinator, self._job, self._folder = coordinator, job, folder
        self.reached: Callable[[], int]

    @property
    def _journal(self) -> Journal:
        return self._coordinator.journal

    @property
    def under_way(self) -> bool:
        """The processes of before are ending; nobody trains."""
        return bool(self._journal.rolled.why)

    def begin(self, why: str) -> None:
        """Everything is ended, and nothing that it still says counts."""
        journal, membership = self._journal, self._journal.membership
        if self.under_way or Standing.FINISHED in membership.standing.values():
            return  # or the weights are agreed on: nobody needs servers any more
        ending = list(journal.running)
        journal.rolled.why = why
        journal.doomed = sorted({*journal.doomed, *ending})
        journal.buried += [number for number in ending if number in membership.standing]
        membership.end()
        self._coordinator.save()
        self._folder.event("rolling back", why, notice=f"{why}; {self._where_to()}")
        self._coordinator.changed()
        for number in ending:
            self._coordinator.kill(number)

    def go_on(self) -> None:
        """Once the last one has ended."""
        journal, rolled = self._journal, self._journal.rolled
        if not self.under_way or journal.running:
            return
        why, rolled.why = rolled.why, ""
        rolled.reached = self.reached()
        rolled.in_vain = 0 if rolled.reached else rolled.in_vain + 1
        hopeless = self._why_not()
        if hopeless or self._coordinator.over:
            self._coordinator.save()
            self._coordinator.fail("the run:", f"{why}{hopeless}; {self._way_out()}")
            return
        rolled.times += 1
        fleet = journal.fleet
        before = [journal.role(number)[1] for number in journal.servers]
        journal.fleet = Fleet(fleet.wanted, fleet.replicas, fleet.starts_left - fleet.wanted, fleet.number, gone=before)
        servers = [journal.add_server() for _ in range(fleet.wanted)]
        self._coordinator.follow_up(journal.membership.begin_again(self._where_to()))
        for number in servers:
            self._coordinator.start(number)

    def _why_not(self) -> str:
        """Why it cannot go on, behind what has happened; nothing, if it can."""
        journal, membership = self._journal, self._journal.membership
        if journal.rolled.in_vain > MOST_IN_VAIN:
            return f", after going back {MOST_IN_VAIN} times without a step trained in between"
        if journal.stop:
            return ", as the run was about to stop"
        short = membership.starts_left < sum(membership.beginners)
        return ", and no more processes may be started" * (short or journal.fleet.starts_left < journal.fleet.wanted)

    def _way_out(self) -> str:
        return survival.after_the_last_copy(self._job.settings, self._folder.id, self._checkpointed is not False)

    def _where_to(self) -> str:
        """As far as it is known already: what can be read is for the new main to find out."""
        known = True if self._job.resume else self._checkpointed
        return _where_to(known, int(self._coordinator.setting("checkpoint_every")))

    @property
    def _checkpointed(self) -> bool | None:
        """None: looking at an address of fsspec may take longer than this leader's lease; `paceline resume` will."""
        address = self._folder.checkpoints
        return None if "://" in address else any(Path(address).glob("step-*"))

    def told(self, step: int) -> None:
        """It goes on at this step."""
        rolled = self._journal.rolled
        if rolled.reached is None:
            return  # by another worker
        redone, rolled.reached = range(step, rolled.reached), None
        rolled.redone += len(redone)
        self._coordinator.save()
        words = f"goes on from its checkpoint of step {step}" if step else "has no checkpoint, and begins again"
        words = f"the run {words}: {_again(redone)}"
        self._folder.event("rolled back", words, step=step, redone=len(redone), notice=words)


def _where_to(checkpointed: bool | None, every: int) -> str:
    """
    >>> _where_to(True, every=0), _where_to(False, every=0)
    ('the run goes back to its newest checkpoint', 'the run has no checkpoint, and begins again from its start')
    >>> _where_to(False, every=100)  # one may be in memory, or on its way to the disk
    'the run goes back to its newest checkpoint, or to its start if there is none yet'
    """
    if checkpointed:
        return "the run goes back to its newest checkpoint"
    if not every:
        return "the run has no checkpoint, and begins again from its start"
    return "the run goes back to its newest checkpoint, or to its start if there is none yet"


def _again(steps: range) -> str:
    """
    >>> _again(range(120, 144)), _again(range(7, 8)), _again(range(0))
    ('steps 120-143 are trained again', 'step 7 is trained again', 'no step is trained again')
    """
    match len(steps):
        case 0:
            return "no step is trained again"
        case 1:
            return f"step {steps[0]} is trained again"
    return f"steps {steps[0]}-{steps[-1]} are trained again"
