"""`run.kv`: named tensors at the run's servers, for algorithms of one's own.

Calls about one fragment of keys are said one after the other, the next when the last one was answered; those of different
fragments go side by side, from a few threads. So a worker reads what it has written, and a call whose server is lost can
simply be said again to whoever has taken over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
from torch.autograd.graph import increment_version

from paceline.errors import UsageError, a_kind
from paceline.servers.calling import RefusedError, Reply
from paceline.servers.holders import NOWHERE, Directory
from paceline.servers.keys_messages import FRAGMENTS, Names, Pulls, Pushes, fragment_of
from paceline.servers.kv import DTYPES, Pull, Push, Pushed, Versioned, dtype_name
from paceline.servers.lines import Server, before_redial, moved
from paceline.servers.messages import Asked
from paceline.tensors.channel import LARGEST_BODY, memory_of

_THREADS, _ASKING = 4, 16


class Pending(Future[Versioned]):
    """What will come of a call. An error that nobody has looked at is raised by the next `wait` for everything."""

    seen = False

    def result(self, timeout: float | None = None) -> Versioned:
        self.seen = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.seen = True
        return super().exception(timeout)


@dataclass(eq=False)
class _Call:
    message: Push | Pull
    body: Sequence[memoryview] = ()
    into: torch.Tensor | None = None
    lent: torch.Tensor | None = None
    """What the body is the memory of, if that is the script's."""
    pending: Pending = field(default_factory=Pending)

    def __post_init__(self) -> None:
        self.pending.set_running_or_notify_cancel()
        self._version = self.lent._version if self.lent is not None else 0

    @property
    def memory(self) -> memoryview | None:
        """Where the answer's bytes go, where they can go straight there."""
        if self.into is None or self.into.device.type != "cpu" or not self.into.is_contiguous():
            return None
        return memory_of(self.into)

    def result(self, reply: Reply) -> Versioned:
        key, message = self.message.key, reply.message
        if self.lent is not None and self.lent._version != self._version:
            raise UsageError(
                f"{key} was changed while it was being pushed, and what the servers have of it may be neither: call "
                "run.kv.wait() first, or push a clone"
            )
        if isinstance(message, Pushed):
            return Versioned(message.version, None)
        if self.into is None:
            found = torch.empty(message.shape, dtype=DTYPES[message.dtype])
            if found.numel():
                found = torch.frombuffer(reply.body, dtype=found.dtype).view(message.shape)
            return Versioned(message.version, found)
        if (dtype_name(self.into), tuple(self.into.shape)) != (message.dtype, message.shape):
            raise UsageError(
                f"{key} is {message.dtype} of shape {message.shape}, and cannot go into {dtype_name(self.into)} of "
                f"{tuple(self.into.shape)}"
            )
        if self.memory is None:
            came = torch.frombuffer(reply.body, dtype=self.into.dtype) if self.into.numel() else torch.empty(0)
            self.into.detach().copy_(came.view(message.shape))
        else:
            increment_version(self.into)  # else autograd would not see it
        return Versioned(message.version, self.into)


@dataclass
class _Lane:
    """The calls about one fragment."""

    waiting: deque[_Call] = field(default_factory=deque)
    pushed: int = 0
    """Pushes of this worker that were answered."""


