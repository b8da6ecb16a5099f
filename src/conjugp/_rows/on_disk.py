"""Rows on disk in the order of `canonical`, however many there are and however they came.

An external sort by a hash of the rows: they go to buckets by their first bits, and every bucket
is put in order in memory. Files have no names, so nothing is left behind by a process that ends.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conjugp._rows.canonical import Rows, Units, canonical, named_digests, ordered
from conjugp._rows.dataset import Data, Dataset

_BITS = 6  # of the hash that choose a bucket
SORTED_BYTES = 2**27  # rows that are put in order at a time
_KEPT_BYTES = 2**24  # rows that wait in memory before they go to their buckets
_LABEL, _WEIGHT = np.dtype("<i4"), np.dtype("<f8")
_NAMES = ("X", "y", "weight")


class _File:
    """A file without a name: appended to, then read anywhere, from any thread."""

    def __init__(self, folder: str) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)
        self.size = 0

    def append(self, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        try:
            while data:
                n = self._file.write(data)
                self.size += n
                data = data[n:]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                errno.ENOSPC,
                f"no space is left in {self._folder} for the rows of the source; free some, or "
                "give another folder as options.spool",
            ) from error

    def read(self, start: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """`count` items from item `start` on."""
        out = np.empty(count, dtype)
        data = out.view(np.uint8).data
        with self._lock:
            self._file.seek(start * dtype.itemsize)
            while data:
                data = data[self._file.readinto(data) :]  # type: ignore[attr-defined]
        return out

    def take(self, index: NDArray[np.int64], width: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Rows of `width` items by their numbers; not by a map, whose pages would count as ours."""
        out = np.empty((len(index), width), dtype)
        for place in np.argsort(index, kind="stable").tolist():
            out[place] = self.read(int(index[place]) * width, width, dtype)
        return out

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        self.close()


