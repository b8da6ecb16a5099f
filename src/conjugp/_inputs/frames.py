"""Tables in memory, whatever library they come from, as columns of a few kinds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any

import narwhals.stable.v1 as nw
import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.table import TableError, check_there, listed, shown

_DAY = 86_400.0  # seconds
_DATES = (dt.date, dt.datetime, np.datetime64)
_TRUTH = {"False": 0.0, "True": 1.0}


@dataclass(frozen=True)
class Cells:
    """One column: numbers (n,), NaN where there is none, or text (n,), None where there is none.

    Dates are numbers of days since 1970. Text may have an order of its levels.
    """

    kind: str  # "number", "text", "date"
    values: NDArray[Any]
    order: tuple[str, ...] = ()
    written: NDArray[Any] | None = None  # numbers and dates as they stand in a file of text

    @property
    def gaps(self) -> NDArray[np.bool_]:
        """Which cells have no value."""
        if self.kind == "text":
            return np.array([v is None for v in self.values], dtype=bool)
        return np.isnan(self.values)

    def take(self, rows: NDArray[Any]) -> Cells:
        """Some of the rows."""
        written = None if self.written is None else self.written[rows]
        return replace(self, values=self.values[rows], written=written)

    def as_text(self, known: Container[str] = ()) -> Cells:
        """The same as levels of a category; 3.0 is ``3``, 007 and what is known stay as written."""
        if self.kind == "text":
            return self
        codes = [code(v) for v in self.values.tolist()]
        if self.written is not None:
            dates = self.kind == "date"
            codes = [
                w if w and (c is None or dates or w in known or w[0] == "0" <= w[1:2] <= "9") else c
                for c, w in zip(codes, self.written.tolist(), strict=True)
            ]
        return Cells("text", _objects(codes))

    def of_kind(self, kind: str, known: Container[str] = ()) -> Cells | None:
        """The same cells as numbers, text or dates; None where that is not what they are."""
        if self.kind == kind:
            return self
        if kind == "text" and (self.kind == "number" or self.written is not None):
            return self.as_text(known)
        if self.gaps.all():
            return Cells(kind, np.full(len(self.values), None if kind == "text" else np.nan))
        if kind == "number" and self.kind == "text" and {*self.values} <= {None, *_TRUTH}:
            return Cells(kind, np.array([_TRUTH.get(v, np.nan) for v in self.values]))
        return None


@dataclass(frozen=True)
class Frame:
    """Columns by name, or by position as ``x0``, ``x1`` where they have none."""

    columns: dict[str, Cells]
    n: int
    named: bool  # whether columns are found by their names

    @classmethod
    def joined(cls, frames: Sequence[Frame]) -> Frame:
        """The rows of several frames with the same columns; text where one of them has text."""
        first, columns = frames[0], {}
        frames = [frame.only(first.columns) for frame in frames]
        for name in first.columns:
            parts = [frame.columns[name] for frame in frames]
            there = [c.kind for c in parts if not c.gaps.all()] or [parts[0].kind]
            kind = "text" if "text" in there else there[0]
            found = [c.of_kind(kind) for c in parts]
            if None in found:
                raise ValueError(f"X: the column {name!r} holds {' and '.join(sorted(set(there)))}")
            orders = {c.order: None for c in parts}
            order = parts[0].order if len(orders) == 1 else tuple(sorted(set().union(*orders)))
            columns[name] = Cells(kind, np.concatenate([c.values for c in found if c]), order)
        return cls(columns, sum(frame.n for frame in frames), first.named)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.n, len(self.columns)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        columns = (c.of_kind("number") or c for c in self.columns.values())
        return np.column_stack([c.values for c in columns]).astype(dtype or np.float64)

    def take(self, rows: NDArray[Any]) -> Frame:
        """Some of the rows."""
        columns = {name: cells.take(rows) for name, cells in self.columns.items()}
        return replace(self, columns=columns, n=len(np.arange(self.n)[rows]))

    def of_kinds(
        self, kinds: Mapping[str, str], known: Mapping[str, Container[str]] | None = None
    ) -> Frame:
        """The columns named, of the kinds that they had in a fit; an error that names all others.

        `known` has the levels of columns of text.
        """
        columns, wrong = {}, []
        for name, kind in kinds.items():
            cells = self.columns[name]
            columns[name] = cells.of_kind(kind, (known or {}).get(name, ()))
            if columns[name] is None:
                wrong.append(
                    f"the column {name!r} held {kind}s when the model was fitted, and holds "
                    f"{cells.kind}s now{_example(cells)}"
                )
        if wrong:
            raise TableError(all_of(wrong))
        return replace(self, columns=columns)

    def only(self, names: Iterable[str]) -> Frame:
        """Some of the columns, found by name; an error that says which are missing."""
        names = list(names)
        check_there(names, self.columns, "X", "was fitted with")
        return replace(self, columns={name: self.columns[name] for name in names})


def holds_columns(X: Any) -> bool:
    """Whether X is a frame of some library, or an array whose cells may be anything."""
    return _is_frame(X) or _cells_of(X) is not None


def frame_of(X: Any, most: int | None = None) -> Frame:
    """The columns of a frame, a mapping, a two-dimensional array or list; some rows of a frame."""
    if isinstance(X, Frame):
        return X
    if isinstance(X, Mapping):
        arrays = {str(name): np.asarray(column) for name, column in X.items()}
        shapes = {a.shape for a in arrays.values()}
        if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
            raise TableError("X: the columns must be 1-d and of the same length")
        return put_together({n: lambda a=a: read_cells(a) for n, a in arrays.items()}, *shape, True)
    if _is_frame(X):
        return _from_frame(X, most)
    found = _cells_of(X)
    cells: NDArray[Any] = np.asarray(X) if found is None else found
    if cells.ndim != 2:
        raise ValueError(f"X must have two dimensions, rows and columns; got {cells.ndim}")
    names = [f"x{j}" for j in range(cells.shape[1])]
    columns = {name: lambda j=j: read_cells(cells[:, j]) for j, name in enumerate(names)}
    return put_together(columns, len(cells), False)


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
    return put_together(
        {name: lambda name=name: _from_series(table[name]) for name in names}, len(table), True
    )


def put_together(columns: Mapping[str, Callable[[], Cells]], n: int, named: bool) -> Frame:
    """All columns, or one error that names all that cannot be used."""
    made, wrong, kind = dict[str, Cells](), list[str](), ValueError
    for name, read in columns.items():
        try:
            made[name] = read()
        except (TypeError, ValueError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else kind
            wrong.append(f"the column {name!r} {error}")
    if wrong:
        raise kind(all_of(wrong))
    return Frame(made, n, named)


def all_of(wrong: list[str]) -> str:
    """One sentence on all columns that something is wrong with."""
    more = f"; and {len(wrong) - 5} more columns" if len(wrong) > 5 else ""
    return "X: " + "; ".join(wrong[:5]) + more


def _example(cells: Cells) -> str:
    """``, such as 'abc' in row 7``: the first text that is no number."""
    for row, v in enumerate(cells.values if cells.kind == "text" else (), 1):
        try:
            float(v or 0)
        except ValueError:
            return f", such as {shown(v)} in row {row}"
    return ""


def _from_series(column: Any) -> Cells:
    kind = column.dtype
    if kind.is_numeric() and kind != nw.Decimal:
        return _numbers(column.cast(nw.Float64).to_numpy())
    if kind == nw.Boolean:
        return read_cells(_objects(column.to_list()))
    if kind in (nw.Categorical, nw.Enum):
        order = ()
        native = column.to_native()
        # pandas has it there, pyarrow in the type.
        ordered = getattr(getattr(native, "cat", native), "ordered", None)
        ordered = getattr(getattr(native, "type", None), "ordered", ordered)
        if ordered or (ordered is None and kind == nw.Enum):
            order = tuple(code(v) or "" for v in column.cat.get_categories().to_list())
        cells = _objects(code(v) for v in column.to_list())
        return Cells("text", cells, order)
    return read_cells(_objects(column.to_list()))


def read_cells(cells: NDArray[Any]) -> Cells:
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
    return Cells("text", _objects(None if _is_gap(v) else code(v) for v in values))


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


def code(v: Any) -> str | None:
    """A level's text: 3.0 and 3 are ``3``; None for a gap."""
    if _is_gap(v):
        return None
    if isinstance(v, float) and v.is_integer() and abs(v) < 1e15:
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
