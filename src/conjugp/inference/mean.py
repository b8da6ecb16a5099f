"""The mean on many inducing points, the kernel at rest (docs/math.md, Q7).

The mean of q is m(x) = mean + k(x, Z) L⁻ᵀ w. Its gradient costs C·M·B a step where a covariance
costs C·M²·B, so it can have thousands of inducing points. The whitened weights w are found by
Adam on the ELBO with the latent variances held: at zero they are the posterior's mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp.inference.adam import Adam
from conjugp.likelihoods.base import Likelihood

# The prior mean moves every point at once, a weight only a few.
_MEAN_RATE = 0.1


class Mean(NamedTuple):
    """Whitened weights and the prior mean of every class."""

    w: Tensor  # (M, C)
    mean: Tensor  # (C,)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the mean as it stood."""

    def __init__(self, mean: Mean) -> None:
        super().__init__()
        self.mean = mean


class MeanData(NamedTuple):
    """What the fit of the mean reads. Rows are in random order.

    The rows are k(X, Z), whitened step by step with `L_inv`, or Aᵀ itself when `L_inv` is None.
    """

    rows: Callable[[int, int], Tensor]  # (start, stop) -> (stop - start, M)
    L_inv: Tensor | None  # (M, M)
    y: Tensor  # (N,)
    weight: Tensor  # (N,)
    variance: Tensor | None  # (N, C), None for zero


def fit_mean(
    start: Mean,
    data: MeanData,
    likelihood: Likelihood,
    bound: str,
    *,
    n_epochs: int,
    batch_size: int,
    learning_rate: float,
    learn_mean: bool,
    generator: torch.Generator,
    on_epoch: Callable[[int, float], None] | None = None,
) -> Mean:
    """Maximise Σ weight·bound - ½|w|² over w (M, C) and the prior mean (Q7)."""
    w, mean = start.w.clone(), start.mean.clone()
    n = len(data.y)
    total = float(data.weight.sum())
    starts = torch.arange(0, n, batch_size)
    optimiser = Adam([w, mean])
    L_inv = data.L_inv
    n_steps, step = n_epochs * len(starts), 0
    # Not n over the rows of the batch: those of a short last one would count for more than others.
    scale = len(starts) / total
    try:
        for epoch in range(n_epochs):
            objective = 0.0
            for i in starts[torch.randperm(len(starts), generator=generator)].tolist():
                j = min(i + batch_size, n)
                K = data.rows(i, j)
                m = torch.addmm(mean, K, w if L_inv is None else L_inv.T @ w)
                variance = None if data.variance is None else data.variance[i:j]
                value, dm = _bound(likelihood, bound, data.y[i:j], m, variance)
                dm.mul_(data.weight[i:j].unsqueeze(1))
                g = K.T @ dm
                g = g if L_inv is None else L_inv @ g
                dw = g.mul_(-scale).add_(w, alpha=1 / total)
                d_mean = dm.sum(0).mul_(-scale) if learn_mean else None
                rate = learning_rate * (1 - step / n_steps)
                optimiser.descend([dw, d_mean], [rate, _MEAN_RATE * rate])
                step += 1
                objective += float(value @ data.weight[i:j])
            if on_epoch is not None:
                on_epoch(epoch, objective - 0.5 * float(w.square().sum()))
    except KeyboardInterrupt:
        raise Interrupted(Mean(w, mean)) from None
    return Mean(w, mean)


def _bound(
    likelihood: Likelihood, bound: str, y: Tensor, m: Tensor, v: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The bound (B,) and its derivative in m (B, C); with no variance both are those of log p."""
    if v is not None:
        site = likelihood.site(y, m, v, bound)
        return site.bound, site.potential - site.precision * m
    m = m.detach().requires_grad_()
    with torch.enable_grad():
        value = likelihood.log_prob(y, m)
        total = value.sum()
    return value.detach(), torch.autograd.grad(total, m)[0]
