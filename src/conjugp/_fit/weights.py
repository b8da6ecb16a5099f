"""A posterior whose mean has thousands of inducing points and whose covariance has few.

The order is kernel, mean (by default the posterior's mode), covariance given that mean
(docs/math.md, Q7).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
from torch import Tensor

from conjugp._gp.covariance import NONE, Covariance, Point, covariance, quadratic
from conjugp._gp.features import Basis, basis, unexplained
from conjugp._gp.model import Model
from conjugp._inference.classes import near_classes
from conjugp._inference.mean import Mean, MeanData, fit_mean
from conjugp._inference.settings import Settings
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Dataset
from conjugp.kernels import Kernel
from conjugp.likelihoods._base import Likelihood

_COVARIANCE_ROWS = 20_000  # rows that stand for all when the covariance is computed ...
_COVARIANCE_PAIRS = 2**20  # ... fewer if rows times classes come to more than this


class KernelRows:
    """k(X, Z), or k(X, Z) L⁻ᵀ, block by block: kept where memory allows, else computed again.

    Either way a block is computed by itself, so both ways give the same bits.
    """

    def __init__(
        self,
        b: Basis,
        data: Dataset,
        cache_bytes: int,
        whitened: bool,
        near: Tensor | None = None,
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
    prior = kernel.diag(part.X)
    residual = unexplained(prior, A.square().sum(0))
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
