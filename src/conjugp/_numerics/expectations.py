"""Overflow-prone scalars and one-dimensional Gaussian expectations.

Tags refer to ``docs/math.md``. Everything here takes and returns tensors of any shape; scalar
functions work in float64 whatever the input, because C·B numbers cost nothing beside M²·B
products and most trouble in float32 disappears with it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from conjugp._numerics import cuda as launches

_SQRT2 = math.sqrt(2.0)
_LOG_2PI = math.log(2.0 * math.pi)


# --- Pólya-Gamma tilt -----------------------------------------------------------------------


class Tilt(NamedTuple):
    """The scalars of the Pólya-Gamma bounds (B2): all float64, all of the shape of m."""

    c: Tensor  # √(m² + v)
    tau: Tensor  # tanh(c/2)/c, ½ at c = 0
    log_up: Tensor  # m/2 − log 2cosh(c/2)
    log_s: Tensor  # −m/2 − log 2cosh(c/2)
    log_rest: Tensor  # log(1 − s)
    log_slope: Tensor  # log(1 + m·tau): −2 ∂log s/∂m


def tilt(m: Tensor, v: Tensor) -> Tilt:
    """c, s, 1 − s and their logarithms without overflow or cancellation (B2)."""
    m, v = m.double(), v.double()
    c = torch.sqrt(m * m + v)
    # c − |m|, which cancels when written that way; 0 at c = 0.
    gap = v / (c + m.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    below, above = m < 0, m >= 0
    plus = torch.where(below, gap, c + m)  # c + m
    minus = torch.where(above, gap, c - m)  # c − m
    log1p_e = torch.log1p(torch.exp(-c))
    small = c < 1e-4
    safe_c = torch.where(small, torch.ones_like(c), c)
    tau = torch.where(small, 0.5 - c * c / 24.0, torch.tanh(0.5 * safe_c) / safe_c)
    log_rest = torch.logaddexp(-c, torch.log(-torch.expm1(-0.5 * plus))) - log1p_e
    # 1 + m·tau = [c + m − 2m/(1 + e^c)]/c, a sum of positive terms for m < 0.
    log_negative = torch.logaddexp(
        torch.log(gap), torch.log(2.0 * m.abs()) - c - log1p_e
    ) - torch.log(safe_c)
    direct = torch.log1p((m * tau).clamp_min(-0.5))
    log_slope = torch.where(below & ~small, log_negative, direct)
    return Tilt(c, tau, -0.5 * minus - log1p_e, -0.5 * plus - log1p_e, log_rest, log_slope)


# --- The scalar equation of the augmented bound ---------------------------------------------


def _digamma_gap(G: Tensor) -> Tensor:
    """exp(ψ(1+G)) − G: falls from e^−γ = 0.5615 at G = 0 to ½ at infinity."""
    g = G.clamp_min(16.0)
    i2 = 1.0 / (g * g)
    series = 0.5 / g - i2 * (1 / 12 - i2 * (1 / 120 - i2 * (1 / 252 - i2 / 240)))
    return torch.where(
        G < 16.0, torch.exp(torch.digamma(1.0 + G.clamp_max(16.0))) - G, g * torch.expm1(series)
    )


def gamma_total(log_r: Tensor, log_rest: Tensor) -> Tensor:
    """The root of G = r exp ψ(1+G), from log r and log(1 − r) (B6).

    With d(G) = exp ψ(1+G) − G the equation reads G = r/(1−r) · d(G). As d stays within
    [½, 0.5615] the start is within 12 %, and since |d log d / d log G| < 0.04 every sweep
    shrinks the error in log G by more than 25: ten sweeps reach rounding for every r.
    """
    odds = torch.exp((log_r - log_rest).clamp_max(600.0))
    G = 0.5 * odds
    for _ in range(10):
        G = odds * _digamma_gap(G)
    return G


def log_gamma_minus_entropy(G: Tensor) -> Tensor:
    """lnΓ(1+G) − G log G + G, by Stirling's series where the terms cancel (B7)."""
    g = G.clamp_min(16.0)
    i2 = 1.0 / (g * g)
    series = 0.5 * (_LOG_2PI + torch.log(g)) + (1 / 12 - i2 * (1 / 360 - i2 / 1260)) / g
    low = G.clamp_max(16.0)
    return torch.where(
        G < 16.0, torch.lgamma(1.0 + low) - torch.special.xlogy(low, low) + low, series
    )


