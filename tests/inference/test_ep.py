"""Expectation propagation against numerical integration, finite differences, MCMC and itself."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp
from scipy import stats
from scipy.special import log_ndtr, ndtr
from sklearn.datasets import load_wine
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import Tensor

from conjugp import GPClassifier
from conjugp._gp.features import Features, basis, features
from conjugp._gp.model import coupled
from conjugp._gp.posterior import Posterior, State, initial_state, marginals, moments
from conjugp._inference import ep, svi
from conjugp._inference.ep_steps import AveragedStep, SiteSweep, settle
from conjugp._inference.moving import Loop, Moving
from conjugp._inference.settings import Progress, Result, Settings
from conjugp._inference.train import absorb, train
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF, Kernel
from conjugp.likelihoods import Heaviside, LogisticSoftmax
from problems import blobs, generator, odd_data, random_labels, random_posterior, start, take
from random_cases import allowed


def config(noise: float = 1.0, **changes) -> Settings:
    """Settings of a fit of the sites alone unless told otherwise."""
    quiet = {"learn_kernel": False, "learn_mean": False, "tol": 1e-6, "max_epochs": 500}
    return Settings(Heaviside(noise), "tight", inference="ep", **{**quiet, **changes})


def ep_moving(
    data: Data, kernels: Kernel | list[Kernel], cfg: Settings | None = None, Z=None, mean=None
) -> Moving:
    """The prior, and what moves its hyperparameters."""
    return Moving(start(data, kernels, Z, mean), data.total, config() if cfg is None else cfg)


def ep_fit(
    data: Data, kernels: Kernel | list[Kernel], cfg: Settings | None = None, Z=None, mean=None
) -> Result:
    state = start(data, kernels, Z, mean)
    return train(state, data, config() if cfg is None else cfg, generator())


def random_cavity(
    n: int, n_classes: int, seed: int = 0
) -> tuple[ep.Cavity, Tensor, Tensor, Tensor]:
    """Cavities, prior means and residuals of n rows, and their labels."""
    g = generator(seed)
    y = torch.randint(n_classes, (n,), generator=g)

    def draw(low: float, high: float) -> Tensor:
        x = torch.rand(n, n_classes, generator=g, dtype=torch.float64)
        return ep.pairs(low + (high - low) * x, y)

    cavity = ep.Cavity(draw(-4, 4), draw(-3, 2).exp())
    return cavity, draw(-1, 1), draw(-2, 1).exp(), y


# --- one pair -----------------------------------------------------------------------------------


def tilted_by_quadrature(a, h, mean, residual):
    """log Z, means and variances of N(x | a, h) Φ(·) for two ends, on a grid."""
    t = np.linspace(-9, 9, 361)
    x, z = (a[i] + math.sqrt(h[i]) * t for i in (0, 1))
    gap = x[:, None] + mean[0] - z[None, :] - mean[1]
    density = stats.norm.pdf(t)[:, None] * stats.norm.pdf(t) * (t[1] - t[0]) ** 2
    density = density * ndtr(gap / math.sqrt(residual[0] + residual[1]))
    Z = density.sum()
    first = np.array([(density.sum(1) @ x) / Z, (density.sum(0) @ z) / Z])
    second = np.array([(density.sum(1) @ x**2) / Z, (density.sum(0) @ z**2) / Z])
    return math.log(Z), first, second - first**2


def test_moments_against_two_dimensional_quadrature():
    cavity, mean, residual, y = random_cavity(30, 3)
    found = ep.match(cavity, mean, residual)
    for i, c in [(i, c) for i in range(30) for c in range(3) if c != y[i]]:
        a, h, mu, k = (x[:, i, c].numpy() for x in (*cavity, mean, residual))
        log_z, m, v = tilted_by_quadrature(a, h, mu, k)
        assert float(found.log_z[i, c]) == pytest.approx(log_z, abs=1e-10)
        # The derivatives give the moments, and the cavity times the site has them.
        np.testing.assert_allclose(a + h * found.d_a[:, i, c].numpy(), m, rtol=0, atol=1e-9)
        r, t = (x[:, i, c].numpy() for x in found.sites)
        np.testing.assert_allclose(1 / (1 / h + t), v, rtol=1e-8)
        np.testing.assert_allclose((a / h + r) / (1 / h + t), m, rtol=0, atol=1e-8)


def test_derivatives_of_the_normaliser():
    cavity, mean, residual, _ = random_cavity(20, 4, seed=1)
    a, k = cavity.a.clone().requires_grad_(), residual.clone().requires_grad_()
    s = (k + cavity.h).sum(0)
    level = a + mean
    log_z = torch.special.log_ndtr((level[0] - level[1]) / s.sqrt())
    d_a, d_k = torch.autograd.grad(log_z.sum(), (a, k))
    found = ep.match(cavity, mean, residual)
    torch.testing.assert_close(found.log_z, log_z.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.d_a, d_a, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.d_s.expand_as(d_k), d_k, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", [-1e8, -3e3, -1.001e3, -999.0, -40.0, -5.0, 0.0, 5.0, 37.0, 60.0])
def test_tails_against_mpmath(beta):
    a = torch.tensor([beta, 0.0], dtype=torch.float64).view(2, 1, 1)
    h = torch.full_like(a, 0.25)
    found = ep.match(ep.Cavity(a, h), torch.zeros_like(a), h)  # s = 1
    mp.dps = 60
    b = mp.mpf(beta)
    cdf = mp.erfc(-b / mp.sqrt(2)) / 2
    alpha = mp.exp(-b * b / 2) / mp.sqrt(2 * mp.pi) / cdf
    nu = alpha * (alpha + b)
    t = 1 / (1 / nu - mp.mpf("0.25"))
    assert float(found.log_z) == pytest.approx(float(mp.log(cdf)), rel=1e-12, abs=1e-250)
    assert float(found.d_a[0]) == pytest.approx(float(alpha), rel=1e-12, abs=1e-250)
    assert float(found.sites.precision[0]) == pytest.approx(float(t), rel=1e-9, abs=1e-250)


positive = st.floats(-25, 14).map(math.exp)


@given(
    a=st.tuples(*[st.floats(-1e4, 1e4)] * 2),
    h=st.tuples(positive, positive),
    residual=st.tuples(*[st.floats(-7, 14).map(math.exp)] * 2),
)
def test_any_pair_has_a_proper_site(a, h, residual):
    a, h, k = (torch.tensor(x, dtype=torch.float64).view(2, 1, 1) for x in (a, h, residual))
    found = ep.match(ep.Cavity(a, h), torch.zeros_like(a), k)
    for x in (found.log_z, found.d_a, found.d_s, *found.sites):
        assert torch.isfinite(x).all()
    # No site is more certain than the other end and the noise let it be.
    assert (found.sites.precision >= 0).all()
    assert (found.sites.precision * (k + k.flip(0) + h.flip(0)) <= 1 + 1e-12).all()


def test_a_site_put_in_is_taken_out():
    cavity, mean, residual, _ = random_cavity(20, 3, seed=2)
    sites = ep.match(cavity, mean, residual).sites
    v = 1 / (1 / cavity.h + sites.precision)
    m = v * (cavity.a / cavity.h + sites.potential)
    found = ep.without(ep.Cavity(m, v), sites, torch.ones(20, dtype=torch.float64))
    torch.testing.assert_close(found.a, cavity.a, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.h, cavity.h, rtol=1e-9, atol=1e-10)


def test_scale_of_a_site_by_quadrature():
    cavity, mean, residual, _ = random_cavity(8, 2, seed=3)
    sites = ep.match(cavity, mean, residual).sites
    found = ep.log_scale(cavity, sites)
    z = torch.linspace(-12, 12, 2001, dtype=torch.float64).view(-1, 1, 1, 1)
    x = cavity.a + cavity.h.sqrt() * z
    log_f = sites.potential * x - 0.5 * sites.precision * x * x - 0.5 * z * z
    both = torch.logsumexp(log_f, 0) + math.log(0.012) - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(found, both.sum(0), rtol=1e-10, atol=1e-10)


# --- the page -----------------------------------------------------------------------------------


def test_sums_over_pairs():
    y = torch.tensor([2, 0, 1, 1])
    x = torch.randn(4, 3, generator=generator(), dtype=torch.float64)
    both = ep.pairs(x, y)
    assert torch.equal(both[1], x) and torch.equal(both[0, :, 1], x[range(4), y])
    ends = torch.randn(2, 4, 3, generator=generator(1), dtype=torch.float64)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for i in range(4):
        for c in range(3):
            if c != y[i]:
                expected[i, y[i]] += ends[0, i, c]
                expected[i, c] += ends[1, i, c]
    torch.testing.assert_close(ep.fold(ends, y), expected)


def test_counts_of_factors():
    y, weight = torch.tensor([0, 0, 1, 3, 3, 3]), torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 0.0])
    found = ep.counts(torch.bincount(y, weight, 4))
    for k in range(4):
        own = float(weight[y == k].sum())
        assert float(found[k]) == pytest.approx(float(weight.sum()) - own + 3 * own)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normaliser_of_a_posterior(dtype):
    q = random_posterior(3, 5)
    q = Posterior(q.h.to(dtype), q.P.to(dtype))
    P, h = q.P.double().numpy(), q.h.double().numpy()
    expected = [
        0.5 * b @ np.linalg.solve(A, b) - 0.5 * np.linalg.slogdet(A)[1]
        for A, b in zip(P, h, strict=True)
    ]
    np.testing.assert_allclose(ep.log_norm(q), expected, rtol=1e-12)


def test_averaged_cavity_leaves_the_prior():
    q, n = random_posterior(3, 5), torch.tensor([1.0, 2.0, 0.3]).double()
    found = ep.averaged_cavity(q, n)
    eye = torch.eye(5).double()
    torch.testing.assert_close(found.P[1], eye + 0.5 * (q.P[1] - eye))
    torch.testing.assert_close(found.h[1], 0.5 * q.h[1])
    for c in (0, 2):  # not one whole factor is left
        torch.testing.assert_close(found.P[c], eye)
        assert not found.h[c].any()


def paper_step(data, kernel, Z, mean, noise, Lambda, eta, part, d):
    """One minibatch of stochastic EP on u itself, as it is printed, loop by loop."""
    N, C, w = len(data.y), data.n_classes, data.weight.numpy()
    K = kernel(Z, Z).numpy()
    K = K + 1e-6 * np.diag(K).mean() * np.eye(len(K))  # the library's jitter, part of the model
    K_inv, Kzx = np.linalg.inv(K), kernel(Z, data.X).numpy()
    ups = K_inv @ Kzx
    prior_v = kernel.diag(data.X).numpy()
    residual = np.maximum(prior_v - np.sum(ups * Kzx, 0), 1e-6 * prior_v) + noise
    y = data.y.numpy()
    n = np.array([w[y != k].sum() + (C - 1) * w[y == k].sum() for k in range(C)])

    def g(L, e):
        return 0.5 * e @ np.linalg.solve(L, e) - 0.5 * np.linalg.slogdet(L)[1]

    cavities = [(K_inv + (1 - 1 / n[k]) * Lambda[k], (1 - 1 / n[k]) * eta[k]) for k in range(C)]
    V = [np.linalg.inv(L) for L, _ in cavities]
    m = [V[k] @ cavities[k][1] for k in range(C)]
    q = [(K_inv + Lambda[k], eta[k]) for k in range(C)]
    difference = [g(*cavities[k]) - g(*q[k]) for k in range(C)]
    evidence = sum(g(*q[k]) - g(K_inv, 0 * eta[k]) for k in range(C))
    new_L, new_e, touched = np.zeros_like(Lambda), np.zeros_like(eta), np.zeros(C)
    for i in range(*part):
        for c in (c for c in range(C) if c != y[i]):
            u, ends = ups[:, i], (y[i], c)
            a = [m[k] @ u for k in ends]
            h = [u @ V[k] @ u for k in ends]
            s = 2 * residual[i] + h[0] + h[1]
            beta = (a[0] + mean[ends[0]] - a[1] - mean[ends[1]]) / math.sqrt(s)
            alpha = math.exp(stats.norm.logpdf(beta) - log_ndtr(beta))
            nu = (alpha**2 + alpha * beta) / s
            scale = w[i] * N / (part[1] - part[0])
            evidence += scale * (log_ndtr(beta) + difference[y[i]] + difference[c])
            for k, j, sign in zip(ends, (0, 1), (1, -1), strict=True):
                C1 = 1 / (1 / nu - h[j])
                C2 = sign * alpha / math.sqrt(s) * (1 + C1 * h[j]) + C1 * a[j]
                new_L[k] += w[i] * C1 * np.outer(u, u)
                new_e[k] += w[i] * C2 * u
                touched[k] += w[i]
    share = (touched / n)[:, None]
    Lambda = (1 - d * share[..., None]) * Lambda + d * new_L
    return Lambda, (1 - d * share) * eta + d * new_e, evidence


@pytest.mark.parametrize(("n_classes", "batch"), [(3, (0, 20)), (2, (0, 20)), (2, (5, 12))])
def test_a_step_is_the_papers(n_classes, batch):
    """Whitened, and with N/B where the paper counts factors: equal for two classes or all rows."""
    data, kernel, noise = blobs(20, n_classes), RBF(1.0, 4.0), 0.7
    weight = torch.linspace(0.5, 2.0, 20).double() if batch == (0, 20) else data.weight
    data = data._replace(weight=weight)
    Z, mean = data.X[:6] + 0.1, torch.linspace(-0.5, 0.4, n_classes).double()
    # A kernel for each class: nothing is centred, which the paper does not do either.
    moving = ep_moving(data, [kernel] * n_classes, config(noise), Z, mean)
    step = AveragedStep(moving, data.mass)
    Lambda, eta = np.zeros((n_classes, 6, 6)), np.zeros((n_classes, 6))
    b = basis([kernel], Z)
    L_inv = b.L_inv[0].numpy()
    d, B = 0.4, batch[1] - batch[0]
    for _ in range(3):
        Lambda, eta, evidence = paper_step(
            data, kernel, Z, mean.numpy(), noise, Lambda, eta, batch, d
        )
        found = take(step, data.rows(*batch), 20 / B, d * B / 20, 0.0)
        assert found == pytest.approx(evidence, rel=1e-9)
        q = moving.state.q
        # u = Lũ: a quadratic form Λ in u is LᵀΛL in ũ.
        np.testing.assert_allclose(
            L_inv.T @ (q.P - torch.eye(6)).numpy() @ L_inv, Lambda, rtol=1e-7, atol=1e-9
        )
        np.testing.assert_allclose(q.h.numpy() @ L_inv, eta, rtol=1e-7, atol=1e-9)


# --- gradients ----------------------------------------------------------------------------------

LEARN = {"learn_kernel": True, "learn_mean": True, "learn_inducing": True}


def gradient_problem(n_kernels: int) -> tuple[Moving, Data, ep.Sites]:
    """A fit in the middle of nowhere: random sites, weights, prior means, inducing points."""
    data = blobs(9, 3)._replace(weight=torch.linspace(0.3, 2.0, 9).double())
    kernels: list[Kernel] = [RBF((0.8, 1.5), 3.0), RBF((1.1, 0.7), 2.0), RBF((1.0, 1.0), 1.0)]
    mean = torch.tensor([-0.4, 0.1, 0.3]).double()
    moving = ep_moving(data, kernels[:n_kernels], config(0.6, **LEARN), data.X[:4] + 0.2, mean)
    g = generator(5)
    r = torch.randn(2, 9, 3, generator=g, dtype=torch.float64)
    t = 0.3 * torch.rand(2, 9, 3, generator=g, dtype=torch.float64)
    return moving, data, ep.Sites(r, t)


def frozen_log_z(state: State, data: Data, cavities, theta, Z, mean, noise) -> float:
    """Σ weight·log Z with the cavities (h, P) of every pair and end held in place."""
    kernels = [state.template.with_theta(t) for t in theta]
    f = features(basis(kernels, Z), data.X)
    total = 0.0
    for (i, c), ends in cavities.items():
        y = int(data.y[i])
        level, s = [], 0.0
        for k, (h, P) in zip((y, c), ends, strict=True):
            A = f.A[k % len(kernels)][:, i]
            level.append(float(A @ torch.linalg.solve(P, h) + mean[k]))
            s += float(A @ torch.linalg.solve(P, A) + f.residual[k % len(kernels), i]) + noise
        total += float(data.weight[i]) * log_ndtr((level[0] - level[1]) / math.sqrt(s))
    return total


@pytest.mark.parametrize("n_kernels", [1, 3])
@pytest.mark.parametrize("averaged", [False, True])
def test_evidence_gradient_by_finite_differences(n_kernels, averaged):
    moving, data, sites = gradient_problem(n_kernels)
    state = moving.state
    theta, Z, mean = (x.detach().clone() for x in (state.theta, state.Z, state.mean))
    _, f = moving.features(data.X, True)
    bare = Features(f.A.detach(), f.residual.detach())
    total = ep.statistics(bare, sites, data.y, data.weight)
    q = Posterior(total.h, torch.eye(4).double() + total.P)
    average = ep.averaged_cavity(q, ep.counts(data.mass))
    cavities = {}
    for i, c in [(i, c) for i in range(9) for c in range(3) if c != data.y[i]]:
        ends = []
        for j, k in enumerate((int(data.y[i]), c)):
            A, w = bare.A[k % n_kernels][:, i], min(float(data.weight[i]), 1.0)
            r, t = w * sites.potential[j, i, c], w * sites.precision[j, i, c]
            rest = (q.h[k] - r * A, q.P[k] - t * torch.outer(A, A))
            ends.append((average.h[k], average.P[k]) if averaged else rest)
        cavities[i, c] = ends
    args = (moments(average if averaged else q), bare, data.y, mean, data.weight, 0.6, True)
    found = ep.evaluate(*args, None if averaged else sites)
    assert found.gradients is not None
    moving.collect(f, found.gradients, 1.0)

    def difference(name: str, index: tuple[int, ...], step: float = 1e-5) -> float:
        values = []
        for sign in (1, -1):
            at = {"theta": theta.clone(), "Z": Z.clone(), "mean": mean.clone()}
            at[name][index] += sign * step
            values.append(frozen_log_z(state, data, cavities, **at, noise=0.6))
        return (values[0] - values[1]) / (2 * step)

    for name, leaf in (("theta", state.theta), ("Z", state.Z), ("mean", state.mean)):
        assert leaf.grad is not None
        gradient = -moving.total * leaf.grad
        for index in np.ndindex(*gradient.shape):
            assert float(gradient[index]) == pytest.approx(difference(name, index), abs=2e-7)
    # The noise adds to every residual.
    given = state, data, cavities, theta, Z, mean
    noisy = [frozen_log_z(*given, 0.6 + e) for e in (1e-5, -1e-5)]
    by_noise = float(found.gradients.features.residual.sum())
    assert by_noise == pytest.approx((noisy[0] - noisy[1]) / 2e-5, abs=2e-7)


def test_gradient_at_the_fixed_point_is_that_of_the_evidence():
    """Sites and cavities need not move along: the evidence is stationary in them."""
    data, Z = blobs(25, 3), blobs(25, 3).X[:6]
    mean = torch.tensor([0.2, -0.3, 0.1]).double()
    theta = RBF((0.9, 1.6), 5.0).theta

    def evidence(theta, mean) -> tuple[float, SiteSweep]:
        kernel = RBF((1.0, 1.0), 1.0).with_theta(theta)
        moving, history = ep_moving(data, kernel, config(tol=1e-12), Z, mean), []
        sweep = SiteSweep(moving, data)
        settle(Loop(moving, data, generator()), sweep, history, 400, None)
        return history[-1], sweep

    _, there = evidence(theta, mean)
    moving = Moving(there.moving.state, data.total, config(**LEARN))
    sweep = SiteSweep(moving, data)
    sweep.restore(there.state())
    sweep(gradients=True)
    for name, leaf in (("theta", moving.leaves.theta), ("mean", moving.leaves.mean)):
        assert leaf.grad is not None
        found = -moving.total * leaf.grad.flatten()
        for i in range(3):
            values = []
            for sign in (1, -1):
                at = {"theta": theta.clone(), "mean": mean.clone()}
                at[name][i] += sign * 1e-3
                values.append(evidence(**at)[0])
            difference = (values[0] - values[1]) / 2e-3
            assert float(found[i]) == pytest.approx(difference, abs=2e-5)


# --- a tiny problem, exactly --------------------------------------------------------------------


def tiny(n_classes: int) -> tuple[Data, RBF, np.ndarray]:
    """Seven points on a line, every class at least twice, one of them on the wrong side."""
    X = torch.tensor([-2.0, -1.3, -0.4, 0.1, 0.8, 1.5, 2.2], dtype=torch.float64).view(-1, 1)
    y = torch.tensor([0, 0, 1, 0, 1, 1, 1] if n_classes == 2 else [0, 0, 1, 2, 1, 2, 2])
    mean = np.array([0.3, -0.2, 0.1])[:n_classes]
    return Data(X, y, torch.ones(7, dtype=torch.float64), n_classes), RBF(1.2, 4.0), mean


def covariance(kernel: RBF, X: Tensor) -> np.ndarray:
    """The prior's, jitter included: it is part of the model."""
    K = kernel(X, X).numpy()
    return K + 1e-6 * np.diag(K).mean() * np.eye(len(K))


