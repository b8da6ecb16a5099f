"""The Heaviside likelihood with noise, which is the multinomial probit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mpmath import mp
from scipy.special import log_ndtr, ndtr
from scipy.stats import norm

from conjugp.likelihoods import Heaviside, RobustMax


@pytest.mark.parametrize("noise", [0.3, 1.0, 5.0])
def test_two_classes_are_a_probit(noise):
    rng = np.random.default_rng(0)
    f = np.concatenate([rng.normal(0, 2, (40, 2)), [[0.0, 60.0], [90.0, 0.0], [-1e4, 1e4]]])
    y = rng.integers(2, size=len(f))
    y[-3:] = 0
    gap = np.where(y == 0, f[:, 0] - f[:, 1], f[:, 1] - f[:, 0])
    likelihood = Heaviside(noise)
    leaf = torch.tensor(f, requires_grad=True)
    log_p = likelihood.log_prob(torch.tensor(y), leaf)
    expected = log_ndtr(gap / math.sqrt(2 * noise))
    np.testing.assert_allclose(log_p.detach().numpy(), expected, rtol=1e-6, atol=1e-7)
    log_p.sum().backward()
    z = gap / math.sqrt(2 * noise)
    mills = np.where(z < -1e3, -z, np.exp(norm.logpdf(z) - log_ndtr(z))) / math.sqrt(2 * noise)
    sign = np.where(y == 0, 1.0, -1.0)
    np.testing.assert_allclose(leaf.grad.numpy()[:, 0], sign * mills, rtol=1e-5, atol=1e-7)


def test_two_classes_predict_in_closed_form():
    rng = np.random.default_rng(1)
    m, v = rng.normal(0, 3, (50, 2)), 10.0 ** rng.uniform(-4, 3, (50, 2))
    p = Heaviside(0.7).integral(torch.tensor(m), torch.tensor(v)).numpy()
    expected = ndtr((m[:, 0] - m[:, 1]) / np.sqrt(v.sum(1) + 1.4))
    np.testing.assert_allclose(p[:, 0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "f", [(0.3, -1.0, 0.7, 2.0), (-12.0, 3.0, 5.0, 4.0), (-60.0, 0.0, 1.0, 0.5)]
)
def test_log_prob_to_many_digits(f):
    """Also far out in the tail, where P is e^−1000."""
    mp.dps = 30

    def integrand(u):
        return mp.npdf(u) * mp.fprod(mp.ncdf(u + f[0] - fc) for fc in f[1:])

    # Split at the mode and around it: the integrand is narrow.
    centre = max(0.0, (sum(f[1:]) - 3 * f[0]) / 4)
    points = [centre + k for k in (-12, -6, -3, -1, 0, 1, 3, 6, 12)]
    expected = float(mp.log(mp.quad(integrand, points)))
    log_p = Heaviside().log_prob(torch.tensor([0]), torch.tensor([f], dtype=torch.float64))
    assert float(log_p) == pytest.approx(expected, rel=1e-7, abs=1e-6)


def test_gradient_of_log_prob_by_differences():
    rng = np.random.default_rng(2)
    f = torch.tensor(rng.normal(0, 3, (20, 5)), requires_grad=True)
    y = torch.tensor(rng.integers(5, size=20))
    likelihood = Heaviside(0.5)
    likelihood.log_prob(y, f).sum().backward()
    h = 1e-4
    for c in range(5):
        step = h * torch.eye(5, dtype=torch.float64)[c]
        up, down = (likelihood.log_prob(y, f.detach() + k * step) for k in (1, -1))
        expected = (up - down) / (2 * h)
        torch.testing.assert_close(f.grad[:, c], expected, rtol=1e-5, atol=1e-5)


def test_augmented_is_girolami_and_rogers():
    """Sites are the mean of the truncated Gaussian over the noise, at precision 1/noise."""
    rng = np.random.default_rng(3)
    m, noise, y = rng.normal(0, 1, 3), 0.8, 0
    g = m + math.sqrt(noise) * rng.standard_normal((400_000, 3))
    kept = g[g.argmax(1) == y]
    s = Heaviside(noise).site(
        torch.tensor([y]), torch.tensor(m)[None], torch.ones(1, 3).double(), "augmented"
    )
    np.testing.assert_allclose(s.precision.numpy(), 1 / noise)
    np.testing.assert_allclose(s.potential[0].numpy() * noise, kept.mean(0), atol=0.01)


@pytest.mark.parametrize("n_classes", [2, 3, 6])
@pytest.mark.parametrize("variance", [0.1, 1.0, 5.0])
def test_order_of_the_bounds(n_classes, variance):
    """Both below E[log p], and tight by far the nearer but for labels that are plainly wrong."""
    rng = np.random.default_rng(4)
    m = torch.tensor(rng.normal(0, 2, (20, n_classes)))
    v = torch.tensor(variance * rng.uniform(0.5, 1.0, (20, n_classes)))
    y = torch.tensor(rng.integers(n_classes, size=20))
    likelihood = Heaviside()
    draws = torch.tensor(rng.standard_normal((1000, 20, n_classes)))
    draws = torch.cat([draws, -draws])
    log_p = likelihood.log_prob(y, m + v.sqrt() * draws)
    exact, error = log_p.mean(0), log_p.std(0) / math.sqrt(len(draws))
    tight = likelihood.site(y, m, v, "tight")
    augmented = likelihood.site(y, m, v, "augmented")
    assert bool((augmented.bound <= tight.bound + 0.1).all())
    assert bool((tight.bound <= exact + 4 * error).all())
    assert bool((augmented.bound <= exact + 4 * error).all())
    assert float((exact - tight.bound).mean()) < 0.5 * float((exact - augmented.bound).mean())
    assert bool((tight.precision >= 0).all())


def test_without_noise_only_the_largest_counts():
    rng = np.random.default_rng(5)
    m, v = torch.tensor(rng.normal(0, 1, (30, 4))), torch.tensor(rng.uniform(0.5, 2, (30, 4)))
    p = Heaviside(1e-10).integral(m, v)
    torch.testing.assert_close(p, RobustMax(1e-12).integral(m, v), rtol=0, atol=1e-8)


@pytest.mark.parametrize("noise", [0.0, -1.0, math.inf, math.nan])
def test_bad_noise(noise):
    with pytest.raises(ValueError, match="noise must be positive and finite"):
        Heaviside(noise)
