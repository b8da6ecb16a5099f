"""How the columns of a table become the features of a model, and its target the labels.

Chosen once, from the training table; kept in the model file; applied row by row to any table that
has the same columns, in whatever order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.cells import (
    is_missing,
    kind_of,
    numbers,
    other_decimal,
    texts,
    truths,
    whole_numbers,
)
from conjugp._inputs.columns import Column, encoded, rows_of, shown, text_of
from conjugp._inputs.table import Table, TableError, listed, suggestion
from conjugp._persistence.files import FileFormatError

FORMAT = 1
LABELS = ("int", "bool", "text")
MOST_NUMERIC_LABELS = 20  # fractions beyond that are something to regress on


@dataclass(frozen=True)
class Categorical:
    """What to do with columns of text: ``refuse``, ``onehot`` or ``ordinal``, by column if named.

    `orders` has the categories of ordinal columns, lowest first, where they were given.
    """

    default: str = "refuse"
    named: dict[str, str] = field(default_factory=dict)
    orders: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, choices: Sequence[str], names: Sequence[str]) -> Categorical:
        """From ``onehot``, ``onehot=city``, ``ordinal=size`` or ``ordinal=size:S<M<L``."""
        default: str = "refuse"
        named: dict[str, str] = {}
        orders: dict[str, tuple[str, ...]] = {}
        for choice in choices:
            how, given, name = choice.partition("=")
            if how not in ("onehot", "ordinal", "refuse"):
                raise TableError(
                    f"--categorical must be onehot, ordinal or refuse, or one of these with a "
                    f"column as in onehot=COLUMN; got {choice!r}"
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


@dataclass(frozen=True)
class Encoding:
    """The columns of a model in order, the target, and how its labels are written."""

    columns: tuple[Column, ...]
    target: str
    labels: str
    weight: str | None = None
    ignored: tuple[str, ...] = ()
    decimal: str = "."

    @property
    def features(self) -> list[str]:
        """Names of the features in order."""
        return [name for column in self.columns for name in column.features]

    def decimal_of(self, table: Table) -> str:
        """What stands before the decimals in a table: as told, or as in the training table."""
        return table.decimal or self.decimal

    def encode(self, table: Table, unseen: str | None = None) -> NDArray[np.float64]:
        """The features of all rows, (n, n_features).

        `unseen` is ``refuse`` or ``ignore``; None refuses where a command has no such option.
        """
        return encoded(self.columns, table, self.decimal_of(table), unseen)

    def read_labels(self, table: Table) -> NDArray[Any]:
        """The labels of all rows, of the type that the training labels had."""
        found = _target_cells(table, self.target)
        if self.labels == "text":
            return np.array(found)
        if self.labels == "bool":
            values, bad = truths(np.array(found, dtype=object))
            if bad.any() or np.isnan(values).any():
                raise TableError(f"the target {self.target!r} has to hold true or false")
            return values.astype(bool)
        whole = whole_numbers(found)
        if whole is None:
            raise TableError(f"the target {self.target!r} has to hold whole numbers")
        return whole

    def read_weights(self, table: Table) -> NDArray[np.float64] | None:
        """The weights of all rows, if a column has them."""
        if self.weight is None:
            return None
        values, bad = numbers(table.column(self.weight, "weight column"), self.decimal_of(table))
        bad |= ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            raise TableError(
                f"the weights in {self.weight!r} have to be numbers of at least 0; "
                f"they are not in {rows_of(bad)}"
            )
        if not values.any():
            raise TableError(f"the weights in {self.weight!r} are all 0")
        return values

    def refilled(self, table: Table) -> Encoding:
        """With what stands in for missing values taken from these rows alone."""
        columns = (
            c if c.fill is None else c.imputing(table.columns[c.name], self.decimal)
            for c in self.columns
        )
        return replace(self, columns=tuple(columns))

    def to_json(self) -> dict[str, Any]:
        """As plain data for a model file."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Encoding:
        """From what `to_json` gave; anything else is an error."""
        if not isinstance(data, dict):
            raise FileFormatError(
                "the model was not made by `conjugp fit`: its file does not say how columns "
                "become features"
            )
        if data.get("format") != FORMAT:
            raise FileFormatError(
                f"the model's columns are written in format {data.get('format')!r}; "
                f"this version of conjugp reads {FORMAT}"
            )
        try:
            columns = tuple(map(Column.read, data["columns"]))
            made = cls(
                columns,
                text_of(data["target"]),
                text_of(data["labels"]),
                None if data["weight"] is None else text_of(data["weight"]),
                tuple(map(text_of, data["ignored"])),
                text_of(data["decimal"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError("the model's description of its columns is damaged") from error
        if made.labels not in LABELS or made.decimal not in (".", ",") or not columns:
            raise FileFormatError("the model's description of its columns is damaged")
        return made


def choose_encoding(
    table: Table,
    target: str,
    *,
    categorical: Sequence[str] = (),
    missing: str = "refuse",
    ignore: Sequence[str] = (),
    weight: str | None = None,
) -> tuple[Encoding, list[str]]:
    """The encoding of a training table, and notes on what in it looks odd."""
    decimal = table.decimal or "."
    cells = _target_cells(table, target)
    labels = _label_type(table.columns[target], cells, target)
    for name, role in ((weight, "--weight"), *((name, "--ignore") for name in ignore)):
        if name == target:
            raise TableError(f"{role} {target!r} is the target")
    there = dict.fromkeys([*table.names, *table.skipped])
    for name in ignore:
        if name not in there:
            raise TableError(
                f"--ignore: there is no column {name!r}{suggestion(name, list(there))}"
            )
    if weight is not None:
        table.column(weight, "weight column")
    others = {target, weight, *ignore}
    kept = [name for name in table.names if name not in others]
    if not kept:
        raise TableError(f"there is no column besides the target {target!r} to learn from")
    choice = Categorical.parse(categorical, kept)
    kinds = {name: kind_of(table.columns[name], decimal) for name in kept}
    _refuse_kinds(table, kinds, choice, decimal)
    columns, gaps = [], {}
    for name in kept:
        found, how = table.columns[name], choice.named.get(name)
        if how is None or how == "refuse":
            how = choice.default if kinds[name] == "text" else kinds[name]
        column = Column.fit(name, found, how, choice.orders.get(name), decimal)
        columns.append(column.imputing(found, decimal) if missing == "impute" else column)
        gap = column.gaps(found, decimal)
        if gap.any():
            gaps[name] = gap
    if gaps and missing == "refuse":
        parts = [f"{name!r} has no value in {rows_of(gap)}" for name, gap in list(gaps.items())[:5]]
        more = f", and {len(gaps) - 5} more columns have gaps" if len(gaps) > 5 else ""
        raise TableError(
            f"the column {'; '.join(parts)}{more}: fill the gaps, leave columns out with --ignore, "
            "or say --missing impute"
        )
    encoding = Encoding(tuple(columns), target, labels, weight, tuple(ignore), decimal)
    return encoding, _notes(table, encoding, cells)


def _refuse_kinds(table: Table, kinds: dict[str, str], choice: Categorical, decimal: str) -> None:
    """Raise for columns that nothing was said about and that cannot be features as they are."""
    open_ = {name: kind for name, kind in kinds.items() if name not in choice.named}

    def hold(names: list[str]) -> str:
        return f"{listed('column', names)} {'hold' if len(names) > 1 else 'holds'}"

    if empty := [name for name, kind in kinds.items() if kind == "empty"]:
        raise TableError(
            f"{listed('column', empty)} {'have' if len(empty) > 1 else 'has'} no values at all; "
            f"leave {'them' if len(empty) > 1 else 'it'} out with --ignore"
        )
    if dates := [name for name, kind in open_.items() if kind == "date"]:
        raise TableError(
            f"{hold(dates)} dates or times, such as {shown(_example(table.columns[dates[0]]))}; "
            "turn them into numbers (days, hours, a month), or leave them out with --ignore"
        )
    refused = [name for name, how in choice.named.items() if how == "refuse"]
    text = [name for name, kind in open_.items() if kind == "text"]
    if signs := [name for name in text if other_decimal(table.columns[name], decimal)]:
        sign, word = (",", "comma") if decimal == "." else (".", "point")
        example = shown(
            next(c for c in table.columns[signs[0]] if isinstance(c, str) and sign in c)
        )
        advice = ", where --decimal says a comma; write all numbers alike"
        if decimal == ".":
            choose = f"--categorical onehot={signs[0]}"
            advice = f"; say --decimal , (or {choose} where they are categories)"
        raise TableError(f"{hold(signs)} numbers with a decimal {word}, such as {example}{advice}")
    text = [name for name in refused if kinds[name] == "text"] or text
    if text and (choice.default == "refuse" or text[0] in refused):
        raise TableError(
            f"{hold(text)} text, such as {shown(_example(table.columns[text[0]]))}; say "
            "--categorical onehot or ordinal, or leave columns out with --ignore"
        )


def _target_cells(table: Table, target: str) -> list[str]:
    """The cells of the target as text, all there."""
    found = texts(table.column(target, "target column"))
    gaps = np.array([cell is None for cell in found])
    if gaps.any():
        raise TableError(f"the target {target!r} has no value in {rows_of(gaps)}")
    return [str(cell) for cell in found]


def _label_type(column: NDArray[Any], cells: list[str], target: str) -> str:
    """How the labels are kept; an error for what cannot be classes."""
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
    if whole_numbers(list(distinct)) is not None:
        return "int"
    if len(distinct) > MOST_NUMERIC_LABELS and kind_of(column) == "number":
        raise TableError(
            f"the target {target!r} holds {len(distinct)} different numbers with decimals, which "
            "are not classes; conjugp does not do regression"
        )
    return "text"


def _notes(table: Table, encoding: Encoding, labels: list[str]) -> list[str]:
    """Sentences on columns that look like a mistake."""
    notes = []
    for column in encoding.columns:
        cells = texts(table.columns[column.name])
        distinct = set(cells)
        if len(distinct) == 1 and table.n_rows > 1:
            notes.append(f"the column {column.name!r} has the same value in every row")
        if _like_identifier(column, cells, distinct):
            notes.append(
                f"the column {column.name!r} has a different whole number in every row, as an "
                f"identifier has; if it is one, leave it out with --ignore {column.name!r}"
            )
    rare = sorted(label for label, n in Counter(labels).items() if n == 1)
    if rare:
        notes.append(f"of {listed('class', rare, plural='classes')} there is only one row")
    return notes


def _like_identifier(column: Column, cells: list[str | None], distinct: set[str | None]) -> bool:
    """Whether all cells are whole numbers without repetition, dense enough to be a count."""
    if column.kind != "number" or len(cells) < 10 or len(distinct) < len(cells):
        return False
    whole = whole_numbers([cell or "" for cell in cells])
    if whole is None:
        return False
    named = column.name.casefold()
    return named.endswith(("id", "index", "key")) or bool(np.ptp(whole) == len(whole) - 1)


def _example(cells: NDArray[Any]) -> Any:
    return next((cell for cell in cells if not isinstance(cell, str) or not is_missing(cell)), "")
