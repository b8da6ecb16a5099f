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

from conjugp._persistence.files import FileFormatError
from conjugp.cli._cells import (
    is_missing,
    kind_of,
    numbers,
    other_decimal,
    texts,
    truths,
    whole_numbers,
)
from conjugp.cli._tables import Table, TableError, listed, suggestion

FORMAT = 1
KINDS = ("number", "boolean", "onehot", "ordinal")
LABELS = ("int", "bool", "text")
MOST_CATEGORIES = 200  # of one column; beyond that it is a name or an identifier
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
class Column:
    """One column: its kind, its categories, and what stands in for a missing value, if anything."""

    name: str
    kind: str
    categories: tuple[str, ...] = ()
    fill: float | str | None = None

    @property
    def features(self) -> list[str]:
        """The names of the features that it becomes."""
        if self.kind == "onehot":
            return [f"{self.name}={category}" for category in self.categories]
        return [self.name]

    def encode(
        self, cells: NDArray[Any], decimal: str, unseen: str | None = None
    ) -> NDArray[np.float64]:
        """Cells (n,) -> features (n, 1 or number of categories)."""
        if self.kind in ("number", "boolean"):
            values, bad = numbers(cells, decimal) if self.kind == "number" else truths(cells)
            if bad.any():
                wanted = "numbers" if self.kind == "number" else "true or false"
                sign = other_decimal(cells[bad], decimal) if self.kind == "number" else None
                hint = _decimal_hint(sign) if sign else ""
                raise TableError(
                    f"the column {self.name!r} has to hold {wanted}, and has "
                    f"{_where(bad, cells)}{hint}"
                )
            if np.isinf(values).any():
                raise TableError(
                    f"the column {self.name!r} has infinite or too large numbers: "
                    f"{_where(np.isinf(values), cells)}"
                )
            gaps = np.isnan(values)
            if gaps.any():
                self._check_gaps(gaps)
                values[gaps] = self.fill
            return values[:, None]
        found = texts(cells)
        gaps = np.array([cell is None for cell in found])
        if gaps.any():
            self._check_gaps(gaps)
            found = [self.fill if cell is None else cell for cell in found]
        place = {category: i for i, category in enumerate(self.categories)}
        codes = np.array([place.get(cell, -1) for cell in found])  # type: ignore[arg-type]
        new = codes < 0
        if new.any() and (unseen != "ignore" or self.kind == "ordinal"):
            may_be = unseen is not None and self.kind == "onehot"
            raise TableError(
                f"the column {self.name!r} has a category that the training table did not have: "
                f"{_where(new, found)}{'; --unseen ignore makes it zeros' if may_be else ''}"
            )
        if self.kind == "ordinal":
            return codes[:, None].astype(float)
        return (codes[:, None] == np.arange(len(place))).astype(float)

    def _check_gaps(self, gaps: NDArray[np.bool_]) -> None:
        if self.fill is None:
            raise TableError(
                f"the column {self.name!r} has no value in {_rows(gaps)}; "
                "fill the gaps, or fit with --missing impute"
            )


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
        missing = [c.name for c in self.columns if c.name not in table.columns]
        if missing:
            hint = suggestion(missing[0], table.names) if len(missing) == 1 else ""
            raise TableError(
                f"the table has not {listed('column', missing)}, which the model needs{hint}"
            )
        parts = [
            column.encode(table.columns[column.name], self.decimal_of(table), unseen)
            for column in self.columns
        ]
        return np.concatenate(parts, axis=1)

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
                f"they are not in {_rows(bad)}"
            )
        if not values.any():
            raise TableError(f"the weights in {self.weight!r} are all 0")
        return values

    def refilled(self, table: Table) -> Encoding:
        """With what stands in for missing values taken from these rows alone."""
        columns = []
        for column in self.columns:
            cells = table.columns[column.name]
            if column.fill is not None:
                column = replace(column, fill=_fill(column, cells, self.decimal))
            columns.append(column)
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
            columns = tuple(_column_from(entry) for entry in data["columns"])
            made = cls(
                columns,
                _text(data["target"]),
                _text(data["labels"]),
                None if data["weight"] is None else _text(data["weight"]),
                tuple(map(_text, data["ignored"])),
                _text(data["decimal"]),
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
        column = table.columns[name]
        how = choice.named.get(name)
        if how is None or how == "refuse":
            how = choice.default if kinds[name] == "text" else kinds[name]
        column, gap = _fitted(name, column, how, choice.orders.get(name), missing, decimal)
        columns.append(column)
        if gap.any():
            gaps[name] = gap
    if gaps and missing == "refuse":
        parts = [f"{name!r} has no value in {_rows(gap)}" for name, gap in list(gaps.items())[:5]]
        more = f", and {len(gaps) - 5} more columns have gaps" if len(gaps) > 5 else ""
        raise TableError(
            f"the column {'; '.join(parts)}{more}: fill the gaps, leave columns out with --ignore, "
            "or say --missing impute"
        )
    encoding = Encoding(tuple(columns), target, labels, weight, tuple(ignore), decimal)
    return encoding, _notes(table, encoding, cells)


def _fitted(
    name: str,
    cells: NDArray[Any],
    how: str,
    order: tuple[str, ...] | None,
    missing: str,
    decimal: str,
) -> tuple[Column, NDArray[np.bool_]]:
    """A column with its categories and fill, and which of its cells have no value."""
    if how in ("number", "boolean"):
        gap = np.isnan((numbers(cells, decimal) if how == "number" else truths(cells))[0])
        column = Column(name, how)
    else:
        found = texts(cells)
        gap = np.array([cell is None for cell in found])
        distinct = {cell for cell in found if cell is not None}
        if len(distinct) > MOST_CATEGORIES:
            sign = other_decimal(distinct, decimal)
            advice = _decimal_hint(sign) if sign else f"; leave it out with --ignore {name!r}"
            raise TableError(
                f"the column {name!r} has {len(distinct)} different values, too many for "
                f"categories{advice}"
            )
        whole = whole_numbers(list(distinct))
        categories = order or tuple(sorted(distinct, key=int if whole is not None else None))
        if new := sorted(distinct - set(categories)):
            raise TableError(f"the order given for {name!r} leaves out {listed('value', new)}")
        column = Column(name, how, categories)
    fill = _fill(column, cells, decimal) if missing == "impute" else None
    return replace(column, fill=fill), gap


def _fill(column: Column, cells: NDArray[Any], decimal: str) -> float | str:
    """The median of numbers, the most frequent of anything else."""
    if column.kind == "number":
        values = numbers(cells, decimal)[0]
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else 0.0
    if column.kind == "boolean":
        values = truths(cells)[0]
        return float(np.nansum(values) * 2 > np.isfinite(values).sum())
    counts = Counter(texts(cells))
    # Among equals the first category, so that the order of rows does not matter.
    return max(column.categories, key=lambda c: (counts[c], -column.categories.index(c)))


def _refuse_kinds(table: Table, kinds: dict[str, str], choice: Categorical, decimal: str) -> None:
    """Raise for columns that nothing was said about and that cannot be features as they are."""
    open_ = {name: kind for name, kind in kinds.items() if name not in choice.named}
    if empty := [name for name, kind in kinds.items() if kind == "empty"]:
        raise TableError(
            f"{listed('column', empty)} {'have' if len(empty) > 1 else 'has'} no values at all; "
            f"leave {'them' if len(empty) > 1 else 'it'} out with --ignore"
        )
    if dates := [name for name, kind in open_.items() if kind == "date"]:
        raise TableError(
            f"{listed('column', dates)} {'hold' if len(dates) > 1 else 'holds'} dates or times, "
            f"such as {_shown(_example(table.columns[dates[0]]))}; turn them into numbers (days, "
            "hours, a month), or leave them out with --ignore"
        )
    refused = [name for name, how in choice.named.items() if how == "refuse"]
    text = [name for name, kind in open_.items() if kind == "text"]
    if signs := [name for name in text if other_decimal(table.columns[name], decimal)]:
        named = listed("column", signs)
        example = _shown(_example_with("," if decimal == "." else ".", table.columns[signs[0]]))
        if decimal == ".":
            raise TableError(
                f"{named} {'hold' if len(signs) > 1 else 'holds'} numbers with a decimal comma, "
                f"such as {example}; say --decimal , (or --categorical onehot={signs[0]} where "
                "they are categories)"
            )
        raise TableError(
            f"{named} {'hold' if len(signs) > 1 else 'holds'} numbers with a decimal point, such "
            f"as {example}, where --decimal says a comma; write all numbers alike"
        )
    text = [name for name in refused if kinds[name] == "text"] or text
    if text and (choice.default == "refuse" or text[0] in refused):
        example = _example(table.columns[text[0]])
        raise TableError(
            f"{listed('column', text)} {'hold' if len(text) > 1 else 'holds'} text, such as "
            f"{_shown(example)}; say --categorical onehot or ordinal, or leave columns out with "
            "--ignore"
        )


def _target_cells(table: Table, target: str) -> list[str]:
    """The cells of the target as text, all there."""
    found = texts(table.column(target, "target column"))
    gaps = np.array([cell is None for cell in found])
    if gaps.any():
        raise TableError(f"the target {target!r} has no value in {_rows(gaps)}")
    return [str(cell) for cell in found]


def _label_type(column: NDArray[Any], cells: list[str], target: str) -> str:
    """How the labels are kept; an error for what cannot be classes."""
    if column.dtype.kind in "mM":
        raise TableError(f"the target {target!r} holds dates, not classes")
    distinct = set(cells)
    if len(distinct) < 2:
        raise TableError(
            f"the target {target!r} has only one class, {_shown(cells[0])}; two or more are needed"
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


def _column_from(entry: dict[str, Any]) -> Column:
    """A column from plain data; raises where a part is missing or of the wrong type."""
    categories = tuple(map(_text, entry["categories"]))
    made = Column(_text(entry["name"]), _text(entry["kind"]), categories, entry["fill"])
    coded = made.kind in ("onehot", "ordinal")
    if made.kind not in KINDS or coded != bool(categories):
        raise ValueError(f"a column of kind {made.kind!r}")
    if made.fill is not None and (
        made.fill not in categories if coded else not isinstance(made.fill, int | float)
    ):
        raise TypeError(f"a fill of {made.fill!r}")
    return made


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _example(cells: NDArray[Any]) -> Any:
    return next((cell for cell in cells if not isinstance(cell, str) or not is_missing(cell)), "")


def _example_with(sign: str, cells: NDArray[Any]) -> Any:
    return next(cell for cell in cells if isinstance(cell, str) and sign in cell)


def _decimal_hint(sign: str) -> str:
    """The end of a sentence on numbers that are some with another decimal sign."""
    word = "comma" if sign == "," else "point"
    return f"; if a {word} stands before the decimals, say --decimal {sign}"


def _shown(cell: Any) -> str:
    """A cell as it stands in a sentence: quoted, and cut where it is long."""
    text = str(cell)
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _rows(which: NDArray[np.bool_]) -> str:
    """``3 rows (the first is row 7)``; rows count from 1, the header is none."""
    first = int(which.argmax()) + 1
    n = int(which.sum())
    return f"row {first}" if n == 1 else f"{n} rows (the first is row {first})"


def _where(which: NDArray[np.bool_], cells: Sequence[Any] | NDArray[Any]) -> str:
    """``'abc' in row 7``, and in how many more rows there is the like."""
    first, n = int(which.argmax()), int(which.sum())
    more = f", and the like in {n - 1} more row{'s' if n > 2 else ''}" if n > 1 else ""
    return f"{_shown(cells[first])} in row {first + 1}{more}"
