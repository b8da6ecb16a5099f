"""Tables on disk: CSV, Parquet and NPZ files as columns of equal length, or one clear error."""

from __future__ import annotations

import csv
import io
import re
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.table import TableError, all_of, listed
from conjugp.cli._cells import Table, unescaped

CSV, PARQUET, NPZ = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".npz",)
FORMATS = (*CSV, *PARQUET, *NPZ)
DELIMITERS = (",", ";", "\t", "|")
_SNIFFED = 50  # records that choose the delimiter
_SAMPLE = 2**20  # characters that they may take
_BLOCK = 10_000  # records turned into columns at a time
# What NumPy and its zip reader raise of files that are not theirs.
_DAMAGED = (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)
_DAMAGED += (SyntaxError, MemoryError, OverflowError)  # NotImplementedError is a RuntimeError


class MissingPackageError(ImportError):
    """An optional package that is not installed."""


def read_table(
    path: Path,
    *,
    delimiter: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    skip: tuple = (),
    share: tuple[int, int] = (0, 1),
) -> Table:
    """The table in a file, its kind told by the end of its name; ``-`` is CSV on standard input.

    `skip` names columns to leave out, and arrays of an NPZ file, which may then be of any length.
    `share` (k, n) is the k-th of n parts: row groups of a Parquet file with enough of them, every
    n-th row otherwise.
    """
    if decimal not in (None, ".", ","):
        raise TableError(f"--decimal must be . or ,; got {decimal!r}")
    k, n = share
    if n == 1:
        return replace(_read(path, delimiter, encoding, skip), decimal=decimal)
    if str(path) == "-":
        raise TableError("several processes cannot share standard input; give a file")
    if path.suffix.lower() in PARQUET and row_groups(path) >= n:
        return replace(read_parquet(path, skip, share), decimal=decimal)
    table = _read(path, delimiter, encoding, skip)
    if table.n_rows < n:
        raise TableError(f"{path} has fewer rows than there are processes")
    return replace(table.take(np.arange(k, table.n_rows, n)), decimal=decimal)


def _read(path: Path, delimiter: str | None, encoding: str | None, skip: tuple) -> Table:
    """The table in a file."""
    if str(path) == "-":
        return read_csv(sys.stdin.buffer.read(), "standard input", delimiter, encoding, skip)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        hint = "; save the sheet as CSV" if suffix in (".xls", ".xlsx", ".ods") else ""
        raise TableError(f"{path}: tables are read from {', '.join(FORMATS)} files{hint}")
    if path.is_dir():
        raise TableError(f"{path} is a folder; give the path of a file")
    if suffix in CSV:
        return read_csv(path.read_bytes(), str(path), delimiter, encoding, skip)
    if delimiter is not None or encoding is not None:
        raise TableError(f"{path}: --delimiter and --encoding are for CSV files")
    return read_parquet(path, skip) if suffix in PARQUET else read_npz(path, skip)


def read_csv(
    data: bytes,
    source: str,
    delimiter: str | None = None,
    encoding: str | None = None,
    skip: tuple = (),
) -> Table:
    """The table in the bytes of a CSV file with a header, quotes as in RFC 4180."""
    text = _decoded(data, source, encoding)
    if "\0" in text:
        raise TableError(f"{source} holds NUL characters; it is not a text table")
    if not text.strip():
        raise TableError(f"{source} is empty")
    if delimiter is None:
        delimiter = _sniffed(text)
    elif delimiter in ("\\t", "tab"):
        delimiter = "\t"
    if len(delimiter) != 1 or delimiter in '"\r\n ':
        raise TableError(f"--delimiter must be one character, or 'tab'; got {delimiter!r}")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(row for row in reader if row)]
        columns: list[list[str]] = [[] for _ in header]
        block: list[list[str]] = []
        for row in reader:
            if len(row) != len(header):
                if not row:
                    continue
                raise TableError(
                    f"{source}: line {reader.line_num} has {_counted(len(row), 'cell')} where the "
                    f"header has {len(header)}"
                )
            block.append(row)
            if len(block) == _BLOCK:
                _append(columns, block)
                block = []
        _append(columns, block)
    except csv.Error as error:
        raise TableError(f"{source}: line {reader.line_num} is not CSV ({error})") from error
    if "'" in text:
        header = [unescaped(name) for name in header]
        columns = [[unescaped(cell) for cell in cells] for cells in columns]
    n_rows = len(columns[0])
    named = [
        (name or f"column {i}", cells)
        for i, (name, cells) in enumerate(zip(header, columns, strict=True), 1)
        # A delimiter at the end of every line makes a column with neither name nor content.
        if name or any(cells)
    ]
    table = _table([(n, np.array(c, dtype=object)) for n, c in named], n_rows, source, skip)
    return replace(table, typed=False)


