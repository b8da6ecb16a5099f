"""Covariance functions: immutable, on whole matrices, differentiable in parameters and inputs.

A parameter left at ``None`` is taken from the data when a classifier is fitted. A kernel of your
own is one small frozen dataclass: its fields are positive parameters, and everything but the
formula is inherited::

    @dataclass(frozen=True)
    class Polynomial(Kernel):
        lengthscale: Lengths = None
        variance: Positive = None
        degree: int = field(default=2, metadata={"fixed": True})  # not a parameter to learn

        def __call__(self, X, Z):
            products = (X / self.parameter("lengthscale", X).square()) @ Z.T
            return self.parameter("variance", X) * (1 + products).pow(self.degree)

        def diag(self, X):
            squares = (X / self.parameter("lengthscale", X)).square().sum(1)
            return self.parameter("variance", X) * (1 + squares).pow(self.degree)

A stationary one is shorter still: subclass :class:`Stationary` and write ``of_distance``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add, mul
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conjugp.parameters import Lengths, Parametric, Positive

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "RBF",
    "Kernel",
    "Lengths",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Normalised",
    "Positive",
    "Product",
    "RationalQuadratic",
    "Stationary",
    "Sum",
]


class Kernel(Parametric, ABC):
    """A covariance function k(x, z).

    Subclasses are frozen dataclasses. Each field is a positive parameter: a number, ``None`` for
    "from the data", or, where its name starts with ``lengthscale``, one number per input feature
    (ARD). A field may hold another kernel, or a tuple of them. Fields declared with
    ``metadata={"fixed": True}`` are left alone.
    """

    @abstractmethod
    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        """The matrix k(X, Z): (n, D), (m, D) -> (n, m), in the dtype and on the device of X."""

    @abstractmethod
    def diag(self, X: Tensor) -> Tensor:
        """The diagonal of k(X, X): (n, D) -> (n,)."""

    @property
    def stationary(self) -> bool:
        """Whether k(x, z) depends on x − z alone, so that ``diag`` is constant."""
        return False

    def __add__(self, other: Kernel) -> Kernel:
        if not isinstance(other, Kernel):
            return NotImplemented
        return Sum((*_parts(self, Sum), *_parts(other, Sum)))

    def __mul__(self, other: Kernel) -> Kernel:
        if not isinstance(other, Kernel):
            return NotImplemented
        return Product((*_parts(self, Product), *_parts(other, Product)))


class Stationary(Kernel):
    """A kernel of the scaled distance: k(x, z) = variance · of_distance(Σ_d (x_d − z_d)² / ℓ_d²).

    Subclasses have the fields ``lengthscale`` and ``variance``.
    """

    # Squared scaled distances count as no more than this. What is left of a correlation there is
    # lost beside 1 in any precision, but subnormal numbers would make products many times slower.
    # A subclass whose correlation falls off more slowly than its parent's has to set its own.
    farthest: ClassVar[float] = math.inf

    @abstractmethod
    def of_distance(self, r2: Tensor) -> Tensor:
        """The correlation at squared scaled distance `r2` > 0, which may be overwritten."""

    @property
    def stationary(self) -> bool:
        return True

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        lengthscale = self.parameter("lengthscale", X)
        expanded = _expanded(X, Z, lengthscale)
        if _has_digits(*expanded[2:]):
            r2 = _distances(*expanded, self.farthest, same=X is Z)
        else:
            r2 = _careful_distances(X, Z, lengthscale, self.farthest)
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

    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2: Tensor) -> Tensor:
        return r2.mul_(-0.5).exp_()

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        # The default kernel has a fused version, tested equal to Stationary's.
        expanded = _expanded(X, Z, self.parameter("lengthscale", X))
        if not _has_digits(*expanded[2:]):
            return super().__call__(X, Z)
        return _FusedRBF.apply(*expanded, self.parameter("variance", X), self.farthest, X is Z)  # type: ignore


@dataclass(frozen=True)
class Matern12(Stationary):
    """Exponential: variance · exp(−r); rough, continuous functions. Parameters as in RBF."""

    farthest: ClassVar[float] = 1600.0

    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2: Tensor) -> Tensor:
        return r2.sqrt_().neg().exp_()


@dataclass(frozen=True)
class Matern32(Stationary):
    """Matérn 3/2: variance · (1 + s) exp(−s), s = √3 r; differentiable once."""

    farthest: ClassVar[float] = 675.0

    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2: Tensor) -> Tensor:
        s = r2.mul_(3.0).sqrt_()
        return (1.0 + s).mul_(s.neg().exp_())


@dataclass(frozen=True)
class Matern52(Stationary):
    """Matérn 5/2: variance · (1 + s + s²/3) exp(−s), s = √5 r; differentiable twice."""

    farthest: ClassVar[float] = 405.0

    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2: Tensor) -> Tensor:
        s = r2.mul_(5.0).sqrt_()
        return torch.addcmul(1.0 + s, s, s, value=1 / 3).mul_(s.neg().exp_())


@dataclass(frozen=True)
class RationalQuadratic(Stationary):
    """A mixture of RBF lengthscales: variance · (1 + r²/(2α))^−α; α → ∞ is the RBF."""

    lengthscale: Lengths = None
    variance: Positive = None
    alpha: Positive = 1.0

    def of_distance(self, r2: Tensor) -> Tensor:
        alpha = self.parameter("alpha", r2)
        return torch.log1p(r2 / (2.0 * alpha)).mul(-alpha).exp_()


@dataclass(frozen=True)
class Linear(Kernel):
    """Linear functions through the origin: variance · Σ_d x_d z_d / ℓ_d²."""

    lengthscale: Lengths = None
    variance: Positive = None

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        weight = self.parameter("variance", X) / self.parameter("lengthscale", X).square()
        return X @ (Z * weight).T

    def diag(self, X: Tensor) -> Tensor:
        weight = self.parameter("variance", X) / self.parameter("lengthscale", X).square()
        return (X.square() * weight).sum(1)


@dataclass(frozen=True)
class Normalised(Kernel):
    """A kernel of directions: k(x/|x|, z/|z|), for embeddings whose length says little.

    Parameters
    ----------
    kernel : Kernel
        What compares the unit vectors; a lengthscale left open is one for all features.
    units : array-like of shape (n_features,) or None
        What one unit of each feature is worth when lengths are measured; None: all alike.
    """

    kernel: Kernel
    units: Any = field(default=None, metadata={"fixed": True})

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            raise TypeError(f"Normalised: kernel must be a kernel, got {self.kernel!r}")
        if self.units is not None:
            units = np.array(self.units, dtype=np.float64)
            if units.ndim != 1 or not np.all((units > 0) & np.isfinite(units)):
                raise ValueError("Normalised: units must be a vector of positive, finite numbers")
            # A factor common to all features has no direction.
            alike = len(units) > 0 and np.allclose(units, units[0], rtol=1e-12, atol=0.0)
            units.flags.writeable = False
            object.__setattr__(self, "units", None if alike else units)

    def directions(self, X: Tensor) -> Tensor:
        """X (n, D) at unit length; a row of zeros stays one."""
        if self.units is not None:
            # A common factor has no direction, and would overflow.
            X = X * torch.tensor(self.units / self.units.max(), dtype=X.dtype, device=X.device)
        tiny = torch.finfo(X.dtype).tiny
        X = X / X.detach().abs().amax(1, keepdim=True).clamp_min(tiny)  # squares stay in range
        return X / X.norm(dim=1, keepdim=True).clamp_min(tiny)

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        U = self.directions(X)
        return self.kernel(U, U if X is Z else self.directions(Z))

    def diag(self, X: Tensor) -> Tensor:
        return self.kernel.diag(self.directions(X))

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """As in every kernel, but lengths on the sphere do not depend on the data's."""
        return replace(self, kernel=self.kernel.filled(torch.tensor(1.0).double(), variance))

    def to_units(self, scale: np.ndarray | Tensor) -> Self:
        """As in every kernel: lengths are measured in the units of before."""
        factor = torch.as_tensor(scale).cpu().double().numpy()
        return replace(self, units=(1.0 if self.units is None else self.units) / factor)


