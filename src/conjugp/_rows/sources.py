"""What `fit_stream` reads: Parquet, torch data sets, or anything that yields batches of rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

_BATCH = 2**15  # rows that are read at a time
_KINDS = (
    "source must be the path of a Parquet file or of a folder of them, a torch Dataset or "
    "DataLoader, or an iterable of batches (X, y) or (X, y, sample_weight)"
)


class Batch(NamedTuple):
    """Rows as they came, and where they were."""

    X: Any
    y: Any
    weight: Any  # or None
    where: str
    names: list[str] | None = None  # of the features, where X does not bring them


class _Roles(NamedTuple):
    """Which columns of a table hold what."""

    target: str
    weight: str | None

    def split(self, table: Any) -> tuple[Any, Any, Any]:
        """Features, labels and weights of a DataFrame, pandas' or any that has `select`."""
        names = list(getattr(table, "column_names", table.columns))
        roles = [name for name in self if name is not None]
        for name in roles:
            if name not in names:
                raise ValueError(f"there is no column {name!r}; there are {names}")
        if hasattr(table, "select"):
            features = table.select([name for name in names if name not in roles])
        else:
            features = table.drop(columns=roles)
        weight = None if self.weight is None else table[self.weight].to_numpy()
        return features, table[self.target].to_numpy(), weight


def batches(source: Any, target: str | None, weight: str | None) -> Iterator[Batch]:
    """The rows of a source, batch after batch."""
    if isinstance(source, str | os.PathLike):
        return _parquet(Path(source), target, weight)
    if weight is not None and target is None:
        raise ValueError("sample_weight names a column, and so needs target to name one too")
    if isinstance(source, np.ndarray | torch.Tensor) or hasattr(source, "columns"):
        raise TypeError(f"{_KINDS}; for rows in memory use fit(X, y)")
    if isinstance(source, Dataset) and not isinstance(source, DataLoader):
        whole = not isinstance(source, IterableDataset)
        source = DataLoader(source, batch_size=4096 if whole else 1024)
    if not isinstance(source, Iterable):
        raise TypeError(f"{_KINDS}; got {type(source).__name__}")
    return _iterable(source, None if target is None else _Roles(target, weight))


def _iterable(source: Iterable[Any], columns: _Roles | None) -> Iterator[Batch]:
    for i, item in enumerate(source):
        where = f"batch {i + 1}"
        if columns is not None:
            if not hasattr(item, "columns"):
                raise ValueError(
                    f"source, {where}: with target={columns.target!r} a batch must be a DataFrame; "
                    f"got {type(item).__name__}"
                )
            try:
                yield Batch(*columns.split(item), where)
            except ValueError as error:
                raise ValueError(f"source, {where}: {error}") from error
            continue
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise ValueError(
                f"source, {where}: a batch must be (X, y) or (X, y, sample_weight); got "
                f"{type(item).__name__}"
            )
        X, y, weight = (*map(_on_cpu, item), None)[:3]
        yield Batch(X, y, weight, where)


def _on_cpu(x: Any) -> Any:
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x


def _parquet(path: Path, target: str | None, weight: str | None) -> Iterator[Batch]:
    """The rows of a Parquet file, or of all in a folder, in the order of their names."""
    if target is None:
        raise ValueError("target must name the column of the labels in a Parquet file")
    try:
        import pyarrow as pa
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            "reading Parquet needs pyarrow: pip install 'conjugp[parquet]'"
        ) from error
    if not path.exists():
        raise FileNotFoundError(f"source: there is no file or folder {path}")
    try:
        table = ds.dataset(path, format="parquet")
        there = table.schema.names
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"source: {path} cannot be read as Parquet ({error})") from error
    columns = _Roles(target, weight)
    for name in filter(None, columns):
        if name not in there:
            raise ValueError(f"source: {path} has no column {name!r}; it has {there}")
    features = [field for field in table.schema if field.name not in columns]
    numbers = all(
        pa.types.is_integer(f.type) or pa.types.is_floating(f.type) or f.type == pa.bool_()
        for f in features
    )
    names = [field.name for field in features]
    roles = (names, [target], [] if weight is None else [weight])
    wanted = [name for role in roles for name in role]
    try:
        for file in table.files:
            first = 0
            # Not the data set's own reader: it holds whole files in memory.
            with pq.ParquetFile(file, pre_buffer=False) as opened:
                for part in opened.iter_batches(_BATCH, columns=wanted, use_threads=False):
                    where = f"rows {first + 1} to {first + part.num_rows} of {file}"
                    first += part.num_rows
                    for name in [name for role in roles[1:] for name in role]:
                        if part.column(name).null_count:
                            raise ValueError(f"source, {where}: column {name!r} has missing values")
                    y, w = ([_values(part.column(name)) for name in role] for role in roles[1:])
                    if numbers and not any(part.column(name).null_count for name in names):
                        x = [_values(part.column(name)) for name in names]
                        X = np.column_stack(x) if x else np.empty((part.num_rows, 0))
                        yield Batch(X, y[0], w[0] if w else None, where, names)
                    else:
                        X = pa.Table.from_batches([part]).select(names)
                        yield Batch(X, y[0], w[0] if w else None, where)
    except (pa.ArrowInvalid, KeyError) as error:  # damage, or a file without one of the columns
        raise ValueError(f"source: {path} cannot be read ({error})") from error


def _values(column: Any) -> np.ndarray:
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    return column.to_numpy(zero_copy_only=False)


def array_batches(X: Any, y: Any, weight: Any) -> Iterator[Batch]:
    """The rows of an array that is larger than memory."""
    for i in range(0, len(X), _BATCH):
        part = slice(i, i + _BATCH)
        where = f"rows {i} to {min(i + _BATCH, len(X)) - 1}"
        yield Batch(X[part], y[part], None if weight is None else weight[part], where)
