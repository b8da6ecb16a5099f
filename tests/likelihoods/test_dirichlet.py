"""Dirichlet classification is Gaussian process regression, and that has a closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from conjugp._gp.model import coupled
from conjugp._gp.posterior import moments
from conjugp._inference import svi
from conjugp._inference.settings import Settings
from conjugp.kernels import RBF
from conjugp.likelihoods import Dirichlet
from problems import blobs, start, sweep_of


@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_targets_match_the_gamma_variables(alpha):
    """A log-normal with the target's mean and variance has mean and variance α."""
    target, s2 = Dirichlet(alpha)._targets(torch.tensor([1]), 3)
    concentration = torch.tensor([[alpha, 1 + alpha, alpha]], dtype=torch.float64)
    mean = torch.exp(target + s2 / 2)
    torch.testing.assert_close(mean, concentration)
    torch.testing.assert_close((torch.exp(s2) - 1) * mean**2, concentration)


def regression(X, Y, S2, kernel, mean):
    """Posterior mean and variance at X of a regression on Y (N,) with noise S2 (N,), and log Z."""
    K = kernel(X, X)
    N = K + torch.diag(S2)
    gain = torch.linalg.solve(N, K).T
    m = mean + gain @ (Y - mean)
    v = torch.diagonal(K - gain @ K)
    log_z = torch.distributions.MultivariateNormal(torch.full_like(Y, mean), N).log_prob(Y)
    return m, v, float(log_z)


def test_the_posterior_is_that_of_regression_after_one_step():
    data, kernel, mean = blobs(40, 3), RBF(1.2, 3.0), -2.0
    likelihood = Dirichlet()
    state = start(data, kernel, mean=torch.full((3,), mean, dtype=torch.float64))
    settings = Settings(likelihood, "exact", learn_kernel=False, learn_mean=False, jitter=1e-10)
    sweep = sweep_of(state, data, settings)
    stats = sweep(moments(state.q), False)
    state.q = svi.update(state.q, stats, 1.0, 1.0)
    again = sweep(moments(state.q), False)
    torch.testing.assert_close(again.h, stats.h, rtol=1e-9, atol=1e-9)
    model = coupled(state, likelihood, "exact", 1e-10)
    m, v = model.latent(data.X)
    Y, S2 = likelihood._targets(data.y, 3)
    evidence = 0.0
    for c in range(3):
        expected = regression(data.X, Y[:, c], S2[:, c], kernel, mean)
        torch.testing.assert_close(m[:, c], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v[:, c], expected[1], rtol=1e-3, atol=1e-4)
        evidence += expected[2]
    # Nothing is bounded and nothing is sparse: the ELBO is the evidence.
    assert model.elbo(data) == pytest.approx(evidence, abs=1e-2)


def test_log_prob_is_the_density_of_the_targets():
    y = torch.tensor([0, 2])
    f = torch.tensor([[0.1, -3.0, -5.0], [-6.0, -7.0, 1.0]], dtype=torch.float64)
    target, s2 = Dirichlet(0.05)._targets(y, 3)
    expected = torch.distributions.Normal(f, s2.sqrt()).log_prob(target).sum(-1)
    torch.testing.assert_close(Dirichlet(0.05).log_prob(y, f), expected)


def test_start_mean_is_the_mean_target():
    targets = [math.log(a) - np.log1p(1 / a) / 2 for a in (1.01, 0.01, 0.01)]
    assert Dirichlet().start_mean(3) == pytest.approx(np.mean(targets))


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_bad_alpha(alpha):
    with pytest.raises(ValueError, match="alpha must be positive and finite"):
        Dirichlet(alpha)
