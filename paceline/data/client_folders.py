"""Clients that keep their own data: a folder for each, of which a worker has those that lie where it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from paceline.data.order import Ids
from paceline.errors import UsageError

_WIDTH = 32
"""Bits of a sample's number within its client."""


class ClientFolders(Dataset[Any]):
    """For `--strategy federated`: `root` has a folder for each client, named by its number from 0 on. `open` makes a
    map-style data set of one; it is called for the clients that are trained here, when they first are.

        data = paceline.ClientFolders("/data/clients", open=lambda folder: TensorDataset(*torch.load(folder / "xy.pt")))
        loader = DataLoader(data, batch_size=32, shuffle=True)

    A client is trained by workers that have its folder, and by no other. While none of them is there it takes no part, which
    the run says.
    """

    def __init__(self, root: str | Path, open: Callable[[Path], Any]) -> None:
        self._root, self._open = Path(root), open
        self._opened: dict[int, Any] = {}
        self.here = sorted(int(folder.name) for folder in self._root.glob("*") if folder.name.isdecimal())
        if not self.here:
            raise UsageError(f"ClientFolders: there is no client in {self._root}; it needs folders named 0, 1, 2, …")

    def _data(self, client: int) -> Any:
        if client not in self._opened:
            self._opened[client] = self._open(self._root / str(client))
        return self._opened[client]

    def ids(self, client: int) -> Ids | None:
        """None: it is not here."""
        if client not in self.here:
            return None
        return np.arange(len(self._data(client)), dtype=np.int64) + (client << _WIDTH)

    def __len__(self) -> int:
        return sum(len(self._data(client)) for client in self.here)

    def __getitem__(self, number: int) -> Any:
        return self._data(number >> _WIDTH)[number & ((1 << _WIDTH) - 1)]
