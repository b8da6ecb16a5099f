"""What the columns of X are, and the way from a user's row to working units and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from torch import Tensor

from conjugp._inputs.scales import Readable, Scaling, fit_scaling
from conjugp._persistence.parts import Parts
from conjugp._rows.group import ALONE, Group
from conjugp.kernels import Kernel

_ROWS = 2**15  # rows that are scaled at a time
_LONELY = (20, 5000)  # rows of fits in which a column that one row has to itself is looked for
_AT_REST = 1e3  # times their range is a unit of such columns


@dataclass(frozen=True)
class Inputs:
    """Columns of numbers, D of them: their names, where they have any, and their units.

    Whatever has units, rows, inducing points and kernels, goes to and fro here.
    """

    scaling: Scaling
    names: tuple[str, ...] | None = None

    @classmethod
    def fit(
        cls,
        rows: Readable,
        kernels: Sequence[Kernel | None],
        names: tuple[str, ...] | None,
        group: Group = ALONE,
        complete: bool = True,
    ) -> Inputs:
        """From the rows of all ranks, centred unless one of the kernels minds the origin.

        Of a column in which all rows but one are alike, such as the dummy of a level that one row
        has, nothing can be learned: where rows are few and `complete`, none is.
        """
        center = all(k is None or k.stationary for k in kernels)
        scaling = fit_scaling(rows, center, group)
        if complete and group.size == 1 and _LONELY[0] <= rows.n <= _LONELY[1]:
            scaling = _resting(scaling, rows.read(0, rows.n).X)
        return cls(scaling, names)

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
            **self.scaling._asdict(),
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
        return cls(Scaling(shift, scale), None if names is None else tuple(names))


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
