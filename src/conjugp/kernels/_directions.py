"""Kernels of directions alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from conjugp.kernels._base import Kernel

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Normalised(Kernel):
    """A kernel of directions: k(x/|x|, z/|z|), for embeddings whose length says little.

    Parameters
    ----------
    kernel : Kernel
        What compares the unit vectors; a lengthscale left open is one for all features.
    units : array-like of shape (n_features,) or None
        What one unit of each feature is worth when lengths are measured; None: all alike.
    """

    kernel: Kernel
    units: Any = field(default=None, metadata={"fixed": True})

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            raise TypeError(f"Normalised: kernel must be a kernel, got {self.kernel!r}")
        if self.units is not None:
            units = np.array(self.units, dtype=np.float64)
            if units.ndim != 1 or not np.all((units > 0) & np.isfinite(units)):
                raise ValueError("Normalised: units must be a vector of positive, finite numbers")
            # A factor common to all features has no direction.
            alike = len(units) > 0 and np.allclose(units, units[0], rtol=1e-12, atol=0.0)
            units.flags.writeable = False
            object.__setattr__(self, "units", None if alike else units)

    def directions(self, X: Tensor) -> Tensor:
        """X (n, D) at unit length; a row of zeros stays one."""
        if self.units is not None:
            # A common factor has no direction, and would overflow.
            X = X * torch.tensor(self.units / self.units.max(), dtype=X.dtype, device=X.device)
        tiny = torch.finfo(X.dtype).tiny
        X = X / X.detach().abs().amax(1, keepdim=True).clamp_min(tiny)  # squares stay in range
        return X / X.norm(dim=1, keepdim=True).clamp_min(tiny)

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        U = self.directions(X)
        return self.kernel(U, U if X is Z else self.directions(Z))

    def diag(self, X: Tensor) -> Tensor:
        return self.kernel.diag(self.directions(X))

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """As in every kernel, but lengths on the sphere do not depend on the data's."""
        return replace(self, kernel=self.kernel.filled(torch.tensor(1.0).double(), variance))

    def to_units(self, scale: np.ndarray | Tensor) -> Self:
        """As in every kernel: lengths are measured in the units of before."""
        factor = torch.as_tensor(scale).cpu().double().numpy()
        return replace(self, units=(1.0 if self.units is None else self.units) / factor)
