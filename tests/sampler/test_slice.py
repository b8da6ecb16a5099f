"""Slice steps leave a known density as it is, and are reversible."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from conjugp._sampler import slice as slices
from conjugp._sampler.slice import slice_step


def mixture_log_density(x: float) -> float:
    p = 0.8 * math.exp(-2 * (x + 3) ** 2) + 0.6 * math.exp(-0.5 * (x - 2) ** 2)
    return math.log(p) if p else -math.inf


def mixture_draws(n: int, rng: np.random.Generator) -> np.ndarray:
    left = rng.random(n) < 0.4
    return np.where(left, -3.0, 2.0) + np.where(left, 0.5, 1.0) * rng.standard_normal(n)


def uniform_log_density(x: float) -> float:
    return 0.0 if 0 < x < 1 else -math.inf


DENSITIES = {
    "normal": (lambda x: -0.5 * x * x, lambda n, rng: rng.standard_normal(n)),
    "bounded": (uniform_log_density, lambda n, rng: rng.random(n)),
    "gamma": (
        lambda x: math.log(x) - x if x > 0 else math.nan,  # NaN counts as outside
        lambda n, rng: rng.standard_gamma(2.0, n),
    ),
    "two modes": (mixture_log_density, mixture_draws),
}


def steps(name: str, width: float, n: int = 5000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exact draws, where one step takes them, and as many other exact draws."""
    log_density, draw = DENSITIES[name]
    rng = np.random.default_rng(int(1000 * width))
    before = draw(n, rng)
    after = [x + slice_step(lambda t, x=x: log_density(x + t), width, rng) for x in before]
    return before, np.array(after), draw(20 * n, rng)


@pytest.mark.parametrize("width", [0.3, 2.0, 50.0])
@pytest.mark.parametrize("name", DENSITIES)
def test_a_step_leaves_the_density_unchanged(name, width):
    before, after, others = steps(name, width)
    assert (after != before).all()
    assert stats.ks_2samp(after, others).pvalue > 1e-3
    assert_reversible(before, after)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_steps_out_leave_it_too(monkeypatch, most):
    # The limit on steps binds, so that only its random split keeps the density.
    monkeypatch.setattr(slices, "_MOST_STEPS", most)
    for name in ("normal", "gamma"):
        before, after, others = steps(name, 0.5, 10_000)
        assert stats.ks_2samp(after, others).pvalue > 1e-3
        assert_reversible(before, after)


def assert_reversible(before: np.ndarray, after: np.ndarray) -> None:
    """Pairs have the same law in either order."""
    a, b = np.tanh(before), np.tanh(after)
    for gap in (a - b, a**2 * b - a * b**2, (b - a) ** 3, np.sign(b - a) * np.cos(a + b)):
        assert abs(gap.mean()) < 4 * gap.std() / np.sqrt(len(gap))


def test_what_is_known_is_not_asked_again():
    asked = []

    def log_density(t: float) -> float:
        asked.append(t)
        return -0.5 * t * t

    rng = np.random.default_rng(0)
    for _ in range(100):
        t = slice_step(log_density, 1.0, rng, at_zero=0.0)
        assert 0.0 not in asked and asked[-1] == t
    rng_one, rng_two = np.random.default_rng(1), np.random.default_rng(1)
    assert slice_step(log_density, 1.0, rng_one) == slice_step(log_density, 1.0, rng_two, 0.0)


@pytest.mark.parametrize("elsewhere", [-math.inf, math.nan])
def test_a_point_with_nothing_around_it_stays(elsewhere):
    step = slice_step(lambda t: 0.0 if t == 0 else elsewhere, 1.0, np.random.default_rng(0))
    assert step == 0.0
