"""Predictive probabilities against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.special import expit, log_expit

from conjugp._gp.prediction import apply_temperature, predict_proba
from conjugp.likelihoods import LogisticSoftmax
from problems import gaussians

LIKELIHOOD = LogisticSoftmax()


def proba(m, v, **kwargs) -> np.ndarray:
    return predict_proba(LIKELIHOOD, torch.as_tensor(m), torch.as_tensor(v), **kwargs).numpy()


def brute_force(
    m: np.ndarray, v: np.ndarray, n_outer: int = 1500, n_inner: int = 800
) -> np.ndarray:
    """One row of the double integral on dense grids of λ and every f."""
    z = np.linspace(-9, 9, n_inner)
    w = np.exp(-0.5 * z * z)
    w /= w.sum()
    s = expit(m[:, None] + np.sqrt(v)[:, None] * z)
    top = 6.0 - min(0.0, float(np.max(m - 7.5 * np.sqrt(v))))
    t = np.linspace(-22.0 - math.log(len(m)), top, n_outer)
    p = np.zeros(len(m))
    for lam in np.exp(t):
        survive = np.exp(-lam * s)
        log_f = np.log(np.maximum(survive @ w, 1e-300))
        p += lam * ((s * survive) @ w) * np.exp(log_f.sum() - log_f)
    return p * (t[1] - t[0])


def tensor_product(m: np.ndarray, v: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of p(· | f) on a full C-dimensional grid, C = 2 or 3."""
    z = np.linspace(-8.5, 8.5, n)
    w = np.exp(-0.5 * z * z)
    w /= w.sum()
    f = np.meshgrid(*(mc + math.sqrt(vc) * z for mc, vc in zip(m, v, strict=True)), indexing="ij")
    weight = math.prod(np.meshgrid(*[w] * len(m), indexing="ij"))
    log_s = np.stack([log_expit(x) for x in f])
    p = np.exp(log_s - np.logaddexp.reduce(log_s, axis=0))
    axes = tuple(range(1, p.ndim))
    mean = np.sum(weight * p, axis=axes)
    return mean, np.sqrt(np.sum(weight * p * p, axis=axes) - mean**2)


@pytest.mark.parametrize("variance", [0.01, 0.24, 0.26, 1.0, 5.0, 25.0, 100.0])
@pytest.mark.parametrize("n_classes", [2, 10, 100])
def test_integral_against_brute_force(n_classes, variance):
    """Asked for is 1e-4 up to v = 25 and 1e-3 up to v = 100; held to is 1e-7."""
    rng = np.random.default_rng(n_classes)
    for offset in (0.0, -6.0) if n_classes < 100 else (-4.0,):
        m = rng.normal(offset, 2.0, n_classes)
        v = variance * rng.uniform(0.05, 1.0, n_classes)
        v[0] = variance
        truth = brute_force(m, v)
        assert truth.sum() == pytest.approx(1.0, abs=1e-8)
        got = proba(m[None], v[None])[0]
        np.testing.assert_allclose(got, truth, rtol=0, atol=1e-7)
        # Small probabilities count in the log loss: relative precision too.
        likely = truth > 1e-12
        np.testing.assert_allclose(got[likely], truth[likely], rtol=1e-5)


