"""Work on a GPU recorded as a graph, and the step of `mean.Step` so: one for each size of batch.

What differs from step to step is copied to where the graph reads it; the numbers are the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjugp._inference.mean import MEAN_RATE, Step
from conjugp.likelihoods._logistic_softmax import LogisticSoftmax


def recorded(work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of work(), which runs once before: libraries set themselves up at their first use.

    Not by `torch.cuda.graph`: that collects garbage and empties the allocator's cache each time.
    """
    collects = gc.isenabled()
    with torch.cuda.device(device):
        graph, here, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            work()
            torch.cuda.synchronize()
            # An old graph that is collected meanwhile would spoil this one.
            gc.disable()
            try:
                graph.capture_begin(capture_error_mode="thread_local")
                work()
                graph.capture_end()
            finally:
                if collects:
                    gc.enable()
        here.wait_stream(side)
    return graph


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
        # The lengths of the steps of w and of the prior mean, and what the root is added to.
        self._numbers = whole.here.w.new_zeros(3)
        self._graphs: dict[int, tuple[_Batch, torch.cuda.CUDAGraph | None]] = {}

    def state(self) -> list[Any]:
        """Where it stands, for a checkpoint."""
        return self.whole.state()

    def restore(self, state: list[Any]) -> None:
        """Go back there."""
        self.whole.restore(state)
        self._graphs.clear()

    def gap(self) -> float:
        """None: it looks at all classes."""
        return self.whole.gap()

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
        length, least = adam.corrected(rate)
        numbers = torch.tensor((length, MEAN_RATE * length, least), dtype=self._numbers.dtype)
        self._numbers.copy_(numbers, non_blocking=True)
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
        before = [x.clone() for x in changed]
        graph = recorded(lambda: self._take(batch), batch.K.device)
        for x, old in zip(changed, before, strict=True):
            x.copy_(old)
        return graph

    @torch.no_grad()
    def _take(self, batch: _Batch) -> None:
        step = self.whole
        (w, mean), weight = step.here[:2], batch.weight
        m = torch.addmm(mean, batch.K, step.unwhitened(w).T)
        value, dm = step.likelihood.slope(batch.y, m)
        batch.value.copy_(value @ weight)
        dm.mul_(weight.unsqueeze(1))
        dw = step.whitened(dm.T @ batch.K).mul_(-step.scale).add_(w, alpha=step.shrink)
        d_mean = dm.sum(0).mul_(-step.scale) if step.learn_mean else None
        of_w, of_mean, least = self._numbers.unbind()
        step.adam.move([dw, d_mean], [(of_w, least), (of_mean, least)])
