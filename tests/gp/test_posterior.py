"""Whitened features and the Gaussian posterior against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from conjugp._gp.features import Features, basis, features
from conjugp._gp.posterior import Posterior, kl, marginals, moments, prior, pullback
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp.kernels import RBF, Linear, Matern32, Matern52
from problems import random_posterior

KERNELS = {
    "shared": [RBF(1.3, 2.0)],
    "per class": [RBF(1.3, 2.0), Matern32(0.9, 0.7), RBF(1.0, 1.0) + Linear(2.0, 0.5)],
}


@pytest.fixture(params=KERNELS, ids=str)
def kernels(request):
    return KERNELS[request.param]


def test_features_against_the_explicit_inverse(kernels, X, Z):
    b = basis(kernels, Z)
    f = features(b, X)
    for i, k in enumerate(kernels):
        jitter = 1e-6 * k.diag(Z).mean() * torch.eye(len(Z), dtype=Z.dtype)
        K_inv = torch.linalg.inv(k(Z, Z) + jitter)
        explained = k(X, Z) @ K_inv @ k(Z, X)
        torch.testing.assert_close(f.A[i].T @ f.A[i], explained, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(
            f.residual[i], k.diag(X) - explained.diagonal(), rtol=1e-9, atol=1e-10
        )
        torch.testing.assert_close(
            b.L_inv[i] @ (k(Z, Z) + jitter) @ b.L_inv[i].T,
            torch.eye(len(Z), dtype=Z.dtype),
            rtol=0,
            atol=1e-9,
        )
        assert torch.equal(b.L_inv[i], b.L_inv[i].tril())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_residual_stays_positive_at_the_inducing_points(X, dtype):
    f = features(basis([RBF(50.0, 3.0)], X.to(dtype)), X.to(dtype))
    assert (f.residual >= 3.0e-6 * (1 - 1e-6)).all()
    assert (f.residual <= 3.0e-3).all()


def test_the_prior_gives_back_the_kernel(kernels, X, Z):
    f = features(basis(kernels, Z), X)
    m, v, _ = marginals(moments(prior(3, len(Z), Z)), f)
    expected = torch.stack([k.diag(X) for k in kernels], 1).expand(-1, 3)
    torch.testing.assert_close(v, expected, rtol=1e-12, atol=1e-12)
    assert not m.any()


def test_marginals_against_the_explicit_inverse(kernels, X, Z):
    f = features(basis(kernels, Z), X)
    q = random_posterior(3, len(Z))
    m, v, _ = marginals(moments(q), f)
    for c in range(3):
        A, residual = f.A[c % len(kernels)], f.residual[c % len(kernels)]
        S = torch.linalg.inv(q.P[c])
        torch.testing.assert_close(m[:, c], A.T @ S @ q.h[c], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            v[:, c], residual + (A.T @ S @ A).diagonal(), rtol=1e-10, atol=1e-12
        )


def test_kl_against_torch():
    q = random_posterior(4, 6)
    S = torch.linalg.inv(q.P)
    mean = (S @ q.h.unsqueeze(-1)).squeeze(-1)
    standard = MultivariateNormal(torch.zeros(6, dtype=torch.float64), torch.eye(6).double())
    expected = kl_divergence(MultivariateNormal(mean, precision_matrix=q.P), standard).sum()
    torch.testing.assert_close(kl(moments(q)), expected, rtol=1e-11, atol=0)
    assert abs(float(kl(moments(prior(4, 6, mean))))) == 0.0


def test_pullback_against_autograd(kernels, X, Z):
    f = features(basis(kernels, Z), X)
    q = moments(random_posterior(3, len(Z)))
    g = torch.Generator().manual_seed(5)
    dm, dv = (torch.randn(len(X), 3, dtype=X.dtype, generator=g) for _ in range(2))
    leaves = Features(f.A.clone().requires_grad_(), f.residual.clone().requires_grad_())
    m, v, W = marginals(q, leaves)
    expected = torch.autograd.grad((dm * m + dv * v).sum(), leaves)
    found = pullback(q, f, W.detach(), dm, dv)
    torch.testing.assert_close(found.A, expected[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.residual, expected[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("scale", [1e5, 1e7, 1e9, 1e12])
def test_float32_with_enormous_eigenvalues(scale):
    """Rounded to float32 P is indefinite; what the data have settled is still right."""
    g = torch.Generator().manual_seed(3)
    a = torch.randn(2, 30, 10, dtype=torch.float64, generator=g)
    exact = Posterior(
        scale * torch.randn(2, 30, dtype=torch.float64, generator=g),
        torch.eye(30, dtype=torch.float64) + scale * (a @ a.mT),
    )
    rounded = Posterior(exact.h.float(), exact.P.float())
    assert scale == 1e5 or bool(torch.linalg.cholesky_ex(rounded.P.double()).info.any())
    found = moments(rounded)
    assert found.R.dtype == torch.float32
    assert torch.isfinite(found.R).all() and torch.isfinite(found.w).all()
    f = Features(a.float(), a.new_zeros(2, 10).float())
    _, v, _ = marginals(found, f)
    _, expected, _ = marginals(moments(exact), Features(a, a.new_zeros(2, 10)))
    torch.testing.assert_close(v.double(), expected, rtol=2e-3, atol=0)


def test_an_indefinite_precision_is_refused():
    P = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)).unsqueeze(0)
    with pytest.raises(FloatingPointError, match="could not be factorised"):
        moments(Posterior(torch.zeros(1, 2, dtype=torch.float64), P))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 2.0**30), (torch.float64, 2.0**60)])
def test_what_the_data_say_nothing_of_stays_free(dtype, scale):
    """Where float64 has lost the prior's identity too, and one coordinate is as it was."""
    P = torch.eye(3, dtype=torch.float64)
    P[:2, :2] += scale
    q = moments(Posterior(torch.ones(1, 3, dtype=dtype), P.to(dtype).unsqueeze(0)))
    S = (q.R[0].mT @ q.R[0]).double()
    assert torch.isfinite(q.w).all() and torch.isfinite(S).all()
    assert float(S[2, 2]) == pytest.approx(1.0, rel=1e-5)
    both = torch.tensor([1.0, 1.0, 0.0]).double()
    assert float(both @ S @ both) == pytest.approx(1 / scale, rel=1e-2)


