"""The rows of a fit in working units: one protocol, whether in memory, on disk or on ranks.

Positions count all rows, in an order in which any stretch of them is a random sample. `rows`
gives those of a stretch that are here; `head`, `sample` and `hold_out` give rows to all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from conjugp._rows.group import ALONE, Group
from conjugp._rows.hold_out import chosen_per_class, held_per_class

if TYPE_CHECKING:
    from typing_extensions import Self

SAMPLE_ROWS = 2**17  # rows that stand for all where kernels and inducing points are chosen ...
SAMPLE_ELEMENTS = 2**27  # ... fewer if they have more numbers than this ...
CLASS_ROWS = 2000  # ... and as many of every rare class, if it has them
_SCAN = 2**16  # labels looked at at a time
_MOVED = 2**8  # rows moved at a time


class Totals(NamedTuple):
    """Sums over rows."""

    counts: Tensor  # (C,), rows of every class
    mass: Tensor  # (C,) float64, their weights
    total: Tensor  # () float64, the weight of all


class Dataset(ABC):
    """What a fit asks of its rows.

    A kind of rows says where its rows are: labels and weights of a stretch, a stretch, rows by
    their positions, and how some of them are put last. The rest is written here once.
    """

    group: Group = ALONE  # the ranks that hold the rows; sums over rows here are summed over it
    n_classes: int

    @property
    @abstractmethod
    def n(self) -> int:
        """The number of rows."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """No rows (0, D), of the working precision on the working device."""

    @abstractmethod
    def labels(self, start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        """Labels and weights of the rows of a stretch that are here."""

    @abstractmethod
    def rows(self, start: int, stop: int | None) -> Data:
        """The rows of a stretch that are here."""

    @abstractmethod
    def take(self, index: slice | Tensor) -> Data:
        """Rows by their positions."""

    @abstractmethod
    def shifted(self, origin: Tensor) -> Dataset:
        """The same rows with `origin` (D,) added."""

    @abstractmethod
    def _put_last(self, index: Tensor) -> Self:
        """The same rows, those found at `index` after all others; in memory where they are."""

    @abstractmethod
    def _first(self, n: int) -> Self:
        """The first n rows alone."""

    def expect(self, start: int, stop: int) -> None:  # noqa: B027
        """Be told which stretch will be asked for next."""

    @cached_property
    def totals(self) -> Totals:
        """Sums over all rows."""
        C, device = self.n_classes, self.like.device
        counts = torch.zeros(C, dtype=torch.long, device=device)
        mass, total = (torch.zeros(s, device=device).double() for s in ((C,), ()))
        for i in range(0, self.n, _SCAN):
            y, weight = self.labels(i, min(i + _SCAN, self.n))
            weight = weight.double()
            counts += torch.bincount(y, minlength=C)
            mass += torch.bincount(y, weight, C)
            total += weight.sum()
        return Totals(counts, mass, total)

    @property
    def counts(self) -> Tensor:
        """The number of rows of every class, (C,)."""
        return self.totals.counts

    @property
    def mass(self) -> Tensor:
        """The weight of every class, (C,)."""
        return self.totals.mass

    @property
    def total(self) -> float:
        """The weight of all rows: what N is in the equations."""
        return float(self.totals.total)

    def head(self, n: int) -> Data:
        """The first n rows."""
        return self._everywhere(self._here(0, min(n, self.n)))

    def sample(self) -> Data:
        """Rows that stand for all, every rare class with enough of them."""
        n = sample_size(self.n, self.like.shape[1])
        first = self.head(n)
        if n >= self.n:
            return first
        C = self.n_classes
        most = max(16, min(CLASS_ROWS, SAMPLE_ROWS // C))
        missing = self.counts.clamp(max=most) - torch.bincount(first.y, minlength=C)
        rare = self._per_class(n, missing.clamp_(min=0))
        return concatenated([first, self._everywhere(rare)])

    def hold_out(self, share: float) -> tuple[Self, Data, Self]:
        """Rows to train on, rows held out, and all of them in that order.

        Rows in memory are put in that order where they are: no copy of them all.
        """
        given = held_per_class(self.counts, share)
        n = self.n - int(given.sum())
        everything = self._put_last(self._per_class(0, given, last=True))
        held = everything._everywhere(everything._here(n, self.n))
        return everything._first(n), held, everything

    def _per_class(self, start: int, wanted: Tensor, last: bool = False) -> Tensor:
        """The first, or last, `wanted` (C,) rows of every class from `start` on, for `take`."""
        wanted, found = wanted.clone(), [wanted[:0]]
        starts = range(start, self.n, _SCAN)
        for i in reversed(starts) if last else starts:
            if not wanted.any():
                break
            y, _ = self.labels(i, min(i + _SCAN, self.n))
            chosen = chosen_per_class(y, wanted, last)
            wanted -= torch.bincount(y[chosen], minlength=self.n_classes)
            found.append(chosen + i)
        return torch.cat(found[::-1] if last else found)

    def _here(self, start: int, stop: int) -> slice:
        """Which of the rows here are in a stretch."""
        return slice(start, stop)

    def _everywhere(self, index: slice | Tensor) -> Data:
        """Rows here, and those that the other ranks found, on every rank."""
        return self.take(index)


class _Columns(NamedTuple):
    X: Tensor  # (N, D)
    y: Tensor  # (N,)
    weight: Tensor  # (N,)
    n_classes: int


class Data(_Columns, Dataset):
    """Rows in memory: X (N, D), y (N,), weight (N,) and the number of classes."""

    @property
    def n(self) -> int:
        return len(self.y)

    @property
    def like(self) -> Tensor:
        return self.X[:0]

    def labels(self, start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        return self.y[start:stop], self.weight[start:stop]

    def rows(self, start: int, stop: int | None) -> Data:
        return self.take(slice(start, stop))

    def take(self, index: slice | Tensor) -> Data:
        return Data(self.X[index], self.y[index], self.weight[index], self.n_classes)

    def shifted(self, origin: Tensor) -> Data:
        return self._replace(X=self.X + origin)

    def _first(self, n: int) -> Data:
        return self.rows(0, n)

    def _put_last(self, index: Tensor) -> Data:
        """These rows, moved: those after the first of `index` move up."""
        if not len(index):
            return self
        start = int(index[0])
        stays = torch.ones(self.n - start, dtype=torch.bool, device=self.y.device)
        stays[index - start] = False
        behind = stays.nonzero().squeeze(1) + start
        for column in (self.X, self.y, self.weight):
            moved, at = column[index], start
            for some in behind.split(_MOVED):
                column[at : at + len(some)] = column[some]
                at += len(some)
            column[at:] = moved
        return self


def sample_size(n: int, n_features: int) -> int:
    """How many of the first n rows are in a sample."""
    return min(n, SAMPLE_ROWS, max(20_000, SAMPLE_ELEMENTS // n_features))


def concatenated(parts: list[Data]) -> Data:
    """Rows one after the other."""
    X, y, weight = (torch.cat(column) for column in list(zip(*parts, strict=True))[:3])
    return Data(X, y, weight, parts[0].n_classes)


def class_shares(data: Dataset) -> Tensor:
    """The classes' shares of the rows, (C,), float64, with one more row of every class.

    What is rare may be rare by chance.
    """
    # Rows that are the same count as one here, and weigh what they weigh together.
    rows = data.mass.double() + min(1.0, data.total / max(data.n, 1))
    return rows / rows.sum()
