"""Gaussian expectations of the logistic function as one launch each on a GPU.

The same formulas as in `numerics`, element by element in C++, which torch compiles when they are
first used (torch.cuda.jiterator). A step in its graph is bound by the number of its launches, and
half of them were these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

# The rules of `numerics._rules` in float64: nodes 0.6 apart, the step of a normal distribution
# function that is 1.7 wide.
MOMENTS = """
template <typename T>
void logistic_moments(
    T m, T v, T& log_mean, T& complement, T& log_complement, T& log_scale, T& slope, T& curvature
) {
    const T a = m > 0 ? -m : m;
    const bool tilted = a < T(-0.5) * v;
    const T b = tilted ? -(a + v) : a;
    T s1 = 0, s2 = 0, s3 = 0, scaled = 0;
    if (v < T(1)) {
        const T sd = sqrt(v);
        T total = 0;
        for (int k = -14; k <= 14; ++k) {
            const T t = T(0.6) * k;
            const T w = exp(T(-0.5) * t * t);
            const T q = T(1) / (T(1) + exp(-(b + sd * t)));
            total += w;
            s1 += w * q;
            s2 += w * q * q;
            s3 += w * q * q * q;
        }
        s1 /= total;
        s2 /= total;
        s3 /= total;
    } else {
        const T inverse = T(1) / v;
        const T peak = T(0.5) * b * b * inverse;
        scaled = b < 0 ? peak : T(0);
        T rest = 0, steep = 0, moment = 0;
        for (int k = -77; k <= 47; ++k) {
            const T x = T(0.6) * k;
            const T e = exp(x < 0 ? x : -x);
            const T near = e / (T(1) + e);
            const T gap = near - T(0.5) * erfc((x < 0 ? -x : x) / T(2.4041630560342617));
            const T density = exp(x * inverse * (b - T(0.5) * x) + (scaled - peak));
            const T slope_x = near * (T(1) - near);
            rest += (x < 0 ? gap : -gap) * density;
            steep += slope_x * density;
            moment += x * slope_x * density;
        }
        const T norm = T(0.6) / sqrt(T(6.283185307179586) * v);
        rest *= norm;
        steep *= norm;
        moment *= norm;
        const T z = b / sqrt(T(2) * (v + T(2.89)));
        const T step = b < 0 ? T(0.5) * erfcx(-z) * exp(scaled - z * z) : T(1) - T(0.5) * erfc(z);
        s1 = step + rest;
        s2 = s1 - steep;
        s3 = T(0.5) * ((moment - b * steep) * inverse + T(2) * s1 - T(3) * steep);
    }
    slope = tilted ? s2 : s1 - s2;
    const T turned = tilted ? T(2) * s3 - s2 : s1 - T(3) * s2 + T(2) * s3;
    log_scale = (tilted ? a + T(0.5) * v : T(0)) - scaled;
    const T log_tail = log_scale + log(s1);
    const T tail = exp(log_tail);
    const T log_rest = log1p(-tail);
    const bool up = m > 0;
    log_mean = up ? log_rest : log_tail;
    complement = up ? tail : T(1) - tail;
    log_complement = up ? log_tail : log_rest;
    curvature = up ? -turned : turned;
}
"""

LOG_SIGMOID = """
template <typename T>
T expected_log_sigmoid(T m, T v) {
    const T a = m > 0 ? -m : m;
    T soft = 0;
    if (v < T(1)) {
        const T sd = sqrt(v);
        T total = 0;
        for (int k = -14; k <= 14; ++k) {
            const T t = T(0.6) * k;
            const T w = exp(T(-0.5) * t * t);
            const T f = a + sd * t;
            total += w;
            soft += w * ((f > 0 ? f : T(0)) + log1p(exp(f > 0 ? -f : f)));
        }
        soft /= total;
    } else {
        const T inverse = T(1) / v;
        const T peak = T(0.5) * a * a * inverse;
        T rest = 0;
        for (int k = -77; k <= 47; ++k) {
            const T x = T(0.6) * k;
            const T size = x < 0 ? -x : x;
            const T u = x / T(1.7);
            const T hinge = T(1.7) * exp(T(-0.5) * u * u) * T(0.3989422804014327)
                - size * T(0.5) * erfc(size / T(2.4041630560342617));
            const T density = exp(x * inverse * (a - T(0.5) * x) - peak);
            rest += (log1p(exp(-size)) - hinge) * density;
        }
        const T wide = sqrt(v + T(2.89));
        const T z = a / wide;
        soft = a * T(0.5) * erfc(-z * T(0.7071067811865476))
            + wide * exp(T(-0.5) * z * z) * T(0.3989422804014327)
            + rest * T(0.6) / sqrt(T(6.283185307179586) * v);
    }
    return (m < 0 ? m : T(0)) - soft;
}
"""


def serves(x: Tensor) -> bool:
    """Whether x is where these can run."""
    return x.is_cuda


@lru_cache(maxsize=1)
def _moments() -> Callable[..., tuple[Tensor, ...]]:
    return torch.cuda.jiterator._create_multi_output_jit_fn(MOMENTS, num_outputs=6)


@lru_cache(maxsize=1)
def _log_sigmoid() -> Callable[..., Tensor]:
    return torch.cuda.jiterator._create_jit_fn(LOG_SIGMOID)


def logistic_moments(m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The fields of `numerics.LogisticMoments` at m and v, float64 on a GPU."""
    return tuple(_moments()(m, v))


def expected_log_sigmoid(m: Tensor, v: Tensor) -> Tensor:
    """`numerics.expected_log_sigmoid` at m and v, float64 on a GPU."""
    return _log_sigmoid()(m, v)