# --- Gaussian expectations of the logistic function -----------------------------------------
#
# Two trapezoid rules. For v < 1: in the standardised variable, 17 or 29 nodes. For v ≥ 1: in
# f itself. There σ is written as a normal distribution function, whose expectation is known, plus
# a remainder that falls off like e^−|f|, so a fixed set of nodes near the step serves every v.
# Both are spectrally accurate: no node count depends on v, and no other element matters.

_BLOCK = 5120  # elements at a time: their nodes stay in the cache; GPUs have launches of their own
STEP = 1.7  # width of the normal distribution function that stands in for σ


class Rules(NamedTuple):
    t: Tensor  # (J,) standardised nodes
    w: Tensor  # (J,) their weights
    x: Tensor  # (K, 3) columns x, −x²/2 and 1
    moment: Tensor  # (3, K) weights of σ − Φ, σ' and xσ'
    softplus: Tensor  # (1, K) weights of softplus − E(x + step·z)₊


def rule_tables(fine: bool) -> Rules:
    """Both rules in float64, with the nodes for float64 or float32."""
    step, n = (0.6, 14) if fine else (0.75, 8)
    t = torch.arange(-n, n + 1, dtype=torch.float64) * step
    w = torch.exp(-0.5 * t * t)
    h, low, high = (0.6, 77, 47) if fine else (0.75, 40, 23)
    x = torch.arange(-low, high + 1, dtype=torch.float64) * h
    s = torch.sigmoid(x)
    slope = s * torch.sigmoid(-x)
    # Φ(x/step) from the nearer side, so that the difference keeps its relative precision.
    cdf = 0.5 * torch.erfc(x.abs() / (STEP * _SQRT2))
    rest = torch.where(x < 0, s - cdf, cdf - torch.sigmoid(-x))
    hinge = STEP * torch.exp(-0.5 * (x / STEP) ** 2) / math.sqrt(2 * math.pi) - x.abs() * cdf
    softplus = torch.log1p(torch.exp(-x.abs())) - hinge
    return Rules(
        t,
        w / w.sum(),
        torch.stack([x, -0.5 * x * x, torch.ones_like(x)], 1),
        h * torch.stack([rest, slope, x * slope]),
        h * softplus[None],
    )


@lru_cache(maxsize=2)
def _rules(dtype: torch.dtype) -> Rules:
    return Rules(*(p.to(dtype) for p in rule_tables(dtype == torch.float64)))


def _density_sums(weights: Tensor, rules: Rules, rates: list[Tensor]) -> Tensor:
    """Σ_k weights_k N(x_k; b, v) e^scaled, (R, n), for rates b/v, 1/v and scaled − b²/2v ≤ 0."""
    dtype = weights.dtype
    # No exponent so low that products turn subnormal: those are many times slower.
    floor = -40.0 if dtype == torch.float32 else -300.0
    sums = [
        weights @ (rules.x @ block).clamp_(min=floor).exp_()
        for block in torch.stack(rates).to(dtype).split(_BLOCK, 1)
    ]
    return torch.cat(sums, 1).double().mul_(torch.sqrt(rates[1] * (0.5 / math.pi)))


def _scaled_cdf(z: Tensor, scaled: Tensor) -> Tensor:
    """e^scaled 2Φ(√2 z), for ``scaled`` a little above z² where z < 0, and 0 elsewhere."""
    cdf = torch.exp(scaled).mul_(torch.erfc(-z))
    if not bool((z < -10.0).any()):
        return cdf
    # Far out one factor overflows and the other has lost its digits.
    low = z.clamp_max(0.0)
    far = torch.special.erfcx(-low) * torch.exp(scaled - low * low)
    return torch.where(z < -10.0, far, cdf)


