"""Predictions from draws against the same computed draw by draw from dense matrices."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from conjugp._sampler import prediction as sampled
from conjugp._sampler.prediction import SampledModel
from conjugp.likelihoods import LogisticSoftmax
from samplers import random_draws, target

LIKELIHOOD = LogisticSoftmax()
KINDS = ("full", "sparse", "classes", "sampled", "sparse sampled", "classes sampled")
X_NEW = torch.tensor(np.random.default_rng(9).standard_normal((7, 2)) * 1.5)


def model(kind: str, n: int = 30, **changes) -> SampledModel:
    t = replace(target(kind), **changes)
    return SampledModel(t, random_draws(t, n=n), LIKELIHOOD)


def dense(m: SampledModel, X: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Conditional means (S, n, C) and covariances (S, n, n, C) given each draw, the plain way."""
    t = m.target
    means, covariances = [], []
    for d in m.draws:
        for g, theta in zip(d.g, d.theta, strict=True):
            mean, covariance = [], []
            for c in range(3):
                k = c % len(t.kernels)
                kernel = t.kernel(k, theta[k])
                K = (kernel(m.Z, m.Z) + t.mean_variance).numpy()
                K = K + 1e-6 * np.diag(K).mean() * np.eye(len(K))
                cross = (kernel(X, m.Z) + t.mean_variance).numpy()
                r = np.linalg.cholesky(K) @ g[c]  # latents at the inputs of the draws
                mean.append(t.mean[c] + cross @ np.linalg.solve(K, r))
                left = (kernel(X, X) + t.mean_variance).numpy()
                left = left - cross @ np.linalg.solve(K, cross.T)
                covariance.append(left if t.Z is None else np.diag(np.diag(left)))
            means.append(np.stack(mean, -1))
            covariances.append(np.stack(covariance, -1))
    return np.array(means), np.array(covariances)


