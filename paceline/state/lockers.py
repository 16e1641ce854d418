"""Where a replica leaves its state while it trains apart from the others: in shared memory, which outlives its worker.

A slot's locker has room for two states: the newer one counts once it is whole. It belongs to one process at a time: by a
lock on its descriptor, which the kernel takes back the moment that process is dead. A POSIX lock, since children (a
loader's processes) would go on holding any other one.

On several machines each has a locker of every slot: the replica's own, where it trains, and on another one the copy of
it (`copies`), which belongs to whoever takes it in while it comes.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable

from paceline.tensors.segment import Segment
from paceline.tensors.snapshot import Snapshot

_HEAD = 4096
_GENERATION, _ROOM, _SIDE, _ROUND, _SIZE = _ENTRY = range(5)
_SPARE = 1 << 16


class Locker:
    def __init__(self, slot: int, segment: Callable[[str, int], int]) -> None:
        """`segment` gives the descriptor of shared memory by name, and makes it if there is none."""
        self._slot, self._segment = slot, segment
        fd = segment(self._name(0), _HEAD)
        # A description of its own, which stays open: to close any other one of the same memory would give up the lock.
        self._lock = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        words = Segment(fd, _HEAD).words(0, 1 + 2 * len(_ENTRY))
        self._current, self._entries = words[:1], words[1:].reshape(2, len(_ENTRY))
        """Which of two entries counts (0: none does), and what each says of its state."""
        self._memory: tuple[str, Segment] | None = None
        self._next = (0, 0, 0, 0)
        """Of the state that is being put: its generation, room, side and size."""

    def _name(self, generation: int, room: int = 0) -> str:
        """By its size too: whoever had begun to put a first state of its kind may be dead, and it was of another size."""
        return f"replica-{self._slot}/{generation}{f'-{room}' if room else ''}"

    def claim(self) -> bool:
        """Whether this process has it now: nobody else does."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self) -> None:
        fcntl.lockf(self._lock, fcntl.LOCK_UN)

    @property
    def empty(self) -> bool:
        return not self._current[0]

    @property
    def rounds(self) -> int:
        """At whose end the state in it was taken."""
        return int(self._entries[self._current[0] - 1][_ROUND])

    def put(self, rounds: int, state: Snapshot) -> None:
        """Until this is whole, the state before it stands."""
        state.write(self.room_for(state.nbytes))
        self.settle(rounds)

    def room_for(self, nbytes: int) -> memoryview:
        """Where the next state goes, as bytes; it counts once it is settled."""
        generation, room, side = (int(word) for word in self._entries[self._current[0] - 1][:3])
        side = 1 - side
        if nbytes > room:  # of the first state, and once the optimizer has one
            more = max(_SPARE, nbytes // 2) if generation > 1 else _SPARE  # what has grown twice goes on growing
            generation, room, side = generation + 1, nbytes + more, 0
        self._next = generation, room, side, nbytes
        return self._mapped(generation, room).raw(side * room, nbytes)

    def settle(self, rounds: int) -> None:
        """The next state is whole: it was taken at the end of this round."""
        generation, room, side, nbytes = self._next
        other = 1 if self._current[0] == 2 else 2
        self._entries[other - 1] = generation, room, side, rounds, nbytes
        self._current[0] = other  # one word, the last: who is killed before has left the other state

    def look(self) -> memoryview:
        """The state in it, where it lies: it stays until two others have been put."""
        generation, room, side, _, size = (int(word) for word in self._entries[self._current[0] - 1])
        return self._mapped(generation, room).raw(side * room, size)

    def copied(self) -> tuple[int, memoryview]:
        """The same with its round, of a locker whose owner goes on: it may put two states while this one is read."""
        while True:
            mark = int(self._current[0]), self.rounds  # two may be of the same round: by its side too
            state = memoryview(bytearray(self.look()))
            if (int(self._current[0]), self.rounds) == mark:
                return mark[1], state

    def _mapped(self, generation: int, room: int) -> Segment:
        name = self._name(generation, room)
        if self._memory is None or self._memory[0] != name:
            self._memory = name, Segment(self._segment(name, 2 * room), 2 * room)
        return self._memory[1]

    def close(self) -> None:
        os.close(self._lock)


class Lockers:
    """This process's, of all slots. One for each: a second one would give up the first one's lock."""

    def __init__(self, segment: Callable[[str, int], int]) -> None:
        self._segment = segment
        self._guard = threading.Lock()
        self._of: dict[int, Locker] = {}

    def of(self, slot: int) -> Locker:
        with self._guard:
            if slot not in self._of:
                self._of[slot] = Locker(slot, self._segment)
            return self._of[slot]

    def close(self) -> None:
        while self._of:
            self._of.popitem()[1].close()
