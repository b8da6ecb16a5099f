"""Covariance families of the whitened posterior: full, shared, diagonal (docs/math.md, Q4-Q6).

And none at all: the posterior's mode, a point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._gp.posterior import Posterior, moments

FAMILIES = ("full", "shared", "diagonal")
NONE = "none"


class Covariance(NamedTuple):
    """S = RᵀR for each class ("full"), for all of them ("shared"), or a diagonal R for each."""

    family: str
    R: Tensor  # (C, M, M), (1, M, M) or (C, M); nothing, (1, 0, 0), for "none"


def covariance(family: str, A: Tensor, theta: Tensor) -> Covariance:
    """The optimal S of a family for site precisions theta (B, C) at features A (M, B).

    full: P_c = I + A diag(θ_c) Aᵀ. shared: θ averaged over classes. diagonal: diag P_c alone.
    """
    return from_precision(family, precision(family, A, theta))


def precision(family: str, A: Tensor, theta: Tensor) -> Tensor:
    """P of a family: (C, M, M), (1, M, M) or, its diagonal, (C, M)."""
    if family == "diagonal":
        return 1 + (A.square() @ theta).T
    rows = theta.T if family == "full" else theta.mean(1, keepdim=True).T
    C, M = len(rows), len(A)
    P = ((A * rows.unsqueeze(1)).reshape(C * M, -1) @ A.T).reshape(C, M, M)
    torch.diagonal(P, dim1=-2, dim2=-1).add_(1)
    return P


def from_precision(family: str, P: Tensor) -> Covariance:
    """S = P⁻¹."""
    if family == "diagonal":
        return Covariance(family, P.rsqrt())
    return Covariance(family, moments(Posterior(P.new_zeros(P.shape[:2]), P)).R)


def to_precision(S: Covariance) -> Tensor:
    """P = S⁻¹."""
    if S.family == "diagonal":
        return S.R.square().reciprocal()
    # Not `linalg.inv`: MKL's LU factorisation by several threads fails on some processors.
    eye = torch.eye(S.R.shape[-1], dtype=S.R.dtype, device=S.R.device)
    L = torch.linalg.solve_triangular(S.R, eye.expand_as(S.R), upper=False)
    return L @ L.mT


def quadratic(S: Covariance, A: Tensor) -> Tensor:
    """diag(Aᵀ S A) for features A (K, M, B): (C or 1, B)."""
    if S.family == "diagonal":
        return S.R.square() @ A[0].square()
    out = A.new_empty(max(len(S.R), len(A)), A.shape[2])
    for c in range(len(out)):
        # One class at a time: no (C, M, B) temporary however many classes there are.
        W = S.R[c % len(S.R)] @ A[c % len(A)]
        out[c] = W.square().sum(0)
    return out


def root(S: Covariance, A: Tensor, c: int) -> Tensor:
    """W (M, B) with WᵀW = Aᵀ S A for class c."""
    if S.family == "diagonal":
        return S.R[c].unsqueeze(1) * A[0]
    return S.R[c % len(S.R)] @ A[c % len(A)]


def kl(S: Covariance, n_classes: int) -> Tensor:
    """The part of KL(q ‖ prior) that S contributes, summed over classes (Q2)."""
    R = S.R
    diagonal = R if S.family == "diagonal" else torch.diagonal(R, dim1=-2, dim2=-1)
    copies = n_classes / len(R)
    return 0.5 * copies * (R.square().sum() - diagonal.numel() - 2 * diagonal.log().sum())
