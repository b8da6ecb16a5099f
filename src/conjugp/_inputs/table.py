"""A table in memory, columns by name, and sentences about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_NAMED = 200  # columns in an error about a name that is not there


class TableError(ValueError):
    """A table that cannot be used, and why, in one sentence."""


@dataclass(frozen=True)
class Table:
    """Columns by name, all of the same length.

    Cells of a CSV file are the text between its delimiters, less the space around it. Columns of
    the other formats have NumPy's types; text and its gaps are objects, str or None.
    """

    columns: dict[str, NDArray[Any]]
    n_rows: int
    decimal: str | None = None  # what stands before the decimals in its text, where it was told
    skipped: tuple[str, ...] = ()  # columns of the file that were left out

    @classmethod
    def of(cls, columns: Mapping[str, ArrayLike]) -> Table:
        """The table of columns in memory, such as those of a frame."""
        made = {str(name): _column(column) for name, column in columns.items()}
        shapes = {column.shape for column in made.values()}
        if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
            raise TableError("the columns must be 1-d and of the same length")
        return cls(made, shape[0])

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def column(self, name: str, role: str = "column") -> NDArray[Any]:
        """A column; an error that suggests names like it if there is none."""
        if name not in self.columns:
            raise TableError(f"there is no {role} {name!r}{suggestion(name, self.names)}")
        return self.columns[name]

    def take(self, rows: NDArray[np.intp]) -> Table:
        """Some of the rows."""
        return replace(
            self, columns={name: c[rows] for name, c in self.columns.items()}, n_rows=len(rows)
        )

    def without(self, names: set[str]) -> Table:
        """The table less some of its columns."""
        return replace(self, columns={n: c for n, c in self.columns.items() if n not in names})


def _column(values: ArrayLike) -> NDArray[Any]:
    """A column as those of files are: text and its gaps are objects, str or None."""
    column = np.asarray(values)
    if column.dtype.kind not in "OU" or column.ndim != 1:
        return column
    return np.array([None if _is_gap(v) else str(v).strip() for v in column.tolist()], dtype=object)


def _is_gap(value: Any) -> bool:
    nan = isinstance(value, float) and value != value
    return value is None or nan or type(value).__name__ in ("NAType", "NaTType")  # pandas' own


def suggestion(name: str, names: list[str]) -> str:
    """The end of a sentence about a name that is not there."""
    folded = {n.casefold(): n for n in reversed(names)}
    close = [folded[n] for n in get_close_matches(name.casefold(), folded, 3, 0.6)]
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    if names and all(_is_number(n) for n in names):
        return "; the first line holds only numbers, so the file may have no header"
    shown = ", ".join(map(repr, names[:_NAMED])) + (", ..." if len(names) > _NAMED else "")
    return f"; the columns are {shown}" if names else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def listed(noun: str, names: list[str], most: int = 5, plural: str | None = None) -> str:
    """``the column 'a'``, or ``the columns 'a', 'b' and 3 more``."""
    shown = ", ".join(map(repr, names[:most]))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"the {noun if len(names) == 1 else plural or noun + 's'} {shown}{more}"
