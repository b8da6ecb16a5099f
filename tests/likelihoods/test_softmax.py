"""The softmax: E[log p], its two bounds and its predictive integral."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit
from torch import Tensor

from conjugp.likelihoods import LogisticSoftmax, Softmax
from problems import gaussians

SOFTMAX = Softmax()


def normals(n: int, n_classes: int, spread: float, variance: float, seed: int = 0):
    rng = np.random.default_rng(seed)
    m = rng.normal(0, spread, (n, n_classes)) if spread else np.zeros((n, n_classes))
    v = variance * rng.uniform(0.5, 1.5, (n, n_classes))
    return torch.tensor(rng.integers(n_classes, size=n)), torch.tensor(m), torch.tensor(v)


def expected_log_sum(m: np.ndarray, v: np.ndarray) -> float:
    """E[log Σe^f] for any C: log T = ∫ (e^−λ − e^−λT) dλ/λ makes the classes separate."""
    pairs, count = np.unique(np.stack([m, v]), axis=1, return_counts=True)
    sd = np.sqrt(pairs[1])
    z = np.linspace(-9.5, 9.5, max(601, round(50 * sd.max())) | 1)
    w = np.exp(-0.5 * z * z)
    w /= w.sum()
    f = pairs[0][:, None] + sd[:, None] * z
    # As long as one of the two exponentials is there.
    t = np.arange(-30.0 - max(f.max(), 0.0), 5.0 - min(f.min(axis=1).max(), 0.0), 1 / 4)
    log_f = [
        count @ np.log(np.maximum(np.exp(-np.exp(np.minimum(x + f, 50))) @ w, 1e-300)) for x in t
    ]
    return float(np.sum(np.exp(-np.exp(np.minimum(t, 50))) - np.exp(log_f)) / 4)


def bound(name: str, y: Tensor, m: Tensor, v: Tensor) -> np.ndarray:
    return SOFTMAX.site(y, m, v, name).bound.numpy()


def tilted(y: Tensor, m: Tensor, v: Tensor) -> np.ndarray:
    """m_y − ½Σa²v − log Σexp(m + (1 − 2a)v/2) at its maximum over a (Knowles and Minka 2011)."""
    a = torch.softmax(m, -1)
    for _ in range(5000):
        a = a + 0.05 * (torch.softmax(m + (0.5 - a) * v, -1) - a)
    value = m.gather(1, y[:, None])[:, 0] - 0.5 * (a * a * v).sum(-1)
    return (value - torch.logsumexp(m + (0.5 - a) * v, -1)).numpy()


@pytest.mark.parametrize("n_classes", [2, 3, 10])
@pytest.mark.parametrize(("variance", "gap"), [(0.1, 0.004), (1.0, 0.04), (5.0, 0.25), (30.0, 1.1)])
def test_how_tight(n_classes, variance, gap):
    """Below E[log p] by less than `gap`, and closer to it than Jensen and the tilted bound."""
    y, m, v = normals(4, n_classes, 2.0, variance)
    label = m.gather(1, y[:, None])[:, 0].numpy()
    log_sum = [expected_log_sum(*x) for x in zip(m.numpy(), v.numpy(), strict=True)]
    exact = label - np.array(log_sum)
    slack = exact - bound("tight", y, m, v)
    assert slack.min() > -1e-6 and slack.max() < gap
    assert np.all(bound("tight", y, m, v) > bound("jensen", y, m, v))
    if variance >= 5.0:
        assert np.all(bound("tight", y, m, v) > tilted(y, m, v))


@pytest.mark.parametrize("n_classes", [2, 3, 10])
@pytest.mark.parametrize("variance", [0.01, 1.0, 30.0, 300.0])
def test_exact(n_classes, variance):
    """Against the integral over a dense grid; derivatives by finite differences of that."""
    y, m, v = normals(3, n_classes, 3.0, variance)
    label = m.gather(1, y[:, None])[:, 0].numpy()
    log_sum = [expected_log_sum(*x) for x in zip(m.numpy(), v.numpy(), strict=True)]
    found = SOFTMAX.expectation(y, m, v, "exact")
    np.testing.assert_allclose(found.value, label - np.array(log_sum), rtol=1e-8, atol=1e-8)
    for c in range(2):
        for x, slope in ((m, found.dm), (v, found.dv)):
            h = 1e-3 * (1.0 if x is m else variance)
            up, down = x.clone(), x.clone()
            up[0, c] += h
            down[0, c] -= h
            high, low = (
                -expected_log_sum(*((a, v[0].numpy()) if x is m else (m[0].numpy(), a)))
                for a in (up[0].numpy(), down[0].numpy())
            )
            expected = (high - low) / (2 * h) + float(x is m and int(y[0]) == c)
            assert float(slope[0, c]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


# Wide latents far below one that is sure: their tails decide.
HARD = {
    "tails": ([50.0] + 99 * [-50.0], [1e-8] + 99 * [625.0]),
    "far tails": ([350.0] + 99 * [-50.0], [1e-8] + 99 * [1e4]),
    "a hundred wide": (100 * [0.0], 100 * [900.0]),
    "ten wide": (10 * [0.0], 10 * [900.0]),
    "as wide as may be": (100 * [0.0], 100 * [1e4]),
    "sd of thirty": ([120.0] + 99 * [0.0], [1e-8] + 99 * [900.0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HARD)
def test_exact_of_wide_rows(name, dtype):
    m, v = (np.array(x) for x in HARD[name])
    v = np.float32(v).astype(float)
    exact = m[0] - expected_log_sum(m, v)
    found = SOFTMAX.expectation(
        torch.tensor([0]),
        torch.tensor(m, dtype=dtype)[None],
        torch.tensor(v, dtype=dtype)[None],
        "exact",
    )
    of_value = 1e-5 if dtype == torch.float32 else 1e-8
    # Relative to the latents' range, of which the value is a difference.
    size = max(1.0, np.ptp(m), np.sqrt(v.max())) if dtype == torch.float32 else max(1.0, abs(exact))
    assert abs(float(found.value) - exact) < of_value * size
    assert abs(float(found.dm.sum())) < (1e-4 if dtype == torch.float32 else 1e-7)


def case(data, log_v: tuple[float, float], size: float) -> tuple[Tensor, Tensor, Tensor]:
    m, v = data.draw(gaussians(log_v, size=size))
    y = data.draw(st.integers(0, len(m) - 1))
    return torch.tensor([m]).double(), torch.tensor(v)[None], torch.tensor([y])


@given(st.data())
def test_no_bound_is_above_the_value(data):
    m, v, y = case(data, (-8, 4), size=50.0)
    exact, tight, jensen = (float(bound(b, y, m, v.double())[0]) for b in SOFTMAX.bounds)
    slack = 1e-7 * max(1.0, abs(exact))
    assert max(tight, jensen) <= exact + slack and exact <= slack


@given(st.data())
def test_against_jensen_everywhere(data):
    """Only where one latent is far wider than the rest is Jensen above, by a hundredth of a nat."""
    m, v, y = case(data, (-8, 6), size=1e4)
    tight, jensen = (float(bound(b, y, m, v.double())[0]) for b in ("tight", "jensen"))
    assert tight <= 1e-9 and tight >= jensen - 0.02 - 1e-9 * abs(jensen)


@pytest.mark.parametrize("name", SOFTMAX.bounds)
def test_moving_all_latents_changes_nothing(name):
    y, m, v = normals(50, 4, 3.0, 4.0)
    s, t = SOFTMAX.site(y, m, v, name), SOFTMAX.site(y, m + 7.0, v, name)
    torch.testing.assert_close(s.bound, t.bound, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(s.precision, t.precision, rtol=1e-9, atol=1e-12)
    slope = s.potential - s.precision * m
    torch.testing.assert_close(slope.sum(-1), torch.zeros(50).double(), rtol=0, atol=1e-12)


def test_jensen_s_site():
    y, m, v = normals(20, 5, 3.0, 4.0)
    s = SOFTMAX.site(y, m, v, "jensen")
    torch.testing.assert_close(s.precision, torch.softmax(m + v / 2, -1))


def test_integral_of_two_classes():
    """Then only the difference matters: one dense rule in one dimension."""
    _, m, v = normals(30, 2, 4.0, 3.0)
    v[::3] *= 100.0
    v[1::3] *= 1e-3
    z = np.linspace(-9, 9, 4001)
    w = np.exp(-0.5 * z * z)
    d, sd = (m[:, 0] - m[:, 1]).numpy(), v.sum(1).sqrt().numpy()
    expected = expit(d[:, None] + sd[:, None] * z) @ (w / w.sum())
    np.testing.assert_allclose(SOFTMAX.integral(m, v)[:, 0].numpy(), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("variance", [0.1, 3.0, 50.0])
def test_integral_against_sampling(variance):
    _, m, v = normals(3, 10, 2.0, variance)
    p = SOFTMAX.integral(m, v)
    generator = torch.Generator().manual_seed(0)
    f = m + v.sqrt() * torch.randn(100_000, 3, 10, generator=generator, dtype=torch.float64)
    draws = SOFTMAX.prob(f)
    error = draws.std(0) / math.sqrt(len(draws))
    assert bool(((draws.mean(0) - p).abs() < 4.5 * error).all())


def test_the_logistic_softmax_far_below_zero():
    y, m, v = normals(20, 6, 2.0, 2.0)
    torch.testing.assert_close(
        SOFTMAX.integral(m, v), LogisticSoftmax().integral(m - 60.0, v), rtol=0, atol=1e-8
    )
    f = m - 60.0
    torch.testing.assert_close(SOFTMAX.log_prob(y, m), LogisticSoftmax().log_prob(y, f))
