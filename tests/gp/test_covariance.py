"""Covariance families: each the optimum of its family, and equal to dense algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from conjugp._gp.covariance import (
    FAMILIES,
    NONE,
    Covariance,
    covariance,
    kl,
    quadratic,
)
from conjugp._gp.covariance import (
    family as family_of,
)
from conjugp._gp.features import basis, features
from conjugp.kernels import RBF
from problems import LIKELIHOOD, blobs, generator

M, B, C = 6, 25, 3


@pytest.fixture
def A() -> Tensor:
    data = blobs(B, C)
    return features(basis([RBF(1.0, 4.0)], data.X[:M] + 0.1), data.X).A[0]


@pytest.fixture
def theta() -> Tensor:
    return torch.rand(B, C, dtype=torch.float64, generator=generator(4))


def dense(S: Covariance) -> Tensor:
    """S_c for every class, (C, M, M)."""
    if S.family == "diagonal":
        return torch.diag_embed(S.R.square())
    return (S.R.mT @ S.R).expand(C, M, M)


def dense_kl(S: Tensor) -> Tensor:
    """Σ_c KL(N(0, S_c) ‖ N(0, I)), differentiable."""
    trace = torch.diagonal(S, dim1=-2, dim2=-1).sum()
    return 0.5 * (trace - S.shape[0] * M - torch.logdet(S).sum())


def free_covariance(family: str, S: Tensor) -> tuple[Tensor, Tensor]:
    """S (C, M, M) as a function of parameters that span the family, and these, at S."""
    if family == "diagonal":
        x = torch.diagonal(S, dim1=-2, dim2=-1).clone().requires_grad_()
        return x, torch.diag_embed(x)
    x = (S[:1] if family == "shared" else S).clone().requires_grad_()
    return x, (0.5 * (x + x.mT)).expand(C, M, M)


@pytest.mark.parametrize("family", FAMILIES)
def test_quadratic_root_and_kl_are_dense_algebra(family, A, theta):
    S = covariance(family, A, theta)
    full = dense(S)
    expected = torch.einsum("mb,cmn,nb->cb", A, full, A)
    found = quadratic(S, A.unsqueeze(0)).expand(C, B)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    for c in range(C):
        W = S.root(A.unsqueeze(0), c)
        torch.testing.assert_close(W.T @ W, A.T @ full[c] @ A, rtol=1e-11, atol=1e-13)
    zero = torch.zeros(C, M, dtype=A.dtype)
    standard = MultivariateNormal(zero[0], torch.eye(M, dtype=A.dtype))
    expected = kl_divergence(MultivariateNormal(zero, full), standard).sum()
    torch.testing.assert_close(kl(S, C), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", [*FAMILIES, NONE])
def test_every_family_keeps_the_contract(name, A, theta):
    cls = family_of(name)
    P = cls.precision(A if name != NONE else A[:0], theta)
    S = cls.from_precision(P)
    assert isinstance(S, cls) and S.family == name
    assert P.shape == S.R.shape == cls.shape(C, M)
    torch.testing.assert_close(S.to_precision(), P, rtol=1e-9, atol=1e-12)


def test_a_point_has_no_variance(A):
    S = family_of(NONE)(A.new_zeros(1, 0, 0))
    assert quadratic(S, A[None, :0]).tolist() == [[0.0] * B] and float(kl(S, C)) == 0.0
    assert S.root(A[None, :0], 1).shape == (0, B)


def test_families_that_are_none():
    with pytest.raises(ValueError, match="'banded' is no covariance family"):
        family_of("banded")


@pytest.mark.parametrize("family", ["full", "shared"])
def test_kernels_of_their_own(family, theta):
    """Features (C, M, B), one set for each class."""
    data = blobs(B, C)
    kernels = [RBF(0.5, 1.0), RBF(1.0, 2.0), RBF(2.0, 3.0)]
    A = features(basis(kernels, data.X[:M] + 0.1), data.X).A
    S = covariance(family, A[0], theta)
    expected = torch.einsum("cmb,cmn,cnb->cb", A, dense(S), A)
    torch.testing.assert_close(quadratic(S, A), expected, rtol=1e-11, atol=1e-13)
    for c in range(C):
        W = S.root(A, c)
        torch.testing.assert_close(W.T @ W, A[c].T @ dense(S)[c] @ A[c], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("family", FAMILIES)
def test_optimum_for_given_precisions(family, A, theta):
    """−½ Σ θ aᵀSa − KL is concave in S: its gradient within the family vanishes at the answer."""
    x, S = free_covariance(family, dense(covariance(family, A, theta)).detach())
    value = -0.5 * torch.einsum("bc,mb,cmn,nb->", theta, A, S, A) - dense_kl(S)
    (gradient,) = torch.autograd.grad(value, x)
    assert gradient.abs().max() < 1e-11
    # Not so a little beside it.
    x, S = free_covariance(family, dense(covariance(family, A, 1.01 * theta)).detach())
    value = -0.5 * torch.einsum("bc,mb,cmn,nb->", theta, A, S, A) - dense_kl(S)
    assert torch.autograd.grad(value, x)[0].abs().max() > 1e-3


@pytest.mark.parametrize("bound", ["collapsed", "augmented"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stationary_point_of_the_elbo(family, bound, A):
    """Where precisions and covariance agree, the ELBO itself is stationary in the covariance."""
    data = blobs(B, C)
    m = torch.randn(B, C, dtype=A.dtype, generator=generator(1))
    residual = 0.1
    v = torch.ones_like(m)
    for _ in range(300):
        S = covariance(family, A, LIKELIHOOD.site(data.y, m, v, bound).precision)
        v = (residual + quadratic(S, A.unsqueeze(0))).T.expand(B, C)

    def elbo(full: Tensor) -> Tensor:
        v = residual + torch.einsum("mb,cmn,nb->bc", A, full, A)
        return LIKELIHOOD.site(data.y, m, v, bound).bound.sum() - dense_kl(full)

    x, full = free_covariance(family, dense(S).detach())
    assert torch.autograd.grad(elbo(full), x)[0].abs().max() < 1e-9
    # And by finite differences of the bound itself.
    direction = torch.randn(x.shape, dtype=A.dtype, generator=generator(2))
    at = []
    with torch.no_grad():
        for step in (-1e-4, 0.0, 1e-4):
            y = x + step * direction * x.abs().max()
            y = torch.diag_embed(y) if family == "diagonal" else 0.5 * (y + y.mT).expand(C, M, M)
            at.append(float(elbo(y)))
    assert abs(at[2] - at[0]) < 1e-3 * abs(at[2] + at[0] - 2 * at[1])
    assert max(at[0], at[2]) < at[1]
