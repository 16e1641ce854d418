"""The run's secret, in a file that only its user can read. No torch in here."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from paceline.errors import UsageError
from paceline.wires.handshake import SECRET_BYTES


def make(path: Path, known: bytes = b"") -> bytes:
    """A fresh one, or the one that is known, written there; a file that is there already is an error."""
    secret = known or secrets.token_bytes(SECRET_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:
        os.fchmod(fd, 0o600)  # whatever the umask said
        file.write(secret.hex() + "\n")
    return secret


def read(path: Path) -> bytes:
    """The secret of a run; one that others can read is none."""
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(4 * SECRET_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read the run's secret {path}: {error.strerror}") from None
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(f"the run's secret {path} is open to others: chmod 600 it, and start the run anew")
    return parse(text, str(path))


def parse(text: str, where: str) -> bytes:
    """A secret as it is written down."""
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise UsageError(f"{where} holds no secret of a run ({SECRET_BYTES} bytes in hex)")
    return secret
