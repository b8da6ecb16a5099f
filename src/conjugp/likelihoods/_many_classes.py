"""The predictive integral for many classes, its factors read from tables (P7–P9).

Relative to their values at some smaller λ the factors of (P1) are smooth functions of (m, v)
between 0 and 1. They are tabulated for every λ of the trapezoid rule, on nodes in m and v, and read
between them by Lagrange's formula. Reading is linear in the table, so the classes of a row are
first spread over the nodes; then all rows are two matrix products with constant matrices, whatever
C is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._numerics.expectations import logistic_moments
from conjugp.likelihoods._lambda_integral import EXACT, ROUGH, lambda_integral, shifted

MANY = 64  # from this many classes on, tables,
MANY_SHARED = 8  # and from this many on where a row has one variance
ERROR = 2.5e-6  # what reading between nodes can do to all probabilities of a row together (P9)

_H = 0.5  # step in t = log λ: the rule errs by about exp(−π²/h) = 3e-9
_TILE = 16  # values of t at a time
_TILES = 40  # tiles from t = 0 on; rows that need more are left to the exact integral
_SOFT = 3  # the tile from which on σ(f) = e^f for all that matters
_BEGIN = -14.0  # log λΣE[σ] at the first t: before it the integrand is λE[σ]
_DONE = 1e-11  # mass left when to stop
_POINTS = 8  # of Lagrange's formula, in each direction
_DX, _DU = 0.15, 0.15  # steps between nodes
_LARGEST = 225.0  # largest variance in the tables
_KNEE = 0.01  # in v: below it nodes are equidistant, above it in log v, later in √v
_HIGH = 20.0  # above this many √(1+v) σ is 1 to 2e-9, or F is 0
_FIRST = math.floor(-26.0 / _DX)  # the lowest node in x: factors there are their limits
_FLAT = 16.0  # a class whose λσ stays below e^−FLAT has factors 1
_PAIRS = 2**15  # (row, class) pairs at a time
_ROWS = 256  # rows at a time
_UNDERFLOW = 12.0  # more than log(−log F/λ) − log(G/F) can be where F is a number
_STEP = 1.7  # width of the normal distribution function that stands in for σ


class Probabilities(NamedTuple):
    """Predictive probabilities, and a bound on Σ|error| for every row."""

    p: Tensor  # (B, C)
    error: Tensor  # (B,)


def predictive(m: Tensor, v: Tensor, softmax: bool = False, rough: bool = False) -> Tensor:
    """E[p(· | f)] for f ~ N(m, v), float64, rows sum to 1: the exact integral or the tables.

    A rough one has four digits, and makes no tables for single rows.
    """
    C = m.shape[-1]
    if C < MANY_SHARED or (rough and C < MANY and v.stride(-1) != 0):
        return lambda_integral(m, v, softmax, ROUGH if rough else EXACT)
    # Row by row, so that a row's answer does not depend on the others.
    tables = _shared(_columns(v)) | (C >= MANY)
    if bool(tables.all()):
        return many_class_integral(m, v, softmax).p
    p = torch.empty_like(m, dtype=torch.float64)
    p[tables] = many_class_integral(m[tables], v[tables], softmax).p
    p[~tables] = lambda_integral(m[~tables], v[~tables], softmax)
    return p


@torch.no_grad()
def many_class_integral(m: Tensor, v: Tensor, softmax: bool = False) -> Probabilities:
    """E[σ_k/Σσ], or the softmax's, for f ~ N(m, v): (B, C) -> (B, C) and a bound (P8, P9).

    Rows beyond the tables (a variance above 225, or λ beyond e^300) get the exact integral.
    """
    m, v = m.detach().double(), _columns(v.detach()).double()
    low = shifted(m, v, softmax)
    p, error = torch.empty_like(m), m.new_full(m.shape[:1], ERROR)
    left = ~(torch.isfinite(low).all(-1) & ((v >= 0.0) & (v <= _LARGEST)).all(-1))
    shared = _shared(v)
    for one in (True, False):
        rows = (~left & (shared == one)).nonzero().squeeze(1)
        # Rows alike go together: they use the same part of the tables.
        key = torch.floor(2.0 * _u(v[rows].amax(-1))) * 1e4 + low[rows].amax(-1).clamp(-4e3, 4e3)
        size = max(1, min(_ROWS, _PAIRS // m.shape[-1]))
        for i in rows[torch.argsort(key)].split(size) if len(rows) else ():
            p[i], done = _integrate(low[i], v[i, :1] if one else v[i])
            left[i] = ~done
    mass = p.sum(-1)
    error += (mass - 1.0).abs()
    p /= mass[:, None]
    left |= ~(error <= 2.0 * ERROR)  # NaN too
    if bool(left.any()):
        p[left] = lambda_integral(m[left], v.expand_as(m)[left], softmax)
        error[left] = ERROR
    return Probabilities(p, error)


def _columns(v: Tensor) -> Tensor:
    """One column of what was expanded from one, otherwise all."""
    return v[:, :1] if v.stride(-1) == 0 else v


def _shared(v: Tensor) -> Tensor:
    """Rows with one variance for all classes."""
    return (v == v[:, :1]).all(-1)


def _integrate(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(n, C), not normalised, and whether the integral came to its end, (n,) (P8)."""
    p, left = torch.zeros_like(m), m.new_ones(len(m), 1)
    at = _lagrange(_u(v) / _DU, lowest=0)
    nodes = _Nodes(m, v, at, 0)
    total = nodes.scale.sum(-1, keepdim=True)
    first = math.floor((_BEGIN - math.log(float(total.max()))) / (_TILE * _H))
    for tile in range(first, _TILES):
        if tile > 0:
            # Far from λ = 0 factors are compared with those at the beginning of the tile.
            p += nodes.probabilities()
            nodes = _Nodes(m, v, at, tile)
        left = nodes.advance(tile, tile == first, left)
        if not bool(left.any()):
            break
    return p + nodes.probabilities(), left[:, 0] == 0.0


