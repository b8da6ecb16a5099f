"""Linear functions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from conjugp.kernels._base import Kernel
from conjugp.kernels._parameters import Lengths, Positive


@dataclass(frozen=True)
class Linear(Kernel):
    """Linear functions through the origin: variance · Σ_d x_d z_d / ℓ_d²."""

    lengthscale: Lengths = None
    variance: Positive = None

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        weight = self.parameter("variance", X) / self.parameter("lengthscale", X).square()
        return X @ (Z * weight).T

    def diag(self, X: Tensor) -> Tensor:
        weight = self.parameter("variance", X) / self.parameter("lengthscale", X).square()
        return (X.square() * weight).sum(1)
