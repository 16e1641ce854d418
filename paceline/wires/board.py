"""The board: a page of shared memory on which each worker writes where it is.

The agent reads it to draw progress and to say on whom a run waits; workers read its abort word in
every waiting loop, so that one machine's processes stop together. It is created as a memfd and
passed by descriptor: nothing of it can be left behind. No torch in here.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass

_WORDS = 64  # 64-bit words in the header and in each row: whole cache lines, so writers never share one
_PLACE_AT, _PLACE_BYTES = 32, 256  # the second half of a row is text


class Abort(enum.IntEnum):
    """Why every waiting loop of this machine must end."""

    NONE = 0
    WORKER_LOST = 1
    STOPPING = 2


class Stop(enum.IntEnum):
    """Who has asked from outside that the run stop after its step."""

    NONE = 0
    CTRL_C = 1
    COMMAND = 2
    SIGTERM = 3

    @property
    def words(self) -> str:
        return ("", "interrupted (Ctrl-C)", "stopped by `paceline stop`", "told to end (SIGTERM)")[self]

    @property
    def exit_code(self) -> int:
        """Of a run that has stopped for it; a stop that was asked for by a command is a success."""
        return (0, 130, 0, 143)[self]


class Phase(enum.IntEnum):
    """What a worker is doing, in words that fit behind «worker 2 is …»."""

    STARTING = 0
    WAITING_FOR_MAIN = 1
    SCRIPT = 2
    DATA = 3
    COMPUTE = 4
    REDUCE = 5
    EVALUATE = 6
    FINISHED = 7
    FAILED = 8
    JOINING = 9
    LEFT = 10
    REFILL = 11

    @property
    def words(self) -> str:
        return _PHASE_WORDS[self]


_PHASE_WORDS = {
    Phase.STARTING: "starting",
    Phase.WAITING_FOR_MAIN: "waiting for worker 0 to reach prepare()",
    Phase.SCRIPT: "running the script outside a step",
    Phase.DATA: "loading data",
    Phase.COMPUTE: "computing",
    Phase.REDUCE: "waiting for the others",
    Phase.EVALUATE: "evaluating",
    Phase.FINISHED: "finished",
    Phase.FAILED: "failed",
    Phase.JOINING: "joining",
    Phase.LEFT: "gone, as it was asked to",
    Phase.REFILL: "waiting for a worker in place of a lost one",
}

_PID, _PHASE, _SINCE, _STEP, _EPOCH, _TOTAL, _SAMPLES, _METRIC, _WAITS_FOR, _GONE, _LEAVES, _EXIT, _SLOW, _TERM = range(
    14
)
_CALLS, _RECEIVED, _SENT, _CPU = range(14, 18)
"""Of a server."""
_ABORT, _MAIN_READY, _STOP, _NEXT_TERM, _LEADER, _BEAT, _REACH, _LED, _OVERTAKEN, _REACH_WITH_ROOM = range(10)
_OF_AGENT = (_GONE, _SLOW)
"""Words of a row that its machine's agent writes."""


@dataclass(frozen=True)
class Seen:
    """One worker's row, read at one moment."""

    worker: int
    pid: int
    phase: Phase
    since_s: float
    step: int
    epoch: int
    total_steps: int
    samples: int
    metric: float
    place: str
    waits_for: int | None
    """The worker it has been waiting for, once that has lasted a second."""


@dataclass(frozen=True)
class Load:
    """What a server has done so far."""

    calls: int
    received: int
    sent: int
    """Bytes, counted where they are moved."""
    cpu_s: float


