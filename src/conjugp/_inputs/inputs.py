"""What the columns of X are, and the way from a user's row to working units and back.

Working units are centred, of order one, and finite in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from conjugp._inputs.encoder import Encoder
from conjugp._inputs.taming import Taming, directions, tamed
from conjugp._numerics.threads import blocks, each
from conjugp._persistence.codec import in_checkpoints
from conjugp._persistence.parts import Parts
from conjugp._rows.canonical import Rows, taken
from conjugp._rows.group import ALONE, Group
from conjugp._rows.on_disk import Store
from conjugp.kernels import Kernel

_ROUND = 1024  # blocks whose moments are kept until they are joined
_ROWS = 2**15  # rows that are scaled at a time
_LONELY = (20, 5000)  # rows of fits in which a column that one row has to itself is looked for
_TAMED = (20, 10_000)  # rows of fits in which columns with long tails are looked for
_AT_REST = 1e3  # times their range is a unit of such columns; nobody else's rows are so near 0


@in_checkpoints
class Scaling(NamedTuple):
    """x -> (x - shift) / scale, feature by feature, and what is then tamed."""

    shift: np.ndarray  # (D,) float64
    scale: np.ndarray  # (D,) float64, positive
    taming: Taming | None = None

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
        shift, scale = (a.astype(X.dtype, copy=False) for a in self[:2])
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
                if self.taming is not None:
                    self.taming.apply(X[i] if place is None else X[place[i]], part)
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

    @property
    def origin(self) -> np.ndarray:
        """What takes working units to the user's origin (D,); that of tamed columns is theirs."""
        return (self.shift - self.uncentred().shift) / self.scale

    def uncentred(self) -> Scaling:
        """The same units with the user's origin."""
        kept = np.zeros(len(self.shift), dtype=bool)
        if self.taming is not None:
            kept[self.taming.columns] = True
        return self._replace(shift=np.where(kept, self.shift, 0.0))

    def invert(self, X: Tensor) -> np.ndarray:
        """Working units back to the user's, in float64."""
        work = X.detach().cpu().double().numpy().copy()
        found = work * self.scale + self.shift
        if self.taming is not None:
            self.taming.invert(work, self.shift, self.scale)
            found[:, self.taming.columns] = work[:, self.taming.columns]
        return found


