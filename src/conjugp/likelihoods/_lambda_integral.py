"""Predictive probabilities of the logistic-softmax as one-dimensional integrals (P1, P2).

p_k = ∫₀^∞ E[σ_k e^{−λσ_k}] ∏_{c≠k} E[e^{−λσ_c}] dλ, the trapezoid rule in t = log λ. Every
inner expectation is again a trapezoid rule, in f, with nodes where e^{−λσ(f)} falls from 1 to
e^−λ. Those nodes do not depend on the row, so for v ≥ ¼ all inner expectations of a stretch of t
are one matrix product; narrow Gaussians use standardised nodes instead. Stretches follow one
another until ∏E[e^{−λσ}], which is the probability mass still to come, has vanished.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["lambda_integral", "shifted", "softmax_integral"]

_H = 0.5  # step in t and in f: both rules err by about exp(−π²/h) = 3e-9
_TILE = 32  # values of t at a time
_TAIL = 20.0  # e^{−λσ(f)} is flat below −t − TAIL and above TAIL,
_DROP = 5.0  # and, where t ≥ DROP, above −t + DROP, where it is e^−70 or less
_EDGE = 0.75  # width of the normal distribution functions between there and the nodes,
_REACH = 6.0 * _EDGE  # and how far they go
_NARROW = 0.25  # below this variance the step in f is too coarse
_DONE = 1e-11  # mass left when to stop
_SOFT = -20.0  # latents all below this: σ(f) = e^f to 2e-9, and probabilities ignore a shift
_LARGEST = 1e8  # variances beyond it are taken for it: the work grows with √v
_ELEMENTS = 2048  # (row, class) pairs at a time


@torch.no_grad()
def lambda_integral(m: Tensor, v: Tensor) -> Tensor:
    """E[σ_k / Σσ] for f ~ N(m, v): (B, C) -> (B, C), float64, rows sum to 1 (P1)."""
    v = v.detach().double().clamp_max(_LARGEST)
    return _in_chunks(shifted(m, v, False), v, -10.0 - math.log(m.shape[-1]))


@torch.no_grad()
def softmax_integral(m: Tensor, v: Tensor) -> Tensor:
    """E[e^f_k / Σe^f] for f ~ N(m, v): latents so low that σ(f) = e^f, as (M2) has it (L4)."""
    v = v.detach().double().clamp_max(_LARGEST)
    # Below λ = e^−SOFT/C nothing has happened yet.
    return _in_chunks(shifted(m, v, True), v, -10.0 - math.log(m.shape[-1]) - _SOFT)


def shifted(m: Tensor, v: Tensor, softmax: bool) -> Tensor:
    """Means of rows below −20 moved up to there, or for the softmax those of all rows moved there.

    Down there σ(f) = e^f, so the logistic-softmax is the softmax and ignores a shift.
    """
    m = m.detach().double()
    shift = _SOFT - (m + 6.0 * v.detach().double().sqrt()).amax(-1, keepdim=True)
    return m + (shift if softmax else shift.clamp_min(0.0))


def _in_chunks(m: Tensor, v: Tensor, start: float) -> Tensor:
    """Rows alike go together; the rule in t = log λ begins at `start`."""
    # Where the product of F vanishes, roughly.
    order = torch.argsort((m - 5.0 * v.sqrt()).clamp_max(0.0).amax(-1))
    p = torch.empty_like(m)
    rows = max(1, _ELEMENTS // m.shape[-1])
    for k in range(0, len(order), rows):
        i = order[k : k + rows]
        p[i] = _chunk(m[i], v[i], start)
    return p


def _chunk(m: Tensor, v: Tensor, start: float) -> Tensor:
    p = torch.zeros_like(m)
    wide = v.reshape(-1) >= _NARROW
    parts = [_Wide(m, v, wide), _Narrow(m, v, ~wide)]
    steps = torch.arange(_TILE, dtype=m.dtype, device=m.device) * _H
    F = m.new_empty(m.numel(), _TILE)
    G = torch.empty_like(F)
    first = True
    while True:
        t = start + steps
        for part in parts:
            part.fill(t, F, G)
        log_f = torch.log(F.clamp_min_(1e-290)).view(*m.shape, _TILE)
        product = torch.exp(log_f.sum(-2, keepdim=True))
        share = torch.div(G, F).view(*m.shape, _TILE).mul_(product)
        if first:
            # The stretch below the first t is a geometric series: λG is λE[σ] there.
            share[..., 0] /= -math.expm1(-_H)
            first = False
        p += share.sum(-1)
        # Written so that NaN, which is the caller's, ends the loop.
        if not bool((product[..., -1] > _DONE).any()):
            break
        start += _TILE * _H
    p.clamp_min_(torch.finfo(p.dtype).tiny)
    return p / p.sum(-1, keepdim=True)


class _Wide:
    """F = E[e^{−λσ}] and λG = E[λσ e^{−λσ}] for v ≥ ¼ (P2).

    Smooth steps share the line out: below the first node e^{−λσ} is 1 and λσ is λe^f, above the
    last one σ is 1, and the expectations of these are known. All terms are positive, so numbers
    as small as e^{−λ} or λE[σ] keep their digits.
    """

    def __init__(self, m: Tensor, v: Tensor, mask: Tensor) -> None:
        self.index = None if bool(mask.all()) else mask.nonzero().squeeze(1)
        m, v = m.reshape(-1), v.reshape(-1)
        self.m, self.v = (m, v) if self.index is None else (m[self.index], v[self.index])
        self.inverse_sd = torch.rsqrt(self.v)
        self.log_height = torch.log(self.inverse_sd * (_H / math.sqrt(2.0 * math.pi)))
        self.inverse_width = torch.rsqrt(self.v + _EDGE**2)

    def fill(self, t: Tensor, F: Tensor, G: Tensor) -> None:
        if not self.m.numel():
            return
        low, high = -float(t[-1]) - _TAIL, _DROP - float(t[0])
        ends = high > 0.0  # otherwise e^{−λσ} is 0 there
        high = _TAIL if ends else high
        first, last = low - _REACH, high + _REACH * ends
        x = torch.arange(math.floor(first / _H), math.ceil(last / _H) + 1, device=t.device) * _H
        x = x.to(t.dtype)
        lam = torch.exp(t.clamp_max(50.0))
        scaled = torch.exp((t + torch.nn.functional.logsigmoid(x)[:, None]).clamp_max(50.0))
        inside = torch.special.ndtr((x - low) / _EDGE)
        if ends:
            inside = inside * torch.special.ndtr((high - x) / _EDGE)
        survive = inside[:, None] * torch.exp(-scaled)
        z = (x - self.m[:, None]).mul_(self.inverse_sd[:, None])
        density = z.square_().mul_(-0.5).add_(self.log_height[:, None]).clamp_(min=-300.0).exp_()
        f, g = (density @ torch.cat([survive, survive * scaled], 1)).chunk(2, 1)
        below = (low - self.m) * self.inverse_width
        f += torch.special.ndtr(below)[:, None]
        tail = torch.special.log_ndtr(below - self.v * self.inverse_width)
        g = g.addcmul(torch.exp(self.m + 0.5 * self.v + tail)[:, None], lam)
        if ends:
            end = (
                torch.special.ndtr((self.m - high) * self.inverse_width)[:, None] * lam.neg().exp()
            )
            f, g = f + end, g.addcmul(end, lam)
        if self.index is None:
            F.copy_(f)
            G.copy_(g)
        else:
            F[self.index] = f
            G[self.index] = g


def narrow_nodes() -> tuple[Tensor, Tensor]:
    """Standardised nodes and their weights."""
    z = torch.arange(-8, 9, dtype=torch.float64) * 0.75
    w = torch.exp(-0.5 * z * z)
    return z, w / w.sum()


class _Narrow:
    """The same for v < ¼, on standardised nodes."""

    def __init__(self, m: Tensor, v: Tensor, mask: Tensor) -> None:
        self.index = mask.nonzero().squeeze(1)
        m, v = m.reshape(-1)[self.index], v.reshape(-1)[self.index]
        z, self.w = (x.to(m) for x in narrow_nodes())
        self.log_s = torch.nn.functional.logsigmoid(m[:, None] + v.sqrt()[:, None] * z)

    def fill(self, t: Tensor, F: Tensor, G: Tensor) -> None:
        if not self.index.numel():
            return
        base = torch.exp((float(t[0]) + self.log_s).clamp_max_(50.0))
        scaled = base[:, None, :] * torch.exp(t - t[0])[:, None]
        survive = torch.exp(-scaled)
        F[self.index] = survive @ self.w
        G[self.index] = survive.mul_(scaled) @ self.w
