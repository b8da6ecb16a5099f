"""The elementwise work of the fused step, between its matrix products.

`plain` does it by torch, on every device. `fast` has the same by Numba, for a CPU: one pass over
memory each, and no calls of torch on numbers so few that a call takes longer than its work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._inference.adam import move
from conjugp._inference.svi import MIN_PRECISION
from conjugp.kernels import RBF, Kernel, Matern12, Matern32, Matern52
from conjugp.likelihoods._base import Likelihood
from conjugp.likelihoods._logistic_softmax import LogisticSoftmax

LEAST_RESIDUAL = 1e-6  # of the variance


class Kind(NamedTuple):
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


KINDS: dict[type[Kernel], Kind] = {
    RBF: Kind(lambda r2, out: torch.mul(r2, -0.5, out=out).exp_(), lambda r2, k: k.mul_(-0.5)),
    Matern12: Kind(lambda r2, out: _exp(torch.sqrt(r2, out=out)), _matern12_slope),
    Matern32: Kind(_matern32, lambda r2, k: _exp(r2.mul_(3.0).sqrt_()).mul_(-1.5)),
    Matern52: Kind(_matern52, _matern52_slope),
}


class Sites(NamedTuple):
    """What the sites of a batch say; r and theta times weight, dm and dv times share as well."""

    bound: Tensor  # scalar, the weighted sum
    r: Tensor  # (B, C), potential - precision·mean
    theta: Tensor  # (B, C), precision
    dm: Tensor | None  # (B, C), the bound's gradient, where there is a share ...
    dv: Tensor | None  # ... of it that counts


class Pushed(NamedTuple):
    """Where gradients push the inducing points."""

    d_Z: Tensor  # (M, D)
    moved: Tensor  # (D,), Σ_i z_i (EX_i + push_i)


class Passes(NamedTuple):
    """The elementwise work of a step."""

    # y, m without the prior's mean, that mean (C,), v, weights (B,), share or None
    sites: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float | None], Sites]
    # X (B, D), a buffer like it for X², weights (D,): Σ_d weight_d x_d² (B,)
    norms: Callable[[Tensor, Tensor, Tensor], Tensor]
    # weights (B,), X, the same buffer: Σ_b weight_b x_b² (D,)
    squares: Callable[[Tensor, Tensor, Tensor], Tensor]
    # xz (B, M), x² (B,), z² (M,), the largest r² that counts, a buffer: r² in place, and k
    values: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
    # E (B, M), r², k, of which one is overwritten: E∘slope in place, its sums (B,) and (M,)
    slopes: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    # A (B, M) and the variance: what A leaves of it (B,), and where rounding had that too low
    residual: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    # EX and EZ (M, D), of which one is overwritten, sums of E (M,), Z, 1/ℓ², a buffer:
    # the push is EX - EZ - sums·Z
    push: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Pushed]
    adam: Callable[..., None]  # `adam.move`


def plain(kernel: Kernel, likelihood: Likelihood, bound: str) -> Passes:
    """By torch."""
    kind = KINDS[type(kernel)]

    def sites(
        y: Tensor, m: Tensor, mean: Tensor, v: Tensor, weight: Tensor, share: float | None
    ) -> Sites:
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
            return Sites(total, r, theta, None, None)
        weights = weights * share
        return Sites(total, r, theta, (e.dm * weights).to(m), (e.dv * weights).to(m))

    def values(xz: Tensor, x2: Tensor, z2: Tensor, farthest: float, out: Tensor) -> Tensor:
        r2 = torch.sub(z2, xz, alpha=2.0, out=xz).add_(x2.unsqueeze(1))
        return kind.value(r2.clamp_(torch.finfo(r2.dtype).tiny, farthest), out)

    def slopes(E: Tensor, r2: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        E.mul_(kind.slope(r2, k))
        return E.sum(1), E.sum(0)

    return Passes(sites, _norms, _squares, values, slopes, _residual, _push, move)


def _norms(X: Tensor, X2: Tensor, weight: Tensor) -> Tensor:
    return torch.mul(X, X, out=X2) @ weight


def _squares(weight: Tensor, X: Tensor, X2: Tensor) -> Tensor:
    return weight @ X2


def _residual(A: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    explained = torch.linalg.vector_norm(A, dim=1).square_()
    residual, floor = variance - explained, LEAST_RESIDUAL * variance
    return torch.maximum(residual, floor), residual < floor


def _push(EX: Tensor, EZ: Tensor, sums: Tensor, Z: Tensor, weight: Tensor, out: Tensor) -> Pushed:
    push = torch.sub(EX, EZ, out=out).addcmul_(sums.unsqueeze(1), Z, value=-1.0)
    moved = EX.add_(push).mul_(Z).sum(0)
    return Pushed(push.mul_(-2.0 * weight), moved)


def fast(kernel: Kernel, likelihood: Likelihood, bound: str, dtype: torch.dtype) -> Passes:
    """By Numba where that works, and what it does not know by torch."""
    passes = plain(kernel, likelihood, bound)
    try:
        from conjugp._inference import compiled_passes, compiled_sites

        found = compiled_passes.load(dtype)
        tight = type(likelihood) is LogisticSoftmax and bound == "tight"
        sites = compiled_sites.load(dtype) if tight else passes.sites
    except Exception:  # not there, or not for this machine: torch does the same, only slower
        return passes
    rbf = type(kernel) is RBF
    return Passes(
        sites,
        found.norms,
        found.squares,
        found.values if rbf and dtype == torch.float32 else passes.values,
        found.slopes if rbf else passes.slopes,
        found.residual,
        found.push,
        found.adam,
    )
