"""What the leader decides about servers: it does in the journal and for their processes what `Fleet` says. No torch in here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline import survival
from paceline.cluster import messages
from paceline.cluster.ends import KILLS, crash_trace, exit_words
from paceline.cluster.fleet import Fleet
from paceline.cluster.job import Job
from paceline.cluster.journal import Journal
from paceline.watch.folder import RunFolder

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Coordinator


class Admiral:
    def __init__(self, coordinator: Coordinator, job: Job, folder: RunFolder) -> None:
        self._coordinator, self._job, self._folder = coordinator, job, folder

    @property
    def _journal(self) -> Journal:
        return self._coordinator.journal

    def hear(self, number: int, message: msgspec.Struct) -> None:
        """From the process of this number."""
        name = self._journal.name(number)
        match message:
            case messages.ServerReady(address):
                self._relay(lambda fleet: fleet.came(self._journal.role(number)[1], address), f"{name} is here")
            case messages.Sizes(nbytes, room):
                self._relay(lambda fleet: fleet.sized(nbytes, room), f"{name} has said what {room} are to be held")
            case messages.Filled(server, since):
                why = f"server {server} has all that {name} copied to it"
                self._relay(lambda fleet: fleet.filled(server, since), why)

    def server_ended(self, number: int, code: int) -> None:
        self._journal.exits[number] = code
        self._coordinator.save()
        _, server = self._journal.role(number)
        lost = number not in self._journal.doomed and not self._coordinator.over
        why = exit_words(code) if lost else "the run is over"
        self._folder.event("server ended", why, server=server, exit_code=code, lost=lost)
        if not lost:
            return
        trace = crash_trace(self._folder.log_of("server", server)) if code < 0 else ""
        if code not in KILLS:  # a mistake, which another server would only repeat
            self._coordinator.fail(self._journal.name(number), why, trace, code if code > 0 else 1, number)
        elif not self._spare_server(number, server, why):
            text = f"{why}, and no other server had a copy of all that it held; {self._way_out()}"
            self._coordinator.fail(self._journal.name(number), text, worker=number)

    def _way_out(self) -> str:
        address = self._folder.checkpoints
        # Looking at an address of fsspec may take longer than this leader's lease; `paceline resume` will.
        checkpointed = "://" in address or any(Path(address).glob("step-*"))
        return survival.after_the_last_copy(self._job.settings, self._folder.id, checkpointed)

    def _spare_server(self, number: int, server: int, why: str) -> bool:
        """Whether the run goes on without this server; another one comes in its place."""
        fleet = self._journal.fleet
        before = fleet.number
        if not fleet.died(server):
            return False
        words = f"{self._journal.name(number)} {why}"
        fresh = None
        if fleet.starts_left:
            fleet.starts_left -= 1
            fresh = self._journal.add_server()
        self._coordinator.save()
        moved = fleet.number > before
        if moved:
            self._folder.event("layout", words, **fleet.described(), notice=f"{words}; its copies take over")
        self._coordinator.changed()
        if fresh is not None:
            notice = {} if moved else {"notice": f"{words}; another one starts"}
            self._folder.event("starting a server", words, server=self._journal.role(fresh)[1], **notice)
            self._coordinator.start(fresh)
        return True

    def _relay(self, change: Callable[[Fleet], None], why: str) -> None:
        """The fleet is another one, perhaps."""
        fleet = self._journal.fleet
        before = fleet.number
        change(fleet)
        self._coordinator.save()
        if fleet.number > before:
            self._folder.event("layout", why, **fleet.described())
            self._coordinator.changed()
