"""What the cells of a column are: numbers, truth values, dates, text, or nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# In a column of numbers these stand for a value that is not there; text has only the empty cell.
MISSING = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "?"})
TRUTH = {"true": 1.0, "false": 0.0}
# https://owasp.org/www-community/attacks/CSV_Injection; the last four are the wide forms.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")

_WHOLE = re.compile(r"(0|-?[1-9][0-9]{0,17})\Z")
_TIME = r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[ap]m)?(z| ?[+-]\d{2}:?\d{2})?"
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DATE = re.compile(
    rf"((\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.](\d{{4}}|\d{{2}})"
    rf"|\d{{1,2}}[. -]*{_MONTH}[. -]*\d{{2,4}}|{_MONTH}[. ]*\d{{1,2}},? \d{{4}})"
    rf"([t ]+{_TIME})?|{_TIME})\Z",
    re.IGNORECASE,
)


def kind_of(column: NDArray[Any], decimal: str = ".") -> str:
    """``number``, ``boolean``, ``date``, ``text``, or ``empty`` where there is no value at all."""
    if column.dtype.kind in "mM":
        return "date"
    if column.dtype.kind == "b":
        return "boolean"
    if column.dtype.kind in "iuf":
        return "number" if column.dtype.kind != "f" or not np.isnan(column).all() else "empty"
    quick = _all_numbers(column, decimal)
    if quick is not None and not np.isnan(quick).all():
        return "number"
    present = {cell for cell in column if not is_missing(cell)}
    if not present:
        return "empty" if all(cell is None or cell == "" for cell in column) else "text"
    if all(cell.lower() in TRUTH for cell in present):
        return "boolean"
    if all(number_in(cell, decimal) is not None for cell in present):
        return "number"
    if all(_DATE.match(cell) for cell in present):
        return "date"
    return "text"


def is_missing(cell: str | None) -> bool:
    """Whether a cell of a column of numbers stands for no value."""
    return cell is None or cell.lower() in MISSING


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


def numbers(column: NDArray[Any], decimal: str = ".") -> tuple[NDArray[np.float64], NDArray[Any]]:
    """The numbers of a column, NaN where there is no value, and which cells are not numbers."""
    if column.dtype.kind in "biuf":
        return column.astype(float), np.zeros(len(column), bool)
    if column.dtype.kind in "mM":
        return np.full(len(column), np.nan), np.ones(len(column), bool)
    quick = _all_numbers(column, decimal)
    if quick is not None:
        return quick, np.zeros(len(column), bool)
    found = [None if cell is None else number_in(cell, decimal) for cell in column]
    bad = [n is None and not is_missing(cell) for n, cell in zip(found, column, strict=True)]
    return np.array(found, dtype=float), np.array(bad, dtype=bool)


def _all_numbers(column: NDArray[Any], decimal: str) -> NDArray[np.float64] | None:
    """The numbers of a column of text that has nothing else, quickly; None if it has."""
    try:
        if decimal != "." or "_" in "".join(column):
            return None
        return column.astype(float)
    except (TypeError, ValueError):
        return None


def truths(column: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """1 for true, 0 for false, NaN for no value, and which cells are none of these."""
    if column.dtype.kind == "b":
        return column.astype(float), np.zeros(len(column), bool)
    cells = texts(column)
    values = np.array([np.nan if c is None else TRUTH.get(c.lower(), np.nan) for c in cells], float)
    bad = np.array([c is not None and not is_missing(c) and c.lower() not in TRUTH for c in cells])
    return values, bad


def texts(column: NDArray[Any]) -> list[str | None]:
    """The cells as text, None where there is no value; 3.0 of a typed column is ``3``."""
    if column.dtype == object:
        return [None if cell is None or cell == "" else cell for cell in column]
    if column.dtype.kind == "f":
        return [
            None if np.isnan(v) else str(int(v)) if v == round(v) and abs(v) < 1e15 else repr(v)
            for v in column.tolist()
        ]
    return [str(value) for value in column.tolist()]


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
