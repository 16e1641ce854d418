"""Where the processes of a run find each other: its address, its secret, its store. No torch in here."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.handshake import SECRET_BYTES
from paceline.cluster.store import Store, runtime_folder
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
        unique = secrets.token_hex(8)
        place = Rendezvous(
            f"paceline-{folder.id}-{unique}",
            secrets.token_bytes(SECRET_BYTES),
            runtime_folder() / f"paceline-{folder.id}-{unique}.db",
        )
        Store.create(place.store).close()
        folder.secret.unlink(missing_ok=True)
        with open(os.open(folder.secret, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(place.secret.hex())
        folder.write_json(folder.agent, {"address": place.address, "store": str(place.store)})
        return place

    @staticmethod
    def of(folder: RunFolder) -> Rendezvous:
        known = folder.read_json(folder.agent)
        try:
            secret = bytes.fromhex(folder.secret.read_text())
        except (OSError, ValueError):
            known = {}
        if not known:
            raise UsageError(f"run {folder.id!r} is not running: `paceline runs` lists what there is")
        return Rendezvous(known["address"], secret, Path(known["store"]))

    @staticmethod
    def remove(folder: RunFolder) -> None:
        """The run is over: nothing is to be found."""
        folder.agent.unlink(missing_ok=True)
        folder.secret.unlink(missing_ok=True)
