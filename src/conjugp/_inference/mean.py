"""The mean on many inducing points, the kernel at rest (docs/math.md, Q7).

The mean of q is m(x) = mean + k(x, Z) L⁻ᵀ w. Its gradient costs C·M·B a step where a covariance
costs C·M²·B, so it can have thousands of inducing points. The whitened weights w are found by
Adam on the ELBO with the latent variances held: at zero they are the posterior's mode. With
thousands of classes a step takes a sample of them (C1-C3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjugp._inference.adam import Adam, RowAdam
from conjugp._inference.classes import AVERAGE, Multipliers, draw_classes
from conjugp._inference.settings import Interrupted, Settings
from conjugp._persistence.codec import in_checkpoints
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Dataset
from conjugp.likelihoods._base import Likelihood
from conjugp.likelihoods._logistic_softmax import Classes, LogisticSoftmax

# The prior mean moves every point at once, a weight only a few.
MEAN_RATE = 0.1
_GAP_PAIRS = 2**20  # rows times classes that tell what sampling classes costs


@in_checkpoints
class Mean(NamedTuple):
    """Whitened weights and the prior mean of every class."""

    w: Tensor  # (C, M)
    mean: Tensor  # (C,)
    class_gap: float = 0.0  # what sampling classes cost at the end, in nats per row (C3)
    values: tuple[float, ...] = ()  # the objective of every epoch


class MeanData(NamedTuple):
    """What the fit of the mean reads. Rows are in random order.

    The rows are k(X, Z), whitened step by step with `L_inv`, or Aᵀ itself when `L_inv` is None;
    None where they come with every step.
    """

    rows: Callable[[int, int], Tensor] | None  # (start, stop) -> (stop - start, M)
    L_inv: Tensor | None  # (M, M)
    data: Dataset  # labels and weights
    variance: Tensor | None  # (N, C) or, the same for all classes, (N, 1); None for zero
    near: Tensor | None = None  # (C, R), classes like each other, for class batches


def fit_mean(
    start: Mean,
    data: MeanData,
    settings: Settings,
    generator: torch.Generator,
    on_epoch: Callable[[int, float], None] | None = None,
    journal: Journal | None = None,
) -> Mean:
    """Maximise Σ weight·bound - ½|w|² over w (C, M) and the prior mean (Q7).

    With a `class_batch` a step sees the labels of its rows and so many other classes.
    """
    from conjugp._inference import captured

    here = Mean(start.w.clone(), start.mean.clone())
    n, n_epochs = data.data.n, math.ceil(settings.max_epochs)
    rate, batch_size = settings.learning_rate, settings.batch_size or n
    starts = torch.arange(0, n, batch_size)
    # Not n over the rows of the batch: those of a short last one would count for more than others.
    total = data.data.total
    take = Step(here, data, settings, len(starts) / total, 1 / total)
    n_others = settings.class_batch
    if n_others is not None and n_others < len(here.mean):
        take = ClassStep(take, n_others, generator)
    elif data.data.group.size == 1 and captured.applies(take):
        take = captured.CapturedStep(take)
    journal = journal or Journal()
    n_steps, done, first = n_epochs * len(starts), 0, 0
    order: list[int] = []  # batches that this epoch has left, last first
    # Summed where it is computed, and looked at once an epoch: to look is to wait for a GPU.
    objective, values = here.w.new_zeros((), dtype=torch.float64), []
    loop = journal.left_off()
    if loop is not None:
        done, first, order, so_far, values = loop["at"]
        objective.fill_(so_far)
        take.restore(loop["step"])
        generator.set_state(loop["generator"])
    try:
        for epoch in range(first, n_epochs):
            if not order:
                order = starts[torch.randperm(len(starts), generator=generator)].flip(0).tolist()
                objective.zero_()
            while order:
                if journal.due():
                    at = [done, epoch, order, float(objective), values]
                    state = generator.get_state()
                    journal.keep({"at": at, "step": take.state(), "generator": state})
                i, left = order.pop(), 1 - done / n_steps
                if order:
                    data.data.expect(order[-1], min(order[-1] + batch_size, n))
                objective += take(slice(i, min(i + batch_size, n)), rate * left, left)
                done += 1
            values.append(float(objective) - 0.5 * float(here.w.square().sum()))
            if on_epoch is not None:
                on_epoch(epoch, values[-1])
    except KeyboardInterrupt:
        raise Interrupted(here) from None
    return here._replace(values=tuple(values), class_gap=take.gap())


class Slopes(NamedTuple):
    """What a step found before it moved: derivatives of its weighted bound, class weights in."""

    value: Tensor  # scalar, the bound
    rows: Tensor | None  # (B, M), in the whitened rows, if asked for
    dv: Tensor | None  # (B, K), in the variances of its classes
    index: Tensor | None = None  # (K,), its classes; None for all
    weight: Tensor | None = None  # (K,), what they stand for


class Step:
    """One step on all classes."""

    def __init__(
        self, here: Mean, data: MeanData, settings: Settings, scale: float, shrink: float
    ) -> None:
        self.here, self.data, self.scale, self.shrink = here, data, scale, shrink
        self.likelihood, self.bound = settings.likelihood, settings.bound
        self.learn_mean = settings.learn_mean

    @cached_property
    def adam(self) -> Adam:
        """The optimiser of all of w."""
        return Adam([self.here.w, self.here.mean])

    def state(self) -> list[Any]:
        """Where it stands, for a checkpoint."""
        return [self.here.w, self.here.mean, self.adam.first, self.adam.second, self.adam.count]

    def restore(self, state: list[Any]) -> None:
        """Go back there."""
        w, mean, self.adam.first, self.adam.second, self.adam.count = state
        self.here.w.copy_(w)
        self.here.mean.copy_(mean)

    def gap(self) -> float:
        """What looking at some of the classes costs: it looks at all."""
        return 0.0

    def __call__(self, rows: slice, rate: float, left: float) -> Tensor:
        """Move w and the prior mean; the batch's share of the bound before."""
        assert self.data.rows is not None
        K, v = self.data.rows(rows.start, rows.stop), self.data.variance
        return self.move(rows, K, None if v is None else v[rows], rate, left).value

    def move(
        self,
        rows: slice,
        K: Tensor,
        v: Tensor | None,
        rate: float,
        left: float,
        slopes: bool = False,
    ) -> Slopes:
        """The same for rows K and latent variances v, (B, C) or (B, 1)."""
        data, (w, mean) = self.data, self.here[:2]
        y, weight = data.data.labels(rows.start, rows.stop)
        m = torch.addmm(mean, K, self.unwhitened(w).T)
        v = None if v is None else v.expand_as(m)
        value, dm, dv = _bound(self.likelihood, self.bound, y, m, v)
        dm.mul_(weight.unsqueeze(1))
        dK = dm @ w if slopes else None
        g, g_mean, total = dm.T @ K, dm.sum(0), value @ weight
        data.data.group.sum([g, g_mean, total])
        dw = self.whitened(g).mul_(-self.scale).add_(w, alpha=self.shrink)
        d_mean = g_mean.mul_(-self.scale) if self.learn_mean else None
        self.adam.descend([dw, d_mean], [rate, MEAN_RATE * rate])
        return Slopes(total, dK, None if dv is None else dv * weight.unsqueeze(1))

    def unwhitened(self, w: Tensor) -> Tensor:
        """L⁻ᵀw where the rows are k(X, Z)."""
        return w if self.data.L_inv is None else w @ self.data.L_inv

    def whitened(self, g: Tensor) -> Tensor:
        """L⁻¹g, likewise."""
        return g if self.data.L_inv is None else g @ self.data.L_inv.T


