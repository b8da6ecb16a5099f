"""What the columns of X are, and the way from a user's row to working units and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from torch import Tensor

from conjugp._inputs.encoder import Encoder
from conjugp._inputs.scales import Readable, Scaling, fit_scaling
from conjugp._persistence.parts import Parts
from conjugp._rows.group import ALONE, Group
from conjugp.kernels import Kernel

_ROWS = 2**15  # rows that are scaled at a time


@dataclass(frozen=True)
class Inputs:
    """Features, D of them: their names, where they have any, their units, and for the columns of
    tables what they come from.

    Whatever has units, rows, inducing points and kernels, goes to and fro here.
    """

    scaling: Scaling
    names: tuple[str, ...] | None = None
    encoder: Encoder | None = None

    @classmethod
    def fit(
        cls,
        rows: Readable,
        kernels: Sequence[Kernel | None],
        names: tuple[str, ...] | None,
        group: Group = ALONE,
        encoder: Encoder | None = None,
    ) -> Inputs:
        """From the rows of all ranks, centred unless one of the kernels minds the origin."""
        center = all(k is None or k.stationary for k in kernels)
        scaling = fit_scaling(rows, center, group)
        if encoder is None:
            return cls(scaling, names)
        scale = np.where(encoder.own_units, 1.0, scaling.scale)
        return cls(scaling._replace(scale=scale), encoder.features, encoder)

    @property
    def groups(self) -> tuple[int, ...] | None:
        """A number for every feature; those of one group share a lengthscale. None: none do."""
        found = None if self.encoder is None else self.encoder.groups
        return found if found is not None and len(set(found)) < len(found) else None

    @property
    def n_features(self) -> int:
        """D."""
        return len(self.scaling.scale)

    def apply(self, X: np.ndarray, like: Tensor) -> Tensor:
        """X (n, D) in working units, in the dtype and on the device of `like`."""
        out = like.new_empty(X.shape)
        # In parts: no second copy of all rows.
        for i in range(0, len(X), _ROWS):
            out[i : i + _ROWS] = self.scaling.apply(X[i : i + _ROWS], like.dtype, like.device)
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
        encoder = take.optional("encoder")
        if encoder is not None:
            if not isinstance(encoder, Encoder):
                raise ValueError("encoder must be an Encoder")
            encoder.check()
            if list(encoder.features) != names:
                raise ValueError("the encoder's features are not those of the model")
        return cls(Scaling(shift, scale), None if names is None else tuple(names), encoder)
