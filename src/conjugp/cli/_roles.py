"""What is told or found of a table's columns before a fit: target, weights, categories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.frames import Cells, Frame
from conjugp._inputs.table import TableError, all_of, listed, rows_of, shown, suggestion
from conjugp.cli._cells import (
    Table,
    number_in,
    other_decimal,
    say_decimal,
    texts,
    whole_numbers,
)

LABELS = ("int", "bool", "text")
MOST_NUMERIC_LABELS = 20  # fractions beyond that are something to regress on


@dataclass(frozen=True)
class Roles:
    """The columns that are no features, how labels are written, and numbers in text."""

    target: str
    labels: str
    weight: str | None = None
    decimal: str = "."

    def __post_init__(self) -> None:
        good = isinstance(self.target, str) and isinstance(self.weight, str | None)
        if not good or self.labels not in LABELS or self.decimal not in (".", ","):
            raise ValueError("a role is not what it should be")

    def read_labels(self, table: Table) -> NDArray[Any]:
        """The labels of all rows, of the type that the training labels had."""
        found = target_cells(table, self.target)
        if self.labels == "text":
            return np.array(found)
        if self.labels == "bool":
            if not {cell.lower() for cell in found} <= {"true", "false"}:
                raise TableError(f"the target {self.target!r} has to hold true or false")
            return np.array([cell.lower() == "true" for cell in found])
        whole = whole_numbers(found)
        if whole is None:
            raise TableError(f"the target {self.target!r} has to hold whole numbers")
        return whole

    def read_weights(self, table: Table) -> NDArray[np.float64] | None:
        """The weights of all rows, if a column has them."""
        if self.weight is None:
            return None
        found, sign = table.column(self.weight, "weight column"), table.decimal or self.decimal
        if found.dtype.kind in "biuf":
            values = found.astype(float)
        else:
            values = np.array([number_in(str(v), sign) for v in found.tolist()], dtype=float)
        bad = ~((values >= 0) & np.isfinite(values))
        if bad.any():
            raise TableError(
                f"the weights in {self.weight!r} have to be numbers of at least 0; "
                f"they are not in {rows_of(bad)}"
            )
        if not values.any():
            raise TableError(f"the weights in {self.weight!r} are all 0")
        return values


def target_cells(table: Table, target: str) -> list[str]:
    """The cells of the target as text, all there."""
    found = texts(table.column(target, "target column"))
    gaps = np.array([cell is None for cell in found])
    if gaps.any():
        raise TableError(f"the target {target!r} has no value in {rows_of(gaps)}")
    return [str(cell) for cell in found]


def label_type(table: Table, cells: list[str], target: str) -> str:
    """How the labels are kept, by all cells of the target; an error if they are no classes."""
    column = table.columns[target]
    if column.dtype.kind in "mM":
        raise TableError(f"the target {target!r} holds dates, not classes")
    distinct = set(cells)
    if len(distinct) < 2:
        raise TableError(
            f"the target {target!r} has only one class, {shown(cells[0])}; two or more are needed"
        )
    if column.dtype.kind == "b":
        return "bool"
    if len(distinct) == len(cells) and len(cells) > 2:
        raise TableError(f"the target {target!r} has a different value in every row, not classes")
    if table.typed and column.dtype == object:
        return "text"
    if whole_numbers(list(distinct)) is not None:
        return "int"
    if len(distinct) > MOST_NUMERIC_LABELS and None not in map(number_in, distinct):
        raise TableError(
            f"the target {target!r} holds {len(distinct)} different numbers with decimals, which "
            "are not classes; conjugp does not do regression"
        )
    return "text"


@dataclass(frozen=True)
class Categorical:
    """What to do with text, and by name with any column: ``onehot``, ``ordinal`` or ``refuse``.

    `orders` has the levels of ordinal columns, lowest first, where they were given.
    """

    default: str = "onehot"
    named: dict[str, str] = field(default_factory=dict)
    orders: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, choices: Sequence[str], names: Sequence[str]) -> Categorical:
        """From ``city``, ``onehot``, ``onehot=city``, ``ordinal=size``, ``ordinal=size:S<M<L``."""
        default: str = "onehot"
        named: dict[str, str] = {}
        orders: dict[str, tuple[str, ...]] = {}
        for choice in choices:
            how, given, name = choice.partition("=")
            if choice in names:
                how, given, name = "onehot", "=", choice
            if how not in ("onehot", "ordinal", "refuse"):
                raise TableError(
                    f"--categorical must be a column, as in onehot=COLUMN or ordinal=COLUMN, or "
                    f"onehot, ordinal or refuse for all text; got {choice!r}"
                    f"{suggestion(choice, list(names))}"
                )
            if not given:
                default = how
                continue
            if name not in names and how == "ordinal" and "<" in name:
                name, _, order = name.rpartition(":")
                orders[name] = tuple(part.strip() for part in order.split("<"))
                if len(set(orders[name])) < len(orders[name]) or "" in orders[name]:
                    raise TableError(f"--categorical: {order!r} names a category twice, or none")
            if name not in names:
                raise TableError(
                    f"--categorical: there is no column {name!r}{suggestion(name, list(names))}"
                )
            named[name] = how
        return cls(default, named, orders)

    @property
    def codes(self) -> list[str]:
        """The columns whose numbers are codes."""
        return [name for name, how in self.named.items() if how == "onehot"]

    def applied(self, frame: Frame, decimal: str | None, gaps: bool) -> Frame:
        """The frame with orders where they were asked for; an error that says all that is wrong.

        `decimal` is the sign in text that may be numbers; without `gaps` they are wrong too.
        """
        columns, wrong, sign = dict(frame.columns), [], None
        for name, cells in frame.columns.items():
            text = cells.kind == "text"
            how = self.named.get(name, self.default if text else "number")
            there = (shown(v) for v in cells.values if v is not None)
            if how == "ordinal":
                columns[name] = cells = self._ordered(name, cells)
                new = sorted({*cells.values} - {None, *cells.order})
                if new:
                    wrong.append(f"the order given for {name!r} leaves out {listed('value', new)}")
            elif text and how == "refuse":
                wrong.append(f"the column {name!r} holds text, such as {next(there)}")
            elif text and decimal and name not in self.named:
                if other := other_decimal(cells.values, decimal):
                    sign, example = other, next(v for v in there if other in v)
                    wrong.append(f"the column {name!r} holds text, such as {example}")
            if not gaps and cells.gaps.any():
                wrong.append(f"the column {name!r} has no value in {rows_of(cells.gaps)}")
        if wrong:
            also = f"; {say_decimal(sign)}; if not, say --categorical COLUMN" if sign else ""
            raise TableError(all_of(wrong) + also)
        return replace(frame, columns=columns)

    def _ordered(self, name: str, cells: Cells) -> Cells:
        cells = cells.as_text()
        levels = {v for v in cells.values if v is not None}
        whole = whole_numbers(list(levels)) is not None
        order = self.orders.get(name) or tuple(sorted(levels, key=int if whole else None))
        return replace(cells, order=order)


def notes_on(frame: Frame, ignored: Sequence[str]) -> list[str]:
    """Sentences on columns that look like a mistake."""
    notes = []
    for name, cells in frame.columns.items():
        if name in ignored:
            continue
        values = cells.values[~cells.gaps]
        distinct = len(set(values.tolist()))
        if distinct == 1 and len(values) == frame.n > 1:
            notes.append(f"the column {name!r} has the same value in every row")
        if cells.kind == "number" and 10 <= frame.n == distinct and (values % 1 == 0).all():
            # Dense enough to be a count.
            if name.casefold().endswith(("id", "index", "key")) or np.ptp(values) == frame.n - 1:
                notes.append(
                    f"the column {name!r} has a different whole number in every row, as an "
                    f"identifier has; if it is one, leave it out with --ignore {name!r}"
                )
    return notes


def note_rare(labels: Sequence[str]) -> list[str]:
    """A sentence on classes of one row."""
    rare = sorted(label for label, n in Counter(labels).items() if n == 1)
    return [f"of {listed('class', rare, plural='classes')} there is only one row"] if rare else []
