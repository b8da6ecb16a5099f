"""One page of inference against slow formulas: statistics, CAVI, the ELBO and its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conjugp._gp.features import basis, features
from conjugp._gp.posterior import Posterior, class_kl, initial_state, kl, marginals, moments, prior
from conjugp._inference import steps, svi
from conjugp._inference.moving import Moving
from conjugp._inference.settings import Settings
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF, Matern12, Matern52
from problems import (
    BOUNDS,
    LIKELIHOOD,
    blobs,
    elbo,
    fitted,
    fixed,
    numpy_site,
    random_labels,
    random_posterior,
    start,
    sweep_of,
    take,
)

AUGMENTED = ("augmented", "collapsed")


def evaluated(data: Data, kernels, Z, bound="collapsed", q=None, mean=None):
    """Statistics of all of `data` at some posterior."""
    q = random_posterior(data.n_classes, len(Z)) if q is None else q
    mean = torch.linspace(-1, 0.5, data.n_classes).double() if mean is None else mean
    f = features(basis(kernels, Z), data.X)
    s, _ = svi.evaluate(moments(q), LIKELIHOOD, bound, f, data.y, mean, data.weight, False)
    return s


def assert_equal(a: svi.Statistics, b: svi.Statistics, rtol: float = 1e-11) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-11)


# --- statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("kernels", [[RBF(1.0, 4.0)], [RBF(1.0, 4.0), Matern52(2.0), RBF(0.5)]])
def test_statistics_point_by_point(bound, kernels):
    kernels = [k.filled(torch.ones(1).double(), 1.0) for k in kernels]
    data = blobs(13, 3)._replace(weight=torch.linspace(0.2, 3, 13).double())
    Z = data.X[:5] + 0.1
    mean = torch.tensor([-1.0, 0.3, 0.5]).double()
    q = random_posterior(3, 5)
    f = features(basis(kernels, Z), data.X)
    m, v, _ = marginals(moments(q), f)
    site = LIKELIHOOD.site(data.y, m + mean, v, bound)
    h, P = torch.zeros_like(q.h), torch.zeros_like(q.P)
    for i in range(13):
        for c in range(3):
            a, w = f.A[c % len(kernels)][:, i], data.weight[i]
            theta = max(float(site.precision[i, c]), svi.MIN_PRECISION)
            slope = site.potential[i, c] - site.precision[i, c] * (m + mean)[i, c]
            h[c] += w * a * (slope + theta * (m + mean)[i, c] - theta * mean[c])
            P[c] += w * theta * torch.outer(a, a)
    expected = svi.Statistics(h, P, data.weight @ site.bound)
    assert_equal(evaluated(data, kernels, Z, bound, q, mean), expected)


@pytest.mark.parametrize("bound", BOUNDS)
def test_statistics_are_sums_over_rows(bound):
    data, kernel = blobs(40, 3), RBF(1.0, 4.0)
    Z = data.X[:6]
    parts = [data.rows(0, 7), data.rows(7, 8), data.rows(8, 40)]
    whole = evaluated(data, [kernel], Z, bound)
    assert_equal(svi.add([evaluated(p, [kernel], Z, bound) for p in parts]), whole)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_weight_is_a_number_of_copies(bound):
    data, kernel = blobs(12, 3), RBF(1.0, 4.0)
    Z = data.X[:6]
    copies = torch.tensor([0, 1, 2, 3] * 3)
    weighted = evaluated(data._replace(weight=copies.double()), [kernel], Z, bound)
    X, y = data.X.repeat_interleave(copies, 0), data.y.repeat_interleave(copies)
    repeated = evaluated(Data(X, y, torch.ones(len(y)).double(), 3), [kernel], Z, bound)
    assert_equal(weighted, repeated)


@pytest.mark.parametrize("bound", BOUNDS)
def test_equal_kernels_are_one_shared_kernel(bound):
    data, kernel = blobs(20, 3), RBF((0.8, 1.5), 4.0)
    Z = data.X[:6]
    shared = evaluated(data, [kernel], Z, bound)
    assert_equal(evaluated(data, [kernel] * 3, Z, bound), shared)


def test_clamped_sites_keep_their_gradient():
    m = torch.linspace(-3, 3, 10).double().reshape(5, 2)
    site = svi.Site(m.sin(), m.cos() - 0.5, m.sum(1))
    found = svi.clamp(site, m)
    assert (found.precision >= svi.MIN_PRECISION).all() and (site.precision < 0).any()
    torch.testing.assert_close(
        found.potential - found.precision * m, site.potential - site.precision * m
    )
    kept = site.precision > 0
    assert torch.equal(found.precision[kept], site.precision[kept])


def test_update_is_a_step_in_natural_parameters():
    q, s = random_posterior(3, 4, seed=1), random_posterior(3, 4, seed=2)
    stats = svi.Statistics(s.h, s.P, torch.zeros(()))
    eye = torch.eye(4).double()
    for rho in (0.0, 0.3, 1.0):
        new = svi.update(q, stats, 2.5, rho)
        torch.testing.assert_close(new.h, (1 - rho) * q.h + rho * 2.5 * s.h)
        torch.testing.assert_close(new.P, (1 - rho) * q.P + rho * (eye + 2.5 * s.P))


# --- CAVI ---------------------------------------------------------------------------------------


def sparse_cavi(bound, data: Data, kernel, Z, mean, sweeps):
    """CAVI in NumPy on u itself, not whitened: m and v at the data, and the ELBO's KL."""
    K = kernel(Z, Z).numpy()
    K = K + 1e-6 * np.diag(K).mean() * np.eye(len(K))  # the library's jitter, part of the model
    Kxz, prior_v = kernel(data.X, Z).numpy(), kernel.diag(data.X).numpy()
    kappa = np.linalg.solve(K, Kxz.T).T
    residual = np.maximum(prior_v - np.sum(kappa * Kxz, 1), 1e-6 * prior_v)
    Y, w = np.eye(data.n_classes)[data.y.numpy()], data.weight.numpy()
    m = np.tile(mean, (len(Y), 1))
    v = np.tile((residual + np.sum((kappa @ K) * kappa, 1))[:, None], (1, data.n_classes))
    for _ in range(sweeps):
        gamma, theta = numpy_site(bound, Y, m, v)
        for c in range(data.n_classes):
            Sigma = np.linalg.inv(np.linalg.inv(K) + (kappa.T * (w * theta[:, c])) @ kappa)
            r = w * (0.5 * (Y - gamma)[:, c] - theta[:, c] * mean[c])
            m[:, c] = kappa @ Sigma @ kappa.T @ r + mean[c]
            v[:, c] = residual + np.sum((kappa @ Sigma) * kappa, 1)
    return m, v


