"""Error feedback: what a message loses is kept, and added to the next values.

So over many steps nothing is lost: what was sent and what is kept are together what was given. What a codec
keeps is one flat fp32 tensor, the residual and behind it the codec's own memory: it can be copied,
written down and handed over as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.tensors.codecs.base import Codec, Shapes, count


def kept_count(codec: Codec, shapes: Shapes) -> int:
    """Elements of what is kept."""
    return _residuals(codec, shapes) + codec.start(shapes).numel()


def kept_at_first(codec: Codec, shapes: Shapes) -> torch.Tensor:
    return torch.cat([torch.zeros(_residuals(codec, shapes)), codec.start(shapes)])


def send(
    codec: Codec,
    values: torch.Tensor,
    shapes: Shapes,
    seed: int,
    old: torch.Tensor,
    new: torch.Tensor,
    absent: Sequence[slice] = (),
) -> torch.Tensor:
    """The message for these values and what is kept in `old`; `new` is what is kept from now on.

    `old` stands: the same can be sent again. `values` is changed: what was kept is added to it. Of `absent` stretches
    nothing is sent, and what is kept of them waits; whoever decodes takes them for 0.
    """
    split = _residuals(codec, shapes)
    new[split:].copy_(old[split:])
    if split:
        values += old[:split]
    for at in absent:
        values[at] = 0.0
    message = codec.encode(values, shapes, seed, new[split:])
    if split:
        codec.decode(message, shapes, seed, new[:split])
        torch.sub(values, new[:split], out=new[:split])
        for at in absent:
            new[at] = old[at]
        # A gradient that is no number has been sent, and seen, once: a script that leaves such a step out goes on behind it.
        new[:split].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    if len(new) > split:
        torch.where(new[split:].isfinite(), new[split:], old[split:], out=new[split:])
    return message


def _residuals(codec: Codec, shapes: Shapes) -> int:
    return count(shapes) if codec.feedback else 0