class _Nodes:
    """Some rows on the nodes of one or several tiles.

    ``scale`` and ``ratio``, (n, C), are what −log F/λ and G/F are compared with. From t = 24 on
    σ(f) = e^f wherever e^{−λσ} is not 0, so all later tiles are the same but for a shift.
    """

    def __init__(self, m: Tensor, v: Tensor, at: tuple[Tensor, Tensor], tile: int) -> None:
        self.n, self.device = len(m), m.device
        self.shared = v.shape[-1] == 1
        s = torch.sqrt(1.0 + v)
        y = m + tile * _TILE * _H
        low = _FIRST * _DX * s
        x = torch.minimum(torch.maximum(y, low), _HIGH * s) / s
        j, self.w = _lagrange(x / _DX, lowest=_FIRST)
        l, self.a = at
        # The part of the tables that these rows need.
        self.j0, self.l0 = int(j.min()), int(l.min())
        self.J = int(j.max()) + _POINTS - self.j0
        self.V = int(l.max()) + _POINTS - self.l0
        rows = torch.arange(self.n, device=m.device)[:, None]
        # With one variance for a row, nodes in v are settled row by row before those in x.
        self.corner = (rows if self.shared else rows * self.V + l - self.l0) * self.J + j - self.j0
        if self.shared:
            self.dense = m.new_zeros(self.n, self.V)
            for i in range(_POINTS):
                self.dense.scatter_(1, l - self.l0 + i, self.a[i])
        # Below the lowest node both scales are E[σ] = e^{m + v/2}.
        below = (y - low).clamp_max_(0.0)
        table = self._table(_scale, tile)
        self.scale = torch.exp(self._read(table[0].expand(self.n, -1, -1)) + below)
        self.ratio = self.scale
        if tile > 0:
            self.ratio = torch.exp(self._read(table[1].expand(self.n, -1, -1)) + below)
        self.W = self._spread(self.scale).view(self.n, -1)
        self.total = self.scale.sum(-1, keepdim=True)
        self.R, self.r = torch.zeros_like(self.W), torch.zeros_like(self.total)

    def advance(self, tile: int, first: bool, left: Tensor) -> Tensor:
        """Add a tile to the integral; the mass still to come, before and after it, is (n, 1)."""
        lam = torch.exp(_times(min(tile, _SOFT), self.device))
        log_f, ratio = self._table(_slice, tile).flatten(1, 2)
        product = torch.exp(-lam * (self.total + self.W @ log_f))
        # Rows that have come to their end lie where the tables hold no numbers any more.
        product = torch.where(left > 0.0, product, torch.zeros_like(product))
        density = _H * lam * product
        if first:
            # The stretch below the first t is a geometric series.
            density[:, 0] /= -math.expm1(-_H)
        self.r += density.sum(-1, keepdim=True)
        self.R.addmm_(density, ratio.T)
        return torch.where(product[:, -1:] > _DONE, product[:, -1:], torch.zeros_like(left))

    def probabilities(self) -> Tensor:
        """What the tiles so far give every class, (n, C)."""
        return self.ratio * (self.r + self._read(self.R.view(self.n, self.V, self.J)))

    def _table(self, of: Callable[[int, int, torch.device], Tensor], tile: int) -> Tensor:
        """The part of the tables that these rows need, (2, V, J) or (2, V, J, T)."""
        start = self.j0 - _FIRST
        tile = min(tile, _SOFT)
        parts = [of(l, tile, self.device) for l in range(self.l0, self.l0 + self.V)]
        return torch.stack([one[:, start : start + self.J] for one in parts], 1)

    def _read(self, table: Tensor) -> Tensor:
        """Between the nodes of (n, V, J): (n, C)."""
        if self.shared:
            return self._read_x((self.dense[:, None] @ table).reshape(-1))
        flat, out = table.reshape(-1), torch.zeros_like(self.a[0])
        for i in range(_POINTS):
            out.addcmul_(self.a[i], self._read_x(flat[i * self.J :]))
        return out

    def _read_x(self, flat: Tensor) -> Tensor:
        out = torch.zeros_like(self.w[0])
        for i in range(_POINTS):
            out.addcmul_(self.w[i], flat[i:].take(self.corner))
        return out

    def _spread(self, x: Tensor) -> Tensor:
        """Sums over the classes of x (n, C) at every node, as reading weighs them: (n, V, J)."""
        index, V = self.corner.reshape(-1), 1 if self.shared else self.V
        out = x.new_zeros(self.n * V * self.J)
        for i in range(1 if self.shared else _POINTS):
            part = x if self.shared else x * self.a[i]
            for k in range(_POINTS):
                out[i * self.J + k :].scatter_add_(0, index, (part * self.w[k]).reshape(-1))
        out = out.view(self.n, V, self.J)
        return self.dense[..., None] * out if self.shared else out


