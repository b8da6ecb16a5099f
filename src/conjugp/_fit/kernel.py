"""The stage that chooses the kernel of a decoupled fit.

A small coupled fit learns one, and held-out rows settle which features are worth what and how
long it is (`search`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from conjugp._fit.learn import trained
from conjugp._fit.plan import Plan, Run, mean_of
from conjugp._fit.search import best_kernel
from conjugp._fit.starts import (
    KERNEL_CLASSES,
    filled,
    first_state,
    largest_classes,
    lengthscales,
    median_distance,
    only_classes,
    origin_for,
)
from conjugp._inputs.inputs import Scaling
from conjugp._rows.dataset import Data, Dataset
from conjugp.kernels import RBF, Kernel, Normalised

KERNEL_INDUCING, KERNEL_STEPS = 128, 200  # of the fit that learns the kernel
RELEVANCE_CLASSES = 50  # beyond so many classes, what tells ten of them apart is not tried
SPHERE_FEATURES = 16  # from here on the rows may be an embedding, of which directions matter


def chosen_kernel(
    run: Run, train: Dataset, held: Data, everything: Dataset, scaling: Scaling
) -> Kernel:
    """Learn feature scales by a small ELBO, then try scales and lengthscales on held-out rows."""
    p, rows = run.plan, train.sample()
    if not (p.options.search and held.n):
        kernel = learned_kernel(run, rows, everything)
    else:
        if p.kernel is not None:
            starts = [("given", learned_kernel(run, rows, everything))]
        else:
            many = rows.n_classes > RELEVANCE_CLASSES
            ard = None if many else learned_kernel(run, rows, everything)
            starts = input_scales(p, ard, rows, scaling)
        kernel = best_kernel(run, starts, rows, held, everything, scaling)
    # Machines that round differently may choose differently: rank 0 does.
    if p.kernel is None or train.group.size == 1:
        return train.group.same(kernel)
    # A class of the user's own may not travel; its parameters do.
    return kernel.with_theta(train.group.same(kernel.theta)).frozen()


def learned_kernel(run: Run, rows: Data, everything: Dataset) -> Kernel:
    """The kernel that a small coupled fit to the largest classes learns."""
    p, start = run.plan, filled(run.plan.template, everything, 10.0)
    few = only_classes(rows, largest_classes(rows, KERNEL_CLASSES))
    state = first_state(run, start, few, KERNEL_INDUCING, mean_of(p, few))
    settings = replace(
        p.settings,
        learn_inducing=False,
        batch_size=512,
        max_steps=KERNEL_STEPS,
        tol=0.0,
        learning_rate=0.5 * p.settings.learning_rate,
    )
    try:
        found = trained(run, state, few, settings, "kernel", "kernel").state
    except FloatingPointError:
        return start.frozen()
    return supple(p, found.template.with_theta(found.theta[0]).frozen(), few.rows(0, 1000).X)


def supple(plan: Plan, kernel: Kernel, X: Tensor) -> Kernel:
    """The kernel with at least `mean_variance`, if the user left a variance open.

    What few inducing points learn is small where they explain little, and the mean wants more.
    """
    ones = torch.ones(X.shape[1], dtype=torch.float64)
    step = plan.template.filled(ones, math.e).theta - plan.template.filled(ones, 1.0).theta

    def scaled(power: float) -> Kernel:
        return kernel.with_theta(kernel.theta + power * step.to(kernel.theta)).frozen()

    # What was given stays as it is, and the rest grows with the power of e.
    now, more = (float(scaled(power).diag(X).double().mean()) for power in (0.0, 1.0))
    open_, wanted = (more - now) / math.expm1(1.0), plan.options.mean_variance
    if not (now < wanted and open_ > 1e-6 * now):
        return kernel
    return scaled(math.log1p((wanted - now) / open_))


def input_scales(
    plan: Plan, learned: Kernel | None, rows: Data, scaling: Scaling
) -> list[tuple[str, Kernel]]:
    """Which features are worth what: learned, all alike, as the user gave them, directions."""
    variance, scale = plan.options.mean_variance, torch.as_tensor(scaling.scale)
    lengths = {share: lengthscales(rows.X, scale, share) for share in (0.0, 1.0)}
    starts: list[tuple[str, Kernel]] = []
    if learned is not None:
        ard = torch.tensor(learned.lengthscale)  # type: ignore[attr-defined]
        starts.append(("ard", RBF(ard, variance)))
    starts += [("std", RBF(lengths[0.0], variance)), ("raw", RBF(lengths[1.0], variance))]
    # Few features are not an embedding, and rows of unit length are directions already.
    if rows.X.shape[1] >= SPHERE_FEATURES:
        sphere = Normalised(RBF(1.0, variance), scaling.scale)
        some = rows.rows(0, 1000)
        origin = origin_for(plan, sphere, scaling, rows.like)
        X = some.X if origin is None else some.X + origin
        length = (X * scale.to(X)).norm(dim=1)
        if float(length.std()) > 1e-3 * float(length.mean()):
            gap = median_distance(sphere.directions(X))
            starts.append(("sphere", replace(sphere, kernel=RBF(gap, variance))))
    return starts
