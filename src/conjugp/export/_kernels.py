"""Kernels as ONNX nodes: k(X, Z) for rows X that come and inducing points Z that stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from conjugp import kernels as k
from conjugp.export._graph import Scope, Value
from conjugp.kernels._columns import Columns
from conjugp.kernels._stationary import MOST_SQUARE

_TINY = float(torch.finfo(torch.float64).tiny)


def _matern32(scope: Scope, r2: Value, kernel: k.Kernel) -> Value:
    s = scope.op("Sqrt", r2 * 3.0)
    return (s + 1.0) * scope.op("Exp", -s)


def _matern52(scope: Scope, r2: Value, kernel: k.Kernel) -> Value:
    s2 = r2 * 5.0
    s = scope.op("Sqrt", s2)
    return (s + 1.0 + s2 / 3.0) * scope.op("Exp", -s)


def _rational(scope: Scope, r2: Value, kernel: k.Kernel) -> Value:
    alpha = _number(kernel, "alpha")
    return scope.op("Exp", scope.op("Log", r2 / (2.0 * alpha) + 1.0) * -alpha)


_OF_DISTANCE: dict[type[k.Kernel], Callable[[Scope, Value, k.Kernel], Value]] = {
    k.RBF: lambda scope, r2, kernel: scope.op("Exp", r2 * -0.5),
    k.Matern12: lambda scope, r2, kernel: scope.op("Exp", -scope.op("Sqrt", r2)),
    k.Matern32: _matern32,
    k.Matern52: _matern52,
    k.RationalQuadratic: _rational,
}


def check_kernel(kernel: k.Kernel) -> None:
    """Raise unless the kernel is one of the library's own, through and through."""
    if isinstance(kernel, k.Sum | k.Product):
        for part in kernel.parts:
            check_kernel(part)
    elif type(kernel) is k.Normalised or type(kernel) is Columns:
        check_kernel(kernel.kernel)
    elif type(kernel) is not k.Linear and type(kernel) not in _OF_DISTANCE:
        raise ValueError(
            f"the kernel {type(kernel).__name__} is not one of conjugp.kernels, and its formula "
            "cannot be written as ONNX"
        )


def matrix(scope: Scope, kernel: k.Kernel, X: Value, Z: Tensor) -> Value:
    """k(X, Z): X (n, D) of the scope, Z (M, D) -> (n, M)."""
    if isinstance(kernel, k.Sum | k.Product):
        return reduce(kernel.join, (matrix(scope, part, X, Z) for part in kernel.parts))
    if isinstance(kernel, Columns):
        return matrix(scope, kernel.kernel, _columns(scope, kernel, X), kernel.of(Z))
    if isinstance(kernel, k.Normalised):
        U = _directions(scope, kernel, X)
        return matrix(scope, kernel.kernel, U, kernel.directions(Z.double()))
    variance, weight = _number(kernel, "variance"), _weight(kernel, Z)
    root = scope.root
    if isinstance(kernel, k.Linear):
        return X @ root.op("Mul", Z.T, (variance * weight)[:, None])
    # As in conjugp.kernels: the shift keeps the digits of data far from the origin, and those of
    # features of long tails are kept by subtracting one by one.
    shift = Z.double().mean(0)
    U, W = X - shift, Z.double() - shift
    far = W.square().amax(0) * weight > MOST_SQUARE[torch.float64] / len(weight)
    near = weight.masked_fill(far, 0.0)
    x2 = (U * U) @ near[:, None]
    z2 = W.square() @ near
    # Z itself is the constant, so that kernels that differ in their lengthscales share it.
    scaled = root.op("Mul", root.op("Sub", Z.T, shift[:, None]), (-2.0 * near)[:, None])
    r2 = U @ scaled + x2 + z2
    for d in far.nonzero()[:, 0].tolist():
        gap = scope.op("Gather", X, np.array([d]), axis=1) - Z[:, d].double()
        r2 = r2 + gap * gap * float(weight[d])
    r2 = scope.op("Max", r2, _TINY)
    return _OF_DISTANCE[type(kernel)](scope, r2, kernel) * variance


def diagonal(scope: Scope, kernel: k.Kernel, X: Value, D: int) -> Value | float:
    """The diagonal of k(X, X): (n, 1), or one number for all rows."""
    if isinstance(kernel, k.Sum | k.Product):
        return reduce(kernel.join, (diagonal(scope, part, X, D) for part in kernel.parts))
    if isinstance(kernel, Columns):
        return diagonal(scope, kernel.kernel, _columns(scope, kernel, X), len(kernel.columns))
    if isinstance(kernel, k.Normalised):
        return diagonal(scope, kernel.kernel, _directions(scope, kernel, X), D)
    variance = _number(kernel, "variance")
    if isinstance(kernel, k.Linear):
        weight = variance * _weight(kernel, torch.empty(0, D))
        return (X * X) @ weight[:, None]
    return variance


def _columns(scope: Scope, kernel: Columns, X: Value) -> Value:
    """Those that the kernel sees."""
    return scope.op("Gather", X, np.array(kernel.columns), axis=1)


def _directions(scope: Scope, kernel: k.Normalised, X: Value) -> Value:
    """Rows at unit length; a row of zeros stays one."""
    if kernel.units is not None:
        X = X * kernel.units
    largest = scope.op("ReduceMax", scope.op("Abs", X), axes=[1], keepdims=1)
    X = X / scope.op("Max", largest, _TINY)
    norm = scope.op("Sqrt", scope.op("ReduceSumSquare", X, axes=[1], keepdims=1))
    return X / scope.op("Max", norm, _TINY)


def _number(kernel: k.Kernel, name: str) -> float:
    return float(getattr(kernel, name))


def _weight(kernel: k.Kernel, Z: Tensor) -> Tensor:
    """1/ℓ² of every feature, float64 (D,)."""
    length = torch.as_tensor(kernel.parameter("lengthscale", Z.double())).cpu().double()
    return length.square().reciprocal().expand(Z.shape[1])
