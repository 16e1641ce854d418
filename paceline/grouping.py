"""The group of a session's view: by which way its workers' tensors move, and how they find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.cluster.messages import Put
from paceline.tensors.peers import Alone, Peers

if TYPE_CHECKING:
    from paceline.session import Session

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
        return _across_machines(session, name)
    if transport(session) == "shm":
        from paceline.tensors.shared import SharedPeers

        return SharedPeers(session.rank, session.workers, name, session.segment, session)
    return _by_torch(session, name)


def transport(session: Session) -> str:
    """How tensors move between the workers of a machine."""
    asked = session.settings.transport
    if asked != "auto":
        return asked
    from paceline.tensors.shared import supported

    if session.device.type == "cuda" and not session.settings.share_gpus and not session.apart:
        return "nccl"
    return "shm" if supported() else "gloo"


def _across_machines(session: Session, name: str) -> Peers:
    from paceline.tensors.machines import build
    from paceline.tensors.mesh import Lines

    assert session.listener is not None and session.ticket is not None
    members, homes = session.view.members, session.homes
    machines = list(dict.fromkeys(homes[member] for member in members))
    sizes = [sum(1 for member in members if homes[member] == machine) for machine in machines]
    firsts = [next(member for member in members if homes[member] == machine) for machine in machines]
    addresses = [session.fact(f"link/{first}") for first in firsts] if len(sizes) > 1 else []
    lines = Lines(session.listener, addresses, bytes.fromhex(session.ticket.secret))
    return build(session.rank, sizes, name, session.segment, lines, session)


def _by_torch(session: Session, name: str) -> Peers:
    from paceline.tensors.group import GroupPeers, gloo, nccl

    rank, size, store = session.rank, session.workers, meeting_store(session, name)
    control = gloo(PrefixStore("control", store), rank, size)
    if transport(session) == "gloo":
        data = gloo(PrefixStore("data", store), rank, size)
        return GroupPeers(rank, size, data, control, session, torch.device("cpu"))
    data = nccl(PrefixStore("data", store), rank, size)
    return GroupPeers(rank, size, data, control, session, session.device)


def meeting_store(session: Session, name: str) -> Store:
    """A store on a port of its own choosing, hosted by worker 0 and announced through the agent."""
    if session.is_main:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        session.ask(Put(f"{name}/store", str(store.port)))
        return store
    return TCPStore("127.0.0.1", int(session.fact(f"{name}/store")), is_master=False, wait_for_workers=False)
