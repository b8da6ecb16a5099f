"""Which input scales and how long a lengthscale: settled on held-out points of a subset.

A kernel learned with a few hundred inducing points comes out too smooth for a mean that stands on
thousands, and which features deserve their own scale differs from one data set to the next. A
fit of the mean on a subset takes a fraction of a second, so candidates are simply tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from conjugp.calibration import fit_temperature
from conjugp.decoupled import MeanSettings, fit_weights, latent_mean, start_mean
from conjugp.inducing import by_class
from conjugp.kernels import Kernel
from conjugp.training import Data


class Candidate(NamedTuple):
    """A kernel and its held-out loss."""

    kernel: Kernel
    loss: float


def rescaled(kernel: Kernel, factor: float, n_features: int) -> Kernel:
    """The kernel with all its lengthscales multiplied by `factor`."""
    return kernel.to_units(torch.full((n_features,), factor, dtype=torch.float64))


def held_out_loss(
    kernel: Kernel,
    train: Data,
    held: Data,
    mean: torch.Tensor,
    n_inducing: int,
    settings: MeanSettings,
    seed: int,
) -> float:
    """NLL of held-out points per unit of weight, after the best temperature."""
    generator = torch.Generator().manual_seed(seed)
    metric = kernel_metric(kernel, train)
    Z = by_class(train.X / metric, train.y, train.weight, n_inducing, train.n_classes, generator)
    Z = Z * metric
    start = start_mean(len(Z), mean)
    b, fitted = fit_weights(kernel, Z, train, start, settings, generator)
    p = settings.likelihood.prob(latent_mean(kernel, b, fitted, held.X))
    return fit_temperature(p, held.y, held.weight)[1] / held.total


def kernel_metric(kernel: Kernel, data: Data) -> torch.Tensor:
    """Lengthscales in which k-means measures distances, (D,): the first part's, or ones."""
    parts = getattr(kernel, "parts", (kernel,))
    value = getattr(parts[0], "lengthscale", None)
    if value is None:
        return torch.ones(data.X.shape[1], dtype=data.X.dtype, device=data.X.device)
    scale = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))
    return scale.to(data.X).expand(data.X.shape[1]).clamp(min=1e-12)


def search(
    starts: Sequence[tuple[str, Kernel]],
    factors: Sequence[float],
    first: Sequence[int],
    loss: Callable[[Kernel], float],
    n_features: int,
    on_candidate: Callable[[Candidate], None] | None = None,
) -> Candidate:
    """Every start at the factors numbered in `first`, and from the best of them downhill."""
    tried: dict[tuple[str, int], Candidate] = {}

    def look(name: str, kernel: Kernel, i: int) -> float:
        if not 0 <= i < len(factors):
            return float("inf")
        if (name, i) not in tried:
            scaled = rescaled(kernel, factors[i], n_features)
            tried[name, i] = Candidate(scaled, loss(scaled))
            if on_candidate is not None:
                on_candidate(tried[name, i])
        return tried[name, i].loss

    (name, kernel), best = min(
        ((start, i) for start in starts for i in first), key=lambda at: look(*at[0], at[1])
    )
    for step in (-1, 1):
        i = best
        while look(name, kernel, i + step) < look(name, kernel, i):
            i += step
        if i != best:
            break
    return min(tried.values(), key=lambda c: c.loss)
