"""A little training script, as a worker of the simulated run lives it: the real Terms, Stepper and AllReduce."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.data.receipts import Tally
from paceline.errors import Departed
from paceline.loop.steps import Stepper
from paceline.state.replica import Replica
from paceline.strategies.allreduce import AllReduce
from paceline.tensors.peers import Alone, Peers, TermEnded
from paceline.tensors.snapshot import Snapshot
from paceline.wires.view import View
from paceline.worker.terms import Terms
from tests.several.lines import Inlet, Outlet
from tests.several.mesh import CPU, Mesh
from tests.several.world import Board, World

_FIRST, _EVALUATION, _LAST = 31, 32, 33
_EVALUATED = 5


@dataclass(frozen=True)
class Script:
    """What the script does: as many steps, shares a point (one or two points a step), and the rest."""

    steps: int = 4
    points: tuple[int, ...] = (4,)
    evaluates: bool = False
    sparse: bool = False
    hands_over: bool = False
    """Newcomers get the state where all wait for it, as where parameters are at servers."""
    flat: bool = False
    """Without run.slots(): a share for each worker."""

    @staticmethod
    def drawn(draw: random.Random, fewest: int, most: int) -> Script:
        """Any, of so many steps."""
        return Script(
            steps=draw.randint(fewest, most),
            points=draw.choice([(4,), (6,), (4, 4), (5, 3)]),
            evaluates=draw.random() < 0.5,
            sparse=draw.random() < 0.4,
        )


@dataclass
class Result:
    """What a worker has when it is done; of each step that it was there for."""

    weights: list[bytes] = field(default_factory=list)
    delivered: dict[int, Tally] = field(default_factory=dict)
    evaluated: dict[int, list[float]] = field(default_factory=dict)


class Row:
    def enter(self, phase: Any) -> None: ...
    def progress(self, *where: int) -> None: ...


class Session:
    """The parts of a session that terms and steppers use, over a simulated world; or alone, without one."""

    slower, at, device, joining, ends_apart, hands_over = 1.0, "", CPU, False, False, True
    apart = property(lambda self: self.ends_apart)

    def __init__(self, world: World | None, worker: int, slots: int, hands_over: bool = False) -> None:
        self._world, self.worker = world, worker
        self.settings = SimpleNamespace(slots=slots, seed=7)
        self.row, self.view = Row(), View(1, (0,))
        self.folder = SimpleNamespace(event=lambda *words, **facts: None)
        if world is not None:
            self.view = world.journal.views[1]
            self.joining, self.ends_apart, self.hands_over = worker not in self.view.members, True, hands_over

    @property
    def board(self) -> Any:
        return SimpleNamespace(main_ready=True, reach_with_room=1 << 30)

    @property
    def next_term(self) -> int:
        """A worker whose term has been overtaken agrees to no other before it has gone on."""
        board = self._world.boards[self.worker] if self._world is not None else Board()
        return 0 if board.overtaken > self.view.term else board.next_term

    @property
    def overtaken(self) -> bool:
        return self._world is not None and self._world.boards[self.worker].overtaken > self.view.term

    @property
    def rank(self) -> int:
        return self.view.members.index(self.worker)

    @property
    def workers(self) -> int:
        return len(self.view.members)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def compute(self) -> None:
        """Anything may happen meanwhile."""
        if self._world is not None:
            self._world.wait(self.worker, lambda: True, "computing")

    def _ask(self, answer: Callable[[], View | None], asked: str) -> View:
        assert self._world is not None
        self._world.wait(self.worker, lambda: answer() is not None, asked)
        view = answer()
        assert view is not None
        return view

    def _tell(self, decide: Callable[[], Any], told: str) -> None:
        assert self._world is not None
        world, done = self._world, []
        world.news.append(lambda: done.append(world.follow_up(decide())))
        world.wait(self.worker, lambda: bool(done), told)

    def next_view(self) -> View:
        assert self._world is not None
        journal, term = self._world.journal, self.view.term
        self.view = self._ask(lambda: journal.views.get(journal.after.get(term, 0)), f"asks for what is after {term}")
        assert self.worker in self.view.members, "a worker that is not in the run any more has been killed"
        return self.view

    def announced(self, needed: int) -> int:
        assert self._world is not None
        boards, term = self._world.boards, self.view.term
        ended = self._world.wait(
            self.worker,
            lambda: boards[self.worker].next_term > term,
            f"waits for others in {term}",
            lambda: self.overtaken,
        )
        if ended or self.overtaken:
            raise TermEnded(f"term {term} has ended")
        return boards[self.worker].next_term

    def enter(self, term: int) -> View:
        assert self._world is not None
        self.view = self._world.journal.views[term]
        if self.worker in self.view.members:
            self.joining = False
        elif not self.joining:
            raise Departed
        return self.view

    def join(self) -> View:
        assert self._world is not None
        membership = self._world.journal.membership

        def let_in() -> View | None:
            pending = membership.pending
            return pending if pending is not None and self.worker in pending.members else None

        self._tell(lambda: membership.ready(self.worker), "is ready")
        self.view, self.joining = self._ask(let_in, "waits to be let in"), False
        return self.view

    def donor(self) -> Inlet:
        assert self._world is not None
        return Inlet(self._world, self.worker)

    def on_newcomer(self, called: Callable[[Outlet], None]) -> None:
        assert self._world is not None
        world, worker = self._world, self.worker
        world.handlers[worker, "heal"] = lambda source, tag, value: called(Outlet(world, worker, source, tag))
        for source, tag in world.inbox(worker, "heal"):  # who has called before that
            called(Outlet(world, worker, source, tag))

    def caught_up(self) -> None:
        assert self._world is not None
        self._tell(lambda: self._world.journal.membership.ready(self.worker), "is near")  # type: ignore[union-attr]

    def healed(self) -> None:
        assert self._world is not None
        self._tell(lambda: self._world.journal.membership.healed(self.worker), "is healed")  # type: ignore[union-attr]

    def peers(self) -> Peers:
        if self._world is None or self.joining:
            return Alone(CPU)
        return Mesh(self._world, self.worker, self.view.term, self.view.members)


class Net(nn.Module):
    """Parameters that only some shares touch, a buffer that all move, and perhaps a table with sparse gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.first = nn.Parameter(torch.randn(6, 5, generator=generator))
        self.second = nn.Parameter(torch.randn(5, generator=generator))
        self.rare = nn.Parameter(torch.randn(5, generator=generator))
        self.register_buffer("mean", torch.zeros(5))
        self.table = nn.Embedding(9, 5, sparse=True, _weight=torch.randn(9, 5, generator=generator)) if sparse else None

    def forward(self, number: int) -> torch.Tensor:
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
        hidden = torch.tanh(x @ self.first)
        if self.table is not None:
            hidden = hidden + self.table(torch.tensor([number % 9, number * 7 % 9, 2]))
        if self.training:
            assert isinstance(self.mean, torch.Tensor)
            self.mean += 0.1 * hidden.detach().mean(0)
        out = hidden @ self.second
        return (out + hidden @ self.rare if number % 3 == 0 else out).square().mean()


