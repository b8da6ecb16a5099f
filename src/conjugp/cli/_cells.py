"""Tables of files, and what their cells are: numbers, dates, text, or nothing."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.frames import Cells, Frame, code, put_together, read_cells
from conjugp._inputs.table import TableError, check_there, suggestion

# In a column of numbers these stand for a value that is not there; text has only the empty cell.
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?"})
# https://owasp.org/www-community/attacks/CSV_Injection; the last four are the wide forms.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")

_WHOLE = re.compile(r"(0|-?[1-9][0-9]{0,17})\Z")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{3}(\d{3})?)?)?(Z|[+-]\d\d:\d\d)?)?\Z")


@dataclass(frozen=True)
class Table:
    """Columns by name, all of the same length, as they stand in a file.

    Cells of a CSV file are the text between its delimiters, less the space around it. Columns of
    the other formats have NumPy's types; text and its gaps are objects, str or None.
    """

    columns: dict[str, NDArray[Any]]
    n_rows: int
    typed: bool = True  # numbers are numbers, and text is text
    decimal: str | None = None  # what stands before the decimals in its text, where it was told
    skipped: tuple[str, ...] = ()  # columns of the file that were left out
    orders: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of levels, lowest first

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

    def frame(self, names: Iterable[str], decimal: str = ".") -> Frame:
        """Some of the columns, read; `decimal` counts where the table was not told another."""
        check_there(names, self.columns, "the table", "needs")

        def cells(name: str) -> Cells:
            column = self.columns[name]
            if not self.typed:
                return read_text(column, self.decimal or decimal)
            return replace(read_cells(column), order=self.orders.get(name, ()))

        try:
            return put_together({n: lambda n=n: cells(n) for n in names}, self.n_rows, True)
        except (TypeError, ValueError) as error:
            raise TableError(str(error)) from error


def read_text(column: NDArray[Any], decimal: str = ".") -> Cells:
    """A column of text: numbers, dates or truth values where all its cells are, else text."""
    texts = column.tolist()
    there = [t for t in set(texts) if not is_missing(t)]
    numbers = {t: number_in(t, decimal) for t in there}
    if None not in numbers.values():
        values = np.array([numbers.get(t, np.nan) for t in texts], dtype=float)
        return replace(read_cells(values), written=column)
    dates = {t: _date(t) for t in there}
    if None not in dates.values():
        values = np.array([dates.get(t) for t in texts], dtype=object)
        return replace(read_cells(values), written=column)
    if {t.lower() for t in there} <= {"true", "false"}:
        return Cells("text", np.array([t.title() if t in dates else None for t in texts], object))
    return Cells("text", np.array([t or None for t in texts], dtype=object))


def is_missing(cell: str | None) -> bool:
    """Whether a cell of a column of numbers stands for no value."""
    return cell is None or cell.lower() in MISSING


def _date(cell: str) -> dt.datetime | None:
    """The time that a cell holds as ISO 8601 writes it, or None."""
    try:
        return dt.datetime.fromisoformat(cell.removesuffix("Z")) if _DATE.match(cell) else None
    except ValueError:
        return None


def number_in(cell: str, decimal: str = ".") -> float | None:
    """The number that a cell holds, or None; infinity is a number here."""
    if decimal != ".":
        if "." in cell:
            return None
        cell = cell.replace(decimal, ".")
    if "_" in cell:  # a number in Python's source only
        return None
    try:
        value = float(cell)
    except ValueError:
        return None
    return None if value != value else value


def other_decimal(cells: Iterable[Any], decimal: str = ".") -> str | None:
    """The comma, or point, before the decimals of text that is no numbers with the other sign."""
    other = "," if decimal == "." else "."
    present = [cell for cell in cells if isinstance(cell, str) and not is_missing(cell)]
    fits = all(number_in(cell, other) is not None for cell in present)
    return other if fits and any(other in cell for cell in present) else None


def say_decimal(sign: str) -> str:
    """What to say where numbers have another decimal sign than was told."""
    word = "comma" if sign == "," else "point"
    return f"if a {word} stands before the decimals, say --decimal {sign}"


def texts(column: NDArray[Any]) -> list[str | None]:
    """The cells as text, None where there is no value; 3.0 of a typed column is ``3``."""
    if column.dtype.kind == "M":  # others than microseconds would be numbers
        column = column.astype("datetime64[us]")
    return [v if isinstance(v, str) and v else code(v) for v in column.tolist()]


def _is_formula(cell: str) -> bool:
    """Whether a spreadsheet would run a cell: it begins as a formula does and is no number."""
    if not cell.startswith(_FORMULA):
        return False
    return all(number_in(cell, decimal) is None for decimal in ".,")


def escaped(cell: str) -> str:
    """A cell of a CSV file that no spreadsheet takes for a formula: an apostrophe comes first.

    Also before one that has apostrophes already, so that `unescaped` gives back what there was.
    """
    return f"'{cell}" if _is_formula(cell.lstrip("'")) else cell


def unescaped(cell: str) -> str:
    """The cell that `escaped` was given."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell.lstrip("'")) else cell


def whole_numbers(cells: list[str]) -> NDArray[np.int64] | None:
    """The integers that all cells are, written as integers are printed; None if some are not."""
    if not all(map(_WHOLE.match, set(cells))):
        return None
    return np.array([int(cell) for cell in cells], dtype=np.int64)
