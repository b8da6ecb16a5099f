"""The chance that one of C independent Gaussians is the largest, as a one-dimensional integral.

For a label y, P = ∫ N(u; 0, 1) ∏_{c≠y} Φ(a_c + b_c u) du with a_c = (m_y − m_c)/√v_c and
b_c = √(v_y/v_c) (L8). The integrand is log-concave, so Newton's method finds its mode, and a
trapezoid rule in t, u = mode + width·sinh(t), is dense there and reaches as far as N(u) does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtr

from conjugp._numerics.expectations import gauss_hermite
from conjugp.likelihoods._monte_carlo import Expectation

_REACH = 6.5  # standard deviations of u on either side of the mode
_NEWTON = 6
_NODES = ((2.0, 11), (8.0, 24), (32.0, 96), (math.inf, 384))  # up to this b, nodes on each side
_NOISE = 7  # Gauss-Hermite nodes of z
_ELEMENTS = 2**19  # numbers held at a time
_LOG_2PI = math.log(2.0 * math.pi)
_NEVER = 40.0  # Φ(40) = 1: the label does not compete with itself
_TAIL = -100.0  # from here on φ/Φ is its asymptotic series
_EDGE = 8.0  # standard deviations beyond which a Gaussian has ended
_STEP = 0.4  # of the narrowest standard deviation: the step of a grid for all classes
_GRIDS = (64, 256, 1024)
_LEAST = 1e-7  # of the largest standard deviation: narrower Gaussians count as points


class Orthant(NamedTuple):
    """The logarithm of the integral and its derivatives, float64."""

    value: Tensor  # (B,)
    a: Tensor  # (B, C)
    b: Tensor  # (B, C)
    s2: Tensor  # (B, C)


def log_orthant(y: Tensor, a: Tensor, b: Tensor, s2: Tensor | None = None) -> Orthant:
    """log ∫ N(u) exp(Σ_{c≠y} E[log Φ(a_c + b_c u + s_c z)]) du, z ~ N(0, 1), a and b (B, C).

    Without `s2` it is log ∫ N(u) ∏_{c≠y} Φ(a_c + b_c u) du.
    """
    label = y[:, None] == torch.arange(a.shape[-1], device=a.device)
    a, b = a.masked_fill(label, _NEVER), b.masked_fill(label, 0.0)
    s = None if s2 is None else s2.masked_fill(label, 0.0).clamp_min(1e-8).sqrt()
    out = Orthant(a.new_empty(len(a)), *(torch.empty_like(a) for _ in range(3)))
    # Then no Φ underflows, and no product of them where the integrand has its mass.
    steepest, low = b.amax(-1), -1.0
    lowest = a - 4.0 * b - (0.0 if s is None else 4.0 * s)
    plain = (lowest.clamp_max(0.0).square().sum(-1) < 1000.0) & (steepest <= 2.0)
    for high, n in _NODES:
        # Narrow competitors are steps in u, and need more nodes.
        within = (steepest > low) & (steepest <= high)
        low = high
        size = max(1, _ELEMENTS // ((2 * n + 1) * (1 if s is None else _NOISE) * a.shape[-1]))
        for terms, kind in ((_terms, plain), (_terms_in_logs, ~plain)):
            rows = (within & kind).nonzero().squeeze(1)
            for i in rows.split(size) if len(rows) else ():
                part = _integrate(a[i], b[i], None if s is None else s[i], n, terms)
                for whole, value in zip(out, part, strict=True):
                    whole[i] = value
    return out


def _terms(w: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_c log Φ(w_c) and φ(w)/Φ(w): (..., C) -> (...) and (..., C)."""
    cdf = torch.erfc(w * -math.sqrt(0.5)).mul_(0.5)
    return cdf.prod(-1).log_(), torch.exp(-0.5 * (w * w + _LOG_2PI)).div_(cdf)


def _terms_in_logs(w: Tensor) -> tuple[Tensor, Tensor]:
    """The same where Φ may underflow; several times slower."""
    log_cdf = log_ndtr(w)
    mills = torch.exp(-0.5 * (w * w + _LOG_2PI) - log_cdf)
    # In the tail the exponents are too large to be subtracted.
    tail = w.clamp_max(_TAIL)
    return log_cdf.sum(-1), torch.where(w < _TAIL, (2.0 / tail**2 - 1.0) / tail - tail, mills)


