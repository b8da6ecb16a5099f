"""Which input scales and how long a lengthscale: settled on held-out points of a subset.

A kernel learned with a few hundred inducing points comes out too smooth for a mean that stands on
thousands, and which features deserve their own scale differs from one data set to the next. A
fit of the mean on a subset takes a fraction of a second, so candidates are simply tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._fit.plan import Run, mean_of
from conjugp._fit.starts import class_centres, filled, largest_classes, only_classes, origin_for
from conjugp._fit.weights import fit_weights, latent_mean, mean_settings, start_mean
from conjugp._gp.temperature import fit_temperature
from conjugp._inference.settings import Progress, Settings
from conjugp._inputs.inputs import Scaling
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data, Dataset
from conjugp.kernels import Kernel, Matern52, Normalised

SEARCH_CLASSES = 250
FACTORS = (0.12, 0.17, 0.25, 0.36, 0.5, 0.72, 1.0, 1.4, 2.0)
FIRST_FACTORS = (3, 5)  # a third, and twice that: with many classes kernels are smooth
ROUGH_FACTORS, REFINE_FACTOR = (1.0, 1.4), 1.4
TIE = 0.005  # losses closer than this are alike


class Look(NamedTuple):
    """How closely a candidate is looked at: a fit of the mean to so many rows."""

    n: int
    n_inducing: int
    batch_size: int
    n_epochs: int


GLANCE, PROPER = Look(8000, 800, 256, 4), Look(8000, 800, 256, 10)
LAST = Look(24_000, 2400, 512, 10)  # at the lengthscale alone, with many more rows


class Candidate(NamedTuple):
    """A kernel and its held-out loss."""

    kernel: Kernel
    loss: float


@dataclass(frozen=True)
class Judge:
    """Held-out rows, and what they say of kernels."""

    run: Run
    train: Data
    held: Data
    scaling: Scaling

    def look(self, kernel: Kernel, look: Look) -> float:
        """The loss of held-out rows under a mean fitted with that kernel."""
        p, a, b = self.run.plan, self.train.rows(0, look.n), self.held.rows(0, look.n // 4)
        origin = origin_for(p, kernel, self.scaling, a.X)
        if origin is not None:
            a, b = a.shifted(origin), b.shifted(origin)
        how = mean_settings(p, a.n, batch_size=look.batch_size, max_epochs=look.n_epochs)
        M, journal = min(look.n_inducing, a.n // 2 + 1), self.run.journal
        args = kernel, a, b, mean_of(p, self.train), M, how, p.seed, journal
        return journal.stage("candidate", lambda: held_out_loss(*args))

    def report(self, c: Candidate) -> None:
        """Tell who listens."""
        value = -c.loss * self.held.total
        self.run.report(Progress("search", 0, 0, value, "held-out log-likelihood"))


def best_kernel(
    run: Run,
    starts: list[tuple[str, Kernel]],
    train: Data,
    held: Data,
    everything: Dataset,
    scaling: Scaling,
) -> Kernel:
    """The kernel that predicts held-out rows best."""
    p, D, kept = run.plan, train.X.shape[1], largest_classes(train, SEARCH_CLASSES)
    judge = Judge(run, only_classes(train, kept), only_classes(held, kept), scaling)
    loss, glance = (partial(judge.look, look=look) for look in (PROPER, GLANCE))
    report = judge.report
    best = search(starts, FACTORS, FIRST_FACTORS, loss, D, report, glance)
    if not math.isfinite(best.loss):
        return filled(p.template, everything, p.options.mean_variance)
    if p.kernel is None:
        other = search([("rough", rough(best.kernel))], ROUGH_FACTORS, (0,), loss, D, report)
        best = min(best, other, key=lambda c: c.loss)
    if judge.train.n < LAST.n or judge.held.n < PROPER.n // 4:
        return best.kernel
    return refined(judge, best.kernel, D)


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


def refined(judge: Judge, kernel: Kernel, n_features: int) -> Kernel:
    """The kernel, or the same a little longer or shorter: what many more rows say."""

    def look(factor: float) -> Candidate:
        scaled = rescaled(kernel, factor, n_features)
        found = Candidate(scaled, judge.look(scaled, LAST))
        judge.report(found)
        return found

    best = look(1.0)
    for step in (REFINE_FACTOR, 1 / REFINE_FACTOR):
        factor, other = step, look(step)
        if other.loss >= best.loss:
            continue
        while other.loss < best.loss:
            best, factor = other, factor * step
            other = look(factor)
        break
    return best.kernel


def held_out_loss(
    kernel: Kernel,
    train: Data,
    held: Data,
    mean: Tensor,
    n_inducing: int,
    settings: Settings,
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


def rescaled(kernel: Kernel, factor: float, n_features: int) -> Kernel:
    """The kernel with all its lengthscales multiplied by `factor`."""
    if isinstance(kernel, Normalised):
        return replace(kernel, kernel=rescaled(kernel.kernel, factor, n_features))
    return kernel.to_units(torch.full((n_features,), factor, dtype=torch.float64))


def rough(kernel: Kernel) -> Kernel:
    """A Matérn 5/2 kernel with the parameters of an RBF, on the same inputs."""
    if isinstance(kernel, Normalised):
        return replace(kernel, kernel=rough(kernel.kernel))
    return Matern52(kernel.lengthscale, kernel.variance)  # type: ignore[attr-defined]
