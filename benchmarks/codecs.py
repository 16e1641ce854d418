"""What each codec costs, and the link below which it pays.

    python -m benchmarks.codecs [--device cpu] [--threads 1] [--rounds 9]

The gradients of one batch of the MLP 784-2048-2048-10 (5.8 million parameters, 23.3 MB) are sent with error feedback
(encode, and decode once to see what is kept) and decoded once, as by one who receives them. A codec pays where the bytes that
are not sent would have taken longer than that: below (fp32 bytes − sent bytes) / (seconds of both).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

import torch
from torch import nn

from benchmarks.models import images, mlp
from paceline.tensors.codecs import TABLE, parse
from paceline.tensors.codecs.base import Codec
from paceline.tensors.codecs.feedback import kept_at_first, send


def gradients(device: torch.device) -> tuple[torch.Tensor, list[torch.Size]]:
    torch.manual_seed(1)
    model = mlp().to(device)
    x, y = images(64, flat=True).tensors
    nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return torch.cat([grad.view(-1) for grad in grads]), [grad.shape for grad in grads]


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(codec: Codec, values: torch.Tensor, shapes: list[torch.Size], rounds: int) -> tuple[float, float]:
    """The medians of sending and of decoding."""
    old = kept_at_first(codec, shapes).to(values.device)
    new, out = torch.empty_like(old), torch.empty_like(values)
    sent, decoded = [], []
    for step in range(rounds + 2):
        given = values.clone()
        start = clock(values.device)
        message = send(codec, given, shapes, step, old, new)
        between = clock(values.device)
        codec.decode(message, shapes, step, out)
        sent.append(between - start)
        decoded.append(clock(values.device) - between)
        old, new = new, old
    return statistics.median(sent[2:]), statistics.median(decoded[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    values, shapes = gradients(device)
    nbytes = 4 * values.numel()
    where = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {options.threads} thread(s)"
    )
    load = os.getloadavg()[0]
    print(
        f"{where}, torch {torch.__version__}, load {load:.1f}; {nbytes / 1e6:.1f} MB of fp32, median of {options.rounds}"
    )
    print(f"{'codec':14}{'bytes':>10}{'of fp32':>9}{'send GB/s':>11}{'decode GB/s':>13}{'both GB/s':>11}  pays below")
    for name, entry in TABLE.items():
        codec = parse(name + entry.number)
        sending, decoding = measure(codec, values, shapes, options.rounds)
        size = codec.nbytes(shapes)
        pays = (nbytes - size) / (sending + decoding) * 8 / 1e9
        rates = [nbytes / took / 1e9 for took in (sending, decoding, sending + decoding)]
        print(
            f"{codec.name:14}{size:10}{size / nbytes:9.4f}{rates[0]:11.2f}{rates[1]:13.2f}{rates[2]:11.2f}  {pays:.1f} Gbit/s"
        )


if __name__ == "__main__":
    main()