class Worker:
    def __init__(self, session: Session, script: Script) -> None:
        self._session, self._script = session, script
        self.terms = Terms(session)  # type: ignore[arg-type]
        self.model, self.result = Net(script.sparse), Result()
        self._replica = Replica(CPU)
        self._replica.add_model(self.model)
        self._momentum = [torch.zeros_like(param) for param in self._replica.params]
        if not session.joining:
            self.terms.gather(_FIRST, lambda: b"here")
        strategy = AllReduce()
        strategy.attach(self._replica, self.terms.peers, True, None)
        self._stepper = Stepper(session, self.terms.peers, strategy, False)  # type: ignore[arg-type]
        self.terms.on_peers = [strategy.meet, self._stepper.meet]
        self._stepper.next_term = self.terms.next
        self._stepper.flat.refill = lambda: self.terms.refill(self._stepper.slots, self)
        self._stepper.flat.arrive = self.terms.enter_ready
        self.terms.flat = lambda: self._stepper.flat.known
        self._stepper.committed = lambda codes: self.terms.committed(self._stepper.step)
        self._stepper.delivered = lambda batch, tally: self.result.delivered.update({self._stepper.step: tally})  # type: ignore[dict-item]
        self._close = strategy.close
        if session.joining:
            self.terms.join(self)

    # what a newcomer gets

    def capture(self) -> Snapshot:
        tensors = [*self._replica.params, *self._replica.buffers, *self._momentum]
        return Snapshot([self._stepper.step, self._stepper.flat.capture(), [tensor.detach() for tensor in tensors]])

    def restore(self, snapshot: Snapshot) -> None:
        self._stepper.step, flat, theirs = snapshot.tree
        self._stepper.flat.restore(flat)
        tensors = [*self._replica.params, *self._replica.buffers, *self._momentum]
        with torch.no_grad():
            for mine, value in zip(tensors, theirs, strict=True):
                mine.copy_(value)

    # the script

    def train(self) -> Result:
        try:
            self.terms.catching_up = False
            for step in range(self._stepper.step, self._script.steps):
                self._stepper.flat.fill()
                self._stepper.begin(None, time.perf_counter())
                for call, leaves in enumerate(self._script.points):
                    for leaf in self._shares(leaves):
                        self._session.compute()
                        self.model(1000 * step + 100 * call + leaf).backward()
                    self._update()
                    self._session.compute()
                if self._script.evaluates and step % 2 == 0:
                    self.result.evaluated[step] = self.terms.through(self._evaluate)
                self._stepper.end()
                self.terms.boundary(self._stepper.agreed_term, self)
            digest = self._replica.weights_sha256().encode()
            assert set(self.terms.gather(_LAST, lambda: digest)) == {digest}
        finally:
            self._close()
        self.result.weights = [t.detach().numpy().tobytes() for t in [*self._replica.params, *self._replica.buffers]]
        return self.result

    def _shares(self, leaves: int) -> Iterable[int]:
        if not self._script.flat:
            return self._stepper.shares(leaves)
        flat = self._stepper.flat
        assert flat.allowed or flat.begin_late()
        return self._stepper.mine

    def _update(self) -> None:
        """By hand, with the gradients changed in place as clipping does."""
        with torch.no_grad():
            for param, momentum in zip(self._replica.params, self._momentum, strict=True):
                if param.grad is not None:
                    grad = param.grad.mul_(0.5).to_dense() if param.grad.is_sparse else param.grad.mul_(0.5)
                    momentum.mul_(0.9).add_(grad)
                    param.sub_(momentum, alpha=0.1)
                param.grad = None

    def _evaluate(self) -> list[float]:
        meeting = self.terms.meeting
        self.model.eval()
        with torch.no_grad():
            mine = [(k, self.model(90 + k).item()) for k in range(meeting.rank, _EVALUATED, meeting.size)]
        self.model.train()
        said = self.terms.meeting.gather(_EVALUATION, msgspec.msgpack.encode(mine))
        parts = [part for raw in said for part in msgspec.msgpack.decode(raw, type=list[tuple[int, float]])]
        return [value for _, value in sorted(parts)]


def undisturbed(script: Script) -> Result:
    return Worker(Session(None, 0, script.points[0]), replace(script, flat=False)).train()


def live(script: Script, results: dict[int, Result]) -> Callable[[World, int], None]:
    """A worker's life in the simulated run. Who is done stays until all are: others may need what it has."""

    def of(world: World, number: int) -> None:
        session = Session(world, number, script.points[0], script.hands_over)
        worker = Worker(session, script)
        results[number] = worker.train()
        if session.joining:
            return  # it has only followed
        while not world.linger(number, lambda: session.overtaken):
            worker.terms.next()

    return of
