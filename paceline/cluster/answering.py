"""What the leader answers: to its workers, to whoever watches or steers, to its standby. No torch in here.

Everything is answered from the journal, so that a question can be put again to the next leader.
"""

from __future__ import annotations

import os

import msgspec

from paceline.cluster import messages
from paceline.cluster.board import Board, Stop
from paceline.cluster.connection import Connection
from paceline.cluster.coordinator import Coordinator, term_of
from paceline.cluster.desk import Desk, Key
from paceline.cluster.kept import Kept
from paceline.cluster.membership import View
from paceline.cluster.memory import Segments
from paceline.watch.folder import RunFolder


class Answering:
    def __init__(
        self, coordinator: Coordinator, folder: RunFolder, board: Board, kept: Kept, segments: Segments
    ) -> None:
        self._coordinator, self._folder, self._board = coordinator, folder, board
        self._kept, self._segments = kept, segments
        self._told_members = coordinator.membership.settled.members
        self.desk: Desk

    def answer(self, peer: Connection, message: msgspec.Struct) -> None:
        """ValueError: this peer has no business here."""
        worker = self.desk.worker_of[peer]
        match message:
            case messages.Hello() if self.desk.is_cut(message.worker):
                raise ValueError(f"worker {message.worker} is cut off")
            case messages.Hello():
                self.desk.worker_of[peer] = message.worker
                self._welcome(peer)
            case messages.Watch():
                self.desk.watchers.append(peer)
                self._welcome(peer)
            case messages.Shadow(pid):
                self._welcome(peer)
                self._shadow(peer, pid)
            case messages.Steer():
                peer.send(messages.Done())
            case messages.Stop(who, kill):
                self._coordinator.stop(who, _kill_words(who) if kill else who.words, kill)
                peer.send(messages.Done())
            case messages.Scale(count):
                refusal = self._coordinator.scale(count)
                peer.send(messages.Refused(refusal) if refusal else messages.Done())
            case _ if worker in self._coordinator.journal.places:
                self._answer_worker(peer, worker, message)
            case _:
                raise ValueError(f"nobody says {type(message).__name__} before a greeting")

    def _answer_worker(self, peer: Connection, worker: int, message: msgspec.Struct) -> None:
        coordinator = self._coordinator
        match message:
            case messages.After(term):
                self.desk.wait(peer, ("after", term))
            case messages.Get(key):
                self.desk.wait(peer, ("fact", key))
            case messages.Ready():
                coordinator.follow_up(coordinator.membership.ready(worker))
                self.desk.wait(peer, ("join", worker))
            case messages.Entering(term):
                view = coordinator.journal.views.get(term)
                peer.send(self._next(view) if view else messages.Refused(f"there is no term {term}"))
            case messages.Healed():
                coordinator.joined(worker)
                peer.send(messages.Done())
            case messages.Segment(name, size):
                term_of(name)
                answer, fd = self._segments.grant(name, size, len(coordinator.membership.settled.members))
                peer.send(answer, (fd,) if fd is not None else ())
            case messages.Put(key, value):
                coordinator.journal.facts[key] = value
                coordinator.save()
                peer.send(messages.Done())
                self.desk.settle()
            case messages.Failed():
                if not message.follows:
                    coordinator.fail(f"worker {worker}:", message.summary, message.traceback, message.exit_code, worker)
                peer.send(messages.Done())
            case _:
                raise ValueError(f"a worker does not say {type(message).__name__}")

    def known(self, key: Key) -> msgspec.Struct | None:
        """The answer to a question, once there is one."""
        journal = self._coordinator.journal
        match key:
            case ("after", int(term)) if term in journal.after:
                return self._next(journal.views[journal.after[term]])
            case ("fact", str(name)) if name in journal.facts:
                return messages.Value(journal.facts[name])
            case ("join", int(worker)):
                pending = journal.membership.pending
                return self._next(pending) if pending and worker in pending.members else None
        return None

    def changed(self) -> None:
        """Something has become known: who waited for it is answered, who watches is told."""
        self.desk.settle()
        members = self._coordinator.membership.settled.members
        if members != self._told_members:
            self._told_members = members
            for peer in self.desk.watchers:
                peer.send(messages.Members(list(members)))

    def _welcome(self, peer: Connection) -> None:
        journal = self._coordinator.journal
        view = journal.membership.settled
        welcome = messages.Welcome(self._board.workers, view.term, list(view.members), journal.deaths)
        peer.send(welcome, (self._board.fd,))

    def _next(self, view: View) -> messages.Next:
        return messages.Next(view.term, list(view.members), self._coordinator.journal.deaths)

    # the standby

    def _shadow(self, peer: Connection, pid: int) -> None:
        """From now on it is sent whatever must outlive this leader."""
        self.desk.shadows.append(peer)
        for name in self._kept.names():
            self._send_kept(peer, name)
        self._folder.event("standby", "it can take over", pid=pid, leader=os.getpid())

    def share(self, name: str, fd: int, size: int) -> None:
        for peer in self.desk.shadows:
            self._send_kept(peer, name)

    def unshare(self, name: str) -> None:
        for peer in self.desk.shadows:
            peer.send(messages.Release(name))

    def _send_kept(self, peer: Connection, name: str) -> None:
        found = self._kept.get(name)
        if found is not None:
            peer.send(messages.Keep(name, found[1]), (found[0],))


def _kill_words(who: Stop) -> str:
    return "killed by a second Ctrl-C" if who is Stop.CTRL_C else "killed by `paceline stop --kill`"
