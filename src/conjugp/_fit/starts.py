"""Where a fit starts: its points, how long its kernel is, which features count, its state."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from conjugp._fit.plan import Plan, Run
from conjugp._gp import inducing
from conjugp._gp.features import basis, features
from conjugp._gp.posterior import Posterior, State, initial_state, kl, moments, prior
from conjugp._inference import svi
from conjugp._inference.moving import at_rest
from conjugp._inputs.inputs import Scaling
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data, Dataset
from conjugp.kernels import Kernel, Linear, Normalised, Product, Sum
from conjugp.likelihoods import LogisticSoftmax

# 0: all features count alike; 1: as much as they vary in the user's units; and between the two.
SHARES = (0.0, 0.5, 1.0)

# The small fits that choose: rows, inducing points among them, sweeps, and of the median distance.
ROWS, POINTS, SWEEPS, LENGTH = 350, 50, 3, 0.7
FAR = 3.0  # working units from the origin, which linear parts have to reach
LEAST = 200  # rows, with fewer all features count alike

# Of the kernel with which minibatches start: its variance, and its length in median distances.
FIRST_VARIANCE, FIRST_LENGTH = 3.0, 0.25
KERNEL_CLASSES = 10  # classes of the fits that learn or choose a kernel


def started(run: Run, data: Dataset, scaling: Scaling, warm: State | None) -> State:
    """Where a coupled fit starts: an earlier fit's state, as far as it fits the plan, or afresh."""
    p, like, by_class = run.plan, data.like, not run.plan.usual
    if warm is not None and len(warm.theta) == (1 if p.shared_kernel else data.n_classes):
        if warm.q.h.shape[1] == len(warm.Z):
            theta, Z, mean = (t.to(like, copy=True) for t in (warm.theta, warm.Z, warm.mean))
            q = Posterior(warm.q.h.to(like), warm.q.P.to(like))
            return State(warm.template, theta, Z, mean, q, warm.step)
        # The earlier fit was decoupled.
        kernel = warm.template.with_theta(warm.theta[0]).frozen()
        return first_state(run, kernel, data, p.n_inducing, warm.mean.to(like), by_class)
    kernel = first_kernel(p, data, scaling)
    return first_state(run, kernel, data, p.n_inducing, p.mean, by_class)


def first_state(
    run: Run, kernel: Kernel, data: Dataset, n_inducing: int, mean: Tensor, by_class: bool = False
) -> State:
    """The prior on so many inducing points."""
    Z = first_points(run, kernel, data, n_inducing, by_class)
    kernels = [kernel] * (1 if run.plan.shared_kernel else data.n_classes)
    return initial_state(kernels, Z, mean.clone())


def first_points(run: Run, kernel: Kernel, data: Dataset, n: int, by_class: bool) -> Tensor:
    """n points for a coupled fit: some of the user's, or chosen."""
    given = run.plan.inducing
    if not isinstance(given, Tensor):
        return _chosen(run, kernel, data, n, given, by_class)
    few = torch.randperm(len(given), generator=run.generator)[:n].to(data.like.device)
    return given if n >= len(given) else given[few]


def placed(run: Run, kernel: Kernel, data: Dataset, origin: Tensor | None) -> Tensor:
    """The points of a mean: the user's, which go with the rows to another `origin`, or chosen."""
    given = run.plan.inducing
    if not isinstance(given, Tensor):
        return _chosen(run, kernel, data, run.plan.n_inducing, given, by_class=True)
    return given if origin is None else given + origin


def _chosen(run: Run, kernel: Kernel, data: Dataset, n: int, how: str, by_class: bool) -> Tensor:
    some = data.sample()
    if by_class and how == "kmeans":
        Z = class_centres(kernel, some, n, run.generator)
    else:
        Z = inducing.choose(how, some.X, some.weight, n, kernel, run.generator)
    # Ranks choose alike; where their machines round differently, rank 0's are taken.
    return data.group.same_tensor(Z)


def class_centres(kernel: Kernel, data: Data, n: int, generator: torch.Generator) -> Tensor:
    """About `n` k-means centres of the classes' rows, in the kernel's own metric."""
    like = data.like
    if not isinstance(kernel, Normalised):
        return inducing.by_class(data, n, generator, inducing.metric(kernel, like))
    metric = inducing.metric(kernel.kernel, like)
    Z = inducing.by_class(data, n, generator, metric, kernel.directions)
    if kernel.units is None:
        return Z
    return Z / torch.tensor(kernel.units, dtype=like.dtype, device=like.device)


def first_kernel(plan: Plan, data: Dataset, scaling: Scaling) -> Kernel:
    """Where a coupled fit starts, of what the user left open."""
    variance, kernel = plan.options.initial_variance, plan.template
    if variance:
        return filled(kernel, data, variance)
    # A kernel that starts too short learns faster than one that starts too long.
    if plan.full_batch:
        return filled(kernel, data, 10.0, 0.5)
    some = data.head(ROWS) if data.n_classes <= KERNEL_CLASSES else data.sample()
    few = only_classes(some, largest_classes(some, KERNEL_CLASSES))
    lengths = best_lengthscales(kernel, few, torch.as_tensor(scaling.scale), FIRST_VARIANCE)
    lengths = FIRST_LENGTH * data.group.same_tensor(lengths)
    return reaching(kernel, lengths, few.rows(0, ROWS).X).filled(lengths, FIRST_VARIANCE)


