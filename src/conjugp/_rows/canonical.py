"""Training rows in a form that depends on the weighted data alone.

Rows without weight are dropped, equal rows with equal labels are merged and their weights added,
and what is left is put into an order fixed by a hash of its content. So a weight of two is the
same as a row given twice, the order of the rows does not matter, and a contiguous slice of the
rows is a random sample of them: batches and hold-outs need no copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from conjugp._numerics.threads import blocks, each
from conjugp._rows.dataset import Data, Dataset
from conjugp._rows.group import ALONE, Group
from conjugp._rows.on_ranks import OnRanks, order_keys

_HASHED = 1 << 15  # numbers hashed at a time


class Units(Protocol):
    """What puts rows into working units."""

    def apply(
        self,
        X: np.ndarray,
        dtype: torch.dtype,
        device: torch.device,
        place: np.ndarray | None = None,
    ) -> Tensor:
        """X (N, D), or its rows at `place` (n,), copied."""
        ...


class Rows(NamedTuple):
    """Distinct weighted rows in the user's units; with a `place`, X still where the user has it."""

    X: np.ndarray  # (n, D), or (N, D) with a place
    y: np.ndarray  # (n,) int64, class indices
    weight: np.ndarray  # (n,) float64, positive
    place: np.ndarray | None = None  # (n,) int64, which of the rows of X these are
    key: np.ndarray | None = None  # (n,) uint64, their hashes
    group: Group = ALONE  # the ranks that hold the others

    @property
    def n(self) -> int:
        """The number of rows here."""
        return len(self.y)

    @property
    def n_features(self) -> int:
        return self.X.shape[1]

    @property
    def digests(self) -> dict[str, str]:
        """What tells the rows of all ranks from others, column by column, in whatever order."""
        sums = np.stack(self.group.gather(self.sums())).sum(0, dtype=np.uint64)
        return named_digests(sums, self.X.dtype)

    def sums(self) -> np.ndarray:
        """Sums of hashes of the rows, without their labels, with them, with weights too: (3, 2).

        They add up over sets of rows; two of each make chance hits rare.
        """
        odd, found = np.uint64(0x9E3779B97F4A7C15), np.zeros((3, 2), np.uint64)
        for i in blocks(self.n, self.n_features):
            X, y, weight = self.read(i.start, i.stop)[:3]
            labelled = row_hash(X, y)
            weighted = labelled ^ row_hash(np.column_stack([weight, y]).astype(np.float64))
            keys = np.stack([row_hash(X), labelled, weighted])
            found += np.stack([keys.sum(1), (keys * (keys | odd)).sum(1)], axis=1)
        return found

    def read(self, start: int, stop: int) -> Rows:
        """A stretch of rows, next to one another in memory."""
        i = slice(start, stop)
        X = self.X[i] if self.place is None else taken(self.X, self.place[i])
        return Rows(X, self.y[i], self.weight[i])

    def gathered(self) -> Rows:
        """All rows, next to one another in memory."""
        return self.read(0, self.n)

    def working(
        self, units: Units, n_classes: int, dtype: torch.dtype, device: torch.device
    ) -> Dataset:
        """The rows of all ranks in working units."""
        data = self.group.all(lambda: self.in_memory(units, n_classes, dtype, device))
        if self.group.size == 1:
            return data
        assert self.key is not None
        return OnRanks(data, order_keys(self.key), self.group)

    def in_memory(
        self, units: Units, n_classes: int, dtype: torch.dtype, device: torch.device
    ) -> Data:
        """Those here in working units, copied."""
        return Data(
            units.apply(self.X, dtype, device, self.place),
            # Copies: a hold-out moves rows about.
            torch.tensor(self.y, device=device),
            torch.tensor(self.weight, dtype=dtype, device=device),
            n_classes,
        )


def taken(X: np.ndarray, place: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """The rows of X at some places, next to one another in memory."""
    if out is None:
        out = np.empty((len(place), X.shape[1]), X.dtype)
    if X.flags.c_contiguous and X.flags.aligned:
        # Without a mode, or where rows are not in one piece, `take` would make a copy first.
        return X.take(place, axis=0, out=out, mode="clip")
    out[...] = X[place]
    return out


def named_digests(sums: np.ndarray, dtype: np.dtype) -> dict[str, str]:
    """The `sums` of rows as text, by column; those of X say its precision."""
    names = ("X", "y", "weight")
    found = {name: f"{int(a):016x}{int(b):016x}" for name, (a, b) in zip(names, sums, strict=True)}
    return {**found, "X": f"{dtype} {found['X']}"}


def canonical(X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> Rows:
    """Merge and order the rows of X (n, D) with labels y (n,) and weights (n,)."""
    return ordered(X, y, weight).gathered()


def ordered(X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> Rows:
    """The same without a copy of X."""
    weight = np.ones(len(X)) if weight is None else np.asarray(weight, dtype=np.float64)
    y = np.asarray(y, dtype=np.int64)
    # Without the labels: rows are put in order before all of these are known (see `on_disk`).
    key = row_hash(X)
    place = np.argsort(key)
    if not np.diff(key[place]).all():
        place = np.lexsort((y, key))
    if not weight.all():
        place = place[weight[place] > 0]
    y, weight, key = y[place], weight[place], key[place]
    same = np.zeros(len(place), dtype=bool)
    near = np.flatnonzero(key[1:] == key[:-1]) + 1
    # A hash can collide, so only rows that really are equal are merged.
    equal = (X[place[near]] == X[place[near - 1]]).all(axis=1)
    same[near] = equal & (y[near] == y[near - 1])
    if not same.any():
        return Rows(X, y, weight, place, key)
    first = np.flatnonzero(~same)
    return Rows(X, y[first], np.add.reduceat(weight, first), place[first], key[first])


def row_hash(X: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
    """A 64-bit hash of every row, and its label if given, (n,)."""
    if X.dtype not in (np.float32, np.float64):
        X = X.astype(np.float64)
    n, D = X.shape
    words = -(-D * X.itemsize // 8)  # 64-bit words per row: one double, or two floats
    rng = np.random.default_rng(0x9E3779B9)
    odd = rng.integers(0, 2**63, size=words + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    key = np.zeros(n, np.uint64) if y is None else y.astype(np.uint64) * odd[words]
    parts = blocks(n, D, _HASHED)
    size = parts[0].stop if parts else 0

    def work(some: Iterator[slice]) -> None:
        # With zeros where a row has half a word too few.
        block = np.zeros((size, words * 8 // X.itemsize), dtype=X.dtype)
        other = np.empty((size, words), np.uint64)
        for i in some:
            m = i.stop - i.start
            # Adding zero turns -0.0 into 0.0, which compares equal to it.
            np.add(X[i], 0.0, out=block[:m, :D])
            bits, shifted = block[:m].view(np.uint64), other[:m]
            bits ^= np.right_shift(bits, np.uint64(29), out=shifted)
            bits *= odd[:words]
            np.right_shift(bits, np.uint64(32), out=shifted)
            shifted ^= bits
            key[i] += shifted.sum(axis=1, dtype=np.uint64)
            block[:m, D:] = 0

    each(parts, work)
    key ^= key >> np.uint64(31)
    return key * np.uint64(0xBF58476D1CE4E5B9)
