"""Sites and bounds of the logistic-softmax likelihood against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import digamma, expit, gammaln, log_expit

from conjugp.likelihoods import LogisticSoftmax, get_likelihood
from problems import gaussians

BOUNDS = LogisticSoftmax.bounds
LIKELIHOOD = LogisticSoftmax()


def expected_log_prob(y: int, m: np.ndarray, v: np.ndarray) -> float:
    """E[log p(y | f)] by a tensor product of dense trapezoid rules, C = 2 or 3."""
    n = {2: 1501, 3: 161}[len(m)]
    z = np.linspace(-8.5, 8.5, n)
    w = np.exp(-0.5 * z * z)
    w /= w.sum()
    f = np.meshgrid(*(mc + math.sqrt(vc) * z for mc, vc in zip(m, v, strict=True)), indexing="ij")
    weight = math.prod(np.meshgrid(*[w] * len(m), indexing="ij"))
    log_s = [log_expit(x) for x in f]
    total = log_s[0]
    for x in log_s[1:]:
        total = np.logaddexp(total, x)
    return float(np.sum(weight * (log_s[y] - total)))


def expected_log_prob_many(y: int, m: np.ndarray, v: np.ndarray) -> float:
    """The same for any C: log T = ∫ (e^−λ − e^{−λT}) dλ/λ makes the classes separate."""
    z = np.linspace(-8.5, 8.5, 601)
    w = np.exp(-0.5 * z * z)
    w /= w.sum()
    s = expit(m[:, None] + np.sqrt(v)[:, None] * z)
    top = 5.0 - min(0.0, float(np.max(m - 6.5 * np.sqrt(v))))
    t = np.linspace(-30.0, top, int(16 * (top + 30.0)))
    log_f = np.array([np.log(np.maximum(np.exp(-lam * s) @ w, 1e-300)) for lam in np.exp(t)])
    log_normaliser = np.sum(np.exp(-np.exp(t)) - np.exp(log_f.sum(1))) * (t[1] - t[0])
    return float(log_expit(m[y] + math.sqrt(v[y]) * z) @ w - log_normaliser)


def draw(seed: int, n_classes: int, scale: float, variance: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    m = scale * rng.standard_normal(n_classes) - rng.choice([0.0, 3.0, 8.0])
    return m, variance * rng.uniform(0.05, 1.0, n_classes)


def site(y, m, v, bound, dtype=torch.float64):
    m, v = (torch.as_tensor(np.asarray(x), dtype=dtype) for x in (m, v))
    return LIKELIHOOD.site(torch.as_tensor(y), m, v, bound)


def random_batch(n: int, n_classes: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    m = rng.normal(0.0, 4.0, (n, n_classes)) - rng.choice([0.0, 10.0, 60.0], (n, 1))
    v = np.exp(rng.uniform(math.log(1e-3), math.log(1e3), (n, n_classes)))
    return rng.integers(n_classes, size=n), m, v


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("n_classes", [2, 3, 10])
def test_site_identities(bound, n_classes):
    """precision = −2 ∂bound/∂v, potential = ∂bound/∂m + precision·m, by central differences."""
    y, m, v = random_batch(200, n_classes)
    s = site(y, m, v, bound)
    precision, potential = s.precision.numpy(), s.potential.numpy()
    for c in range(n_classes):
        unit = np.eye(n_classes)[c]
        for of_v in (False, True):
            h = 1e-4 * v[:, c] if of_v else 1e-4 * np.maximum(1.0, np.sqrt(v[:, c]))
            step = h[:, None] * unit
            up = site(y, m, v + step, bound) if of_v else site(y, m + step, v, bound)
            down = site(y, m, v - step, bound) if of_v else site(y, m - step, v, bound)
            difference = (up.bound - down.bound).numpy() / (2 * h)
            # Rounding of a bound that may be as large as |m|, over the step; then O(h²).
            noise = 1e-13 * (1.0 + np.abs(m).max(1)) / h
            if of_v:
                expected, scale = -0.5 * precision[:, c], np.abs(precision[:, c])
            else:
                expected = potential[:, c] - precision[:, c] * m[:, c]
                scale = 1.0 + np.abs(precision[:, c] * m[:, c]) * 1e-6
            assert np.all(np.abs(difference - expected) < noise + 1e-6 * scale)


@pytest.mark.parametrize("bound", BOUNDS)
def test_autograd_is_the_site(bound):
    y, m, v = random_batch(50, 4, seed=1)
    m, v = torch.tensor(m, requires_grad=True), torch.tensor(v, requires_grad=True)
    s = LIKELIHOOD.site(torch.tensor(y), m, v, bound)
    s.bound.sum().backward()
    torch.testing.assert_close(v.grad, -0.5 * s.precision)
    expected = s.potential - s.precision * m.detach()
    scale = (s.precision * m.detach()).abs().max()
    torch.testing.assert_close(m.grad, expected, rtol=0, atol=1e-12 * float(scale))
    assert not s.potential.requires_grad and not s.precision.requires_grad


@pytest.mark.parametrize("variance", [1e-4, 0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("n_classes", [2, 3, 20])
def test_order_of_the_bounds(n_classes, variance):
    truth = expected_log_prob if n_classes <= 3 else expected_log_prob_many
    for seed in range(6 if n_classes != 3 else 3):
        m, v = draw(seed, n_classes, 1.0 + math.sqrt(variance), variance)
        y = seed % n_classes
        sites = (float(site([y], [m], [v], b).bound) for b in BOUNDS)
        exact, tight, collapsed, augmented = sites
        assert exact == pytest.approx(truth(y, m, v), rel=1e-7, abs=1e-7)
        assert augmented <= collapsed + 1e-12 * (1 + abs(collapsed))
        assert collapsed <= tight + 1e-9 * (1 + abs(tight))
        assert tight <= exact + 1e-7 * (1 + abs(exact))


def test_the_two_references_agree():
    for seed in range(4):
        m, v = draw(seed, 2, 3.0, 20.0)
        assert expected_log_prob(0, m, v) == pytest.approx(
            expected_log_prob_many(0, m, v), abs=1e-7
        )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_order_everywhere(data):
    """augmented ≤ collapsed ≤ tight ≤ exact for |m| to 1e4 and v from 1e-8 to 1e6, all finite."""
    m, v = data.draw(gaussians((-8, 6)))
    y = data.draw(st.integers(0, len(m) - 1))
    for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        sites = [site([y], [m], [v], b, dtype) for b in BOUNDS]
        assert all(bool(torch.isfinite(x).all()) for s in sites for x in s[:3])
        exact, tight, collapsed, augmented = (float(s.bound) for s in sites)
        assert tight <= exact + (1e-8 if dtype == torch.float64 else 1e-5) * (1 + abs(exact))
        assert exact <= tol
        assert augmented <= collapsed + tol * (1 + abs(collapsed))
        assert collapsed <= tight + tol * (1 + abs(collapsed))
        assert tight <= tol


@pytest.mark.parametrize("bound", ["tight", "collapsed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equality_at_zero_variance(bound, dtype):
    m = [[0.0, 0.0, 0.0], [1.0, -2.0, 0.3], [-1e4, -9999.0, -1e4], [1e4, 1e4, -1e4], [-50, 60, 0]]
    m = torch.tensor(m, dtype=dtype)
    for y in range(3):
        label = torch.full((len(m),), y)
        s = LIKELIHOOD.site(label, m, torch.zeros_like(m), bound)
        exact = LIKELIHOOD.log_prob(label, m.double()).to(dtype)
        torch.testing.assert_close(s.bound, exact, rtol=1e-6, atol=1e-6)
        assert all(bool(torch.isfinite(x).all()) for x in s[:3])
        f = m.double().clone().requires_grad_()
        LIKELIHOOD.log_prob(label, f).sum().backward()
        # In means-only training the gradient at v = 0 is that of log p.
        leaf = m.clone().requires_grad_()
        LIKELIHOOD.site(label, leaf, torch.zeros_like(m), bound).bound.sum().backward()
        torch.testing.assert_close(leaf.grad.double(), f.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bound", BOUNDS)
def test_permuting_classes(bound):
    y, m, v = random_batch(100, 5, seed=2)
    s = site(y, m, v, bound)
    order = np.array([3, 0, 4, 1, 2])
    t = site(np.argsort(order)[y], m[:, order], v[:, order], bound)
    torch.testing.assert_close(t.potential, s.potential[:, order], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(t.precision, s.precision[:, order], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(t.bound, s.bound, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bound", BOUNDS[1:])  # for the exact value see test_log_sum.py
def test_float32(bound):
    """Within 2e-6 of float64, relative to the largest term, over the whole range."""
    rng = np.random.default_rng(0)
    n, n_classes = 4000, 4
    m = rng.choice([-1.0, 1.0], (n, n_classes)) * 10.0 ** rng.uniform(-3, 4, (n, n_classes))
    m[::4] = -np.abs(m[::4])
    m[1::8] = -1e4 + rng.uniform(0, 5, m[1::8].shape)
    v = 10.0 ** rng.uniform(-8, 6, (n, n_classes))
    m, v = (torch.tensor(x, dtype=torch.float32) for x in (m, v))
    y = torch.tensor(rng.integers(n_classes, size=n))
    low, high = (
        LIKELIHOOD.site(y, m.to(d), v.to(d), bound) for d in (torch.float32, torch.float64)
    )
    assert all(bool(torch.isfinite(x).all()) for s in (low, high) for x in s[:3])
    tol = 2e-6
    assert bool(((low.bound - high.bound).abs() <= tol * (1 + high.bound.abs())).all())
    # A tight precision is a difference of two terms, each at most 1 and at most 1/√v.
    size = high.precision.abs() + torch.rsqrt(1.0 + v.double()) * (bound == "tight") + 1e-32
    assert bool(((low.precision - high.precision).abs() <= tol * size).all())
    size = 1 + high.potential.abs() + (size * m).abs()
    assert bool(((low.potential - high.potential).abs() <= tol * size).all())


@pytest.mark.parametrize("n_classes", [2, 5])
def test_augmented_is_the_paper(n_classes):
    """The bound with q(λ) and q(ω, n) written out in full, its inner loop run to the end."""
    y, m, v = random_batch(60, n_classes, seed=3)
    m = np.clip(m, -20, 20)
    s = site(y, m, v, "augmented")
    label = np.eye(n_classes)[y]
    c = np.sqrt(m * m + v)
    log_cosh = c / 2 + np.log1p(np.exp(-c))
    alpha = np.ones((len(m), 1))
    for _ in range(20000):
        gamma = np.exp(digamma(alpha) - m / 2 - log_cosh) / n_classes
        alpha = 1 + gamma.sum(1, keepdims=True)
    theta = (label + gamma) * np.tanh(c / 2) / (2 * c)
    local = (label - gamma) * m / 2 - (label + gamma) * log_cosh
    local += gamma * (digamma(alpha) - math.log(n_classes) - np.log(gamma) + 1)
    alpha = alpha[:, 0]
    bound = local.sum(1) - math.log(n_classes) + gammaln(alpha) + (1 - alpha) * digamma(alpha)
    np.testing.assert_allclose(s.bound.numpy(), bound, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(s.precision.numpy(), theta, rtol=1e-6)
    np.testing.assert_allclose(s.potential.numpy(), (label - gamma) / 2, rtol=1e-6, atol=1e-9)


def test_softmax_limit():
    rng = np.random.default_rng(4)
    f = torch.tensor(rng.normal(size=(20, 6)) - 40.0)
    y = torch.tensor(rng.integers(6, size=20))
    torch.testing.assert_close(LIKELIHOOD.prob(f), torch.softmax(f, -1))
    log_p = torch.log_softmax(f, -1).gather(1, y[:, None])[:, 0]
    torch.testing.assert_close(LIKELIHOOD.log_prob(y, f), log_p)
    many = f.expand(3, -1, -1)
    torch.testing.assert_close(LIKELIHOOD.log_prob(y, many), log_p.expand(3, -1))


def test_registry():
    assert isinstance(get_likelihood("logistic-softmax"), LogisticSoftmax)
    assert get_likelihood(LIKELIHOOD) is LIKELIHOOD
    for wrong in ("softmaxx", 3):
        with pytest.raises(ValueError, match="likelihood must be one of 'logistic-softmax'"):
            get_likelihood(wrong)
    with pytest.raises(ValueError, match="bound must be one of 'exact'"):
        site([0], [[0.0, 1.0]], [[1.0, 1.0]], "tighter")
    with pytest.raises(AttributeError):
        LIKELIHOOD.name = "other"
