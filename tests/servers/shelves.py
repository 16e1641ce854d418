"""Servers of one process: real shelves, lines that can be cut, and a coordinator whose words come late.

What happens when is drawn from a seed: layouts reach each server at any time, or not at all before the next one does;
servers are killed, or given up on and killed later; lines between servers break; words of primaries cross all that.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from paceline.cluster.answering import _placed
from paceline.cluster.fleet import Address, Fleet
from paceline.servers.calling import RefusedError, Reply
from paceline.servers.copying import Copying
from paceline.servers.lines import Server
from paceline.servers.messages import Call, Drawing, Outline
from paceline.servers.serving import Answer
from paceline.servers.shelf import Shelf
from paceline.wires.messages import Placed
from tests.cluster.test_fleet import written_and_read

PATIENCE_S = 20
_IDLE_S = 0.002
_CALLS = msgspec.msgpack.Decoder(Call)
Told = tuple[Any, bytes, memoryview | None, "Future[Reply]"]


class CutLine:
    """Calls are answered in order by a thread of its own, until it is cut."""

    def __init__(self, shelf: Copying[Any], moved: Callable[[], None]) -> None:
        self._shelf, self._moved = shelf, moved
        self._calls: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[Future[Reply]] = set()
        self._cut = False
        self.thread = threading.Thread(target=self._answer, daemon=True)
        self.thread.start()

    @property
    def over(self) -> bool:
        return self._cut

    def call(self, message: Any, *body: memoryview, into: memoryview | None = None) -> Future[Reply]:
        future: Future[Reply] = Future()
        self._moved()
        with self._lock:
            if self._cut:
                future.set_exception(ConnectionError("the line is cut"))
            else:
                self._waiting.add(future)
                self._calls.put((msgspec.msgpack.encode(message), b"".join(body), into, future))
        return future

    def _answer(self) -> None:
        while (call := self._calls.get()) is not None:
            head, body, into, future = call
            try:
                answer = Answer(*self._shelf.handle(_CALLS.decode(head), memoryview(bytearray(body))))
                self._end(future, answer.message, bytearray().join(answer.buffers), into)
                if answer.sent is not None:
                    answer.sent()
            except ValueError as error:
                self._end(future, RefusedError(str(error)))
            except Exception as error:  # noqa: BLE001  the caller raises it
                self._end(future, error)

    def _end(
        self, future: Future[Reply], answer: Any, raw: bytes | bytearray = b"", into: memoryview | None = None
    ) -> None:
        with self._lock:
            if future not in self._waiting:
                return
            self._waiting.discard(future)
            if isinstance(answer, Exception):
                future.set_exception(answer)
                return
            if into is not None and len(raw) == len(into):
                into[:] = raw
            future.set_result(Reply(answer, memoryview(raw)))

    def close(self) -> None:
        with self._lock:
            self._cut = True
            for future in self._waiting:
                future.set_exception(ConnectionError("the line is cut"))
            self._waiting.clear()
        self._calls.put(None)


class World:
    """Also the directory of each worker."""

    def __init__(
        self, seed: int, servers: int, replicas: int, deaths: int, new_shelf: Callable[..., Copying[Any]] = Shelf
    ) -> None:
        self._dice, self._deaths, self._new_shelf = random.Random(seed), deaths, new_shelf
        self.fleet, self._changed = Fleet(servers, replicas), threading.Condition()
        self.shelves: dict[int, Copying[Any]] = {}
        self._knows: dict[int, int] = {}
        """The layout that each server has."""
        self._lines: list[tuple[int, int, CutLine]] = []
        self._dialling = threading.Lock()
        """Held while a line is made: nobody is buried meanwhile, or that line would never be cut."""
        self._filling: list[threading.Thread] = []
        self._news: list[tuple[int, dict[int, int]]] = []
        self._given_up: list[int] = []
        self._moments = threading.Semaphore(0)
        self.log: list[str] = []
        for _ in range(servers):
            self._start()

    # what workers see

    def size(self, nbytes: list[int]) -> None:
        with self._changed:
            self.fleet.sized(nbytes)
            self._changed.notify_all()

    def layout(self, after: int) -> Placed:
        with self._changed:
            assert self._changed.wait_for(lambda: self.fleet.number > after, PATIENCE_S), "no layout comes"
            return self._now()

    def dial(self, address: str) -> Server:
        return Server(self._line(-1, address), self._line(-1, address))

    # servers

    def _now(self) -> Placed:
        """As it goes over the wire."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(_placed(self.fleet, 0)), type=Placed)

    def _start(self) -> None:
        number = len(self._knows)

        def told(server: int, since: dict[int, int]) -> None:
            self._news.append((server, since))
            self._moments.release()

        shelf = self._new_shelf(number, lambda address: self._line(number, address), told)
        self.shelves[number], self._knows[number] = shelf, 0
        thread = threading.Thread(target=self._keep_filling, args=(number,), daemon=True)
        self._filling.append(thread)
        thread.start()
        with self._changed:
            self.fleet.came(number, Address(str(number)))
            self._changed.notify_all()

    def _keep_filling(self, number: int) -> None:
        layout = 0
        while (shelf := self.shelves.get(number)) is not None:
            layout = shelf.fill(layout)

    def _line(self, caller: int, address: str) -> CutLine:
        server = int(address)
        with self._dialling:
            if server not in self.shelves or (caller >= 0 and caller not in self.shelves):
                raise ConnectionError(f"server {server} is gone")
            line = CutLine(self.shelves[server], self._moments.release)
            self._lines.append((caller, server, line))
        return line

    def _bury(self, server: int) -> None:
        """Its process has ended: lines are cut, and whoever waits in it is released."""
        with self._dialling:
            shelf = self.shelves.pop(server)
            cut = [line for caller, to, line in self._lines if server in (caller, to)]
        for line in cut:
            line.close()
        count = len(self.fleet.nbytes)
        shelf.rearrange(Placed(1 << 30, [[-1]] * count, [[1]] * count, [[]] * count, {}))
        if isinstance(shelf, Shelf):  # behind that: it holds nothing by then that is not in the drawing
            shelf.handle(Outline(), memoryview(msgspec.msgpack.encode(Drawing([], [], []))))

    # what happens

    def live(self, workers: list[threading.Thread]) -> None:
        """Until all workers are done."""
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            self._moments.acquire(timeout=_IDLE_S)
            self._happen()

    def _happen(self) -> None:
        """Mostly news; now and then something worse."""
        if self._dice.random() < 0.02 and self._deaths:
            self._lose_one()
        if self._dice.random() < 0.02:
            self._break_a_line()
        if self._given_up and self._dice.random() < 0.05:
            self._bury(self._given_up.pop())
        if self._dice.random() < 0.3:
            self._deliver(self._dice.choice(list(self.shelves)))
        if self._news and self._dice.random() < 0.2:
            self._hear(self._dice.randrange(len(self._news)))

    def _lose_one(self) -> None:
        """One that the run survives."""
        here = [server for server in self.shelves if server in self.fleet.addresses]
        with self._changed:
            victim = self._dice.choice(here)
            if self.fleet.placement is None or not written_and_read(self.fleet).died(victim):
                return
            self._deaths -= 1
            later = self._dice.random() < 0.5
            if not later:
                self._bury(victim)
            assert self.fleet.died(victim)
            if later:
                self._given_up.append(victim)
            self._changed.notify_all()
        self.log.append(f"server {victim} is {'given up' if later else 'killed'} at layout {self.fleet.number}")
        self._start()

    def _break_a_line(self) -> None:
        """By itself: both sides live on, and no layout comes of it."""
        whole = [line for _, _, line in self._lines if not line.over]
        if whole:
            self._dice.choice(whole).close()
            self.log.append(f"a line breaks at layout {self.fleet.number}")

    def _deliver(self, server: int) -> None:
        with self._changed:
            if self.fleet.number == self._knows.get(server, 0) or server not in self.fleet.addresses:
                return
            layout = self._now()
        self._knows[server] = layout.number
        self.shelves[server].rearrange(layout)

    def _hear(self, which: int) -> None:
        with self._changed:
            self.fleet.filled(*self._news.pop(which))
            self._changed.notify_all()

    def settle(self) -> None:
        """Everything that is said is heard, until nothing changes any more."""
        while True:
            for server in list(self.shelves):
                self._deliver(server)
            heard = bool(self._news)
            while self._news:
                self._hear(0)
            assert self.fleet.placement is not None
            if self.fleet.placement.settled and all(self._knows[s] == self.fleet.number for s in self.fleet.addresses):
                return
            assert heard or self._moments.acquire(timeout=PATIENCE_S) or self._news, f"it never settles: {self.fleet}"

    def close(self) -> None:
        for server in list(self.shelves):
            self._bury(server)
        for _, _, line in self._lines:
            line.close()
        for thread in [*self._filling, *(line.thread for _, _, line in self._lines)]:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a server's thread hangs"
