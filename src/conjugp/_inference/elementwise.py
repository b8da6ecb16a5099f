"""The elementwise work of the closed-form step, between its matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._inference.svi import MIN_PRECISION
from conjugp.kernels import RBF, Kernel, Matern12, Matern32, Matern52
from conjugp.likelihoods._base import Likelihood


class Stationary(NamedTuple):
    """A stationary kernel of variance 1: its value at r² and the derivative there."""

    value: Callable[[Tensor, Tensor | None], Tensor]  # of r², into a buffer or None
    slope: Callable[[Tensor, Tensor], Tensor]  # of r² and the value, of which one is overwritten


def _exp(s: Tensor) -> Tensor:
    return s.neg_().exp_()


def _matern32(r2: Tensor, out: Tensor | None) -> Tensor:
    s = torch.mul(r2, 3.0, out=out).sqrt_()
    return (1.0 + s).mul_(_exp(s))


def _matern52(r2: Tensor, out: Tensor | None) -> Tensor:
    s = torch.mul(r2, 5.0, out=out).sqrt_()
    return torch.addcmul(1.0 + s, s, s, value=1 / 3).mul_(_exp(s))


def _matern12_slope(r2: Tensor, k: Tensor) -> Tensor:
    # Where points coincide the readable kernel has no gradient either.
    return torch.where(r2 > torch.finfo(r2.dtype).tiny, -0.5 * k * r2.rsqrt(), 0.0)


def _matern52_slope(r2: Tensor, k: Tensor) -> Tensor:
    s = r2.mul_(5.0).sqrt_()
    return (1.0 + s).mul_(_exp(s)).mul_(-5 / 6)


STATIONARY: dict[type[Kernel], Stationary] = {
    RBF: Stationary(
        lambda r2, out: torch.mul(r2, -0.5, out=out).exp_(), lambda r2, k: k.mul_(-0.5)
    ),
    Matern12: Stationary(lambda r2, out: _exp(torch.sqrt(r2, out=out)), _matern12_slope),
    Matern32: Stationary(_matern32, lambda r2, k: _exp(r2.mul_(3.0).sqrt_()).mul_(-1.5)),
    Matern52: Stationary(_matern52, _matern52_slope),
}


def squared_distances(xz: Tensor, x2: Tensor, z2: Tensor, farthest: float) -> Tensor:
    """r² from xz (B, M), which it takes the place of, x² (B,) and z² (M,)."""
    r2 = torch.sub(z2, xz, alpha=2.0, out=xz).add_(x2.unsqueeze(1))
    return r2.clamp_(torch.finfo(r2.dtype).tiny, farthest)


class SiteSums(NamedTuple):
    """What the sites of a batch say; r and theta times weight, dm and dv times share as well."""

    bound: Tensor  # scalar, the weighted sum
    r: Tensor  # (B, C), potential - precision·mean
    theta: Tensor  # (B, C), precision
    dm: Tensor | None  # (B, C), the bound's gradient, where there is a share ...
    dv: Tensor | None  # ... of it that counts


def site_sums(
    likelihood: Likelihood,
    bound: str,
    y: Tensor,
    m: Tensor,
    mean: Tensor,
    v: Tensor,
    weight: Tensor,
    share: float | None,
) -> SiteSums:
    """Of rows of these weights (B,); m (B, C) is without the prior's mean (C,)."""
    e = likelihood.expectation(y, m + mean, v, bound)
    weights = weight.double().unsqueeze(1)
    precision = (-2.0 * e.dv).clamp_min_(MIN_PRECISION)
    if e.joint is not None:
        precision = torch.maximum(precision, e.joint)
    # Potential - precision·mean, which is ∂bound/∂m + precision·(m - mean).
    r = torch.addcmul(e.dm, precision, m.double()).mul_(weights).to(m)
    total = (e.value * weights.squeeze(1)).sum().to(m)
    theta = (precision * weights).to(m)
    if share is None:
        return SiteSums(total, r, theta, None, None)
    weights = weights * share
    return SiteSums(total, r, theta, (e.dm * weights).to(m), (e.dv * weights).to(m))