def need_pyarrow() -> None:
    """Raise unless Parquet files can be read and written."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            'Parquet files need pyarrow: pip install "conjugp[parquet]"'
        ) from error


def row_groups(path: Path) -> int:
    """How many parts a Parquet file was written in."""
    return _parquet(path, lambda file: file.metadata.num_row_groups)


def read_parquet(path: Path, skip: tuple = (), share: tuple[int, int] = (0, 1)) -> Table:
    """The table in a Parquet file, or a share of its row groups."""
    k, n = share
    found = _parquet(
        path, lambda file: file.read_row_groups(range(k, file.metadata.num_row_groups, n))
    )
    columns, orders, wrong, left_out = [], {}, [], set(skip)
    for name, column in zip(found.column_names, found.columns, strict=True):
        made = column if name in left_out else _from_arrow(column)  # it may be of any type there
        if made is None:
            wrong.append(f"the column {name!r} is of type {column.type}")
        elif getattr(column.type, "ordered", False):
            for chunk in column.unify_dictionaries().chunks[:1]:
                orders[name] = tuple(map(str, chunk.dictionary.to_pylist()))
        columns.append((name, made))
    if wrong:
        raise TableError(
            f"{all_of(wrong, str(path))}; numbers, booleans, dates and text can be read; leave "
            "others out with --ignore"
        )
    return replace(_table(columns, found.num_rows, str(path), skip), orders=orders)


def _parquet(path: Path, work: Callable[[Any], Any]) -> Any:
    """work(file) of a Parquet file; one clear error if it is none."""
    need_pyarrow()
    import pyarrow
    from pyarrow import parquet

    with path.open("rb") as file:
        try:
            return work(parquet.ParquetFile(file))
        except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
            raise TableError(f"{path} is not a Parquet file, or damaged") from error


def _from_arrow(column: Any) -> NDArray[Any] | None:
    """A column of Arrow's as an array: numbers, booleans, dates or text; None for others."""
    from pyarrow import types

    kind = column.type
    if types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    whole, gaps = types.is_integer(kind) or types.is_boolean(kind), column.null_count
    if types.is_timestamp(kind) or types.is_date(kind) or (whole and not gaps):
        return column.to_numpy()
    cells = column.to_pylist()
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return np.array([np.nan if v is None else float(v) for v in cells])
    texts = (types.is_boolean, types.is_string, types.is_large_string, types.is_null)
    if any(is_kind(kind) for is_kind in texts):
        return np.array([None if v is None else str(v).strip() for v in cells], dtype=object)
    return None


def read_npz(path: Path, skip: tuple = ()) -> Table:
    """The table in an NPZ file: 1-d arrays are columns, those of a 2-d array X are X0, X1, ..."""
    columns: list[tuple[str, NDArray[Any]]] = []
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files if name not in skip}
            skipped = [(name, np.empty(0)) for name in found.files if name in skip]
    except FileNotFoundError:
        raise
    except _DAMAGED as error:
        raise TableError(f"{path} is not an NPZ file of plain arrays, or damaged") from error
    for name, array in arrays.items():
        if array.dtype.kind not in "biufUM":
            raise TableError(f"{path}: the array {name!r} is of type {array.dtype}")
        if array.ndim not in (1, 2):
            raise TableError(
                f"{path}: the array {name!r} has {array.ndim} dimensions; 1 or 2 can be"
            )
        if array.dtype.kind == "f":
            array = array.astype(float)
        if array.dtype.kind == "U":
            array = np.char.strip(array).astype(object)
        if array.ndim == 1:
            columns.append((name, array))
        else:
            columns += [(f"{name}{i}", column) for i, column in enumerate(array.T)]
    lengths = {name: len(column) for name, column in columns}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{n!r} {len(a)}" for n, a in arrays.items())
        raise TableError(
            f"{path}: arrays of different lengths ({shown}); leave some out with --ignore"
        )
    return _table([*columns, *skipped], next(iter(lengths.values()), 0), str(path), skip)


def _table(columns: list[tuple[str, Any]], n_rows: int, source: str, skip: tuple) -> Table:
    """Columns as a table; an error if it has no rows or a name twice."""
    names = [name for name, _ in columns]
    twice = sorted(name for name, n in Counter(names).items() if n > 1)
    if twice:
        raise TableError(
            f"{source}: {listed('column name', twice)} "
            f"{'stand' if len(twice) > 1 else 'stands'} in the header more than once"
        )
    if n_rows == 0:
        raise TableError(f"{source} has no rows{' below its header' if names else ''}")
    left_out = set(skip)
    kept = {name: column for name, column in columns if name not in left_out}
    return Table(kept, n_rows, skipped=tuple(name for name in names if name in left_out))


def _append(columns: list[list[str]], block: list[list[str]]) -> None:
    """Add records to columns."""
    for column, cells in zip(columns, zip(*block, strict=True), strict=False):
        column.extend(cell.strip() for cell in cells)


def _decoded(data: bytes, source: str, encoding: str | None) -> str:
    """The text of a file: as told, as its byte-order mark says, or UTF-8."""
    marked = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    name = encoding or ("utf-16" if marked else "utf-8")
    try:
        return data.decode(name).removeprefix("\ufeff")
    except LookupError as error:
        raise TableError(f"--encoding {encoding!r} is not the name of an encoding") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        # Latin-1 has control characters there, Windows' own encoding quotes, dashes and the euro.
        likely = "cp1252" if re.search(rb"[\x80-\x9f]", data) else "latin-1"
        raise TableError(
            f"{source}: line {line} is not {name.upper()} text (byte 0x{data[error.start]:02x}); "
            f"say which encoding it has, such as --encoding {likely}"
        ) from error
    except (UnicodeError, ValueError) as error:
        raise TableError(f"{source} cannot be read as {name} ({error})") from error


def _sniffed(text: str) -> str:
    """The delimiter that splits the first records into the most cells, equally many in each."""
    text = text[:_SAMPLE]
    best, most = ",", 1
    for delimiter in DELIMITERS:
        counts = set()
        try:
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            for row, _ in zip((row for row in reader if row), range(_SNIFFED), strict=False):
                counts.add(len(row))
        except csv.Error:
            continue
        if len(counts) == 1 and (count := counts.pop()) > most:
            best, most = delimiter, count
    if most == 1:
        # Ragged under each: the error should be about the one that the header was written with.
        first = text.split("\n", 1)[0]
        best = max(DELIMITERS, key=lambda d: (first.count(d), -DELIMITERS.index(d)))
    return best


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