@pytest.mark.parametrize("kind", KINDS)
def test_latent_moments(kind):
    m = model(kind)
    means, covariances = dense(m, X_NEW)
    variances = np.einsum("snnc->snc", covariances)
    mean, variance = m.latent(X_NEW)
    assert_allclose(mean, means.mean(0), rtol=1e-7, atol=1e-9)
    assert_allclose(variance, variances.mean(0) + means.var(0), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities(kind):
    """Against the deterministic integral for every draw, within what the noise allows."""
    m = model(kind, n=30)
    means, covariances = dense(m, X_NEW)
    variances = np.einsum("snnc->snc", covariances).clip(1e-9)
    each = LIKELIHOOD.integral(
        torch.tensor(means).flatten(0, 1), torch.tensor(variances).flatten(0, 1)
    )
    expected = each.view(means.shape).mean(0).numpy()
    p = m.untempered(X_NEW).numpy()
    assert_allclose(p.sum(1), 1.0, atol=1e-12)
    # Within a draw p has at most a deviation of ½, and opposite pairs do better than that.
    assert np.abs(p - expected).max() < 4 * 0.5 / np.sqrt(2 * sampled._NOISE)
    assert np.abs(p - expected).mean() < 0.003


@pytest.mark.parametrize("kind", ["full", "classes", "sampled"])
def test_probabilities_where_a_draw_leaves_nothing_open(kind):
    """At the inputs of the draws themselves p is the plain average of p(y | f)."""
    m = model(kind, jitter=1e-9)
    f = np.array(
        [
            [t + (np.linalg.cholesky(K + 1e-9 * np.diag(K).mean() * np.eye(len(K))) @ x)
             for t, x, K in zip(m.target.mean, g, _matrices(m, theta), strict=True)]
            for d in m.draws
            for g, theta in zip(d.g, d.theta, strict=True)
        ]
    )  # fmt: skip
    expected = LIKELIHOOD.prob(torch.tensor(f).mT).mean(0)
    assert_allclose(m.untempered(m.Z), expected, atol=2e-4)
    assert_allclose(m.latent(m.Z)[0], f.mean(0).T, atol=2e-3)


def _matrices(m: SampledModel, theta: np.ndarray) -> list[np.ndarray]:
    kernels = [m.target.kernel(k, row) for k, row in enumerate(theta)]
    K = [(k(m.Z, m.Z) + m.target.mean_variance).numpy() for k in kernels]
    return K if len(K) > 1 else K * 3


@pytest.mark.parametrize("kind", ["full", "sampled", "classes"])
def test_rows_do_not_depend_on_each_other(kind, monkeypatch):
    m = model(kind, n=9)
    p, (mean, variance) = m.untempered(X_NEW), m.latent(X_NEW)
    for rows in ([3], [5, 1], [6, 6, 0, 2]):
        x = X_NEW[rows]
        assert_allclose(m.untempered(x), p[rows], rtol=1e-12)
        assert_allclose(m.latent(x)[0], mean[rows], rtol=1e-12, atol=1e-12)
        assert_allclose(m.latent(x)[1], variance[rows], rtol=1e-10)
    monkeypatch.setattr(sampled, "_CHUNK_ELEMENTS", 1)  # one row at a time
    assert_allclose(m.untempered(X_NEW), p, rtol=1e-12)
    assert_allclose(m.latent(X_NEW)[1], variance, rtol=1e-10)
    assert m.untempered(X_NEW[:0]).shape == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_joint_draws(kind):
    """Moments of many draws against the dense ones, within their own standard errors."""
    m, n = model(kind, n=8), 40_000
    x = X_NEW[:4]
    means, covariances = dense(m, x)
    found = m.sample(x, n, torch.Generator().manual_seed(0)).numpy()
    assert found.shape == (n, 4, 3)
    expected = means.mean(0)
    sd = np.sqrt(np.einsum("snnc->snc", covariances).mean(0) + means.var(0))
    assert np.abs((found.mean(0) - expected) / sd).max() < 4.5 / np.sqrt(n)
    for c in range(3):
        total = covariances[..., c].mean(0) + np.cov(means[..., c].T, bias=True)
        error = np.cov(found[..., c].T) - total
        scale = np.sqrt(np.outer(np.diag(total), np.diag(total)))
        assert np.abs(error / scale).max() < 4.5 * np.sqrt(3 / n)


def test_draws_come_from_all_draws_of_the_chains():
    """Without anything left open, n draws are n different ones of the chains, at random."""
    m = model("full", n=10, jitter=1e-9)
    f = torch.tensor(dense(m, m.Z)[0])  # (S, n, C)

    def picked(n, seed):
        draws = m.sample(m.Z, n, torch.Generator().manual_seed(seed))
        distance = (draws[:, None] - f[None]).abs().amax((2, 3))
        assert float(distance.min(1).values.max()) < 0.05
        return distance.argmin(1).tolist()

    assert sorted(picked(20, 0)) == list(range(20))
    assert sorted(picked(40, 1)) == sorted([*range(20), *range(20)])
    assert picked(20, 0) != picked(20, 1)
    assert len({picked(1, seed)[0] for seed in range(30)}) > 8


@pytest.mark.parametrize("kind", ["full", "sparse"])
def test_equal_inputs_have_equal_latents(kind):
    m = model(kind)
    x = X_NEW[[0, 1, 0, 2, 1]]
    f = m.sample(x, 50, torch.Generator().manual_seed(0))
    assert torch.equal(f[:, 0], f[:, 2]) and torch.equal(f[:, 1], f[:, 4])
    assert not torch.equal(f[:, 0], f[:, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_pickled_without_what_can_be_computed(kind):
    m = model(kind)
    size = len(pickle.dumps(m))
    p, f = m.untempered(X_NEW), m.sample(X_NEW, 3, torch.Generator().manual_seed(0))
    data = pickle.dumps(m)
    assert len(data) == size
    again = pickle.loads(data)
    assert torch.equal(again.untempered(X_NEW), p)
    assert torch.equal(again.sample(X_NEW, 3, torch.Generator().manual_seed(0)), f)


def test_groups_hold_every_draw_once_and_share_memory():
    m = model("sampled")
    numbers = [first + i for group in m.groups for first, g in group.parts for i in range(len(g))]
    assert numbers == list(range(60))
    assert len(m.groups) < 60 and len(m.groups[0].parts[0][1]) == 10
    for theta, parts in m.groups:
        for first, g in parts:
            draws = m.draws[first // 30]
            at = first % 30
            assert np.array_equal(g, draws.g[at : at + len(g)])
            assert np.array_equal(theta, draws.theta[at])
            assert np.shares_memory(g.numpy(), draws.g)
    assert len(model("full").groups) == 1
