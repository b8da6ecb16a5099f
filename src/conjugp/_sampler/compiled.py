"""`sweep.correction` as one compiled call, which Numba keeps on disk.

With some hundred inputs a call of NumPy takes as long as its work; LAPACK and BLAS stay SciPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.extending import get_cython_function_address, intrinsic
from numpy.typing import NDArray

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("Numba is told not to compile (NUMBA_DISABLE_JIT)")

Array = NDArray[np.float64]

# Addresses are arguments of what is compiled: as constants they would keep it from the disk.
_POTRF = get_cython_function_address("scipy.linalg.cython_lapack", "dpotrf")
_TRSV = get_cython_function_address("scipy.linalg.cython_blas", "dtrsv")

_LOWER, _PLAIN, _TRANSPOSED = (np.array([ord(letter)], dtype=np.uint8) for letter in "LNT")
_ONE = np.array([1], dtype=np.int32)


def _by_reference(context: Any, address: Any, arrays: Any) -> Any:
    """Call the Fortran routine at an address with a tuple of arrays: all go by reference."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, arrays = values
        pointer = ir.IntType(8).as_pointer()
        data = [
            context.make_array(kind)(context, builder, builder.extract_value(arrays, i)).data
            for i, kind in enumerate(signature.args[1])
        ]
        routine = ir.FunctionType(ir.VoidType(), [pointer] * len(data)).as_pointer()
        builder.call(
            builder.inttoptr(address, routine), [builder.bitcast(d, pointer) for d in data]
        )
        return context.get_dummy_value()

    return types.void(address, arrays), generate


_call: Any = intrinsic(_by_reference)


@njit
def _take(out: Array, a: Array, at: NDArray[np.uint64]) -> None:
    """Twice as fast as a function of its own, and with indices that cannot be negative."""
    for i in range(len(out)):
        out[i] = a[at[i]]


def _correction(
    K: Array, kappa: Array, omega: Array, r: Array, noise: Array, potrf: int, trsv: int
) -> tuple[Array, bool]:
    """x, and whether every matrix was positive definite."""
    C, U = kappa.shape
    x = np.zeros((C, U))
    at, info = np.empty(U, dtype=np.uint64), np.zeros(1, dtype=np.int32)
    for c in range(C):
        n = 0
        for i in range(U):
            if omega[c, i] != 0:
                at[n] = i
                n += 1
        if n == 0:
            continue
        order = np.array([n], dtype=np.int32)
        S, missed = np.empty((n, n)), np.empty(n)  # rows of S are Fortran's columns
        for j in range(n):
            a = at[j]
            w = omega[c, a]
            _take(S[j, j:], K[a], at[j:n])
            S[j, j] += 1 / w
            missed[j] = (kappa[c, a] + np.sqrt(w) * noise[c, a]) / w - r[c, a]
        _call(potrf, (_LOWER, order, S, order, info))
        if info[0] != 0:
            return x, False
        _call(trsv, (_LOWER, _PLAIN, _PLAIN, order, S, order, missed, _ONE))
        _call(trsv, (_LOWER, _TRANSPOSED, _PLAIN, order, S, order, missed, _ONE))
        for j in range(n):
            x[c, at[j]] = missed[j]
    return x, True


_MATRIX = types.float64[:, ::1]
_SIGNATURE = types.Tuple((_MATRIX, types.boolean))(*[_MATRIX] * 5, types.int64, types.int64)

# Products and sums may become one operation; infinities and NaN stay what they are.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "fastmath": {"contract"}}


def compiled(function: Callable[..., Any]) -> Any:
    """From the disk if it was compiled before, and kept there if that can be written to."""
    try:
        return njit(_SIGNATURE, cache=True, **_OPTIONS)(function)
    except (RuntimeError, OSError):
        return njit(_SIGNATURE, **_OPTIONS)(function)


_run = compiled(_correction)


def correction(K: Array, kappa: Array, omega: Array, r: Array, noise: Array) -> Array:
    """x of (G5), (C, U); see `sweep.correction`."""
    x, definite = _run(K, kappa, omega, r, noise, _POTRF, _TRSV)
    if not definite:
        raise FloatingPointError("the kernel matrix is not positive definite")
    return x
