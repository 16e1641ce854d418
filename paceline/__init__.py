"""Paceline: one PyTorch script, one process or many, the same bits.

    import paceline
    run = paceline.init()
    run.prepare(model, optimizer, loader)
    for epoch in run.epochs(10):
        for batch in loader:
            for x, y in run.slots():
                F.cross_entropy(model(x), y).backward()
            optimizer.step(); optimizer.zero_grad()

Importing this package imports no torch: that happens in `init()`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from paceline.processor import mkl_branch

if TYPE_CHECKING:
    from paceline.data.client_feed import clients
    from paceline.data.client_folders import ClientFolders
    from paceline.embedding import SparseEmbedding
    from paceline.fitting import fit
    from paceline.run import Run, init

__all__ = ["ClientFolders", "PacelineError", "Run", "SparseEmbedding", "__version__", "clients", "fit", "init"]
__version__ = "0.1.0"

# MKL reads this at its first call; a run of one started by plain `python` must give the same bits.
os.environ.setdefault("MKL_CBWR", mkl_branch())

_HOMES = {
    "init": "paceline.run",
    "Run": "paceline.run",
    "SparseEmbedding": "paceline.embedding",
    "ClientFolders": "paceline.data.client_folders",
    "clients": "paceline.data.client_feed",
    "fit": "paceline.fitting",
    "PacelineError": "paceline.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext paceline` gives notebooks the %%paceline cell magic."""
    from paceline.notebook import register

    register(shell)
