"""One of several small trainings whose weights must not depend on the worker count.

    paceline run -n N --slots S --steps 100 benchmarks/bits_script.py KIND [--num-workers 2]

Shared by benchmarks/same_bits.py (the full set) and the tests (small).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("kind")
parser.add_argument("--num-workers", type=int, default=0)
options = parser.parse_args()
run = paceline.init(seed=3)
generator = torch.Generator().manual_seed(5)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def labels(count: int, classes: int) -> torch.Tensor:
    return torch.randint(0, classes, (count,), generator=generator)


class Augmented(Dataset):
    """Draws noise from every generator a data set may use."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import random

        import numpy as np

        noise = 0.1 * torch.randn(self.x[index].shape) + random.random() * 0.01 + float(np.random.rand()) * 0.01
        return self.x[index] + noise, self.y[index]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    loss: Callable[..., torch.Tensor],
    after: Callable[[], None] = lambda: None,
    *more: object,
) -> None:
    run.prepare(model, optimizer, loader, *more)
    for _ in run.epochs(1 << 20):
        for _batch in loader:
            for share in run.slots():
                loss(*share).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            after()


def lenet() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    data = TensorDataset(randn(480, 1, 28, 28), labels(480, 10))
    loader = DataLoader(data, batch_size=48, shuffle=True, num_workers=options.num_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train(model, optimizer, loader, lambda x, y: F.cross_entropy(model(x), y))


def cnn() -> None:
    """Dropout, BatchNorm, AdamW, clipping, a cosine schedule, an EMA and bf16 autocast in the loop."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip
    loader = DataLoader(
        Augmented(randn(240, 3, 12, 12), labels(240, 5)), batch_size=48, shuffle=True, num_workers=options.num_workers
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    ema = copy.deepcopy(model)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    def after() -> None:
        scheduler.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)

    run.register("ema", ema)
    train(model, optimizer, loader, loss, after, scheduler)


def lstm() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = (
                nn.Embedding(50, 16),
                nn.LSTM(16, 24, 2, dropout=0.1, batch_first=True),
                nn.Linear(24, 6),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(self.embed(x))[0][:, -1])

    model = Tagger()
    tokens = torch.randint(0, 50, (240, 13), generator=generator)
    loader = DataLoader(TensorDataset(tokens, labels(240, 6)), batch_size=48, shuffle=True)
    train(model, torch.optim.Adam(model.parameters(), 1e-2), loader, lambda x, y: F.cross_entropy(model(x), y))


def transformer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(60, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 60))
    tokens = torch.randint(0, 60, (240, 18), generator=generator)
    loader = DataLoader(TensorDataset(tokens), batch_size=48, shuffle=True)
    loss = lambda x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())  # noqa: E731
    train(model, torch.optim.AdamW(model.parameters(), 1e-3), loader, loss)


def tail() -> None:
    """A last batch smaller than the slots, 13 features, unused, frozen, shared and sparse parameters."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(30, 13, sparse=True)
            self.one, self.unused = nn.Linear(13, 13), nn.Linear(3, 3)
            self.frozen = nn.Linear(13, 13).requires_grad_(False)
            self.shared = self.one
            self.head = nn.Linear(13, 3)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.shared(F.relu(self.frozen(F.relu(self.one(x + self.rows(ids)))))))

    model = Odd()
    data = TensorDataset(randn(123, 13), torch.randint(0, 30, (123,), generator=generator), labels(123, 3))
    loader = DataLoader(data, batch_size=24, shuffle=True, num_workers=options.num_workers)
    dense = torch.optim.SGD([p for n, p in model.named_parameters() if n != "rows.weight"], lr=0.1, momentum=0.9)
    sparse = torch.optim.SparseAdam([model.rows.weight], lr=0.05)
    run.prepare(model, dense, sparse, loader)
    for _ in run.epochs(1 << 20):
        for _batch in loader:
            for x, ids, y in run.slots():
                F.cross_entropy(model(x, ids), y).backward()
            for optimizer in (dense, sparse):
                optimizer.step()
                optimizer.zero_grad()


def gan() -> None:
    """Two models, two optimizers, two reduce points a step, noise drawn inside and outside the loops."""
    net_g = nn.Sequential(nn.Linear(7, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 13))
    net_d = nn.Sequential(nn.Linear(13, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
    opt_g = torch.optim.Adam(net_g.parameters(), 1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(net_d.parameters(), 1e-3, betas=(0.5, 0.999))
    loader = DataLoader(
        Augmented(randn(240, 13), labels(240, 2)), batch_size=48, shuffle=True, num_workers=options.num_workers
    )
    run.prepare(net_g, net_d, opt_g, opt_d, loader)
    score = F.binary_cross_entropy_with_logits
    for _ in run.epochs(1 << 20):
        for _batch in loader:
            shift = 0.01 * torch.randn(())
            net_d.zero_grad()
            for real, _ in run.slots():
                score(net_d(real + shift), torch.ones(len(real), 1)).backward()
                fake = net_g(torch.randn(len(real), 7)).detach()
                score(net_d(fake), torch.zeros(len(real), 1)).backward()
            opt_d.step()
            net_g.zero_grad()
            for real, _ in run.slots():
                score(net_d(net_g(torch.randn(len(real), 7))), torch.ones(len(real), 1)).backward()
            opt_g.step()


KINDS = {"lenet": lenet, "cnn": cnn, "lstm": lstm, "transformer": transformer, "tail": tail, "gan": gan}
KINDS[options.kind]()