class Board:
    """Rows of plain words, one row a worker. Only worker k writes row k; only the leading agent the header
    and the words that say a worker is gone or should be slow."""

    def __init__(self, fd: int, workers: int) -> None:
        self.fd, self.workers = fd, workers
        self._map = mmap.mmap(fd, self.size_for(workers))
        self._words = memoryview(self._map).cast("q")

    @staticmethod
    def size_for(workers: int) -> int:
        return _WORDS * 8 * (1 + workers)

    @classmethod
    def create(cls, workers: int) -> Board:
        fd = os.memfd_create("paceline-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.size_for(workers))
        return cls(fd, workers)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.fd)

    # the header: written by the agent (and `main_ready` by worker 0)

    @property
    def abort(self) -> Abort:
        return Abort(self._words[_ABORT])

    @abort.setter
    def abort(self, value: Abort) -> None:
        self._words[_ABORT] = int(value)

    @property
    def main_ready(self) -> bool:
        return bool(self._words[_MAIN_READY])

    @main_ready.setter
    def main_ready(self, value: bool) -> None:
        self._words[_MAIN_READY] = int(value)

    @property
    def stop(self) -> Stop:
        """A clean stop that was asked for."""
        asked = self._words[_STOP]
        return Stop(asked) if asked else Stop.NONE  # an enum's call costs more than all else here

    @stop.setter
    def stop(self, value: Stop) -> None:
        self._words[_STOP] = int(value)

    @property
    def next_term(self) -> int:
        """The term of a view that someone waits to join; 0: none."""
        return self._words[_NEXT_TERM]

    @next_term.setter
    def next_term(self, term: int) -> None:
        self._words[_NEXT_TERM] = term

    @property
    def overtaken(self) -> int:
        """The newest term that followed a death: all older ones are over. 0: nobody has died."""
        return self._words[_OVERTAKEN]

    @overtaken.setter
    def overtaken(self, term: int) -> None:
        self._words[_OVERTAKEN] = term

    @property
    def reach(self) -> int:
        """How many workers there will be once everybody has come who may still come."""
        return self._words[_REACH]

    @reach.setter
    def reach(self, workers: int) -> None:
        self._words[_REACH] = workers

    @property
    def reach_with_room(self) -> int:
        """The same, should a machine come that has places for them."""
        return self._words[_REACH_WITH_ROOM]

    @reach_with_room.setter
    def reach_with_room(self, workers: int) -> None:
        self._words[_REACH_WITH_ROOM] = workers

    @property
    def leader(self) -> int:
        """The fence of the agent that speaks for this machine; on one machine it leads the run."""
        return self._words[_LEADER]

    @leader.setter
    def leader(self, fence: int) -> None:
        self._words[_LEADER] = fence

    def beat(self) -> None:
        """This machine's agent is alive and not frozen."""
        self._words[_BEAT] = time.monotonic_ns()

    @property
    def silence_s(self) -> float:
        """How long this machine's agent has said nothing; 0 before the first word."""
        return self._since(_BEAT)

    def led(self) -> None:
        """The run has a coordinator, here or on another machine."""
        self._words[_LED] = time.monotonic_ns()

    @property
    def unled_s(self) -> float:
        """How long nothing was heard of a coordinator; 0 before the first word."""
        return self._since(_LED)

    def _since(self, word: int) -> float:
        then = self._words[word]
        return (time.monotonic_ns() - then) / 1e9 if then else 0.0

    # the rows

    def leaves(self, worker: int) -> bool:
        """Whether this worker has asked to go (SIGTERM)."""
        return bool(self._words[_WORDS * (1 + worker) + _LEAVES])

    def exit_code(self, worker: int) -> int | None:
        """The exit code that this worker wrote down as it left, if it came to that."""
        code = self._words[_WORDS * (1 + worker) + _EXIT]
        return code - 1 if code else None

    def finished_in(self, worker: int) -> int:
        """The term in which this worker has come to the script's end."""
        return self._words[_WORDS * (1 + worker) + _TERM]

    def load(self, server: int) -> Load:
        """Of the server whose row this is."""
        base = _WORDS * (1 + server)
        calls, received, sent, cpu_ns = self._words[base + _CALLS : base + _CPU + 1].tolist()
        return Load(calls, received, sent, cpu_ns / 1e9)

    def slow(self, worker: int) -> float:
        """How many times as long this worker should take: a fault on purpose. 1: as fast as it can."""
        return self._words[_WORDS * (1 + worker) + _SLOW] / 1000 or 1.0

    def slow_down(self, worker: int, factor: float) -> None:
        self._words[_WORDS * (1 + worker) + _SLOW] = round(factor * 1000)

    def gone(self, worker: int) -> bool:
        """Whether this worker is dead and reaped; the agent says so."""
        return bool(self._words[_WORDS * (1 + worker) + _GONE])

    @property
    def lost(self) -> list[int]:
        """All who are."""
        marks = self._words[_WORDS + _GONE :: _WORDS].tolist()
        return [worker for worker, gone in enumerate(marks[: self.workers]) if gone]

    def bury(self, worker: int) -> None:
        self._words[_WORDS * (1 + worker) + _GONE] = 1

    def row_bytes(self, worker: int) -> bytes:
        """A row for another machine's board."""
        base = _WORDS * (1 + worker)
        words = self._words[base : base + _WORDS].tolist()
        words[_SINCE] = time.monotonic_ns() - words[_SINCE] if words[_SINCE] else 0  # clocks differ
        return struct.pack(f"{_WORDS}q", *words)

    def copy_row(self, worker: int, raw: bytes) -> None:
        """A row of another machine's board; ValueError if it is none."""
        if len(raw) != _WORDS * 8 or not 0 <= worker < self.workers:
            raise ValueError(f"{len(raw)} bytes are no row of worker {worker}")
        words = struct.unpack(f"{_WORDS}q", raw)
        Phase(words[_PHASE])
        base = _WORDS * (1 + worker)
        for at, word in enumerate(words):
            if at not in _OF_AGENT:
                self._words[base + at] = word
        if words[_SINCE]:
            self._words[base + _SINCE] = time.monotonic_ns() - words[_SINCE]

    def row(self, worker: int) -> Row:
        return Row(self, worker)

    def see(self, worker: int) -> Seen:
        base = _WORDS * (1 + worker)
        words = self._words[base : base + 9].tolist()
        text_at = (base + _PLACE_AT) * 8
        text = self._map[text_at : text_at + _PLACE_BYTES].split(b"\0", 1)[0].decode("utf-8", "replace")
        since = (time.monotonic_ns() - words[_SINCE]) / 1e9 if words[_SINCE] else 0.0
        return Seen(
            worker=worker,
            pid=words[_PID],
            phase=Phase(words[_PHASE]),
            since_s=since,
            step=words[_STEP],
            epoch=words[_EPOCH],
            total_steps=words[_TOTAL],
            samples=words[_SAMPLES],
            metric=struct.unpack("d", struct.pack("q", words[_METRIC]))[0],
            place=text,
            waits_for=words[_WAITS_FOR] - 1 if words[_WAITS_FOR] else None,
        )


