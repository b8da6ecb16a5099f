"""What commands make of a table: how it is read, its encoding, rows to train on and to hold out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.cells import is_missing, texts
from conjugp._inputs.columns import MOST_CATEGORIES
from conjugp._inputs.table import Table
from conjugp._rows.group import ALONE, Group
from conjugp.cli._encoding import Encoding, choose_encoding
from conjugp.cli._scores import check_known, split
from conjugp.cli._tables import read_table

_SAMPLE = 10_000  # rows of every rank's share that say what columns hold


@dataclass(frozen=True)
class Reading:
    """How to read a table and what its columns are."""

    categorical: list[str] = field(default_factory=list)
    missing: str = "refuse"
    ignore: list[str] = field(default_factory=list)
    weight: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    decimal: str | None = None
    keep: list[str] = field(default_factory=list)  # to show, though they may be ignored

    def table(
        self, path: Path, ignored: tuple[str, ...] = (), share: tuple[int, int] = (0, 1)
    ) -> Table:
        """The table, or a share of it, without the columns to ignore, these or a model's."""
        skip = tuple(name for name in (*self.ignore, *ignored) if name not in self.keep)
        table = read_table(
            path,
            delimiter=self.delimiter,
            encoding=self.encoding,
            decimal=self.decimal,
            skip=skip,
            share=share,
        )
        for name in self.keep:
            table.column(name)
        return table


@dataclass(frozen=True)
class EncodedRows:
    """Rows of a table, encoded: features, labels, weights, and the table to show cells from."""

    table: Table
    X: NDArray[np.float64]
    y: NDArray[Any]
    weight: NDArray[np.float64] | None
    place: NDArray[np.intp]  # in the file, from 0

    @classmethod
    def of(cls, table: Table, encoding: Encoding, unseen: str | None = None) -> EncodedRows:
        """All rows of a table."""
        y, X = encoding.read_labels(table), encoding.encode(table, unseen)
        weight = encoding.read_weights(table) if encoding.weight in table.columns else None
        return cls(table, X, y, weight, np.arange(table.n_rows))

    def take(self, rows: NDArray[np.intp]) -> EncodedRows:
        weight = None if self.weight is None else self.weight[rows]
        return EncodedRows(
            self.table.take(rows), self.X[rows], self.y[rows], weight, self.place[rows]
        )


@dataclass
class Labelled:
    """Rows of a table to score, and what the model has to do with the table."""

    rows: EncodedRows
    all: EncodedRows
    train: EncodedRows | None  # what the model learned from, where this table has it
    seen: int | None  # how many of the rows to score are those; None where it cannot be known


@dataclass(frozen=True)
class Task:
    """What to fit a model to, and which rows to hold out."""

    table: Path
    target: str
    reading: Reading
    test_size: float
    test: Path | None
    seed: int
    command: str


@dataclass(frozen=True)
class Training:
    """A training table: its encoding, the rows to train on and those held out, if any."""

    task: Task
    encoding: Encoding
    all: EncodedRows
    train: EncodedRows
    test: EncodedRows | None
    notes: list[str]


def prepare(task: Task, group: Group = ALONE) -> Training:
    """Read a table, choose its encoding and set rows aside.

    Of several ranks each has its share of the rows; the encoding is that of all.
    """
    reading, target, test = task.reading, task.target, task.test
    share = (group.rank, group.size)
    table = group.all(lambda: reading.table(task.table, share=share))
    sample = joint_sample(table, target, group)
    encoding, notes = choose_encoding(
        sample,
        target,
        categorical=reading.categorical,
        missing=reading.missing,
        ignore=reading.ignore,
        weight=reading.weight,
    )
    if test is not None or task.test_size == 0:
        rows = group.all(lambda: EncodedRows.of(table, encoding))
        held_out = None
        if test is not None:
            known = np.unique(np.concatenate(group.gather(np.unique(rows.y))))
            held_out = group.all(lambda: EncodedRows.of(reading.table(test, share=share), encoding))
            group.all(lambda: check_known(held_out.y, known, target))
        return Training(task, encoding, rows, rows, held_out, notes)
    labels = group.all(lambda: encoding.read_labels(table))
    first, second = group.all(lambda: split(labels, task.test_size, task.seed))
    encoding = encoding.refilled(joint_sample(table.take(first), target, group))
    rows = group.all(lambda: EncodedRows.of(table, encoding))
    return Training(task, encoding, rows, rows.take(first), rows.take(second), notes)


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


def _cells(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The cells of all ranks; truth values are text where another rank's have gaps."""
    if len({part.dtype.kind == "b" for part in parts}) > 1:
        parts = [part.astype(str) if part.dtype.kind == "b" else part for part in parts]
    text = any(part.dtype.kind in "OU" for part in parts)
    return np.concatenate([part.astype(object) if text else part for part in parts])