def full_cavi(bound, data: Data, kernel, sweeps):
    """CAVI in NumPy for the full GP: Σ = (K⁻¹ + diag θ)⁻¹, μ = ½ Σ (y − γ), no inducing points."""
    K_inv = np.linalg.inv(kernel(data.X, data.X).numpy())
    Y = np.eye(data.n_classes)[data.y.numpy()]
    m, v = np.zeros(Y.shape), np.tile(kernel.diag(data.X).numpy()[:, None], (1, data.n_classes))
    for _ in range(sweeps):
        gamma, theta = numpy_site(bound, Y, m, v)
        for c in range(data.n_classes):
            Sigma = np.linalg.inv(K_inv + np.diag(theta[:, c]))
            m[:, c], v[:, c] = 0.5 * Sigma @ (Y - gamma)[:, c], np.diag(Sigma)
    return m, v


def latent(state, data: Data):
    m, v, _ = marginals(moments(state.q), features(basis(state.kernels, state.Z), data.X))
    return (m + state.mean).numpy(), v.numpy()


@pytest.mark.parametrize("bound", AUGMENTED)
@pytest.mark.parametrize("sweeps", [2, 3, 40])
def test_full_batches_are_cavi(bound, sweeps):
    data = blobs(25, 3)._replace(weight=torch.linspace(0.3, 2.0, 25).double())
    kernel, Z, mean = RBF(1.2, 3.0), data.X[::3] + 0.1, torch.tensor([-1.0, 0.2, 0.5]).double()
    result = fitted(data, kernel, fixed(bound, max_epochs=sweeps), Z, mean)
    assert result.epochs == sweeps + 1  # the first entry is the prior's
    expected = sparse_cavi(bound, data, kernel, Z, mean.numpy(), sweeps)
    for found, wanted in zip(latent(result.state, data), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("bound", AUGMENTED)
def test_one_stochastic_step_with_all_rows_is_one_sweep(bound):
    data, kernel = blobs(25, 3), RBF(1.2, 3.0)
    Z, mean = data.X[::3] + 0.1, torch.tensor([-1.0, 0.2, 0.5]).double()
    state = start(data, kernel, Z, mean)
    step = steps.ReadableStep(Moving(state, data.total, fixed(bound)), data.group)
    for _ in range(4):
        take(step, data, 1.0, 1.0, 0.0)
    expected = sparse_cavi(bound, data, kernel, Z, mean.numpy(), 4)
    for found, wanted in zip(latent(state, data), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("bound", AUGMENTED)
def test_every_row_an_inducing_point_is_the_full_gp(bound):
    """Equal but for the jitter, 1e-6 of the kernel's diagonal: v gains about that much."""
    data, kernel = blobs(30, 3), Matern12(1.5, 2.0)
    result = fitted(data, kernel, fixed(bound, max_epochs=30))
    m, v = latent(result.state, data)
    expected_m, expected_v = full_cavi(bound, data, kernel, 30)
    np.testing.assert_allclose(m, expected_m, rtol=0, atol=1e-5)
    np.testing.assert_allclose(v, expected_v, rtol=0, atol=1e-5)


PROBLEMS = {
    "separable": blobs(60, 3, gap=8.0),
    "overlapping": blobs(60, 3),
    "random labels": random_labels(60, 4),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("variance", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("bound", AUGMENTED)
def test_the_elbo_rises_at_every_sweep(problem, variance, bound):
    data, kernel = PROBLEMS[problem], RBF(1.0, variance)
    f = features(basis([kernel], data.X), data.X)
    mean = torch.zeros(data.n_classes).double()
    q, values = prior(data.n_classes, len(data.X), data.X), []
    for _ in range(30):
        solved = moments(q)
        s, _ = svi.evaluate(solved, LIKELIHOOD, bound, f, data.y, mean, data.weight, False)
        values.append(float(s.bound - kl(solved)))
        q = svi.update(q, s, 1.0, 1.0)
    gains = np.diff(values)
    assert (gains >= -1e-10 * np.abs(values[1:])).all(), gains.min()
    assert gains[0] > 1.0


# --- the ELBO and the evidence -----------------------------------------------------------------


def log_evidence(data: Data, kernel, mean, n_nodes: int) -> float:
    """log p(y₁, y₂) by Gauss–Hermite quadrature over all 2C latents of the prior."""
    C = data.n_classes
    z, w = np.polynomial.hermite_e.hermegauss(n_nodes)
    w = w / w.sum()
    L = np.linalg.cholesky(kernel(data.X, data.X).numpy())

    def along(x, axis):
        return x.reshape([-1 if i == axis else 1 for i in range(2 * C)])

    total = np.ones([1] * (2 * C))
    s = [[], []]
    for c in range(C):
        z1, z2 = along(z, c), along(z, C + c)
        total = total * along(w, c) * along(w, C + c)
        s[0].append(1 / (1 + np.exp(-(mean[c] + L[0, 0] * z1))))
        s[1].append(1 / (1 + np.exp(-(mean[c] + L[1, 0] * z1 + L[1, 1] * z2))))
    for i in range(2):
        total = total * (s[i][int(data.y[i])] / sum(s[i]))
    return float(np.log(total.sum()))


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("labels", [(0, 0), (0, 1)])
@pytest.mark.parametrize("variance", [0.02, 0.5, 3.0])
def test_elbos_are_ordered_below_the_evidence(n_classes, labels, variance):
    X = torch.tensor([[0.0], [0.7]]).double()
    data = Data(X, torch.tensor(labels), torch.ones(2).double(), n_classes)
    kernel, mean = RBF(1.0, variance), torch.tensor([0.5, -0.4, -1.0][:n_classes]).double()
    nodes = {2: 40, 3: 14}[n_classes]
    evidence = log_evidence(data, kernel, mean.numpy(), nodes)
    assert abs(evidence - log_evidence(data, kernel, mean.numpy(), nodes - 2)) < 3e-5
    found = {}
    for bound in BOUNDS:
        settings = fixed(bound, max_epochs=500, tol=1e-7)
        fit = fitted(data, kernel, settings, mean=mean)
        found[bound] = fit.elbo
        assert fitted(data, kernel, settings, X[:1] + 0.3, mean).elbo < fit.elbo
    assert found["augmented"] < found["collapsed"] < found["tight"] < evidence - 1e-4
    # Jensen's gap is of the order of the variance; a constant forgotten would not be.
    assert evidence - found["tight"] < 0.12 * variance


@pytest.mark.parametrize("kept", [0.05, 0.4, 1.0])
def test_what_rows_keep_costs_a_constant(kept):
    """q(f, ũ) as one dense Gaussian: its marginals, and its divergence from the prior (Q9)."""
    data, kernel = blobs(6, 2), RBF(1.2, 3.0)
    Z, q = data.X[:3] + 0.4, random_posterior(2, 3)
    b = basis([kernel], Z, jitter=0.0, kept=kept)
    f = features(b, data.X)
    m, v, _ = marginals(moments(q), f)
    A = f.A[0].T
    open_ = kernel(data.X, data.X) - A @ A.T
    for c in range(2):
        S = torch.linalg.inv(q.P[c])
        mean = torch.cat([S @ q.h[c], A @ S @ q.h[c]])
        joint, p = (
            torch.cat([torch.cat([s, s @ A.T], 1), torch.cat([A @ s, A @ s @ A.T + k], 1)])
            for s, k in ((S, kept * open_), (torch.eye(3).double(), open_))
        )
        torch.testing.assert_close(mean[3:], m[:, c])
        torch.testing.assert_close(joint.diagonal()[3:], v[:, c])
        trace = torch.linalg.solve(p, joint).trace() + mean @ torch.linalg.solve(p, mean)
        dense = 0.5 * (trace - 9 + p.logdet() - joint.logdet())
        constant = 0.5 * 6 * (kept - 1 - np.log(kept))
        assert float(class_kl(moments(q))[c]) + constant == pytest.approx(float(dense), rel=1e-9)


@pytest.mark.parametrize("bound", BOUNDS)
def test_fits_that_keep_less_have_a_bound_too(bound):
    """Less the constant, below the evidence; without it they may be above."""
    X = torch.tensor([[0.0], [0.7]]).double()
    data = Data(X, torch.tensor([0, 1]), torch.ones(2).double(), 2)
    kernel, mean = RBF(0.3, 3.0), torch.tensor([0.5, -0.4]).double()
    evidence = log_evidence(data, kernel, mean.numpy(), 40)
    elbos = []
    for kept in (1.0, 0.7, 0.3, 0.05):
        settings = fixed(bound, max_epochs=500, tol=1e-7, kept=kept)
        value = fitted(data, kernel, settings, X[:1] + 0.2, mean).elbo
        elbos.append(value)
        assert value - 0.5 * 2 * 2 * (kept - 1 - np.log(kept)) < evidence - 1e-3
    assert elbos == sorted(elbos)


# --- hyperparameter gradients -------------------------------------------------------------------


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("per_class", [False, True])
def test_hyperparameter_gradients(bound, per_class):
    """What Adam is given against central differences of the ELBO, q held: every coordinate."""
    data = blobs(15, 3)._replace(weight=torch.linspace(0.2, 3, 15).double())
    kernels = [RBF((0.9, 1.4), 3.0), RBF((1.1, 0.8), 0.5), RBF((2.0, 1.0), 10.0)]
    kernels = kernels if per_class else kernels[:1]
    mean = torch.tensor([-1.0, 0.2, 0.5]).double()
    state = initial_state(kernels, data.X[:6] + 0.2, mean)
    state.q = random_posterior(3, 6)
    settings = Settings(LIKELIHOOD, bound, learn_inducing=True, chunk_size=4)
    sweep = sweep_of(state, data, settings)
    stats, leaves = sweep(moments(state.q), True), sweep.moving.leaves
    found = [-data.total * leaf.grad.clone() for leaf in leaves]
    base = elbo(state, data, bound)
    assert float(stats.bound) - float(kl(moments(state.q))) == pytest.approx(base, rel=1e-12)
    step = 1e-4
    with torch.no_grad():
        for leaf, gradient in zip(leaves, found, strict=True):
            numeric = torch.zeros_like(leaf)
            for i in range(leaf.numel()):
                x = leaf.view(-1)
                at, old = {}, float(x[i])
                for k in (-2, -1, 1, 2):
                    x[i] = old + k * step
                    at[k] = elbo(state, data, bound)
                x[i] = old
                numeric.view(-1)[i] = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
            torch.testing.assert_close(gradient, numeric, rtol=1e-6, atol=1e-7)
            assert numeric.abs().min() > 1e-4  # every coordinate matters here


@pytest.mark.parametrize("bound", BOUNDS)
def test_batch_gradients_add_up_to_the_full_ones(bound):
    data = blobs(12, 3)
    sums = []
    for size, scale in ((12, 1.0), (5, 1.0), (5, 2.5)):
        state = initial_state([RBF(1.0, 3.0)], data.X[:4] + 0.2, torch.zeros(3).double())
        moving = Moving(state, data.total, Settings(LIKELIHOOD, bound, learn_inducing=True))
        for i in range(0, 12, size):
            part = data.rows(i, i + size)
            steps.evaluated(moving, part, moments(random_posterior(3, 4)), scale, True)
        sums.append([leaf.grad for leaf in moving.leaves])
    for whole, parts, scaled in zip(*sums, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(2.5 * whole, scaled, rtol=1e-11, atol=1e-13)


def test_gradients_where_a_site_is_extremely_precise():
    """∂bound/∂m must not come from potential − precision·m, which cancels here."""
    data = Data(torch.zeros(1, 1).double(), torch.tensor([0]), torch.ones(1).double(), 2)
    f = features(basis([RBF(1.0, 1e-18)], data.X), data.X)
    mean = torch.tensor([-30.0, -31.0]).double()
    q = moments(Posterior(torch.zeros(2, 1).double(), torch.ones(2, 1, 1).double()))
    _, g = svi.evaluate(q, LIKELIHOOD, "collapsed", f, data.y, mean, data.weight, True)
    p = 1 / (1 + np.exp(-1.0))  # far below zero the model is the softmax
    assert g is not None
    np.testing.assert_allclose(g.mean.numpy(), [1 - p, p - 1], rtol=1e-6)