_Sums = tuple[Tensor, Tensor, Tensor, Tensor]


def _sums_small(b: Tensor, v: Tensor, dtype: torch.dtype) -> _Sums:
    """0, E[σ], E[σ'] and E[σ''] of u ~ N(b, v) for v < 1."""
    rules = _rules(dtype)
    sums = []
    for mean, sd in torch.stack([b, v.sqrt()]).to(dtype).split(_BLOCK, 1):
        q = torch.addcmul(mean, rules.t[:, None], sd).sigmoid_()
        slope = torch.addcmul(q, q, q, value=-1.0)
        curvature = torch.addcmul(slope, slope, q, value=-2.0)
        sums.append(torch.stack([rules.w @ x for x in (q, slope, curvature)]))
    mean, slope, curvature = torch.cat(sums, 1).double()
    return torch.zeros_like(b), mean, slope, curvature


def _sums_large(b: Tensor, v: Tensor, dtype: torch.dtype) -> _Sums:
    """A scale, at most b²/2v, and e^scale times E[σ], E[σ'], E[σ''] of u ~ N(b, v).

    For v ≥ 1, −v/2 ≤ b. For b < 0 all factors are written relative to e^{−b²/2v}.
    """
    rules = _rules(dtype)
    inverse = v.reciprocal()
    rate = b * inverse
    half, low = 0.5 * rate, b.clamp_max(0.0)
    scaled = low * half
    rates = [rate, inverse, (low - b).mul_(half)]
    rest, slope, moment = _density_sums(rules.moment, rules, rates)
    z = b / torch.add(2.0 * STEP**2, v, alpha=2.0).sqrt_()
    mean = torch.add(rest, _scaled_cdf(z, scaled), alpha=0.5)
    return scaled, mean, slope, torch.addcmul(moment, b, slope, value=-1.0).mul_(inverse)


def _sums(b: Tensor, v: Tensor, dtype: torch.dtype) -> _Sums:
    """A scale and e^scale times E[σ], E[σ'], E[σ''] of u ~ N(b, v), by the rule v asks for."""
    large = v >= 1.0
    if bool(large.all()):
        return _sums_large(b, v, dtype)
    if not bool(large.any()):
        return _sums_small(b, v, dtype)
    found = b.new_empty(4, b.numel())
    for rule, which in ((_sums_large, large), (_sums_small, ~large)):
        i = which.nonzero().squeeze(1)
        found[:, i] = torch.stack(rule(b[i], v[i], dtype))
    scaled, mean, slope, curvature = found
    return scaled, mean, slope, curvature


class LogisticTails(NamedTuple):
    """Expectations under f ~ N(−|m|, v): float64, of the shape of m (P3)."""

    log_scale: Tensor  # logarithm of the common factor, at most 0
    mean: Tensor  # E[σ(f)] = mean · exp(log_scale)
    slope: Tensor  # E[σ'(f)] likewise
    curvature: Tensor  # E[σ''(f)] likewise


def logistic_tails(m: Tensor, v: Tensor) -> LogisticTails:
    """E[σ], E[σ'], E[σ''] of f ~ N(−|m|, v), with relative precision (P3).

    At a = −|m| < −v/2 the factor e^f of σ is taken into the Gaussian, E[σ(f)] = e^{a+v/2} E[σ(u)]
    with u ~ N(−a−v, v), so the mean that is integrated over is never below −v/2 and nothing
    underflows.
    """
    if launches.serves(m):
        e = logistic_moments(m, v)
        log_tail = torch.where(m > 0, e.log_complement, e.log_mean)
        mean = torch.exp(log_tail - e.log_scale)
        return LogisticTails(e.log_scale, mean, e.slope, torch.where(m > 0, -1, 1) * e.curvature)
    dtype, shape = m.dtype, m.shape
    m, v = m.detach().double().reshape(-1), v.detach().double().reshape(-1)
    a = m.abs().neg_()
    b = torch.maximum(a, -(a + v))
    scaled, mean, slope, curvature = _sums(b, v, dtype)
    log_scale = torch.add(a, v, alpha=0.5).clamp_max_(0.0).sub_(scaled)
    # With the factor taken in, E[σ'] is E[σ²] = E[σ] − E[σ'] of u, and E[σ''] is E[2σ³ − σ²].
    tilted = torch.sub(mean, slope, alpha=2.0).mul_((b - a).sign_())
    found = LogisticTails(log_scale, mean, slope + tilted, curvature + tilted)
    return LogisticTails(*(x.view(shape) for x in found))


