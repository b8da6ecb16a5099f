"""Kernels of some of the columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from conjugp.kernels._base import Kernel

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Columns(Kernel):
    """A kernel of some of the columns: k(x_S, z_S), whatever the others are.

    Parameters
    ----------
    kernel : Kernel
        What compares them; it has one lengthscale, or one for each of them.
    columns : tuple of int
        Their positions in X, from 0.
    """

    kernel: Kernel
    columns: tuple[int, ...] = field(metadata={"fixed": True})

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            raise TypeError(f"Columns: kernel must be a kernel, got {self.kernel!r}")
        known = isinstance(self.columns, tuple) and all(
            isinstance(i, int) and i >= 0 for i in self.columns
        )
        if not known or not self.columns or len(set(self.columns)) < len(self.columns):
            raise ValueError(
                f"Columns: columns must be a tuple of different positions, got {self.columns!r}"
            )

    @property
    def stationary(self) -> bool:
        return self.kernel.stationary

    def of(self, X: Tensor) -> Tensor:
        """Their values: X (n, D) -> (n, number of columns)."""
        if max(self.columns) >= X.shape[-1]:
            raise ValueError(f"Columns: there is no column {max(self.columns)} in {X.shape[-1]}")
        return X[:, list(self.columns)]

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        U = self.of(X)
        return self.kernel(U, U if X is Z else self.of(Z))

    def diag(self, X: Tensor) -> Tensor:
        return self.kernel.diag(self.of(X))

    def _owners(self, groups: Sequence[int]) -> list[Any]:
        return self.kernel._owners([groups[i] for i in self.columns])

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """As in every kernel, with the lengthscales of these columns."""
        lengths = lengthscale[list(self.columns)] if lengthscale.ndim else lengthscale
        return replace(self, kernel=self.kernel.filled(lengths, variance))

    def to_units(self, scale: np.ndarray | Tensor) -> Self:
        """As in every kernel, by the factors of these columns."""
        return replace(
            self, kernel=self.kernel.to_units(torch.as_tensor(scale)[list(self.columns)])
        )
