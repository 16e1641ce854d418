"""Looking for the agent that leads, from another machine: in a thread, for each try may take seconds. No torch in here."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from dataclasses import dataclass

from paceline.cluster import between
from paceline.cluster.election import Silence, clock
from paceline.cluster.journal import Journal
from paceline.cluster.store import Record, Store, StoreGone, open_store
from paceline.errors import PacelineError, UsageError
from paceline.wires import wire

_AGAIN_S = 0.1
_TRIES = 4
"""In a lease."""


@dataclass(frozen=True)
class Found:
    """It answers."""

    socket: socket.socket


@dataclass(frozen=True)
class Vacant:
    """Nobody has led for a lease: whoever is first may."""

    record: Record


@dataclass(frozen=True)
class Gone:
    """There is no such run any more."""


Finding = Found | Vacant | Gone


def first_journal(address: str, secret: bytes, identity: str) -> Journal:
    """A machine's very first contact: it is known there, and is told how things stand."""
    with wire.connect(address, secret) as sock:
        wire.send(sock, between.Join(identity))
        while True:
            answer, _ = wire.receive(sock, between.FROM_LEADER)
            if isinstance(answer, between.TurnedAway):
                raise UsageError(answer.why)
            if isinstance(answer, between.Told) and answer.journal:
                return Journal.decode(answer.journal)


class Seeker:
    """`address`: of the leader, where no store says; readable (`fileno`) when something was found."""

    def __init__(self, address: str, secret: bytes, store: str, run: str, lease_s: float) -> None:
        self._address, self._secret, self._lease_s = address, secret, lease_s
        self._open = (lambda: open_store(store, run)) if run else None
        self._store: Store | None = None
        self._said = ""
        self._findings: queue.SimpleQueue[Finding] = queue.SimpleQueue()
        self._bell, self._rope = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        return self._bell

    def seek(self) -> None:
        """Begin; one finding follows."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._look, name="paceline-seeker", daemon=True)
        self._thread.start()

    def found(self) -> Finding:
        os.read(self._bell, 1)
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        return self._findings.get()

    def _look(self) -> None:
        silence = Silence(self._lease_s)
        while not self._stop.is_set():
            finding = self._once(silence)
            if finding is not None:
                self._findings.put(finding)
                os.write(self._rope, b"!")
                return
            self._stop.wait(_AGAIN_S)

    def _once(self, silence: Silence) -> Finding | None:
        address = self._address
        if self._open is not None:
            try:
                self._store = self._store or self._open()  # once: names cannot be looked up while the network is cut
                began = clock()
                record = self._store.read()
            except StoreGone:
                return Gone()
            except (OSError, PacelineError) as error:
                self._trouble(str(error))
                return None
            if silence.saw(began, clock(), record):
                return Vacant(record)
            address = record.address
        try:
            return Found(wire.connect(address, self._secret, self._lease_s / _TRIES))
        except OSError:
            return None

    def _trouble(self, words: str) -> None:
        """Said once: this may go on for long."""
        if words != self._said:
            self._said = words
            sys.stderr.write(f"paceline: {words}\n")

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            if not self._findings.empty():
                finding = self._findings.get()
                if isinstance(finding, Found):
                    finding.socket.close()
        if self._store is not None:
            self._store.close()
        os.close(self._bell)
        os.close(self._rope)