@pytest.mark.parametrize("variance", [1e-8, 0.3, 4.0, 100.0, 1e4])
def test_integral_against_the_full_grid(variance):
    rng = np.random.default_rng(7)
    for n_classes, n in ((2, 1601), (3, 181)) if variance <= 4.0 else ((2, 3201),):
        m = rng.normal(0.0, 1.0 + math.sqrt(variance), n_classes)
        v = variance * rng.uniform(0.1, 1.0, n_classes)
        got = proba(m[None], v[None])[0]
        np.testing.assert_allclose(got, tensor_product(m, v, n)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("offset", [-15.0, -25.0, -40.0, -70.0])
def test_integral_keeps_the_digits_of_tiny_probabilities(offset):
    """A temperature of 8 makes 1e-3 of 1e-24."""
    m, v = np.array([0.5, -1.0, offset]), np.array([1.0, 2.0, 3.0])
    truth = tensor_product(m, v, 121)[0][2]
    assert truth < 1e-5
    assert proba(m[None], v[None])[0, 2] == pytest.approx(truth, rel=1e-6)


def test_integral_at_zero_variance_is_the_likelihood():
    f = torch.tensor([[0.0, 1.0, -3.0], [-1e4, -1e4 + 1, -1e4 - 2], [1e4, 1e4, -1e4]]).double()
    got = LIKELIHOOD.integral(f, torch.zeros_like(f))
    torch.testing.assert_close(got, LIKELIHOOD.prob(f), rtol=0, atol=1e-8)


def test_integral_in_the_softmax_limit_ignores_a_shift():
    rng = np.random.default_rng(1)
    m, v = rng.normal(0, 2, (5, 4)), rng.uniform(0.01, 9.0, (5, 4))
    near, far = proba(m - 45.0, v), proba(m - 9000.0, v)
    np.testing.assert_allclose(near, far, rtol=0, atol=1e-8)


def test_integral_of_huge_variances():
    """At v → ∞ two classes share 1/2, 1/4, 1/4: both up is a tie, both down a race."""
    m = np.array([[0.0, 0.0], [2e3, 0.0]])
    got = proba(m, np.full((2, 2), 1e6))
    np.testing.assert_allclose(got[0], [0.5, 0.5], atol=1e-9)
    # f₁ ~ N(2, 1), f₂ ~ N(0, 1) after scaling: E[½ both up; 1 first only; the larger both down].
    z = np.random.default_rng(0).standard_normal((4_000_000, 2)) + np.array([2.0, 0.0])
    up = z > 0
    share = np.where(up.all(1), 0.5, np.where(up.any(1), up[:, 0], z[:, 0] > z[:, 1]))
    assert got[1, 0] == pytest.approx(share.mean(), abs=2e-3)


def test_integral_always_ends():
    assert np.all(np.isnan(proba([[math.nan, 0.0]], [[1.0, 1.0]])))
    np.testing.assert_allclose(proba([[0.0, 0.0]], [[math.inf, math.inf]]), 0.5)


def test_rows_do_not_depend_on_each_other():
    rng = np.random.default_rng(2)
    m = rng.normal(0, 4, (900, 5)) - rng.choice([0, 30], (900, 1))
    v = np.exp(rng.uniform(-6, 6, (900, 5)))
    for kwargs in ({}, {"method": "mc", "n_samples": 50}, {"method": "qmc", "n_samples": 64}):
        together = proba(m, v, **kwargs)
        alone = np.concatenate([proba(m[i : i + 1], v[i : i + 1], **kwargs) for i in range(40)])
        np.testing.assert_allclose(alone, together[:40], rtol=0, atol=1e-10)
    np.testing.assert_allclose(together.sum(1), 1.0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(gaussians((-8, 3)))
def test_integral_is_a_distribution(drawn):
    m, v = drawn
    p = proba(np.array([m]), v[None])
    assert np.all(p > 0) and np.all(np.isfinite(p))
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    order = np.argsort(m)
    np.testing.assert_allclose(
        proba(np.array([m])[:, order], v[None][:, order]), p[:, order], rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("method", ["mc", "qmc"])
@pytest.mark.parametrize("variance", [0.1, 4.0, 50.0])
def test_sampling_within_four_standard_errors(method, variance):
    rng = np.random.default_rng(3)
    n_samples = 4096
    for seed in range(5):
        m = rng.normal(0, 2, 3)
        v = variance * rng.uniform(0.1, 1.0, 3)
        _, sd = tensor_product(m, v, 141)
        got = proba(m[None], v[None], method=method, n_samples=n_samples, seed=seed)[0]
        exact = proba(m[None], v[None])[0]
        assert np.all(np.abs(got - exact) <= 4.0 * sd / math.sqrt(n_samples))


def test_quasi_monte_carlo_is_the_better_sampler():
    rng = np.random.default_rng(5)
    m, v = rng.normal(0, 2, (200, 4)), rng.uniform(0.1, 9.0, (200, 4))
    exact = proba(m, v)
    error = {k: np.abs(proba(m, v, method=k, n_samples=1024) - exact).mean() for k in ("mc", "qmc")}
    assert error["qmc"] < 0.3 * error["mc"]


@pytest.mark.parametrize("method", ["mc", "qmc"])
def test_sampling_in_chunks(method):
    rng = np.random.default_rng(6)
    m, v = rng.normal(0, 2, (37, 4)), rng.uniform(0.1, 9.0, (37, 4))
    whole = proba(m, v, method=method, n_samples=300, seed=1)
    for chunk in (1, 100, 5000):
        parts = proba(m, v, method=method, n_samples=300, seed=1, chunk_elements=chunk)
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-12)
    assert not np.allclose(whole, proba(m, v, method=method, n_samples=300, seed=2))


def test_float32_input():
    m = torch.tensor([[0.5, -1.25, 3.0]])
    v = torch.tensor([[0.5, 2.0, 8.0]])
    p = predict_proba(LIKELIHOOD, m, v)
    assert p.dtype == torch.float64
    assert torch.equal(p, predict_proba(LIKELIHOOD, m.double(), v.double()))
    assert predict_proba(LIKELIHOOD, m[:0], v[:0]).shape == (0, 3)


def test_bad_arguments():
    with pytest.raises(ValueError, match="method must be one of 'integral'"):
        proba(np.zeros((1, 2)), np.ones((1, 2)), method="exact")
    with pytest.raises(ValueError, match="n_samples"):
        proba(np.zeros((1, 2)), np.ones((1, 2)), method="mc", n_samples=0)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            apply_temperature(torch.full((1, 2), 0.5), wrong)


def test_temperature():
    p = torch.tensor([[0.7, 0.2, 0.1], [1.0, 1e-300, 0.0]], dtype=torch.float64)
    assert torch.equal(apply_temperature(p, 1.0), p)
    for temperature in (0.05, 0.5, 2.0, 20.0):
        q = apply_temperature(p, temperature)
        expected = p ** (1 / temperature)
        torch.testing.assert_close(q, expected / expected.sum(-1, keepdim=True))
        assert torch.equal(q.argmax(-1), p.argmax(-1))
    assert apply_temperature(p.float(), 2.0).dtype == torch.float64
