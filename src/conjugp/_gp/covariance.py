"""Covariance families of the whitened posterior: one class each (docs/math.md, Q4-Q6)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from conjugp._gp.posterior import Posterior, moments
from conjugp._persistence.codec import in_checkpoints

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class Covariance(ABC):
    """S = P⁻¹ of every class, kept as R with S = RᵀR: triangular (C or 1, M, M) if nothing else."""

    family: ClassVar[str]  # to users, and in files
    own_kernels: ClassVar[bool] = False  # whether every class may have a kernel of its own

    R: Tensor

    @staticmethod
    @abstractmethod
    def shape(n_classes: int, n_inducing: int) -> tuple[int, ...]:
        """Of R, for C classes on M inducing points."""

    @staticmethod
    def rows(theta: Tensor) -> Tensor:
        """Site precisions of the matrices there are, (C or 1, B), from those of all (B, C)."""
        return theta.T

    @classmethod
    def precision(cls, A: Tensor, theta: Tensor) -> Tensor:
        """The optimal P, as R in shape, for site precisions theta (B, C) at features A (M, B)."""
        rows = cls.rows(theta)
        C, M = len(rows), len(A)
        P = ((A * rows.unsqueeze(1)).reshape(C * M, A.shape[1]) @ A.T).reshape(C, M, M)
        torch.diagonal(P, dim1=-2, dim2=-1).add_(1)
        return P

    @classmethod
    def from_precision(cls, P: Tensor) -> Self:
        """S = P⁻¹."""
        return cls(moments(Posterior(P.new_zeros(P.shape[:2]), P)).R)

    def to_precision(self) -> Tensor:
        """P = S⁻¹."""
        # Not `linalg.inv`: MKL's LU factorisation by several threads fails on some processors.
        eye = torch.eye(self.R.shape[-1], dtype=self.R.dtype, device=self.R.device)
        L = torch.linalg.solve_triangular(self.R, eye.expand_as(self.R), upper=False)
        return L @ L.mT

    def quadratic(self, A: Tensor) -> Tensor:
        """diag(Aᵀ S A) for features A (K, M, B): (C or 1, B)."""
        out = A.new_empty(max(len(self.R), len(A)), A.shape[2])
        for c in range(len(out)):
            # One class at a time: no (C, M, B) temporary however many classes there are.
            out[c] = self.root(A, c).square().sum(0)
        return out

    def root(self, A: Tensor, c: int) -> Tensor:
        """W (M, B) with WᵀW = Aᵀ S A for class c."""
        return self.R[c % len(self.R)] @ A[c % len(A)]

    def diagonal(self) -> Tensor:
        """The diagonal of R, whose logs sum to ½ log det S."""
        return torch.diagonal(self.R, dim1=-2, dim2=-1)

    def kl(self, n_classes: int) -> Tensor:
        """The part of KL(q ‖ prior) that S contributes, summed over classes (Q2)."""
        R, diagonal = self.R, self.diagonal()
        copies = n_classes / len(R)
        return 0.5 * copies * (R.square().sum() - diagonal.numel() - 2 * diagonal.log().sum())


@in_checkpoints
class Full(Covariance):
    """S of every class: P_c = I + A diag(θ_c) Aᵀ."""

    family, own_kernels = "full", True

    @staticmethod
    def shape(n_classes: int, n_inducing: int) -> tuple[int, ...]:
        return n_classes, n_inducing, n_inducing


@in_checkpoints
class Shared(Covariance):
    """One S for all classes: θ averaged over them."""

    family = "shared"

    @staticmethod
    def shape(n_classes: int, n_inducing: int) -> tuple[int, ...]:
        return 1, n_inducing, n_inducing

    @staticmethod
    def rows(theta: Tensor) -> Tensor:
        return theta.mean(1, keepdim=True).T


@in_checkpoints
class Diagonal(Covariance):
    """A diagonal S of every class, from diag P_c alone: R (C, M)."""

    family = "diagonal"

    @staticmethod
    def shape(n_classes: int, n_inducing: int) -> tuple[int, ...]:
        return n_classes, n_inducing

    @classmethod
    def precision(cls, A: Tensor, theta: Tensor) -> Tensor:
        return 1 + (A.square() @ theta).T

    @classmethod
    def from_precision(cls, P: Tensor) -> Self:
        return cls(P.rsqrt())

    def to_precision(self) -> Tensor:
        return self.R.square().reciprocal()

    def quadratic(self, A: Tensor) -> Tensor:
        return self.R.square() @ A[0].square()

    def root(self, A: Tensor, c: int) -> Tensor:
        return self.R[c].unsqueeze(1) * A[0]

    def diagonal(self) -> Tensor:
        return self.R


@in_checkpoints
class Point(Shared):
    """None: q is the mode of the posterior, a point, and R (1, 0, 0)."""

    family = "none"

    @staticmethod
    def shape(n_classes: int, n_inducing: int) -> tuple[int, ...]:
        return 1, 0, 0


_CLASSES: tuple[type[Covariance], ...] = (Full, Shared, Diagonal, Point)
NONE = Point.family
FAMILIES = tuple(cls.family for cls in _CLASSES if cls is not Point)


def family(name: str) -> type[Covariance]:
    """The family of that name; ValueError if there is none."""
    for cls in _CLASSES:
        if cls.family == name:
            return cls
    raise ValueError(f"{name!r} is no covariance family")


def covariance(name: str, A: Tensor, theta: Tensor) -> Covariance:
    """The optimal S of a family for site precisions theta (B, C) at features A (M, B)."""
    cls = family(name)
    return cls.from_precision(cls.precision(A, theta))


def quadratic(S: Covariance, A: Tensor) -> Tensor:
    """diag(Aᵀ S A) for features A (K, M, B): (C or 1, B)."""
    return S.quadratic(A)


def kl(S: Covariance, n_classes: int) -> Tensor:
    """The part of KL(q ‖ prior) that S contributes, summed over classes (Q2)."""
    return S.kl(n_classes)