def _lagrange(position: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """First of the eight nodes about a position, and their weights; the step is 1."""
    first = (torch.floor(position) - (_POINTS // 2 - 1)).clamp_min_(lowest)
    x = position - first - 0.5 * (_POINTS - 1)
    powers = torch.ones(_POINTS, *x.shape, dtype=x.dtype, device=x.device)
    for i in range(1, _POINTS):
        torch.mul(powers[i - 1], x, out=powers[i])
    weights = _coefficients(x.device) @ powers.view(_POINTS, -1)
    return first.long(), weights.view(_POINTS, *x.shape)


@lru_cache(maxsize=8)
def _coefficients(device: torch.device) -> Tensor:
    """Powers of the distance from the middle to Lagrange's weights."""
    nodes = torch.arange(_POINTS, dtype=torch.float64) - 0.5 * (_POINTS - 1)
    return torch.linalg.inv(torch.linalg.vander(nodes).T).to(device)


# --- Tables ---------------------------------------------------------------------------------


def _u(v: Tensor) -> Tensor:
    """The scale on which nodes in v are equidistant."""
    return torch.log1p(v / _KNEE) + 0.5 * (torch.sqrt(1.0 + v) - 1.0)


@cache
def _variance(l: int) -> float:
    """The l-th node in v, by Newton's method: u is concave, so it is approached from below."""
    v = 0.0
    for _ in range(60):
        u = math.log1p(v / _KNEE) + 0.5 * (math.sqrt(1.0 + v) - 1.0)
        v += (l * _DU - u) / (1.0 / (v + _KNEE) + 0.25 / math.sqrt(1.0 + v))
    return v


def _x(device: torch.device) -> Tensor:
    """Nodes in x = (m + t₀)/√(1+v), t₀ the beginning of a tile from t = 0 on, else 0."""
    high = math.floor(_HIGH / _DX) + _POINTS // 2
    return torch.arange(_FIRST, high + 1, dtype=torch.float64, device=device) * _DX


def _times(tile: int, device: torch.device) -> Tensor:
    """The values of t of a tile, (T,)."""
    return (tile * _TILE + torch.arange(_TILE, dtype=torch.float64, device=device)) * _H


def _means(l: int, tile: int, device: torch.device) -> Tensor:
    """m at the nodes in x."""
    return _x(device) * math.sqrt(1.0 + _variance(l)) - max(tile, 0) * _TILE * _H


def _moments(l: int, m: Tensor, t: Tensor) -> tuple[Tensor, Tensor, int]:
    """log(−log F/λ) and log(G/F), and the number of nodes below which both are log E[σ].

    The first two are (J, T), for the nodes from that one on.
    """
    v = _variance(l)
    flat = int((m + v + 5.5 * math.sqrt(v) < -float(t[-1]) - _FLAT).sum())
    F, rest, G = (_narrow if v < 1.0 else _wide)(m[flat:], v, t)
    log_f = torch.where(rest < 0.5, torch.log1p(-rest.clamp_max(0.5)), torch.log(F))
    scale = torch.log(-log_f) - t
    # G/F is at most −log F/λ, because −log F is concave in λ; far below it F has underflowed.
    ratio = torch.maximum(torch.minimum(torch.log(G) - log_f - t, scale), scale - _UNDERFLOW)
    return scale, ratio, flat


@lru_cache(maxsize=512)
def _scale(l: int, tile: int, device: torch.device) -> Tensor:
    """log(−log F/λ) and log(G/F) at the beginning of a tile, or at λ = 0 up to tile 0: (2, J)."""
    m = _means(l, tile, device)
    out = logistic_moments(m, torch.full_like(m, _variance(l))).log_mean.repeat(2, 1)
    if tile > 0 and l > 0:
        scale, ratio, flat = _moments(l, m, _times(tile, device)[:1])
        out[0, flat:], out[1, flat:] = scale[:, 0], ratio[:, 0]
    return out


@lru_cache(maxsize=1024)
def _slice(l: int, tile: int, device: torch.device) -> Tensor:
    """−log F/λ and G/F relative to their scales, less 1, at nodes in x and t: (2, J, T) (P7)."""
    m = _means(l, tile, device)
    out = torch.zeros(2, len(m), _TILE, dtype=torch.float64, device=device)
    if l == 0:
        return out  # without variance both are σ
    log_f, ratio, flat = _moments(l, m, _times(tile, device))
    scales = _scale(l, max(tile, 0), device)[:, flat:, None]
    out[0, flat:] = torch.expm1(log_f - scales[0])
    out[1, flat:] = torch.expm1(ratio - scales[1])
    return out


def _narrow(m: Tensor, v: float, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F, 1 − F and λG on standardised nodes, (J, T) each."""
    z = torch.arange(-15, 19, dtype=m.dtype, device=m.device) * 0.45
    w = torch.exp(-0.5 * z * z)
    w /= w.sum()
    log_s = torch.nn.functional.logsigmoid(m[:, None] + math.sqrt(v) * z)
    scaled = torch.exp((log_s[:, None, :] + t[:, None]).clamp_max_(50.0))
    survive = torch.exp(-scaled)
    return (survive @ w).clamp_min_(1e-290), -torch.expm1(-scaled) @ w, (scaled * survive) @ w


def _wide(m: Tensor, v: float, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for v ≥ 1 on nodes in f, F by parts, all with relative precision."""
    sd, h = math.sqrt(v), 0.4
    low = math.floor(min(float(m[0]) + v - 7.0 * sd, float(m[0]) - 22.0) / h)
    x = torch.arange(low, math.ceil(_HIGH / h) + 1, dtype=m.dtype, device=m.device) * h
    scaled = torch.exp((t[:, None] + torch.nn.functional.logsigmoid(x)).clamp_max_(50.0))
    survive = torch.exp(-scaled)
    lam = torch.exp(t.clamp_max(50.0))
    end = torch.exp(-lam)
    fall = h * scaled * torch.sigmoid(-x) * survive
    bump = h * (scaled * survive - (lam * end)[:, None] * _normal_cdf(x / _STEP))
    z = (x - m[:, None]) / sd
    F = torch.addmm(end[None], _normal_cdf(z), fall.T)
    rest = _normal_cdf(-z) @ fall.T
    density = torch.exp(-0.5 * z * z) / (sd * math.sqrt(2.0 * math.pi))
    step = _normal_cdf(m / math.sqrt(v + _STEP**2))
    G = torch.addmm(step[:, None] * (lam * end), density, bump.T)
    return F.clamp_min_(1e-290), rest, G.clamp_min_(0.0)


def _normal_cdf(z: Tensor) -> Tensor:
    """Φ with relative precision, which torch.special.ndtr does not have far below 0."""
    return 0.5 * torch.erfc(z * -math.sqrt(0.5))
