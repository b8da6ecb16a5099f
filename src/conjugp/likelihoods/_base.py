"""What a likelihood must answer: sites for training, probabilities for prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from conjugp.likelihoods import _monte_carlo as monte_carlo
from conjugp.likelihoods._monte_carlo import Expectation

MC = "mc"  # not a bound: E[log p] itself, by sampling


class Site(NamedTuple):
    """exp(potential·f − ½ precision·f²) per point and class, and the bound it belongs to (S1).

    precision = −2 ∂bound/∂v and potential = ∂bound/∂m + precision·m, neither clamped.
    ``bound`` carries the gradient with respect to m and v; the others carry none. Where log p is
    not concave the precision may be negative, and steps need a ``curvature`` that is not. Where
    classes that pull against each other curve more than each alone, steps that nobody looks back at
    need the ``joint`` curvature (S2).
    """

    potential: Tensor  # (B, C)
    precision: Tensor  # (B, C)
    bound: Tensor  # (B,)
    curvature: Tensor | None = None  # (B, C), to step with in place of the precision
    joint: Tensor | None = None  # (B, C), the least to step with on a batch


class Likelihood(ABC):
    """p(y | f) for C latent functions. Instances are immutable.

    ``log_prob`` is enough: sites, probabilities and their integrals then come by sampling. A
    likelihood that knows better writes ``expectation`` for its ``bounds``, ``prob`` and
    ``integral``.
    """

    name: ClassVar[str]
    bounds: ClassVar[tuple[str, ...]] = ()  # tightest first; "mc" is always there
    conjugate: ClassVar[tuple[str, ...]] = ()  # bounds of which a whole step lowers no ELBO
    smooth: ClassVar[bool] = True  # whether log_prob has a gradient that leads anywhere
    class_parts: ClassVar[bool] = False  # whether its bounds can be had from some of the classes

    @abstractmethod
    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f): y (B,), f (..., B, C) -> (..., B)."""

    def slope(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """log p(y | f) and its derivative in f: y (B,), f (B, C) -> (B,), (B, C)."""
        f = f.detach().requires_grad_()
        with torch.enable_grad():
            value = self.log_prob(y, f)
            total = value.sum()
        return value.detach(), torch.autograd.grad(total, f)[0]

    def prob(self, f: Tensor) -> Tensor:
        """p(· | f): (..., B, C) -> (..., B, C)."""
        labels = torch.arange(f.shape[-1], device=f.device)
        return torch.softmax(
            torch.stack([self.log_prob(k.expand(f.shape[-2]), f) for k in labels], -1), -1
        )

    def integral(self, m: Tensor, v: Tensor) -> Tensor:
        """E[p(· | f)] under f ~ N(m, v): (B, C) -> (B, C), float64, the same for the same row."""
        return monte_carlo.integral(self.prob, m, v)

    def rough_integral(self, m: Tensor, v: Tensor) -> Tensor:
        """The same to four digits, where that is faster: enough to choose a temperature."""
        return self.integral(m, v)

    def expected_entropy(self, m: Tensor, v: Tensor) -> Tensor:
        """E[H[p(· | f)]] under f ~ N(m, v), in nats: (B, C) -> (B,), float64."""
        return monte_carlo.expected_entropy(self.prob, m, v)

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """One of the ``bounds`` on E[log p(y | f)] with its derivatives, float64; m, v (B, C)."""
        raise NotImplementedError(f"{type(self).__name__} names the bound {bound!r}: write it")

    def start_mean(self, n_classes: int) -> float:
        """Where a prior mean that is to be learned starts."""
        return 0.0

    def start_means(self, shares: Tensor) -> Tensor:
        """The same for classes that have these shares of the rows (C,), if that is known."""
        return torch.full_like(shares, self.start_mean(len(shares)))

    def learned(self, y: Tensor, m: Tensor, v: Tensor, weight: Tensor) -> Likelihood:
        """The likelihood with parameters of its own fitted to weighted rows at N(m, v)."""
        return self

    def site(
        self, y: Tensor, m: Tensor, v: Tensor, bound: str | None = None, rough: bool = False
    ) -> Site:
        """Sites of labels y (B,) at q(f) = N(m, v), m and v (B, C); None: the tightest bound.

        Rough ones are to five digits whatever the precision: enough for hyperparameters to move by.
        """
        bound = self.check_bound(bound)
        with torch.no_grad():
            dtype = torch.float32 if rough else m.dtype
            mean, variance = m.detach().to(dtype), v.detach().to(dtype)
            if bound == MC:
                e = monte_carlo.expectation(self.log_prob, self.smooth, y, mean, variance)
            else:
                e = self.expectation(y, mean, variance, bound)
            precision = -2.0 * e.dv
            potential = e.dm + precision * m.detach().double()
            value, dm, dv, potential, precision = (
                x.to(m.dtype) for x in (e.value, e.dm, e.dv, potential, precision)
            )
            curvature, joint = (
                None if x is None else x.to(m.dtype) for x in (e.curvature, e.joint)
            )
        return Site(potential, precision, known_gradient(m, v, value, dm, dv), curvature, joint)

    def check_bound(self, bound: str | None) -> str:
        """The name of a bound this likelihood has; ValueError otherwise."""
        known = (*self.bounds, MC)
        if bound is None:
            return known[0]
        if bound not in known:
            names = ", ".join(repr(b) for b in known)
            raise ValueError(f"bound must be one of {names} for {self.name!r}, got {bound!r}")
        return bound


def of_label(x: Tensor, y: Tensor) -> Tensor:
    """Of every row what is its label's: x (..., B, C), y (B,) -> (..., B)."""
    return x.gather(-1, y[:, None].expand(*x.shape[:-1], 1)).squeeze(-1)


def known_gradient(m: Tensor, v: Tensor, value: Tensor, dm: Tensor, dv: Tensor) -> Tensor:
    """``value`` (..., B) with gradients ``dm`` and ``dv`` (..., B, C) in m and v."""
    if torch.is_grad_enabled() and (m.requires_grad or v.requires_grad):
        # Nothing is added but the graph: it saves differentiating through quadrature.
        return value + ((m - m.detach()) * dm + (v - v.detach()) * dv).sum(-1)
    return value
