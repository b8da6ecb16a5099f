"""The step of `mean.Step` on a GPU as a graph, one for each size of batch.

What differs from step to step is copied to where the graph reads it; the numbers are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjugp._inference.graphs import recorded
from conjugp._inference.mean import MEAN_RATE, Step
from conjugp.likelihoods._logistic_softmax import LogisticSoftmax


def applies(step: Step) -> bool:
    """Whether a step can be recorded: on a GPU, at zero variance, its gradient in closed form."""
    closed = isinstance(step.likelihood, LogisticSoftmax) and step.data.variance is None
    return step.here.w.is_cuda and closed


class _Batch(NamedTuple):
    """What a graph reads and writes."""

    K: Tensor  # (B, M)
    y: Tensor  # (B,)
    weight: Tensor  # (B,)
    value: Tensor  # scalar


class CapturedStep:
    """One step on all classes."""

    def __init__(self, whole: Step) -> None:
        self.whole = whole
        # The step sizes over the correction of the first moment, and that of the second.
        self._numbers = whole.here.w.new_zeros(3)
        self._graphs: dict[int, tuple[_Batch, torch.cuda.CUDAGraph | None]] = {}

    def state(self) -> list[Any]:
        """Where it stands, for a checkpoint."""
        return self.whole.state()

    def restore(self, state: list[Any]) -> None:
        """Go back there."""
        self.whole.restore(state)
        self._graphs.clear()

    def __call__(self, rows: slice, rate: float, left: float) -> Tensor:
        """Move w and the prior mean; the batch's share of the bound before."""
        data, adam = self.whole.data, self.whole.adam
        assert data.rows is not None
        K = data.rows(rows.start, rows.stop)
        y, weight = data.data.labels(rows.start, rows.stop)
        if len(K) not in self._graphs:
            here = _Batch(K.clone(), y.clone(), weight.clone(), K.new_zeros(()))
            self._graphs[len(K)] = here, self._captured(here)
        batch, graph = self._graphs[len(K)]
        for place, x in zip(batch, (K, y, weight), strict=False):
            place.copy_(x)
        adam.count += 1
        rate /= 1 - adam.beta1**adam.count
        numbers = (rate, MEAN_RATE * rate, 1 / (1 - adam.beta2**adam.count))
        self._numbers.copy_(torch.tensor(numbers, dtype=self._numbers.dtype), non_blocking=True)
        if graph is None:
            self._take(batch)
        else:
            graph.replay()
        return batch.value

    def _captured(self, batch: _Batch) -> torch.cuda.CUDAGraph | None:
        """Record a step, which leaves no trace."""
        if not batch.K.is_cuda:
            return None
        adam = self.whole.adam
        changed = [*adam.tensors, *adam.first, *adam.second]
        kept = [x.clone() for x in changed]
        graph = recorded(lambda: self._take(batch), batch.K.device)
        for x, before in zip(changed, kept, strict=True):
            x.copy_(before)
        return graph

    @torch.no_grad()
    def _take(self, batch: _Batch) -> None:
        step, adam = self.whole, self.whole.adam
        (w, mean), weight = step.here[:2], batch.weight
        m = torch.addmm(mean, batch.K, step.unwhitened(w).T)
        value, dm = step.likelihood.slope(batch.y, m)
        batch.value.copy_(value @ weight)
        dm.mul_(weight.unsqueeze(1))
        dw = step.whitened(dm.T @ batch.K).mul_(-step.scale).add_(w, alpha=step.shrink)
        d_mean = dm.sum(0).mul_(-step.scale) if step.learn_mean else None
        *rates, correction = self._numbers.unbind()
        moving = zip(adam.tensors, (dw, d_mean), adam.first, adam.second, rates, strict=True)
        for x, g, first, second, rate in moving:
            if g is None:
                continue
            first.lerp_(g, 1 - adam.beta1)
            second.mul_(adam.beta2).addcmul_(g, g, value=1 - adam.beta2)
            root = (second * correction).sqrt_().add_(1e-8)
            x.sub_((first * rate).div_(root))
