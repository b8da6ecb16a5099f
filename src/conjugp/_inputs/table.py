"""Sentences about tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NAMED = 200  # columns in an error about a name that is not there


class TableError(ValueError):
    """A table that cannot be used, and why, in one sentence."""


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


def all_of(wrong: list[str], table: str = "X") -> str:
    """One sentence on all columns that something is wrong with."""
    more = f"; and {len(wrong) - 5} more columns" if len(wrong) > 5 else ""
    return f"{table}: {'; '.join(wrong[:5])}{more}"


def check_there(names: Iterable[str], there: Collection[str], table: str, why: str) -> None:
    """Raise for columns that are not there, all of them."""
    missing = [name for name in names if name not in there]
    if missing:
        hint = suggestion(missing[0], list(there)) if len(missing) == 1 else ""
        named = listed("column", missing, most=_NAMED)
        raise TableError(f"{table} has not {named}, which the model {why}{hint}")


def shown(cell: Any) -> str:
    """A cell as it stands in a sentence: quoted, and cut where it is long."""
    text = str(cell)
    return repr(text if len(text) <= 40 else text[:37] + "...")


def rows_of(which: NDArray[np.bool_]) -> str:
    """``3 rows (the first is row 7)``; rows count from 1, the header is none."""
    first = int(which.argmax()) + 1
    n = int(which.sum())
    return f"row {first}" if n == 1 else f"{n} rows (the first is row {first})"
