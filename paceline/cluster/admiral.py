"""What the leader decides about servers: it does in the journal and for their processes what `Fleet` says. No torch in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.cluster.ends import KILLS, crash_trace, exit_words
from paceline.cluster.fleet import Address, Fleet
from paceline.cluster.journal import Journal
from paceline.folder import RunFolder
from paceline.settings import Settings
from paceline.strategies import find
from paceline.wires import messages

if TYPE_CHECKING:
    from paceline.cluster.coordinator import Coordinator


_NOT_NEEDED = "others hold all that it held"


class Admiral:
    def __init__(self, coordinator: Coordinator, settings: Settings, folder: RunFolder) -> None:
        self._coordinator, self._settings, self._folder = coordinator, settings, folder

    @property
    def _journal(self) -> Journal:
        return self._coordinator.journal

    def hear(self, number: int, message: msgspec.Struct) -> None:
        """From the process of this number."""
        if self._coordinator.rollback.under_way or self._coordinator.over:
            return  # nobody is started in place of those that are being ended
        name = self._journal.name(number)
        match message:
            case messages.ServerReady(near, far):
                address = Address(near, far, self._journal.homes[number])
                self._relay(lambda fleet: fleet.came(self._journal.role(number)[1], address), f"{name} is here")
            case messages.Sizes(nbytes, room):
                self._relay(lambda fleet: fleet.sized(nbytes, room), f"{name} has said what {room} are to be held")
            case messages.Filled(server, since):
                why = f"server {server} has all that {name} copied to it"
                self._relay(lambda fleet: fleet.filled(server, since), why)

    # another number of them

    def why_not(self, count: int) -> str:
        """Why there cannot be so many servers; nothing, if there can."""
        fleet = self._journal.fleet
        if not fleet.wanted:
            return "this run has no servers: they begin with it, paceline run --strategy ps --servers N"
        if count > 1 and find(self._settings.strategy).one:
            return f"{count} servers: --strategy {self._settings.strategy} has all variables at one"
        if count < 1:
            return f"{count} servers: somebody must hold the parameters; 1 or more"
        more = count - fleet.wanted + fleet.short(self._started)
        if more > fleet.starts_left:
            return f"{count} servers: this run may start {fleet.starts_left} more, and that would need {more}"
        return ""

    def scale(self, count: int) -> None:
        """Fragments move while training goes on; whoever is to go ends when it holds nothing any more."""
        words = f"going to {_many(count, 'server')}"
        self._folder.event("scaling", f"--servers {count} was asked for", servers=count, notice=words)
        self._relay(lambda fleet: fleet.scale(count, self._started), f"--servers {count} was asked for")

    @property
    def _started(self) -> list[int]:
        """Servers that were started and have not ended."""
        return [self._journal.role(number)[1] for number in self._journal.servers if number not in self._journal.exits]

    def spread(self, why: str) -> None:
        """A machine has come, or is to go."""
        journal = self._journal
        if journal.fleet.wanted and not self._coordinator.rollback.under_way and not self._coordinator.over:
            self._relay(lambda fleet: fleet.spread(journal.homes_of_servers, journal.machines_here), why)

    # deaths

    def server_ended(self, number: int, code: int, how: str = "") -> None:
        """`how`, if its exit code does not say it."""
        self._journal.exits[number] = (
            code  # written down below, with what follows: a next leader would take it for dealt with
        )
        _, server = self._journal.role(number)
        lost = number not in self._journal.doomed and not self._coordinator.over
        why = how or exit_words(code) if lost else self._why_ended(server)
        self._folder.event("server ended", why, server=server, exit_code=code, lost=lost)
        if not lost:
            self._coordinator.save()
            self._coordinator.changed()  # a machine that is told to go waits until it hears that this is written down
            return
        self._journal.servers_lost += 1
        trace = crash_trace(self._folder.log_of("server", server)) if code < 0 else ""
        if code not in KILLS:  # a mistake, which another server would only repeat
            self._coordinator.fail(self._journal.name(number), why, trace, code if code > 0 else 1, number)
        elif not self._spare_server(number, server, why):
            words = f"{self._journal.name(number)} {why}, and no other server had a copy of all that it held"
            self._coordinator.rollback.begin(words)
            self._coordinator.save()  # it may be that nobody needs to go back

    def _why_ended(self, server: int) -> str:
        """One that was told to."""
        if server in self._journal.fleet.gone:
            return _NOT_NEEDED
        return "the run goes back to a checkpoint" if self._coordinator.rollback.under_way else "the run is over"

    def _spare_server(self, number: int, server: int, why: str) -> bool:
        """Whether the run goes on without this server; another one comes in its place."""
        fleet, words = self._journal.fleet, f"{self._journal.name(number)} {why}"
        before = fleet.number
        if not fleet.died(server):
            return False
        fleet.spread(self._journal.homes_of_servers, self._journal.machines_here)
        moved = fleet.number > before
        notice = f"{words}; {'its copies take over' if moved else 'another one starts'}"
        self._follow_up(moved, words, notice=notice, replaces=server)
        return True

    # what follows

    def _relay(self, change: Callable[[Fleet], None], why: str) -> None:
        """The fleet is another one, perhaps."""
        fleet = self._journal.fleet
        before, was_settled = fleet.number, fleet.placement is None or fleet.settled
        change(fleet)
        self._follow_up(fleet.number > before, why)
        if fleet.settled and not was_settled:
            copies = _many(fleet.described()["copies"], "copy", "copies")
            words = f"the parameters are at {_many(fleet.wanted, 'server')} now, {copies} of each"
            self._folder.event("settled", words, notice=words)

    def _follow_up(self, moved: bool, why: str, notice: str = "", **fields: Any) -> None:
        """Written down first; then told, and who is missing is started, who is not needed any more ended."""
        journal, fleet = self._journal, self._journal.fleet
        fresh = [journal.add_server() for _ in range(min(fleet.short(self._started), fleet.starts_left))]
        fleet.starts_left -= len(fresh)
        idle = [journal.servers[0] + server for server in fleet.dismiss()]
        journal.doomed += idle
        self._coordinator.save()
        told = {"notice": notice} if notice else {}
        if moved:
            self._folder.event("layout", why, **fleet.described(), **told)
            told = {}
        self._coordinator.changed()
        for number in fresh:
            _, server = journal.role(number)
            self._folder.event("starting a server", why, server=server, **told, **fields)
            self._coordinator.start(number)
        for number in idle:
            _, server = journal.role(number)
            words = f"server {server} goes: {_NOT_NEEDED}"
            self._folder.event("ending a server", _NOT_NEEDED, server=server, notice=words)
            self._coordinator.kill(number)


def _many(count: int, one: str, more: str = "") -> str:
    """
    >>> _many(1, "server"), _many(2, "copy", "copies")
    ('1 server', '2 copies')
    """
    return f"{count} {one if count == 1 else more or one + 's'}"
