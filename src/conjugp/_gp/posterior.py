"""The whitened Gaussian q(ũ^c) = N(P⁻¹h, P⁻¹), one per class (docs/math.md, Q1-Q4).

With kernels, inducing points and prior means it is the state of a fit: all that changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._gp.features import Features
from conjugp._numerics.linalg import inverse_factors
from conjugp._persistence.codec import in_checkpoints
from conjugp.kernels import Kernel


@in_checkpoints
class Posterior(NamedTuple):
    """Natural parameters of C independent Gaussians over M whitened coordinates.

    The prior is h = 0, P = I, and every update keeps P ⪰ I, so that P always
    factorises without jitter.
    """

    h: Tensor  # (C, M)
    P: Tensor  # (C, M, M)


@in_checkpoints
@dataclass
class State:
    """Everything that changes during a fit."""

    template: Kernel
    theta: Tensor  # (K, T) log kernel parameters
    Z: Tensor  # (M, D)
    mean: Tensor  # (C,)
    q: Posterior
    step: int = 0

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """One kernel, or one for each class."""
        return tuple(self.template.with_theta(t) for t in self.theta)


class Moments(NamedTuple):
    """A posterior solved once for its marginals: what a step and a prediction need."""

    w: Tensor  # (C, M), the mean P⁻¹h
    R: Tensor  # (C, M, M), inverse Cholesky factor of P, so that P⁻¹ = RᵀR


def prior(n_classes: int, n_inducing: int, like: Tensor) -> Posterior:
    """h = 0, P = I."""
    eye = torch.eye(n_inducing, dtype=like.dtype, device=like.device)
    h = torch.zeros(n_classes, n_inducing, dtype=like.dtype, device=like.device)
    return Posterior(h, eye.repeat(n_classes, 1, 1))


def initial_state(kernels: list[Kernel], Z: Tensor, mean: Tensor) -> State:
    """The prior: q = N(0, I) for every class."""
    theta = torch.stack([k.theta for k in kernels]).to(Z)
    return State(kernels[0], theta.detach().clone(), Z.clone(), mean, prior(len(mean), len(Z), Z))


def moments(q: Posterior) -> Moments:
    """Factorise P, which needs no gradient.

    float32 loses P at eigenvalues near 1e7: float64 and a jitter then take over.
    """
    C, M = q.h.shape
    R = torch.empty_like(q.P, memory_format=torch.contiguous_format)
    info = torch.empty(C, dtype=torch.int32, device=q.P.device)
    h, eye = q.h, torch.eye(M, dtype=q.P.dtype, device=q.P.device)
    inverse_factors(q.P, R, info, eye)
    if bool(info.any()):
        h, eye = h.double(), eye.double()
        R = torch.linalg.solve_triangular(_factor(q.P), eye.expand_as(R), upper=False)
    w = (R.mT @ (R @ h.unsqueeze(-1))).squeeze(-1)
    return Moments(w.to(q.h.dtype), R.to(q.h.dtype))


def _factor(P: Tensor) -> Tensor:
    """L of P (C, M, M) in float64, where rounding has swallowed the prior's identity.

    Rounding is relative to the diagonal, entry by entry, and so is the jitter that makes up for
    it: coordinates that the data say little of stay as free as they can.
    """
    relative, wide = torch.finfo(P.dtype).eps, P.double()
    diagonal = torch.diag_embed(torch.diagonal(wide, dim1=-2, dim2=-1))
    while relative < 0.1:
        L, info = torch.linalg.cholesky_ex(wide + relative * diagonal)
        if not bool(info.any()):
            return L
        relative *= 10
    raise FloatingPointError(
        "the posterior precision could not be factorised; lower the kernel variance or "
        "the sample weights"
    )


def project(R: Tensor, A: Tensor) -> Tensor:
    """R A for every class, (C, M, B), as one product when the features are shared."""
    if A.shape[0] > 1:
        return R @ A
    C, M, _ = R.shape
    return (R.reshape(C * M, M) @ A[0]).reshape(C, M, -1)


def marginals(q: Moments, f: Features) -> tuple[Tensor, Tensor, Tensor]:
    """m - mean and v of q(f) at the batch, both (B, C), and W = R A (C, M, B) (Q1)."""
    W = project(q.R, f.A)
    m = (q.w.unsqueeze(1) @ f.A).squeeze(1)
    v = f.residual + W.square().sum(1)
    return m.T, v.T, W


def pullback(q: Moments, f: Features, W: Tensor, dm: Tensor, dv: Tensor) -> Features:
    """Gradients of Σ dm·m + dv·v with respect to A and the residual."""
    # A transposed view here would make the (C, M, B) product below strided, and its copy costly.
    dm, dv = dm.T.contiguous(), dv.T.contiguous()
    if f.A.shape[0] > 1:
        dA = q.w.unsqueeze(-1) * dm.unsqueeze(1) + 2 * (q.R.mT @ (W * dv.unsqueeze(1)))
        return Features(dA, dv)
    C, M, B = W.shape
    scaled = (W * dv.unsqueeze(1)).reshape(C * M, B)
    dA = torch.addmm(q.w.T @ dm, q.R.reshape(C * M, M).T, scaled, alpha=2)
    return Features(dA.unsqueeze(0), dv.sum(0, keepdim=True))


def class_kl(q: Moments) -> Tensor:
    """KL(q(ũ) ‖ N(0, I)) of every class, (C,) (Q2)."""
    logdet_S = 2 * torch.diagonal(q.R, dim1=-2, dim2=-1).log().sum(-1)
    return 0.5 * (q.w.square().sum(-1) + q.R.square().sum((-2, -1)) - q.w.shape[1] - logdet_S)


def kl(q: Moments) -> Tensor:
    """KL(q(ũ) ‖ N(0, I)) summed over classes (Q2)."""
    return class_kl(q).sum()
