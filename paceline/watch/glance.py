"""How far a run under way is, by one look at what its leader lends to whoever asks."""

from __future__ import annotations

from paceline.cluster.rendezvous import Rendezvous
from paceline.wires import messages
from paceline.wires.board import Board, Seen
from paceline.wires.link import LeaderLink

_PATIENCE_S = 1.0
"""For one who may be frozen; whoever follows it is asked next."""


def glance(place: Rendezvous) -> list[Seen]:
    """The workers of the view, main first; nobody, if no leader of this machine says so in time."""
    link = LeaderLink(place.address, place.secret, messages.Watch(), place.fence, _PATIENCE_S)
    try:
        answer, fds = link.attempt(_PATIENCE_S)
        assert isinstance(answer, messages.Welcome)
        board = Board(fds[0], answer.rows)
        try:
            return [board.see(number) for number in answer.members]
        finally:
            board.close()
    except (OSError, ValueError):
        return []
    finally:
        link.close()


def words(rows: list[Seen]) -> str:
    """
    >>> from paceline.wires.board import Phase
    >>> rows = [Seen(3, 1, Phase.COMPUTE, 0.0, 120, 1, 468, 15_360, 0.25, "", None)]
    >>> words(rows)
    'step 120/468, epoch 2, 15,360 samples, loss 0.2500; main is worker 3'
    """
    if not rows or not rows[0].step:
        return ""
    main = rows[0]
    of = f"/{main.total_steps}" if main.total_steps else ""
    metric = f", loss {main.metric:.4f}" if main.metric else ""
    return (
        f"step {main.step}{of}, epoch {main.epoch + 1}, {main.samples:,} samples{metric}; main is worker {main.worker}"
    )
