"""p(y = k | f) = σ(f_k) / Σ_c σ(f_c): E[log p] itself and three lower bounds (docs/math.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from conjugp._numerics.expectations import (
    LogisticTails,
    Tilt,
    expected_log_sigmoid,
    gamma_total,
    log_gamma_minus_entropy,
    logistic_moments,
    logistic_tails,
    tilt,
)
from conjugp.likelihoods._base import Expectation, of_label
from conjugp.likelihoods._class_parts import Classes, Part, Terms, part, tangent
from conjugp.likelihoods._log_sum import LogSum, expected_log_sum, log_expected_sum, tangent_sums
from conjugp.likelihoods._softmax import SoftmaxLikelihood

# γ is at most about 4|m|/v: finite wherever v is not zero. At v = 0 and m below −80 the site is
# a limit no float holds, though its bound and gradient are fine; this keeps it a number there.
_MAX_LOG_GAMMA = 80.0


@dataclass(frozen=True)
class LogisticSoftmax(SoftmaxLikelihood):
    """The logistic-softmax likelihood (M2).

    ``"exact"`` is E[log p] itself (B11); its bounds are, tightest first, ``"tight"`` (B8),
    ``"collapsed"`` (B3) and ``"augmented"`` (B7).
    """

    name: ClassVar[str] = "logistic-softmax"
    bounds: ClassVar[tuple[str, ...]] = ("exact", "tight", "collapsed", "augmented")
    conjugate: ClassVar[tuple[str, ...]] = ("collapsed", "augmented")
    class_parts: ClassVar[bool] = True
    softmax: ClassVar[bool] = False

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """E[log p] or one of the three bounds (B3, B7, B8, B11)."""
        return _EXPECTATIONS[bound](y, m, v)

    def start_mean(self, n_classes: int) -> float:
        """Where all classes are alike, the sum of σ(f) is then about one."""
        return -math.log(max(n_classes - 1, 1))

    def start_means(self, shares: Tensor) -> Tensor:
        """σ of the means are the shares."""
        return torch.logit(shares)

    def slope(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """log p(y | f) and its derivative, σ(-f_c) (1[c = y] - p_c)."""
        log_p, index = torch.log_softmax(logsigmoid(f), -1), y.unsqueeze(-1)
        value = log_p.gather(-1, index).squeeze(-1)
        d = log_p.exp_().neg_()
        d.scatter_add_(-1, index, torch.ones_like(value).unsqueeze(-1))
        return value, d.mul_(torch.sigmoid(-f))

    def start_total(self, bound: str, mean: Tensor, variance: float = 0.0) -> float:
        """T at the prior N(mean, variance): what a row keeps at first (C3)."""
        m = mean.double()[None]
        return float(self.total(m, torch.full_like(m, variance), bound))

    def total(self, m: Tensor, v: Tensor, bound: str) -> Tensor:
        """The sum over classes that a bound's normaliser is a function of: (B, K) -> (B,) (C2).

        For ``"exact"``, which has none, that of ``"tight"``: near it its tangents touch (C5).
        """
        by_sigma = bound in ("exact", "tight")
        log_t = logistic_moments(m, v).log_mean if by_sigma else tilt(m, v).log_rest
        return torch.exp(log_t).sum(-1)

    def shortfall(self, kept: Tensor, total: Tensor, bound: str, n_classes: int) -> Tensor:
        """By how much the tangent at what a row keeps lies below the bound, (B,) (C3)."""
        best, _ = tangent(total, bound, n_classes)
        value, slope = tangent(kept, bound, n_classes)
        return best - value - slope * (kept - total).double()

    def terms(
        self, y: Tensor, m: Tensor, v: Tensor | None, bound: str, batch: Classes | None = None
    ) -> Terms:
        """What the bound is made of, for some of the classes; no v is v = 0 (C2).

        That of ``"exact"`` depends on the `batch`, whose tangent it is (C5).
        """
        if v is None:
            s, own = torch.sigmoid(m), of_label(m, y)
            return Terms(
                logsigmoid(own), torch.sigmoid(-own), own.new_zeros(()), s, s * (1 - s), None
            )
        if bound in ("exact", "tight"):
            e = logistic_moments(m, v)
            scale = torch.exp(e.log_scale)
            label = expected_log_sigmoid(of_label(m, y), of_label(v, y))
            d_label = of_label(e.complement, y), -0.5 * of_label(e.slope * scale, y)
            sums = (torch.exp(e.log_mean), e.slope * scale, 0.5 * e.curvature * scale)
            found = Terms(label, *d_label, *sums)
            return found if bound == "tight" else _with_tangent(found, m, v, batch)
        s, own = tilt(m, v), of_label(m, y).double()
        tau = of_label(s.tau, y)
        return Terms(
            of_label(s.log_up, y),
            0.5 * (1.0 - own * tau),
            -0.25 * tau,
            torch.exp(s.log_rest),
            0.5 * torch.exp(s.log_s + s.log_slope),
            0.25 * torch.exp(s.log_s) * s.tau,
        )

    def part(self, y: Tensor, m: Tensor, v: Tensor | None, bound: str, batch: Classes) -> Part:
        """The bound from some of the classes; y are positions among them, no v is v = 0 (C2)."""
        # Without variances all bounds are log p.
        return part(y, self.terms(y, m, v, bound, batch), "tight" if v is None else bound, batch)


def _exact(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """E[log p] (B11, B12)."""
    index = y.unsqueeze(-1)
    e = logistic_tails(m.gather(-1, index), v.gather(-1, index))
    total = expected_log_sum(m, v)
    squares = total.dm.square()
    found = _of_sum(y, m, v, e, total)
    # Half of θ + q², which no curvature of all classes together exceeds (S2).
    return found._replace(joint=squares.sub_(found.dv, alpha=2.0).mul_(0.5))


def _tight(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """The tight bound (B8, B9)."""
    e, index = logistic_tails(m, v), y.unsqueeze(-1)
    label = LogisticTails(*(x.gather(-1, index) for x in e))
    return _of_sum(y, m, v, label, log_expected_sum(m, v, e))


def _of_sum(y: Tensor, m: Tensor, v: Tensor, e: LogisticTails, total: LogSum) -> Expectation:
    """E[log σ(f_y)], its tails e (B, 1), less what stands for E[log Σσ] and is overwritten."""
    index = y.unsqueeze(-1)
    scale = torch.exp(e.log_scale)
    tail = scale * e.mean
    complement = torch.where(m.gather(-1, index) > 0, tail, 1.0 - tail)
    dm = total.dm.neg_().scatter_add_(-1, index, complement)
    dv = total.dv.neg_().scatter_add_(-1, index, -0.5 * e.slope * scale)
    value = expected_log_sigmoid(of_label(m, y), of_label(v, y)) - total.value
    return Expectation(value, dm, dv)


def _with_tangent(e: Terms, m: Tensor, v: Tensor, batch: Classes | None) -> Terms:
    """The terms of ``"tight"`` as those of a tangent on E[log p] (C5)."""
    assert batch is not None
    weight = batch.weight.double()
    if len(weight) == batch.n_classes:
        # All classes are here: the sums such that the "tangent" is the value itself.
        whole = expected_log_sum(m, v)
        tau = torch.exp(whole.value)
        t = tau.unsqueeze(1) / batch.n_classes
        dm, dv = (tau.unsqueeze(1) * x for x in (whole.dm, whole.dv))
        return Terms(*e[:3], t.expand_as(e.t), dm, dv, tau, e.t.sum(1))
    # Not below any class here: the tangent would be steep, and say little.
    tau = torch.lerp(batch.total.double(), e.t @ weight, batch.gain).maximum(e.t.amax(1))
    t, dm, dv, u = tangent_sums(m, v, tau, e.t)
    return Terms(*e[:3], t, dm, dv, tau, u @ weight)


def _collapsed(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """The collapsed bound (B3, B4)."""
    s = tilt(m, v)
    log_rest = torch.logsumexp(s.log_rest, -1, keepdim=True)
    bound = of_label(s.log_up, y) - log_rest.squeeze(-1)
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
    bound = of_label(s.log_up, y) - log_c + log_gamma_minus_entropy(G) + G * log_r
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


_EXPECTATIONS = {"exact": _exact, "tight": _tight, "collapsed": _collapsed, "augmented": _augmented}
