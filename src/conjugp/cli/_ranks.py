"""Commands that torchrun starts several times: every process takes its share of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.cells import is_missing, texts
from conjugp._inputs.columns import MOST_CATEGORIES
from conjugp._inputs.table import Table
from conjugp._rows.group import Group

_SAMPLE = 10_000  # rows of every share that say what columns hold


def joint_sample(table: Table, target: str, group: Group) -> Table:
    """Rows of all shares that hold everything an encoding depends on; alone, the table itself.

    The first rows, and the first row with each value of a column, as far as categories go.
    """
    if group.size == 1:
        return table
    chosen = [np.arange(min(_SAMPLE, table.n_rows))]
    for name, cells in table.columns.items():
        if cells.dtype.kind in "OU":
            gaps = np.array([is_missing(cell) for cell in cells.tolist()], dtype=bool)
        else:
            gaps = cells != cells  # NaN, where there can be one
        chosen.append(np.flatnonzero(gaps)[:1])
        if cells.dtype.kind in "OU" or name == target:
            _, first = np.unique([str(cell) for cell in texts(cells)], return_index=True)
            chosen.append(np.sort(first)[: None if name == target else MOST_CATEGORIES + 1])
    part = table.take(np.unique(np.concatenate(chosen)))
    found = group.gather(part.columns)
    columns = {name: _cells([f[name] for f in found]) for name in part.columns}
    return replace(table, columns=columns, n_rows=sum(group.gather(part.n_rows)))


def stacked(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    """The arrays of all ranks one after the other; None where they have none."""
    some = [part for part in parts if part is not None]
    return np.concatenate(some) if some else None


def _cells(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The cells of all ranks; truth values are text where another rank's have gaps."""
    if len({part.dtype.kind == "b" for part in parts}) > 1:
        parts = [part.astype(str) if part.dtype.kind == "b" else part for part in parts]
    text = any(part.dtype.kind in "OU" for part in parts)
    return np.concatenate([part.astype(object) if text else part for part in parts])
