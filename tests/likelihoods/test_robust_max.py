"""Robust-max: the chance to be the largest, its derivatives, steps that do not blow up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch.special import ndtr

from conjugp import GPClassifier
from conjugp._gp.posterior import Posterior, initial_state, kl, moments
from conjugp._inference import svi
from conjugp._inference.settings import Settings
from conjugp._inference.train import train
from conjugp.kernels import RBF
from conjugp.likelihoods import RobustMax, Site
from conjugp.likelihoods._orthant import largest, log_largest
from faces import toy
from problems import blobs, generator, random_labels, sweep_of

ROBUST = RobustMax()


def normals(n: int, n_classes: int, ratio: float, seed: int = 0):
    rng = np.random.default_rng(seed)
    m = rng.normal(0, 2, (n, n_classes))
    v = ratio ** rng.uniform(0, 1, (n, n_classes))
    return torch.tensor(rng.integers(n_classes, size=n)), torch.tensor(m), torch.tensor(v)


@pytest.mark.parametrize("ratio", [1.0, 100.0, 1e6, 1e12])
def test_two_classes_in_closed_form(ratio):
    """However much wider one is than the other."""
    y, m, v = normals(60, 2, ratio)
    gap = (m[:, 0] - m[:, 1]) / v.sum(1).sqrt()
    tol = 1e-6 if ratio <= 100 else 1e-2
    torch.testing.assert_close(largest(m, v)[:, 0], ndtr(gap), rtol=0, atol=tol)
    log_p = torch.special.log_ndtr(torch.where(y == 0, gap, -gap))
    torch.testing.assert_close(log_largest(y, m, v).value.exp(), log_p.exp(), rtol=0, atol=tol)


@pytest.mark.parametrize("ratio", [1.0, 30.0])
def test_three_classes_as_an_orthant(ratio):
    """P(f_y − f_c > 0 for both others), from SciPy's bivariate distribution function."""
    y, m, v = normals(8, 3, ratio)
    p = largest(m, v).gather(1, y[:, None])[:, 0]
    value = log_largest(y, m, v).value.exp()
    for i in range(8):
        k, others = int(y[i]), [c for c in range(3) if c != int(y[i])]
        cov = np.full((2, 2), float(v[i, k])) + np.diag(v[i, others].numpy())
        expected = multivariate_normal((m[i, others] - m[i, k]).numpy(), cov).cdf([0.0, 0.0])
        assert float(p[i]) == pytest.approx(expected, abs=1e-6)
        assert float(value[i]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("n_classes", [4, 40])
@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e8])
def test_all_chances_add_up(n_classes, ratio):
    """One grid for all classes against a grid for each."""
    _, m, v = normals(5, n_classes, ratio)
    p = largest(m, v)
    each = [log_largest(torch.full((5,), k), m, v).value.exp() for k in range(n_classes)]
    tol = 1e-5 if ratio <= 1e3 else 1e-2
    torch.testing.assert_close(p, torch.stack(each, 1), rtol=0, atol=tol)
    total = torch.stack(each, 1).sum(1)
    torch.testing.assert_close(total, torch.ones(5).double(), rtol=0, atol=tol)


def test_against_sampling():
    y, m, v = normals(5, 6, 20.0)
    f = m + v.sqrt() * torch.randn(200_000, 5, 6, generator=generator(), dtype=torch.float64)
    draws = ROBUST.prob(f)
    error = 4.5 * draws.std(0) / math.sqrt(len(draws))
    assert bool(((ROBUST.integral(m, v) - draws.mean(0)).abs() < error + 1e-9).all())
    log_p = ROBUST.log_prob(y, f)
    error = 4.5 * log_p.std(0) / math.sqrt(len(f))
    assert bool(((ROBUST.site(y, m, v).bound - log_p.mean(0)).abs() < error + 1e-9).all())


