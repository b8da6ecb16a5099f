"""Minibatches and steps on them: what the loop asks, the readable step, that of ranks alone.

A step moves q by a natural gradient and, once q has settled a little, the hyperparameters by Adam.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjugp._gp.posterior import Posterior, kl, moments
from conjugp._inference import svi
from conjugp._inference.moving import OF_A_RANK, Moving, evaluated, finite, over_ranks
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data, Dataset
from conjugp._rows.group import Group


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


class Sizes(NamedTuple):
    """How far a step goes."""

    left: float  # 1 until the fit comes to rest, then falling to 0
    rho: float  # of the natural gradient
    least: float  # the shortest such step
    rate: float  # of Adam


class MinibatchStep(ABC):
    """A way to take steps: call, state and restore."""

    def __call__(self, batches: Batches, plan: Iterator[Sizes]) -> list[float]:
        """Take the next step, or several, no more than planned; the ELBO before each.

        Raises FloatingPointError or NotPositiveDefiniteError where numbers leave their range.
        """
        return [self.take(batches.take(), next(plan))]

    @abstractmethod
    def take(self, batch: Batch, sizes: Sizes) -> float:
        """One step on these rows; the ELBO before."""

    def state(self) -> list[Any]:
        """What it keeps beside the state, for a checkpoint."""
        return []

    def restore(self, state: list[Any]) -> None:
        """Go back there."""
        assert not state

    def gap(self) -> float:
        """What looking at some of the classes costs in the end, in nats per row (C3)."""
        return 0.0


class ReadableStep(MinibatchStep):
    """By `svi`, as docs/math.md has it; every other step is held against this one."""

    def __init__(self, moving: Moving, group: Group) -> None:
        self.moving, self.group = moving, group

    def take(self, batch: Batch, sizes: Sizes) -> float:
        """One natural-gradient step and, once q has settled a little, one Adam step."""
        moving, s = self.moving, self.moving.state
        q, gradients = moments(s.q), moving.settled

        def here() -> svi.Statistics:
            return evaluated(moving, batch.data, q, batch.scale, gradients)

        stats = over_ranks(moving, self.group, here, gradients)
        elbo = finite(batch.scale * float(stats.bound) - float(kl(q)))
        s.q = svi.update(s.q, stats, batch.scale, sizes.rho)
        s.step += 1
        if gradients:
            moving.move(sizes.rate)
        return elbo


class LocalSteps(MinibatchStep):
    """Steps of every rank on the rows it has, as if they stood for all; then the ranks' average."""

    def __init__(self, moving: Moving, group: Group) -> None:
        self.moving, self.group = moving, group
        self._begin()

    def _begin(self) -> None:
        # Of the steps since the last average. Ranks, and steps of a rank, count as their rows do.
        self._weight, self._elbo, self._failed = 0.0, 0.0, False

    def __call__(self, batches: Batches, plan: Iterator[Sizes]) -> list[float]:
        """`local_steps` of them, or what is left of the plan; their ELBO is that of all ranks."""
        n, gradients, sizes = 0, False, None
        for sizes in islice(plan, self.moving.settings.local_steps):
            gradients = self.moving.settled
            self.take(batches.take(), sizes)
            n += 1
        assert sizes is not None
        elbo = self._average(gradients)
        if gradients:
            self.moving.move(sizes.rate)
        return [elbo] * n

    def take(self, batch: Batch, sizes: Sizes) -> float:
        """One of them; what fails is told at the next average."""
        moving, s, part = self.moving, self.moving.state, batch.data
        weight, total, elbo = float(part.weight.sum()), self.moving.total, math.nan
        if weight and not self._failed:
            try:
                q = moments(s.q)
                stats = evaluated(moving, part, q, total, moving.settled)
                elbo = total / weight * float(stats.bound) - float(kl(q))
                self._failed = not math.isfinite(elbo)
                s.q = svi.update(s.q, stats, total / weight, sizes.rho)
                self._weight += weight
                self._elbo += weight * elbo
            except (NotPositiveDefiniteError, FloatingPointError):
                self._failed = True
        s.step += 1
        return elbo

    def _average(self, gradients: bool) -> float:
        """Put q, and the gradients, at the average over ranks, each by its weight; the ELBO's."""
        s, grads = self.moving.state, self.moving.gradients(gradients)
        sums = s.q.h.new_tensor([self._weight, self._elbo, float(self._failed)])
        here = svi.Statistics(self._weight * s.q.h, self._weight * s.q.P, sums[0])
        there = svi.pooled(here, [*grads, sums], self.group)
        self._begin()
        weight, elbo, failed = sums.tolist()
        if failed or not math.isfinite(elbo):
            raise FloatingPointError(OF_A_RANK)
        s.q = Posterior(there.h / weight, there.P / weight)
        for g in grads:
            g /= weight
        return elbo / weight