def _integrate(
    a: Tensor, b: Tensor, s: Tensor | None, n: int, terms: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Orthant:
    z, weight = (x.to(a) for x in gauss_hermite(1 if s is None else _NOISE))
    # Noise first: (K, B, C), or (K, J, B, C) with nodes of u.
    x = a[None] if s is None else a + s * z[:, None, None]
    b2 = b * b

    def slopes(u: Tensor) -> tuple[Tensor, Tensor]:
        """First and second derivative of the log-integrand at u (B,)."""
        w = x + b * u[:, None]
        mills = terms(w)[1]
        first = torch.tensordot(weight, (b * mills).sum(-1), 1)
        bend = torch.where(w < _TAIL, 1.0, mills * (w + mills))
        second = torch.tensordot(weight, (b2 * bend).sum(-1), 1)
        return first - u, -1.0 - second

    mode = a.new_zeros(len(a))
    for _ in range(_NEWTON):
        # The first derivative is convex: from the left the steps never overshoot.
        first, second = slopes(mode)
        mode = mode - first / second
    width = torch.rsqrt(-slopes(mode)[1])
    t = torch.arange(-n, n + 1, dtype=a.dtype, device=a.device)[:, None] / n
    reach = torch.asinh(_REACH / width)
    u = mode + width * torch.sinh(reach * t)  # (J, B)
    log_product, mills = terms(x[:, None] + b * u[..., None])
    log_step = torch.log(width * torch.cosh(reach * t) * reach / n)
    log_f = log_step - 0.5 * (u * u + _LOG_2PI) + torch.tensordot(weight, log_product, 1)
    share = torch.softmax(log_f, 0)[..., None]
    mean_mills = torch.tensordot(weight, mills, 1)
    da = (share * mean_mills).sum(0)
    db = (share * u[..., None] * mean_mills).sum(0)
    ds2 = torch.zeros_like(da)
    if s is not None:
        ds2 = (share * torch.tensordot(weight * z, mills, 1)).sum(0) / (2.0 * s)
    return Orthant(torch.logsumexp(log_f, 0), da, db, ds2)


def log_largest(y: Tensor, m: Tensor, v: Tensor) -> Expectation:
    """log P(f_y is the largest) for f ~ N(m, v), m and v (B, C), and its derivatives (L8)."""
    m, v = m.double(), _not_zero(v.double())
    column = y[:, None]
    v_y = v.gather(1, column)
    a = (m.gather(1, column) - m) * torch.rsqrt(v)
    b = torch.sqrt(v_y / v)
    e = log_orthant(y, a, b)
    dm = -e.a * torch.rsqrt(v)
    dv = -0.5 * (a * e.a + b * e.b) / v
    dm.scatter_(1, column, 0.0)
    dm.scatter_(1, column, -dm.sum(1, keepdim=True))
    dv.scatter_(1, column, 0.0)
    e.b.scatter_(1, column, 0.0)
    dv.scatter_(1, column, 0.5 * (b * e.b).sum(1, keepdim=True) / v_y)
    return Expectation(e.value, dm, dv)


def largest(m: Tensor, v: Tensor) -> Tensor:
    """P(f_k is the largest) for every class: m and v (B, C) -> (B, C), float64 (L8).

    One grid for all classes, P_k = ∫ N(x; m_k, v_k) ∏_{c≠k} Φ((x − m_c)/√v_c) dx, where it can be
    fine enough for the narrowest Gaussian; else a grid for each class.
    """
    m, v = m.detach().double(), _not_zero(v.detach().double())
    sd = v.sqrt()
    low = (m - _EDGE * sd).amax(-1)
    high = (m + _EDGE * sd).amax(-1)
    # A class that ends below the grid wins nothing and is beaten everywhere: it may be narrow.
    competes = m + _EDGE * sd > low[:, None]
    narrowest = sd.masked_fill(~competes, math.inf).amin(-1)
    needed = (high - low) / (_STEP * narrowest)
    p, done = torch.empty_like(m), torch.zeros_like(low, dtype=torch.bool)
    for n in _GRIDS:
        rows = ((needed <= n) & ~done).nonzero().squeeze(1)
        done[rows] = True
        for i in rows.split(max(1, _ELEMENTS // (n * m.shape[-1]))):
            p[i] = _on_grid(m[i], sd[i], low[i], high[i], n)
    rest = (~done).nonzero().squeeze(1)
    for k in range(m.shape[-1] if len(rest) else 0):
        label = torch.full_like(rest, k)
        p[rest, k] = log_largest(label, m[rest], v[rest]).value.exp()
    p.clamp_min_(torch.finfo(p.dtype).tiny)
    return p / p.sum(-1, keepdim=True)


def _on_grid(m: Tensor, sd: Tensor, low: Tensor, high: Tensor, n: int) -> Tensor:
    t = torch.linspace(0.0, 1.0, n, dtype=m.dtype, device=m.device)[:, None]
    x = low + (high - low) * t  # (J, B)
    z = (x[..., None] - m) / sd
    cdf = ndtr(z).clamp_min_(1e-300)
    product = torch.exp(torch.log(cdf).sum(-1, keepdim=True))
    density = torch.exp(-0.5 * z * z) / sd
    return (product * density / cdf).sum(0)


def _not_zero(v: Tensor) -> Tensor:
    """Variances that can be divided by."""
    return torch.maximum(v, (_LEAST**2 * v.amax(-1, keepdim=True)).clamp_min(1e-24))
