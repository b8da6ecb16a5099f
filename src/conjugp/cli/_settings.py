"""Options that commands share, and what they make of a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from conjugp._inputs.table import Table
from conjugp._rows.group import ALONE, Group
from conjugp.cli._app import Refusal
from conjugp.cli._encoding import Encoding, choose_encoding
from conjugp.cli._ranks import joint_sample
from conjugp.cli._scores import check_known, split
from conjugp.cli._tables import read_table

TableArgument = Annotated[
    Path, typer.Argument(metavar="TABLE", help="CSV, Parquet or NPZ file; - is CSV on stdin.")
]
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="A file that fit wrote.")]
Target = Annotated[str, typer.Option(help="The column to predict.")]
OptionalTarget = Annotated[str | None, typer.Option(help="The column to predict.")]
CategoricalOption = Annotated[
    list[str],
    typer.Option(
        "--categorical",
        metavar="CHOICE",
        help="Columns of text: onehot, ordinal or refuse (the default); onehot=COLUMN for one "
        "column; ordinal=COLUMN:LOW<MIDDLE<HIGH with an order. May be repeated.",
    ),
]
Missing = Annotated[
    str,
    typer.Option(
        metavar="refuse|impute",
        help="Missing values: an error, or medians and most frequent categories.",
    ),
]
Ignore = Annotated[
    list[str], typer.Option(metavar="COLUMN", help="Leave a column out. May be repeated.")
]
Keep = Annotated[
    list[str],
    typer.Option(metavar="COLUMN", help="Show a column, also an ignored one. May be repeated."),
]
Weight = Annotated[str | None, typer.Option(metavar="COLUMN", help="Weights of the rows.")]
Delimiter = Annotated[
    str | None,
    typer.Option(metavar="CHARACTER", help="Between the cells of a CSV file; found out if left."),
]
EncodingName = Annotated[
    str | None, typer.Option("--encoding", metavar="NAME", help="Of a CSV file; UTF-8 if left.")
]
Decimal = Annotated[
    str | None,
    typer.Option(
        metavar=".|,",
        help="What stands before the decimals in a CSV file; if left, the point, or with a model "
        "what its training table had.",
    ),
]
TestSize = Annotated[
    float, typer.Option(min=0, max=0.9, help="Share of the rows held out for the scores.")
]
TestFile = Annotated[
    Path | None,
    typer.Option("--test", metavar="TABLE", help="Rows for the scores, instead of a share."),
]


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
        """Some of the rows."""
        weight = None if self.weight is None else self.weight[rows]
        return EncodedRows(
            self.table.take(rows), self.X[rows], self.y[rows], weight, self.place[rows]
        )


@dataclass(frozen=True)
class Training:
    """A training table: its encoding, the rows to train on and those held out, if any."""

    encoding: Encoding
    all: EncodedRows
    train: EncodedRows
    test: EncodedRows | None
    notes: list[str]


def prepare(
    path: Path,
    target: str,
    reading: Reading,
    test_size: float,
    test: Path | None,
    seed: int,
    group: Group = ALONE,
) -> Training:
    """Read a table, choose its encoding and set rows aside.

    Of several ranks each has its share of the rows; the encoding is that of all.
    """
    if reading.missing not in ("refuse", "impute"):
        raise Refusal(f"--missing must be refuse or impute; got {reading.missing!r}")
    share = (group.rank, group.size)
    table = group.all(lambda: reading.table(path, share=share))
    sample = joint_sample(table, target, group)
    encoding, notes = choose_encoding(
        sample,
        target,
        categorical=reading.categorical,
        missing=reading.missing,
        ignore=reading.ignore,
        weight=reading.weight,
    )
    if test is not None or test_size == 0:
        rows = group.all(lambda: EncodedRows.of(table, encoding))
        held_out = None
        if test is not None:
            known = np.unique(np.concatenate(group.gather(np.unique(rows.y))))
            held_out = group.all(lambda: EncodedRows.of(reading.table(test, share=share), encoding))
            group.all(lambda: check_known(held_out.y, known, target))
        return Training(encoding, rows, rows, held_out, notes)
    labels = group.all(lambda: encoding.read_labels(table))
    first, second = group.all(lambda: split(labels, test_size, seed))
    encoding = encoding.refilled(joint_sample(table.take(first), target, group))
    rows = group.all(lambda: EncodedRows.of(table, encoding))
    return Training(encoding, rows, rows.take(first), rows.take(second), notes)
