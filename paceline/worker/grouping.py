"""The group of a session's view: by which way its workers' tensors move, and how they find each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.tensors.peers import Alone, Peers, Watch
from paceline.wires.messages import Put

if TYPE_CHECKING:
    from paceline.tensors.shared import Allocate
    from paceline.worker.session import Ask, Session

_groups = 0
"""Groups of peers that this process has joined so far; the same on every worker."""


def build(session: Session) -> Peers:
    if session.joining or session.dry_run or (session.workers == 1 and session.view.term == 1):
        return Alone(session.device)
    global _groups
    _groups = max(_groups + 1, session.view.term)
    name = f"group-{session.view.term}"
    if session.view.term == 1:
        name += f"-{_groups}"  # a script may train twice: nothing of the first is met again
    if session.apart:
        return _across_machines(session, name, session.segment, session)()
    if transport(session) == "shm":
        from paceline.tensors.shared import SharedPeers

        return SharedPeers(session.rank, session.workers, name, session.segment, session)
    return _by_torch(session, name)


def build_beside(session: Session, name: str, ask: Ask, watch: Watch) -> Callable[[], Peers] | None:
    """How a thread builds another group of the session's view, to meet in while the script trains; None where it cannot. Not by
    Gloo or NCCL: a new group of theirs abandons the old ones, and two of NCCL's at once on one GPU can wait for each other.
    `ask`: a line that the script's thread does not use."""

    def allocate(name: str, size: int) -> int:
        return session.segment(name, size, ask)

    if session.apart:
        return _across_machines(session, name, allocate, watch)
    if transport(session) != "shm":
        return None
    from paceline.tensors.shared import SharedPeers

    return partial(SharedPeers, session.rank, session.workers, name, allocate, watch)


def transport(session: Session) -> str:
    """How tensors move between the workers of a machine."""
    asked = session.settings.transport
    if asked != "auto":
        return asked
    from paceline.tensors.shared import supported

    if session.device.type == "cuda" and not session.settings.share_gpus and not session.apart:
        return "nccl"
    return "shm" if supported() else "gloo"


def _across_machines(session: Session, name: str, allocate: Allocate, watch: Watch) -> Callable[[], Peers]:
    """Builds it; what that needs of the session is asked for now."""
    from paceline.tensors.machines import build
    from paceline.tensors.mesh import Lines

    assert session.listener is not None and session.ticket is not None
    members, homes = session.view.members, session.homes
    machines = list(dict.fromkeys(homes[member] for member in members))
    sizes = [sum(1 for member in members if homes[member] == machine) for machine in machines]
    firsts = [next(member for member in members if homes[member] == machine) for machine in machines]
    addresses = [session.fact(f"link/{first}") for first in firsts] if len(sizes) > 1 else []
    lines = Lines(session.listener, addresses, bytes.fromhex(session.ticket.secret))
    return partial(build, session.rank, sizes, name, allocate, lines, watch)


def _by_torch(session: Session, name: str) -> Peers:
    from paceline.tensors.group import GroupPeers, abandon_all, built, gloo, nccl

    abandon_all()
    rank, size, by_nccl = session.rank, session.workers, transport(session) == "nccl"
    device = session.device if by_nccl else torch.device("cpu")
    connect = meeting_store(session, name)

    def make() -> tuple[Any, Any]:
        store = connect()
        control, data = PrefixStore("control", store), PrefixStore("data", store)
        return nccl(data, rank, size, device) if by_nccl else gloo(data, rank, size), gloo(control, rank, size)

    data, control = built(make, session, (rank + 1) % size)
    return GroupPeers(rank, size, data, control, session, device)


def meeting_store(session: Session, name: str) -> Callable[[], Store]:
    """A store on a port of its own choosing, hosted by main and announced through the agent. Connecting to it may wait."""
    if session.is_main:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        session.ask(Put(f"{name}/store", str(store.port)))
        return lambda: store
    port = int(session.fact(f"{name}/store"))
    return lambda: TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
