"""Kernel, mean and covariance of a decoupled posterior, all by its ELBO (docs/math.md, Q7, Q8).

From every batch the mean takes a step of Adam, the covariance a natural-gradient step, and the
kernel a step of Adam through the features of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from conjugp._gp.covariance import Diagonal, Shared, kl, quadratic
from conjugp._gp.features import basis, unexplained
from conjugp._gp.model import Model
from conjugp._inference.adam import Adam
from conjugp._inference.classes import near_classes
from conjugp._inference.mean import ClassStep, Mean, MeanData, Slopes, Step
from conjugp._inference.settings import Settings
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Dataset
from conjugp.kernels import Kernel

ROUND = 20  # steps between two reports
_MAX_FAILURES = 8
_COVARIANCE_STEP = 0.1  # the first natural-gradient step; it starts from its optimum


class Joint:
    """The decoupled posterior of a model with a kernel, and steps that raise its ELBO."""

    def __init__(
        self, model: Model, data: Dataset, settings: Settings, generator: torch.Generator
    ) -> None:
        self.data, self.settings, self.generator = data, settings, generator
        (self.template,), self.Z, self.S = model.kernels, model.Z, model.S
        self.theta = self.template.theta.to(self.Z).requires_grad_()
        self.start = self.theta.detach().clone()
        self.mean = Mean(model.w.clone(), model.mean.clone())
        cfg, n = settings, data.n
        self.total, self.starts = data.total, torch.arange(0, n, cfg.batch_size or n)
        sampled = cfg.class_batch is not None and cfg.class_batch < data.n_classes
        some = data.sample() if sampled else None
        near = near_classes(self.kernel, some.X, some.y, data.n_classes) if some else None
        rows = MeanData(None, None, data, None, near)
        scale = len(self.starts) / self.total
        whole = Step(self.mean, rows, cfg, scale, 1 / self.total)
        self._take = ClassStep(whole, cfg.class_batch or 0, generator) if sampled else whole
        self.P = self.S.to_precision()
        self._adam = Adam([self.theta.detach()], beta2=0.99)

    @property
    def kernel(self) -> Kernel:
        """The kernel as it stands."""
        return self.template.with_theta(self.theta.detach())

    def step(self, rows: slice, left: float, kernel_rate: float) -> float:
        """Move everything by one batch; an estimate of the ELBO before.

        `left` falls from 1 to 0 as the fit comes to rest.
        """
        rate = left * self.settings.learning_rate
        X = self.data.rows(rows.start, rows.stop).X
        with torch.enable_grad():
            A, v = self._features(X)
        found = self._take.move(rows, A.detach().T, v.detach(), rate, left, slopes=True)
        elbo = len(self.starts) * float(found.value) - self._kl()
        if not math.isfinite(elbo):
            raise FloatingPointError("the ELBO is not finite")
        with torch.enable_grad():
            surrogate = self._surrogate(A, v, found)
        surrogate.backward()
        self._move_kernel(left * kernel_rate)
        self._move_covariance(A.detach()[: self.S.R.shape[-1]], found, left * _COVARIANCE_STEP)
        return elbo

    def _features(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """A (M, B) and the latent variances, (B, C) or (B, 1); differentiable (Q7)."""
        kernel = self.template.with_theta(self.theta)
        A = basis([kernel], self.Z, self.settings.jitter).L_inv[0] @ kernel(self.Z, X)
        A_v, prior = A[: self.S.R.shape[-1]], kernel.diag(X)
        residual = unexplained(prior, A_v.square().sum(0))
        return A, (residual + quadratic(self.S, A_v.unsqueeze(0))).T

    def _surrogate(self, A: Tensor, v: Tensor, found: Slopes) -> Tensor:
        """A number whose gradient in the kernel is that of minus the ELBO per unit of weight."""
        assert found.rows is not None and found.dv is not None
        dv = found.dv
        if v.shape[1] == 1:
            dv = dv.sum(1, keepdim=True)
        elif found.index is not None:
            v = v[:, found.index]
        bound = (A * found.rows.T).sum() + (v * dv).sum()
        return -len(self.starts) / self.total * bound

    def _move_kernel(self, rate: float) -> None:
        g = self.theta.grad
        assert g is not None
        slope = self.template.prior_slope(self.theta.detach() - self.start, g)
        g += self.settings.kernel_prior / self.total * slope
        self._adam.descend([g], [rate])
        self.theta.grad = None

    def _move_covariance(self, A: Tensor, found: Slopes, rho: float) -> None:
        """P <- (1 - rho) P + rho (I + A diag(θ) Aᵀ), of the family (Q4-Q6)."""
        assert found.dv is not None
        theta = (-2 * len(self.starts) * found.dv).clamp_(min=0)
        if isinstance(self.S, Diagonal):
            # Weights are for sums over classes, and this is each class by itself.
            index = slice(None) if found.index is None else found.index
            theta = theta if found.weight is None else theta / found.weight
            self.P[index] = torch.lerp(self.P[index], self.S.precision(A, theta), rho)
        else:
            theta = theta.sum(1, keepdim=True) / self.data.n_classes
            self.P.lerp_(Shared.precision(A, theta), rho)
        self.S = self.S.from_precision(self.P)

    def _kl(self) -> float:
        w = self.mean.w.double()
        return float(0.5 * w.square().sum()) + float(kl(self.S, self.data.n_classes))


def learn_kernel(
    model: Model,
    data: Dataset,
    settings: Settings,
    kernel_rate: float,
    generator: torch.Generator,
    on_round: Callable[[int, float], None] | None = None,
) -> Kernel:
    """The kernel that the ELBO of a decoupled model likes best, from the model's own on.

    `kernel_rate` is Adam's for the kernel, which takes `max_steps`; the settings have the mean's.
    """
    joint = Joint(model, data, settings, generator)
    n, size, n_steps = data.n, settings.batch_size or data.n, settings.max_steps or 0
    good, failures = joint.theta.detach().clone(), 0
    recent: list[float] = []
    order: list[int] = []
    for t in range(n_steps):
        order = (
            order or joint.starts[torch.randperm(len(joint.starts), generator=generator)].tolist()
        )
        i, left = order.pop(), 1 - t / n_steps
        try:
            value = joint.step(slice(i, min(i + size, n)), left, kernel_rate)
        except (NotPositiveDefiniteError, FloatingPointError):
            failures += 1
            if failures > _MAX_FAILURES:
                raise
            joint.theta.data.copy_(good)
            joint.theta.grad = None
            kernel_rate *= 0.5
            continue
        good = joint.theta.detach().clone()
        recent.append(value)
        if len(recent) == ROUND or t == n_steps - 1:
            if on_round is not None:
                on_round(t + 1, sum(recent) / len(recent))
            recent.clear()
    return joint.kernel
