"""Scalars and quadrature against mpmath, dense grids and limits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, log_expit, logsumexp

from conjugp._numerics.expectations import (
    expected_log_sigmoid,
    gamma_total,
    log_gamma_minus_entropy,
    logistic_moments,
    tilt,
)
from conjugp._numerics.linalg import NotPositiveDefiniteError, cholesky, root_of

MEANS = (0.0, 0.1, -0.5, 1.0, -3.0, 7.0, -12.0, -20.0, 51.0, -100.0, 700.0, -3000.0, 1e4, -1e4)
VARIANCES = (1e-8, 1e-3, 0.3, 0.99, 1.0, 2.0, 5.0, 25.0, 100.0, 1e3, 1e4, 1e6)


def dense_moments(m: float, v: float) -> tuple[float, float, float, float]:
    """log E[σ], log E[σ'], E[σ'']/E[σ'], E[log σ] by a dense trapezoid in numpy, in logs.

    Nodes cover the Gaussian, its two exponential tilts and the step, each on its own scale.
    """
    sd = math.sqrt(v)
    pieces = [c + sd * np.linspace(-10, 10, 4001) for c in (m, m + v, m - v, 0.0)]
    edges = [p[[0, -1]] for p in pieces]
    x = np.unique(np.concatenate([*pieces, np.linspace(-60, 60, 12001)]))
    x = x[(x >= min(e[0] for e in edges)) & (x <= max(e[1] for e in edges))]
    # Gauss-Legendre on every interval: no assumption of equal steps.
    u, w = np.polynomial.legendre.leggauss(4)
    half = 0.5 * np.diff(x)
    nodes = (0.5 * (x[1:] + x[:-1]))[:, None] + half[:, None] * u
    log_w = np.log(half)[:, None] + np.log(w) - 0.5 * (nodes - m) ** 2 / v
    log_w -= 0.5 * math.log(2 * math.pi * v)
    up, down = log_expit(nodes), log_expit(-nodes)
    log_mean = logsumexp(log_w + up)
    log_slope = logsumexp(log_w + up + down)
    curvature = np.sum(np.exp(log_w + up + down - log_slope) * (expit(-nodes) - expit(nodes)))
    return log_mean, log_slope, curvature, float(np.sum(np.exp(log_w) * up))


@pytest.fixture(scope="module")
def reference() -> tuple[np.ndarray, np.ndarray]:
    grid = np.array([(m, v) for v in VARIANCES for m in MEANS])
    return grid, np.array([dense_moments(m, v) for m, v in grid])


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 2e-9), (torch.float32, 1e-6)])
def test_logistic_moments(reference, dtype, tol):
    grid, truth = reference
    # float32 inputs such as 0.1 are other numbers: ask about those that both types hold.
    exact = (grid == grid.astype(np.float32)).all(1) if dtype == torch.float32 else slice(None)
    grid, truth = grid[exact], truth[exact]
    m, v = (torch.tensor(grid[:, i], dtype=dtype) for i in (0, 1))
    e = logistic_moments(m, v)
    slack = 1.0 + np.abs(grid[:, 0]) * 1e-9 / tol  # rounding of logs as large as |m|
    assert np.all(np.abs(e.log_mean.numpy() - truth[:, 0]) < tol * slack)
    assert np.all(np.abs((e.log_scale + e.slope.log()).numpy() - truth[:, 1]) < tol * slack)
    assert np.all(np.abs((e.curvature / e.slope).numpy() - truth[:, 2]) < tol)
    assert np.all(np.abs((e.log_mean.exp() + e.complement - 1.0).numpy()) < tol)
    error = np.abs(expected_log_sigmoid(m, v).numpy() - truth[:, 3])
    assert np.all(error < tol * (1.0 + np.abs(grid[:, 0]) * 1e-3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logistic_moments_at_zero_variance(dtype):
    m = torch.tensor([-1e4, -30.0, -1.0, 0.0, 2.0, 40.0, 1e4], dtype=dtype)
    e = logistic_moments(m, torch.zeros_like(m))
    d = m.double()
    torch.testing.assert_close(e.log_mean, torch.nn.functional.logsigmoid(d), rtol=0, atol=1e-6)
    slope = torch.sigmoid(d) * torch.sigmoid(-d)
    torch.testing.assert_close(e.slope * e.log_scale.exp(), slope, rtol=1e-6, atol=0)


def test_logistic_moments_do_not_depend_on_other_elements():
    rng = torch.Generator().manual_seed(0)
    m = 5 * torch.randn(9000, dtype=torch.float64, generator=rng)
    v = torch.exp(3 * torch.randn(9000, dtype=torch.float64, generator=rng))
    together = logistic_moments(m, v)
    for i in (0, 17, 4096, 8999):
        alone = logistic_moments(m[i : i + 1], v[i : i + 1])
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[i], rtol=1e-12, atol=1e-14)


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e4, 1e4), st.floats(-8, 6), st.sampled_from([torch.float32, torch.float64]))
def test_logistic_moments_are_finite_and_symmetric(m, log_v, dtype):
    mv = torch.tensor([m, -m], dtype=dtype), torch.full((2,), 10.0**log_v, dtype=dtype)
    e = logistic_moments(*mv)
    assert all(bool(torch.isfinite(x).all()) for x in e)
    assert bool((e.slope > 0).all()) and bool((e.log_mean <= 0).all())
    assert float(e.slope[0]) == float(e.slope[1])
    assert float(e.curvature[0]) == -float(e.curvature[1]) or float(mv[0][0]) == 0.0
    low = expected_log_sigmoid(*mv)
    # Jensen's inequality for log, and E log σ(f) − E log σ(−f) = m.
    assert bool((low <= e.log_mean + 1e-6 * (1 + abs(m))).all())
    assert abs(float(low[0] - low[1]) - float(mv[0][0])) <= 1e-9 * (1 + abs(m))


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e4, 1e4), st.floats(-8, 6))
def test_tilt_against_mpmath(m, log_v):
    v = 10.0**log_v
    with mpmath.workdps(60):
        mm, vv = mpmath.mpf(m), mpmath.mpf(v)
        c = mpmath.sqrt(mm * mm + vv)
        cosh = mpmath.log(2 * mpmath.cosh(c / 2))
        tau = mpmath.tanh(c / 2) / c
        s = mpmath.exp(-mm / 2 - cosh)
        rest, slope = mpmath.log(1 - s), mpmath.log(1 + mm * tau)
        expected = [c, tau, mm / 2 - cosh, mpmath.log(s), rest, slope]
    out = tilt(torch.tensor([m], dtype=torch.float64), torch.tensor([v], dtype=torch.float64))
    for got, want in zip(out, expected, strict=True):
        assert float(got) == pytest.approx(float(want), rel=1e-12, abs=1e-11)


def test_tilt_at_zero():
    zero = torch.zeros(1, dtype=torch.float64)
    out = tilt(zero, zero)
    assert float(out.tau) == 0.5 and float(out.log_slope) == 0.0
    assert float(out.log_s) == float(out.log_up) == pytest.approx(-math.log(2))
    assert float(out.log_rest) == pytest.approx(-math.log(2))


@pytest.mark.parametrize("rest", [1 - 1e-12, 0.9, 0.5, 0.1, 1e-3, 1e-6, 1e-12, 1e-100])
def test_gamma_total_against_mpmath(rest):
    with mpmath.workdps(250):
        r = 1 - mpmath.mpf(rest)
        root = mpmath.findroot(
            lambda g: mpmath.log(r) + mpmath.digamma(1 + g) - mpmath.log(g),
            (r / (2 * mpmath.mpf(rest)), r * mpmath.mpf("0.5616") / mpmath.mpf(rest)),
            solver="anderson",
            tol=1e-220,
        )
        entropy = mpmath.loggamma(1 + root) - root * mpmath.log(root) + root
        log_r = float(mpmath.log(r))
    G = gamma_total(*torch.tensor([log_r, math.log(rest)], dtype=torch.float64))
    assert float(G) == pytest.approx(float(root), rel=1e-11)
    assert float(log_gamma_minus_entropy(G)) == pytest.approx(float(entropy), rel=1e-11, abs=1e-12)


def test_gamma_total_contracts():
    """The bound 0.04 on |d log d / d log G| that fixes the number of sweeps."""
    g = mpmath.mpf
    worst = 0.0
    for log_g in np.linspace(-12, 12, 300):
        G = g(math.exp(log_g))
        d = mpmath.exp(mpmath.digamma(1 + G)) - G
        slope = mpmath.exp(mpmath.digamma(1 + G)) * mpmath.polygamma(1, 1 + G) - 1
        worst = max(worst, abs(float(G * slope / d)))
        assert 0.5 <= d <= 0.5615
    assert worst < 0.04


class TestCholesky:
    @pytest.mark.parametrize(("dtype", "first"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
    def test_relative_jitter(self, dtype, first):
        K = 300.0 * torch.eye(4, dtype=dtype)
        L, used = cholesky(K)
        assert used == first
        torch.testing.assert_close(L @ L.T, K * (1 + first))

    def test_scale_free(self):
        x = torch.linspace(0, 1, 30, dtype=torch.float64)[:, None]
        K = torch.exp(-0.5 * (x - x.T) ** 2)
        small, large = cholesky(1e-6 * K), cholesky(1e6 * K)
        assert small[1] == large[1]
        torch.testing.assert_close(small[0] * 1e6, large[0])

    def test_zero_jitter_is_exact(self):
        K = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        L, used = cholesky(K, jitter=0.0)
        assert used == 0.0
        torch.testing.assert_close(L @ L.T, K)

    def test_grows(self):
        K = torch.ones(3, 3, dtype=torch.float64) - 5e-5 * torch.eye(3, dtype=torch.float64)
        L, used = cholesky(K)
        assert used == pytest.approx(1e-4)
        assert bool(torch.isfinite(L).all())

    def test_batched(self):
        K = torch.stack([torch.eye(3), torch.ones(3, 3)]).double()
        L, used = cholesky(K)
        shift = used * torch.eye(3, dtype=torch.float64)
        torch.testing.assert_close(L @ L.mT, K + shift)

    def test_indefinite(self):
        with pytest.raises(NotPositiveDefiniteError, match="inducing points"):
            cholesky(-torch.eye(3))

    def test_nan(self):
        with pytest.raises(NotPositiveDefiniteError, match="NaN"):
            cholesky(torch.full((3, 3), math.nan))

    def test_float64_goes_on_before_the_jitter_grows(self):
        x = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None]
        exact = torch.exp(-0.5 * (x - x.T) ** 2)
        rough = (exact + 1e-3 * torch.eye(40).roll(1, 0)).float()
        L, used = cholesky(rough, wide=lambda: exact)
        assert used == 1e-4 and L.dtype == torch.float32
        shift = 1e-4 * torch.eye(40, dtype=torch.float64)
        torch.testing.assert_close((L @ L.T).double(), exact + shift, rtol=0, atol=1e-6)
        assert cholesky(rough)[1] > 1e-4

    def test_float64_is_not_asked_where_float32_will_do(self):
        def wide():
            raise AssertionError

        K = torch.eye(3)
        assert torch.equal(cholesky(K, wide=wide)[0], cholesky(K)[0])

    def test_float64_is_differentiable(self):
        x = torch.linspace(0, 1, 9, dtype=torch.float64).requires_grad_()

        def matrix(x):
            return torch.exp(-0.5 * (x[:, None] - x) ** 2)

        indefinite = -torch.eye(9)
        found = cholesky(indefinite, 1e-4, wide=lambda: matrix(x))[0].double().sum()
        expected = cholesky(matrix(x), 1e-4)[0].sum()
        torch.testing.assert_close(
            *(torch.autograd.grad(value, x)[0] for value in (found, expected)), rtol=1e-6, atol=1e-6
        )

    def test_differentiable(self):
        A = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        K = (A @ A.T + torch.eye(4, dtype=torch.float64)).requires_grad_()

        def factor(k):
            return cholesky(0.5 * (k + k.T))[0]

        assert torch.autograd.gradcheck(factor, (K,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_root_of_a_covariance_of_rounding(dtype):
    """A posterior far below its prior: differences of numbers that are equal but for rounding."""
    g = torch.Generator().manual_seed(0)
    low = torch.randn(40, 3, dtype=torch.float64, generator=g)
    noise = torch.randn(40, 40, dtype=torch.float64, generator=g)
    K = low @ low.T + 0.1 * (noise + noise.T)
    L = root_of(K.to(dtype))
    assert L.dtype == dtype
    values, vectors = torch.linalg.eigh(K)
    nearest = (vectors * values.clamp(min=0)) @ vectors.T
    torch.testing.assert_close((L @ L.T).double(), nearest, rtol=0, atol=1e-4)
    L = root_of(torch.zeros(3, 3, dtype=dtype))
    assert torch.equal(L, torch.zeros(3, 3, dtype=dtype))
    K = torch.eye(3, dtype=dtype)
    torch.testing.assert_close(root_of(K) @ root_of(K).T, K, rtol=1e-3, atol=0)