class _Combination(Kernel):
    """Kernels joined by one operation; the field ``parts`` holds them."""

    parts: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        given = self.parts if isinstance(self.parts, tuple) else ()
        if not given or not all(isinstance(part, Kernel) for part in given):
            raise TypeError(f"{type(self).__name__}: parts must be a tuple of kernels")

    @property
    def stationary(self) -> bool:
        return all(part.stationary for part in self.parts)


@dataclass(frozen=True)
class Sum(_Combination):
    """k₁ + k₂ + …, usually written with ``+``: a sum of independent functions."""

    parts: tuple[Kernel, ...]

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        return reduce(add, (part(X, Z) for part in self.parts))

    def diag(self, X: Tensor) -> Tensor:
        return reduce(add, (part.diag(X) for part in self.parts))

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """As in every kernel; the terms get equal parts of the variance."""
        share = variance / len(self.parts)
        return replace(self, parts=tuple(part.filled(lengthscale, share) for part in self.parts))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Product(_Combination):
    """k₁ · k₂ · …, usually written with ``*``: similar where all the parts say so."""

    parts: tuple[Kernel, ...]

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        return reduce(mul, (part(X, Z) for part in self.parts))

    def diag(self, X: Tensor) -> Tensor:
        return reduce(mul, (part.diag(X) for part in self.parts))

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """As in every kernel; the first factor gets the variance, the others 1."""
        shares = [variance] + [1.0] * (len(self.parts) - 1)
        filled = (p.filled(lengthscale, v) for p, v in zip(self.parts, shares, strict=True))
        return replace(self, parts=tuple(filled))

    def __repr__(self) -> str:
        return " * ".join(f"({p!r})" if isinstance(p, Sum) else repr(p) for p in self.parts)


