"""SparseEmbedding: rows by 64-bit id, at servers, for models whose ids are too many to have a row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import UsageError
from paceline.servers.row_optimizers import SGD, Adagrad, Adam, Block, Momentum, RowOptimizer
from paceline.servers.rows import Rows
from paceline.servers.tables import Table, Touched, distinct

OPTIMIZERS: dict[str, type[RowOptimizer]] = {"sgd": SGD, "momentum": Momentum, "adagrad": Adagrad, "adam": Adam}
_SEED_BITS = 63
Pooling = Literal["sum", "mean"] | None


@dataclass
class Traffic:
    """What this worker has moved for one table, since training began."""

    rows_read: int = 0
    rows_pushed: int = 0
    bytes: int = 0


class Held(NamedTuple):
    rows: int
    """That have begun."""
    nbytes: int
    """The memory of one copy of them, with their optimizer's state and the index."""
    moved: int
    """How often a row has been moved, by the servers that are their primaries now."""


class Home(Protocol):
    """Where a table's rows lie."""

    traffic: Traffic

    def read(self, touched: Touched, newest: bool) -> Block:
        """`newest`: with every update so far, also where rows may be read some updates behind."""

    def push(self, touched: Touched, gradients: Block) -> None:
        """In the script's backward."""

    def held(self) -> Held: ...


class SparseEmbedding(nn.Module):
    """An embedding over 64-bit ids, of which any number may come: a row begins with the first update that touches it.

    The rows lie at the run's servers, with their optimizer, which moves a row in the updates that touch it. They move when
    a prepared optimizer steps. Only rows that a share touches travel, each once. `lr` may be changed between steps.

    optimizer: "sgd", "momentum", "adagrad" or "adam"; its further options by name (`eps`, `betas`, `weight_decay`, …).
    init: new rows are uniform between -init and init, the same for the same id on any server.
    admission: a row begins with its so manieth update; those before are only counted.
    expiry: rows that so many updates in a row have not touched are forgotten. 0: none are.
    pooling: "sum" or "mean" over the last dimension of the ids, or over bags that begin at `offsets`.

    >>> embedding = SparseEmbedding(4, optimizer="adagrad", lr=0.1)
    >>> embedding(torch.tensor([[7, -1, 7], [1 << 62, 0, 7]])).shape
    torch.Size([2, 3, 4])
    >>> SparseEmbedding(4, pooling="sum")(torch.tensor([7, 8, 9]), offsets=torch.tensor([0, 1])).shape
    torch.Size([2, 4])
    """

    seed: torch.Tensor

    def __init__(
        self,
        dim: int,
        *,
        optimizer: str = "adagrad",
        lr: float = 0.05,
        init: float = 0.01,
        admission: int = 1,
        expiry: int = 0,
        pooling: Pooling = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if dim < 1 or admission < 1 or expiry < 0 or pooling not in (None, "sum", "mean"):
            raise UsageError(
                f"SparseEmbedding(dim={dim}, admission={admission}, expiry={expiry}, pooling={pooling!r}): dim and admission "
                'are at least 1, expiry is at least 0, pooling is "sum", "mean" or None'
            )
        self.dim, self.lr, self.pooling = dim, lr, pooling
        self.table = Table(dim, _optimizer(optimizer, lr, options), init, admission, expiry)
        # As bits, because buffers of any other type are averaged: all workers get worker 0's, and a checkpoint has it.
        self.register_buffer("seed", torch.randint(0, 2, (_SEED_BITS,), dtype=torch.bool))
        self.home: Home | None = None
        """None before training begins: rows are read as they will begin."""

    @property
    def traffic(self) -> Traffic:
        return self.home.traffic if self.home is not None else Traffic()

    def held(self) -> Held:
        """What the servers have of this table now."""
        return self.home.held() if self.home is not None else Held(0, 0, 0)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise UsageError(f"SparseEmbedding takes ids as integers, not {ids.dtype}")
        flat = ids.detach().cpu().to(torch.int64).reshape(-1).numpy()
        touched, inverse = distinct(flat)
        rows = torch.from_numpy(self._read(touched))
        if torch.is_grad_enabled() and self.home is not None:
            home = self.home
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(lambda leaf: _collect(home, touched, leaf))
        where = torch.from_numpy(inverse).reshape(ids.shape).to(self.seed.device)
        return self._pooled(rows.to(self.seed.device), where, offsets)

    def _pooled(self, rows: torch.Tensor, where: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        if self.pooling is None:
            return F.embedding(where, rows)
        if offsets is not None:
            return F.embedding_bag(where, rows, offsets.to(where), mode=self.pooling)
        if not where.numel():  # bags without ids, or none
            return rows.sum(0).expand(*where.shape[:-1], self.dim)
        bags = F.embedding_bag(where.reshape(-1, where.shape[-1]), rows, mode=self.pooling)
        return bags.reshape(*where.shape[:-1], self.dim)

    def _read(self, touched: Touched) -> Block:
        if not len(touched.ids):
            return np.zeros((0, self.dim), dtype=np.float32)
        if self.home is None:
            return self.begun().initial(touched.ids)
        return self.home.read(touched, newest=not torch.is_grad_enabled())

    def begun(self) -> Rows:
        """A table without a row."""
        return self.table.rows(self.seed_now())

    def seed_now(self) -> int:
        return int(np.packbits(self.seed.cpu().numpy(), bitorder="little").view(np.uint64)[0])

    def optimizer_now(self) -> RowOptimizer:
        return msgspec.structs.replace(self.table.optimizer, lr=float(self.lr))

    def extra_repr(self) -> str:
        return f"{self.dim}, optimizer={self.table.optimizer}, pooling={self.pooling!r}"


def _collect(home: Home, touched: Touched, leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    home.push(touched, leaf.grad.numpy())
    leaf.grad = None


def _optimizer(name: str, lr: float, options: dict[str, Any]) -> RowOptimizer:
    if name not in OPTIMIZERS:
        raise UsageError(f"SparseEmbedding(optimizer={name!r}): there are {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    known = set(kind.__struct_fields__)
    if not options.keys() <= known:
        raise UsageError(
            f"SparseEmbedding(optimizer={name!r}) takes {', '.join(sorted(known))}, not {', '.join(options)}"
        )
    try:
        return msgspec.convert({"type": kind.__name__, "lr": lr, **options}, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"SparseEmbedding(optimizer={name!r}): {error}") from None


def tables_of(models: list[nn.Module]) -> list[SparseEmbedding]:
    """All of them, each once."""
    found = {
        id(module): module for model in models for module in model.modules() if isinstance(module, SparseEmbedding)
    }
    return list(found.values())