def test_a_precision_that_is_not_finite_is_refused():
    P = torch.full((1, 2, 2), torch.nan)
    with pytest.raises(FloatingPointError, match="could not be factorised"):
        moments(Posterior(torch.zeros(1, 2), P))


@pytest.mark.parametrize("kernel", [RBF(1.3, 2.0), Matern52(1.3, 2.0)])
def test_a_basis_in_float32_of_points_with_a_long_tail(kernel):
    """Far out and close to each other, and some of them equal: no digits are left in float32."""
    g = torch.Generator().manual_seed(0)
    Z = torch.randn(80, 3, generator=g)
    Z[:, 0] = torch.where(Z[:, 0] > 0, 1e5, 0.0) + Z[:, 0]
    Z = torch.cat([Z, Z[:20], Z[:20] + 1e-3]).requires_grad_()
    b = basis([kernel], Z)
    assert b.L_inv.dtype == torch.float32
    (slope,) = torch.autograd.grad(features(b, Z[:5].detach()).A.square().sum(), Z)
    assert torch.isfinite(slope).all()
    wide, L_inv = Z.detach().double(), b.L_inv[0].detach().double()
    K = kernel(wide, wide) + 2e-4 * torch.eye(120, dtype=torch.float64)
    torch.testing.assert_close(
        L_inv @ K @ L_inv.T, torch.eye(120, dtype=torch.float64), rtol=0, atol=5e-3
    )


def test_no_kernel_is_no_kernel_in_float64_either():
    class Wrong(RBF):
        def __call__(self, X, Z):
            return -super().__call__(X, Z)

    with pytest.raises(NotPositiveDefiniteError, match="not positive definite"):
        basis([Wrong(1.0, 1.0)], torch.randn(5, 2))