class Row:
    """The row that one worker writes. Each write is one store of 64 bits (about 50 ns)."""

    def __init__(self, board: Board, worker: int) -> None:
        base = _WORDS * (1 + worker)
        self._words = board._words[base : base + _WORDS]
        self._map, self._text_at = board._map, (base + _PLACE_AT) * 8

    def enter(self, phase: Phase) -> None:
        words = self._words
        words[_PHASE] = phase
        words[_SINCE] = time.monotonic_ns()
        words[_WAITS_FOR] = 0

    def waits_for(self, worker: int) -> None:
        self._words[_WAITS_FOR] = worker + 1

    def wishes_to_leave(self) -> None:
        self._words[_LEAVES] = 1

    def finishes(self, term: int) -> None:
        """The script's end, in this term."""
        self._words[_TERM] = term
        self.enter(Phase.FINISHED)

    def exits(self, code: int) -> None:
        self._words[_EXIT] = code + 1

    def progress(self, step: int, epoch: int, samples: int) -> None:
        words = self._words
        words[_STEP], words[_EPOCH], words[_SAMPLES] = step, epoch, samples

    def describe(self, *, pid: int | None = None, total_steps: int | None = None) -> None:
        if pid is not None:
            self._words[_PID] = pid
        if total_steps is not None:
            self._words[_TOTAL] = total_steps

    def metric(self, value: float) -> None:
        self._words[_METRIC] = struct.unpack("q", struct.pack("d", value))[0]

    def served(self, calls: int, received: int, sent: int) -> None:
        """By a server, so far."""
        words = self._words
        words[_CALLS], words[_RECEIVED], words[_SENT] = calls, received, sent

    def computed(self, cpu_ns: int) -> None:
        self._words[_CPU] = cpu_ns

    def place(self, text: str) -> None:
        """Where in the script this worker is: written on the slow paths only."""
        raw = text.encode()[: _PLACE_BYTES - 1] + b"\0"
        self._map[self._text_at : self._text_at + len(raw)] = raw

    def leave_place(self) -> None:
        self._map[self._text_at] = 0

    def release(self) -> None:
        self._words.release()
