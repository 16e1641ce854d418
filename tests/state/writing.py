"""Writing checkpoints in tests: any bytes, without a run."""

from __future__ import annotations

from pathlib import Path

from paceline.state.writer import Writer


class Whole:
    """Bytes that need no more copying."""

    def __init__(self, raw: bytes, why_not: str = "") -> None:
        self.memory, self._why_not = memoryview(raw), why_not

    def fill(self) -> None: ...

    def why_not(self) -> str:
        return self._why_not


def body_of(step: int) -> bytes:
    return b"state of step %d" % step


def write(address: str | Path, *steps: int, keep: int = 9) -> list[str]:
    """Checkpoints of these steps, one after the other; what was told."""
    told: list[str] = []
    writer = Writer(str(address), keep, lambda: True, told.append)
    for step in steps:
        writer.write(step, Whole(body_of(step)))
    writer.wait()
    return told
