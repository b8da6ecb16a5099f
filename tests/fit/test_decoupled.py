"""The decoupled posterior: its mean at the optimum, its moments those of the joint Gaussian."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

import conjugp._fit.weights
from conjugp._fit.weights import (
    KernelRows,
    assemble,
    fit_weights,
    latent_mean,
    start_mean,
)
from conjugp._gp.covariance import FAMILIES, covariance, quadratic
from conjugp._gp.features import basis
from conjugp._gp.model import Model, coupled
from conjugp._gp.posterior import initial_state
from conjugp._inference import captured
from conjugp._inference.mean import Mean, MeanData, Step, fit_mean
from conjugp._inference.settings import Settings
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF, Matern32
from problems import BOUNDS, LIKELIHOOD, blobs, generator, random_posterior

KERNEL = RBF((1.0, 1.5), 3.0)
N, M, M_V, C = 40, 12, 5, 3


@pytest.fixture
def data() -> Data:
    return blobs(N, C)._replace(weight=torch.linspace(0.3, 2.0, N).double())


def some_mean() -> Mean:
    w = torch.randn(C, M, dtype=torch.float64, generator=generator(7))
    return Mean(w, torch.tensor([-1.0, 0.2, 0.5], dtype=torch.float64))


def model(data: Data, family: str, bound: str = "tight", n_covariance: int = M_V) -> Model:
    b = basis([KERNEL], data.X[:M] + 0.05)
    return assemble(KERNEL, b, some_mean(), data, family, n_covariance, LIKELIHOOD, bound)


def joint(model: Model) -> list[Tensor]:
    """Covariance of the jointly whitened inducing variables: blockdiag(S_c, I)."""
    out = []
    for c in range(C):
        full = torch.eye(M, dtype=torch.float64)
        R = model.S.R[c % len(model.S.R)]
        full[:M_V, :M_V] = torch.diag(R**2) if model.S.family == "diagonal" else R.T @ R
        out.append(full)
    return out


# --- the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_latent_moments_are_those_of_the_joint_gaussian(data, family):
    q, X = model(data, family), blobs(9, 3, seed=5).X
    m, v = q.latent(X)
    L = torch.linalg.cholesky(
        KERNEL(q.Z, q.Z) + 3.0e-6 * torch.eye(M, dtype=torch.float64)
    )  # of all M points: the library keeps only the leading block for the covariance
    A = torch.linalg.solve(L, KERNEL(q.Z, X))
    torch.testing.assert_close(m, (some_mean().w @ A).T + q.mean, rtol=1e-9, atol=1e-10)
    for c, S in enumerate(joint(q)):
        expected = 3.0 - (A.T @ A).diagonal() + (A.T @ S @ A).diagonal()
        torch.testing.assert_close(v[:, c], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bound", BOUNDS)
def test_elbo_with_all_constants(data, family, bound):
    q = model(data, family, bound)
    m, v = q.latent(data.X)
    standard = MultivariateNormal(torch.zeros(M).double(), torch.eye(M).double())
    divergence = sum(
        kl_divergence(MultivariateNormal(q.w[c], S), standard) for c, S in enumerate(joint(q))
    )
    expected = data.weight @ LIKELIHOOD.site(data.y, m, v, bound).bound - divergence
    assert q.elbo(data) == pytest.approx(float(expected), rel=1e-11)
    assert q.elbo(data, chunk=7) == pytest.approx(q.elbo(data), rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_moments_of_the_posterior(data, family):
    q, X, n = model(data, family), blobs(4, 3, seed=5).X, 40_000
    f = q.sample(X, n, generator())
    assert f.shape == (n, 4, C)
    m, v = q.latent(X)
    L = torch.linalg.cholesky(KERNEL(q.Z, q.Z) + 3.0e-6 * torch.eye(M).double())
    A = torch.linalg.solve(L, KERNEL(q.Z, X))
    assert ((f.mean(0) - m).abs() < 4.5 * (v / n).sqrt()).all()
    for c, S in enumerate(joint(q)):
        cov = KERNEL(X, X) - A.T @ A + A.T @ S @ A
        se = ((cov.square() + torch.outer(cov.diagonal(), cov.diagonal())) / n).sqrt()
        assert ((f[:, :, c].T.cov() - cov).abs() < 4.5 * se).all()
    # Classes are independent.
    cross = torch.corrcoef(f[:, 0].T) - torch.eye(C).double()
    assert cross.abs().max() < 4.5 / math.sqrt(n)


def test_chunks_of_latent_moments(data, monkeypatch):
    q = model(data, "full")
    whole = q.latent(data.X)
    monkeypatch.setattr("conjugp._gp.model._CHUNK_ELEMENTS", 5 * M)
    for a, b in zip(whole, q.latent(data.X), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per_class", [False, True])
def test_a_variational_fit_as_a_model(data, per_class):
    kernels = [RBF(1.0, 2.0), RBF(0.5, 3.0), RBF(2.0, 0.7)] if per_class else [RBF(1.0, 2.0)]
    state = initial_state(kernels, data.X[:M] + 0.05, some_mean().mean)
    state.q = random_posterior(C, M)
    found = coupled(state, LIKELIHOOD, "tight")
    X = blobs(9, 3, seed=5).X
    m, v = found.latent(X)
    for c in range(C):
        k = kernels[c % len(kernels)]
        jitter = 1e-6 * k.diag(X)[0] * torch.eye(M).double()
        L = torch.linalg.cholesky(k(state.Z, state.Z) + jitter)
        A = torch.linalg.solve(L, k(state.Z, X))
        S = torch.linalg.inv(state.q.P[c])
        expected = A.T @ S @ state.q.h[c] + state.mean[c]
        torch.testing.assert_close(m[:, c], expected, rtol=1e-9, atol=1e-9)
        expected = k.diag(X) - (A.T @ A).diagonal() + (A.T @ S @ A).diagonal()
        torch.testing.assert_close(v[:, c], expected, rtol=1e-9, atol=1e-9)
    draws = found.sample(X[:2], 20_000, generator())
    assert ((draws.mean(0) - m[:2]).abs() < 4.5 * (v[:2] / 20_000).sqrt()).all()


# --- the covariance that belongs to a mean ------------------------------------------------------


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_rounds_settle_the_covariance(data, family, bound):
    """The assembled variances against the fixed point of precisions and covariance."""
    q = model(data, family, bound)
    m, v = q.latent(data.X)
    A = q.L_inv[0] @ KERNEL(q.Z[:M_V], data.X)
    residual = 3.0 - A.square().sum(0)
    exact = v
    for _ in range(200):
        site = LIKELIHOOD.site(data.y, m, exact, bound)
        S = covariance(family, A, site.precision.clamp(min=0.0) * data.weight.unsqueeze(1))
        exact = (residual + quadratic(S, A.unsqueeze(0))).T.expand(N, C)
    assert ((v / exact).log().abs() < 0.1).all()
    assert (v / exact).log().abs().mean() < 0.03


def test_some_rows_stand_for_all(data, monkeypatch):
    """Precisions of the rows that are looked at are scaled up to the weight of all."""
    repeated = Data(data.X.repeat(4, 1), data.y.repeat(4), data.weight.repeat(4), data.n_classes)
    whole = model(repeated, "full")
    monkeypatch.setattr(conjugp._fit.weights, "_COVARIANCE_ROWS", N)
    torch.testing.assert_close(model(repeated, "full").S.R, whole.S.R, rtol=1e-10, atol=1e-12)


def test_more_covariance_points_than_points(data):
    assert model(data, "full", n_covariance=99).L_inv.shape == (1, M, M)


# --- the mean -----------------------------------------------------------------------------------


def objective(data: Data, A: Tensor, bound: str, v: Tensor | None, mean: Tensor | None):
    """−(Σ weight·bound − ½|w|²) and its gradient as a function of a flat w, and mean if free."""

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.tensor(flat, requires_grad=True)
        w, b = x[: M * C].view(C, M), x[M * C :] if mean is None else mean
        m = (w @ A).T + b
        if v is None:
            value = LIKELIHOOD.log_prob(data.y, m)
        else:
            value = LIKELIHOOD.site(data.y, m, v, bound).bound
        total = 0.5 * w.square().sum() - data.weight @ value
        (gradient,) = torch.autograd.grad(total, x)
        return total.item(), gradient.numpy()

    return loss


def settings(**changes) -> Settings:
    usual = {"max_epochs": 500, "batch_size": N, "learning_rate": 0.1}
    return Settings(LIKELIHOOD, **{"bound": "tight", **usual, **changes})


@pytest.mark.parametrize(
    ("bound", "learn_mean"),
    [(None, False), ("tight", False), ("collapsed", False), ("augmented", False), ("tight", True)],
)
def test_the_mean_is_at_its_optimum(data, bound, learn_mean):
    """Against BFGS on the same objective; None is log p itself, the posterior's mode.

    With a prior mean that is free to fall, only the tight bound has an optimum at a finite one.
    """
    Z = data.X[:M] + 0.05
    held = None if bound is None else model(data, "full", bound)
    start = start_mean(M, torch.tensor([0.3, -0.3, 0.0]).double())
    n_epochs = 1500 if learn_mean else 500  # the prior mean moves at a tenth of the rate
    config = settings(bound=bound or "tight", learn_mean=learn_mean, max_epochs=n_epochs)
    b, found = fit_weights(KERNEL, Z, data, start, config, generator(), model=held)
    A = b.L_inv[0] @ KERNEL(Z, data.X)
    v = None if held is None else held.latent(data.X)[1]
    loss = objective(data, A, bound or "tight", v, None if learn_mean else start.mean)
    free = [np.zeros(M * C), start.mean.numpy()] if learn_mean else [np.zeros(M * C)]
    best = minimize(loss, np.concatenate(free), jac=True, options={"gtol": 1e-7})
    x = [found.w.reshape(-1), found.mean] if learn_mean else [found.w.reshape(-1)]
    assert loss(torch.cat(x).numpy())[0] - best.fun < 1e-4
    w = torch.tensor(best.x)[: M * C].view(C, M)
    torch.testing.assert_close(found.w, w, rtol=0, atol=1e-2)
    assert learn_mean or torch.equal(found.mean, start.mean)


@pytest.mark.parametrize("bound", [None, "collapsed", "augmented"])
def test_learning_the_prior_mean_pays(data, bound):
    Z = data.X[:M] + 0.05
    held = None if bound is None else model(data, "full", bound)
    start, ends = start_mean(M, torch.tensor([0.3, -0.3, 0.0]).double()), []
    for learn in (False, True):
        config = settings(bound=bound or "tight", learn_mean=learn, max_epochs=100)
        seen: list[float] = []
        fit_weights(
            KERNEL, Z, data, start, config, generator(), lambda e, x, s=seen: s.append(x), held
        )
        ends.append(seen[-1])
    assert ends[1] > ends[0] + 0.1


@pytest.mark.parametrize("batch_size", [20, 39, 13])
def test_batches_of_any_size_find_the_same_optimum(data, batch_size):
    """A short last batch must not count for more than its rows."""
    Z, start = data.X[:M] + 0.05, start_mean(M, torch.zeros(C).double())
    config = settings(max_epochs=1000, batch_size=batch_size, learn_mean=False)
    b, found = fit_weights(KERNEL, Z, data, start, config, generator())
    loss = objective(data, b.L_inv[0] @ KERNEL(Z, data.X), "tight", None, start.mean)
    best = minimize(loss, np.zeros(M * C), jac=True, options={"gtol": 1e-7})
    assert loss(found.w.reshape(-1).numpy())[0] - best.fun < 1e-3


def test_rows_whitened_once_or_step_by_step(data):
    Z = data.X[:M] + 0.05
    b = basis([KERNEL], Z)
    start = start_mean(M, torch.zeros(C).double())
    found = []
    for whitened in (False, True):
        rows = KernelRows(b, data, 2**30, whitened)
        L_inv = None if whitened else b.L_inv[0]
        source = MeanData(rows, L_inv, data, None)
        config = settings(max_epochs=20, batch_size=16)
        found.append(fit_mean(start, source, config, generator()))
    torch.testing.assert_close(found[0].w, found[1].w, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(found[0].mean, found[1].mean, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("batch_size", [16, 4096])
def test_the_cache_does_not_change_a_bit(data, batch_size):
    Z = data.X[:M] + 0.05
    start = start_mean(M, torch.zeros(C).double())
    found = []
    for size in (0, 1024):
        config = settings(max_epochs=5, batch_size=batch_size, cache_mb=size)
        found.append(fit_weights(KERNEL, Z, data, start, config, generator())[1])
    assert torch.equal(found[0].w, found[1].w) and torch.equal(found[0].mean, found[1].mean)


@pytest.mark.parametrize("whitened", [False, True])
def test_cached_blocks_are_kept_and_equal(data, whitened):
    b = basis([Matern32(1.0, 2.0)], data.X[:M])
    kept, computed = (KernelRows(b, data, size, whitened) for size in (2**30, 0))
    assert kept(3, 17) is kept(3, 17)
    assert torch.equal(kept(3, 17), computed(3, 17))
    assert computed.cache is None


def test_weights_are_copies_in_the_mean(data):
    copies = torch.arange(N) % 3 + 1
    X, y = data.X.repeat_interleave(copies, 0), data.y.repeat_interleave(copies)
    repeated = Data(X, y, torch.ones(len(y)).double(), C)
    start = start_mean(M, torch.zeros(C).double())
    found = [
        fit_weights(
            KERNEL, data.X[:M], d, start, settings(max_epochs=50, batch_size=4096), generator()
        )[1]
        for d in (data._replace(weight=copies.double()), repeated)
    ]
    torch.testing.assert_close(found[0].w, found[1].w, rtol=1e-6, atol=1e-8)


def test_the_mean_of_the_model_is_the_mean_that_was_fitted(data):
    start = start_mean(M, torch.zeros(C).double())
    b, mean = fit_weights(KERNEL, data.X[:M], data, start, settings(max_epochs=20), generator())
    q = assemble(KERNEL, b, mean, data, "shared", M_V, LIKELIHOOD, "tight")
    expected = latent_mean(KERNEL, b, mean, data.X, chunk=7)
    torch.testing.assert_close(q.latent(data.X)[0], expected, rtol=1e-10, atol=1e-10)


def test_progress_reports_the_objective(data):
    start, seen = start_mean(M, torch.zeros(C).double()), []
    config = settings(max_epochs=30)
    fit_weights(KERNEL, data.X[:M], data, start, config, generator(), lambda e, x: seen.append(x))
    assert len(seen) == 30 and seen[-1] > seen[0]


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("learn_mean", [True, False])
def test_recorded_steps_are_the_steps(whitened, learn_mean):
    """Without a GPU to record them, but by the same lines."""
    data = blobs(90, 3)
    b = basis([KERNEL], data.X[:20])
    rows = KernelRows(b, data, 2**30, whitened)
    source = MeanData(rows, None if whitened else b.L_inv[0], data, None)
    ends = []
    for recorded in (False, True):
        here = Mean(data.X.new_zeros(3, 20), data.X.new_full((3,), -0.7))
        step = Step(here, source, settings(learn_mean=learn_mean), 3 / 90, 1 / 90)
        assert not captured.applies(step)
        take = captured.CapturedStep(step) if recorded else step
        values = [float(take(slice(i % 3 * 30, i % 3 * 30 + 30), 0.1, 1.0)) for i in range(9)]
        ends.append((here.w, here.mean, torch.tensor(values), *step.adam.second))
    for a, c in zip(*ends, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-13)
