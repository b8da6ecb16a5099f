"""The sites of the tight bound as one compiled call: `LogisticSoftmax.expectation` and its sums.

The formulas and rules are those of `numerics` and `likelihoods.logistic_softmax`, in float64. No
node of a rule needs an exponential of its own: for v < 1 e^−f falls by a factor from node to node,
for v ≥ 1 the density does, and that factor by another. Loops run over a block of elements inside
and over nodes outside, which is what LLVM turns into vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from scipy.special import erfcx
from torch import Tensor

from conjugp._inference.passes import Sites
from conjugp._inference.svi import MIN_PRECISION
from conjugp._numerics.expectations import STEP, rule_tables
from conjugp._numerics.jit import OPTIONS, compiled

Array = NDArray[np.float64]

_N = 64  # elements of a block
_UNROLL = 4  # nodes at a time
# Exponents below count for nothing, and numbers never get near to subnormal ones.
_FAR = -600.0
_LEAST = math.exp(-610.0)

# --- functions that vectorise -----------------------------------------------------------------

_LOG2_E = math.log2(math.e)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ROUND = 1.5 * 2.0**52  # adding this leaves an integer in the last bits
_BIAS = 1023 << 52
_ROOT_HALF = np.float64(math.sqrt(0.5)).view(np.int64).item()
_EXP = tuple(1 / math.factorial(i) for i in range(12, -1, -1))
_LOG = tuple(2 / i for i in range(21, 0, -2))
_CENTRE = 3.75  # (1 + 2z) erfcx(z) is smooth in (z − centre)/(z + centre)


def _of_ratio(t: Array) -> Any:
    z = _CENTRE * (1 + t) / (1 - t)
    return np.where(z < 1e15, (1 + 2 * z) * erfcx(z), 2 / math.sqrt(math.pi))


_POWERS = chebyshev.cheb2poly(chebyshev.chebinterpolate(_of_ratio, 19))[::-1].tolist()
_ODD, _EVEN = tuple(_POWERS[::2]), tuple(_POWERS[1::2])


@njit(**OPTIONS)
def _exp(x: float) -> float:
    """e^x for x up to 700, and from −700 down as there."""
    x = x if x > -700.0 else -700.0
    t = x * _LOG2_E + _ROUND
    n = t - _ROUND
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = _EXP[0]
    for i in range(1, 13):
        p = p * r + _EXP[i]
    return p * np.int64((np.float64(t).view(np.int64) << 52) + _BIAS).view(np.float64)


@njit(**OPTIONS)
def _log(x: float) -> float:
    """log x for x from 1."""
    bits = np.float64(x).view(np.int64)
    k = (bits - _ROOT_HALF) >> 52
    y = np.int64(bits - (k << 52)).view(np.float64)
    s = (y - 1.0) / (y + 1.0)
    s2 = s * s
    p = _LOG[0]
    for i in range(1, 11):
        p = p * s2 + _LOG[i]
    return p * s + k * math.log(2.0)


@njit(**OPTIONS)
def _erfcx(z: float) -> float:
    """e^z² erfc(z) for z from 0."""
    t = (z - _CENTRE) / (z + _CENTRE)
    t2 = t * t
    odd, even = _ODD[0], _EVEN[0]
    # In halves: LLVM would not unroll a loop twice as long.
    for i in range(1, 10):
        odd = odd * t2 + _ODD[i]
        even = even * t2 + _EVEN[i]
    return (odd * t + even) / (1.0 + 2.0 * z)


# --- the two rules, a block at a time ---------------------------------------------------------
#
# Rows of a block's array, which is flat: with offsets that are constants the loops vectorise.
_MEAN, _VAR, _PEAK, _S0, _S1, _S2 = (i * _N for i in range(6))
_UP, _DOWN, _UP_RATIO, _DOWN_RATIO, _FALL = (i * _N for i in range(6, 11))
_ROWS = 11


@njit(**OPTIONS)
def _narrow_start(x: Array, step: float, sign: float) -> None:
    """e^(sign·f) at the mean and the factors to the next nodes on both sides."""
    for i in range(_N):
        f = sign * x[_MEAN + i]
        x[_UP + i] = x[_DOWN + i] = _exp(f if f > _FAR else _FAR)
        s = step * math.sqrt(x[_VAR + i])
        x[_UP_RATIO + i], x[_DOWN_RATIO + i] = _exp(s), _exp(-s)


@njit(**OPTIONS)
def _narrow_moments(x: Array, step: float, w: Array) -> None:
    """E[σ], E[σ²] and E[σ³] for v < 1."""
    _narrow_start(x, step, -1.0)
    for i in range(_N):
        q = 1.0 / (1.0 + x[_UP + i])
        x[_S0 + i], x[_S1 + i], x[_S2 + i] = w[0] * q, w[0] * q * q, w[0] * q * q * q
    for k in range(1, len(w), 2):
        for i in range(_N):
            up, down = x[_UP + i], x[_DOWN + i]
            s0, s1, s2 = x[_S0 + i], x[_S1 + i], x[_S2 + i]
            for j in range(2):
                up *= x[_UP_RATIO + i]
                down *= x[_DOWN_RATIO + i]
                # One division for both sides.
                both = 1.0 / ((1.0 + up) * (1.0 + down))
                p, q = both * (1.0 + down), both * (1.0 + up)
                p2, q2 = p * p, q * q
                s0 += w[k + j] * (p + q)
                s1 += w[k + j] * (p2 + q2)
                s2 += w[k + j] * (p2 * p + q2 * q)
            x[_UP + i], x[_DOWN + i] = up, down
            x[_S0 + i], x[_S1 + i], x[_S2 + i] = s0, s1, s2


@njit(**OPTIONS)
def _narrow_softplus(x: Array, step: float, w: Array) -> None:
    """E[log(1 + e^f)] for v < 1."""
    _narrow_start(x, step, 1.0)
    for i in range(_N):
        x[_S0 + i] = w[0] * _log(1.0 + x[_UP + i])
    for k in range(1, len(w)):
        for i in range(_N):
            x[_UP + i] *= x[_UP_RATIO + i]
            x[_DOWN + i] *= x[_DOWN_RATIO + i]
            x[_S0 + i] += w[k] * _log((1.0 + x[_UP + i]) * (1.0 + x[_DOWN + i]))


@njit(**OPTIONS)
def _wide_side(x: Array, at: int, ratio_at: int, w: Array) -> None:
    """Add the nodes of one side, from the one next to zero outwards."""
    for k in range(1, len(w), _UNROLL):
        for i in range(_N):
            density, ratio, fall = x[at + i], x[ratio_at + i], x[_FALL + i]
            s0, s1, s2 = x[_S0 + i], x[_S1 + i], x[_S2 + i]
            for j in range(_UNROLL):
                density *= ratio
                density = density if density > _LEAST else _LEAST
                ratio *= fall
                s0 += w[k + j, 0] * density
                s1 += w[k + j, 1] * density
                s2 += w[k + j, 2] * density
            x[at + i], x[ratio_at + i] = density, ratio
            x[_S0 + i], x[_S1 + i], x[_S2 + i] = s0, s1, s2


@njit(**OPTIONS)
def _wide_sums(x: Array, step: float, above: Array, below: Array) -> None:
    """Three sums of weights times N(x; b, v) e^(b²/2v + peak) over nodes, peak ≤ 0, v ≥ 1.

    From node 0 outwards: the exponent there is `peak`, and where that is far below zero no node
    has weight.
    """
    for i in range(_N):
        inverse = 1.0 / x[_VAR + i]
        counts = x[_PEAK + i] > _FAR
        rate = step * x[_MEAN + i] * inverse if counts else 0.0
        density = _exp(x[_PEAK + i]) if counts else _LEAST
        fall = step * step * inverse
        x[_UP + i] = x[_DOWN + i] = density
        x[_UP_RATIO + i] = _exp(rate - 0.5 * fall)
        x[_DOWN_RATIO + i] = _exp(-rate - 0.5 * fall)
        x[_FALL + i] = _exp(-fall)
        x[_S0 + i] = above[0, 0] * density
        x[_S1 + i] = above[0, 1] * density
        x[_S2 + i] = above[0, 2] * density
    _wide_side(x, _UP, _UP_RATIO, above)
    _wide_side(x, _DOWN, _DOWN_RATIO, below)
    for i in range(_N):
        norm = math.sqrt(1.0 / x[_VAR + i] * (0.5 / math.pi))
        x[_S0 + i] *= norm
        x[_S1 + i] *= norm
        x[_S2 + i] *= norm


@njit(**OPTIONS)
def _split(v: Array, order: NDArray[np.int64]) -> int:
    """Write the elements below 1 from the front, the others from the back; how many are below."""
    low, high = 0, len(v)
    for i in range(len(v)):
        if v[i] < 1.0:
            order[low] = i
            low += 1
        else:
            high -= 1
            order[high] = i
    return low


@njit(**OPTIONS)
def _moments(b: Array, v: Array, found: Array, tables: Any) -> None:
    """`numerics._sums`: a scale and e^scale times E[σ], E[σ'], E[σ''] into found (4, n)."""
    narrow_step, narrow, wide_step, above, below = tables[:5]
    n = len(b)
    order, x = np.empty(n, dtype=np.int64), np.empty(_ROWS * _N)
    n_narrow = _split(v, order)
    for first, last in ((0, n_narrow), (n_narrow, n)):
        for start in range(first, last, _N):
            for i in range(_N):
                e = order[min(start + i, last - 1)]
                x[_MEAN + i], x[_VAR + i] = b[e], v[e]
            if last == n_narrow:
                _narrow_moments(x, narrow_step, narrow)
                for i in range(min(_N, last - start)):
                    e = order[start + i]
                    s0, s1, s2 = x[_S0 + i], x[_S1 + i], x[_S2 + i]
                    found[0, e] = 0.0
                    found[1, e] = s0
                    found[2, e] = s0 - s1
                    found[3, e] = s0 - s1 - 2.0 * (s1 - s2)
                continue
            for i in range(_N):
                mean = x[_MEAN + i]
                half = 0.5 * mean / x[_VAR + i]
                x[_PEAK + i] = -mean * half if mean > 0.0 else 0.0
            _wide_sums(x, wide_step, above, below)
            for i in range(_N):
                mean, inverse = x[_MEAN + i], 1.0 / x[_VAR + i]
                scale = 0.5 * mean * (mean * inverse) if mean < 0.0 else 0.0
                # E[Φ(f/step)], from the nearer side.
                z = mean / math.sqrt(2.0 * (x[_VAR + i] + STEP * STEP))
                near = 0.5 * _erfcx(abs(z)) * _exp(scale - z * z)
                x[_PEAK + i] = scale
                x[_S0 + i] += near if z < 0.0 else 1.0 - near
                x[_S2 + i] = (x[_S2 + i] - mean * x[_S1 + i]) * inverse
            for i in range(min(_N, last - start)):
                e = order[start + i]
                found[0, e] = x[_PEAK + i]
                found[1, e] = x[_S0 + i]
                found[2, e] = x[_S1 + i]
                found[3, e] = x[_S2 + i]


@njit(**OPTIONS)
def _softplus(a: Array, v: Array, found: Array, tables: Any) -> None:
    """E[log(1 + e^f)] of f ~ N(a, v), a ≤ 0 (`numerics.expected_log_sigmoid`)."""
    narrow_step, narrow, wide_step = tables[:3]
    above, below = tables[5:]
    n = len(a)
    order, x = np.empty(n, dtype=np.int64), np.empty(_ROWS * _N)
    n_narrow = _split(v, order)
    for first, last in ((0, n_narrow), (n_narrow, n)):
        for start in range(first, last, _N):
            for i in range(_N):
                e = order[min(start + i, last - 1)]
                x[_MEAN + i], x[_VAR + i] = a[e], v[e]
            if last == n_narrow:
                _narrow_softplus(x, narrow_step, narrow)
            else:
                for i in range(_N):
                    x[_PEAK + i] = -0.5 * x[_MEAN + i] * (x[_MEAN + i] / x[_VAR + i])
                _wide_sums(x, wide_step, above, below)
                for i in range(_N):
                    mean, width = x[_MEAN + i], math.sqrt(x[_VAR + i] + STEP * STEP)
                    z = mean / width
                    bell = _exp(-0.5 * z * z)
                    cdf = 0.5 * _erfcx(-z * math.sqrt(0.5)) * bell
                    x[_S0 + i] += mean * cdf + width * bell / math.sqrt(2.0 * math.pi)
            for i in range(min(_N, last - start)):
                found[order[start + i]] = x[_S0 + i]


# --- the bound --------------------------------------------------------------------------------


def _tight(
    y: Any, m: Any, mean: Any, v: Any, weight: Any, share: float, tables: Any, out: Any
) -> Any:
    """The weighted bound; r, dm, dv and the precision into `out` (`passes.Sites`, B8, B9)."""
    r, dm, dv, theta = out
    B, C = m.shape
    n = B * C
    a, b, var = np.empty(n), np.empty(n), np.empty(n)
    own_a, own_v, own_up = np.empty(B), np.empty(B), np.empty(B)
    bound = nothing = 0.0
    for i in range(B):
        if not 0 <= y[i] < C:
            raise IndexError("a label is not one of the classes")
        for c in range(C):
            e = i * C + c
            f, var[e] = np.float64(m[i, c] + mean[c]), v[i, c]
            nothing += 0.0 * f + 0.0 * var[e]  # NaN if something is
            a[e] = -abs(f)
            tilted = -(a[e] + var[e])
            b[e] = a[e] if a[e] > tilted else tilted
        f = np.float64(m[i, y[i]] + mean[y[i]])
        own_a[i], own_v[i], own_up[i] = -abs(f), var[i * C + y[i]], min(f, 0.0)
    found, softplus = np.empty((4, n)), np.empty(B)
    _moments(b, var, found, tables)
    _softplus(own_a, own_v, softplus, tables)
    log_scale, tail, slope, curvature = found[0], found[1], found[2], found[3]
    for e in range(n):
        half = a[e] + 0.5 * var[e]
        log_scale[e] = (half if half < 0.0 else 0.0) - log_scale[e]
        gap = tail[e] - 2.0 * slope[e] if b[e] > a[e] else 0.0
        slope[e] += gap
        curvature[e] += gap
    # Relative to the largest tail, or to 1 where a class is above zero: T may be too small to hold.
    unit, own_scale, log_unit = b, own_a, own_v
    for i in range(B):
        largest = -np.inf
        for c in range(C):
            s = 0.0 if m[i, c] + mean[c] > 0.0 else log_scale[i * C + c]
            largest = s if s > largest else largest
        log_unit[i] = largest
        own_scale[i] = log_scale[i * C + y[i]]
        for c in range(C):
            unit[i * C + c] = log_scale[i * C + c] - largest
    for e in range(n):
        unit[e] = _exp(unit[e])
    for i in range(B):
        own_scale[i] = _exp(own_scale[i])
    for i in range(B):
        total = 0.0
        for c in range(C):
            t = tail[i * C + c] * unit[i * C + c]
            total += 1.0 - t if m[i, c] + mean[c] > 0.0 else t
        w = np.float64(weight[i])
        bound += w * (own_up[i] - softplus[i] - log_unit[i] - math.log(total))
        own, inverse = i * C + y[i], 1.0 / total
        own_tail = own_scale[i] * tail[own]
        for c in range(C):
            e = i * C + c
            part, up = unit[e] * inverse, m[i, c] + mean[c] > 0.0
            d = -slope[e] * part
            precision = (-curvature[e] if up else curvature[e]) * part
            if c == y[i]:
                d += own_tail if up else 1.0 - own_tail
                precision += slope[e] * own_scale[i]
            dm[i, c] = d * w * share
            dv[i, c] = -0.5 * precision * w * share
            precision = precision if precision > MIN_PRECISION else MIN_PRECISION
            r[i, c] = (d + precision * m[i, c]) * w
            theta[i, c] = precision * w
    return bound + nothing


_TABLE = types.float64[:, ::1]
_WEIGHTS = types.float64[::1]
_TABLES = types.Tuple((types.float64, _WEIGHTS, types.float64, *[_TABLE] * 4))


@lru_cache(maxsize=2)
def _function(dtype: torch.dtype) -> Any:
    real = types.float32 if dtype == torch.float32 else types.float64
    matrix, vector = real[:, ::1], real[::1]
    labels, out = types.int64[::1], types.UniTuple(matrix, 4)
    arguments = (labels, matrix, vector, matrix, vector, types.float64, _TABLES, out)
    return compiled(_tight, types.float64(*arguments))


@lru_cache(maxsize=2)
def _tables(dtype: torch.dtype) -> tuple[float, Array, float, Array, Array, Array, Array]:
    """Steps and weights of both rules, from the middle outwards."""
    rules = rule_tables(dtype == torch.float64)
    t, x, zero = rules.t, rules.x[:, 0], int((rules.x[:, 0] == 0).nonzero())
    sides = []
    for weights in (rules.moment, torch.cat([rules.softplus, torch.zeros(2, len(x)).double()])):
        for side in (weights[:, zero:], weights[:, : zero + 1].flip(1)):
            # The unrolled loop takes some nodes beyond the last, of no weight.
            more = -(side.shape[1] - 1) % _UNROLL
            padded = torch.nn.functional.pad(side, (0, more))
            sides.append(np.ascontiguousarray(padded.T.numpy()))
    above, below, soft_above, soft_below = sides
    middle = len(t) // 2
    steps = float(t[middle + 1]), float(x[zero + 1])
    narrow = rules.w[middle:].contiguous().numpy()
    return steps[0], narrow, steps[1], above, below, soft_above, soft_below


def load(dtype: torch.dtype) -> Callable[..., Sites]:
    """`Passes.sites` of the tight bound for tensors of a dtype, compiled."""
    function, tables = _function(dtype), _tables(dtype)

    def sites(
        y: Tensor, m: Tensor, mean: Tensor, v: Tensor, weight: Tensor, share: float | None
    ) -> Sites:
        out = torch.empty(4, *m.shape, dtype=dtype).unbind()
        given = (x.contiguous().numpy() for x in (y, m, mean, v, weight))
        bound = function(*given, share or 0.0, tables, tuple(x.numpy() for x in out))
        r, dm, dv, theta = out
        slopes = (None, None) if share is None else (dm, dv)
        return Sites(torch.tensor(bound, dtype=dtype), r, theta, *slopes)

    return sites
