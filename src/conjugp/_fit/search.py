"""Which input scales and how long a lengthscale: settled on held-out points of a subset.

A kernel learned with a few hundred inducing points comes out too smooth for a mean that stands on
thousands, and which features deserve their own scale differs from one data set to the next. A
fit of the mean on a subset takes a fraction of a second, so candidates are simply tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from conjugp._fit.weights import MeanSettings, fit_weights, latent_mean, start_mean
from conjugp._gp.inducing import by_class, metric
from conjugp._gp.temperature import fit_temperature
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data
from conjugp.kernels import Kernel, Normalised

TIE = 0.005  # losses closer than this are alike


class Candidate(NamedTuple):
    """A kernel and its held-out loss."""

    kernel: Kernel
    loss: float


def rescaled(kernel: Kernel, factor: float, n_features: int) -> Kernel:
    """The kernel with all its lengthscales multiplied by `factor`."""
    if isinstance(kernel, Normalised):
        return replace(kernel, kernel=rescaled(kernel.kernel, factor, n_features))
    return kernel.to_units(torch.full((n_features,), factor, dtype=torch.float64))


def held_out_loss(
    kernel: Kernel,
    train: Data,
    held: Data,
    mean: torch.Tensor,
    n_inducing: int,
    settings: MeanSettings,
    seed: int,
    journal: Journal | None = None,
) -> float:
    """NLL of held-out points per unit of weight, after the best temperature.

    Infinite for a kernel whose numbers leave their range: it loses.
    """
    generator = torch.Generator().manual_seed(seed)
    Z = class_centres(kernel, train, n_inducing, generator)
    start = start_mean(len(Z), mean)
    try:
        b, fitted = fit_weights(kernel, Z, train, start, settings, generator, journal=journal)
    except NotPositiveDefiniteError:
        return math.inf
    p = settings.likelihood.prob(latent_mean(kernel, b, fitted, held.X))
    if not bool(torch.isfinite(p).all()):
        return math.inf
    return fit_temperature(p, held.y, held.weight)[1] / held.total


def class_centres(kernel: Kernel, data: Data, n: int, generator: torch.Generator) -> torch.Tensor:
    """About `n` k-means centres of the classes' rows, in the kernel's own metric."""
    if not isinstance(kernel, Normalised):
        return by_class(data, n, generator, metric(kernel, data.like))
    like = data.like
    Z = by_class(data, n, generator, metric(kernel.kernel, like), kernel.directions)
    if kernel.units is None:
        return Z
    return Z / torch.tensor(kernel.units, dtype=like.dtype, device=like.device)


def search(
    starts: Sequence[tuple[str, Kernel]],
    factors: Sequence[float],
    first: Sequence[int],
    loss: Callable[[Kernel], float],
    n_features: int,
    on_candidate: Callable[[Candidate], None] | None = None,
    glance: Callable[[Kernel], float] | None = None,
) -> Candidate:
    """The factors numbered in `first` for every start, and from the best of them downhill.

    With a cheaper `glance` at the first candidates, only the two best starts get a proper look.
    Of candidates as good as the best the shortest lengthscale is taken: all rows, and all
    inducing points, can afford rougher functions than the few that chose.
    """
    kernels = dict(starts)
    tried: dict[tuple[str, int], Candidate] = {}

    def look(name: str, i: int) -> float:
        if not 0 <= i < len(factors):
            return float("inf")
        if (name, i) not in tried:
            scaled = rescaled(kernels[name], factors[i], n_features)
            tried[name, i] = Candidate(scaled, loss(scaled))
            if on_candidate is not None:
                on_candidate(tried[name, i])
        return tried[name, i].loss

    ahead = [(name, i) for name in kernels for i in first]
    if glance is not None and len(kernels) > 2:
        seen = {at: glance(rescaled(kernels[at[0]], factors[at[1]], n_features)) for at in ahead}
        by_start = {name: min((seen[name, i], i) for i in first) for name in kernels}
        ahead = [(name, by_start[name][1]) for name in sorted(kernels, key=by_start.get)[:2]]  # type: ignore[arg-type]
    name, best = min(ahead, key=lambda at: look(*at))
    for step in (-1, 1):
        i = best
        while look(name, i + step) < look(name, i):
            i += step
        if i != best:
            break
    at_best = min(tried, key=lambda at: tried[at].loss)
    most = (1 + TIE) * tried[at_best].loss
    ties = [i for (other, i), c in tried.items() if other == at_best[0] and c.loss <= most]
    return tried[at_best[0], min(ties, key=lambda i: factors[i])]