def filled(kernel: Kernel, data: Dataset, variance: float, factor: float = 1.0) -> Kernel:
    """The kernel with what the user left open: a share of the median distance, a variance."""
    X = data.head(1000).X
    d = factor * median_distance(X)
    lengths = torch.full((X.shape[1],), d, dtype=torch.float64)
    return reaching(kernel, lengths, X).filled(lengths, variance)


def reaching(kernel: Kernel, lengths: Tensor, X: Tensor) -> Kernel:
    """The kernel with linear parts, where they are left open, that reach rows far from 0.

    A column such as the year, 2,000 standard deviations from the user's origin, would else have
    all of the variance, and latents far beyond anything that labels say.
    """
    if isinstance(kernel, Linear) and kernel.lengthscale is None:
        far = X.double().square().mean(0).sqrt().cpu()
        return replace(kernel, lengthscale=lengths * torch.where(far > FAR, far, 1.0))
    if isinstance(kernel, Sum | Product):
        return replace(kernel, parts=tuple(reaching(part, lengths, X) for part in kernel.parts))
    return kernel


def median_distance(X: Tensor) -> float:
    """The median distance between distinct points of a sample; 1 if there are none.

    Within what a kernel can learn, were all points but a few as good as equal.
    """
    sample = X[:1000]
    d = torch.pdist(sample) if len(sample) > 1 else X.new_zeros(0)
    d = d[d > 0]
    return float(d.median().clamp(1e-12, 1e12)) if len(d) else 1.0


def lengthscales(X: Tensor, scale: Tensor, share: float) -> Tensor:
    """One per feature of rows in working units, the median distance long, (D,), float64.

    `scale` (D,) is how large a working unit is in the user's; columns at rest have large ones.
    """
    rest = (at_rest(X) & (X != 0.0).any(0)).cpu()
    typical = scale[~rest].mean() if bool(rest.any()) and not bool(rest.all()) else scale.mean()
    relative = ((typical / scale) ** share).clamp(1e-6, 1e6)  # within what kernels can learn
    relative[rest] = 1.0
    return relative * median_distance(X / relative.to(X))


def best_lengthscales(kernel: Kernel, data: Data, scale: Tensor, variance: float) -> Tensor:
    """The lengthscales (D,) with which a kernel says most of a few rows; float64."""
    few, tried = data.rows(0, ROWS), list[tuple[Tensor, Kernel]]()
    for share in SHARES if few.n >= LEAST else SHARES[:1]:
        lengths = lengthscales(few.X, scale, share)
        start = reaching(kernel, LENGTH * lengths, few.X).filled(LENGTH * lengths, variance)
        # What a kernel leaves open may hardly depend on the units.
        if not any(torch.allclose(start.theta, k.theta, atol=0.1) for _, k in tried):
            tried.append((lengths, start))
    if len(tried) == 1:
        return tried[0][0]
    return max(tried, key=lambda candidate: evidence(candidate[1], few))[0]


@torch.no_grad()
def evidence(kernel: Kernel, data: Data) -> float:
    """The ELBO of a small fit in which q alone moves; minus infinity where there is none (Q1-Q4).

    By the likelihood of the default, whatever that of the fit to come: this is about the inputs.
    """
    n = min(POINTS, data.n // 2)
    Z, rows, C = data.X[:n], data.rows(n, None), data.n_classes
    like, q = LogisticSoftmax(), prior(C, n, data.X)
    mean, value = Z.new_full((C,), like.start_mean(C)), -math.inf
    try:
        f = features(basis((kernel,), Z), rows.X)
        for t in range(SWEEPS):
            solved = moments(q)
            found, _ = svi.evaluate(solved, like, "tight", f, rows.y, mean, rows.weight, False)
            value = float(found.bound) - float(kl(solved))
            q = svi.update(q, found, 1.0, (1 + t) ** -0.6)
    except (NotPositiveDefiniteError, FloatingPointError):
        return -math.inf
    return value if math.isfinite(value) else -math.inf


def largest_classes(data: Data, most: int) -> Tensor | None:
    """The `most` largest classes; None if there are no more than that."""
    if data.n_classes <= most:
        return None
    counts = torch.bincount(data.y, minlength=data.n_classes)
    return counts.argsort(descending=True, stable=True)[:most]


def only_classes(data: Data, kept: Tensor | None) -> Data:
    """The rows of some classes, relabelled by their place among these."""
    if kept is None:
        return data
    label = torch.full((data.n_classes,), -1, device=data.y.device)
    label[kept] = torch.arange(len(kept), device=label.device)
    rows = label[data.y] >= 0
    return Data(data.X[rows], label[data.y][rows], data.weight[rows], len(kept))


def origin_for(plan: Plan, kernel: Kernel, scaling: Scaling, like: Tensor) -> Tensor | None:
    """What takes rows like these to the user's origin (D,), if a kernel of our choice sees them so.

    None where they stay where they are.
    """
    if plan.kernel is not None or not isinstance(kernel, Normalised) or not scaling.origin.any():
        return None
    return torch.as_tensor(scaling.origin).to(like)
