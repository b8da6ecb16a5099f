"""Passes over memory of the fused step and of Adam, compiled; by torch they are in `passes`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from conjugp._inference.passes import LEAST_RESIDUAL, Pushed
from conjugp._numerics.jit import OPTIONS, compiled

_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(1.5 * 2.0**23)  # adding this leaves an integer in the last bits
_EXP = tuple(np.float32(1 / math.factorial(i)) for i in range(7, -1, -1))


@njit(**OPTIONS)
def _exp(x: Any) -> Any:
    """e^x in float32 for x from −80 to 80."""
    t = x * _LOG2_E + _ROUND
    n = t - _ROUND
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = _EXP[0]
    for i in range(1, 8):
        p = p * r + _EXP[i]
    return p * np.int32((np.float32(t).view(np.int32) << 23) + (127 << 23)).view(np.float32)


def _norms(X: Any, weight: Any, zero: Any, out: Any) -> None:
    for i in range(len(X)):
        s = zero
        for d in range(X.shape[1]):
            s += weight[d] * X[i, d] * X[i, d]
        out[i] = s


def _squares(weight: Any, X: Any, out: Any) -> None:
    out[:] = 0
    for i in range(len(X)):
        w = weight[i]
        for d in range(X.shape[1]):
            out[d] += w * X[i, d] * X[i, d]


def _values(r2: Any, x2: Any, z2: Any, tiny: Any, farthest: Any, k: Any) -> None:
    for i in range(len(r2)):
        for j in range(r2.shape[1]):
            r = (z2[j] - np.float32(2) * r2[i, j]) + x2[i]
            # In this order NaN stays.
            r = tiny if r < tiny else r
            r = farthest if r > farthest else r
            r2[i, j] = r
            k[i, j] = _exp(np.float32(-0.5) * r)


def _slopes(E: Any, k: Any, zero: Any, half: Any, rows: Any, columns: Any) -> None:
    columns[:] = 0
    for i in range(len(E)):
        s = zero
        for j in range(E.shape[1]):
            e = -half * E[i, j] * k[i, j]
            E[i, j] = e
            columns[j] += e
            s += e
        rows[i] = s


def _residual(A: Any, variance: Any, floor: Any, residual: Any, at_floor: Any) -> None:
    for i in range(len(A)):
        left = variance
        for j in range(A.shape[1]):
            left -= A[i, j] * A[i, j]
        at_floor[i] = left < floor
        residual[i] = floor if left < floor else left


def _push(EX: Any, EZ: Any, sums: Any, Z: Any, weight: Any, two: Any, d_Z: Any, moved: Any) -> None:
    moved[:] = 0
    for i in range(len(Z)):
        for d in range(Z.shape[1]):
            push = EX[i, d] - EZ[i, d] - sums[i] * Z[i, d]
            moved[d] += (EX[i, d] + push) * Z[i, d]
            d_Z[i, d] = -two * weight[d] * push


def _adam(x: Any, g: Any, m: Any, s: Any, new1: Any, new2: Any, least: Any, rate: Any) -> None:
    for i in range(len(x)):
        m[i] += new1 * (g[i] - m[i])
        s[i] += new2 * (g[i] * g[i] - s[i])
        x[i] -= rate * m[i] / (math.sqrt(s[i]) + least)


class Loaded(NamedTuple):
    """Those of `passes.Passes` that are here, `values` for float32 only; and a step of Adam."""

    norms: Callable[[Tensor, Tensor, Tensor], Tensor]
    squares: Callable[[Tensor, Tensor, Tensor], Tensor]
    values: Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
    slopes: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    residual: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    push: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Pushed]
    adam: Callable[..., None]


@lru_cache(maxsize=2)
def load(dtype: torch.dtype) -> Loaded:
    """The passes for contiguous tensors of a dtype."""
    real = types.float32 if dtype == torch.float32 else types.float64
    M, v, void = real[:, ::1], real[::1], types.void
    norms_ = compiled(_norms, void(M, v, real, v), sums=True)
    squares_ = compiled(_squares, void(v, M, v))
    slopes_ = compiled(_slopes, void(M, M, real, real, v, v), sums=True)
    residual_ = compiled(_residual, void(M, real, real, v, types.boolean[::1]), sums=True)
    push_ = compiled(_push, void(M, M, v, M, v, real, M, v))
    adam_ = compiled(_adam, void(v, v, v, v, real, real, real, real))
    single = types.float32
    S = single[:, ::1]
    values_ = compiled(_values, void(S, single[::1], single[::1], single, single, S))
    tiny = torch.finfo(dtype).tiny

    def norms(X: Tensor, X2: Tensor, weight: Tensor) -> Tensor:
        out = X.new_empty(len(X))
        norms_(X.contiguous().numpy(), weight.contiguous().numpy(), 0.0, out.numpy())
        return out

    def squares(weight: Tensor, X: Tensor, X2: Tensor) -> Tensor:
        out = X.new_empty(X.shape[1])
        squares_(weight.numpy(), X.contiguous().numpy(), out.numpy())
        return out

    def values(xz: Tensor, x2: Tensor, z2: Tensor, farthest: float, out: Tensor) -> Tensor:
        values_(xz.numpy(), x2.numpy(), z2.numpy(), tiny, farthest, out.numpy())
        return out

    def slopes(E: Tensor, r2: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = E.new_empty(len(E)), E.new_empty(E.shape[1])
        slopes_(E.numpy(), k.numpy(), 0.0, 0.5, rows.numpy(), columns.numpy())
        return rows, columns

    def residual(A: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        left, at_floor = A.new_empty(len(A)), torch.empty(len(A), dtype=torch.bool)
        whole = float(variance)
        residual_(A.numpy(), whole, LEAST_RESIDUAL * whole, left.numpy(), at_floor.numpy())
        return left, at_floor

    def push(
        EX: Tensor, EZ: Tensor, sums: Tensor, Z: Tensor, weight: Tensor, out: Tensor
    ) -> Pushed:
        moved = Z.new_empty(Z.shape[1])
        given = (x.contiguous().numpy() for x in (EX, EZ, sums, Z, weight))
        push_(*given, 2.0, out.numpy(), moved.numpy())
        return Pushed(out, moved)

    def adam(
        x: Tensor, g: Tensor, m: Tensor, s: Tensor, beta1: float, beta2: float, *rest: float
    ) -> None:
        flat = (t.view(-1).numpy() for t in (x, g.contiguous(), m, s))
        adam_(*flat, 1 - beta1, 1 - beta2, *rest)

    return Loaded(norms, squares, values, slopes, residual, push, adam)