class KeyValues:
    """`worker` is this worker's number in the run; `meet` returns when all workers that live have called it."""

    def __init__(self, directory: Directory, worker: int, meet: Callable[[], None]) -> None:
        self._directory, self._worker, self._meet = directory, worker, meet
        self._lanes = [_Lane() for _ in range(FRAGMENTS)]
        self._ready: SimpleQueue[int | None] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards the lanes, the open calls and the servers."""
        self._open: set[Pending] = set()
        """Under way; or failed, and nobody has looked."""
        self._servers: dict[int, Server] = {}
        self._refreshing = threading.Lock()
        self._layout = NOWHERE
        directory.size([1] * FRAGMENTS)
        self._refresh(0)
        self._threads = [
            threading.Thread(target=self._work, name="paceline-keys", daemon=True) for _ in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    # what a script says

    def push(self, key: str, tensor: torch.Tensor, combine: str = "sum", *, rate: float | None = None) -> Pending:
        """Combine the tensor with the key's at its server: `assign` (which makes a key), `sum`, `max`, `min`, `sgd` or
        `blend`. The tensor is not copied: leave it as it is until this is done. It makes a new version."""
        return self._push(key, tensor, combine, rate, None, pull=False)

    def pull(self, key: str, into: torch.Tensor | None = None, *, if_newer_than: int | None = None) -> Pending:
        """One version of a key, whole, in new memory or in a tensor that is given. With `if_newer_than`, no tensor at all
        if there is none."""
        _check(key, into)
        message = Pull(key, 0 if if_newer_than is None else if_newer_than)
        return self._submit(_Call(message, into=into))

    def push_pull(
        self,
        key: str,
        tensor: torch.Tensor,
        combine: str = "sum",
        into: torch.Tensor | None = None,
        *,
        rate: float | None = None,
    ) -> Pending:
        """Push, and get what came of it."""
        return self._push(key, tensor, combine, rate, into, pull=True)

    def wait(self, *pending: Pending) -> list[Versioned]:
        """What came of these, in their order. Without any: return when all calls of this worker are done, which are not
        listed then. Raises the first error."""
        with self._lock:
            self._open = {each for each in self._open if not (each.done() and each.seen)}
            waited = pending or tuple(self._open)
        for each in waited:
            each.exception()
        results = [each.result() for each in waited]
        return results if pending else []

    def barrier(self) -> None:
        """Return when all calls of this worker are done, and all other workers that live have come here too. What any of
        them pushed before, all find behind it."""
        self.wait()
        self._meet()

    # all of it

    def state_dict(self) -> dict[str, Any]:
        """All keys, as they are one after the other: nobody should push meanwhile."""
        self.wait()
        with ThreadPoolExecutor(_ASKING) as pool:
            names = [name for found in pool.map(self._names, range(FRAGMENTS)) for name in found]
        found = self.wait(*[self.pull(name) for name in names]) if names else []
        return {name: [version, tensor] for name, (version, tensor) in zip(names, found, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Every key as it was, and its version at least. Of one worker, for all. Other keys stay."""
        calls = []
        for key, (version, tensor) in state.items():
            body, _ = _host(key, tensor)
            push = Push(key, dtype_name(tensor), tuple(tensor.shape), "assign", at_least=version)
            calls.append(self._submit(_Call(push, (memory_of(body),))))
        self.wait(*calls)

    def _names(self, fragment: int) -> Iterable[str]:
        reply = self._through(fragment, Names([fragment]), (), None)
        return msgspec.msgpack.decode(reply.body, type=list[str])

    def close(self) -> None:
        """When everything is done."""
        try:
            self.wait()
        finally:
            for _ in self._threads:
                self._ready.put(None)
            for thread in self._threads:
                thread.join()
            for server in self._servers.values():
                server.close()

    # calls

    def _push(
        self, key: str, tensor: torch.Tensor, combine: str, rate: float | None, into: torch.Tensor | None, pull: bool
    ) -> Pending:
        host, lent = _host(key, tensor)
        if lent is not None and into is not None and into.data_ptr() == host.data_ptr():
            host, lent = host.clone(), None  # it may have to be said again, when half of the answer is in it
        _check(key, into)
        push = Push(key, dtype_name(host), tuple(host.shape), combine, pull, _number(key, rate))
        return self._submit(_Call(push, (memory_of(host),), into, lent))

    def _submit(self, call: _Call) -> Pending:
        fragment = fragment_of(call.message.key)
        with self._lock:
            self._open.add(call.pending)
            lane = self._lanes[fragment]
            lane.waiting.append(call)
            if len(lane.waiting) == 1:
                self._ready.put(fragment)
        return call.pending

    def _work(self) -> None:
        while (fragment := self._ready.get()) is not None:
            lane = self._lanes[fragment]
            call = lane.waiting[0]
            try:
                result = call.result(self._said(fragment, lane, call))
            except BaseException as error:  # noqa: BLE001  whoever waits for it is to have it
                call.pending.set_exception(error)
            else:
                with self._lock:
                    self._open.discard(call.pending)
                call.pending.set_result(result)
            with self._lock:
                lane.waiting.popleft()
                if lane.waiting:
                    self._ready.put(fragment)
            del call

    def _said(self, fragment: int, lane: _Lane, call: _Call) -> Reply:
        if isinstance(call.message, Pull):
            return self._through(fragment, Pulls([fragment], call.message), (), call.memory)
        pushes = Pushes([fragment], self._worker, lane.pushed + 1, call.message)
        reply = self._through(fragment, pushes, call.body, call.memory)
        lane.pushed += 1  # one that was refused is not counted there either
        return reply

    def _through(
        self, fragment: int, message: msgspec.Struct, body: Sequence[memoryview], into: memoryview | None
    ) -> Reply:
        """Said to the fragment's primary, and to the next one, until it is answered."""
        while True:
            layout = self._layout
            number, server = layout.holders[fragment][0], None
            try:
                server = self._server(number, layout.addresses[number])
                line = server.out if isinstance(message, Pushes) else server.back
                reply = line.call(Asked(layout.number, message), *body, into=into).result()  # type: ignore[arg-type]
                if not moved(reply):
                    return reply
            except RefusedError as error:
                raise UsageError(str(error)) from None
            except OSError:
                if server is not None:
                    self._hang_up(number, server)
                    before_redial()
                    continue
            self._refresh(layout.number)

    def _server(self, number: int, address: str) -> Server:
        with self._lock:
            found = self._servers.get(number)
        if found is None:
            made = self._directory.dial(address)  # not under the lock: it may take long
            with self._lock:
                found = self._servers.setdefault(number, made)
            if found is not made:
                made.close()  # another thread was faster
        return found

    def _hang_up(self, number: int, server: Server) -> None:
        with self._lock:
            if self._servers.get(number) is server:
                del self._servers[number]
        server.close()  # nothing that is still on its way may be written over what comes next

    def _refresh(self, after: int) -> None:
        """The layout that follows this one."""
        with self._refreshing:
            if self._layout.number <= after:
                self._layout = self._directory.layout(after)


def _check(key: str, tensor: torch.Tensor | None) -> None:
    if not isinstance(key, str):
        raise UsageError(f"a key is a string, and {key!r} is {a_kind(key)}")
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{key}: this is no tensor, but {a_kind(tensor)}")
    if tensor.dtype not in DTYPES.values() or tensor.layout != torch.strided:
        raise UsageError(f"{key} is {tensor.layout} of {tensor.dtype}; keys are dense tensors of {', '.join(DTYPES)}")
    if tensor.nbytes > LARGEST_BODY:
        raise UsageError(f"{key} has {tensor.nbytes} bytes, and a key at most {LARGEST_BODY}: push it in parts")


def _host(key: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor's values on the host in one piece; and the tensor itself, if these are its own memory."""
    _check(key, tensor)
    host = tensor.detach().cpu().contiguous()
    own = host.data_ptr() == tensor.data_ptr() and not tensor.is_inference()
    return host, tensor if own else None


def _number(key: str, rate: Any) -> float | None:
    """A tensor's or numpy's number is one too."""
    try:
        return None if rate is None else float(rate)
    except (TypeError, ValueError):
        raise UsageError(f"run.kv: the rate of a push to {key!r} is a number, unlike {rate!r}") from None
