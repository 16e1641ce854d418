"""Asking the leader of a run under way: what stop and scale share."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.job import Job
from paceline.cluster.rendezvous import Rendezvous
from paceline.errors import UsageError
from paceline.folder import RunFolder
from paceline.wires import messages, wire
from paceline.wires.link import LeaderLink, NoLeaderError

_PATIENCE_S = 5.0
_ELSEWHERE_S, _LEASES = 15.0, 2
"""Where another machine leads: one lease until its silence is noticed, one until somebody leads in its place; an election between
busy machines takes some seconds (seen)."""


def ask(folder: RunFolder, message: msgspec.Struct) -> Any:
    """What the run's leader answers."""
    place = Rendezvous.here(folder)
    link = LeaderLink(place.address, place.secret, messages.Steer(), place.fence, _patience_s(folder))
    try:
        answer, fds = link.ask(message)
    except NoLeaderError:
        raise UsageError(f"run {folder.id!r} is not running: no agent answers") from None
    finally:
        link.close()
    wire.close_all(fds)
    if isinstance(answer, messages.Refused):
        raise UsageError(answer.why)
    return answer


def _patience_s(folder: RunFolder) -> float:
    job = Job.read(folder)
    if job is None or not job.settings.listen:
        return _PATIENCE_S
    return _ELSEWHERE_S + _LEASES * job.settings.lease