def test_only_the_order_of_the_latents_matters():
    y, m, v = normals(30, 4, 10.0)
    s, t = ROBUST.site(y, m, v), ROBUST.site(y, 9.0 * m, 81.0 * v)
    torch.testing.assert_close(s.bound, t.bound, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(s.precision, 81.0 * t.precision, rtol=1e-6, atol=1e-6)


def test_the_curvature_is_that_of_log_p_and_never_negative():
    """Second differences of log P in each m, times the gradient's factor."""
    y, m, v = normals(200, 5, 5.0)
    s = ROBUST.site(y, m, v)
    h, value = 1e-3, log_largest(y, m, v).value
    factor = (math.log1p(-1e-3) - math.log(1e-3 / 4)) * value.exp()
    for c in range(5):
        step = h * torch.eye(5, dtype=torch.float64)[c]
        up, down = (log_largest(y, m + k * step, v).value for k in (1, -1))
        expected = -factor * (up + down - 2 * value) / h**2
        assert s.curvature is not None
        torch.testing.assert_close(s.curvature[:, c], expected, rtol=1e-3, atol=2e-3)
    assert bool((s.curvature >= 0).all()) and bool((s.precision < 0).any())
    assert isinstance(svi.clamp(s, m), Site)


def fit(data, variance: float, batch: int | None, start: float, epochs: int = 25) -> list[float]:
    """ELBOs of a fit of q alone that starts at random."""
    state = initial_state([RBF(1.5, variance)], data.X, data.X.new_zeros(data.n_classes))
    noise = torch.randn(state.q.h.shape, generator=generator(3), dtype=torch.float64)
    state.q = Posterior(start * noise, state.q.P)
    settings = Settings(
        ROBUST, "exact", learn_kernel=False, learn_mean=False, batch_size=batch, max_epochs=epochs
    )
    result = train(state, data, settings, generator())
    q = moments(result.state.q)
    stats = sweep_of(result.state, data, settings)(q, False)
    return [*result.history, float(stats.bound) - float(kl(q))]


@pytest.mark.parametrize("batch", [None, 20])
@pytest.mark.parametrize("variance", [0.1, 10.0, 1e4])
def test_steps_from_anywhere_reach_a_good_elbo(batch, variance):
    """No warm-up of the step size; GPflow's natural gradients give NaN here."""
    data = blobs(60, 3, gap=4.0)
    elbos = [fit(data, variance, batch, start)[-1] for start in (0.0, 3.0)]
    # The scale of the latents is no part of the model, so no variance is easier than another.
    assert elbos == pytest.approx([-44.4, -44.4], abs=3.0)


@pytest.mark.parametrize("data", [blobs(60, 3, gap=0.3), random_labels(60, 3)], ids=["near", "any"])
@pytest.mark.parametrize("batch", [None, 20])
def test_labels_that_say_nothing(data, batch):
    elbos = fit(data, 30.0, batch, 0.0)
    assert np.all(np.isfinite(elbos)) and elbos[-1] > 60 * math.log(1e-3 / 2)


def test_learned_epsilon():
    """The share of labels that the latents get wrong, and a maximum of the expectation."""
    y, m, v = normals(400, 3, 2.0)
    y = torch.where(torch.arange(400) % 8 == 0, y, m.argmax(1))
    weight = torch.ones(400, dtype=torch.float64)
    assert ROBUST.learned(y, m, v, weight) is ROBUST
    found = RobustMax(0.01, learn_epsilon=True).learned(y, m, v, weight)
    wrong = 1.0 - log_largest(y, m, v).value.exp().mean()
    assert found.epsilon == pytest.approx(float(wrong), rel=0.01) and found.learn_epsilon
    assert found.learned(y, m, v, weight) is found

    def value(epsilon: float) -> float:
        return float(RobustMax(epsilon).site(y, m, v).bound.sum())

    best = value(found.epsilon)
    assert best > value(1.05 * found.epsilon) - 0.05 and best > value(0.95 * found.epsilon) - 0.05


def test_a_fit_finds_the_share_of_wrong_labels():
    X, y = toy(200, gap=6.0)
    wrong = np.random.default_rng(1).random(200) < 0.2
    y = np.where(wrong, (y + 1) % 3, y)
    clf = GPClassifier(
        RBF(2.0, 10.0),
        likelihood=RobustMax(learn_epsilon=True),
        learn_hyperparameters=False,
        temperature=None,
        n_inducing=30,
        max_epochs=50,
        random_state=0,
    ).fit(X, y)
    found = clf._fitted.model.likelihood
    assert isinstance(found, RobustMax) and found.epsilon == pytest.approx(wrong.mean(), abs=0.05)
    assert clf.likelihood.epsilon == 1e-3


@pytest.mark.parametrize("epsilon", [0.0, -0.1, 0.5, 1.0, math.nan])
def test_bad_epsilon(epsilon):
    with pytest.raises(ValueError, match=r"epsilon must be between 0 and 0.5"):
        RobustMax(epsilon)
