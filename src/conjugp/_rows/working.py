"""The rows of a fit, in working units, from checked rows in the user's."""

from __future__ import annotations

import torch

from conjugp._rows.canonical import Rows, Units
from conjugp._rows.dataset import Data, Dataset
from conjugp._rows.on_disk import OnDisk, Store
from conjugp._rows.on_ranks import OnRanks, order_keys


def dataset(
    rows: Rows | Store, units: Units, n_classes: int, dtype: torch.dtype, device: torch.device
) -> Dataset:
    """Rows in working units, wherever they are."""
    if isinstance(rows, Store):
        like = torch.empty(0, rows.n_features, dtype=dtype, device=device)
        return OnDisk(rows, units, n_classes, like)
    data = rows.group.all(lambda: in_memory(rows, units, n_classes, dtype, device))
    if rows.group.size == 1:
        return data
    assert rows.key is not None
    return OnRanks(data, order_keys(rows.key), rows.group)


def in_memory(
    rows: Rows, units: Units, n_classes: int, dtype: torch.dtype, device: torch.device
) -> Data:
    """Rows in working units, copied."""
    return Data(
        units.apply(rows.X, dtype, device, rows.place),
        # Copies: a hold-out moves rows about.
        torch.tensor(rows.y, device=device),
        torch.tensor(rows.weight, dtype=dtype, device=device),
        n_classes,
    )
