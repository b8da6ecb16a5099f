"""Kernels of the scaled distance: RBF, the Matérn family, rational quadratic."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conjugp.kernels._base import Kernel
from conjugp.kernels._distances import FusedRBF, careful_distances, distances, expanded, has_digits
from conjugp.kernels._parameters import Lengths, Positive


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
