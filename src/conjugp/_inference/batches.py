"""Batches of rows, epoch after epoch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjugp._rows.dataset import Data, Dataset


class Batch(NamedTuple):
    """The rows of a step."""

    rows: slice | Tensor  # their positions
    data: Data  # those of them that are here
    scale: float  # N/B: how many of all rows each stands for


class Batches:
    """Batches of rows: the same ones in another order every epoch or, shuffled, always others."""

    def __init__(
        self, data: Dataset, size: int, generator: torch.Generator, shuffled: bool = False
    ) -> None:
        self.data, self.n, self.size = data, data.n, size
        self.generator, self.shuffled = generator, shuffled
        # The last batch takes a short remainder with it.
        self.starts = list(range(0, self.n - size // 2, size))
        self.device = data.like.device if shuffled else torch.device("cpu")
        self.order = torch.empty(0, dtype=torch.int64)  # of rows or, if they stay, of batches
        self.at = len(self.starts)  # batches taken of this epoch

    @property
    def largest(self) -> int:
        """Rows of the largest batch."""
        return max(self.size, self.n - self.starts[-1])

    def take(self) -> Batch:
        """The next batch."""
        rows = self.next()
        data = self.data.take(rows)
        then = self._then()
        if then is not None:
            self.data.expect(then.start, then.stop)
        # Not the rows that are here: some of a batch may be elsewhere.
        return Batch(rows, data, self.n / size_of(rows))

    def next(self) -> slice | Tensor:
        """The positions of the rows of the next batch."""
        if self.at == len(self.starts):
            n = self.n if self.shuffled else len(self.starts)
            self.order, self.at = torch.randperm(n, generator=self.generator), 0
            self.order = self.order.to(self.device)
        rows = self._rows(self.at)
        self.at += 1
        return self.order[rows] if self.shuffled else rows

    def state(self) -> list[Any]:
        """Where they stand, for a checkpoint."""
        return [self.order, self.at]

    def restore(self, state: list[Any]) -> None:
        """Go back there."""
        self.order, self.at = state

    def _then(self) -> slice | None:
        """The stretch of rows that comes after, where that is known."""
        if self.shuffled or self.at == len(self.starts):
            return None
        return self._rows(self.at)

    def _rows(self, at: int) -> slice:
        i = self.starts[at if self.shuffled else int(self.order[at])]
        return slice(i, self.n if i + self.size + self.size // 2 >= self.n else i + self.size)


def size_of(rows: slice | Tensor) -> int:
    """How many rows there are at these positions."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
