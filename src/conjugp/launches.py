"""Gaussian expectations of the logistic function in a few launches on a GPU.

The same formulas as in `numerics`, in C++, which torch compiles when they are first used
(torch.cuda.jiterator). A step in its graph is bound by the number of its launches, and half of them
were these. The nodes of a rule are dealt to lanes: a batch has too few elements to keep a GPU busy
with one thread each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

LANES = 32

# The rules of `numerics._rules` in float64: nodes 0.6 apart, the step of a normal distribution
# function that is 1.7 wide. 4.177713791... is the sum of the weights of the first rule.
MOMENT_SUMS = """
template <typename T>
void moment_sums(T m, T v, T lane, T& p1, T& p2, T& p3) {
    const T a = m > 0 ? -m : m;
    const T b = a < T(-0.5) * v ? -(a + v) : a;
    T s1 = 0, s2 = 0, s3 = 0;
    if (v < T(1)) {
        const T sd = sqrt(v);
        for (int k = -14 + int(lane); k <= 14; k += 32) {
            const T t = T(0.6) * k;
            const T w = exp(T(-0.5) * t * t) / T(4.177713791051668);
            const T q = T(1) / (T(1) + exp(-(b + sd * t)));
            s1 += w * q;
            s2 += w * q * q;
            s3 += w * q * q * q;
        }
    } else {
        const T inverse = T(1) / v;
        const T peak = T(0.5) * b * b * inverse;
        const T scaled = b < 0 ? peak : T(0);
        const T norm = T(0.6) / sqrt(T(6.283185307179586) * v);
        for (int k = -77 + int(lane); k <= 47; k += 32) {
            const T x = T(0.6) * k;
            const T e = exp(x < 0 ? x : -x);
            const T near = e / (T(1) + e);
            const T gap = near - T(0.5) * erfc((x < 0 ? -x : x) / T(2.4041630560342617));
            const T density = norm * exp(x * inverse * (b - T(0.5) * x) + (scaled - peak));
            const T slope_x = near * (T(1) - near);
            s1 += (x < 0 ? gap : -gap) * density;
            s2 += slope_x * density;
            s3 += x * slope_x * density;
        }
    }
    p1 = s1;
    p2 = s2;
    p3 = s3;
}
"""

MOMENTS = """
template <typename T>
void logistic_moments(
    T m, T v, T p1, T p2, T p3,
    T& log_mean, T& complement, T& log_complement, T& log_scale, T& slope, T& curvature
) {
    const T a = m > 0 ? -m : m;
    const bool tilted = a < T(-0.5) * v;
    const T b = tilted ? -(a + v) : a;
    T s1 = p1, s2 = p2, s3 = p3, scaled = 0;
    if (v >= T(1)) {
        scaled = b < 0 ? T(0.5) * b * b / v : T(0);
        const T z = b / sqrt(T(2) * (v + T(2.89)));
        const T step = b < 0 ? T(0.5) * erfcx(-z) * exp(scaled - z * z) : T(1) - T(0.5) * erfc(z);
        s1 = step + p1;
        s2 = s1 - p2;
        s3 = T(0.5) * ((p3 - b * p2) / v + T(2) * s1 - T(3) * p2);
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

# The part of E[log σ] that is not a sum over nodes is in lane 0.
LOG_SIGMOID = """
template <typename T>
T log_sigmoid_sums(T m, T v, T lane) {
    const T a = m > 0 ? -m : m;
    const bool first = lane == T(0);
    T soft = 0;
    if (v < T(1)) {
        const T sd = sqrt(v);
        for (int k = -14 + int(lane); k <= 14; k += 32) {
            const T t = T(0.6) * k;
            const T w = exp(T(-0.5) * t * t) / T(4.177713791051668);
            const T f = a + sd * t;
            soft += w * ((f > 0 ? f : T(0)) + log1p(exp(f > 0 ? -f : f)));
        }
    } else {
        const T inverse = T(1) / v;
        const T peak = T(0.5) * a * a * inverse;
        for (int k = -77 + int(lane); k <= 47; k += 32) {
            const T x = T(0.6) * k;
            const T size = x < 0 ? -x : x;
            const T u = x / T(1.7);
            const T hinge = T(1.7) * exp(T(-0.5) * u * u) * T(0.3989422804014327)
                - size * T(0.5) * erfc(size / T(2.4041630560342617));
            const T density = exp(x * inverse * (a - T(0.5) * x) - peak);
            soft += (log1p(exp(-size)) - hinge) * density;
        }
        soft *= T(0.6) / sqrt(T(6.283185307179586) * v);
        if (first) {
            const T wide = sqrt(v + T(2.89));
            const T z = a / wide;
            soft += a * T(0.5) * erfc(-z * T(0.7071067811865476))
                + wide * exp(T(-0.5) * z * z) * T(0.3989422804014327);
        }
    }
    return (first && m < 0 ? m : T(0)) - soft;
}
"""


def serves(x: Tensor) -> bool:
    """Whether x is where these can run."""
    return x.is_cuda


@lru_cache(maxsize=1)
def _functions() -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]:
    make = torch.cuda.jiterator._create_multi_output_jit_fn
    return make(MOMENT_SUMS, num_outputs=3), make(MOMENTS, num_outputs=6)


@lru_cache(maxsize=1)
def _log_sigmoid() -> Callable[..., Tensor]:
    return torch.cuda.jiterator._create_jit_fn(LOG_SIGMOID)


@lru_cache(maxsize=4)
def _lanes(device: torch.device, n_dims: int) -> Tensor:
    return torch.arange(LANES, dtype=torch.float64, device=device).view(-1, *[1] * n_dims)


def logistic_moments(m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The fields of `numerics.LogisticMoments` at m and v, float64 on a GPU."""
    sums, moments = _functions()
    parts = sums(m, v, _lanes(m.device, m.ndim))
    return tuple(moments(m, v, *(p.sum(0) for p in parts)))


def expected_log_sigmoid(m: Tensor, v: Tensor) -> Tensor:
    """`numerics.expected_log_sigmoid` at m and v, float64 on a GPU."""
    return _log_sigmoid()(m, v, _lanes(m.device, m.ndim)).sum(0)
