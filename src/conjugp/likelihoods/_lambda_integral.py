"""Predictive probabilities of the logistic-softmax as one-dimensional integrals (P1, P2).

p_k = ∫₀^∞ E[σ_k e^{−λσ_k}] ∏_{c≠k} E[e^{−λσ_c}] dλ, the trapezoid rule in t = log λ. Every
inner expectation is again a trapezoid rule, in f, with nodes where e^{−λσ(f)} falls from 1 to
e^−λ. Those nodes do not depend on the row, so for v ≥ ¼ all inner expectations of a stretch of t
are one matrix product; narrow Gaussians use standardised nodes instead. Stretches follow one
another until ∏E[e^{−λσ}], which is the probability mass still to come, has vanished. The expected
entropy of p(· | f) is an integral of the same kind (U3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_TAIL = 20.0  # e^{−λσ(f)} is flat below −t − TAIL and above TAIL,
_DROP = 5.0  # and, where t ≥ DROP, above −t + DROP, where it is e^−70 or less
_EDGE = 0.75  # width of the normal distribution functions between there and the nodes,
_REACH = 6.0 * _EDGE  # and how far they go
_DONE = 1e-11  # mass left when to stop
_SOFT = -20.0  # latents all below this: σ(f) = e^f to 2e-9, and probabilities ignore a shift
_LARGEST = 1e8  # variances beyond it are taken for it: the work grows with √v
_ELEMENTS = 2048  # (row, class) pairs at a time


class Rule(NamedTuple):
    """How fine the integrals are."""

    step: float  # in t and in f
    tile: int  # values of t at a time
    narrow: float  # below this variance the step in f is too coarse
    z_step: float  # of standardised nodes,
    z_count: int  # and how many are on either side of 0

    def narrow_nodes(self) -> tuple[Tensor, Tensor]:
        """Standardised nodes and their weights."""
        z = torch.arange(-self.z_count, self.z_count + 1, dtype=torch.float64) * self.z_step
        w = torch.exp(-0.5 * z * z)
        return z, w / w.sum()


EXACT = Rule(0.5, 32, 0.25, 0.75, 8)  # the rules in t and f err by about exp(−π²/h) = 3e-9
ROUGH = Rule(0.8, 24, 0.5, 1.0, 5)  # every probability to four digits, in a third of the time


@torch.no_grad()
def lambda_integral(m: Tensor, v: Tensor, softmax: bool = False, rule: Rule = EXACT) -> Tensor:
    """E[σ_k / Σσ] for f ~ N(m, v): (B, C) -> (B, C), float64, rows sum to 1 (P1).

    The softmax is the same of latents so low that σ(f) = e^f, as (M2) has it (L4).
    """
    return _in_chunks(_probabilities, m, v, softmax, rule)


@torch.no_grad()
def lambda_entropy(m: Tensor, v: Tensor, softmax: bool = False) -> Tensor:
    """E[H[p(· | f)]], p_k = σ_k/Σσ or e^f_k/Σe^f: (B, C) -> (B,), nats, float64 (L4, U3)."""
    return _in_chunks(_entropy, m, v, softmax)


def shifted(m: Tensor, v: Tensor, softmax: bool) -> Tensor:
    """Means of rows below −20 moved up to there, or for the softmax those of all rows moved there.

    Down there σ(f) = e^f, so the logistic-softmax is the softmax and ignores a shift.
    """
    m = m.detach().double()
    shift = _SOFT - (m + 6.0 * v.detach().double().sqrt()).amax(-1, keepdim=True)
    return m + (shift if softmax else shift.clamp_min(0.0))


def _in_chunks(
    of: Callable[[Tensor, Tensor, float, Rule], Tensor],
    m: Tensor,
    v: Tensor,
    softmax: bool,
    rule: Rule = EXACT,
) -> Tensor:
    """`of` means, variances and the lowest log Σσ that matters, for some rows at a time."""
    v = v.detach().double().clamp_max(_LARGEST)
    m = shifted(m, v, softmax)
    # Rows alike go together: where the product of F vanishes, roughly.
    order = torch.argsort((m - 5.0 * v.sqrt()).clamp_max(0.0).amax(-1))
    rows = max(1, _ELEMENTS // m.shape[-1])
    found = torch.cat([of(m[i], v[i], _SOFT if softmax else 0.0, rule) for i in order.split(rows)])
    return torch.empty_like(found).index_copy_(0, order, found)


def _probabilities(m: Tensor, v: Tensor, level: float, rule: Rule) -> Tensor:
    p = torch.zeros_like(m)
    for tile in _tiles(m, v, level, rule):
        p += tile.share.sum(-1)
    p.clamp_min_(torch.finfo(p.dtype).tiny)
    return p / p.sum(-1, keepdim=True)


def _entropy(m: Tensor, v: Tensor, level: float, rule: Rule) -> Tensor:
    """E[log Σσ] − Σ_k E[p_k log σ_k] (U3)."""
    h = rule.step
    t = _start(m, level) + torch.arange(64, dtype=m.dtype, device=m.device) * h
    log_total = torch.exp(-torch.exp(t + level)).sum().expand(len(m)).clone()
    log_own, mass, left = (torch.full_like(log_total, x) for x in (0.0, 0.0, 1.0))
    for i, tile in enumerate(_tiles(m, v, level, rule, logs=True)):
        assert tile.log_share is not None
        log_total -= left * tile.product.sum(-1)
        log_own += left * tile.log_share.sum((-2, -1))
        mass += left * tile.share.sum((-2, -1))
        # A row comes to its own end, whichever others are asked for.
        left = left * (tile.product[:, -1] > _DONE)
        if i == 0:
            # Below the first t the integrand is λ(Σ E[σ] − e^level).
            series = math.exp(-h) / -math.expm1(-h)
            sigma = tile.share[..., 0].sum(-1) * -math.expm1(-h)
            log_total += series * (sigma - torch.exp(t[0] + level))
    # The mass is 1 but for the error of the rule, which log_own shares.
    # A difference of numbers of the size of the means: rounding may leave less than nothing.
    return (level + h * log_total - log_own / mass).clamp_min_(0.0)


class _Tile(NamedTuple):
    """A stretch of t: ∏F (n, T), and the integrands of p_k and E[p_k log σ_k], (n, C, T)."""

    product: Tensor
    share: Tensor
    log_share: Tensor | None


def _start(m: Tensor, level: float) -> float:
    """Where the rule in t = log λ begins: before it Σσ, which e^level·C bounds, does nothing."""
    return -10.0 - math.log(m.shape[-1]) - level


def _tiles(m: Tensor, v: Tensor, level: float, rule: Rule, logs: bool = False) -> Iterator[_Tile]:
    """Stretches of t until nothing is left to come; `logs` asks for the third integrand."""
    wide = v.reshape(-1) >= rule.narrow
    parts = [_Wide(m, v, wide, rule), _Narrow(m, v, ~wide, rule)]
    steps = torch.arange(rule.tile, dtype=m.dtype, device=m.device) * rule.step
    F = m.new_empty(m.numel(), rule.tile)
    inner = [torch.empty_like(F) for _ in range(2 if logs else 1)]
    start, first = _start(m, level), True
    while True:
        for part in parts:
            part.fill(start + steps, F, *inner)
        log_f = torch.log(F.clamp_min_(1e-290)).view(*m.shape, rule.tile)
        product = torch.exp(log_f.sum(-2))
        shares = [torch.div(G, F).view(*m.shape, rule.tile).mul_(product[:, None]) for G in inner]
        if first:
            # The stretch below the first t is a geometric series: λG is λE[σ] there.
            for share in shares:
                share[..., 0] /= -math.expm1(-rule.step)
            first = False
        yield _Tile(product, shares[0], shares[1] if logs else None)
        # Written so that NaN, which is the caller's, ends the loop.
        if not bool((product[..., -1] > _DONE).any()):
            return
        start += rule.tile * rule.step


class _Wide:
    """F = E[e^{−λσ}], λG = E[λσ e^{−λσ}] and λE[σ log σ e^{−λσ}] for wide Gaussians (P2, U3).

    Smooth steps share the line out: below the first node e^{−λσ} is 1 and λσ is λe^f, above the
    last one σ is 1, and the expectations of these are known. All terms are positive, so numbers
    as small as e^{−λ} or λE[σ] keep their digits.
    """

    def __init__(self, m: Tensor, v: Tensor, mask: Tensor, rule: Rule) -> None:
        self.step = rule.step
        self.index = slice(None) if bool(mask.all()) else mask.nonzero().squeeze(1)
        self.m, self.v = m.reshape(-1)[self.index], v.reshape(-1)[self.index]
        self.inverse_sd = torch.rsqrt(self.v)
        self.log_height = torch.log(self.inverse_sd * (self.step / math.sqrt(2.0 * math.pi)))
        self.inverse_width = torch.rsqrt(self.v + _EDGE**2)

    def fill(self, t: Tensor, F: Tensor, G: Tensor, L: Tensor | None = None) -> None:
        if not self.m.numel():
            return
        low, high = -float(t[-1]) - _TAIL, _DROP - float(t[0])
        ends = high > 0.0  # otherwise e^{−λσ} is 0 there
        high = _TAIL if ends else high
        first, last = low - _REACH, high + _REACH * ends
        h = self.step
        x = torch.arange(math.floor(first / h), math.ceil(last / h) + 1, device=t.device) * h
        x = x.to(t.dtype)
        log_s = torch.nn.functional.logsigmoid(x)
        scaled = torch.exp((t + log_s[:, None]).clamp_max(50.0))
        inside = torch.special.ndtr((x - low) / _EDGE)
        if ends:
            inside = inside * torch.special.ndtr((high - x) / _EDGE)
        survive = inside[:, None] * torch.exp(-scaled)
        z = (x - self.m[:, None]).mul_(self.inverse_sd[:, None])
        density = z.square_().mul_(-0.5).add_(self.log_height[:, None]).clamp_(min=-300.0).exp_()
        bump = survive * scaled
        below = (low - self.m) * self.inverse_width
        tilted = below - self.v * self.inverse_width
        log_tail = torch.special.log_ndtr(tilted)
        # λE[σ] below the nodes, for the first λ; both factors may be out of range.
        mean = torch.exp(self.m + 0.5 * self.v + log_tail + t[0])
        growth = torch.exp(t - t[0])
        f, g = (density @ torch.cat([survive, bump], 1)).chunk(2, 1)
        f = f + torch.special.ndtr(below)[:, None]
        g = g.addcmul(mean[:, None], growth)
        if ends:
            above = torch.special.ndtr((self.m - high) * self.inverse_width)
            lam = torch.exp(t)
            end = above[:, None] * torch.exp(-lam)
            f, g = f + end, g.addcmul(end, lam)
        F[self.index], G[self.index] = f, g
        if L is not None:
            # Below the nodes σ log σ = f e^f, and f has a truncated normal's mean; above them 0.
            mills = torch.exp(-0.5 * tilted.square() - log_tail) / math.sqrt(2.0 * math.pi)
            lower = mean * (self.m + self.v - self.v * self.inverse_width * mills)
            L[self.index] = (density @ (bump * log_s[:, None])).addcmul_(lower[:, None], growth)


class _Narrow:
    """The same for narrow ones, on standardised nodes."""

    def __init__(self, m: Tensor, v: Tensor, mask: Tensor, rule: Rule) -> None:
        self.index = mask.nonzero().squeeze(1)
        m, v = m.reshape(-1)[self.index], v.reshape(-1)[self.index]
        z, self.w = (x.to(m) for x in rule.narrow_nodes())
        self.log_s = torch.nn.functional.logsigmoid(m[:, None] + v.sqrt()[:, None] * z)

    def fill(self, t: Tensor, F: Tensor, G: Tensor, L: Tensor | None = None) -> None:
        if not self.index.numel():
            return
        base = torch.exp((float(t[0]) + self.log_s).clamp_max_(50.0))
        scaled = base[:, None, :] * torch.exp(t - t[0])[:, None]
        survive = torch.exp(-scaled)
        F[self.index] = survive @ self.w
        density = survive.mul_(scaled)
        G[self.index] = density @ self.w
        if L is not None:
            L[self.index] = density.mul_(self.log_s[:, None, :]) @ self.w
