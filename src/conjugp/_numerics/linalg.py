"""Cholesky factors: one rule for jitter, many small matrices side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from conjugp._numerics.threads import shared


class NotPositiveDefiniteError(ValueError):
    """A kernel matrix stayed indefinite at the largest jitter allowed."""


FIRST_JITTER = {torch.float64: 1e-6, torch.float32: 1e-4}


def cholesky(
    K: Tensor,
    jitter: float | None = None,
    max_jitter: float = 1e-2,
    wide: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, float]:
    """Lower Cholesky factor of K + jitter · mean(diag K) · I, and the relative jitter used.

    ``K`` is (..., M, M). ``jitter`` starts at 1e-6 (float64) or 1e-4 (float32) unless given and
    grows tenfold until the factorisation succeeds. ``jitter=0`` tries the bare matrix first.
    Where float32 fails float64 goes on, with the matrix that ``wide`` gives if it can be had with
    more digits. Differentiable with respect to ``K``, or to what ``wide`` comes from.
    """
    dtype, first = K.dtype, FIRST_JITTER[K.dtype]
    relative = first if jitter is None else float(jitter)
    while True:
        diagonal = K.diagonal(dim1=-2, dim2=-1)
        mean = diagonal.mean(-1, keepdim=True)
        shifted = K + torch.diag_embed((relative * mean).expand_as(diagonal)) if relative else K
        L, info = torch.linalg.cholesky_ex(shifted)
        if not bool(info.any()):
            return L.to(dtype), relative
        if K.dtype == torch.float32:
            K = K.double() if wide is None else wide()
            continue
        if not bool(torch.isfinite(K).all()):
            raise NotPositiveDefiniteError(
                "The kernel matrix has NaN or infinite entries: check the inputs for overflow "
                "and the kernel's lengthscale and variance."
            )
        if relative * 10.0 > max_jitter * (1.0 + 1e-9):
            raise NotPositiveDefiniteError(
                f"The {K.shape[-1]}x{K.shape[-1]} kernel matrix is not positive definite even "
                f"with {relative:.0e} of its mean diagonal added. Use fewer or more distinct "
                "inducing points, a shorter lengthscale, dtype='float64', or a larger jitter."
            )
        relative = max(relative * 10.0, first)


def root_of(K: Tensor) -> Tensor:
    """L with L Lᵀ = K for a covariance K (M, M) that is positive semi-definite up to rounding.

    What is left of a prior after it has met data may be no more than the rounding of both.
    """
    L, info = torch.linalg.cholesky_ex(
        K + FIRST_JITTER[K.dtype] * K.diagonal().mean() * torch.eye(len(K)).to(K)
    )
    if not bool(info):
        return L
    values, vectors = torch.linalg.eigh(K.double())
    return (vectors * values.clamp_min(0.0).sqrt()).to(K)


def inverse_factors(P: Tensor, R: Tensor, info: Tensor, eye: Tensor) -> None:
    """Write L⁻¹ to R for matrices P = L Lᵀ (C, M, M); info (C,) is 0 where there is such an L.

    Not differentiable.
    """

    def some(c: slice) -> None:
        L, info[c] = torch.linalg.cholesky_ex(P[c])
        torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False, out=R[c])

    if P.is_cuda:
        some(slice(len(P)))
    else:
        shared(len(P), P.shape[1], some)
