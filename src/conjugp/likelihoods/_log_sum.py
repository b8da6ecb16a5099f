"""E[log Σ_c σ(f_c)] for independent Gaussian latents, with its derivatives (docs/math.md, B11).

By Frullani's integral E log S = log τ + ∫ (e^{−λτ} − ∏_c F_c(λ)) dλ/λ over λ > 0 for any τ, where
F_c = E[e^{−λσ(f_c)}]: a bump in t = log λ, for the trapezoid rule. All inner expectations of some
rows are one matrix product, by parts,

    1 − F(λ) = ∫ λσ′(x) e^{−λσ(x)} Φ((m − x)/√v) dx,                                       (B12)

on nodes that rows share; the same product, the other way, gives the derivatives in m and v.
Narrow Gaussians have a few nodes of their own instead, and rows whose integral is very long, or on
a GPU, nodes around every t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from conjugp._numerics import cuda as launches
from conjugp._numerics.expectations import LogisticTails, gauss_hermite, logistic_tails

_SKIP = 1e-6  # rows whose integral is certainly smaller do without it
_NARROW = 0.02  # and it is not looked for where a variance is larger
_LONG = 1000.0  # rows that are longer in t have nodes of their own
_HALVINGS = 5  # more make ranges shorter, but take longer than that saves
_DEEP = -30.0  # where σ(f) is e^f: rows wholly below are moved up to it
_FAR = 100.0  # from where float32 has not the digits for differences
_SPAN = 1.5  # rows that share nodes have together no more than so many times the longest


class LogSum(NamedTuple):
    """E[log S], or log E[S], and its derivatives, float64."""

    value: Tensor  # (B,)
    dm: Tensor  # (B, C)
    dv: Tensor  # (B, C)


class Rule(NamedTuple):
    """How fine the integrals are. In t and in x they err by about exp(−π²/step)."""

    step: float  # in t
    x_steps: tuple[tuple[float, float], ...]  # in x: the variance from which on, and the step
    first: float  # log λS at the first t: below it the integrand is a cubic in λ ...
    above: float  # with f this many standard deviations above its mean
    last: float  # −log ∏F at the last t
    left: float  # nodes in x go so far and log C below −t, where λσ counts for nothing ...
    right: float  # ... and so far above 0, where σ is 1
    drop: float  # or above −t, where e^{−λσ} is 0
    nodes: int  # of narrower Gaussians
    elements: int  # (row, class) pairs at a time


FINE = Rule(0.4, ((0.2, 0.4), (0.05, 0.2)), -7.0, 7.5, 26.0, 26.0, 26.0, 4.5, 15, 2048)
QUICK = Rule(0.7, ((0.25, 0.6), (0.06, 0.3)), -3.5, 6.0, 14.0, 11.0, 12.5, 3.5, 5, 4096)


@torch.no_grad()
def expected_log_sum(m: Tensor, v: Tensor, rule: Rule | None = None) -> LogSum:
    """E[log Σ_c σ(f_c)] of f ~ N(m, v): (B, C) -> (B,), with derivatives (B, C) (B11, B12).

    By `FINE`, the rule of float64, to 1e-9; by `QUICK` to 1e-5, its derivatives to 1e-4.
    """
    rule = rule or (FINE if m.dtype == torch.float64 else QUICK)
    up = (_DEEP - (m + rule.above * v.sqrt()).amax(1, keepdim=True)).clamp_min_(0.0)
    found = _near_zero(m + up, v, rule)
    return found._replace(value=found.value - up.squeeze(1).double())


def _near_zero(m: Tensor, v: Tensor, rule: Rule) -> LogSum:
    """`expected_log_sum` of rows some of whose latents may be not far below zero."""
    if launches.serves(m):
        return _windows(m, v, rule)
    B, C = m.shape
    found = LogSum(*(torch.zeros(s, dtype=torch.float64) for s in ((B,), (B, C), (B, C))))

    def put(rows: Tensor, part: LogSum) -> None:
        for whole, some in zip(found, part, strict=True):
            whole[rows] = some

    rows = torch.arange(B)
    sure = v.amax(1) < _NARROW
    if bool(sure.any()):
        few = sure.nonzero().squeeze(1)
        value, flat = _nearly_sure(m[few], v[few], 1e-4 if rule is FINE else 1.0)
        put(few[flat], LogSum(*(x[flat] for x in value)))
        sure[few] = flat
        rows = (~sure).nonzero().squeeze(1)
        m, v = m[rows], v[rows]
    if not len(rows):
        return found
    dtype = torch.float64 if rule is FINE else m.dtype
    m, v = m.to(dtype), v.to(dtype)
    begin, end = _range(m, v, rule)
    known = torch.isfinite(end - begin)
    if not bool(known.all()):  # moments that are no numbers
        lost = rows[~known]
        put(lost, LogSum(*(torch.full_like(x[lost], torch.nan) for x in found)))
        rows, m, v, begin, end = (x[known] for x in (rows, m, v, begin, end))
    long = end - begin > _LONG
    if bool(long.any()):
        i = long.nonzero().squeeze(1)
        for some in i.split(max(1, 64 // C)):
            put(rows[some], _windows(m[some], v[some], rule))
    for i in _groups(begin, end, (~long).nonzero().squeeze(1), max(1, rule.elements // C)):
        t = _nodes(float(begin[i].min()), float(end[i].max()), rule.step, m)
        put(rows[i], _integral(m[i], v[i], t, end[i], rule))
    return found


def log_expected_sum(m: Tensor, v: Tensor, e: LogisticTails) -> LogSum:
    """log T = log Σ_c E[σ(f_c)], which is at least E[log S], from the tails at m and v (B8, B9)."""
    sign = -torch.sgn(m).double()
    # Relative to the largest tail, or to 1 where a class is above zero: T may be too small to hold.
    log_unit = torch.mul(e.log_scale, sign + 1.0).amax(-1, keepdim=True).mul_(0.5)
    unit = torch.exp(e.log_scale - log_unit)
    # E[σ] is ½ + sign·(tail − ½): above zero the tail is that of 1 − σ.
    total = (e.mean * unit).sub_(0.5).mul_(sign).sum(-1, keepdim=True).add_(0.5 * m.shape[-1])
    share = unit.div_(total)
    value = log_unit.add_(torch.log(total)).squeeze(-1)
    return LogSum(value, e.slope * share, (e.curvature * share).mul_(sign).mul_(0.5))


def tangent_sums(
    m: Tensor, v: Tensor, total: Tensor, sigma: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What every class adds to a bound on −E[log S] by a tangent at τ = total (B,) (C5).

    sigma is E[σ] (B, K), and τ no less than any of it.

    −E log S ≥ 1 − log τ − Σ_c t_c/τ with t_c = τ ∫ e^{−λτ} (−log F_c) dλ/λ: t and its derivatives
    in m and v, and the u_c whose sum is τ where the bound is best, all (B, K), float64.
    """
    rule = FINE if m.dtype == torch.float64 else QUICK
    B, K = m.shape
    t, dm, dv, u = (torch.empty(B, K, dtype=torch.float64, device=m.device) for _ in range(4))
    log_total = torch.log(total.double())
    # Where λσ(f_c) is small also for an f_c far above its mean.
    most = logsigmoid(m + rule.above * v.sqrt()).amax(1).double()
    begin = torch.minimum(2.0 * rule.first - log_total, rule.first - most)
    end = math.log(rule.last) + 0.5 - log_total
    everything = torch.arange(B, device=m.device)
    for i in _groups(begin, end, everything, max(1, rule.elements // K)):
        nodes = _nodes(float(begin[i].min()), float(end[i].max()), rule.step, m)
        falls = _Falls(m[i], v[i], nodes, rule)
        fall = falls.values()
        scaled = torch.exp(nodes + log_total[i].unsqueeze(1))  # λτ
        weight = torch.exp(-scaled) * _weights(len(nodes), rule.step, m.device)
        weight = weight.repeat_interleave(K, 0)
        # F ≥ e^{−λE[σ]}, which has digits where 1 − F has none left.
        least = torch.exp(nodes).neg() * sigma[i].reshape(-1, 1)
        # Nodes of rows with a smaller τ may be where both that and the weight here are 0.
        left = (1.0 - fall.double()).maximum(torch.exp(least)).clamp_min_(1e-300)
        # Rounding may have made more of it than 1.
        a = torch.log1p(-fall.double().clamp_max(1.0)).maximum(least).neg_()
        shape, scale = (len(i), K), total[i].double().unsqueeze(1)
        t[i] = scale * (a * weight).sum(1).view(shape)
        u[i] = scale * (a * weight * scaled.repeat_interleave(K, 0)).sum(1).view(shape)
        found = falls.pull((weight / left).to(m.dtype))
        dm[i], dv[i] = (scale * d.double().view(shape) for d in found)
    return t, dm, dv, u


def _nearly_sure(m: Tensor, v: Tensor, share: float) -> tuple[LogSum, Tensor]:
    """log T less Jensen's gap to first order, and where that is as good as the integral.

    The gap is about ½Σ v (E[σ']/T)² where v is small, and less than ½Σ v E[σ']/T elsewhere. What it
    is makes no difference where it is tiny, but how fast it grows with v does.
    """
    found = log_expected_sum(m, v, logistic_tails(m, v))
    width, squares = v.double(), found.dm.square()
    gap = 0.5 * (width * (squares + found.dm * width)).sum(-1)
    found.value.sub_(0.5 * (squares * width).sum(-1))
    found.dv.sub_(0.5 * squares)
    return found, gap <= _SKIP * share


# --- Where the integrand is -----------------------------------------------------------------


def _range(m: Tensor, v: Tensor, rule: Rule, halvings: int = _HALVINGS) -> tuple[Tensor, Tensor]:
    """The first and last t of every row, (B,) each; the last is found by halvings."""
    sd = v.sqrt()
    begin = rule.first - torch.logsumexp(logsigmoid(m + rule.above * sd), -1)
    # ∏F is about the probability that every f_c is below −t, or rather below 1 − t. By the bound
    # log Φ(−z) ≤ −½z² − log 2 that is e^−last where the sum of these is.
    slack = math.log(rule.last)
    inverse, reach = sd.clamp_min(1e-6).reciprocal(), math.sqrt(2.0 * rule.last)
    high = slack - logsigmoid(m - reach * sd).amax(-1)
    low = torch.minimum(begin, high)
    for _ in range(halvings):
        t = 0.5 * (low + high)
        # The latent at which λσ(f) is `last`; none where λ is less.
        level = slack - t
        at = level - torch.log1p(-torch.exp(level.clamp_max(-1e-6)))
        z = (m - at.unsqueeze(-1)).mul_(inverse).clamp_min_(0.0)
        over = (0.5 * z.square() + math.log(2.0) * (z > 0)).sum(-1)
        done = (over >= rule.last) & (level < 0)
        high, low = torch.where(done, t, high), torch.where(done, low, t)
    return begin, torch.maximum(high, begin + 4.0 * rule.step)


def _nodes(begin: float, end: float, step: float, like: Tensor) -> Tensor:
    """Multiples of the step, so that a row has the same nodes whatever the others are."""
    k = torch.arange(math.floor(begin / step), math.ceil(end / step) + 1, device=like.device)
    return k.to(torch.float64) * step


def _groups(begin: Tensor, end: Tensor, rows: Tensor, most: int) -> Iterator[Tensor]:
    """The rows, at most so many at a time, those alike together."""
    order = rows[torch.argsort(end[rows])]
    parts = list(reversed(order.split(most))) if len(order) else []
    while parts:
        i = parts.pop()
        low, high = begin[i], end[i]
        if len(i) > 1 and float(high.max() - low.min()) > _SPAN * float((high - low).max()) + 8.0:
            # Halves in the order of what differs more.
            by = low if float(low.max() - low.min()) > float(high.max() - high.min()) else high
            i = i[torch.argsort(by)]
            parts += [i[len(i) // 2 :], i[: len(i) // 2]]
            continue
        yield i


@lru_cache(maxsize=8)
def _first_weights(step: float) -> tuple[float, ...]:
    """What the first three nodes count for besides: the nodes before them, for a cubic in λ."""
    powers = np.arange(1, 4)
    missing = step / np.expm1(powers * step)
    at_nodes = np.exp(np.outer(powers, np.arange(3)) * step)
    return tuple(np.linalg.solve(at_nodes, missing))


@lru_cache(maxsize=64)
def _weights(n: int, step: float, device: torch.device) -> Tensor:
    """Weights of n nodes, float64; kept, since a graph on a GPU cannot copy them from here."""
    weight = torch.full((n,), step, dtype=torch.float64)
    weight[:3] += torch.tensor(_first_weights(step), dtype=torch.float64)
    return weight.to(device)


# --- By products ----------------------------------------------------------------------------


def _integral(m: Tensor, v: Tensor, t: Tensor, end: Tensor, rule: Rule) -> LogSum:
    """For rows (B, C) that share the nodes t (T,) and end at `end` (B,) (B11, B12)."""
    (B, C), T = m.shape, len(t)
    falls = _Falls(m, v, t, rule)
    # What of a class is left may be nothing; the others' product is then the quotient all the same.
    least = 1e-30 if m.dtype == torch.float32 else 1e-280
    F = torch.rsub(falls.values(), 1.0).clamp_min_(least).view(B, C, T)
    product = F[:, 0].clone()
    for c in range(1, C):
        product.mul_(F[:, c])
    if float(t[-1] - t[0]) > _FAR:
        # On nodes of others, beyond its own last one, a row would add up rounding.
        product.mul_(t < end.unsqueeze(1) + rule.step)
    weight = _weights(T, rule.step, m.device)
    value = _against(product, t, weight)
    # −∂/∂F of the integral, by 1 − F: the product of the others.
    product.mul_(weight.to(m.dtype))
    G = torch.div(product.unsqueeze(1), F, out=F).view(B * C, T)
    dm, dv = (d.view(B, C).double() for d in falls.pull(G))
    return LogSum(value, dm, dv)


def _against(product: Tensor, t: Tensor, weight: Tensor) -> Tensor:
    """log τ + Σ weight (e^{−λτ} − product) with 1/τ about where the product falls, (B,)."""
    at = (product > 0.4).sum(1, keepdim=True).clamp_max_(t.shape[-1] - 1)
    t = t.expand(product.shape)
    log_tau = t.gather(1, at).neg_()
    rest = (t + log_tau).clamp_max_(50.0).exp_().neg_().exp_()
    return log_tau.squeeze(1) + (rest.sub_(product) * weight).sum(1)


class _Falls:
    """1 − F (n, T) of the n Gaussians of rows (B, C) at nodes t, and what it pulls at."""

    def __init__(self, m: Tensor, v: Tensor, t: Tensor, rule: Rule) -> None:
        rule = rule._replace(left=rule.left + math.log(m.shape[1]))
        m, v = m.reshape(-1), v.reshape(-1)
        self.shape, self.like = (len(m), len(t)), m
        self.parts: list[tuple[Tensor | slice, _Wide | _Narrow]] = []
        least = float(v.min())
        above = math.inf
        for bound, step in rule.x_steps:
            if least >= bound and above == math.inf:
                self.parts.append((slice(None), _Wide(m, v, t, rule, step)))
                return
            i = ((v >= bound) & (v < above)).nonzero().squeeze(1)
            if len(i):
                self.parts.append((i, _Wide(m[i], v[i], t, rule, step)))
            above = bound
        i = (v < above).nonzero().squeeze(1)
        self.parts.append((i, _Narrow(m[i], v[i], t, rule)))

    def values(self) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0][1].values()
        found = self.like.new_empty(self.shape)
        for i, part in self.parts:
            found[i] = part.values()
        return found

    def pull(self, G: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of Σ G·(1 − F) in m and v, (n,) each."""
        if len(self.parts) == 1:
            return self.parts[0][1].pull(G)
        dm, dv = torch.empty_like(self.like), torch.empty_like(self.like)
        for i, part in self.parts:
            dm[i], dv[i] = part.pull(G[i])
        return dm, dv


class _Wide:
    """1 − F by parts, on nodes in x (B12)."""

    def __init__(self, m: Tensor, v: Tensor, t: Tensor, rule: Rule, h: float) -> None:
        first, last = float(t[0]), float(t[-1])
        low = math.floor((-last - rule.left) / h)
        # Above the drop e^{−λσ} is 0; with a smaller λ it never is.
        high = math.ceil((rule.right if first < rule.drop + 1.0 else rule.drop - first) / h)
        x = torch.arange(low, high + 1, dtype=t.dtype, device=t.device) * h
        self.fall = _fall(x.unsqueeze(1), t, h).to(m.dtype)  # (J, T)
        self.inverse = (2.0 * v).rsqrt_().unsqueeze(1)
        # Subnormal numbers would make all that follows many times slower.
        far = 6.0 if m.dtype == torch.float32 else 25.0
        # Relative to one of them: far from 0 float32 has few digits, and for long ranges too few.
        like = m.double() if float(x[-1] - x[0]) > _FAR else m
        near = x[len(x) // 2].to(like.dtype)
        x = (x - near.double()).to(like.dtype)
        z = (x - (like - near).unsqueeze(1)).mul_(self.inverse).clamp_(-far, far)
        self.z = z.to(m.dtype)  # (n, J), over √2
        self.work = torch.erfc(self.z)

    def values(self) -> Tensor:
        return torch.mm(self.work, self.fall).mul_(0.5)

    def pull(self, G: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of Σ G·(1 − F) in m and v, (n,) each."""
        pulled = torch.mm(G, self.fall.T, out=self.work)
        density = torch.mul(self.z, self.z).neg_().exp_().mul_(pulled)
        inverse, scale = self.inverse.squeeze(1), 1.0 / math.sqrt(math.pi)
        dm = density.sum(1).mul_(inverse).mul_(scale)
        dv = density.mul_(self.z).sum(1).mul_(inverse.square_()).mul_(scale)
        return dm, dv


def _fall(x: Tensor, t: Tensor, h: float) -> Tensor:
    """Weights of nodes x, along the first axis, in (B12), for every t; float64."""
    scaled = t + logsigmoid(x)
    fall = torch.exp(scaled + logsigmoid(-x) - torch.exp(scaled.clamp(max=50.0)))
    # A geometric series: up to the first node the fall grows like e^x.
    fall[0] /= -math.expm1(-h)
    # Altogether 1 − e^−λ: the rule in x must not err alike for all t.
    return fall.mul_(-torch.expm1(-torch.exp(t.clamp(max=50.0))) / fall.sum(0))


class _Narrow:
    """1 − F on standardised nodes."""

    def __init__(self, m: Tensor, v: Tensor, t: Tensor, rule: Rule) -> None:
        z, w = (x.to(m.device) for x in gauss_hermite(rule.nodes))
        f = m.double().unsqueeze(1) + v.double().sqrt().unsqueeze(1) * z
        log_s = logsigmoid(f)
        self.w, self.rest = w.to(m.dtype), torch.sigmoid(-f).to(m.dtype)  # (Z,), (n, Z)
        # λσ (n, Z, T), as a product where that can neither overflow nor underflow.
        if float(t[-1] - t[0]) < 60.0:
            base = torch.exp(log_s + float(t[0])).to(m.dtype).unsqueeze(-1)
            self.scaled = base * torch.exp(t - t[0]).to(m.dtype)
        else:
            scaled = torch.exp((log_s.unsqueeze(-1) + t).clamp_max_(50.0))
            self.scaled = scaled.to(m.dtype)
        self.survive = torch.exp(-self.scaled)

    def values(self) -> Tensor:
        return torch.matmul(self.w, -torch.expm1(-self.scaled))

    def pull(self, G: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of Σ G·(1 − F) in m and v, (n,) each."""
        bump = self.survive.mul_(self.scaled)
        G = G.unsqueeze(-1)
        first = (bump @ G).squeeze(-1)
        second = (bump.mul_(self.scaled) @ G).squeeze(-1)
        dm = (first * self.rest) @ self.w
        turned = first * self.rest * (2.0 * self.rest - 1.0) - second * self.rest.square()
        return dm, 0.5 * (turned @ self.w)


# --- By nodes around every t ----------------------------------------------------------------

_N_NODES = 96  # in t; the steps are longer where they do not suffice
_MARGIN = 5.0  # more nodes on the left: those of other t do not help here
_NEAR, _TURN = 8.0, 2.0  # up to this t, where σ is 1 for most, steps stay short; how they lengthen


def _windows(m: Tensor, v: Tensor, rule: Rule) -> LogSum:
    """For rows (B, C), each with nodes of its own: as many for all, whatever the row."""
    n = _N_NODES * (4 if rule is FINE else 1)
    begin, end = (x.double() for x in _range(m, v, rule, 0 if launches.serves(m) else _HALVINGS))
    t, dt = _stretched(begin, end, rule.step, n)
    args = (m.double().unsqueeze(-1), v.double().unsqueeze(-1), t.unsqueeze(1))
    fall, dm, dv = launches.falls(*args) if launches.serves(m) else _window(*args, rule)
    F = (1.0 - fall).clamp_min_(1e-280)
    product = torch.exp(torch.log(F).sum(1))
    weight = dt * _weights(n, rule.step, m.device)
    # Against a step that is as wide as the nodes allow: e^{−λτ} would fall between them.
    middle, width = 0.5 * (t[:, :1] + t[:, -1:]), (t[:, -1:] - t[:, :1]) / 16.0
    rest = torch.special.ndtr((middle - t) / width).sub_(product)
    value = (rest * weight).sum(1).sub_(middle.squeeze(1) + np.euler_gamma)
    G = (product * weight).unsqueeze(1) / F
    return LogSum(value, (G * dm).sum(-1), (G * dv).sum(-1))


def _stretched(begin: Tensor, end: Tensor, step: float, n: int) -> tuple[Tensor, Tensor]:
    """Nodes t (B, n) from begin on, and dt of each over the step.

    Steps grow smoothly where they must: far out the integrand is as wide as the Gaussians are.
    """
    s = begin.unsqueeze(1) + step * torch.arange(n, dtype=begin.dtype, device=begin.device)
    turn = torch.maximum(begin + 8.0, torch.full_like(begin, _NEAR)).unsqueeze(1)
    bend = _TURN * torch.nn.functional.softplus((s - turn) / _TURN)
    missing = (end - s[:, -1]).clamp_min(0.0)
    excess = (missing / bend[:, -1]).unsqueeze(1)
    return s + excess * bend, 1.0 + excess * torch.sigmoid((s - turn) / _TURN)


def _window(m: Tensor, v: Tensor, t: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """1 − F at (..., T) and its derivatives in m and v, which broadcast with t; float64.

    As `cuda.falls` has it on a GPU, here for a few rows.
    """
    found = [torch.empty(torch.broadcast_shapes(m.shape, t.shape), dtype=m.dtype) for _ in range(3)]
    above = math.inf
    for bound, h in (*rule.x_steps, (0.0, 0.0)):
        which = ((v >= bound) & (v < above)).expand(found[0].shape)
        above = bound
        if bool(which.any()):
            mi, vi, ti = (x.expand(which.shape)[which] for x in (m, v, t))
            parts = _window_wide(mi, vi, ti, rule, h) if h else _window_narrow(mi, vi, ti, rule)
            for whole, part in zip(found, parts, strict=True):
                whole[which] = part
    return found[0], found[1], found[2]


def _window_narrow(m: Tensor, v: Tensor, t: Tensor, rule: Rule) -> list[Tensor]:
    z, w = gauss_hermite(rule.nodes)
    f = m + v.sqrt() * z.unsqueeze(1)
    rest, scaled = torch.sigmoid(-f), torch.exp((logsigmoid(f) + t).clamp_max_(50.0))
    first = scaled * torch.exp(-scaled) * rest
    second = first * (rest * (2.0 - scaled) - 1.0)
    return [w @ -torch.expm1(-scaled), w @ first, 0.5 * (w @ second)]


def _window_wide(m: Tensor, v: Tensor, t: Tensor, rule: Rule, h: float) -> list[Tensor]:
    low = torch.floor((-t - rule.left - _MARGIN) / h)
    high = torch.where(t < rule.drop + 1.0, rule.right, rule.drop - t)
    n = int((torch.ceil(high / h) - low).max()) + 1
    x = (low + torch.arange(n, dtype=t.dtype).unsqueeze(1)) * h
    fall = _fall(x, t, h)
    sd = v.sqrt()
    z = (m - x) / sd
    density = fall * torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    dv = (density * z).sum(0) * (-0.5 / v)
    return [(fall * torch.special.ndtr(z)).sum(0), density.sum(0) / sd, dv]
