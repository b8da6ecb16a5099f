"""Rows on disk in the order of `rows.canonical`, however many there are and however they came.

An external sort by a hash of the rows: they go to buckets by their first bits, and every bucket
is put in order in memory. Files have no names, so nothing is left behind by a process that ends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conjugp._rows.canonical import Rows, Units, canonical, row_hash
from conjugp._rows.dataset import Data, held_rows, joined, rare_rows, sample_size
from conjugp._rows.group import ALONE, Group

_BITS = 6  # of the hash that choose a bucket
SORTED_BYTES = 2**27  # rows that are put in order at a time
_KEPT_BYTES = 2**24  # rows that wait in memory before they go to their buckets
_LABEL, _WEIGHT = np.dtype("<i4"), np.dtype("<f8")


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
        X, y, weight = canonical(np.ascontiguousarray(rows["X"]), rows["y"], rows["weight"])
        which = (row_hash(X) << np.uint64(used)) >> np.uint64(64 - _BITS)
        rows = np.empty(len(X), self._row)
        rows["X"], rows["y"], rows["weight"] = X, y, weight
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
    """Distinct weighted rows on disk, in order."""

    def __init__(self, n_features: int, dtype: np.dtype[Any], folder: str) -> None:
        self.n, self.n_features, self.dtype = 0, n_features, dtype
        self._files = {name: _File(folder) for name in Rows._fields}
        self._digests = {name: hashlib.sha256(str(dtype).encode()) for name in Rows._fields}

    @property
    def nbytes(self) -> int:
        """Bytes that all rows would take in memory."""
        return self.n * (self.n_features * self.dtype.itemsize + 16)

    @property
    def digests(self) -> dict[str, str]:
        """What tells these rows from others."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def append(self, rows: Rows) -> None:
        """Add rows that come after all those before."""
        stored = Rows(rows.X, rows.y.astype(_LABEL), rows.weight.astype(_WEIGHT))
        for name, column in stored._asdict().items():
            self._files[name].append(column)
            self._digests[name].update(np.ascontiguousarray(column).data)
        self.n += rows.n

    def read(self, start: int, stop: int) -> Rows:
        """A stretch of rows."""
        n, D = stop - start, self.n_features
        X = self._files["X"].read(start * D, n * D, self.dtype).reshape(n, D)
        return Rows(X, *self.labels(start, stop))

    def labels(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Their labels and weights."""
        y = self._files["y"].read(start, stop - start, _LABEL)
        weight = self._files["weight"].read(start, stop - start, _WEIGHT)
        return y.astype(np.int64), weight

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Rows by their numbers."""
        X = self._files["X"].take(index, self.n_features, self.dtype)
        y, weight = (
            self._files[name].take(index, 1, dtype)[:, 0]
            for name, dtype in (("y", _LABEL), ("weight", _WEIGHT))
        )
        return Rows(X, y.astype(np.int64), weight)


@dataclass(frozen=True, eq=False)
class Spooled:
    """A store's rows in working units: a `Dataset`. The next stretch is read ahead."""

    store: Store
    scaling: Units
    n_classes: int
    like: Tensor  # (0, D)
    counts: Tensor  # (C,)
    mass: Tensor  # (C,)
    held: NDArray[np.int64]  # numbers, in order, of the store's rows that come last
    origin: Tensor | None = None  # (D,), added to every row
    whole: bool = True  # whether those that come last belong to it

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ahead", {})
        object.__setattr__(self, "_reader", ThreadPoolExecutor(1, "rows"))

    @property
    def group(self) -> Group:
        """No others: the rows are on this machine's disk."""
        return ALONE

    @property
    def n(self) -> int:
        """The number of rows."""
        return self.store.n if self.whole else self._first

    @property
    def _first(self) -> int:
        """How many rows come before those held out."""
        return self.store.n - len(self.held)

    @property
    def total(self) -> float:
        """The weight of all rows."""
        return float(self.mass.sum())

    def rows(self, start: int, stop: int | None) -> Data:
        """A stretch of rows, from disk."""
        stop = self.n if stop is None else min(stop, self.n)
        ahead: dict[tuple[int, int], Future[Data]] = self._ahead  # type: ignore[attr-defined]
        future = ahead.pop((start, stop), None)
        return self._read(start, stop) if future is None else future.result()

    def expect(self, start: int, stop: int) -> None:
        """Begin to read a stretch that will be asked for next."""
        ahead: dict[tuple[int, int], Future[Data]] = self._ahead  # type: ignore[attr-defined]
        if start >= min(stop, self.n) or (start, stop) in ahead:
            return
        ahead.clear()
        ahead[start, stop] = self._reader.submit(self._read, start, stop)  # type: ignore[attr-defined]

    def labels(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Labels and weights of a stretch."""
        lo, hi, kept, index = self._places(start, min(stop, self.n))
        y, weight = self.store.labels(lo, hi)
        last = self.store.take(index)
        return self._tensors(
            np.concatenate([y[kept], last.y]), np.concatenate([weight[kept], last.weight])
        )

    def take(self, index: slice | Tensor) -> Data:
        """Rows by their positions."""
        if isinstance(index, slice):
            return self.rows(index.start, index.stop)
        p = index.cpu().numpy()
        before = p < self._first
        places = np.empty_like(p)
        places[before] = self._place(p[before])
        places[~before] = self.held[p[~before] - self._first]
        return self._data(self.store.take(places))

    def head(self, n: int) -> Data:
        """The first n rows."""
        return self.rows(0, n)

    def sample(self) -> Data:
        """Rows that stand for all, every rare class with enough of them."""
        n = sample_size(self)
        return joined([self.rows(0, n), self.take(rare_rows(self, n))])

    def hold_out(self, share: float) -> tuple[Spooled, Data, Spooled]:
        """Rows to train on, rows held out, and all of them in that order."""
        held = held_rows(self, share)
        part = self.take(held)
        data = replace(self, held=held.cpu().numpy())
        counts, mass = self.counts - part.counts, self.mass - part.mass
        return replace(data, counts=counts, mass=mass, whole=False), part, data

    def shifted(self, origin: Tensor) -> Spooled:
        """The same rows with `origin` (D,) added."""
        return replace(self, origin=origin)

    def _place(self, p: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in the store rows before those held out are."""
        return p + np.searchsorted(self.held - np.arange(len(self.held)), p, side="right")

    def _places(
        self, start: int, stop: int
    ) -> tuple[int, int, NDArray[np.bool_], NDArray[np.int64]]:
        """A stretch of the store, which of it is wanted, and rows held out that come after it."""
        end = min(stop, self._first)
        lo = hi = 0
        kept = np.ones(0, dtype=bool)
        if start < end:
            lo, last = (int(x) for x in self._place(np.array([start, end - 1])))
            hi = last + 1
            kept = np.ones(hi - lo, dtype=bool)
            kept[self.held[(self.held >= lo) & (self.held < hi)] - lo] = False
        late = self.held[max(start - self._first, 0) : max(stop - self._first, 0)]
        return lo, hi, kept, late

    def _read(self, start: int, stop: int) -> Data:
        lo, hi, kept, late = self._places(start, stop)
        rows = self.store.read(lo, hi)
        if not kept.all():
            rows = Rows(*(column[kept] for column in rows))
        if len(late):
            last = self.store.take(late)
            rows = Rows(*(np.concatenate(pair) for pair in zip(rows, last, strict=True)))
        return self._data(rows)

    def _data(self, rows: Rows) -> Data:
        X = self.scaling.apply(rows.X, self.like.dtype, self.like.device)
        if self.origin is not None:
            X += self.origin
        return Data(X, *self._tensors(rows.y, rows.weight), self.n_classes)

    def _tensors(self, y: NDArray[Any], weight: NDArray[Any]) -> tuple[Tensor, Tensor]:
        device = self.like.device
        return (
            torch.as_tensor(y, device=device),
            torch.as_tensor(weight, dtype=self.like.dtype, device=device),
        )


def spooled(store: Store, scaling: Units, n_classes: int, like: Tensor) -> Spooled:
    """The rows of a store for a fit."""
    counts, mass = np.zeros(n_classes, np.int64), np.zeros(n_classes)
    step = 2**20
    for i in range(0, store.n, step):
        y, weight = store.labels(i, min(i + step, store.n))
        counts += np.bincount(y, minlength=n_classes)
        mass += np.bincount(y, weights=weight, minlength=n_classes)
    device = like.device
    return Spooled(
        store,
        scaling,
        n_classes,
        like,
        torch.as_tensor(counts, device=device),
        torch.as_tensor(mass, device=device),
        np.empty(0, np.int64),
    )