def log_likelihood(g: np.ndarray, y: np.ndarray, variance: float) -> np.ndarray:
    """Σ log Φ((g_y − g_c)/√variance) over pairs, for latents g (S, N, C)."""
    own = np.take_along_axis(g, y[None, :, None], 2)
    z = log_ndtr((own - g) / math.sqrt(variance))
    return z.sum((1, 2)) - len(y) * math.log(0.5)  # the label against itself


def elliptical_slice(log_lik, L, mean, n_chains, n_sweeps, rng):
    """Murray, Adams & MacKay (2010), all chains side by side; latents (S, N, C) of every sweep."""
    shape = (n_chains, len(L), len(mean))

    def draw() -> np.ndarray:
        return np.einsum("ij,sjc->sic", L, rng.standard_normal(shape))

    f = draw()
    value = log_lik(f + mean)
    kept = []
    for _ in range(n_sweeps):
        nu = draw()
        floor = value + np.log(rng.random(n_chains))
        angle = rng.uniform(0, 2 * np.pi, n_chains)
        low, high = angle - 2 * np.pi, angle.copy()
        left = np.arange(n_chains)
        while len(left):
            a = angle[left][:, None, None]
            new = f[left] * np.cos(a) + nu[left] * np.sin(a)
            found = log_lik(new + mean)
            good = found > floor[left]
            f[left[good]], value[left[good]] = new[good], found[good]
            left = left[~good]
            below = angle[left] < 0
            low[left[below]], high[left[~below]] = angle[left[below]], angle[left[~below]]
            angle[left] = rng.uniform(low[left], high[left])
        kept.append(f + mean)
    return np.concatenate(kept[n_sweeps // 4 :: 3])


def winner(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """P(f_k is the largest) for f ~ N(m, v): (..., C) -> (..., C), on a grid for each class."""
    t = np.linspace(-8, 8, 161)
    p = np.empty_like(m)
    for k in range(m.shape[-1]):
        f = m[..., [k]] + np.sqrt(v[..., [k]]) * t
        rest = [c for c in range(m.shape[-1]) if c != k]
        z = (f[..., None] - m[..., None, rest]) / np.sqrt(v[..., None, rest])
        p[..., k] = np.sum(stats.norm.pdf(t) * 0.1 * np.prod(ndtr(z), -1), -1)
    return p


# Noise uncouples the classes, and q, which takes them as independent, becomes exact. With little of
# it q is too narrow: what it loses there is stated, too.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_classes", "noise", "dm", "dv", "dp", "d_evidence"),
    [
        (2, 16.0, 0.02, 0.05, 0.01, 0.03),
        (3, 16.0, 0.02, 0.05, 0.01, 0.04),
        (2, 0.5, 0.08, 0.6, 0.06, 0.7),
        (3, 0.5, 0.08, 0.6, 0.06, 0.8),
    ],
)
def test_against_mcmc(n_classes, noise, dm, dv, dp, d_evidence):
    data, kernel, mean = tiny(n_classes)
    K, y, rng = covariance(kernel, data.X), data.y.numpy(), np.random.default_rng(0)
    L = np.linalg.cholesky(K)

    def log_lik(g: np.ndarray) -> np.ndarray:
        return log_likelihood(g, y, 2 * noise)

    g = elliptical_slice(log_lik, L, mean, 1000, 200, rng)
    result = ep_fit(data, kernel, config(noise), mean=torch.tensor(mean))
    assert result.converged
    model = coupled(result.state, Heaviside(noise), "tight")
    m, v = (x.numpy() for x in model.latent(data.X))
    assert np.abs((m - g.mean(0)) / g.std(0)).max() < dm
    assert np.abs(v / g.var(0) - 1).max() < dv
    X = torch.linspace(-3, 3, 13, dtype=torch.float64).view(-1, 1)
    k = kernel(X, data.X).numpy()
    weights = np.linalg.solve(K, k.T)
    rest = kernel.diag(X).numpy() - np.sum(k * weights.T, 1) + noise
    at = np.einsum("nt,snc->stc", weights, g[::17] - mean) + mean
    exact = winner(at, np.broadcast_to(rest[:, None], at.shape)).mean(0)
    m, v = model.latent(X)
    assert np.abs(Heaviside(noise).integral(m, v).numpy() - exact).max() < dp
    np.testing.assert_allclose(
        Heaviside(noise).integral(m, v), winner(m.numpy(), v.numpy() + noise), rtol=0, atol=1e-8
    )
    # The evidence, by draws from the prior. EP's is too low, for the same reason.
    draws = np.einsum("ij,sjc->sic", L, rng.standard_normal((400_000, 7, n_classes))) + mean
    likelihood = np.exp(log_lik(draws))
    error = likelihood.std() / likelihood.mean() / math.sqrt(len(likelihood))
    missing = math.log(likelihood.mean()) - result.elbo
    assert error < 0.02 and -4 * error < missing < d_evidence


@pytest.mark.parametrize("n_classes", [2, 3])
def test_evidence_of_one_row(n_classes):
    """Two classes have one factor, which is matched exactly; three share the label's latent."""
    data = Data(torch.zeros(1, 1).double(), torch.tensor([1]), torch.ones(1).double(), n_classes)
    mean = torch.tensor([0.4, -0.3, 0.2])[:n_classes].double()
    result = ep_fit(data, RBF(1.0, 3.0), config(0.5), mean=mean)
    t = np.linspace(-9, 9, 721)
    own = -0.3 + math.sqrt(3.0) * t
    # Given the label's latent the other classes are independent, each with its own noise twice.
    factor = [ndtr((own - float(mean[c])) / 2.0) for c in range(n_classes) if c != 1]
    exact = math.log(np.sum(stats.norm.pdf(t) * np.prod(factor, 0)) * (t[1] - t[0]))
    assert result.elbo == pytest.approx(exact, abs=2e-5 if n_classes == 2 else 0.01)


# --- fits ---------------------------------------------------------------------------------------


def latent(state: State, data: Data) -> tuple[Tensor, Tensor]:
    """Means less their average over classes, which no factor sees, and variances."""
    m, v, _ = marginals(moments(state.q), features(basis(state.kernels, state.Z), data.X))
    return m - m.mean(1, keepdim=True), v


def stochastic(data: Data, kernel: Kernel, Z: Tensor, n_steps: int, rho: float = 0.5):
    """Stochastic EP with all rows in every batch, and its last evidence."""
    moving, value = ep_moving(data, kernel, config(), Z), math.nan
    step = AveragedStep(moving, data.mass)
    for _ in range(n_steps):
        value = take(step, data, 1.0, rho, 0.0)
    return moving.state, value


@pytest.mark.parametrize(
    ("variance", "dm", "dv", "dp"), [(1.0, 0.06, 0.03, 0.01), (30.0, 0.2, 0.1, 0.09)]
)
def test_stochastic_ep_is_close_to_ep(variance, dm, dv, dp):
    """An average factor stands for each: off by a share of a standard deviation, a little wider."""
    data, kernel = blobs(400, 3), RBF(1.0, variance)
    Z = data.X[:15]
    full = ep_fit(data, kernel, config(), Z)
    averaged, evidence = stochastic(data, kernel, Z, 40)
    (m, v), (m_s, v_s) = latent(full.state, data), latent(averaged, data)
    assert ((m - m_s) / v.sqrt()).abs().max() < dm
    assert (v_s / v - 1).abs().max() < dv
    p, p_s = Heaviside().integral(m, v), Heaviside().integral(m_s, v_s)
    assert (p - p_s).abs().max() < dp and (p - p_s).abs().mean() < 0.1 * dp
    # The average factor leaves some of a row's own in its cavity, so its evidence is flattered.
    assert full.elbo < evidence < full.elbo + 0.05 * abs(full.elbo)


def test_batches_find_what_all_rows_find():
    data, kernel = blobs(600, 3), RBF(1.0, 4.0)
    Z = data.X[:20]
    full, evidence = stochastic(data, kernel, Z, 60)
    result = ep_fit(data, kernel, config(max_epochs=60, batch_size=100, tol=1e-3), Z)
    (m, v), (m_b, v_b) = latent(full, data), latent(result.state, data)
    assert ((m - m_b) / v.sqrt()).square().mean().sqrt() < 0.05
    assert (v_b / v - 1).abs().max() < 0.03
    assert result.elbo == pytest.approx(evidence, rel=0.03)
    assert len(result.history) and all(map(math.isfinite, result.history))


@pytest.mark.parametrize("batch", [20, 50, 1000])
def test_a_batch_of_all_rows_is_the_full_batch(batch):
    data, kernel = blobs(20, 3), RBF(1.0, 4.0)
    full = ep_fit(data, kernel, config(max_epochs=10))
    found = ep_fit(data, kernel, config(max_epochs=10, batch_size=batch))
    assert torch.equal(found.state.q.P, full.state.q.P) and found.history == full.history


def test_statistics_are_sums_over_rows():
    data, kernel = blobs(40, 3), RBF(1.0, 4.0)
    moving = ep_moving(data, kernel, config(), data.X[:6])
    q = moments(ep.averaged_cavity(random_posterior(3, 6), ep.counts(data.mass)))
    _, f = moving.features(data.X, False)
    found = []
    for i, j in ((0, 40), (0, 7), (7, 8), (8, 40)):
        d, part = data.rows(i, j), Features(f.A[..., i:j], f.residual[:, i:j])
        e = ep.evaluate(q, part, d.y, moving.state.mean, d.weight, 1.0, True)
        found.append((e, ep.statistics(part, e.sites, d.y, d.weight)))
    whole, parts = found[0], found[1:]
    joined, total = ep.join([e for e, _ in parts]), svi.add([s for _, s in parts])
    torch.testing.assert_close(tuple(total), tuple(whole[1]), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(joined, whole[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("learn", [False, True])
def test_chunks_change_nothing(learn):
    data, kernel = blobs(40, 3), RBF(1.0, 4.0)
    more = LEARN if learn else {}
    ends = [
        ep_fit(data, kernel, config(max_epochs=15, chunk_size=n, **more), data.X[:8])
        for n in (4096, 7)
    ]
    assert ends[0].elbo == pytest.approx(ends[1].elbo, rel=1e-9)
    torch.testing.assert_close(ends[0].state.theta, ends[1].state.theta, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(ends[0].state.q.P, ends[1].state.q.P, rtol=1e-7, atol=1e-9)


def test_weights_are_copies():
    data, kernel = blobs(30, 3), RBF(1.0, 4.0)
    copies = torch.arange(30) % 3 + 1
    X, y = data.X.repeat_interleave(copies, 0), data.y.repeat_interleave(copies)
    repeated = Data(X, y, torch.ones(len(y)).double(), 3)
    weighted, Z = data._replace(weight=copies.double()), data.X[:8]
    ends = [ep_fit(d, kernel, config(**LEARN), Z) for d in (weighted, repeated)]
    assert ends[0].elbo == pytest.approx(ends[1].elbo, rel=1e-9)
    torch.testing.assert_close(ends[0].state.q.P, ends[1].state.q.P, rtol=1e-7, atol=1e-9)
    (a, x), (b, y_) = (stochastic(d, kernel, Z, 5) for d in (weighted, repeated))
    assert x == pytest.approx(y_, rel=1e-10)
    torch.testing.assert_close(a.q.P, b.q.P, rtol=1e-9, atol=1e-9)


def test_rows_without_weight_say_nothing():
    data, kernel, Z = blobs(30, 3), RBF(1.0, 4.0), blobs(30, 3).X[:8]
    weight = (torch.arange(30) % 3 > 0).double()
    kept = Data(data.X[weight > 0], data.y[weight > 0], weight[weight > 0], 3)
    ends = [ep_fit(d, kernel, config(), Z) for d in (data._replace(weight=weight), kept)]
    assert ends[0].elbo == pytest.approx(ends[1].elbo, rel=1e-9)
    torch.testing.assert_close(ends[0].state.q.h, ends[1].state.q.h, rtol=1e-9, atol=1e-9)


def test_equal_kernels_learn_like_one():
    data, kernel = blobs(90, 3), RBF(1.0, 4.0)
    cfg = config(tol=1e-9, max_epochs=1000)
    ends = [ep_fit(data, k, cfg, data.X[:8]) for k in (kernel, [kernel] * 3)]
    torch.testing.assert_close(
        latent(ends[0].state, data), latent(ends[1].state, data), rtol=1e-4, atol=1e-4
    )
    assert ends[0].elbo == pytest.approx(ends[1].elbo, rel=1e-6)
    starts = [ep_moving(data, k, cfg, data.X[:8]) for k in (kernel, [kernel] * 3)]
    steps = [AveragedStep(t, data.mass) for t in starts]
    values = [take(step, data.rows(0, 30), 3.0, 0.5, 0.0) for step in steps]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    torch.testing.assert_close(*(t.state.q.P for t in starts), rtol=1e-10, atol=1e-10)


def test_the_common_part_of_all_latents_is_let_go():
    """At a fixed point it is zero; without centring it shrinks by a few per cent a sweep."""
    data, kernel = blobs(400, 3), RBF(1.0, 30.0)
    mean = torch.tensor([0.3, 0.0, -0.2]).double()
    result = ep_fit(data, kernel, config(tol=1e-9), data.X[:15], mean)
    assert result.converged and result.epochs < 150
    w = moments(result.state.q).w
    assert w.sum(0).norm() < 1e-3 * w.norm()


def test_centred_sites_are_a_centred_posterior():
    moving, data, sites = gradient_problem(1)
    eye = torch.eye(4).double()
    _, f = moving.features(data.X, False)
    w = torch.tensor([0.5, -1.0, 2.0, 0.1]).double()
    before = ep.statistics(f, sites, data.y, data.weight)
    after = ep.statistics(f, ep.centred(sites, w @ f.A[0]), data.y, data.weight)
    found = ep.centred_posterior(Posterior(before.h, eye + before.P), w)
    torch.testing.assert_close(found, Posterior(after.h, eye + after.P), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch_size", [None, 10])
def test_what_the_model_does_not_see(batch_size):
    """The order of the classes, a shift of all means, and the units of the latents."""
    data, Z = blobs(40, 3), blobs(40, 3).X[:8]
    mean = torch.tensor([0.4, -0.2, 0.1]).double()

    def fit(d: Data, variance: float, noise: float, mean: Tensor) -> Result:
        cfg = config(noise, max_epochs=20, batch_size=batch_size)
        return ep_fit(d, RBF(1.0, variance), cfg, Z, mean)

    base = fit(data, 3.0, 0.7, mean)
    m, _ = latent(base.state, data)
    order = torch.tensor([2, 0, 1])
    permuted = fit(data._replace(y=order[data.y]), 3.0, 0.7, mean[torch.argsort(order)])
    torch.testing.assert_close(latent(permuted.state, data)[0][:, order], m, rtol=1e-8, atol=1e-8)
    shifted = fit(data, 3.0, 0.7, mean + 5.0)
    torch.testing.assert_close(latent(shifted.state, data)[0], m, rtol=1e-8, atol=1e-8)
    scaled = fit(data, 12.0, 2.8, 2 * mean)
    torch.testing.assert_close(latent(scaled.state, data)[0], 2 * m, rtol=1e-8, atol=1e-8)
    for other in (permuted, shifted, scaled):
        assert other.elbo == pytest.approx(base.elbo, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("batch_size", [None, 20])
def test_learning_raises_the_evidence(batch_size, dtype):
    data = blobs(60, 3, gap=3.0)
    data = Data(data.X.to(dtype), data.y, data.weight.to(dtype), 3)
    kernel, Z = RBF((0.3, 3.0), 0.3), data.X[::6].clone()
    cfg = config(max_epochs=60, tol=1e-3, batch_size=batch_size, learning_rate=0.1)
    rest = ep_fit(data, kernel, cfg, Z)
    learned = ep_fit(data, kernel, replace(cfg, **LEARN), Z)
    assert learned.elbo > rest.elbo + 5.0
    s = learned.state
    for leaf in (s.theta, s.Z, s.mean):
        assert not leaf.requires_grad and leaf.dtype == dtype
    assert not torch.equal(s.Z, Z) and s.mean.abs().min() > 0
    assert (s.theta - rest.state.theta).abs().min() > 0.01
    # The reported evidence is that of the state.
    full = ep_fit(data, list(s.kernels), config(tol=1e-3), s.Z, s.mean)
    assert learned.elbo == pytest.approx(full.elbo, abs=0.01 if batch_size is None else 6.0)


def test_float32_is_float64():
    data, kernel = blobs(60, 3), RBF(1.0, 30.0)
    wide = ep_fit(data, kernel, config(max_epochs=30), data.X[:12])
    single = Data(data.X.float(), data.y, data.weight.float(), 3)
    cfg = config(max_epochs=30, jitter=1e-6)
    narrow = ep_fit(single, kernel, cfg, single.X[:12])
    assert narrow.elbo == pytest.approx(wide.elbo, abs=0.05)
    torch.testing.assert_close(narrow.state.q.h.double(), wide.state.q.h, rtol=0, atol=0.02)


def test_what_is_not_learned_stays():
    data, kernel = blobs(30, 3), RBF(1.0, 2.0)
    for name in LEARN:
        on = {**dict.fromkeys(LEARN, False), name: True}
        s = start(data, kernel, data.X[:5])
        before = [s.theta.clone(), s.mean.clone(), s.Z.clone()]
        end = train(s, data, config(max_epochs=20, **on), generator()).state
        moved = [
            not torch.equal(a, b) for a, b in zip(before, (end.theta, end.mean, end.Z), strict=True)
        ]
        assert moved == list(on.values())


@pytest.mark.parametrize("batch_size", [None, 20])
def test_the_same_generator_gives_the_same_bits(batch_size):
    data, kernel = blobs(70, 3), RBF(1.0, 4.0)
    cfg = config(batch_size=batch_size, max_epochs=20, **LEARN)
    ends = [ep_fit(data, kernel, cfg, data.X[:8]) for _ in range(2)]
    assert ends[0].history == ends[1].history
    assert torch.equal(ends[0].state.q.P, ends[1].state.q.P)


def test_converged_says_whether_it_is():
    data, kernel = blobs(60, 3), RBF(1.0, 30.0)
    assert not ep_fit(data, kernel, config(max_epochs=3)).converged
    result = ep_fit(data, kernel, config(max_epochs=300, tol=1e-3))
    assert result.converged and result.epochs < 60
    assert not ep_fit(data, kernel, config(max_epochs=2, batch_size=20)).converged
    long = config(max_epochs=600, batch_size=20, tol=1e-2)
    assert ep_fit(data, kernel, long, data.X[:6]).converged


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_streams_keep_what_they_hold(dtype):
    data, kernel = blobs(200, 3), RBF(1.0, 4.0)
    data = Data(data.X.to(dtype), data.y, data.weight.to(dtype), 3)
    Z = data.X[:15]
    whole = ep_fit(data, kernel, config(), Z)
    state, evidence = start(data, kernel, Z), math.nan
    for i in range(0, 200, 50):
        part, share = data.rows(i, i + 50), 50 / (i + 50)
        state, evidence = absorb(state, part, config(), generator(), share=share, n_steps=15)
    # Sites of earlier rows are not matched again, which costs a little.
    (m, v), (m_s, v_s) = latent(whole.state, data), latent(state, data)
    p, p_s = (Heaviside().integral(*x) for x in ((m, v), (m_s, v_s)))
    assert ((m - m_s) / v.sqrt()).square().mean().sqrt() < 0.15
    assert (p - p_s).abs().max() < 0.1 and (p - p_s).abs().mean() < 0.02
    assert evidence == pytest.approx(whole.elbo, rel=0.02)
    once = absorb(start(data, kernel, Z), data, config(), generator(), share=1.0, n_steps=60)
    assert once[1] == pytest.approx(whole.elbo, abs=0.3)


def test_progress_and_the_wrong_likelihood():
    data, kernel = blobs(30, 3), RBF(1.0, 4.0)
    seen: list[Progress] = []
    state = initial_state([kernel], data.X[:5], torch.zeros(3).double())
    cfg = config(max_epochs=5)
    result = train(state, data, cfg, generator(), on_progress=seen.append, stage="here")
    assert [p.value for p in seen] == result.history
    assert {(p.stage, p.measure) for p in seen} == {("here", "log evidence")}
    with pytest.raises(ValueError, match="Heaviside"):
        train(state, data, replace(cfg, likelihood=LogisticSoftmax()), generator())


def stress() -> dict[str, Data]:
    separable, overlapping = blobs(90, 3, gap=12.0), blobs(90, 3, gap=0.7)
    rare = blobs(90, 3, gap=3.0)
    rare = rare._replace(y=torch.where(torch.arange(90) < 2, 2, rare.y % 2))
    noisy = blobs(90, 3, gap=6.0)
    wrong = torch.arange(90) % 5 == 0
    noisy = noisy._replace(y=torch.where(wrong, (noisy.y + 1) % 3, noisy.y))
    twice = overlapping._replace(X=overlapping.X[torch.arange(90) // 3 * 3])
    many = random_labels(90, 12)
    return {
        "separable": separable,
        "overlapping": overlapping,
        "a class with two rows": rare,
        "a fifth of labels wrong": noisy,
        "equal rows, different labels": twice,
        "random labels of twelve": many,
    }


@pytest.mark.parametrize("name", stress())
@pytest.mark.parametrize("batch_size", [None, 15])
@pytest.mark.parametrize(
    ("variance", "dtype", "learn"),
    [
        (0.1, torch.float64, False),
        (10.0, torch.float32, True),
        (1e5, torch.float64, True),
        (1e5, torch.float32, False),
    ],
)
def test_stress(name, batch_size, variance, dtype, learn):
    data = stress()[name]
    data = Data(data.X.to(dtype), data.y, data.weight.to(dtype), data.n_classes)
    more = LEARN if learn else {}
    cfg = config(batch_size=batch_size, max_epochs=15, tol=1e-3, learning_rate=0.1, **more)
    result = ep_fit(data, RBF(1.0, variance), cfg, data.X[:15])
    m, v = coupled(result.state, cfg.likelihood, cfg.bound).latent(data.X)
    assert math.isfinite(result.elbo)
    assert torch.isfinite(m).all() and torch.isfinite(v).all() and (v > 0).all()
    # Better than the prior, or no worse where there is nothing to learn.
    p = Heaviside().integral(m, v).gather(1, data.y.unsqueeze(1))
    assert -p.log().mean() < math.log(data.n_classes) + 0.05


@settings(max_examples=40)
@given(
    data=odd_data(),
    log_variance=st.floats(-4, 12),
    log_noise=st.floats(-5, 5),
    learn=st.booleans(),
    wide=st.booleans(),
    batches=st.booleans(),
)
def test_any_small_data_set_gives_finite_results(
    data, log_variance, log_noise, learn, wide, batches
):
    dtype = torch.float64 if wide else torch.float32
    data = Data(data.X.to(dtype), data.y, data.weight.to(dtype), data.n_classes)
    cfg = config(
        math.exp(log_noise),
        max_epochs=20,
        batch_size=max(1, len(data.y) // 2) if batches else None,
        **(LEARN if learn else {}),
    )
    result = ep_fit(data, RBF(1.0, math.exp(log_variance)), cfg)
    m, v = latent(result.state, data)
    assert torch.isfinite(m).all() and torch.isfinite(v).all() and (v > 0).all()
    assert math.isfinite(result.elbo)


# --- the classifier -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(
    [GPClassifier(likelihood="heaviside", inference="ep", n_inducing=15, max_epochs=15, tol=0.1)]
)
def test_estimator(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("batch_size", ["auto", 32])
def test_classifier_on_wine(batch_size):
    X, y = load_wine(return_X_y=True)
    X, y = (
        X[np.random.default_rng(0).permutation(178)],
        y[np.random.default_rng(0).permutation(178)],
    )
    clf = GPClassifier(
        likelihood="heaviside", inference="ep", batch_size=batch_size, max_epochs=40, tol=0.02
    )
    clf.set_params(temperature=None, random_state=0).fit(X[:110], y[:110])
    p = clf.predict_proba(X[110:])
    np.testing.assert_allclose(p.sum(1), 1.0, rtol=1e-12)
    assert np.mean(clf.predict(X[110:]) != y[110:]) < 0.05
    assert -np.log(p[np.arange(68), y[110:]]).mean() < 0.2
    assert {h["measure"] for h in clf.history_} == {"log evidence"}


# Where kernels have many parameters for few rows only folds that learn them again are honest.
@pytest.mark.parametrize(("n", "n_classes", "n_features", "seed"), [(60, 2, 8, 2), (60, 2, 8, 3)])
def test_labels_that_are_noise_are_no_worse_than_frequencies(n, n_classes, n_features, seed):
    rng = np.random.default_rng(seed)
    X, y = rng.standard_normal((n + 1000, n_features)), rng.integers(n_classes, size=n + 1000)
    clf = GPClassifier(likelihood="heaviside", inference="ep", random_state=0).fit(X[:n], y[:n])
    mass = np.bincount(y[:n], minlength=n_classes) + 1
    base = -np.log(mass / mass.sum())[y[n:]].mean()
    p = clf.predict_proba(X[n:])
    assert -np.log(p[np.arange(1000), y[n:]]).mean() <= allowed(base)
