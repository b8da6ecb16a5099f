"""Training rows in working units: what every fit reads, in memory here, on disk in `spool`.

Positions count all rows, in an order in which any stretch of them is a random sample. `rows`
gives those of a stretch that are here; `head`, `sample` and `hold_out` give rows to all.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from conjugp._rows.group import ALONE, Group

MIN_HELD = 100  # held-out rows from which on classes too small for their share give one
MOST_HELD = 5000
SAMPLE_ROWS = 2**17  # rows that stand for all where kernels and inducing points are chosen ...
SAMPLE_ELEMENTS = 2**27  # ... fewer if they have more numbers than this ...
CLASS_ROWS = 2000  # ... and as many of every rare class, if it has them
_SCAN = 2**20  # labels looked at at a time
_MOVED = 2**8  # rows moved at a time


class Dataset(Protocol):
    """What a fit asks of its rows."""

    @property
    def group(self) -> Group:
        """The ranks that hold the rows; sums over rows here are to be summed over it."""
        ...

    @property
    def n(self) -> int: ...
    @property
    def n_classes(self) -> int: ...
    @property
    def like(self) -> Tensor:
        """A tensor of the working precision on the working device, with D columns."""
        ...

    @property
    def mass(self) -> Tensor:
        """The weight of every class, (C,)."""
        ...

    @property
    def total(self) -> float:
        """The weight of all rows: what N is in the equations."""
        ...

    @property
    def counts(self) -> Tensor:
        """The number of rows of every class, (C,)."""
        ...

    def rows(self, start: int, stop: int | None) -> Data:
        """The rows of a stretch that are here."""
        ...

    def expect(self, start: int, stop: int) -> None:
        """Say which stretch will be asked for next."""
        ...

    def labels(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Labels and weights of the same rows."""
        ...

    def take(self, index: slice | Tensor) -> Data:
        """Rows by their positions."""
        ...

    def head(self, n: int) -> Data:
        """The first n rows."""
        ...

    def sample(self) -> Data:
        """Rows that stand for all, every rare class with enough of them."""
        ...

    def hold_out(self, share: float) -> tuple[Dataset, Data, Dataset]:
        """Rows to train on, rows held out, and all of them in that order.

        Rows in memory are put in that order where they are: no copy of them all.
        """
        ...

    def shifted(self, origin: Tensor) -> Dataset:
        """The same rows with `origin` (D,) added."""
        ...


class Labelled(Protocol):
    """Rows of which the labels are known, and any can be had."""

    @property
    def y(self) -> Tensor: ...
    @property
    def n_classes(self) -> int: ...
    @property
    def like(self) -> Tensor: ...
    def rows(self, start: int, stop: int | None) -> Data: ...
    def take(self, index: slice | Tensor) -> Data: ...


