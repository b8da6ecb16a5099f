"""Gaussian expectations of the logistic function in a few launches on a GPU.

The same formulas as in `expectations`, in C++, which torch compiles when they are first used
(torch.cuda.jiterator). A step in its graph is bound by the number of its launches, and half of them
were these. The nodes of a rule are dealt to lanes: a batch has too few elements to keep a GPU busy
with one thread each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

LANES = 32

# The rules of `expectations._rules` in float64: nodes 0.6 apart, the step of a normal distribution
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

# 1 − F and its derivatives in m and v by `likelihoods._log_sum`'s quick rule, with nodes around −t.
# Where t is large, and with it −m, only their sum counts: the rest is float32.
FALLS = """
template <typename T>
void falls(T m, T v, T t, T& fall, T& dm, T& dv) {
    float s0 = 0, s1 = 0, s2 = 0;
    if (v < T(0.06)) {
        const float nodes[3] = {0.0f, 1.3556261799742657f, 2.8569700138728056f};
        const float weights[3] = {0.5333333333333333f, 0.22207592200561266f, 0.011257411327720691f};
        const float sd = sqrtf(float(v));
        for (int k = -2; k <= 2; ++k) {
            const float z = nodes[k < 0 ? -k : k] * (k < 0 ? -1.0f : 1.0f);
            const float w = weights[k < 0 ? -k : k];
            const float f = float(m) + sd * z;
            const float e = expf(f > 0 ? -f : f);
            const float rest = f > 0 ? e / (1.0f + e) : 1.0f / (1.0f + e);
            const float log_scaled = (f > 0 ? float(t) : float(m + t) + sd * z) - log1pf(e);
            const float scaled = expf(log_scaled > 50.0f ? 50.0f : log_scaled);
            const float bump = scaled * expf(-scaled) * rest;
            s0 -= w * expm1f(-scaled);
            s1 += w * bump;
            s2 += w * bump * (rest * (2.0f - scaled) - 1.0f);
        }
        fall = s0;
        dm = s1;
        dv = 0.5f * s2;
    } else {
        const float h = v < T(0.25) ? 0.3f : 0.6f;
        const float inverse = rsqrtf(float(v));
        const float top = t < T(4.5) ? 12.5f : 3.5f - float(t);
        const int low = int(floorf((-float(t) - 16.0f) / h));
        const int high = int(ceilf(top / h));
        const T shifted = m - T(h) * low;
        float total = 0;
        for (int k = 0; k <= high - low; ++k) {
            const float x = h * (low + k);
            const float e = expf(x > 0 ? -x : x);
            const float soft = log1pf(e);
            const float up = float(t + T(h) * (low + k) * (x > 0 ? 0 : 1)) - soft;
            const float down = (x > 0 ? -x : 0.0f) - soft;
            float w = expf(up + down - expf(up > 50.0f ? 50.0f : up));
            w = k ? w : w / (1.0f - expf(-h));
            const float z = (float(shifted) - h * k) * inverse;
            const float density = w * expf(-0.5f * z * z);
            total += w;
            s0 += w * 0.5f * erfcf(-0.7071067811865476f * z);
            s1 += density;
            s2 += density * z;
        }
        const float lambda = expf(t > T(50) ? 50.0f : float(t));
        const float norm = -expm1f(-lambda) / total;
        fall = norm * s0;
        dm = norm * s1 * inverse * 0.3989422804014327f;
        dv = norm * s2 * inverse * inverse * -0.19947114020071635f;
    }
}
"""


def serves(x: Tensor) -> bool:
    """Whether x is where these can run."""
    return x.is_cuda


@lru_cache(maxsize=4)
def _compiled(code: str, n: int) -> Callable[..., Any]:
    """A function of `n` outputs."""
    make = torch.cuda.jiterator
    if n == 1:
        return make._create_jit_fn(code)
    return make._create_multi_output_jit_fn(code, num_outputs=n)


@lru_cache(maxsize=4)
def _lanes(device: torch.device, n_dims: int) -> Tensor:
    return torch.arange(LANES, dtype=torch.float64, device=device).view(-1, *[1] * n_dims)


def falls(m: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_log_sum._window` at m, v and t, which broadcast, float64 on a GPU."""
    return _compiled(FALLS, 3)(m, v, t)


def logistic_moments(m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The fields of `expectations.LogisticMoments` at m and v, float64 on a GPU."""
    parts = _compiled(MOMENT_SUMS, 3)(m, v, _lanes(m.device, m.ndim))
    return tuple(_compiled(MOMENTS, 6)(m, v, *(p.sum(0) for p in parts)))


def expected_log_sigmoid(m: Tensor, v: Tensor) -> Tensor:
    """`expectations.expected_log_sigmoid` at m and v, float64 on a GPU."""
    return _compiled(LOG_SIGMOID, 1)(m, v, _lanes(m.device, m.ndim)).sum(0)
