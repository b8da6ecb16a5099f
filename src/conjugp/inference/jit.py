"""Compiling with Numba, which keeps what it has compiled on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


# Products and sums may become one operation; infinities and NaN stay what they are.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "fastmath": {"contract"}}


def compiled(function: Callable[..., Any], *signatures: Any) -> Any:
    """From the disk if it was compiled before, and kept there if that can be written to."""
    try:
        return njit(list(signatures), cache=True, **OPTIONS)(function)
    except (RuntimeError, OSError):
        return njit(list(signatures), **OPTIONS)(function)
