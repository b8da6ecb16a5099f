"""Kernels of the scaled distance: RBF, the Matérn family, rational quadratic.

Squared scaled distances keep their digits, and the RBF of them takes one pass.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from conjugp.kernels._base import Kernel
from conjugp.kernels._parameters import Lengths, Positive

# Squared scaled norms up to which the distances between points are good to 1e-4, and to 1e-7.
MOST_SQUARE = {torch.float32: 1e3, torch.float64: 1e9}
_HUGE = 1e36  # beyond this products of float32 may overflow
_CAREFUL = 2**17  # distances in float64 at a time


@dataclass(frozen=True)
class Stationary(Kernel):
    """A kernel of the scaled distance: k(x, z) = variance · of_distance(Σ_d (x_d − z_d)² / ℓ_d²).

    Subclasses are dataclasses too, and may have more parameters.
    """

    # Squared scaled distances count as no more than this. What is left of a correlation there is
    # lost beside 1 in any precision, but subnormal numbers would make products many times slower.
    # A subclass whose correlation falls off more slowly than its parent's has to set its own.
    farthest: ClassVar[float] = math.inf

    lengthscale: Lengths = None
    variance: Positive = None

    @abstractmethod
    def of_distance(self, r2: Tensor) -> Tensor:
        """The correlation at squared scaled distance `r2` > 0, which may be overwritten."""

    @property
    def stationary(self) -> bool:
        return True

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        lengthscale = self.parameter("lengthscale", X)
        parts = expanded(X, Z, lengthscale)
        if has_digits(*parts[2:]):
            r2 = distances(*parts, self.farthest, same=X is Z)
        else:
            r2 = careful_distances(X, Z, lengthscale, self.farthest)
        correlation = self.of_distance(r2)
        variance = self.parameter("variance", X)
        if correlation.requires_grad or variance.requires_grad:
            return correlation * variance
        return correlation.mul_(variance)

    def diag(self, X: Tensor) -> Tensor:
        return self.parameter("variance", X).expand(len(X))


@dataclass(frozen=True)
class RBF(Stationary):
    """Squared exponential: variance · exp(−r²/2), r the distance in lengthscales.

    Parameters
    ----------
    lengthscale : float, array-like of shape (n_features,) or None
        One for all features, one for each (ARD), or from the data.
    variance : float or None
        The prior variance of the latent functions, or from the data.
    """

    farthest: ClassVar[float] = 80.0

    def of_distance(self, r2: Tensor) -> Tensor:
        return r2.mul_(-0.5).exp_()

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        # The default kernel has a fused version, tested equal to Stationary's.
        parts = expanded(X, Z, self.parameter("lengthscale", X))
        if not has_digits(*parts[2:]):
            return super().__call__(X, Z)
        return FusedRBF.apply(*parts, self.parameter("variance", X), self.farthest, X is Z)  # type: ignore


@dataclass(frozen=True)
class Matern12(Stationary):
    """Exponential: variance · exp(−r); rough, continuous functions. Parameters as in RBF."""

    farthest: ClassVar[float] = 1600.0

    def of_distance(self, r2: Tensor) -> Tensor:
        return r2.sqrt_().neg().exp_()


@dataclass(frozen=True)
class Matern32(Stationary):
    """Matérn 3/2: variance · (1 + s) exp(−s), s = √3 r; differentiable once."""

    farthest: ClassVar[float] = 675.0

    def of_distance(self, r2: Tensor) -> Tensor:
        s = r2.mul_(3.0).sqrt_()
        return (1.0 + s).mul_(s.neg().exp_())


@dataclass(frozen=True)
class Matern52(Stationary):
    """Matérn 5/2: variance · (1 + s + s²/3) exp(−s), s = √5 r; differentiable twice."""

    farthest: ClassVar[float] = 405.0

    def of_distance(self, r2: Tensor) -> Tensor:
        s = r2.mul_(5.0).sqrt_()
        return torch.addcmul(1.0 + s, s, s, value=1 / 3).mul_(s.neg().exp_())


@dataclass(frozen=True)
class RationalQuadratic(Stationary):
    """A mixture of RBF lengthscales: variance · (1 + r²/(2α))^−α; α → ∞ is the RBF."""

    alpha: Positive = 1.0

    def of_distance(self, r2: Tensor) -> Tensor:
        alpha = self.parameter("alpha", r2)
        return torch.log1p(r2 / (2.0 * alpha)).mul(-alpha).exp_()


def expanded(X: Tensor, Z: Tensor, lengthscale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """U (n, D), W (m, D), x2 (n,), z2 (m,) with Σ_d (x_d − z_d)² / ℓ_d² = x2 + z2 − 2 U Wᵀ.

    Only one of U and W is divided by ℓ², the one that has a gradient if there is such: then the
    backward pass has one more large product and not two. The shift keeps the digits of data far
    from the origin; distances do not depend on it, so neither does their gradient.
    """
    shift = Z.detach().mean(0)
    weight = lengthscale.pow(-2).expand(X.shape[-1])
    U, W = X - shift, Z - shift
    x2, z2 = U.square() @ weight, W.square() @ weight
    if X.requires_grad and not Z.requires_grad:
        return U * weight, W, x2, z2
    return U, W * weight, x2, z2


def distances(
    U: Tensor, W: Tensor, x2: Tensor, z2: Tensor, farthest: float, *, same: bool
) -> Tensor:
    """x2 + z2 − 2 U Wᵀ, from the smallest normal number to the farthest: (n, m).

    The floor keeps the gradient of a root finite: where points coincide it is zero.
    """
    r2 = torch.addmm(z2, U, W.T, alpha=-2.0).add_(x2.unsqueeze(1))
    if same:
        r2.fill_diagonal_(0.0)
    return r2.clamp_(torch.finfo(r2.dtype).tiny, farthest)


def has_digits(x2: Tensor, z2: Tensor) -> bool:
    """Whether distances between points of squared norms x2 (n,) and z2 (m,) keep their digits.

    They do if one of the two is small: a point far beyond all of the others is as far from them.
    """
    if not len(x2) or not len(z2):
        return True
    most, x, z = MOST_SQUARE[x2.dtype], x2.max().item(), z2.max().item()
    return (x <= most and z <= _HUGE) or (z <= most and x <= _HUGE)


def careful_distances(X: Tensor, Z: Tensor, lengthscale: Tensor, farthest: float) -> Tensor:
    """`distances` in float64, for features of long tails.

    Those for which that is not enough are subtracted one by one: values close to each other have
    an exact difference.
    """
    x, z, lengths = X.double(), Z.double(), lengthscale.double().expand(X.shape[-1])
    shift, weight = z.detach().mean(0), lengths.pow(-2)
    U, W = (x - shift) / lengths, (z - shift) / lengths
    most = torch.maximum(U.detach().abs().amax(0), W.detach().abs().amax(0)).square()
    far = ~(most <= MOST_SQUARE[torch.float64] / len(most))
    U, W, one_by_one = U[:, ~far], W[:, ~far], far.nonzero().squeeze(1).tolist()
    u2, w2 = U.square().sum(1, keepdim=True), W.square().sum(1)
    limits, parts = torch.finfo(X.dtype), []
    size = max(1, _CAREFUL // len(z))
    for a, a2, b in zip(U.split(size), u2.split(size), x.split(size), strict=True):
        r2 = torch.addmm(w2, a, W.T, alpha=-2.0).add_(a2)
        for d in one_by_one:
            gap = b[:, d : d + 1] - z[:, d]
            r2 = r2.addcmul_(gap * weight[d], gap)
        parts.append(r2.clamp_(limits.tiny, min(farthest, limits.max)).to(X.dtype))
    r2 = torch.cat(parts)
    return r2.fill_diagonal_(limits.tiny) if X is Z else r2


class FusedRBF(torch.autograd.Function):
    """variance · exp(−r²/2) with its gradient by hand, which makes fewer passes over (n, m)."""

    @staticmethod
    def forward(ctx: Any, U, W, x2, z2, variance, farthest, same):
        # −r²/2 at once, which is one pass less than r².
        K = torch.addmm(-0.5 * z2, U, W.T).add_((-0.5 * x2).unsqueeze(1))
        if same:
            K.fill_diagonal_(0.0)
        K.clamp_(-0.5 * farthest, 0.0).exp_().mul_(variance)
        ctx.save_for_backward(U, W, variance, K)
        return K

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad):  # type: ignore[override]
        U, W, variance, K = ctx.saved_tensors
        G = grad * K
        rows = G.sum(1)
        return (
            G @ W if ctx.needs_input_grad[0] else None,
            G.T @ U if ctx.needs_input_grad[1] else None,
            -0.5 * rows,
            -0.5 * G.sum(0),
            rows.sum() / variance,
            None,
            None,
        )
