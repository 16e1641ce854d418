"""What a share, or a piece of one, brings to its step: rows to train on, and ids for the receipt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.data.loader import Share
from paceline.data.order import Ids
from paceline.data.receipts import Loose, Tally
from paceline.data.values import leading_size

_FEW = 4096
"""Ids that are kept until their digest is taken, rather than hashed within the step."""


class Taken(NamedTuple):
    samples: int
    ids: Ids


NOTHING = Taken(0, np.empty(0, dtype=np.int64))


def own_draw(leaf: int) -> Taken:
    """The script draws by itself: what is known of it is the number of the share."""
    return Taken(1, np.array([leaf]))


def tally(taken: Iterable[Taken]) -> Tally:
    parts = list(taken)
    return Tally.of(sum(part.samples for part in parts), [part.ids for part in parts])


def loose_tally(taken: Taken) -> Tally | Loose:
    """Of a step in which nobody is met: a few ids are kept as they are, many are hashed now."""
    count = len(taken.ids)
    return Loose(taken.samples, count, taken.ids) if 0 < count <= _FEW else tally([taken])


def cut_ids(share: Share, piece: int, pieces: int) -> Ids:
    """The ids in a piece. Where the share has not one row for each of them, they go with the first piece."""
    if leading_size(share.value) == len(share.ids):
        return np.array_split(share.ids, pieces)[piece]
    return share.ids if piece == 0 else NOTHING.ids


def cut(value: Any, piece: int, pieces: int) -> Any:
    """One of several near-equal pieces of a collated batch, along its first dimension."""
    if isinstance(value, torch.Tensor):
        return torch.tensor_split(value, pieces)[piece] if value.dim() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cut(item, piece, pieces) for item in value))
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, str) for item in value):
        return type(value)(value[k] for k in torch.tensor_split(torch.arange(len(value)), pieces)[piece].tolist())
    if isinstance(value, (list, tuple)):
        return type(value)(cut(item, piece, pieces) for item in value)
    if isinstance(value, dict):
        return type(value)((key, cut(item, piece, pieces)) for key, item in value.items())
    return value
