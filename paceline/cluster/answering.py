"""What a machine's agent answers: to its workers, to whoever watches or steers, to its standby. No torch in here.

Everything is answered from the journal, so that a question can be put again to the next agent. What
changes the run is the coordinator's to decide, wherever that is.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from paceline.cluster.desk import Key
from paceline.cluster.fleet import Fleet
from paceline.cluster.kept import BOARD, Kept
from paceline.cluster.memory import term_of
from paceline.folder import RunFolder
from paceline.wires import messages
from paceline.wires.connection import Connection
from paceline.wires.view import View

if TYPE_CHECKING:
    from paceline.cluster.journal import Journal
    from paceline.cluster.node import Node


class Answering:
    def __init__(self, node: Node, folder: RunFolder, kept: Kept) -> None:
        self._node, self._folder, self._kept = node, folder, kept
        self._told_members: tuple[int, ...] = ()

    @property
    def _journal(self) -> Journal:
        return self._node.master.journal

    def answer(self, peer: Connection, message: msgspec.Struct) -> None:
        """ValueError: this peer has no business here."""
        desk = self._node.desk
        worker = desk.worker_of.get(peer, -1)
        match message:
            case messages.Hello() if desk.is_cut(message.worker):
                raise ValueError(f"worker {message.worker} is cut off")
            case messages.Hello():
                desk.worker_of[peer] = message.worker
                self._welcome(peer)
            case messages.Watch():
                desk.watchers.append(peer)
                self._welcome(peer)
            case messages.Shadow(pid):
                self._welcome(peer)
                self._shadow(peer, pid)
            case messages.Steer():
                peer.send(messages.Done())
            case messages.Stop() | messages.Scale():
                self._node.master.decide(peer, worker, message)
            case _ if worker in self._journal.homes:
                self._answer_worker(peer, worker, message)
            case _:
                raise ValueError(f"nobody says {type(message).__name__} before a greeting")

    def _answer_worker(self, peer: Connection, worker: int, message: msgspec.Struct) -> None:
        node = self._node
        match message:
            case messages.After(term):
                node.desk.wait(peer, ("after", term))
            case messages.Get(key):
                node.desk.wait(peer, ("fact", key))
            case messages.Entering(term):
                node.desk.wait(peer, ("view", term))
            case messages.Segment(name, size):
                term_of(name)
                answer, fd = node.segments.grant(name, size, len(self._journal.membership.settled.members))
                node.check_hold()  # else two workers could have two memories by one name
                peer.send(answer, (fd,) if fd is not None else ())
            case messages.Ready():
                node.master.decide(peer, worker, message)
                node.desk.wait(peer, ("join", worker))
            case messages.Needed():
                node.desk.wait(peer, ("needed", worker))
            case messages.Layout(after):
                node.desk.wait(peer, ("layout", after))
            case (
                messages.Claim() | messages.CaughtUp() | messages.Healed() | messages.Put() | messages.Failed() | messages.ServerReady()
                | messages.Sizes() | messages.Filled() | messages.GoBack() | messages.RolledBack()
            ):  # fmt: skip
                node.master.decide(peer, worker, message)
            case _:
                raise ValueError(f"a worker does not say {type(message).__name__}")

    def known(self, key: Key) -> msgspec.Struct | None:
        """The answer to a question, once there is one."""
        journal = self._journal
        match key:
            case ("after", int(term)) if term in journal.after:
                return self._next(journal.views[journal.after[term]])
            case ("view", int(term)) if term in journal.views:
                return self._next(journal.views[term])
            case ("fact", str(name)) if name in journal.facts:
                return messages.Value(journal.facts[name])
            case ("layout", int(after)) if journal.fleet.placement is not None and journal.fleet.number > after:
                return _placed(journal.fleet, self._node.number)
            case ("needed", int(worker)) if journal.membership.needs(worker):
                return self._next(journal.membership.settled)
            case ("join", int(worker)):
                pending = journal.membership.pending
                return self._next(pending) if pending and worker in pending.members else None
        return None

    def changed(self) -> None:
        """Something has become known: who waited for it is answered, who watches is told."""
        desk, members = self._node.desk, self._journal.membership.settled.members
        desk.settle()
        if members != self._told_members:
            self._told_members = members
            for peer in desk.watchers:
                peer.send(messages.Members(list(members)))

    def _welcome(self, peer: Connection) -> None:
        journal, board = self._journal, self._node.board
        view = journal.membership.settled
        welcome = messages.Welcome(board.workers, view.term, list(view.members), self._homes(view), journal.deaths)
        peer.send(welcome, (board.fd,))

    def _next(self, view: View) -> messages.Next:
        return messages.Next(view.term, list(view.members), self._homes(view), self._journal.deaths)

    def _homes(self, view: View) -> list[int]:
        return [self._journal.homes.get(member, 0) for member in view.members]

    # the standby

    def _shadow(self, peer: Connection, pid: int) -> None:
        """From now on it is sent whatever must outlive this agent; the board, without which it cannot lead, when it has the rest."""
        self._node.desk.shadows.append(peer)
        for name in sorted(self._kept.names(), key=lambda name: name == BOARD):
            self._send_kept(peer, name)
        self._folder.event("standby", "it can take over", pid=pid, leader=os.getpid(), machine=self._node.number)

    def share(self, name: str, fd: int, size: int) -> None:
        """A standby that does not take it now is hung up on: when it calls again, it gets everything."""
        desk = self._node.desk
        for peer in list(desk.shadows):
            self._send_kept(peer, name)
            if peer.is_behind:
                desk.drop(peer)

    def unshare(self, name: str) -> None:
        for peer in self._node.desk.shadows:
            peer.send(messages.Release(name))

    def _send_kept(self, peer: Connection, name: str) -> None:
        found = self._kept.get(name)
        if found is not None:
            peer.send(messages.Keep(name, found[1]), (found[0],))


def _placed(fleet: Fleet, machine: int) -> messages.Placed:
    """As it is seen from this machine."""
    assert fleet.placement is not None
    copies = fleet.placement.copies
    filled = [sorted(each.filled) for each in copies]
    holders = [list(each.holders) for each in copies]
    since = [[known[server] for server in each] for known, each in zip(fleet.since, holders, strict=True)]
    addresses = {server: address.seen_from(machine) for server, address in fleet.addresses.items()}
    return messages.Placed(fleet.number, holders, since, filled, addresses, fleet.rooms)
