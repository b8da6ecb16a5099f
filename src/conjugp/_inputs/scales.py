"""The user's units to working units: centred, of order one, finite in float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from conjugp._numerics.threads import blocks, each
from conjugp._persistence.codec import in_checkpoints
from conjugp._rows.canonical import Rows, taken
from conjugp._rows.group import ALONE, Group

_ROUND = 1024  # blocks whose moments are kept until they are joined


class Readable(Protocol):
    """Rows of which any stretch can be read."""

    @property
    def n(self) -> int: ...
    @property
    def n_features(self) -> int: ...

    def read(self, start: int, stop: int) -> Rows:
        """A stretch of rows."""
        ...


@in_checkpoints
class Scaling(NamedTuple):
    """x -> (x - shift) / scale, feature by feature."""

    shift: np.ndarray  # (D,) float64
    scale: np.ndarray  # (D,) float64, positive

    def apply(
        self,
        X: np.ndarray,
        dtype: torch.dtype,
        device: torch.device,
        place: np.ndarray | None = None,
    ) -> Tensor:
        """X (N, D), or its rows at `place` (n,), in working units, copied.

        The difference is taken in float64 where X is.
        """
        shift, scale = (a.astype(X.dtype, copy=False) for a in self)
        n = len(X) if place is None else len(place)
        found = torch.empty(n, X.shape[1], dtype=dtype)
        out = found.numpy()
        limit = self.limit(dtype)

        def work(some: Iterator[slice]) -> None:
            same = out.dtype == X.dtype
            for i in some:
                part = out[i] if same else np.empty(out[i].shape, X.dtype)
                with np.errstate(over="ignore", invalid="ignore"):
                    if place is None:
                        np.subtract(X[i], shift, out=part)
                    else:
                        taken(X, place[i], part)
                        part -= shift
                    part /= scale
                if not (float(part.min()) >= -limit and float(part.max()) <= limit):
                    raise ValueError(
                        "X overflows when it is centred and scaled: some values are too far from "
                        f"those of the fit for {out.dtype}"
                    )
                if not same:
                    out[i] = part

        each(blocks(n, X.shape[1]), work)
        return found.to(device)

    def clipped(self, X: np.ndarray, dtype: torch.dtype) -> np.ndarray:
        """X (n, D), what is too far away for `apply` at its limits; float64."""
        with np.errstate(over="ignore"):
            far = np.minimum(0.5 * self.limit(dtype) * self.scale, np.finfo(np.float64).max / 4)
        return np.clip(X.astype(np.float64), self.shift - far, self.shift + far)

    @staticmethod
    def limit(dtype: torch.dtype) -> float:
        """Kernels square their inputs, so those squares have to be finite too."""
        return 0.1 * torch.finfo(dtype).max ** 0.5

    def uncentred(self) -> Scaling:
        """The same units with the user's origin."""
        return self._replace(shift=np.zeros_like(self.shift))

    def invert(self, X: Tensor) -> np.ndarray:
        """Working units back to the user's, in float64."""
        return X.detach().cpu().double().numpy() * self.scale + self.shift


class _Moments(NamedTuple):
    """Weight, and mean and variance of every feature, of some rows."""

    total: float
    mean: np.ndarray  # (D,)
    variance: np.ndarray  # (D,)

    def joined(self, other: _Moments) -> _Moments:
        """Those of both. A running mean: sums of large values could overflow."""
        total = self.total + other.total
        a, b = self.total / total, other.total / total
        d = other.mean - self.mean
        return _Moments(
            total, self.mean + b * d, a * self.variance + b * other.variance + a * b * d * d
        )


def fit_scaling(rows: Readable, center: bool, group: Group = ALONE) -> Scaling:
    """Weighted mean and standard deviation of every feature, of all ranks; 1 for a constant one.

    Without `center` the origin stays where the user put it, as a linear kernel needs. `rows` are
    those here.
    """

    every = blocks(rows.n, rows.n_features)

    def moments(i: slice, d: np.ndarray) -> tuple[_Moments, float]:
        X, _, weight = rows.read(i.start, i.stop)[:3]
        total = float(weight.sum())
        share = weight / total
        # Differences from a row: a constant column's mean is that very number.
        d[...] = X
        first = d[0].copy()
        d -= first
        # Not by BLAS: its sums depend on the number of threads.
        mean = np.einsum("i,ij->j", share, d)
        d -= mean
        variance = np.einsum("i,ij->j", share, np.square(d, out=d))
        return _Moments(total, first + mean, variance), float(np.finfo(X.dtype).eps)

    by_block: dict[int, tuple[_Moments, float]] = {}

    def work(some: Iterator[slice]) -> None:
        room = np.empty((every[0].stop, rows.n_features))
        with np.errstate(over="ignore", invalid="ignore"):  # of this thread
            for i in some:
                by_block[i.start] = moments(i, room[: i.stop - i.start])

    eps, found = 0.0, None
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(0, len(every), _ROUND):
            each(every[k : k + _ROUND], work)
            # In the order of the blocks, whoever was first.
            for start in sorted(by_block):
                part, eps = by_block.pop(start)
                found = part if found is None else found.joined(part)
        parts = group.gather((found, eps))
        eps = max(p[1] for p in parts)
        _, mean, variance = reduce(_Moments.joined, (p[0] for p in parts if p[0] is not None))
        sd = np.sqrt(variance)
    if not (np.isfinite(mean).all() and np.isfinite(sd).all()):
        raise ValueError(
            "X overflows when it is centred and scaled: rescale the features whose values are "
            "near the largest floating-point number"
        )
    # Rounding of the mean leaves a spread of this size in a constant column.
    constant = sd <= 8 * eps * np.abs(mean) + np.finfo(np.float64).tiny
    return Scaling(mean if center else np.zeros_like(mean), np.where(constant, 1.0, sd))
