"""The stage of a decoupled fit that fits its mean, and adds the covariance that it implies.

The mean has thousands of inducing points, the covariance few. The order is kernel, mean (by
default the posterior's mode), covariance given that mean (docs/math.md, Q7).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjugp._fit.joint import learn_kernel
from conjugp._fit.plan import Good, Plan, Run
from conjugp._gp.covariance import NONE, Covariance, Point, covariance, quadratic
from conjugp._gp.features import Basis, basis, unexplained
from conjugp._gp.model import Model
from conjugp._gp.posterior import State, prior
from conjugp._inference.classes import near_classes
from conjugp._inference.mean import Mean, MeanData, fit_mean
from conjugp._inference.settings import Interrupted, Progress, Settings
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Dataset
from conjugp.kernels import Kernel
from conjugp.likelihoods._base import Likelihood

_COVARIANCE_ROWS = 20_000  # rows that stand for all when the covariance is computed ...
_COVARIANCE_PAIRS = 2**20  # ... fewer if rows times classes come to more than this
JOINT_INDUCING, JOINT_STEPS = 1000, 200  # of the fit in which a decoupled ELBO learns the kernel


class KernelRows:
    """k(X, Z), or k(X, Z) L⁻ᵀ, block by block: kept where memory allows, else computed again.

    Either way a block is computed by itself, so both ways give the same bits.
    """

    def __init__(
        self, b: Basis, data: Dataset, cache_bytes: int, whitened: bool, near: Tensor | None = None
    ) -> None:
        self.b, self.data, self.whitened = b, data, whitened
        self.near = near  # (C, R), classes whose rows are alike
        size = data.n // data.group.size * len(b.Z) * b.Z.element_size()
        self.cache: dict[tuple[int, int], Tensor] | None = {} if size <= cache_bytes else None

    def __call__(self, start: int, stop: int) -> Tensor:
        if self.cache is None:
            return self._compute(start, stop)
        key = (start, stop)
        if key not in self.cache:
            self.cache[key] = self._compute(start, stop)
        return self.cache[key]

    def _compute(self, start: int, stop: int) -> Tensor:
        K = self.b.kernels[0](self.data.rows(start, stop).X, self.b.Z)
        return K @ self.b.L_inv[0].T if self.whitened else K


def kernel_rows(kernel: Kernel, Z: Tensor, data: Dataset, settings: Settings) -> KernelRows:
    """The rows that a fit of the mean reads."""
    # Whitening the rows once costs N·M², whitening w and its gradient C·M² each, every step.
    batch = settings.batch_size or data.n
    whitened = batch < 4 * data.n_classes * math.ceil(settings.max_epochs)
    b = basis([kernel], Z, settings.jitter)
    near = None
    if settings.class_batch is not None and settings.class_batch < data.n_classes:
        some = data.sample()
        near = near_classes(kernel, some.X, some.y, data.n_classes)
    return KernelRows(b, data, cache_bytes(settings.cache_mb, data), whitened, near)


def cache_bytes(cache_mb: int | str, data: Dataset) -> int:
    """Bytes that cached kernel values may take."""
    if cache_mb != "auto":
        return int(cache_mb) * 2**20
    if data.like.device.type == "cuda":
        return int(0.4 * torch.cuda.mem_get_info(data.like.device)[0])
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**31
    return int(0.4 * free)


def start_mean(n_inducing: int, mean: Tensor) -> Mean:
    """The prior."""
    return Mean(mean.new_zeros(len(mean), n_inducing), mean)


def fit_weights(
    kernel: Kernel,
    Z: Tensor,
    data: Dataset,
    start: Mean,
    settings: Settings,
    generator: torch.Generator,
    on_epoch: Callable[[int, float], None] | None = None,
    model: Model | None = None,
    rows: KernelRows | None = None,
    journal: Journal | None = None,
) -> tuple[Basis, Mean]:
    """The mean on inducing points Z; with a `model`, under its latent variances (Q7).

    `rows` of an earlier fit, to more rows than `data` or to fewer, save computing them again.
    """
    if rows is None:
        rows = kernel_rows(kernel, Z, data, settings)
    b = rows.b
    variance = None if model is None else latent_variance(model, data)
    L_inv = None if rows.whitened else b.L_inv[0]
    source = MeanData(rows, L_inv, data, variance, rows.near)
    return b, fit_mean(start, source, settings, generator, on_epoch, journal)


def latent_variance(model: Model, data: Dataset, chunk: int = 4096) -> Tensor:
    """v of every row, (n, C), or (n, 1) where it is the same for all classes."""
    n = 1 if model.S.family == "shared" else None
    stretches = ((i, min(i + chunk, data.n)) for i in range(0, data.n, chunk))
    return torch.cat([model.latent(data.rows(*s).X)[1][:, :n] for s in stretches])


def latent_mean(kernel: Kernel, b: Basis, mean: Mean, X: Tensor, chunk: int = 4096) -> Tensor:
    """m(X), (n, C)."""
    alpha = mean.w @ b.L_inv[0]
    parts = [torch.addmm(mean.mean, kernel(x, b.Z), alpha.T) for x in X.split(chunk)]
    return torch.cat(parts)


def assemble(
    kernel: Kernel,
    b: Basis,
    mean: Mean,
    data: Dataset,
    family: str,
    n_covariance: int,
    likelihood: Likelihood,
    bound: str,
) -> Model:
    """Add the covariance that the sites at the fitted mean imply (Q5, Q6)."""
    alpha = mean.w @ b.L_inv[0]
    M_v = 0 if family == NONE else min(n_covariance, len(b.Z))
    # The leading block of a Cholesky factor is that of the leading block.
    L_inv = b.L_inv[:, :M_v, :M_v].contiguous()
    if family == NONE:
        S = Point(L_inv)
        return Model(likelihood, bound, b.kernels, b.Z, mean.w, alpha, mean.mean, L_inv, S)
    part = data.head(min(_COVARIANCE_ROWS, max(1, _COVARIANCE_PAIRS // data.n_classes)))
    scale = data.total / part.total
    A = torch.cat([L_inv[0] @ kernel(b.Z[:M_v], x) for x in part.X.split(4096)], dim=1)
    m = latent_mean(kernel, b, mean, part.X)
    residual = unexplained(kernel.diag(part.X), A.square().sum(0))
    S: Covariance | None = None
    v = torch.zeros_like(m)
    # Precisions depend on v and v on precisions: two rounds from v = 0 settle it.
    for _ in range(2):
        site = likelihood.site(part.y, m, v.clamp(min=1e-6), bound)
        theta = site.precision.clamp(min=0.0) * (scale * part.weight).unsqueeze(1)
        S = covariance(family, A, theta)
        v = (residual + quadratic(S, A.unsqueeze(0))).T.expand_as(m)
    assert S is not None
    return Model(likelihood, bound, b.kernels, b.Z, mean.w, alpha, mean.mean, L_inv, S)


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
