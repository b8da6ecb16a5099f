"""The stage that fits the mean of a decoupled fit, and adds the covariance that it implies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from conjugp._fit.joint import learn_kernel
from conjugp._fit.plan import Good, Plan, Run
from conjugp._fit.weights import KernelRows, assemble, fit_weights, kernel_rows, start_mean
from conjugp._gp.model import Model
from conjugp._gp.posterior import State, prior
from conjugp._inference.mean import Mean
from conjugp._inference.settings import Interrupted, Progress, Settings
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Dataset
from conjugp.kernels import Kernel

JOINT_INDUCING, JOINT_STEPS = 1000, 200  # of the fit in which a decoupled ELBO learns the kernel


class MeanFit(NamedTuple):
    """A model whose mean has been fitted."""

    model: Model
    values: tuple[float, ...]  # the objective of every epoch
    class_gap: float  # what sampling classes cost, in nats per row (C3)


def mean_epochs(plan: Plan, n: int) -> int:
    """Passes over n rows in which the mean is fitted."""
    n_epochs = 10 if n < 100_000 else 6
    # Classes of few rows would otherwise be in few steps.
    n_epochs = max(n_epochs, min(20, 160 * len(plan.mean) // n))
    # A few hundred steps, however large the batch.
    return max(n_epochs, 300 * (plan.settings.batch_size or 0) // n)


def mean_settings(plan: Plan, n: int, **changes: Any) -> Settings:
    """How a mean is fitted to n rows."""
    p, n_epochs = plan.settings, math.ceil(min(plan.settings.max_epochs, mean_epochs(plan, n)))
    batch = p.batch_size or max(256, min(8192, 2 ** round(math.log2(n_epochs * n / 500))))
    # Larger batches have less noise, and can afford larger steps.
    rate = plan.options.mean_learning_rate * min(2.0, max(1.0, batch / 1024) ** 0.5)
    usual = {"max_epochs": n_epochs, "batch_size": batch, "learning_rate": rate}
    return replace(p, **{**usual, **changes})


def fitted_mean(
    run: Run,
    data: Dataset,
    start: Mean,
    settings: Settings,
    rows: KernelRows,
    on_epoch: Callable[[int, float], None] | None = None,
    under: Model | None = None,
) -> MeanFit:
    """The mean at zero variance or `under` that of a model, then the covariance."""
    p, s, kernel = run.plan, settings, rows.b.kernels[0]

    def model(mean: Mean) -> Model:
        n = 512 if p.options.n_covariance == "auto" else int(p.options.n_covariance)
        return assemble(kernel, rows.b, mean, data, p.family, n, s.likelihood, s.bound)

    def good(mean: Mean) -> Good:
        found = model(mean)
        return Good(found, without_posterior(found))

    def work() -> Mean:
        how = (settings, run.generator, on_epoch, under, rows, run.journal)
        return fit_weights(kernel, rows.b.Z, data, start, *how)[1]

    try:
        mean = run.journal.stage("mean", work)
    except Interrupted as stop:
        run.good = partial(good, stop.found)
        raise
    run.good = partial(good, mean)
    return MeanFit(model(mean), mean.values, mean.class_gap)


def trained_mean(
    run: Run, data: Dataset, start: Mean, settings: Settings, rows: KernelRows, stage: str = "fit"
) -> MeanFit:
    """Mean, then covariance; under "elbo" the mean once more, given that covariance."""

    def report(measure: str) -> Callable[[int, float], None]:
        n = int(settings.max_epochs)
        return lambda epoch, value: run.report(Progress(stage, epoch + 1, n, value, measure))

    found = fitted_mean(run, data, start, settings, rows, report("log posterior"))
    if run.plan.options.mean_training != "elbo":
        return found
    start = Mean(found.model.w, found.model.mean)
    again = fitted_mean(run, data, start, settings, rows, report("ELBO of the mean"), found.model)
    return again._replace(values=found.values + again.values)


def jointly_learned(run: Run, data: Dataset, kernel: Kernel, Z: Tensor) -> Kernel:
    """The kernel that the ELBO of the decoupled posterior itself learns (Q8)."""
    p, Z = run.plan, Z[:JOINT_INDUCING]
    how = mean_settings(p, data.n, batch_size=p.settings.batch_size or 512)
    rows = kernel_rows(kernel, Z, data, how)
    model = fitted_mean(run, data, start_mean(len(Z), p.mean), how, rows).model
    how = replace(how, learning_rate=0.2 * how.learning_rate, max_steps=JOINT_STEPS)
    rate = 0.5 * p.settings.learning_rate

    def report(step: int, value: float) -> None:
        run.report(Progress("kernel", step, JOINT_STEPS, value))

    def work() -> Kernel:
        try:
            return learn_kernel(model, data, how, rate, run.generator, report).frozen()
        except (NotPositiveDefiniteError, FloatingPointError):
            return kernel  # a good one already

    return run.journal.stage("joint", work)


def without_posterior(model: Model) -> State:
    """What a decoupled fit leaves to go on from: its kernel, inducing points and prior mean."""
    kernel, Z = model.kernels[0], model.Z
    theta = kernel.theta.to(Z).unsqueeze(0)
    return State(kernel, theta, Z, model.mean, prior(model.n_classes, 1, Z))
