"""p(y = k | f) = σ(f_k) / Σ_c σ(f_c), in three lower bounds (docs/math.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from conjugp.likelihoods._class_parts import Classes, Part, Terms, part, tangent
from conjugp.likelihoods._lambda_integral import lambda_entropy
from conjugp.likelihoods._many_classes import predictive
from conjugp.likelihoods.base import Expectation, Likelihood
from conjugp.numerics import (
    Tilt,
    expected_log_sigmoid,
    gamma_total,
    log_gamma_minus_entropy,
    logistic_moments,
    logistic_tails,
    tilt,
)

__all__ = ["Classes", "LogisticSoftmax", "Part"]

# γ is at most about 4|m|/v: finite wherever v is not zero. At v = 0 and m below −80 the site is
# a limit no float holds, though its bound and gradient are fine; this keeps it a number there.
_MAX_LOG_GAMMA = 80.0


@dataclass(frozen=True)
class LogisticSoftmax(Likelihood):
    """The logistic-softmax likelihood (M2).

    Its bounds, tightest first: ``"tight"`` (B8), ``"collapsed"`` (B3), ``"augmented"`` (B7).
    """

    name: ClassVar[str] = "logistic-softmax"
    bounds: ClassVar[tuple[str, ...]] = ("tight", "collapsed", "augmented")
    conjugate: ClassVar[tuple[str, ...]] = ("collapsed", "augmented")
    class_parts: ClassVar[bool] = True

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """One of the three bounds (B3, B7, B8)."""
        return {"tight": _tight, "collapsed": _collapsed, "augmented": _augmented}[bound](y, m, v)

    def start_mean(self, n_classes: int) -> float:
        """Where all classes are alike, the sum of σ(f) is then about one."""
        return -math.log(max(n_classes - 1, 1))

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f): y (B,), f (..., B, C) -> (..., B) (M2)."""
        log_p = torch.log_softmax(logsigmoid(f), -1)
        return log_p.gather(-1, y[:, None].expand(*f.shape[:-1], 1)).squeeze(-1)

    def slope(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """log p(y | f) and its derivative, σ(-f_c) (1[c = y] - p_c)."""
        log_p, index = torch.log_softmax(logsigmoid(f), -1), y.unsqueeze(-1)
        value = log_p.gather(-1, index).squeeze(-1)
        d = log_p.exp_().neg_()
        d.scatter_add_(-1, index, torch.ones_like(value).unsqueeze(-1))
        return value, d.mul_(torch.sigmoid(-f))

    def prob(self, f: Tensor) -> Tensor:
        """p(· | f): (..., B, C) -> (..., B, C) (M2)."""
        return torch.softmax(logsigmoid(f), -1)

    def start_total(self, bound: str, mean: Tensor, variance: float = 0.0) -> float:
        """T at the prior N(mean, variance): what a row keeps at first (C3)."""
        m = mean.double()[None]
        return float(self.total(m, torch.full_like(m, variance), bound))

    def total(self, m: Tensor, v: Tensor, bound: str) -> Tensor:
        """The sum over classes that a bound's normaliser is a function of: (B, K) -> (B,) (C2)."""
        log_t = logistic_moments(m, v).log_mean if bound == "tight" else tilt(m, v).log_rest
        return torch.exp(log_t).sum(-1)

    def shortfall(self, kept: Tensor, total: Tensor, bound: str, n_classes: int) -> Tensor:
        """By how much the tangent at what a row keeps lies below the bound, (B,) (C3)."""
        best, _ = tangent(total, bound, n_classes)
        value, slope = tangent(kept, bound, n_classes)
        return best - value - slope * (kept - total).double()

    def terms(self, y: Tensor, m: Tensor, v: Tensor | None, bound: str) -> Terms:
        """What the bound is made of, for some of the classes; no v is v = 0 (C2)."""
        if v is None:
            s, own = torch.sigmoid(m), _of_label(m, y)
            return Terms(
                logsigmoid(own), torch.sigmoid(-own), own.new_zeros(()), s, s * (1 - s), None
            )
        if bound == "tight":
            e = logistic_moments(m, v)
            scale = torch.exp(e.log_scale)
            label = expected_log_sigmoid(_of_label(m, y), _of_label(v, y))
            d_label = _of_label(e.complement, y), -0.5 * _of_label(e.slope * scale, y)
            return Terms(
                label, *d_label, torch.exp(e.log_mean), e.slope * scale, 0.5 * e.curvature * scale
            )
        s, own = tilt(m, v), _of_label(m, y).double()
        tau = _of_label(s.tau, y)
        return Terms(
            _of_label(s.log_up, y),
            0.5 * (1.0 - own * tau),
            -0.25 * tau,
            torch.exp(s.log_rest),
            0.5 * torch.exp(s.log_s + s.log_slope),
            0.25 * torch.exp(s.log_s) * s.tau,
        )

    def part(self, y: Tensor, m: Tensor, v: Tensor | None, bound: str, batch: Classes) -> Part:
        """The bound from some of the classes; y are positions among them, no v is v = 0 (C2)."""
        # Without variances all bounds are log p.
        return part(y, self.terms(y, m, v, bound), "tight" if v is None else bound, batch)

    def integral(self, m: Tensor, v: Tensor) -> Tensor:
        """E[p(· | f)] under N(m, v) by one-dimensional integrals: (B, C), float64 (P1, P8)."""
        return predictive(m, v)

    def rough_integral(self, m: Tensor, v: Tensor) -> Tensor:
        """The same to four digits."""
        return predictive(m, v, rough=True)

    def expected_entropy(self, m: Tensor, v: Tensor) -> Tensor:
        """E[H[p(· | f)]] under N(m, v) by one-dimensional integrals: (B,), float64 (U3)."""
        return lambda_entropy(m, v)


def _of_label(x: Tensor, y: Tensor) -> Tensor:
    return x.gather(-1, y[:, None]).squeeze(-1)


def _tight(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """The tight bound (B8, B9)."""
    e, sign = logistic_tails(m, v), -torch.sgn(m).double()
    # Relative to the largest tail, or to 1 where a class is above zero: T may be too small to hold.
    log_unit = torch.mul(e.log_scale, sign + 1.0).amax(-1, keepdim=True).mul_(0.5)
    unit = torch.exp(e.log_scale - log_unit)
    # E[σ] is ½ + sign·(tail − ½): above zero the tail is that of 1 − σ.
    total = (e.mean * unit).sub_(0.5).mul_(sign).sum(-1, keepdim=True).add_(0.5 * m.shape[-1])
    share = unit.div_(total)
    index = y.unsqueeze(-1)
    log_scale, tail, slope, side = (x.gather(-1, index) for x in (*e[:3], sign))
    scale = torch.exp(log_scale)
    complement = torch.where(side < 0, scale * tail, 1.0 - scale * tail)
    dm = (e.slope * share).neg_().scatter_add_(-1, index, complement)
    precision = (e.curvature * share).mul_(sign).scatter_add_(-1, index, slope * scale)
    log_t = log_unit.add_(torch.log(total)).squeeze(-1)
    bound = expected_log_sigmoid(_of_label(m, y), _of_label(v, y)) - log_t
    return Expectation(bound, dm, precision.mul_(-0.5))


def _collapsed(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """The collapsed bound (B3, B4)."""
    s = tilt(m, v)
    log_rest = torch.logsumexp(s.log_rest, -1, keepdim=True)
    bound = _of_label(s.log_up, y) - log_rest.squeeze(-1)
    return _polya_gamma(y, m, s, s.log_s - log_rest, bound)


def _augmented(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """The paper's bound (B5–B7)."""
    s = tilt(m, v)
    log_c = math.log(m.shape[-1])
    log_sum = torch.logsumexp(s.log_s, -1)
    log_rest = torch.logsumexp(s.log_rest, -1) - log_c
    # log r through 1 − r, the smaller of the two where r is near 1.
    log_r = torch.where(
        log_rest < -1.0, torch.log1p(-torch.exp(log_rest.clamp_max(-1.0))), log_sum - log_c
    )
    G = gamma_total(log_r, log_rest)
    bound = _of_label(s.log_up, y) - log_c + log_gamma_minus_entropy(G) + G * log_r
    # γ_c = G s_c / S: the same numbers as e^ψ(1+G) s_c / C at the root.
    log_gamma = torch.log(G)[:, None] + s.log_s - log_sum[:, None]
    return _polya_gamma(y, m, s, log_gamma, bound)


def _polya_gamma(y: Tensor, m: Tensor, s: Tilt, log_gamma: Tensor, bound: Tensor) -> Expectation:
    """The bound whose site has potential (y − γ)/2, precision (y + γ) tanh(c/2)/(2c) (B4)."""
    label = one_hot(y, m.shape[-1]).double()
    gamma = torch.exp(log_gamma.clamp_max(_MAX_LOG_GAMMA))
    precision = 0.5 * (label + gamma) * s.tau
    # ∂bound/∂m = potential − precision·m, in logs because γ may be huge where 1 + m·tau is tiny.
    dm = 0.5 * (label * (1.0 - m.double() * s.tau) - torch.exp(log_gamma + s.log_slope))
    return Expectation(bound, dm, -0.5 * precision)
