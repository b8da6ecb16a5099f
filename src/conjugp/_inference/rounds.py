"""Many fused steps in a row on a GPU, which is told all of them at once and asked at the end.

A whole step is captured as a graph, one for each size of batch, and replayed. What differs
from step to step stands in tables on the device. A step whose matrices could not be factorised,
whose distances lack digits or whose ELBO is not finite, and all after it, change nothing there;
that is read with the ELBOs, once a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._gp.posterior import Posterior
from conjugp._inference.adam import Adam
from conjugp._inference.fused import FusedStep, Leaves
from conjugp._inference.graphs import recorded


class Planned(NamedTuple):
    """One step of a round."""

    start: int  # its first row ...
    size: int  # ... and how many it has
    scale: float
    rho: float
    rate: float


class Rounds:
    """Rounds of steps on copies of the state, which come back when all has gone well."""

    def __init__(
        self,
        step: FusedStep,
        leaves: Leaves,
        q: Posterior,
        rows: tuple[Tensor, Tensor, Tensor],
        limit: int,
        gradients: bool,
        prior_slopes: Callable[[Leaves, Sequence[Tensor | None]], Sequence[Tensor | None]],
        factors: tuple[float, ...],
    ) -> None:
        """`rows`: X, y and weights; `limit`: the longest round; `factors`: of Adam's rate, by leaf.

        `prior_slopes`: what a prior on the leaves adds to their gradients.
        """
        self.step, self.rows, self.gradients = step, rows, gradients
        self.prior_slopes = prior_slopes
        self.q = Posterior(q.h.clone(), q.P.clone())
        # What is learned stands in one piece: Adam is then a handful of launches, not one for each.
        self._moving = [i for i, moves in enumerate(step.learned) if moves and gradients]
        sizes = [leaves[i].numel() for i in self._moving]
        self._x, self._first, self._second = leaves.Z.new_zeros(3, sum(sizes)).unbind()
        own = iter(self._x.split(sizes))
        parts = [next(own) if i in self._moving else x.clone() for i, x in enumerate(leaves)]
        self.leaves = Leaves(*(p.view(x.shape) for p, x in zip(parts, leaves, strict=True)))
        self._sizes = sizes
        self._factor = torch.empty_like(self._x)
        for part, i in zip(self._factor.split(sizes), self._moving, strict=True):
            part.fill_(factors[i])
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
        numbers = []
        for i, p in enumerate(plan, adam.count + 1):
            rate, correction = p.rate / (1 - adam.beta1**i), (1 - adam.beta2**i) ** 0.5
            numbers.append((p.scale, p.rho, rate, correction))
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
        scale, rho, rate, correction = numbers.to(self.leaves.Z.dtype).unbind()
        index = self._starts.index_select(0, self._at) + torch.arange(size, device=scale.device)
        X, y, weight = (x.index_select(0, index) for x in self.rows)
        far = self.step.far(self.leaves)
        found = self.step.evaluate(self.leaves, self.q, X, y, weight * scale, self.gradients)
        elbo = (found.bound - found.kl).double()
        self._good.logical_and_(elbo.isfinite() & (found.failed == 0) & ~far)
        self._elbos.index_copy_(0, self._at, elbo.view(1))
        self._at.add_(1)

        def put(x: Tensor, new: Tensor) -> None:
            torch.where(self._good, new, x, out=x)

        h, P = self.q
        put(h, torch.lerp(h, found.h, rho))
        new = torch.lerp(P, found.P.transpose(0, 1), rho)
        torch.diagonal(new, dim1=1, dim2=2).add_(rho)
        put(P, new)
        if not self._moving:
            return
        slopes = self.prior_slopes(self.leaves, found.gradients)
        pairs = zip(found.gradients, slopes, strict=True)
        g = torch.cat([(x if p is None else x + p).view(-1) for x, p in pairs if x is not None])
        first = torch.lerp(self._first, g, 1 - beta1)
        second = torch.addcmul(beta2 * self._second, g, g, value=1 - beta2)
        length = second.sqrt().div_(correction).add_(1e-8)
        put(self._x, torch.addcdiv(self._x, -rate * self._factor * first, length))
        put(self._first, first)
        put(self._second, second)
