"""Tables in memory, whatever library they come from, as columns of a few kinds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any

import narwhals.stable.v1 as nw
import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.table import TableError, listed, suggestion

_DAY = 86_400.0  # seconds
_DATES = (dt.date, dt.datetime, np.datetime64)


@dataclass(frozen=True)
class Cells:
    """One column: numbers (n,), NaN where there is none, or text (n,), None where there is none.

    Dates are numbers of days since 1970. Text may have an order of its levels.
    """

    kind: str  # "number", "text", "date"
    values: NDArray[Any]
    order: tuple[str, ...] = ()

    @property
    def gaps(self) -> NDArray[np.bool_]:
        """Which cells have no value."""
        if self.kind == "text":
            return np.array([v is None for v in self.values], dtype=bool)
        return np.isnan(self.values)

    def as_text(self) -> Cells:
        """The same as levels of a category; 3.0 is ``3``."""
        if self.kind == "text":
            return self
        return Cells("text", _objects(_code(v) for v in self.values.tolist()))


@dataclass(frozen=True)
class Frame:
    """Columns by name, or by position as ``x0``, ``x1`` where they have none."""

    columns: dict[str, Cells]
    n: int
    named: bool

    def take(self, rows: NDArray[np.bool_]) -> Frame:
        """Some of the rows."""
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


def frame_of(X: Any, most: int | None = None) -> Frame:
    """The columns of a frame, or of a two-dimensional array or list; `most` rows of a frame."""
    if _is_frame(X):
        return _from_frame(X, most)
    found = _cells_of(X)
    cells: NDArray[Any] = np.asarray(X) if found is None else found
    if cells.ndim != 2:
        raise ValueError(f"X must have two dimensions, rows and columns; got {cells.ndim}")
    names = [f"x{j}" for j in range(cells.shape[1])]
    return _put_together(
        {name: lambda j=j: _read(cells[:, j]) for j, name in enumerate(names)}, len(cells), False
    )


def _is_frame(X: Any) -> bool:
    return hasattr(X, "__dataframe__") or hasattr(X, "columns")


def _cells_of(X: Any) -> NDArray[Any] | None:
    """An array or list of rows that holds more than numbers, as an array of objects."""
    if isinstance(X, np.ndarray):
        return X if X.dtype.kind in "OUSmM" else None
    if not isinstance(X, list | tuple) or not X or not isinstance(X[0], list | tuple):
        return None
    some = next((row for row in X if any(isinstance(v, str) or v is None for v in row)), None)
    if some is None or len({len(row) for row in X}) > 1:
        return None
    return np.array([list(row) for row in X], dtype=object)


def _from_frame(X: Any, most: int | None) -> Frame:
    """Through narwhals, whatever the library."""
    names = [str(name) for name in getattr(X, "column_names", getattr(X, "columns", ()))]
    twice = (
        sorted({name for name in names if names.count(name) > 1})
        if len(set(names)) < len(names)
        else []
    )
    if twice:
        raise TableError(f"X has {listed('column', twice)} more than once")
    if hasattr(X, "set_axis"):  # pandas, whose names need not be text
        X = X.set_axis(names, axis=1)
    table = nw.from_native(X, eager_only=True)
    table = table if most is None else table.head(most)
    return _put_together(
        {name: lambda name=name: _from_series(table[name]) for name in names}, len(table), True
    )


def _put_together(columns: dict[str, Callable[[], Cells]], n: int, named: bool) -> Frame:
    """All columns, or one error that names all that cannot be used."""
    made, wrong, kind = dict[str, Cells](), list[str](), ValueError
    for name, read in columns.items():
        try:
            made[name] = read()
        except (TypeError, ValueError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else kind
            wrong.append(f"the column {name!r} {error}")
    if wrong:
        more = f"; and {len(wrong) - 5} more columns" if len(wrong) > 5 else ""
        raise kind("X: " + "; ".join(wrong[:5]) + more)
    return Frame(made, n, named)


def _from_series(column: Any) -> Cells:
    kind = column.dtype
    if kind.is_numeric() and kind != nw.Decimal:
        return _numbers(column.cast(nw.Float64).to_numpy())
    if kind == nw.Boolean:
        return _read(_objects(column.to_list()))
    if kind in (nw.Categorical, nw.Enum):
        order = ()
        native = column.to_native()
        of_pandas = getattr(getattr(native, "cat", None), "ordered", None)
        if of_pandas or (of_pandas is None and kind == nw.Enum):
            order = tuple(_code(v) or "" for v in column.cat.get_categories().to_list())
        cells = _objects(_code(v) for v in column.to_list())
        return Cells("text", cells, order)
    return _read(_objects(column.to_list()))


def _read(cells: NDArray[Any]) -> Cells:
    """A column of cells of any types."""
    if cells.dtype.kind in "iuf":
        return _numbers(cells.astype(np.float64))
    if cells.dtype.kind == "M":
        return Cells("date", _days(cells))
    values = cells.astype(object).tolist()
    present = [v for v in values if not _is_gap(v)]
    kinds = {type(v) for v in present}
    if not present or all(issubclass(k, Real | Decimal) and k is not bool for k in kinds):
        return _numbers(np.array([np.nan if _is_gap(v) else float(v) for v in values]))
    if all(issubclass(k, _DATES) or k.__name__ == "Timestamp" for k in kinds):
        naive = [None if _is_gap(v) else _without_zone(v) for v in values]
        return Cells("date", _days(np.array(naive, dtype="datetime64[us]")))
    for place, v in enumerate(values):
        if not (_is_gap(v) or isinstance(v, str | bool | np.bool_ | Real | Decimal)):
            raise TypeError(
                f"holds {_article(type(v).__name__)} in row {place + 1}, and its argument must be "
                "a string, a number, a date or missing: leave the column out with ignore"
            )
    return Cells("text", _objects(None if _is_gap(v) else _code(v) for v in values))


def _numbers(values: NDArray[Any]) -> Cells:
    values = np.asarray(values, dtype=np.float64)
    if np.isinf(values).any():
        where = int(np.isinf(values).argmax()) + 1
        raise ValueError(f"holds an infinite or too large number in row {where}")
    return Cells("number", values)


def _days(values: NDArray[Any]) -> NDArray[np.float64]:
    stamps = values.astype("datetime64[us]")
    days = stamps.astype(np.int64) / (1e6 * _DAY)
    return np.where(np.isnat(stamps), np.nan, days)


def _without_zone(v: Any) -> Any:
    if getattr(v, "tzinfo", None) is not None:
        v = v.astimezone(dt.timezone.utc).replace(tzinfo=None)
    return np.datetime64(v, "us")


def _is_gap(v: Any) -> bool:
    if v is None or type(v).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(v, str):
        return not v.strip()
    return isinstance(v, float | np.datetime64) and v != v


def _code(v: Any) -> str | None:
    """A level's text: 3.0 and 3 are ``3``; None for a gap."""
    if _is_gap(v):
        return None
    if isinstance(v, float) and v == int(v) and abs(v) < 1e15:
        v = int(v)
    return str(v).strip("\0 \t\r\n")


def _objects(values: Iterable[Any]) -> NDArray[Any]:
    """A column of objects, whatever they are."""
    values = list(values)
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _article(word: str) -> str:
    return f"an {word}" if word[0].lower() in "aeiou" else f"a {word}"
