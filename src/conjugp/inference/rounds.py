"""Many fused steps in a row on a GPU, which is told all of them at once and asked at the end.

A whole step is captured as a graph, one for each size of batch, and replayed. What differs
from step to step stands in tables on the device. A step whose matrices could not be factorised or
whose ELBO is not finite, and all after it, leave everything as it is; the device keeps that, and
it is read with the ELBOs once a round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from conjugp.inference.adam import Adam
from conjugp.inference.fused import FusedStep, Leaves
from conjugp.posterior import Posterior


class Planned(NamedTuple):
    """One step of a round."""

    start: int  # its first row ...
    size: int  # ... and how many it has
    scale: float
    rho: float
    rate: float


class Rounds:
    """Rounds of steps on the tensors given here, which change in place."""

    def __init__(
        self,
        step: FusedStep,
        leaves: Leaves,
        q: Posterior,
        adam: Adam,
        rows: tuple[Tensor, Tensor, Tensor],
        limit: int,
        learning: bool,
        prior: tuple[Tensor, float] | None = None,
    ) -> None:
        """`rows` are X, y and weights, `limit` the longest round, `prior` what holds theta."""
        self.step, self.leaves, self.q, self.adam = step, leaves, q, adam
        self.rows, self.learning, self.prior = rows, learning, prior
        device = leaves.Z.device
        self._numbers = torch.zeros(limit, 4, dtype=torch.float64, device=device)
        self._starts = torch.zeros(limit, dtype=torch.int64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._good = torch.ones((), dtype=torch.bool, device=device)
        self._elbos = torch.zeros(limit, dtype=torch.float64, device=device)
        self._changing = [*leaves, *q, *adam.first, *adam.second]
        self._kept = [torch.empty_like(x) for x in self._changing]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def on(self, leaves: Leaves, q: Posterior, adam: Adam) -> bool:
        """Whether these are the tensors it works on."""
        given = [*leaves, *q, *adam.first, *adam.second]
        mine = self._changing
        return all(a.data_ptr() == b.data_ptr() for a, b in zip(given, mine, strict=True))

    @torch.no_grad()
    def run(self, plan: list[Planned]) -> list[float] | None:
        """The ELBO before each step; None, and nothing changed, if one of them went wrong."""
        for kept, x in zip(self._kept, self._changing, strict=True):
            kept.copy_(x)
        if self.leaves.Z.is_cuda:
            for size in {p.size for p in plan} - self._graphs.keys():
                self._capture(size)
        self._begin(plan)
        for p in plan:
            if p.size in self._graphs:
                self._graphs[p.size].replay()
            else:
                self._take(p.size)
        report = torch.cat([self._good.double().view(1), self._elbos[: len(plan)]]).tolist()
        if not report[0]:
            self._go_back()
            return None
        self.adam.count += len(plan) if self.learning else 0
        return report[1:]

    def _begin(self, plan: list[Planned]) -> None:
        adam, count = self.adam, self.adam.count
        numbers = [
            (
                p.scale,
                p.rho,
                p.rate / (1 - adam.beta1 ** (count + i)),
                (1 - adam.beta2 ** (count + i)) ** 0.5,
            )
            for i, p in enumerate(plan, 1)
        ]
        n = len(plan)
        self._numbers[:n].copy_(torch.tensor(numbers, dtype=torch.float64))
        self._starts[:n].copy_(torch.tensor([p.start for p in plan]))
        self._at.zero_()
        self._good.fill_(True)

    def _go_back(self) -> None:
        for kept, x in zip(self._kept, self._changing, strict=True):
            x.copy_(kept)

    def _capture(self, size: int) -> None:
        """Record a step; what it needs to have run once, runs before."""
        self._begin([Planned(0, size, 1.0, 0.0, 0.0)])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._take(size)
        torch.cuda.current_stream().wait_stream(side)
        self._at.zero_()
        self._graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graphs[size], capture_error_mode="thread_local"):
            self._take(size)
        self._go_back()

    def _take(self, size: int) -> None:
        """One step on the rows and with the numbers that the tables have for it."""
        numbers = self._numbers.index_select(0, self._at)[0]
        scale, rho, rate, correction = numbers.to(self.leaves.Z.dtype).unbind()
        index = self._starts.index_select(0, self._at) + torch.arange(size, device=scale.device)
        X, y, weight = (x.index_select(0, index) for x in self.rows)
        found = self.step.evaluate(self.leaves, self.q, X, y, weight * scale, self.learning)
        elbo = found.bound - found.kl
        good = torch.logical_and(self._good, elbo.isfinite() & (found.failed == 0))
        self._good.copy_(good)
        self._elbos.index_copy_(0, self._at, elbo.double().view(1))
        self._at.add_(1)

        def put(x: Tensor, new: Tensor) -> None:
            x.copy_(torch.where(good, new, x))

        h, P = self.q
        put(h, torch.lerp(h, found.h, rho))
        new = torch.lerp(P, found.P.transpose(0, 1), rho)
        torch.diagonal(new, dim1=1, dim2=2).add_(rho)
        put(P, new)
        adam = self.adam
        for x, g, first, second in zip(
            self.leaves, found.gradients, adam.first, adam.second, strict=True
        ):
            if g is None:
                continue
            if x is self.leaves.theta and self.prior is not None:
                start, strength = self.prior
                g = torch.add(g, x - start, alpha=strength)
            m = torch.lerp(first, g, 1 - adam.beta1)
            s = torch.addcmul(adam.beta2 * second, g, g, value=1 - adam.beta2)
            put(x, x - rate * m / (s.sqrt() / correction + 1e-8))
            put(first, m)
            put(second, s)
