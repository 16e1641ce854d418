"""Lines of text: following log files, folding what several workers say alike, columns. No clock inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.wires.telling import LAST_WORDS, LAST_WORDS_END


class Unsaid:
    """What a terminal shows of a worker's log: without what the leader was told, which may begin behind an unfinished line.

    >>> unsaid = Unsaid()
    >>> [unsaid.of(line) for line in ("said\\n", f" 50%|##{LAST_WORDS}\\n", "ValueError\\n", f"{LAST_WORDS_END}\\n", "more\\n")]
    ['said\\n', ' 50%|##', '', '', 'more\\n']
    """

    def __init__(self) -> None:
        self._told = False

    def of(self, line: str) -> str:
        if line.rstrip() == LAST_WORDS_END:  # also one whose beginning was before this terminal's
            self._told = False
            return ""
        if self._told:
            return ""
        before, mark, _ = line.partition(LAST_WORDS)
        self._told = bool(mark)
        return before


class Follower:
    """New text of a file that another process writes; lines are given whole, or as far as a \\r."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at, self._rest = 0, b""

    def read(self, last: bool = False) -> list[str]:
        """Complete lines since the last call; with `last`, an unfinished one too. Ends are kept."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at += len(data)
        text = self._rest + data
        cut = len(text) if last else max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[cut:]
        done = text[:cut].decode("utf-8", "replace")
        return _split_keeping_ends(done)


def _split_keeping_ends(text: str) -> list[str]:
    lines, start = [], 0
    for index, character in enumerate(text):
        if character in "\n\r":
            lines.append(text[start : index + 1])
            start = index + 1
    if start < len(text):
        lines.append(text[start:])
    return lines


@dataclass
class _Held:
    first_seen: float
    counts: dict[int, int] = field(default_factory=dict)


class Fold:
    """Holds a line back for a moment: whoever says the same meanwhile is counted, not printed."""

    def __init__(self, hold_s: float = 0.3) -> None:
        self._hold_s = hold_s
        self._held: dict[str, _Held] = {}

    def add(self, worker: int, line: str, now: float) -> None:
        held = self._held.setdefault(line, _Held(now))
        held.counts[worker] = held.counts.get(worker, 0) + 1

    def due(self, now: float, all: bool = False) -> list[tuple[str, str]]:
        """(who, line) of what has been held long enough, in the order it came."""
        ready = [line for line, held in self._held.items() if all or now - held.first_seen >= self._hold_s]
        return [self._spoken(line, self._held.pop(line)) for line in ready]

    def _spoken(self, line: str, held: _Held) -> tuple[str, str]:
        workers = sorted(held.counts)
        times = sum(held.counts.values())
        text = line.rstrip("\n") + (f"  (×{times})" if times > 1 else "")
        return compact(workers), text


def compact(workers: list[int]) -> str:
    """[0, 1, 2, 5] → '0-2,5'"""
    parts: list[list[int]] = []
    for worker in workers:
        if parts and worker == parts[-1][1] + 1:
            parts[-1][1] = worker
        else:
            parts.append([worker, worker])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of words as lines with straight columns; the last column may be as long as it likes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def shortened(text: str, width: int) -> str:
    """
    >>> shortened("worker 1 was killed", 12)
    'worker 1 wa…'
    """
    return text if len(text) <= width else text[: width - 1] + "…"
