"""A table in memory, columns by name, and sentences about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
