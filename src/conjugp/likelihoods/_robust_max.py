"""p(y | f) = 1 − ε where f_y is the largest, else ε/(C − 1) (docs/math.md, Other likelihoods)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from conjugp.likelihoods._base import Expectation, Likelihood, of_label
from conjugp.likelihoods._orthant import largest, log_largest


@dataclass(frozen=True)
class RobustMax(Likelihood):
    """The largest latent wins, but for a share ε of labels that are wrong.

    Parameters
    ----------
    epsilon : float, default=1e-3
        Share of wrong labels.
    learn_epsilon : bool, default=False
        Whether ``fit`` replaces it by the share that the training rows have.
    """

    epsilon: float = 1e-3
    learn_epsilon: bool = False

    name: ClassVar[str] = "robust-max"
    bounds: ClassVar[tuple[str, ...]] = ("exact",)
    smooth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.0 < self.epsilon < 0.5:
            raise ValueError(f"epsilon must be between 0 and 0.5, got {self.epsilon!r}")

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f): y (B,), f (..., B, C) -> (..., B)."""
        return of_label(self.prob(f), y).log()

    def prob(self, f: Tensor) -> Tensor:
        """p(· | f): (..., B, C) -> (..., B, C); equal latents share what the largest has."""
        first = (f == f.amax(-1, keepdim=True)).to(f.dtype)
        return self._mixed(first / first.sum(-1, keepdim=True))

    def integral(self, m: Tensor, v: Tensor) -> Tensor:
        """E[p(· | f)] under N(m, v) by one-dimensional integrals: (B, C), float64 (L8)."""
        return self._mixed(largest(m, v))

    def expected_entropy(self, m: Tensor, v: Tensor) -> Tensor:
        """The entropy of one right and C − 1 wrong labels, whatever f is: (B,), float64."""
        wrong = self.epsilon / (m.shape[-1] - 1)
        value = -(1.0 - self.epsilon) * math.log1p(-self.epsilon) - self.epsilon * math.log(wrong)
        return torch.full(m.shape[:1], value, dtype=torch.float64, device=m.device)

    def _mixed(self, p: Tensor) -> Tensor:
        wrong = self.epsilon / (p.shape[-1] - 1)
        return wrong + (1.0 - self.epsilon - wrong) * p

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """P log(1 − ε) + (1 − P) log(ε/(C − 1)), P = P(f_y is the largest) (L9, L10).

        log P is concave in m, and its curvature is what a step can trust.
        """
        win, wrong = math.log1p(-self.epsilon), math.log(self.epsilon / (m.shape[-1] - 1))
        e = log_largest(y, m, v)
        p = torch.exp(e.value)
        factor = ((win - wrong) * p)[:, None]
        curvature = factor * (e.dm.square() - 2.0 * e.dv)
        return Expectation(wrong + (win - wrong) * p, factor * e.dm, factor * e.dv, curvature)

    def learned(self, y: Tensor, m: Tensor, v: Tensor, weight: Tensor) -> RobustMax:
        """ε at the maximum of the ELBO, one row with the old ε added (L11)."""
        if not self.learn_epsilon:
            return self
        wrong = 1.0 - torch.exp(log_largest(y, m, v).value)
        share = (float(weight.double() @ wrong) + self.epsilon) / (float(weight.sum()) + 1.0)
        share = min(share, 0.49)
        near = abs(share - self.epsilon) < 0.05 * self.epsilon
        return self if near else replace(self, epsilon=share)
