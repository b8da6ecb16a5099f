"""Many closed-form steps in a row on a GPU, which is told all of them at once and asked at the end.

A whole step is captured as a graph, one for each size of batch, and replayed. What differs
from step to step stands in tables on the device. A step whose matrices could not be factorised,
whose distances lack digits or whose ELBO is not finite, and all after it, change nothing there;
that is read with the ELBOs, once a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._gp.posterior import Posterior
from conjugp._inference.adam import Adam, direction, remember
from conjugp._inference.captured import recorded
from conjugp._inference.fused import ClosedForm, ClosedFormStep
from conjugp._inference.moving import Leaves, Moving
from conjugp._inference.steps import Batch, Batches, MinibatchStep, Sizes
from conjugp._rows.dataset import Data


class Planned(NamedTuple):
    """One step of a round."""

    start: int  # its first row ...
    size: int  # ... and how many it has
    scale: float
    rho: float
    rate: float


class RoundsOfSteps(MinibatchStep):
    """Closed-form steps a round at a time; one by one till q has settled and after a bad round."""

    def __init__(self, one: ClosedFormStep, rows: Data, limit: int) -> None:
        """`limit`: steps of the longest round."""
        self.one, self.rows, self.limit = one, rows, limit
        self._rounds: Rounds | None = None
        self._alone = 0  # steps yet to be taken one by one

    def __call__(self, batches: Batches, plan: Iterator[Sizes]) -> list[float]:
        """All that is planned, if all goes well."""
        moving = self.one.moving
        if self._alone == 0 and (moving.settled or not moving.learning):
            sizes = list(plan)
            elbos = self.round(batches, sizes)
            if elbos is not None:
                return elbos
            self._alone, plan = len(sizes), iter(sizes)
        elbo = self.take(batches.take(), next(plan))
        self._alone = max(0, self._alone - 1)
        return [elbo]

    def take(self, batch: Batch, sizes: Sizes) -> float:
        """One step."""
        return self.one.take(batch, sizes)

    def round(self, batches: Batches, sizes: Sequence[Sizes]) -> list[float] | None:
        """Steps that the device is told of at once; None, and nothing done, if one failed."""
        moving = self.one.moving
        if self._rounds is None or self._rounds.gradients != moving.learning:
            self._rounds = Rounds(self.one.form, moving, self.rows, self.limit)
        before, generator = batches.state(), batches.generator.get_state()
        plan = []
        for s in sizes:
            rows = batches.next()
            assert isinstance(rows, slice)
            size = rows.stop - rows.start
            plan.append(Planned(rows.start, size, batches.n / size, s.rho, s.rate))
        elbos = self._rounds.run(plan, moving.values, moving.state.q, moving.adam)
        if elbos is None:
            batches.restore(before)
            batches.generator.set_state(generator)
            return None
        moving.state.step += len(plan)
        return elbos


class Rounds:
    """Rounds of steps on copies of the state, which come back when all has gone well."""

    def __init__(self, form: ClosedForm, moving: Moving, rows: Data, limit: int) -> None:
        """`limit`: the longest round."""
        self.form, self.rows, self.gradients = form, rows[:3], moving.learning
        self._whole = moving.whole
        leaves, q = moving.values, moving.state.q
        self.q = Posterior(q.h.clone(), q.P.clone())
        # What is learned stands in one piece: Adam is then a handful of launches, not one for each.
        self._moving = [i for i, moves in enumerate(form.learned) if moves and self.gradients]
        sizes = [leaves[i].numel() for i in self._moving]
        self._x, self._first, self._second = leaves.Z.new_zeros(3, sum(sizes)).unbind()
        own = iter(self._x.split(sizes))
        parts = [next(own) if i in self._moving else x.clone() for i, x in enumerate(leaves)]
        self.leaves = Leaves(*(p.view(x.shape) for p, x in zip(parts, leaves, strict=True)))
        self._sizes = sizes
        self._factor = torch.empty_like(self._x)
        for part, i in zip(self._factor.split(sizes), self._moving, strict=True):
            part.fill_(moving.factors[i])
        device = leaves.Z.device
        self._numbers = torch.zeros(limit, 4, dtype=torch.float64, device=device)
        self._starts = torch.zeros(limit, dtype=torch.int64, device=device)
        self._elbos = torch.zeros(limit, dtype=torch.float64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._good = torch.ones((), dtype=torch.bool, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def run(
        self, plan: list[Planned], leaves: Leaves, q: Posterior, adam: Adam
    ) -> list[float] | None:
        """Take the steps; the ELBO before each. None, and nothing changed, if one went wrong."""
        if self.leaves.Z.is_cuda:
            for size in {p.size for p in plan} - self._graphs.keys():
                self._capture(size, adam)
        mine, given = self._pairs(leaves, q, adam)
        for x, y in zip(mine, given, strict=True):
            x.copy_(y)
        self._begin(plan, adam)
        for p in plan:
            if p.size in self._graphs:
                self._graphs[p.size].replay()
            else:
                self._take(p.size, adam.beta1, adam.beta2)
        # The one time that the device is waited for.
        good, *elbos = torch.cat([self._good.double().view(1), self._elbos[: len(plan)]]).tolist()
        if not good:
            return None
        for x, y in zip(mine, given, strict=True):
            y.copy_(x)
        adam.count += len(plan) if self.gradients else 0
        return elbos

    def _pairs(self, leaves: Leaves, q: Posterior, adam: Adam) -> tuple[list[Tensor], list[Tensor]]:
        """All that changes: where it stands here and where it comes from."""
        mine, given = [*self.leaves, *self.q], [*leaves, *q]
        for flat, parts in ((self._first, adam.first), (self._second, adam.second)):
            mine += flat.split(self._sizes)
            given += [parts[i].view(-1) for i in self._moving]
        return mine, given

    def _begin(self, plan: list[Planned], adam: Adam) -> None:
        """Write the tables."""
        numbers = [
            (p.scale, p.rho, *adam.corrected(p.rate, ahead)) for ahead, p in enumerate(plan, 1)
        ]
        self._numbers[: len(plan)].copy_(torch.tensor(numbers, dtype=torch.float64))
        self._starts[: len(plan)].copy_(torch.tensor([p.start for p in plan]))
        self._at.zero_()
        self._good.fill_(True)

    def _capture(self, size: int, adam: Adam) -> None:
        """Record a step; what it leaves behind is written over."""
        self._begin([Planned(0, size, 1.0, 0.0, 0.0)], adam)
        work = partial(self._take, size, adam.beta1, adam.beta2)
        self._graphs[size] = recorded(work, self.leaves.Z.device)

    def _take(self, size: int, beta1: float, beta2: float) -> None:
        """One step on the rows and with the numbers that the tables have for it."""
        numbers = self._numbers.index_select(0, self._at)[0]
        scale, rho, length, least = numbers.to(self.leaves.Z.dtype).unbind()
        index = self._starts.index_select(0, self._at) + torch.arange(size, device=scale.device)
        X, y, weight = (x.index_select(0, index) for x in self.rows)
        far = self.form.far(self.leaves)
        sums = self.form.evaluate(self.leaves, self.q, X, y, weight * scale, self.gradients)
        elbo = (sums.bound - sums.kl).double()
        self._good.logical_and_(elbo.isfinite() & (sums.failed == 0) & ~far)
        self._elbos.index_copy_(0, self._at, elbo.view(1))
        self._at.add_(1)
        new = Posterior(self.q.h.clone(), self.q.P.clone())
        self.form.update(new, sums, rho)
        self._put(self.q, new)
        if not self._moving:
            return
        gradients = self._whole(self.leaves, sums.gradients)
        g = torch.cat([x.view(-1) for x in gradients if x is not None])
        first, second = self._first.clone(), self._second.clone()
        remember(first, second, g, beta1, beta2)
        x = self._x - direction(first, second, length * self._factor, least)
        self._put((self._x, self._first, self._second), (x, first, second))

    def _put(self, places: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Write what a good step has found."""
        for x, y in zip(places, new, strict=True):
            torch.where(self._good, y, x, out=x)
