"""Rows in memory in the user's units, put into working units when they are asked for.

A fit of an epoch or two reads a row once or twice: scaled rows that are kept would cost more than
they save, and rows that are never asked for are never scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from conjugp._rows.canonical import Ordered, Units
from conjugp._rows.dataset import Data, held_rows, rare_rows, sample_size
from conjugp._rows.group import ALONE, Group


class Deferred:
    """What `Data` is, with X where the user has it."""

    def __init__(
        self, rows: Ordered, scaling: Units, y: Tensor, weight: Tensor, n_classes: int
    ) -> None:
        self._rows, self._scaling = rows, scaling
        self._place = rows.place
        self.y, self.weight, self.n_classes = y, weight, n_classes
        self.group: Group = ALONE
        self.like = torch.empty(0, rows.n_features, dtype=weight.dtype)

    @property
    def n(self) -> int:
        """The number of rows."""
        return len(self.y)

    @property
    def mass(self) -> Tensor:
        """The weight of every class, (C,)."""
        return torch.bincount(self.y, self.weight.double(), self.n_classes).double()

    @property
    def total(self) -> float:
        """The weight of all rows."""
        return float(self.weight.sum())

    @property
    def counts(self) -> Tensor:
        """The number of rows of every class, (C,)."""
        return torch.bincount(self.y, minlength=self.n_classes)

    def rows(self, start: int, stop: int | None) -> Data:
        """Some of the rows."""
        return self.take(slice(start, stop))

    def expect(self, start: int, stop: int) -> None:
        """Nothing to prepare: scaling a batch takes no time beside a step on it."""

    def labels(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Labels and weights of some of the rows."""
        return self.y[start:stop], self.weight[start:stop]

    def take(self, index: slice | Tensor) -> Data:
        """Some of the rows, by their positions."""
        at = index.numpy() if isinstance(index, Tensor) else index
        X = self._scaling.apply(self._rows.X, self.like.dtype, self.like.device, self._place[at])
        return Data(X, self.y[index], self.weight[index], self.n_classes)

    def head(self, n: int) -> Data:
        """The first n rows."""
        return self.rows(0, n)

    def sample(self) -> Data:
        """Rows that stand for all, every rare class with enough of them."""
        return self.sampled().rows(0, None)

    def sampled(self) -> Deferred:
        """The same, not yet scaled."""
        n = sample_size(self)
        if n >= self.n:
            return self
        return self._at(torch.cat([torch.arange(n), rare_rows(self, n)]))

    def hold_out(self, share: float) -> tuple[Deferred, Data, Deferred]:
        """Rows to train on, rows held out, and all of them in that order."""
        last = held_rows(self, share)
        kept = torch.ones(self.n, dtype=torch.bool)
        kept[last] = False
        first = kept.nonzero().squeeze(1)
        everything = self._at(torch.cat([first, last]))
        return everything._at(slice(len(first))), everything.rows(len(first), None), everything

    def shifted(self, origin: Tensor) -> Data:
        """The same rows with `origin` (D,) added."""
        return self.rows(0, None).shifted(origin)

    def _at(self, index: slice | Tensor) -> Deferred:
        """Some of the rows, no more scaled than they were."""
        some = Deferred(
            self._rows, self._scaling, self.y[index], self.weight[index], self.n_classes
        )
        some._place = self._place[index.numpy() if isinstance(index, Tensor) else index]
        return some