def _expanded(X: Tensor, Z: Tensor, lengthscale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _distances(
    U: Tensor, W: Tensor, x2: Tensor, z2: Tensor, farthest: float, *, same: bool
) -> Tensor:
    """x2 + z2 − 2 U Wᵀ, from the smallest normal number to the farthest: (n, m).

    The floor keeps the gradient of a root finite: where points coincide it is zero.
    """
    r2 = torch.addmm(z2, U, W.T, alpha=-2.0).add_(x2.unsqueeze(1))
    if same:
        r2.fill_diagonal_(0.0)
    return r2.clamp_(torch.finfo(r2.dtype).tiny, farthest)


# Squared scaled norms up to which the distances between points are good to 1e-4, and to 1e-7.
MOST_SQUARE = {torch.float32: 1e3, torch.float64: 1e9}
_HUGE = 1e36  # beyond this products of float32 may overflow
_CAREFUL = 2**17  # distances in float64 at a time


def _has_digits(x2: Tensor, z2: Tensor) -> bool:
    """Whether distances between points of squared norms x2 (n,) and z2 (m,) keep their digits.

    They do if one of the two is small: a point far beyond all of the others is as far from them.
    """
    if not len(x2) or not len(z2):
        return True
    most, x, z = MOST_SQUARE[x2.dtype], x2.max().item(), z2.max().item()
    return (x <= most and z <= _HUGE) or (z <= most and x <= _HUGE)


def _careful_distances(X: Tensor, Z: Tensor, lengthscale: Tensor, farthest: float) -> Tensor:
    """`_distances` in float64, for features of long tails.

    Those for which that is not enough are subtracted one by one: values close to each other have
    an exact difference.
    """
    x, z, lengths = X.double(), Z.double(), lengthscale.double().expand(X.shape[-1])
    shift, weight = z.detach().mean(0), lengths.pow(-2)
    U, W = (x - shift) / lengths, (z - shift) / lengths
    most = torch.maximum(U.detach().abs().amax(0), W.detach().abs().amax(0)).square()
    far = ~(most <= MOST_SQUARE[torch.float64] / len(most))
    U, W, one_by_one = U[:, ~far], W[:, ~far], far.nonzero().squeeze(1).tolist()
    u2, w2, limits, parts = (
        U.square().sum(1, keepdim=True),
        W.square().sum(1),
        torch.finfo(X.dtype),
        [],
    )
    size = max(1, _CAREFUL // len(z))
    for a, a2, b in zip(U.split(size), u2.split(size), x.split(size), strict=True):
        r2 = torch.addmm(w2, a, W.T, alpha=-2.0).add_(a2)
        for d in one_by_one:
            gap = b[:, d : d + 1] - z[:, d]
            r2 = r2.addcmul_(gap * weight[d], gap)
        parts.append(r2.clamp_(limits.tiny, min(farthest, limits.max)).to(X.dtype))
    r2 = torch.cat(parts)
    return r2.fill_diagonal_(limits.tiny) if X is Z else r2


class _FusedRBF(torch.autograd.Function):
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


def _parts(kernel: Kernel, kind: type[_Combination]) -> tuple[Kernel, ...]:
    return kernel.parts if isinstance(kernel, kind) else (kernel,)


KERNELS: tuple[type[Kernel], ...] = (
    RBF,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    Linear,
    Normalised,
    Sum,
    Product,
)
