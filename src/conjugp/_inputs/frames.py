"""Tables in memory, whatever library they come from, as columns of a few kinds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from itertools import compress
from numbers import Real
from typing import Any

import narwhals.stable.v1 as nw
import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.table import TableError, listed, suggestion

_DAY = 86_400.0  # seconds
_DATES = (dt.date, dt.datetime, np.datetime64)
_NUMBERS, _NO_NUMBERS = (Real, Decimal), (bool, np.timedelta64)
_GAPS = ("NoneType", "NAType", "NaTType")  # by name: pandas need not be there
_BLANK = "\0 \t\r\n"


@dataclass(frozen=True)
class Cells:
    """One column: numbers (n,), NaN where there is none, or text (n,), None where there is none.

    Dates are numbers of days since 1970. Text may have an order of its levels.
    """

    kind: str  # "number", "text", "date"
    values: NDArray[Any]
    order: tuple[str, ...] = ()

    @cached_property
    def gaps(self) -> NDArray[np.bool_]:
        """Which cells have no value."""
        if self.kind == "text":
            return np.array([v is None for v in self.values], dtype=bool)
        return np.isnan(self.values)

    @cached_property
    def coded(self) -> tuple[list[str | None], NDArray[np.intp]]:
        """The different texts, a gap being one, and which of them each cell has (n,)."""
        place = {v: i for i, v in enumerate(dict.fromkeys(self.values))}
        codes = np.fromiter(map(place.__getitem__, self.values), np.intp, len(self.values))
        return list(place), codes

    def as_text(self) -> Cells:
        """The same as levels of a category; 3.0 is ``3``."""
        return self if self.kind == "text" else Cells("text", _codes(self.values.tolist()))


@dataclass(frozen=True)
class Frame:
    """Columns by name, or by position as ``x0``, ``x1`` where they have none."""

    columns: dict[str, Cells]
    n: int
    named: bool

    def take(self, rows: NDArray[np.bool_]) -> Frame:
        """Some of the rows."""
        if rows.all():
            return self
        columns = {n: replace(c, values=c.values[rows]) for n, c in self.columns.items()}
        return replace(self, columns=columns, n=int(rows.sum()))

    def only(self, names: Iterable[str]) -> Frame:
        """Some of the columns, found by name; an error that says which are missing."""
        names = list(names)
        missing = [name for name in names if name not in self.columns]
        if missing:
            hint = suggestion(missing[0], list(self.columns)) if len(missing) == 1 else ""
            raise TableError(
                f"X has not {listed('column', missing)}, which the model was fitted with{hint}"
            )
        return replace(self, columns={name: self.columns[name] for name in names})


def holds_columns(X: Any) -> bool:
    """Whether X is a frame of some library, or an array whose cells may be anything."""
    return _is_frame(X) or _cells_of(X) is not None


def frame_of(
    X: Any,
    most: int | None = None,
    unread: Callable[[list[str], bool], Iterable[str]] | None = None,
) -> Frame:
    """The columns of a frame, or of a two-dimensional array or list; `most` rows of a frame.

    Columns that `unread` takes out of their names, given whether these are the frame's own, are
    not looked at: they are gaps, whatever they hold.
    """
    readers, n, named = _from_frame(X, most) if _is_frame(X) else _from_cells(X)
    skipped = set() if unread is None else set(unread(list(readers), named))
    made, wrong, kind = dict[str, Cells](), list[str](), ValueError
    for name, read in readers.items():
        try:
            gaps = name in skipped
            made[name] = Cells("number", np.broadcast_to(np.nan, n)) if gaps else read()
        except (TypeError, ValueError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else kind
            far = isinstance(error, OverflowError)
            wrong.append(f"the column {name!r} {'holds a date too far away' if far else error}")
    if wrong:  # one error that names all that cannot be used
        more = f"; and {len(wrong) - 5} more columns" if len(wrong) > 5 else ""
        raise kind("X: " + "; ".join(wrong[:5]) + more)
    return Frame(made, n, named)


def _is_frame(X: Any) -> bool:
    return hasattr(X, "__dataframe__") or hasattr(type(X), "columns")


def _cells_of(X: Any) -> NDArray[Any] | None:
    """An array or list of rows that holds more than numbers, as an array of objects."""
    if isinstance(X, np.ndarray):
        return X if X.dtype.kind in "OUSmM" else None
    if not isinstance(X, list | tuple) or not X or not isinstance(X[0], list | tuple):
        return None
    if not all(isinstance(row, list | tuple) and len(row) == len(X[0]) for row in X):
        return None
    kinds = {type(v) for row in X for v in row}
    if all(issubclass(k, Real) or (hasattr(k, "__len__") and k is not str) for k in kinds):
        return None
    out = np.empty((len(X), len(X[0])), dtype=object)
    for row, cells in zip(out, X, strict=True):
        row[:] = cells
    return out


Readers = tuple[dict[str, Callable[[], Cells]], int, bool]


def _from_cells(X: Any) -> Readers:
    """By position."""
    found = _cells_of(X)
    try:
        cells: NDArray[Any] = np.asarray(X) if found is None else found
    except ValueError as error:
        raise ValueError(f"X: {error}") from error
    if cells.ndim != 2:
        raise ValueError(f"X must have two dimensions, rows and columns; got {cells.ndim}")
    columns = range(cells.shape[1])
    return {f"x{j}": lambda j=j: _read(cells[:, j]) for j in columns}, len(cells), False


def _from_frame(X: Any, most: int | None) -> Readers:
    """Through narwhals, whatever the library."""
    if hasattr(X, "collect"):
        raise TypeError(f"X must be in memory, and is {_article(type(X).__name__)}: collect it")
    names = [str(name) for name in getattr(X, "column_names", getattr(X, "columns", ()))]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TableError(f"X has {listed('column', twice)} more than once")
    if hasattr(X, "set_axis"):  # pandas, whose names need not be text
        X = X.set_axis([str(j) for j in range(len(names))], axis=1)
    table = nw.from_native(X, eager_only=True)
    table = table if most is None else table.head(most)
    keys = zip(names, table.columns, strict=True)
    return {n: lambda k=k: _from_series(table[k]) for n, k in keys}, len(table), True


def _from_series(column: Any) -> Cells:
    kind = column.dtype
    if kind.is_numeric() and kind != nw.Decimal:
        wide = kind in (nw.Int128, nw.UInt128)  # which NumPy has not
        return _read((column.cast(nw.Float64) if wide else column).to_numpy())
    if kind == nw.Datetime:
        naive = column.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        return _read((naive if kind.time_zone else column).to_numpy())
    cells = _objects(column.to_list())
    # pyarrow has dictionaries of anything.
    category = kind in (nw.Categorical, nw.Enum, nw.Boolean)
    if not category or any(isinstance(v, dict | list) for v in cells):
        return _read(cells)
    order = ()
    of_pandas = getattr(getattr(column.to_native(), "cat", None), "ordered", None)
    if of_pandas or (of_pandas is None and kind == nw.Enum):
        codes = map(_code, column.cat.get_categories().to_list())
        order = tuple(dict.fromkeys(code for code in codes if code is not None))
    return Cells("text", _codes(cells.tolist()), order)


def _read(cells: NDArray[Any]) -> Cells:
    """A column of cells of any types."""
    if cells.dtype.kind in "iuf":
        return _numbers(cells)
    if cells.dtype.kind == "M":
        return Cells("date", _days(cells))
    values = list(cells) if cells.dtype.kind == "m" else cells.tolist()
    rest = [v for v in values if type(v) is not str]
    if len(rest) < len(values) and all(map(_is_gap, rest)):
        return Cells("text", _codes([v if type(v) is str else None for v in values]))
    there = np.array([not _is_gap(v) for v in values], dtype=bool)
    present = list(compress(values, there))
    kinds = {type(v) for v in present}
    if kinds and kinds <= {bool, np.bool_}:
        return Cells("text", _codes([None if _is_gap(v) else v for v in values]))
    if all(issubclass(k, _NUMBERS) and k not in _NO_NUMBERS for k in kinds):
        found = np.full(len(values), np.nan)
        found[there] = [_float(v) for v in present]
        return _numbers(found)
    if all(issubclass(k, _DATES) for k in kinds):
        return Cells("date", _days(_objects(None if _is_gap(v) else v for v in values)))
    _check_levels(values)
    return Cells("text", _objects(_code(v) for v in values))


def _check_levels(values: list[Any]) -> None:
    """Raise for cells that can be no levels."""
    for place, v in enumerate(values):
        if isinstance(v, str | bool | np.bool_) or _is_gap(v):
            continue
        if isinstance(v, _NUMBERS) and not isinstance(v, np.timedelta64):
            if abs(_float(v)) == np.inf:
                raise ValueError(f"holds an infinite or too large number in row {place + 1}")
            continue
        holds = f"holds {_article(type(v).__name__)} in row {place + 1}"
        if isinstance(v, _DATES):
            raise TypeError(f"{holds}, but not dates alone: make all of them dates, or text")
        raise TypeError(
            f"{holds}, and its argument must be a string, a number, a date or missing: leave the "
            "column out with ignore"
        )


def _numbers(values: NDArray[Any]) -> Cells:
    with np.errstate(over="ignore"):
        values = np.asarray(values, dtype=np.float64)
    if np.isinf(values).any():
        where = int(np.isinf(values).argmax()) + 1
        raise ValueError(f"holds an infinite or too large number in row {where}")
    return Cells("number", values)


def _float(v: Any) -> float:
    try:
        return float(v)
    except OverflowError:
        return np.inf


def _days(values: NDArray[Any]) -> NDArray[np.float64]:
    """Dates, or objects that are dates or None, as days since 1970."""
    if values.dtype == object:
        values = np.array([v if v is None else _without_zone(v) for v in values], dtype="M8[us]")
    stamps = values.astype("M8[us]")
    days = stamps.astype(np.int64) / (1e6 * _DAY)
    return np.where(np.isnat(stamps), np.nan, days)


def _without_zone(v: Any) -> Any:
    if getattr(v, "tzinfo", None) is not None:
        v = v.astimezone(dt.timezone.utc).replace(tzinfo=None)
    return np.datetime64(v, "us")


def _is_gap(v: Any) -> bool:
    if isinstance(v, str):
        return not (text := v.strip(_BLANK)) or text.isspace()
    if isinstance(v, Decimal):
        return v.is_nan()
    if isinstance(v, float | np.floating | np.datetime64):
        return bool(v != v)
    return v is None or type(v).__name__ in _GAPS


def _code(v: Any) -> str | None:
    """A level's text: 3.0 and 3 are ``3``; None for a gap."""
    if isinstance(v, str):
        text = str(v).strip(_BLANK)
        return None if not text or text.isspace() else text
    if _is_gap(v):
        return None
    if isinstance(v, np.floating | Decimal):
        v = float(v)
    if isinstance(v, float) and v.is_integer() and abs(v) < 1e15:
        v = int(v)
    return str(v).strip(_BLANK)


def _codes(values: list[Any]) -> NDArray[Any]:
    """The levels' texts of cells that are as different as they are unequal."""
    code = {v: _code(v) for v in dict.fromkeys(values)}
    return _objects(map(code.__getitem__, values))


def _objects(values: Iterable[Any]) -> NDArray[Any]:
    """A column of objects, whatever they are."""
    values = list(values)
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _article(word: str) -> str:
    return f"an {word}" if word[0].lower() in "aeiou" else f"a {word}"
