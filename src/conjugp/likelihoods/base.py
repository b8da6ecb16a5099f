"""What a likelihood must answer: sites for training, probabilities for prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

__all__ = ["Likelihood", "Site", "differentiable_bound"]


class Site(NamedTuple):
    """exp(potential·f − ½ precision·f²) per point and class, and the bound it belongs to (S1).

    precision = −2 ∂bound/∂v and potential = ∂bound/∂m + precision·m, neither clamped.
    ``bound`` carries the gradient with respect to m and v; the other two carry none.
    """

    potential: Tensor  # (B, C)
    precision: Tensor  # (B, C)
    bound: Tensor  # (B,)


class Likelihood(ABC):
    """p(y | f) for C latent functions. Instances are immutable."""

    name: ClassVar[str]
    bounds: ClassVar[tuple[str, ...]]  # tightest first

    @abstractmethod
    def site(self, y: Tensor, m: Tensor, v: Tensor, bound: str | None = None) -> Site:
        """Sites of labels y (B,) at q(f) = N(m, v), m and v (B, C); None: the tightest bound."""

    @abstractmethod
    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f): y (B,), f (..., B, C) -> (..., B)."""

    @abstractmethod
    def prob(self, f: Tensor) -> Tensor:
        """p(· | f): (..., B, C) -> (..., B, C)."""

    @abstractmethod
    def integral(self, m: Tensor, v: Tensor) -> Tensor:
        """E[p(· | f)] under f ~ N(m, v) without sampling: (B, C) -> (B, C), float64."""

    def check_bound(self, bound: str | None) -> str:
        """The name of a bound this likelihood has; ValueError otherwise."""
        if bound is None:
            return self.bounds[0]
        if bound not in self.bounds:
            known = ", ".join(repr(b) for b in self.bounds)
            raise ValueError(f"bound must be one of {known} for {self.name!r}, got {bound!r}")
        return bound


class _Bound(torch.autograd.Function):
    """A number whose gradient is known: saves differentiating through quadrature."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, v: Tensor, bound: Tensor, dm: Tensor, dv: Tensor) -> Tensor:
        ctx.save_for_backward(dm, dv)
        return bound.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dm, dv = ctx.saved_tensors
        g = grads[0][..., None]
        return g * dm, g * dv, None, None, None


def differentiable_bound(m: Tensor, v: Tensor, bound: Tensor, dm: Tensor, dv: Tensor) -> Tensor:
    """``bound`` (B,) with gradients ``dm`` and ``dv`` (B, C) with respect to m and v."""
    if torch.is_grad_enabled() and (m.requires_grad or v.requires_grad):
        return _Bound.apply(m, v, bound, dm, dv)  # type: ignore[return-value]
    return bound
