"""The user's units to working units: centred, of order one, finite in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from conjugp.group import ALONE, Group
from conjugp.rows import Rows

_ROWS = 2**14  # rows worked on at a time
_CACHED = 1 << 16  # numbers worked on at a time within them


class Chunked(Protocol):
    """Rows that can be gone through."""

    def chunks(self, size: int) -> Iterator[Rows]:
        """All rows, in order, so many at a time."""
        ...


class Scaling(NamedTuple):
    """x -> (x - shift) / scale, feature by feature."""

    shift: np.ndarray  # (D,) float64
    scale: np.ndarray  # (D,) float64, positive

    def apply(self, X: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
        """X (n, D) in working units; the difference is taken in float64 where X is."""
        shift, scale = (a.astype(X.dtype, copy=False) for a in self)
        out = np.empty(X.shape, np.result_type(X, shift))
        # Kernels square their inputs, so those squares have to be finite too.
        limit = 0.1 * torch.finfo(dtype).max ** 0.5
        for i in _blocks(X):
            with np.errstate(over="ignore", invalid="ignore"):
                part = np.subtract(X[i], shift, out=out[i])
                part /= scale
            if not (float(part.min(initial=0)) >= -limit and float(part.max(initial=0)) <= limit):
                raise ValueError(
                    "X overflows when it is centred and scaled: some values are too far from "
                    f"those of the fit for {str(dtype).removeprefix('torch.')}"
                )
        return torch.as_tensor(out).to(device=device, dtype=dtype)

    def uncentred(self) -> Scaling:
        """The same units with the user's origin."""
        return self._replace(shift=np.zeros_like(self.shift))

    def invert(self, X: Tensor) -> np.ndarray:
        """Working units back to the user's, in float64."""
        return X.detach().cpu().double().numpy() * self.scale + self.shift


def fit_scaling(rows: Chunked, center: bool, group: Group = ALONE) -> Scaling:
    """Weighted mean and standard deviation of every feature, of all ranks; 1 for a constant one.

    Without `center` the origin stays where the user put it, as a linear kernel needs.
    """
    total, eps, mean = 0.0, 0.0, np.zeros(1)
    with np.errstate(over="ignore", invalid="ignore"):
        for X, _, weight in rows.chunks(_ROWS):
            here = weight.sum()
            total += here
            # A running mean: sums of large values could overflow.
            part = np.einsum("i,ij->j", weight / here, X, dtype=np.float64)
            mean = mean + (part - mean) * (here / total)
            eps = np.finfo(X.dtype).eps
        parts = group.gather((total, eps, mean))
        total, eps = sum(p[0] for p in parts), max(p[1] for p in parts)
        mean = np.sum(np.broadcast_arrays(*(p[0] / total * p[2] for p in parts)), axis=0)
        sd = np.zeros_like(mean)
        for X, _, weight in rows.chunks(_ROWS):
            for i in _blocks(X):
                d = X[i] - mean
                sd += weight[i] / total @ np.square(d, out=d)
        sd = np.sqrt(np.sum(group.gather(sd), axis=0))
    if not (np.isfinite(mean).all() and np.isfinite(sd).all()):
        raise ValueError(
            "X overflows when it is centred and scaled: rescale the features whose values are "
            "near the largest floating-point number"
        )
    # Rounding of the mean leaves a spread of this size in a constant column.
    constant = sd <= 8 * eps * np.abs(mean) + np.finfo(np.float64).tiny
    return Scaling(mean if center else np.zeros_like(mean), np.where(constant, 1.0, sd))


def _blocks(X: np.ndarray) -> Iterator[slice]:
    """Rows in parts that stay in the processor's cache from one operation to the next."""
    step = max(1, _CACHED // max(1, X.shape[1]))
    return (slice(i, i + step) for i in range(0, len(X), step))
