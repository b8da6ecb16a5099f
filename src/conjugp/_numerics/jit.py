"""Compiling with Numba, which keeps what it has compiled on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import config, njit

if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("Numba is told not to compile (NUMBA_DISABLE_JIT)")

# Products and sums may become one operation; infinities and NaN stay what they are.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "fastmath": {"contract"}}


def compiled(function: Callable[..., Any], signature: Any, *, sums: bool = False) -> Any:
    """From the disk if it was compiled before, and kept there if that can be written to.

    With `sums`, terms are added in whatever order is fastest.
    """
    options = {**OPTIONS, "fastmath": {"contract", "reassoc"}} if sums else OPTIONS
    try:
        return njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):
        return njit(signature, **options)(function)
