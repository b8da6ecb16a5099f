"""Predictive integrals as ONNX nodes: latent moments (R, C) to probabilities (R, C).

The rules are those of `likelihoods._lambda_integral` and `likelihoods._orthant`, which explain
them; loops go on until the last row has come to its end. ONNX Runtime has no erf in float64, so
the normal distribution function is a polynomial here.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from numpy.typing import NDArray
from scipy.special import erfcx

from conjugp.export._graph import Scope, Trip, Value
from conjugp.likelihoods import _lambda_integral as rule
from conjugp.likelihoods import _orthant as orthant

_DEGREE = 16  # of the polynomial for erfc: relative error 2e-11
_TRIPS = np.array(10_000)  # no row needs as many
_TINY = float(np.finfo(np.float64).tiny)
_NODES = 64  # of the grid for the largest of C Gaussians, at a time
_LEAST = 1e-4  # of the largest standard deviation: narrower Gaussians count as having it


# --- functions that ONNX lacks --------------------------------------------------------------


@cache
def _erfc_coefficients() -> tuple[float, ...]:
    """log(erfc(x) e^{x²}/t) as a polynomial in 2t − 1, t = 2/(2+x), for x ≥ 0."""

    def f(s: NDArray[np.float64]) -> NDArray[np.float64]:
        t = 0.5 * (s + 1.0)
        return np.log(erfcx(2.0 / t - 2.0) / t)

    return tuple(Chebyshev.interpolate(f, _DEGREE).convert(kind=Polynomial).coef)


def _log_tail(scope: Scope, z: Value) -> Value:
    """log Φ(−|z|)."""
    x = scope.op("Abs", z) * math.sqrt(0.5)
    t = 2.0 / (x + 2.0)
    s = t * 2.0 - 1.0
    *rest, highest = _erfc_coefficients()
    out = s * highest + rest[-1]
    for c in reversed(rest[:-1]):
        out = out * s + c
    return out + scope.op("Log", t * 0.5) - x * x


def _cdf(scope: Scope, z: Value) -> Value:
    """Φ(z), with relative precision below 0."""
    tail = scope.op("Exp", _log_tail(scope, z))
    return scope.op("Where", z < 0.0, tail, 1.0 - tail)


def _log_cdf(scope: Scope, z: Value) -> Value:
    """log Φ(z)."""
    log_tail = _log_tail(scope, z)
    above = scope.op("Log", 1.0 - scope.op("Exp", log_tail))
    return scope.op("Where", z < 0.0, log_tail, above)


def log_sigmoid(scope: Scope, x: Value) -> Value:
    rest = scope.op("Log", scope.op("Exp", -scope.op("Abs", x)) + 1.0)
    return scope.op("Min", x, 0.0) - rest


def normalised(scope: Scope, p: Value) -> Value:
    """Rows that sum to 1, nowhere 0."""
    p = scope.op("Max", p, _TINY)
    return p / scope.sum(p, 1)


# --- logistic-softmax and softmax (P1, P2, L4) ----------------------------------------------


def lambda_integral(scope: Scope, m: Value, v: Value, C: int, softmax: bool) -> Value:
    """E[σ_k/Σσ], or with `softmax` E[e^f_k/Σe^f], for f ~ N(m, v), both (R, C)."""
    v = scope.op("Min", v, rule._LARGEST)
    top = scope.op("ReduceMax", m + 6.0 * scope.op("Sqrt", v), axes=[1], keepdims=1)
    shift = rule._SOFT - top
    m = m + (shift if softmax else scope.op("Max", shift, 0.0))
    start = -10.0 - math.log(C) - (rule._SOFT if softmax else 0.0)

    flat_m, flat_v = (scope.op("Reshape", x, np.array([-1])) for x in (m, v))
    narrow = flat_v < rule.EXACT.narrow
    index = [
        scope.op("Reshape", scope.op("NonZero", mask), np.array([-1]))
        for mask in (scope.op("Not", narrow), narrow)
    ]
    parts = [
        part(scope, *(scope.column(scope.op("Gather", x, i)) for x in (flat_m, flat_v)))
        for part, i in zip((_Wide, _Narrow), index, strict=True)
    ]
    # Where each pair of row and class is among the wide ones followed by the narrow ones.
    order = scope.op("Concat", *index, axis=0)
    count = scope.op("Size", order)
    position = scope.op(
        "ScatterElements", order, order, scope.range(np.array(0), scope.squeeze(count)), axis=0
    )
    tile = rule.EXACT.tile
    shape = np.array([-1, C, 2 * tile])
    first_weight = np.ones(tile)
    first_weight[0] = -1.0 / math.expm1(-rule.EXACT.step)  # the stretch below is a geometric series

    def body(inner: Scope, i: Value, values: list[Value]) -> Trip:
        (p,) = values
        # The tile of λ = e^t that begins at t₀.
        t0 = inner.cast(i, "double") * (tile * rule.EXACT.step) + start
        t = t0 + np.arange(tile) * rule.EXACT.step
        found = [part.fill(inner, t0, t) for part in parts]
        both = inner.op("Gather", inner.op("Concat", *found, axis=0), position, axis=0)
        F, G = inner.ops("Split", 2, inner.op("Reshape", both, shape), axis=2)
        F = inner.op("Max", F, 1e-290)
        product = inner.op("Exp", inner.sum(inner.op("Log", F), 1))
        first = inner.op("Equal", i, np.array(0))
        weight = inner.op("Where", first, first_weight, np.ones(tile))
        p = p + inner.sum(G / F * product * weight, 2, keepdims=False)
        # Written so that NaN, which is the caller's, ends the loop.
        left = inner.op("Slice", product, *(np.array([n]) for n in (tile - 1, tile, 2)))
        go_on = inner.op("ReduceMax", inner.cast(left > rule._DONE, "double"), keepdims=0)
        return inner.cast(go_on, "bool"), [p], []

    (p,) = scope.loop(_TRIPS, [(m * 0.0, "double")], body)
    return normalised(scope, p)


class _Wide:
    """F and λG of pairs with v ≥ ¼, side by side: (pairs, 2T) (P2)."""

    def __init__(self, scope: Scope, m: Value, v: Value) -> None:
        self.m, self.v = m, v
        self.inverse_sd = 1.0 / scope.op("Sqrt", v)
        self.log_height = scope.op(
            "Log", self.inverse_sd * (rule.EXACT.step / math.sqrt(2.0 * math.pi))
        )
        self.inverse_width = 1.0 / scope.op("Sqrt", v + rule._EDGE**2)

    def fill(self, scope: Scope, t0: Value, t: Value) -> Value:
        low = -t0 - ((rule.EXACT.tile - 1) * rule.EXACT.step + rule._TAIL)
        drop = rule._DROP - t0
        ends = drop > 0.0
        high = scope.op("Where", ends, rule._TAIL, drop)
        last = scope.op("Where", ends, rule._TAIL + rule._REACH, drop)
        begin = scope.op("Floor", (low - rule._REACH) / rule.EXACT.step)
        x = (
            scope.range(begin, scope.op("Ceil", last / rule.EXACT.step) + 1.0) * rule.EXACT.step
        )  # (J,)
        lam = scope.op("Exp", scope.op("Min", t, 50.0))  # where it matters it is small
        log_s = scope.column(log_sigmoid(scope, x))
        scaled = scope.op("Exp", scope.op("Min", log_s + t, 50.0))  # (J, T)
        right = _cdf(scope, (high - x) / rule._EDGE)
        inside = _cdf(scope, (x - low) / rule._EDGE) * scope.op("Where", ends, right, 1.0)
        survive = scope.column(inside) * scope.op("Exp", -scaled)
        z = (x - self.m) * self.inverse_sd  # (pairs, J)
        density = scope.op("Exp", scope.op("Max", self.log_height - z * z * 0.5, -300.0))
        fg = density @ scope.op("Concat", survive, survive * scaled, axis=1)
        below = (low - self.m) * self.inverse_width
        tail = _log_cdf(scope, below - self.v * self.inverse_width)
        mean = scope.op("Exp", self.m + self.v * 0.5 + tail + t0) * scope.op("Exp", t - t0)
        end = _cdf(scope, (self.m - high) * self.inverse_width) * scope.cast(ends, "double")
        end = end * scope.op("Exp", -lam)
        f = _cdf(scope, below) + end
        g = mean + end * lam
        return fg + scope.op("Concat", f, g, axis=1)


class _Narrow:
    """The same for v < ¼, on standardised nodes."""

    def __init__(self, scope: Scope, m: Value, v: Value) -> None:
        z, self.w = rule.EXACT.narrow_nodes()
        self.log_s = log_sigmoid(scope, m + scope.op("Sqrt", v) * z)  # (pairs, J)

    def fill(self, scope: Scope, t0: Value, t: Value) -> Value:
        base = scope.op("Exp", scope.op("Min", self.log_s + t0, 50.0))
        scaled = scope.unsqueeze(base, 1) * scope.column(scope.op("Exp", t - t0))
        # In two dimensions: there may be no pairs, and a batch of none is not multiplied.
        scaled = scope.op("Reshape", scaled, np.array([-1, len(self.w)]))
        survive = scope.op("Exp", -scaled)  # (pairs·T, J)
        fg = [x @ self.w[:, None] for x in (survive, survive * scaled)]
        each = [scope.op("Reshape", x, np.array([-1, rule.EXACT.tile])) for x in fg]
        return scope.op("Concat", *each, axis=1)


# --- the largest of C Gaussians (L8) --------------------------------------------------------


def largest(scope: Scope, m: Value, v: Value) -> Value:
    """P(f_k is the largest) for f ~ N(m, v), both (R, C), on a grid for all classes of a row."""
    top = scope.op("ReduceMax", v, axes=[1], keepdims=1)
    sd = scope.op("Sqrt", scope.op("Max", v, scope.op("Max", top * _LEAST**2, 1e-24)))
    edge = sd * orthant._EDGE
    low = scope.op("ReduceMax", m - edge, axes=[1], keepdims=1)
    high = scope.op("ReduceMax", m + edge, axes=[1], keepdims=1)
    # A class that ends below the grid wins nothing and is beaten everywhere: it may be narrow.
    competes = (m + edge) > low
    finest = scope.op("Where", competes, (high - low) / sd, 0.0)
    needed = scope.op("ReduceMax", finest, keepdims=0) / (orthant._STEP * _NODES)
    trips = scope.op("Max", scope.op("Ceil", needed), 1.0)
    step = (high - low) / (trips * _NODES - 1.0)
    m3, sd3 = scope.unsqueeze(m, 2), scope.unsqueeze(sd, 2)

    def body(inner: Scope, i: Value, values: list[Value]) -> Trip:
        (p,) = values
        node = inner.cast(i, "double") * _NODES + np.arange(_NODES, dtype=np.float64)
        x = inner.unsqueeze(low + step * node, 1)  # (R, 1, J)
        z = (x - m3) / sd3
        log_cdf = inner.op("Max", _log_cdf(inner, z), math.log(1e-300))
        others = inner.sum(log_cdf, 1) - log_cdf
        share = inner.op("Exp", others - z * z * 0.5) / sd3
        return None, [p + inner.sum(share, 2, keepdims=False)], []

    (p,) = scope.loop(scope.cast(trips, "int64"), [(m * 0.0, "double")], body)
    return normalised(scope, p)
