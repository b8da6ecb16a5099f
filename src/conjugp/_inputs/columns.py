"""What a column of a table is, and the features that it becomes.

Chosen once, from the rows of a fit; applied row by row to any table that has the same columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.cells import numbers, other_decimal, texts, truths, whole_numbers
from conjugp._inputs.table import Table, TableError, listed, suggestion

KINDS = ("number", "boolean", "onehot", "ordinal")
MOST_CATEGORIES = 200  # of one column; beyond that it is a name or an identifier


@dataclass(frozen=True)
class Column:
    """One column: its kind, its categories, and what stands in for a missing value, if anything."""

    name: str
    kind: str
    categories: tuple[str, ...] = ()
    fill: float | str | None = None

    @classmethod
    def fit(
        cls,
        name: str,
        cells: NDArray[Any],
        kind: str,
        order: tuple[str, ...] | None = None,
        decimal: str = ".",
    ) -> Column:
        """A column of that kind, with the categories that these cells or `order` have."""
        if kind in ("number", "boolean"):
            return cls(name, kind)
        distinct = {cell for cell in texts(cells) if cell is not None}
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
        return cls(name, kind, categories)

    @classmethod
    def read(cls, entry: dict[str, Any]) -> Column:
        """From plain data; raises where a part is missing or of the wrong type."""
        categories = tuple(map(text_of, entry["categories"]))
        made = cls(text_of(entry["name"]), text_of(entry["kind"]), categories, entry["fill"])
        coded = made.kind in ("onehot", "ordinal")
        if made.kind not in KINDS or coded != bool(categories):
            raise ValueError(f"a column of kind {made.kind!r}")
        if made.fill is not None and (
            made.fill not in categories if coded else not isinstance(made.fill, int | float)
        ):
            raise TypeError(f"a fill of {made.fill!r}")
        return made

    def gaps(self, cells: NDArray[Any], decimal: str = ".") -> NDArray[np.bool_]:
        """Which cells have no value."""
        if self.categories:
            return np.array([cell is None for cell in texts(cells)])
        return np.isnan(self._values(cells, decimal)[0])

    def imputing(self, cells: NDArray[Any], decimal: str = ".") -> Column:
        """With what stands in for gaps: the median of numbers, the most frequent of others."""
        if self.categories:
            counts, place = Counter(texts(cells)), self.categories.index
            # Among equals the first category, so that the order of rows does not matter.
            return replace(self, fill=max(self.categories, key=lambda c: (counts[c], -place(c))))
        values = self._values(cells, decimal)[0]
        values = values[np.isfinite(values)]
        if self.kind == "boolean":
            return replace(self, fill=float(values.sum() * 2 > len(values)))
        return replace(self, fill=float(np.median(values)) if len(values) else 0.0)

    def _values(self, cells: NDArray[Any], decimal: str) -> tuple[NDArray[np.float64], NDArray]:
        """The numbers of the cells, NaN for none, and which cells are something else."""
        return numbers(cells, decimal) if self.kind == "number" else truths(cells)

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
        if not self.categories:
            values, bad = self._values(cells, decimal)
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
                f"the column {self.name!r} has no value in {rows_of(gaps)}; "
                "fill the gaps, or fit with --missing impute"
            )


def encoded(
    columns: Sequence[Column], table: Table, decimal: str = ".", unseen: str | None = None
) -> NDArray[np.float64]:
    """The features of all rows, (n, n_features); columns are found by name."""
    missing = [c.name for c in columns if c.name not in table.columns]
    if missing:
        hint = suggestion(missing[0], table.names) if len(missing) == 1 else ""
        raise TableError(
            f"the table has not {listed('column', missing)}, which the model needs{hint}"
        )
    parts = [column.encode(table.columns[column.name], decimal, unseen) for column in columns]
    return np.concatenate(parts, axis=1)


def text_of(value: Any) -> str:
    """The value, if it is text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _decimal_hint(sign: str) -> str:
    """The end of a sentence on numbers that are some with another decimal sign."""
    word = "comma" if sign == "," else "point"
    return f"; if a {word} stands before the decimals, say --decimal {sign}"


def shown(cell: Any) -> str:
    """A cell as it stands in a sentence: quoted, and cut where it is long."""
    text = str(cell)
    return repr(text if len(text) <= 40 else text[:37] + "...")


def rows_of(which: NDArray[np.bool_]) -> str:
    """``3 rows (the first is row 7)``; rows count from 1, the header is none."""
    first = int(which.argmax()) + 1
    n = int(which.sum())
    return f"row {first}" if n == 1 else f"{n} rows (the first is row {first})"


def _where(which: NDArray[np.bool_], cells: Sequence[Any] | NDArray[Any]) -> str:
    """``'abc' in row 7``, and in how many more rows there is the like."""
    first, n = int(which.argmax()), int(which.sum())
    more = f", and the like in {n - 1} more row{'s' if n > 2 else ''}" if n > 1 else ""
    return f"{shown(cells[first])} in row {first + 1}{more}"