@dataclass(frozen=True)
class Inputs:
    """Features, D of them: their names, where they have any, their units, and for the columns of
    tables what they come from.

    Whatever has units, rows, inducing points and kernels, goes to and fro here.
    """

    scaling: Scaling
    names: tuple[str, ...] | None = None
    encoder: Encoder | None = None
    embedding: bool = False  # of the rows of a fit: whether their directions may be what matters

    @classmethod
    def fit(
        cls,
        rows: Rows | Store,
        kernels: Sequence[Kernel | None],
        names: tuple[str, ...] | None,
        group: Group = ALONE,
        complete: bool = True,
        encoder: Encoder | None = None,
    ) -> Inputs:
        """From the rows of all ranks, centred unless one of the kernels minds the origin.

        Of a column in which all rows but one are alike, such as the dummy of a level that one row
        has, nothing can be learned: where rows are few and `complete`, and kernels are our choice,
        none is; and columns whose distances say little are tamed.
        """
        center = all(k is None or k.stationary for k in kernels)
        scaling = fit_scaling(rows, center, group)
        features = names
        if encoder is not None:
            scaling = scaling._replace(scale=np.where(encoder.own_units, 1.0, scaling.scale))
            features = encoder.features
        complete, embedding = complete and all(k is None for k in kernels), False
        if complete and _TAMED[0] <= sum(group.gather(rows.n)) <= _TAMED[1]:
            own = np.zeros(len(scaling.scale), bool) if encoder is None else encoder.own_units
            here = rows.read(0, rows.n)
            X, weight = map(np.concatenate, zip(*group.gather((here.X, here.weight)), strict=True))
            taming = tamed(X, weight, *scaling[:2], ~own)
            embedding = encoder is None and directions(X, weight, taming)
            scaling = scaling if embedding else scaling._replace(taming=taming)
        complete = complete and group.size == 1
        if complete and _LONELY[0] <= rows.n <= _LONELY[1]:
            scaling = _resting(scaling, rows.read(0, rows.n).X)
        return cls(scaling, features, encoder, embedding)

    @property
    def groups(self) -> tuple[int, ...] | None:
        """A number for every feature; those of one group share a lengthscale. None: none do."""
        found = None if self.encoder is None else self.encoder.groups
        return found if found is not None and len(set(found)) < len(found) else None

    @property
    def columns(self) -> dict[str, str] | None:
        """What became of each column of a table, in words."""
        if self.encoder is None:
            return None
        found, said = self.encoder.columns, "its long tails tamed"
        if self.scaling.taming is not None:
            for name in {self.encoder.owners[j] for j in self.scaling.taming.columns}:
                found[name] += f", {said}" * (said not in found[name])
        return found

    @property
    def n_features(self) -> int:
        """D."""
        return len(self.scaling.scale)

    def apply(self, X: np.ndarray, like: Tensor) -> Tensor:
        """X (n, D) in working units, in the dtype and on the device of `like`."""
        out = like.new_empty(X.shape)
        # In parts: no second copy of all rows.
        for i in range(0, len(X), _ROWS):
            part = X[i : i + _ROWS]
            try:
                out[i : i + _ROWS] = self.scaling.apply(part, like.dtype, like.device)
            except ValueError:  # so far away that it does not matter how far
                part = self.scaling.clipped(part, like.dtype)
                out[i : i + _ROWS] = self.scaling.apply(part, like.dtype, like.device)
        return out

    def invert(self, X: Tensor) -> np.ndarray:
        """Working units back to the user's, in float64."""
        return self.scaling.invert(X)

    @overload
    def inward(self, kernel: Kernel) -> Kernel: ...
    @overload
    def inward(self, kernel: Kernel | None) -> Kernel | None: ...
    def inward(self, kernel: Kernel | None) -> Kernel | None:
        """A kernel of the user's units for working units; None stays None."""
        return None if kernel is None else kernel.to_units(1 / self.scaling.scale)

    def outward(self, kernel: Kernel) -> Kernel:
        """A kernel of working units for the user's, with plain numbers."""
        return kernel.to_units(self.scaling.scale).frozen()

    def describe(self) -> dict[str, Any]:
        """By the names of the format of model files."""
        return {
            "n_features": self.n_features,
            "feature_names": None if self.names is None else list(self.names),
            "shift": self.scaling.shift,
            "scale": self.scaling.scale,
            **({} if self.scaling.taming is None else {"taming": self.scaling.taming}),
            **({} if self.encoder is None else {"encoder": self.encoder}),
        }

    @classmethod
    def read(cls, take: Parts) -> Inputs:
        """From what `describe` gave; anything else is an error."""
        D, names = take.whole("n_features", 1), take.any("feature_names")
        if names is not None and not (
            isinstance(names, list) and len(names) == D and all(isinstance(n, str) for n in names)
        ):
            raise ValueError("feature_names must be one text for each feature")
        shift, scale = (take.array(name, np.float64, D) for name in ("shift", "scale"))
        if not (scale > 0).all():
            raise ValueError("scale must be positive")
        taming = take.optional("taming")
        if taming is not None:
            if not isinstance(taming, Taming):
                raise ValueError("taming must be a Taming")
            taming.check(D)
        encoder = take.optional("encoder")
        if encoder is not None:
            if not isinstance(encoder, Encoder):
                raise ValueError("encoder must be an Encoder")
            encoder.check()
            if list(encoder.features) != names:
                raise ValueError("the encoder's features are not those of the model")
        return cls(Scaling(shift, scale, taming), None if names is None else tuple(names), encoder)


def _resting(scaling: Scaling, X: np.ndarray) -> Scaling:
    """The same with columns at rest in which one row of X (n, D) alone differs from the others."""
    n = len(X)
    lonely = ((X == X[0]).sum(axis=0) == n - 1) | ((X == X[1]).sum(axis=0) == n - 1)
    if not lonely.any():
        return scaling
    with np.errstate(over="ignore"):
        wide = _AT_REST * np.ptp(X[:, lonely].astype(np.float64), axis=0)
    scale = scaling.scale.copy()
    scale[lonely] = np.where(np.isfinite(wide) & (wide > 0), wide, scale[lonely])
    return scaling._replace(scale=scale)


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


def fit_scaling(rows: Rows | Store, center: bool, group: Group = ALONE) -> Scaling:
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
