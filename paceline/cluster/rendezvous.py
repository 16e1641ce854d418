"""Where the processes of a run find each other: its address, its secret, its store. No torch in here."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster import secret
from paceline.cluster.store import LocalStore, StoreGone, runtime_folder
from paceline.errors import UsageError
from paceline.watch.folder import RunFolder


@dataclass(frozen=True)
class Rendezvous:
    address: str
    """Of the leader, without its fence."""
    secret: bytes
    store: Path

    @staticmethod
    def create(folder: RunFolder) -> Rendezvous:
        """Fresh ones for a run that starts now. The secret is for this user's eyes only."""
        left = folder.read_json(folder.agent).get("store")
        if left:  # everything was killed at once
            Path(left).unlink(missing_ok=True)
        unique = secrets.token_hex(8)
        folder.secret.unlink(missing_ok=True)
        place = Rendezvous(
            f"paceline-{folder.id}-{unique}",
            secret.make(folder.secret),
            runtime_folder() / f"paceline-{folder.id}-{unique}.db",
        )
        LocalStore.create(place.store).close()
        folder.write_json(folder.agent, {"address": place.address, "store": str(place.store)})
        return place

    @staticmethod
    def of(folder: RunFolder) -> Rendezvous:
        known = folder.read_json(folder.agent)
        if not known:
            raise UsageError(f"run {folder.id!r} is not running: `paceline runs` lists what there is")
        return Rendezvous(known["address"], secret.read(folder.secret), Path(known["store"]))

    def fence(self) -> int:
        """Of whoever leads now."""
        try:
            with contextlib.closing(LocalStore(self.store)) as store:
                return store.read().fence
        except (StoreGone, sqlite3.Error):
            raise ConnectionError(f"{self.store} is gone: the run is over") from None

    @staticmethod
    def remove(folder: RunFolder) -> None:
        """The run is over: nothing is to be found."""
        folder.agent.unlink(missing_ok=True)
        folder.secret.unlink(missing_ok=True)
