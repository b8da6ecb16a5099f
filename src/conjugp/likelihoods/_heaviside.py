"""The largest latent with noise wins: the multinomial probit (docs/math.md, Other likelihoods)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conjugp.likelihoods._base import Expectation, Likelihood, known_gradient
from conjugp.likelihoods._monte_carlo import expected_entropy
from conjugp.likelihoods._orthant import largest, log_largest, log_orthant

_ENTROPY_DRAWS = 256  # each costs a whole predictive integral


@dataclass(frozen=True)
class Heaviside(Likelihood):
    """∏_{c≠y} Θ(g_y − g_c) with g = f + noise, the noise integrated out.

    Its bounds, tightest first: ``"tight"`` (L12) and ``"augmented"`` (L13).

    Parameters
    ----------
    noise : float, default=1.0
        Variance of the noise of every latent; it sets the scale of the latents.
    """

    noise: float = 1.0

    name: ClassVar[str] = "heaviside"
    bounds: ClassVar[tuple[str, ...]] = ("tight", "augmented")
    conjugate: ClassVar[tuple[str, ...]] = ("augmented",)

    def __post_init__(self) -> None:
        if not (self.noise > 0.0 and math.isfinite(self.noise)):
            raise ValueError(f"noise must be positive and finite, got {self.noise!r}")

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f): y (B,), f (..., B, C) -> (..., B) (L8)."""
        rows = f.detach().reshape(-1, f.shape[-1])
        e = log_largest(y.expand(f.shape[:-1]).reshape(-1), rows, self._variance(rows))
        value, dm = e.value.view(f.shape[:-1]).to(f.dtype), e.dm.view(f.shape).to(f.dtype)
        return known_gradient(f, f.detach(), value, dm, torch.zeros_like(dm))

    def prob(self, f: Tensor) -> Tensor:
        """p(· | f): (..., B, C) -> (..., B, C) (L8)."""
        rows = f.reshape(-1, f.shape[-1])
        return largest(rows, self._variance(rows)).view(f.shape).to(f.dtype)

    def integral(self, m: Tensor, v: Tensor) -> Tensor:
        """E[p(· | f)] under N(m, v), whose noise adds to v: (B, C), float64 (L8)."""
        return largest(m, v.double() + self.noise)

    def expected_entropy(self, m: Tensor, v: Tensor) -> Tensor:
        """E[H[p(· | f)]] under N(m, v) from fewer draws than other likelihoods have: (B,) (U2)."""
        return expected_entropy(self.prob, m, v, _ENTROPY_DRAWS)

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """One of the two bounds."""
        m, v = m.double(), v.double()
        if bound == "augmented":
            e = log_largest(y, m, self._variance(m))
            value = e.value - 0.5 * v.sum(-1) / self.noise
            return Expectation(value, e.dm, torch.full_like(v, -0.5 / self.noise))
        column, sd = y[:, None], math.sqrt(self.noise)
        a = (m.gather(1, column) - m) / sd
        s2 = (v.gather(1, column) + v) / self.noise
        e = log_orthant(y, a, torch.ones_like(a), s2)
        dm, dv = -e.a / sd, e.s2 / self.noise
        for d, sign in ((dm, -1.0), (dv, 1.0)):
            d.scatter_(1, column, 0.0)
            d.scatter_(1, column, sign * d.sum(1, keepdim=True))
        return Expectation(e.value, dm, dv)

    def _variance(self, f: Tensor) -> Tensor:
        return torch.full_like(f, self.noise, dtype=torch.float64)
