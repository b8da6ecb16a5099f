"""Tables in memory, whatever library they come from, as columns of a few kinds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from itertools import compress
from numbers import Real
from typing import Any

import narwhals.stable.v1 as nw
import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.table import TableError, all_of, check_there, listed, shown

_DAY = 86_400.0  # seconds
_DATES = (dt.date, dt.datetime, np.datetime64)
_TRUTH = {"False": 0.0, "True": 1.0}
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
    written: NDArray[Any] | None = None  # numbers and dates as they stand in a file of text

    @classmethod
    def nothing(cls, n: int, kind: str = "number") -> Cells:
        """Gaps alone."""
        return cls(kind, np.broadcast_to(np.array(None if kind == "text" else np.nan), n))

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

    def take(self, rows: NDArray[Any]) -> Cells:
        """Some of the rows."""
        written = None if self.written is None else self.written[rows]
        return replace(self, values=self.values[rows], written=written)

    def as_text(self, known: Container[str] = ()) -> Cells:
        """The same as levels of a category; 3.0 is ``3``, 007 and what is known stay as written."""
        if self.kind == "text":
            return self
        codes = _codes(self.values.tolist())
        if self.written is None:
            return Cells("text", codes)
        dates = self.kind == "date"
        return Cells(
            "text",
            _objects(
                w if w and (c is None or dates or w in known or w[0] == "0" <= w[1:2] <= "9") else c
                for c, w in zip(codes.tolist(), self.written.tolist(), strict=True)
            ),
        )

    def of_kind(self, kind: str, known: Container[str] = ()) -> Cells | None:
        """The same cells as numbers, text or dates; None where that is not what they are."""
        if self.kind == kind:
            return self
        if kind == "text" and (self.kind == "number" or self.written is not None):
            return self.as_text(known)
        if self.gaps.all():
            return Cells.nothing(len(self.values), kind)
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
            written = [c.written for c in found if c and c.written is not None]
            columns[name] = Cells(
                kind,
                np.concatenate([c.values for c in found if c]),
                order,
                np.concatenate(written) if len(written) == len(found) else None,
            )
        return cls(columns, sum(frame.n for frame in frames), first.named)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.n, len(self.columns)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        columns = self.of_kinds(dict.fromkeys(self.columns, "number")).columns.values()
        return np.column_stack([c.values for c in columns]).astype(dtype or np.float64)

    def take(self, rows: NDArray[Any]) -> Frame:
        """Some of the rows."""
        if rows.dtype == bool and rows.all():
            return self
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


Readers = Mapping[str, Callable[[], Cells]]


def holds_columns(X: Any) -> bool:
    """Whether X is a frame of some library, or an array whose cells may be anything."""
    return _is_frame(X) or _cells_of(X) is not None


def frame_of(
    X: Any,
    most: int | None = None,
    unread: Callable[[list[str], bool], Iterable[str]] | None = None,
) -> Frame:
    """The columns of a frame, a mapping, a two-dimensional array or list; `most` rows of a frame.

    Columns that `unread` takes out of their names, given whether these are the frame's own, are
    not looked at: they are gaps, whatever they hold.
    """
    if isinstance(X, Frame):
        return X
    if isinstance(X, Mapping):
        readers, n, named = _from_mapping(X)
    else:
        readers, n, named = _from_frame(X, most) if _is_frame(X) else _from_cells(X)
    skipped = () if unread is None else unread(list(readers), named)
    return put_together({**readers, **dict.fromkeys(skipped, lambda: Cells.nothing(n))}, n, named)


def put_together(columns: Readers, n: int, named: bool) -> Frame:
    """All columns, or one error that names all that cannot be used."""
    made, wrong, kind = dict[str, Cells](), list[str](), ValueError
    for name, read in columns.items():
        try:
            made[name] = read()
        except (TypeError, ValueError, OverflowError) as error:
            kind = TypeError if isinstance(error, TypeError) else kind
            far = isinstance(error, OverflowError)
            wrong.append(f"the column {name!r} {'holds a date too far away' if far else error}")
    if wrong:
        raise kind(all_of(wrong))
    return Frame(made, n, named)


def _is_frame(X: Any) -> bool:
    return isinstance(X, Frame) or hasattr(X, "__dataframe__") or hasattr(type(X), "columns")


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


def _from_mapping(X: Mapping[Any, Any]) -> tuple[Readers, int, bool]:
    arrays = {
        str(name): _objects(c) if isinstance(c, list | tuple) else np.asarray(c)
        for name, c in X.items()
    }
    shapes = {a.shape for a in arrays.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
        raise TableError("X: the columns must be 1-d and of the same length")
    return {name: lambda a=a: read_cells(a) for name, a in arrays.items()}, *shape, True


def _from_cells(X: Any) -> tuple[Readers, int, bool]:
    """By position."""
    found = _cells_of(X)
    try:
        cells: NDArray[Any] = np.asarray(X) if found is None else found
    except ValueError as error:
        raise ValueError(f"X: {error}") from error
    if cells.ndim != 2:
        raise ValueError(f"X must have two dimensions, rows and columns; got {cells.ndim}")
    columns = range(cells.shape[1])
    return {f"x{j}": lambda j=j: read_cells(cells[:, j]) for j in columns}, len(cells), False


def _from_frame(X: Any, most: int | None) -> tuple[Readers, int, bool]:
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
        wide = kind in (nw.Int128, nw.UInt128)  # which NumPy has not
        return read_cells((column.cast(nw.Float64) if wide else column).to_numpy())
    if kind == nw.Datetime:
        naive = column.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        return read_cells((naive if kind.time_zone else column).to_numpy())
    cells = _objects(column.to_list())
    # pyarrow has dictionaries of anything.
    category = kind in (nw.Categorical, nw.Enum, nw.Boolean)
    if not category or any(isinstance(v, dict | list) for v in cells):
        return read_cells(cells)
    order, native = (), column.to_native()
    # pandas has it there, pyarrow in the type.
    ordered = getattr(getattr(native, "cat", None), "ordered", None)
    ordered = getattr(getattr(native, "type", None), "ordered", ordered)
    if ordered or (ordered is None and kind == nw.Enum):
        codes = map(code, column.cat.get_categories().to_list())
        order = tuple(dict.fromkeys(c for c in codes if c is not None))
    return Cells("text", _codes(cells.tolist()), order)


def read_cells(cells: NDArray[Any]) -> Cells:
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
    return Cells("text", _objects(code(v) for v in values))


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


def code(v: Any) -> str | None:
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
    found = {v: code(v) for v in dict.fromkeys(values)}
    return _objects(map(found.__getitem__, values))


def _objects(values: Iterable[Any]) -> NDArray[Any]:
    """A column of objects, whatever they are."""
    values = list(values)
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


def _article(word: str) -> str:
    return f"an {word}" if word[0].lower() in "aeiou" else f"a {word}"
