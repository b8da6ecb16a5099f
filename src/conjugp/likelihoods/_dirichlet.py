"""Classification as regression on log-normal targets (docs/math.md, Other likelihoods)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from conjugp.likelihoods._base import Expectation
from conjugp.likelihoods._softmax import SoftmaxLikelihood


@dataclass(frozen=True)
class Dirichlet(SoftmaxLikelihood):
    """A Gaussian for every latent, matched to the Dirichlet of one label (Milios et al. 2018).

    ``log_prob`` is the density of these targets, which a fit maximises; ``prob`` is the softmax,
    which predicts.

    Parameters
    ----------
    alpha : float, default=0.01
        Pseudo-count of every class before the label is seen.
    """

    alpha: float = 0.01

    name: ClassVar[str] = "dirichlet"
    bounds: ClassVar[tuple[str, ...]] = ("exact",)
    conjugate: ClassVar[tuple[str, ...]] = ("exact",)

    def __post_init__(self) -> None:
        if not (self.alpha > 0.0 and math.isfinite(self.alpha)):
            raise ValueError(f"alpha must be positive and finite, got {self.alpha!r}")

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Σ_c log N(target_c | f_c, s2_c): y (B,), f (..., B, C) -> (..., B) (L14)."""
        target, s2 = (x.to(f.dtype) for x in self._targets(y, f.shape[-1]))
        return -0.5 * ((target - f).square() / s2 + torch.log(2.0 * math.pi * s2)).sum(-1)

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """The expectation itself; its site does not depend on m and v (L15)."""
        m, v = m.double(), v.double()
        target, s2 = self._targets(y, m.shape[-1])
        value = self.log_prob(y, m) - 0.5 * (v / s2).sum(-1)
        return Expectation(value, (target - m) / s2, -0.5 / s2)

    def start_mean(self, n_classes: int) -> float:
        """The mean of the targets."""
        label = torch.zeros(1, dtype=torch.long)
        return float(self._targets(label, n_classes)[0].mean())

    def _targets(self, y: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
        """Mean and variance of the logarithm of a Gamma variable's log-normal twin, (B, C)."""
        alpha = one_hot(y, n_classes).double() + self.alpha
        s2 = torch.log1p(1.0 / alpha)
        return torch.log(alpha) - 0.5 * s2, s2