class Data(NamedTuple):
    """Rows in memory."""

    X: Tensor  # (N, D)
    y: Tensor  # (N,)
    weight: Tensor  # (N,)
    n_classes: int

    @property
    def group(self) -> Group:
        """No others: the rows are here."""
        return ALONE

    @property
    def n(self) -> int:
        """The number of rows."""
        return len(self.y)

    @property
    def like(self) -> Tensor:
        """A tensor of the working precision on the working device, with D columns."""
        return self.X[:0]

    @property
    def mass(self) -> Tensor:
        """The weight of every class, (C,)."""
        # Of no rows it would be whole numbers.
        return torch.bincount(self.y, self.weight.double(), self.n_classes).double()

    @property
    def total(self) -> float:
        """The weight of all rows: what N is in the equations."""
        return float(self.weight.sum())

    @property
    def counts(self) -> Tensor:
        """The number of rows of every class, (C,)."""
        return torch.bincount(self.y, minlength=self.n_classes)

    def rows(self, start: int, stop: int | None) -> Data:
        """Some of the rows."""
        return self.take(slice(start, stop))

    def expect(self, start: int, stop: int) -> None:
        """Nothing to prepare: the rows are here."""

    def labels(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Labels and weights of some of the rows."""
        return self.y[start:stop], self.weight[start:stop]

    def take(self, index: slice | Tensor) -> Data:
        """Some of the rows, by their positions."""
        return Data(self.X[index], self.y[index], self.weight[index], self.n_classes)

    def head(self, n: int) -> Data:
        """The first n rows."""
        return self.rows(0, n)

    def sample(self) -> Data:
        """Rows that stand for all, every rare class with enough of them."""
        n = sample_size(self)
        if n >= self.n:
            return self
        return joined([self.rows(0, n), self.take(rare_rows(self, n))])

    def hold_out(self, share: float) -> tuple[Data, Data, Data]:
        """Rows to train on, rows held out, and all of them in that order: these, moved in place."""
        last = held_rows(self, share)
        n = self.n - len(last)
        if len(last):
            self._put_last(last)
        return self.rows(0, n), self.rows(n, None), self

    def _put_last(self, index: Tensor) -> None:
        """Move rows to the end; those after the first of them move up."""
        start = int(index[0])
        kept = torch.ones(self.n - start, dtype=torch.bool, device=self.y.device)
        kept[index - start] = False
        behind = kept.nonzero().squeeze(1) + start
        for column in self[:3]:
            held, at = column[index], start
            for some in behind.split(_MOVED):
                column[at : at + len(some)] = column[some]
                at += len(some)
            column[at:] = held

    def shifted(self, origin: Tensor) -> Data:
        """The same rows with `origin` (D,) added."""
        return self._replace(X=self.X + origin)


def joined(parts: list[Data]) -> Data:
    """Rows one after the other."""
    X, y, weight = (torch.cat(column) for column in list(zip(*parts, strict=True))[:3])
    return Data(X, y, weight, parts[0].n_classes)


def sample_size(data: Dataset) -> int:
    """How many of the first rows are in a sample."""
    return min(data.n, SAMPLE_ROWS, max(20_000, SAMPLE_ELEMENTS // data.like.shape[1]))


def rare_per_class(counts: Tensor, y: Tensor) -> Tensor:
    """How many more rows of every class a sample wants that has the labels y, (C,)."""
    C = len(counts)
    most = max(16, min(CLASS_ROWS, SAMPLE_ROWS // C))
    return (counts.clamp(max=most) - torch.bincount(y, minlength=C)).clamp_(min=0)


def rare_rows(data: Dataset, n: int) -> Tensor:
    """Positions, after the first n, of the first rows of classes that have few among those."""
    C = data.n_classes
    y, _ = data.labels(0, n)
    wanted = rare_per_class(data.counts, y)
    found = [y[:0]]
    for start in range(n, data.n, _SCAN):
        if not wanted.any():
            break
        y, _ = data.labels(start, min(start + _SCAN, data.n))
        chosen = (class_rank(y, C) < wanted[y]).nonzero().squeeze(1)
        wanted -= torch.bincount(y[chosen], minlength=C)
        found.append(chosen + start)
    return torch.cat(found)


def held_per_class(data: Dataset, share: float) -> Tensor:
    """How many rows of every class to hold out, (C,).

    Every class gives the same share of its rows; one too small for a share gives none. Where
    nearly all are, one row each of the largest has to do.
    """
    counts, n = data.counts, data.n
    share = min(share, MOST_HELD / n)
    given, wanted = (counts * share).floor().long(), int(share * n)
    missing = wanted - int(given.sum())
    if wanted >= MIN_HELD and missing > wanted // 2:
        able = ((given == 0) & (counts >= 3)).nonzero().squeeze(1)
        given[able[counts[able].argsort(descending=True, stable=True)][:missing]] = 1
    return given


def held_rows(data: Dataset, share: float) -> Tensor:
    """Positions, in order, of the rows to hold out: the last of every class."""
    given = held_per_class(data, share)
    found = [given[:0]]
    for stop in range(data.n, 0, -_SCAN):
        if not given.any():
            break
        start = max(0, stop - _SCAN)
        y, _ = data.labels(start, stop)
        after = class_rank(y.flip(0), data.n_classes).flip(0)
        chosen = (after < given[y]).nonzero().squeeze(1)
        given -= torch.bincount(y[chosen], minlength=data.n_classes)
        found.append(chosen + start)
    return torch.cat(found[::-1])


def by_label(y: Tensor, n_classes: int) -> Tensor:
    """What puts labels in order, (N,); equal ones stay as they are."""
    if y.device.type != "cpu" or n_classes > 2**15:
        return torch.argsort(y, stable=True)
    # NumPy counts where numbers are this short.
    return torch.as_tensor(np.argsort(y.numpy().astype(np.int16), kind="stable"))


def class_shares(data: Dataset) -> Tensor:
    """The classes' shares of the rows, (C,), float64, with one more row of every class.

    What is rare may be rare by chance.
    """
    # Rows that are the same count as one here, and weigh what they weigh together.
    rows = data.mass.double() + min(1.0, data.total / max(data.n, 1))
    return rows / rows.sum()


def class_rank(y: Tensor, n_classes: int) -> Tensor:
    """How many rows of the same class come before each row, (N,)."""
    order = by_label(y, n_classes)
    counts = torch.bincount(y, minlength=n_classes)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(y)
    rank[order] = torch.arange(len(y), device=y.device) - first[y[order]]
    return rank
