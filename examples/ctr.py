"""Click-through rate: a small DLRM over 10^8 possible ids.

python examples/ctr.py
paceline run -n 2 --strategy ps --servers 2 examples/ctr.py

The ids' rows lie at the servers and begin when they are first trained; a step moves the rows that its samples touch.
`--dense` has an nn.Embedding in their place, with a row for every id; for that there must be few (`--ids 20000`).
"""

from __future__ import annotations

import argparse
import time

import paceline
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from ctr_data import FIELDS, NUMBERS, auc, clicks


class DenseRows(nn.Module):
    """A row for each of the ids that there are, by their place in a sorted list; they begin as the sparse ones do."""

    def __init__(self, ids: torch.Tensor, rows: paceline.SparseEmbedding) -> None:
        super().__init__()
        self.register_buffer("ids", ids.unique())
        self.rows = nn.Embedding.from_pretrained(rows(self.ids), freeze=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(torch.searchsorted(self.ids, ids))


class DLRM(nn.Module):
    """Numbers through an MLP to one vector, each id to another; their products, pair by pair, to a second MLP."""

    def __init__(self, embedding: nn.Module, dim: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, dim))
        vectors = FIELDS + 1
        self.top = nn.Sequential(
            nn.Linear(vectors * dim + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        vectors = torch.cat([self.bottom(numbers)[:, None], self.embedding(ids)], 1)
        products = vectors @ vectors.transpose(1, 2)
        i, j = torch.triu_indices(FIELDS + 1, FIELDS + 1, 1)
        return self.top(torch.cat([vectors.flatten(1), products[:, i, j]], 1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Click-through rate with a small DLRM")
    parser.add_argument("--samples", type=int, default=500_000)
    parser.add_argument("--ids", type=int, default=100_000_000, help="how many there can be")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=2048, help="of all workers together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dense", action="store_true", help="nn.Embedding instead")
    args = parser.parse_args()

    run = paceline.init(**({} if args.dense else {"strategy": "ps"}))
    train, test = clicks(args.samples, args.ids), clicks(max(args.samples // 10, 20_000), args.ids, seed=1)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=4096)
    embedding = paceline.SparseEmbedding(args.dim, optimizer="adagrad", lr=args.lr)
    ids = torch.cat([train.tensors[1], test.tensors[1]])
    model = DLRM(DenseRows(ids, embedding) if args.dense else embedding, args.dim)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    run.prepare(model, optimizer, loader)

    @torch.no_grad()
    def score(batch: list[torch.Tensor]) -> torch.Tensor:
        return model(*batch[:2])

    for epoch in run.epochs(args.epochs):
        start, before = time.monotonic(), run.step
        for _ in loader:
            for numbers, ids, clicked in run.slots():
                F.binary_cross_entropy_with_logits(model(numbers, ids), clicked).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds, steps = time.monotonic() - start, run.step - before
        area = auc(run.predict(score, test_loader), test.tensors[2])
        run.log(auc=area)
        if run.is_main:
            print(f"epoch {epoch + 1}: AUC {area:.4f}, {seconds:.1f} s, {steps / seconds:.1f} steps/s", flush=True)
    if not args.dense:
        held, mine = embedding.held(), embedding.traffic
        run.log(
            rows=held.rows,
            held=held.nbytes,
            moved=held.moved,
            touched=mine.rows_read + mine.rows_pushed,
            sent=mine.bytes,
        )
        if run.is_main:
            print(
                f"{held.rows:,} rows of {args.ids:,} ids in {held.nbytes / 1e6:.0f} MB; main read {mine.rows_read / run.step:,.0f} "
                f"and pushed {mine.rows_pushed / run.step:,.0f} rows a step, in {mine.bytes / run.step / 1e6:.2f} MB"
            )


if __name__ == "__main__":
    main()