class ClassStep:
    """The same on the labels of its rows and a sample of the other classes (C1-C3)."""

    def __init__(self, whole: Step, n_others: int, generator: torch.Generator) -> None:
        if not isinstance(whole.likelihood, LogisticSoftmax):
            raise TypeError("class batches need the logistic-softmax likelihood")
        self.whole, self.likelihood = whole, whole.likelihood
        self.n_others, self.generator = n_others, generator
        w, mean = whole.here[:2]
        self.adam_w, self.adam_mean = RowAdam(w), RowAdam(mean)
        v = whole.data.variance
        total = self.likelihood.start_total(
            whole.bound, mean, 0.0 if v is None else float(v.mean())
        )
        self.multipliers = Multipliers(torch.full((whole.data.data.n,), total).to(w))

    def state(self) -> list[Any]:
        """Where it stands, for a checkpoint."""
        here, adams = self.whole.here, (self.adam_w, self.adam_mean)
        moments = [[a.first, a.second, a.last, a.count] for a in adams]
        return [here.w, here.mean, moments, self.multipliers.total]

    def restore(self, state: list[Any]) -> None:
        """Go back there."""
        w, mean, moments, self.multipliers.total = state
        self.whole.here.w.copy_(w)
        self.whole.here.mean.copy_(mean)
        for adam, its in zip((self.adam_w, self.adam_mean), moments, strict=True):
            adam.first, adam.second, adam.last, adam.count = its

    def gap(self) -> float:
        """How far the bound of a row lies below what all classes give, on average (C3)."""
        whole = self.whole
        data, (w, mean) = whole.data, whole.here[:2]
        assert data.rows is not None
        n = min(data.data.n, max(1, _GAP_PAIRS // len(mean)))
        m = torch.addmm(mean, data.rows(0, n), whole.unwhitened(w).T)
        if data.variance is None:
            bound, total = "tight", torch.sigmoid(m).sum(1)
        else:
            bound = whole.bound
            total = self.likelihood.total(m, data.variance[:n].expand_as(m), bound)
        remembered = self.multipliers.total[:n]
        return float(self.likelihood.shortfall(remembered, total, bound, len(mean)).mean())

    def __call__(self, rows: slice, rate: float, left: float) -> Tensor:
        """Move the sampled rows of w and entries of the prior mean; an estimate of the bound.

        At first λ comes from the classes drawn: biased, but never far behind. Over the last
        quarter of the steps it comes more and more from earlier ones alone (C3).
        """
        data = self.whole.data
        assert data.rows is not None
        K, v = data.rows(rows.start, rows.stop), data.variance
        return self.move(rows, K, None if v is None else v[rows], rate, left).value

    def move(
        self,
        rows: slice,
        K: Tensor,
        v: Tensor | None,
        rate: float,
        left: float,
        slopes: bool = False,
    ) -> Slopes:
        """The same for rows K and latent variances v, (B, C) or (B, 1)."""
        gain = min(1.0, 4 * left)
        whole = self.whole
        data, (w, mean) = whole.data, whole.here[:2]
        y, weights = data.data.labels(rows.start, rows.stop)
        row_weight = weights.unsqueeze(1)
        drawn = draw_classes(y, len(mean), self.n_others, self.generator, data.near)
        weight, w_here = drawn.weight.to(w), self.adam_w.look(drawn.index, rate)
        mean_here = self.adam_mean.look(drawn.index, MEAN_RATE * rate)
        m = torch.addmm(mean_here, K, whole.unwhitened(w_here).T)
        if v is not None:
            v = v.expand_as(m) if v.shape[1] == 1 else v[:, drawn.index]
        seen = Classes(weight, self.multipliers.total[rows], len(mean), gain)
        part = self.likelihood.part(drawn.y, m, v, whole.bound, seen)
        self.multipliers.update(rows, part.total, max(gain, AVERAGE))
        dm = part.dm.to(m.dtype).mul_(row_weight)
        dK = dm @ w_here if slopes else None
        dw = whole.whitened(dm.T @ K).mul_(-whole.scale)
        dw.addcmul_(w_here, weight.unsqueeze(1), value=whole.shrink)
        self.adam_w.descend(dw, rate, weight)
        if whole.learn_mean:
            d_mean = dm.sum(0).mul_(-whole.scale)
            self.adam_mean.descend(d_mean, MEAN_RATE * rate, weight)
        value = part.value.to(weights) @ weights
        return Slopes(value, dK, part.dv.to(m.dtype) * row_weight, drawn.index, weight)


def _bound(
    likelihood: Likelihood, bound: str, y: Tensor, m: Tensor, v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The bound (B,), its derivatives in m and v (B, C); with no variance those of log p in m."""
    if v is not None:
        site = likelihood.site(y, m, v, bound)
        return site.bound, site.potential - site.precision * m, -0.5 * site.precision
    return *likelihood.slope(y, m), None
