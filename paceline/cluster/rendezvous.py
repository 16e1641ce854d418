"""Where the processes of a run find each other on a machine: its address, its secret, its store. No torch in here."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.cluster.store import LocalStore, Record, StoreGone, runtime_folder
from paceline.errors import UsageError
from paceline.folder import RunFolder
from paceline.wires import secret


class Reach(msgspec.Struct, frozen=True):
    """How the agents of several machines find each other; empty on one machine."""

    identity: str = ""
    """This machine's own."""
    host: str = ""
    """Where other machines reach it."""
    port: int = 0
    """0: any that is free."""
    leader: str = ""
    """Where the agent that leads is reached, as long as no store says; nothing, where the run was started."""
    run: str = ""
    """The run's name in its store; nothing, if that is this machine's own."""


ONE_MACHINE = Reach()
_SUCCESSION_S = 0.3
"""So long nobody may seem to lead while a standby takes over; and so long a resume waits where all were killed."""


@dataclass(frozen=True)
class Rendezvous:
    address: str
    """Of this machine's agent, without its fence."""
    secret: bytes
    store: Path
    """What says which of the machine's agents speaks for it; on one machine the run's store too."""
    machine: int = 0
    gpus: tuple[str, ...] = ()
    reach: Reach = ONE_MACHINE

    @staticmethod
    def create(
        folder: RunFolder, machine: int = 0, gpus: tuple[str, ...] = (), reach: Reach = ONE_MACHINE, known: bytes = b""
    ) -> Rendezvous:
        """Fresh ones for a run that starts now. The secret, `known` or new, is for this user's eyes only."""
        left = folder.read_json(folder.agent_of(machine)).get("store")
        if left:  # everything was killed at once
            Path(left).unlink(missing_ok=True)
        unique = secrets.token_hex(8)
        secret_file = folder.secret_of(machine)
        secret_file.unlink(missing_ok=True)
        place = Rendezvous(
            f"paceline-{folder.id}-{unique}",
            secret.make(secret_file, known),
            runtime_folder() / f"paceline-{folder.id}-{unique}.db",
            machine,
            gpus,
            reach,
        )
        LocalStore.create(place.store).close()
        found = {"address": place.address, "store": str(place.store), "gpus": gpus, "reach": msgspec.to_builtins(reach)}
        folder.write_json(folder.agent_of(machine), found)
        return place

    @staticmethod
    def of(folder: RunFolder, machine: int = 0) -> Rendezvous:
        known = folder.read_json(folder.agent_of(machine))
        if not known:
            raise UsageError(f"run {folder.id!r} is not running: `paceline runs` lists what there is")
        return Rendezvous(
            known["address"],
            secret.read(folder.secret_of(machine)),
            Path(known["store"]),
            machine,
            tuple(known["gpus"]),
            msgspec.convert(known["reach"], Reach),
        )

    @staticmethod
    def here(folder: RunFolder) -> Rendezvous:
        """Of this machine, wherever the run is led from: its agent passes on what it is told. On a disk that machines
        share the folder has those of others too, and of lost ones."""
        places = [Rendezvous.of(folder, machine) for machine in folder.machines() or [0]]
        return next((place for place in places if place.is_served), places[0])

    @staticmethod
    def refuse_if_alive(folder: RunFolder) -> None:
        """Nobody may start a run again that goes on: it outlives its terminal, and two would write one folder."""
        places = [Rendezvous.of(folder, machine) for machine in folder.machines()]
        until = time.monotonic() + _SUCCESSION_S
        while places:
            if any(place.is_served for place in places):
                raise UsageError(
                    f"run {folder.id!r} is under way: `paceline attach {folder.id}` shows it, `paceline stop {folder.id}` ends it"
                )
            if time.monotonic() > until:
                return
            time.sleep(0.02)

    @property
    def is_served(self) -> bool:
        """Whether an agent speaks for this machine, and lives."""
        try:
            agent = os.pidfd_open(self._speaker().pid)
        except OSError:
            return False
        try:
            return not select.select([agent], [], [], 0)[0]
        finally:
            os.close(agent)

    def fence(self) -> int:
        """Of the agent that speaks for this machine now."""
        return self._speaker().fence

    def _speaker(self) -> Record:
        try:
            with contextlib.closing(LocalStore(self.store)) as store:
                return store.read()
        except (StoreGone, sqlite3.Error):
            raise ConnectionError(f"{self.store} is gone: the run is over") from None

    @staticmethod
    def remove(folder: RunFolder, machine: int = 0) -> None:
        """The run is over: nothing is to be found."""
        folder.agent_of(machine).unlink(missing_ok=True)
        folder.secret_of(machine).unlink(missing_ok=True)
