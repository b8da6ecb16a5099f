"""What commands make of a table: how it is read, rows to train on and to hold out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.frames import Cells, Frame
from conjugp._inputs.table import TableError, suggestion
from conjugp._rows.group import ALONE, Group
from conjugp.cli._cells import Table
from conjugp.cli._roles import Categorical, Roles, label_type, note_rare, notes_on, target_cells
from conjugp.cli._scores import check_known, split
from conjugp.cli._tables import read_table


@dataclass(frozen=True)
class Reading:
    """How to read a table and what its columns are."""

    categorical: list[str] = field(default_factory=list)
    missing: str = "impute"
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

    def frame(self, table: Table, roles: Roles) -> tuple[Frame, Categorical]:
        """The columns to learn from, those to ignore without cells, and which are categories."""
        there = dict.fromkeys([*table.names, *table.skipped])
        for name in self.ignore:
            if name not in there:
                raise TableError(
                    f"--ignore: there is no column {name!r}{suggestion(name, list(there))}"
                )
        others = {roles.target, roles.weight, *self.ignore}
        names = [name for name in table.names if name not in others]
        if not names:
            raise TableError(
                f"there is no column besides the target {roles.target!r} to learn from"
            )
        choice = Categorical.parse(self.categorical, names)
        frame = table.frame(names, roles.decimal)
        sign = None if table.typed else roles.decimal
        frame = choice.applied(frame, sign, gaps=self.missing == "impute")
        frame.columns.update(dict.fromkeys(self.ignore, Cells.nothing(table.n_rows)))
        return frame, choice


@dataclass(frozen=True)
class TableRows:
    """Rows of a table: what a model looks at, labels, weights, and the table to show cells from."""

    table: Table
    frame: Frame
    y: NDArray[Any]
    weight: NDArray[np.float64] | None
    place: NDArray[np.intp]  # in the file, from 0

    @classmethod
    def of(cls, table: Table, frame: Frame, roles: Roles) -> TableRows:
        """All rows of a table; a table to look at need not have weights."""
        weight = roles.read_weights(table) if roles.weight in table.columns else None
        return cls(table, frame, roles.read_labels(table), weight, np.arange(table.n_rows))

    def take(self, rows: NDArray[np.intp]) -> TableRows:
        weight = None if self.weight is None else self.weight[rows]
        table, frame = self.table.take(rows), self.frame.take(rows)
        return TableRows(table, frame, self.y[rows], weight, self.place[rows])


@dataclass
class Labelled:
    """Rows of a table to score, and what the model has to do with the table."""

    rows: TableRows
    all: TableRows
    train: TableRows | None  # what the model learned from, where this table has it
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
    """A training table: its columns, the rows to train on and those held out, if any."""

    task: Task
    roles: Roles
    categorical: list[str]
    all: TableRows
    train: TableRows
    test: TableRows | None
    notes: list[str]


def prepare(task: Task, group: Group = ALONE) -> Training:
    """Read a table, understand its columns and set rows aside; each rank has its share of rows."""
    reading, target, test = task.reading, task.target, task.test
    for option, names in (("--weight", [reading.weight]), ("--ignore", reading.ignore)):
        if target in names:
            raise TableError(f"{option} {target!r} is the target")
    share = (group.rank, group.size)
    table = group.all(lambda: reading.table(task.table, share=share))
    cells = group.all(lambda: target_cells(table, target))
    cells = [cell for part in group.gather(cells) for cell in part]

    def understood() -> tuple[Roles, Frame, Categorical]:
        labels = label_type(table, cells, target)
        if reading.weight is not None:
            table.column(reading.weight, "weight column")
        roles = Roles(target, labels, reading.weight, table.decimal or ".")
        return roles, *reading.frame(table, roles)

    roles, frame, choice = group.all(understood)
    notes = [*(notes_on(frame, reading.ignore) if group.size == 1 else ()), *note_rare(cells)]
    rows = group.all(lambda: TableRows.of(table, frame, roles))
    train, held_out = rows, None
    if test is not None:

        def other() -> TableRows:
            other = reading.table(test, share=share)
            names = [name for name in frame.columns if name not in reading.ignore]
            columns = other.frame(names, roles.decimal)
            if group.size == 1:  # kinds are those of all ranks' rows
                columns.of_kinds({name: frame.columns[name].kind for name in names})
            return TableRows.of(other, columns, roles)

        held_out = group.all(other)
        known = np.unique(np.concatenate(group.gather(np.unique(rows.y))))
        group.all(lambda: check_known(held_out.y, known, target))
    elif task.test_size:
        first, second = group.all(lambda: split(rows.y, task.test_size, task.seed))
        train, held_out = rows.take(first), rows.take(second)
    return Training(task, roles, choice.codes, rows, train, held_out, notes)