class LogisticMoments(NamedTuple):
    """Expectations under f ~ N(m, v): float64, of the shape of m (P3)."""

    log_mean: Tensor  # log E[σ(f)]
    complement: Tensor  # E[1 − σ(f)]
    log_complement: Tensor  # its logarithm
    log_scale: Tensor  # common factor of the two derivatives, at most 0
    slope: Tensor  # E[σ'(f)] = slope · exp(log_scale)
    curvature: Tensor  # E[σ''(f)] = curvature · exp(log_scale)


def logistic_moments(m: Tensor, v: Tensor) -> LogisticMoments:
    """E[σ], E[σ'], E[σ''] of f ~ N(m, v), with relative precision in both tails (P3)."""
    m, v = m.detach(), v.detach()
    if launches.serves(m):
        return LogisticMoments(*launches.logistic_moments(m.double(), v.double()))
    e = logistic_tails(m, v)
    log_tail = e.log_scale + torch.log(e.mean)
    tail = torch.exp(log_tail)
    log_rest = torch.log1p(-tail)
    up = m > 0
    return LogisticMoments(
        torch.where(up, log_rest, log_tail),
        torch.where(up, tail, 1.0 - tail),
        torch.where(up, log_tail, log_rest),
        e.log_scale,
        e.slope,
        torch.where(up, -e.curvature, e.curvature),
    )


def expected_log_sigmoid(m: Tensor, v: Tensor) -> Tensor:
    """E[log σ(f)] of f ~ N(m, v), float64, absolute precision (P4)."""
    if launches.serves(m):
        return launches.expected_log_sigmoid(m.detach().double(), v.detach().double())
    dtype, shape = m.dtype, m.shape
    m, v = m.detach().double().reshape(-1), v.detach().double().reshape(-1)
    a = m.abs().neg_()
    rules = _rules(dtype)
    high = v.clamp_min(1.0)
    wide = torch.sqrt(high + STEP**2)
    z = a / wide
    hinge = a * torch.special.ndtr(z) + wide * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    inverse = high.reciprocal()
    rate = a * inverse
    rest = _density_sums(rules.softplus, rules, [rate, inverse, -0.5 * a * rate])[0]
    softplus = hinge.add_(rest)
    small = v < 1.0
    if bool(small.any()):
        # Both rules for all: this runs on B numbers, the label's class only.
        sd = v.clamp_max(1.0).sqrt().to(dtype)
        f = torch.addcmul(a.to(dtype), rules.t[:, None], sd)
        softplus = torch.where(
            small, (rules.w @ torch.nn.functional.softplus(f)).double(), softplus
        )
    return m.clamp_max(0.0).sub_(softplus).view(shape)


# --- Nodes and draws of a standard normal ---------------------------------------------------


@lru_cache(maxsize=16)
def gauss_hermite(n: int) -> tuple[Tensor, Tensor]:
    """n nodes and weights for expectations over N(0, 1), float64."""
    z, weight = np.polynomial.hermite_e.hermegauss(n)
    return torch.tensor(z), torch.tensor(weight / weight.sum())


def sobol_normals(n: int, dim: int, seed: int) -> Tensor:
    """(n, dim) standard normals from scrambled Sobol points, float64, the same on every device."""
    engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
    # Sobol points are multiples of 2^−30 and may be 0: half a step keeps the quantile finite.
    u = engine.draw(n, dtype=torch.float64) + 2.0**-31
    return torch.special.ndtri(u.clamp(2.0**-31, 1.0 - 2.0**-31))
