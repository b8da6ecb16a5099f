"""p(y = k | f) = e^f_k / Σ_c e^f_c, and what likelihoods of a softmax share (docs/math.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from conjugp._numerics.expectations import expected_log_sigmoid, logistic_moments
from conjugp.likelihoods._base import Expectation, Likelihood, of_label
from conjugp.likelihoods._lambda_integral import lambda_entropy
from conjugp.likelihoods._log_sum import expected_log_sum
from conjugp.likelihoods._many_classes import predictive

_NEWTON = 8
_ABOVE, _BELOW = 8.0, 20.0  # e^f is σ(f) to 2e-9 up to so many deviations above the means


class SoftmaxLikelihood(Likelihood):
    """p(y = k | f) is e^f_k, or σ(f_k), over the sum of all; predictions are its integrals."""

    softmax: ClassVar[bool] = True  # of f, or else of log σ(f)

    def logits(self, f: Tensor) -> Tensor:
        """What the softmax is of, (..., B, C)."""
        return f if self.softmax else logsigmoid(f)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f): y (B,), f (..., B, C) -> (..., B)."""
        return of_label(torch.log_softmax(self.logits(f), -1), y)

    def prob(self, f: Tensor) -> Tensor:
        """p(· | f): (..., B, C) -> (..., B, C)."""
        return torch.softmax(self.logits(f), -1)

    def integral(self, m: Tensor, v: Tensor) -> Tensor:
        """E[p(· | f)] under N(m, v), one-dimensional: (B, C), float64 (P1, P8, L4)."""
        return predictive(m, v, self.softmax)

    def rough_integral(self, m: Tensor, v: Tensor) -> Tensor:
        """The same to four digits."""
        return predictive(m, v, self.softmax, rough=True)

    def expected_entropy(self, m: Tensor, v: Tensor) -> Tensor:
        """E[H[p(· | f)]] under N(m, v), one-dimensional: (B,), float64 (U3)."""
        return lambda_entropy(m, v, self.softmax)


@dataclass(frozen=True)
class Softmax(SoftmaxLikelihood):
    """The softmax likelihood, also called multinomial logit.

    ``"exact"`` is E[log p] itself (L4); its bounds are, tightest first, ``"tight"`` (L6) and
    ``"jensen"`` (L5).
    """

    name: ClassVar[str] = "softmax"
    bounds: ClassVar[tuple[str, ...]] = ("exact", "tight", "jensen")

    def start_means(self, shares: Tensor) -> Tensor:
        """The softmax of the means are the shares."""
        return torch.log(shares) + math.log(len(shares))

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """E[log p] or one of the two bounds."""
        return {"exact": _exact, "tight": _tight, "jensen": _jensen}[bound](y, m, v)


def _exact(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """m_y − E[log Σ e^f_c]: all latents far below zero, where e^f is σ(f) (L4, B11)."""
    label, wide = one_hot(y, m.shape[-1]).double(), m.double()
    top = (wide + _ABOVE * v.double().sqrt()).amax(-1, keepdim=True)
    low = (wide - top) - _BELOW
    total = expected_log_sum(low.to(m.dtype), v)
    value = of_label(low, y) - total.value
    return Expectation(value, label - total.dm, -total.dv)


def _jensen(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """m_y − log Σ exp(m + v/2) (L5)."""
    m, v, label = m.double(), v.double(), one_hot(y, m.shape[-1])
    log_p = torch.log_softmax(m + 0.5 * v, -1)
    p = torch.exp(log_p)
    value = (label * (log_p - 0.5 * v)).sum(-1)
    return Expectation(value, label - p, -0.5 * p)


def _tight(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """E[log σ_y] + Σ_{c≠y} E[log(1 − σ_c)] − log P(exactly one), σ = σ(f − shift) (L6, L7)."""
    shift, shift_m, shift_v = _shift(m.double(), v.double())
    m = (m - shift).to(v.dtype)  # float32 has faster moments, and they are good enough for it
    label = one_hot(y, m.shape[-1])
    e = logistic_moments(m, v)
    up = expected_log_sigmoid(m, v)
    log_odds = e.log_mean - e.log_complement
    log_one = e.log_complement.sum(-1) + torch.logsumexp(log_odds, -1)
    value = torch.where(label == 1, up, up - m).sum(-1) - log_one
    mean, rest = torch.exp(e.log_mean), e.complement
    # Of two small numbers: k = (r − 1)/(mean + rest·r), r the odds of all other classes.
    w = torch.sigmoid(-_log_others(log_odds))
    k = (1.0 - 2.0 * w) / (mean * w + rest * (1.0 - w))
    scale = torch.exp(e.log_scale)
    dm = torch.where(label == 1, rest, -mean) + k * e.slope * scale
    dv = 0.5 * (k * e.curvature - e.slope) * scale
    # The shift moves with m and v, and the softmax does not change with it.
    excess = dm.sum(-1, keepdim=True)
    return Expectation(value, dm - excess * shift_m, dv - excess * shift_v)


def _shift(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a with Σ_c σ((m_c − a)/t_c) = 1, t = √(1 + πv/8), and its derivatives in m and v (L7)."""
    t = torch.sqrt(1.0 + math.pi / 8.0 * v)
    low = m.topk(2, -1).values[:, 1:]  # with two classes above it the sum is at least 1
    high = (m + t * math.log(m.shape[-1] - 1)).amax(-1, keepdim=True)  # and here at most 1
    top = m.argmax(-1, keepdim=True)
    t_top = t.gather(-1, top)
    a = 0.5 * (low + high)
    for _ in range(_NEWTON):
        # Σσ − 1 can be a tiny difference, so the largest is weighed against the others in logs.
        x = (m - a) / t
        x_top = x.gather(-1, top)
        log_s = logsigmoid(x).scatter(-1, top, -math.inf)
        others = torch.logsumexp(log_s, -1, keepdim=True)
        gap = others - logsigmoid(-x_top)
        slope = (torch.exp(log_s - others) * torch.sigmoid(-x) / t).sum(-1, keepdim=True)
        low, high = torch.where(gap > 0, a, low), torch.where(gap > 0, high, a)
        newton = a + gap / (slope + torch.sigmoid(x_top) / t_top)
        a = torch.where((newton >= low) & (newton <= high), newton, 0.5 * (low + high))
    x = (m - a) / t
    weight = torch.softmax(logsigmoid(x) + logsigmoid(-x) - torch.log(t), -1)
    return a, weight, -weight * x * math.pi / (16.0 * t)


def _log_others(x: Tensor) -> Tensor:
    """log Σ_{k≠c} e^x_k for every c, without cancellation: (B, C) -> (B, C)."""
    total = torch.logsumexp(x, -1, keepdim=True)
    top = x.argmax(-1, keepdim=True)
    others = torch.logsumexp(x.scatter(-1, top, -math.inf), -1, keepdim=True)
    share = torch.exp(x - total).scatter(-1, top, 0.0)  # at most ½
    return (total + torch.log1p(-share)).scatter(-1, top, others)
