"""X -> whitened features A and the residual variance (docs/math.md, Q1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._numerics.linalg import cholesky
from conjugp.kernels import Kernel

LEAST_RESIDUAL = 1e-6  # of the prior variance


class Basis(NamedTuple):
    """Inducing points and the inverse Cholesky factor of their kernel matrix.

    K is 1 when all classes share one kernel and C when each has its own.
    """

    kernels: tuple[Kernel, ...]  # K kernels
    Z: Tensor  # (M, D)
    L_inv: Tensor  # (K, M, M), lower triangular, L_inv K_ZZ L_invᵀ = I
    kept: float = 1.0  # the share of k̃ that rows keep (Q9)


class Features(NamedTuple):
    """A = L⁻¹ K_ZX, and of what it leaves unexplained, k̃ = k(x, x) - Σ A², the share kept."""

    A: Tensor  # (K, M, B)
    residual: Tensor  # (K, B), kept·k̃


def basis(
    kernels: Sequence[Kernel], Z: Tensor, jitter: float | None = None, kept: float = 1.0
) -> Basis:
    """Factorise K_ZZ = L Lᵀ for every kernel. Differentiable in kernels and Z."""

    def matrices(Z: Tensor) -> Tensor:
        return torch.stack([k(Z, Z) for k in kernels])

    # Of float64 rows the matrix has digits that one of float32 has not.
    L, _ = cholesky(matrices(Z), jitter, wide=lambda: matrices(Z.double()))
    eye = torch.eye(len(Z), dtype=Z.dtype, device=Z.device)
    # With many right-hand sides a product with the explicit inverse beats a triangular solve.
    L_inv = torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False)
    return Basis(tuple(kernels), Z, L_inv, kept)


def features(b: Basis, X: Tensor) -> Features:
    """Whitened features of X (B, D) (Q1)."""
    K = torch.stack([k(b.Z, X) for k in b.kernels])
    A = b.L_inv @ K
    prior = torch.stack([k.diag(X) for k in b.kernels])
    return Features(A, b.kept * unexplained(prior, A.square().sum(1)))


def unexplained(prior: Tensor, explained: Tensor) -> Tensor:
    """What is left of the prior variance; v must stay positive, whatever rounding does."""
    return torch.maximum(prior - explained, LEAST_RESIDUAL * prior.detach())


@torch.no_grad()
def own_features(b: Basis, X: Tensor) -> Features:
    """Features of rows that each belong to one class, X (n, C, D): (C, M, n), one kernel (Q1)."""
    n, C, _ = X.shape
    f = features(b, X.reshape(n * C, -1))
    return Features(f.A.view(-1, n, C).permute(2, 0, 1), f.residual.view(n, C).T)