class Spool:
    """Takes rows in, in any order; labels are numbers whose meaning may be settled later."""

    def __init__(
        self, n_features: int, dtype: np.dtype[Any], folder: str | os.PathLike[str] | None
    ) -> None:
        self.folder = tempfile.gettempdir() if folder is None else os.fspath(folder)
        self.n_features, self.dtype = n_features, np.dtype(dtype)
        row = [("X", self.dtype, (n_features,)), ("y", _LABEL), ("weight", _WEIGHT)]
        self._row = np.dtype(row)
        self._buckets = [_File(self.folder) for _ in range(2**_BITS)]
        self._waiting: list[NDArray[Any]] = []
        self._bytes = 0
        self.n = 0

    def add(self, X: NDArray[Any], y: NDArray[Any], weight: NDArray[Any]) -> None:
        """Take in rows X (n, D) with labels y (n,) and weights (n,)."""
        rows = np.empty(len(X), self._row)
        rows["X"], rows["y"], rows["weight"] = X, y, weight
        self.n += len(X)
        self._waiting.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= _KEPT_BYTES:
            self._flush()

    def finish(self, classes: NDArray[np.int64], factor: NDArray[np.float64]) -> Store:
        """All rows, in order: label k is class `classes[k]`, whose weights are multiplied."""
        self._flush()
        store = Store(self.n_features, self.dtype, self.folder)
        for bucket in self._buckets:
            self._sort(bucket, _BITS, store, classes, factor)
        return store

    def close(self) -> None:
        """Give the space back."""
        for bucket in self._buckets:
            bucket.close()

    def _flush(self) -> None:
        if self._waiting:
            self._scatter(np.concatenate(self._waiting), self._buckets, 0)
        self._waiting, self._bytes = [], 0

    def _scatter(self, rows: NDArray[Any], buckets: list[_File], used: int) -> None:
        """Add every row to the bucket of the bits of its hash that come after those `used`."""
        # Merged now, so that no bucket is full of one row; and in order, so that cutting is enough.
        found = ordered(np.ascontiguousarray(rows["X"]), rows["y"], rows["weight"])
        assert found.key is not None
        rows = rows[found.place]
        rows["weight"] = found.weight
        which = (found.key << np.uint64(used)) >> np.uint64(64 - _BITS)
        ends = np.cumsum(np.bincount(which.astype(np.int64), minlength=len(buckets)))
        for part, bucket in zip(np.split(rows, ends[:-1]), buckets, strict=True):
            bucket.append(part)

    def _sort(
        self,
        bucket: _File,
        used: int,
        store: Store,
        classes: NDArray[np.int64],
        factor: NDArray[np.float64],
    ) -> None:
        """Append a bucket's rows to the store, in order; a large one bucket by bucket."""
        n = bucket.size // self._row.itemsize
        if bucket.size > SORTED_BYTES and used + _BITS <= 64:
            smaller = [_File(self.folder) for _ in range(2**_BITS)]
            step = max(1, _KEPT_BYTES // self._row.itemsize)
            for i in range(0, n, step):
                rows = bucket.read(i, min(step, n - i), self._row)
                self._scatter(rows, smaller, used)
            bucket.close()
            for part in smaller:
                self._sort(part, used + _BITS, store, classes, factor)
            return
        rows = bucket.read(0, n, self._row)
        bucket.close()
        y = classes[rows["y"]]
        X = np.ascontiguousarray(rows["X"])
        store.append(canonical(X, y, rows["weight"] * factor[y]))


class Store:
    """Distinct weighted rows on disk, in order, in the user's units."""

    def __init__(self, n_features: int, dtype: np.dtype[Any], folder: str) -> None:
        self.n, self.n_features, self.dtype = 0, n_features, dtype
        kinds = {"X": (dtype, n_features), "y": (_LABEL, 1), "weight": (_WEIGHT, 1)}
        self._columns = {name: (_File(folder), *kind) for name, kind in kinds.items()}
        self._sums = np.zeros((3, 2), np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes that all rows would take in memory."""
        return self.n * (self.n_features * self.dtype.itemsize + 16)

    @property
    def digests(self) -> dict[str, str]:
        """What tells these rows from others: the same as in memory."""
        return named_digests(self._sums, self.dtype)

    def append(self, rows: Rows) -> None:
        """Add rows that come after all those before."""
        for name, (file, dtype, _) in self._columns.items():
            file.append(getattr(rows, name).astype(dtype, copy=False))
        self._sums += rows.sums()
        self.n += rows.n

    def read(self, start: int, stop: int) -> Rows:
        """A stretch of rows."""
        return _rows(self.columns(start, stop))

    def columns(self, start: int, stop: int, names: Sequence[str] = _NAMES) -> list[NDArray[Any]]:
        """Some columns of a stretch of rows, (n, width) each."""
        found = []
        for file, dtype, width in (self._columns[name] for name in names):
            cells = file.read(start * width, (stop - start) * width, dtype)
            found.append(cells.reshape(stop - start, width))
        return found

    def take(self, index: NDArray[np.int64], names: Sequence[str] = _NAMES) -> list[NDArray[Any]]:
        """Some columns of rows by their numbers, (n, width) each."""
        columns = (self._columns[name] for name in names)
        return [file.take(index, width, dtype) for file, dtype, width in columns]

    def working(
        self, units: Units, n_classes: int, dtype: torch.dtype, device: torch.device
    ) -> OnDisk:
        """The rows in working units, read when they are asked for."""
        like = torch.empty(0, self.n_features, dtype=dtype, device=device)
        return OnDisk(self, units, n_classes, like)


def _rows(columns: Sequence[NDArray[Any]]) -> Rows:
    X, y, weight = columns
    return Rows(X, y[:, 0].astype(np.int64), weight[:, 0])


class OnDisk(Dataset):
    """A store's rows in working units. The next stretch is read ahead."""

    def __init__(self, store: Store, units: Units, n_classes: int, like: Tensor) -> None:
        self.store, self.units, self.n_classes, self._like = store, units, n_classes, like
        self._n, self._origin = store.n, torch.zeros(0)
        self._last = np.empty(0, np.int64)  # in order, those that come after all others
        self._reader = ThreadPoolExecutor(1, "rows")
        self._ahead: dict[tuple[int, int], Future[Data]] = {}

    @property
    def n(self) -> int:
        return self._n

    @property
    def like(self) -> Tensor:
        return self._like

    def labels(self, start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        return self._tensors(*self._read(start, self._end(stop), ("y", "weight")))

    def rows(self, start: int, stop: int | None) -> Data:
        stop = self._end(stop)
        ahead = self._ahead.pop((start, stop), None)
        return self._stretch(start, stop) if ahead is None else ahead.result()

    def expect(self, start: int, stop: int) -> None:
        """Begin to read a stretch that will be asked for next."""
        if start < min(stop, self.n) and (start, stop) not in self._ahead:
            self._ahead.clear()
            self._ahead[start, stop] = self._reader.submit(self._stretch, start, stop)

    def take(self, index: slice | Tensor) -> Data:
        if isinstance(index, slice):
            return self.rows(index.start or 0, index.stop)
        return self._data(self.store.take(self._numbers(index.cpu().numpy())))

    def shifted(self, origin: Tensor) -> OnDisk:
        return self._changed(_origin=origin)

    def _put_last(self, index: Tensor) -> OnDisk:
        return self._changed(_last=index.cpu().numpy())

    def _first(self, n: int) -> OnDisk:
        found = self._changed(_n=n)
        vars(found).pop("totals", None)
        return found

    def _changed(self, **changes: Any) -> OnDisk:
        found = copy(self)
        vars(found).update(changes, _ahead={})
        return found

    def _end(self, stop: int | None) -> int:
        return self.n if stop is None else min(stop, self.n)

    def _numbers(self, p: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of the store's rows are at some positions."""
        first, n_last = self.store.n - len(self._last), len(self._last)
        numbers = p + np.searchsorted(self._last - np.arange(n_last), p, side="right")
        late = p >= first
        numbers[late] = self._last[p[late] - first]
        return numbers

    def _read(self, start: int, stop: int, names: Sequence[str]) -> list[NDArray[Any]]:
        """Some columns of a stretch, of which all but those that come last are one of the store."""
        first = self.store.n - len(self._last)
        late = self._last[max(start - first, 0) : max(stop - first, 0)]
        lo = hi = 0
        if start < min(stop, first):
            ends = self._numbers(np.array([start, min(stop, first) - 1]))
            lo, hi = int(ends[0]), int(ends[1]) + 1
        if lo == hi:
            return self.store.take(late, names)
        columns = self.store.columns(lo, hi, names)
        gone = self._last[(self._last >= lo) & (self._last < hi)] - lo
        if len(gone):
            columns = [np.delete(column, gone, axis=0) for column in columns]
        if len(late):
            pairs = zip(columns, self.store.take(late, names), strict=True)
            columns = [np.concatenate(pair) for pair in pairs]
        return columns

    def _stretch(self, start: int, stop: int) -> Data:
        return self._data(self._read(start, stop, _NAMES))

    def _data(self, columns: Sequence[NDArray[Any]]) -> Data:
        X = self.units.apply(columns[0], self.like.dtype, self.like.device)
        if len(self._origin):
            X += self._origin
        return Data(X, *self._tensors(*columns[1:]), self.n_classes)

    def _tensors(self, y: NDArray[Any], weight: NDArray[Any]) -> tuple[Tensor, Tensor]:
        device = self.like.device
        return (
            torch.as_tensor(y[:, 0].astype(np.int64), device=device),
            torch.as_tensor(weight[:, 0], dtype=self.like.dtype, device=device),
        )
