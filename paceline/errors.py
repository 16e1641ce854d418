"""Every error Paceline raises on purpose, in one small tree.

    PacelineError            anything below; str(error) says what, where and what to do
    ├── UsageError           the script or the command line must change (exit code 2)
    ├── MismatchError        the workers came to different places in the script
    ├── PeerLostError        another worker died or the run is being stopped
    │   ├── EvictedError     this worker was taken for dead while it was frozen
    │   └── OvertakenError   this newcomer cannot come into the run: another one is started
    └── ResourceError        the machine cannot hold what the run needs

`ValueError` is not used for these, so that a script's own ``except ValueError`` never hides one.
"""

from __future__ import annotations

from typing import Any


class PacelineError(Exception):
    """The root of the tree."""

    exit_code = 1


class UsageError(PacelineError):
    """The script or the command line must change; retrying will not help."""

    exit_code = 2


class MismatchError(PacelineError):
    """The workers came to different places in the script, so nothing can be combined."""

    exit_code = 2


class PeerLostError(PacelineError):
    """Another worker died, or the agent is stopping the run, while this one waited."""


class EvictedError(PeerLostError):
    """The others have gone on without this worker: it must not touch anything of theirs any more."""


class OvertakenError(PeerLostError):
    """A newcomer's way into the run came to nothing, by the death of another: one more is started in its place."""

    exit_code = 75  # "try again" among sysexits


class Departed(SystemExit):
    """Unwinds a script whose worker has left the run, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class ResourceError(PacelineError):
    """The machine cannot hold what the run needs."""

    exit_code = 2


OWN_GROUP = (
    "the script starts torch.distributed itself; Paceline brings the workers together, so remove init_process_group()"
)


class TermEnded(Exception):
    """A worker of this group is gone. What all have met for stands; the rest is for the next term."""


def a_kind(item: Any) -> str:
    """
    >>> a_kind([]), a_kind(5)
    ('a list', 'an int')
    """
    name = type(item).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
