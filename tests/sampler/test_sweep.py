"""The Gibbs sweep against brute force: each conditional, the posterior, and Geweke's test."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.linalg import solve_triangular
from scipy.special import expit, gammaln

from conjugp._sampler.sweep import (
    AUGMENTATIONS,
    Chain,
    ClassFields,
    Field,
    FullField,
    Observations,
    SparseField,
    draw_counts,
    draw_lambda,
    draw_lambda_given_counts,
    draw_omega,
    log_likelihood,
    start,
    sweep,
)
from conjugp.likelihoods import LogisticSoftmax
from montecarlo import affine, latent_functions, z_scores

COPIES = 40
X = np.array([0.0, 0.6, 1.5])
Z = np.array([0.2, 1.3])


def covariance(a: np.ndarray, b: np.ndarray, length: float, variance: float) -> np.ndarray:
    return variance * np.exp(-np.abs(a[:, None] - b[None]) / length)


def sparse_parts(x: np.ndarray, length: float, variance: float) -> tuple[np.ndarray, np.ndarray]:
    """A and the residual variance by inducing points Z."""
    L = np.linalg.cholesky(covariance(Z, Z, length, variance))
    A = solve_triangular(L, covariance(Z, x, length, variance), lower=True)
    return A, variance - np.square(A).sum(0)


@dataclass
class Case:
    """A small problem, and many independent copies of it as one block-diagonal prior."""

    prior: Field
    cov: np.ndarray  # (C, n, n) of one copy
    mean: np.ndarray
    index: np.ndarray  # (N,) input of every row of one copy
    copies: int = COPIES

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.mean), self.copies, self.cov.shape[1]

    def observations(self, y: np.ndarray) -> Observations:
        """y (copies, N)."""
        n = self.cov.shape[1]
        index = (np.arange(self.copies)[:, None] * n + self.index).ravel()
        plain = np.array_equal(index, np.arange(len(index)))
        return Observations(y.ravel(), len(self.mean), None if plain else index)

    def latents(self, rng: np.random.Generator, copies: int) -> np.ndarray:
        """From the prior, by its dense covariance, (C, copies, n)."""
        C, _, n = self.shape
        root = np.linalg.cholesky(self.cov)
        noise = rng.standard_normal((C, copies, n))
        return self.mean[:, None, None] + np.einsum("cij,cbj->cbi", root, noise)

    def labels(self, f: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """From their likelihood, (C, copies, n) -> (copies, N)."""
        s = expit(f[:, :, self.index])
        below = (s.cumsum(0) / s.sum(0))[:-1]
        return (rng.random(s.shape[1:]) > below).sum(0)


def case(
    kind: str, n_classes: int, inputs: np.ndarray, index: list[int], variance: float = 2.0
) -> Case:
    """`kind` of prior, with means that are not zero."""
    eye = np.eye(COPIES)
    mean = np.linspace(0.4, -0.8, n_classes)

    def full(length: float, scale: float) -> tuple[FullField, np.ndarray]:
        K = covariance(inputs, inputs, length, scale * variance)
        return FullField(np.kron(eye, K), np.kron(eye, np.linalg.cholesky(K))), K

    if kind == "sparse":
        A, residual = sparse_parts(inputs, 1.0, variance)
        field: Field = SparseField(np.kron(eye, A), np.tile(residual, COPIES))
        covs = [A.T @ A + np.diag(residual)] * n_classes
    elif kind == "classes":
        fields, covs = zip(*(full(0.7 + 0.4 * c, 0.5 + c) for c in range(n_classes)), strict=True)
        field = ClassFields(fields)
    else:
        field, K = full(1.0, 1.0)
        covs = [K] * n_classes
    return Case(field, np.array(covs), mean, np.array(index))


# --- the conditionals ---------------------------------------------------------------------------

SHAPES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 30, 60]
TILTS = [0.0, 1e-3, 0.7, -1.5, 2.0, 4.0, -12.0, 50.0]


def polya_gamma_moments(b: np.ndarray, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of PG(b, z), written so that nothing overflows or cancels."""
    z = np.abs(z)
    near, e = z < 0.02, np.exp(-z)
    far = np.where(near, 1.0, z)
    mean = np.where(near, 0.25 - z**2 / 48, np.tanh(far / 2) / (2 * far))
    # (sinh z - z) / cosh²(z/2) = 2 (1 - e^{-2z} - 2z e^{-z}) / (1 + e^{-z})²
    tail = (1 - e**2 - 2 * z * e) / (2 * far**3 * (1 + e) ** 2)
    return b * mean, b * np.where(near, 1 / 24 - z**2 / 120, tail)


def test_polya_gamma_moments_by_definition():
    z, b = np.array([0.0, 0.0199, 0.0201, 0.1, 1.0, 5.0, 50.0, 800.0]), np.array(3.0)
    k = np.arange(1, 400_001)[:, None] - 0.5
    d = 2 * np.pi**2 * (k**2 + (z / (2 * np.pi)) ** 2)  # PG is a sum of Gamma(b, 1) / d_k
    mean, variance = polya_gamma_moments(b, z)
    tail = b / (2 * np.pi**2 * 400_000)  # what the sum leaves out, as good as an integral
    np.testing.assert_allclose((b / d).sum(0) + tail, mean, rtol=2e-6)
    np.testing.assert_allclose((b / d**2).sum(0), variance, rtol=2e-6)


def test_polya_gamma_draws():
    n = 10_000
    b, z = (x.ravel() for x in np.meshgrid(np.array(SHAPES, dtype=float), np.array(TILTS)))
    draws = draw_omega(np.tile(b, (n, 1)), np.tile(z, (n, 1)), np.random.default_rng(3))
    mean, variance = polya_gamma_moments(b, z)
    assert np.abs(z_scores(draws, mean)).max() < 4.5
    assert np.abs(z_scores((draws - mean) ** 2, variance)).max() < 4.5


@pytest.mark.parametrize(("b", "z"), [(2, 0.0), (5, 1.0), (8, 3.0), (40, 0.5)])
def test_polya_gamma_is_a_sum(b, z):
    n, rng = 20_000, np.random.default_rng(b)
    parts = draw_omega(np.ones((n, b)), np.full((n, b), z), rng).sum(1)
    whole = draw_omega(np.full((n, 1), float(b)), np.full((n, 1), z), rng)[:, 0]
    assert stats.ks_2samp(parts, whole).pvalue > 1e-3


def test_no_count_no_precision():
    shape = np.array([[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    f = np.array([[0.0, 50.0, -50.0], [-800.0, 1e-9, 3.0]])
    for layout in "CF":  # results must land where they belong, however the memory lies
        omega = draw_omega(shape.copy(layout), f.copy(layout), np.random.default_rng(0))
        assert np.array_equal(omega > 0, shape > 0) and np.isfinite(omega).all()


def test_counts_are_negative_multinomial():
    # (A4): the law of the counts given f, with λ integrated out.
    f, n_rows, rng = np.array([0.5, -1.0]), 200_000, np.random.default_rng(0)
    columns = np.repeat(expit(f)[:, None], n_rows, 1)
    n = draw_counts(draw_lambda(columns, rng), columns, rng)
    i, j = np.mgrid[:12, :12]
    log_choose = gammaln(i + j + 1) - gammaln(i + 1) - gammaln(j + 1)
    pmf = np.exp(log_choose - (i + j + 1) * np.log(2))
    pmf *= expit(f).sum() * expit(-f[0]) ** i * expit(-f[1]) ** j
    found = np.bincount(12 * n[0].clip(max=11) + n[1].clip(max=11), minlength=144).reshape(12, 12)
    kept = (pmf * n_rows > 20) & (i < 11) & (j < 11)
    observed, expected = np.append(found[kept], 0), np.append(pmf[kept], 0) * n_rows
    observed[-1], expected[-1] = n_rows - observed.sum(), n_rows - expected.sum()
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_lambda_and_counts_have_one_joint_law():
    # λ | f then n | λ, f is the joint; λ | n must leave it as it is, moments and dependence.
    f, rng = np.array([[0.3], [-0.4], [-2.0]]), np.random.default_rng(1)
    columns = np.repeat(expit(f), 100_000, 1)
    lam = draw_lambda(columns, rng)
    n = draw_counts(lam, columns, rng)
    again = draw_lambda_given_counts(n, rng)
    rate = expit(f).sum()
    assert stats.kstest(lam * rate, "expon").pvalue > 1e-3
    assert stats.kstest(again * rate, "expon").pvalue > 1e-3
    # E[λ n_c] = E[λ²] σ(-f_c)
    truth = 2 / rate**2 * expit(-f[:, 0])
    assert np.abs(z_scores((lam * n).T, truth)).max() < 4
    assert np.abs(z_scores((again * n).T, truth)).max() < 4


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-3, 4), min_size=2, max_size=3), st.integers(0, 2))
def test_the_augmented_joint_sums_to_the_likelihood(values, label):
    # ∫dλ Σ_n Σ_ω of the joint density, the ω by their Laplace transform, against (M2).
    f, y = np.array(values), label % len(values)
    C, log_lam = len(f), np.arange(-30, 8, 0.25)
    lam = np.exp(log_lam)
    n = np.arange(0, 250)
    joint = np.full(len(lam), 1.0)
    for c in range(C):
        b = (c == y) + n
        site = np.exp(0.5 * ((c == y) - n) * f[c] - b * np.log(2 * np.cosh(f[c] / 2)))
        poisson = stats.poisson.pmf(n[:, None], lam[None])
        joint = joint * (site @ poisson)
    # λ up to 80 has all but e^{-80 Σσ}.
    found = 0.25 * (lam * joint)[lam < 80].sum()
    expected = expit(f[y]) / expit(f).sum()
    slack = np.exp(-60 * expit(f).sum())
    assert found == pytest.approx(expected, rel=1e-6 + slack)


class Recorder:
    """A prior whose latents rest, and which keeps the sites it was given."""

    def __init__(self, r: np.ndarray) -> None:
        self.r, self.n_inputs = r, r.shape[1]

    def draw(self, kappa, omega, rng):
        self.kappa, self.omega = kappa, omega
        return self.r, self.r

    def prior(self, n_classes, rng):
        return self.r, self.r


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("shift", [0.0, -0.7])
def test_sites_average_to_the_likelihood(augmentation, shift):
    # Of all auxiliary variables the latents see sites alone, so for every f and f0
    # p(y|f)/p(y|f0) = E[exp(κ(f - f0) - ½ω(f² - f0²)) | y, f0].
    n_rows, y = 40_000, 1
    f0 = np.array([0.4, -0.6, -1.5])
    mean = np.full(3, shift)
    rest = Recorder(np.repeat((f0 - mean)[:, None], n_rows, 1))
    rng = np.random.default_rng(5)
    data = Observations(np.full(n_rows, y), 3)
    chain = start(rest, mean, data, rng)
    n_sweeps = 6 if augmentation == "collapsed" else 15
    ratios = []
    targets = [f0 + d for d in ([0.5, 0, 0], [0, 0.7, 0], [0, 0, -1.0], [-0.6, -0.4, -0.5])]
    for _ in range(n_sweeps):
        sweep(chain, rest, mean, data, augmentation, rng)
        sites = [
            rest.kappa * (f - f0)[:, None]
            - 0.5 * rest.omega * ((f - mean) ** 2 - (f0 - mean) ** 2)[:, None]
            for f in targets
        ]
        ratios.append(np.exp(np.array(sites).sum(1)).T)  # rows are independent
    found = np.mean(ratios, 0)
    p0 = expit(f0[y]) / expit(f0).sum()
    expected = np.array([expit(f[y]) / expit(f).sum() / p0 for f in targets])
    assert (found.std(0) / np.sqrt(n_rows) < 0.004 * expected).all()
    assert np.abs(z_scores(found, expected)).max() < 4


# --- the fields ---------------------------------------------------------------------------------


def dense(B: np.ndarray, D: np.ndarray, kappa: np.ndarray, omega: np.ndarray):
    """Mean and covariance of (g, r) with r = Bg + e, e ~ N(0, D), and sites on r."""
    H = np.eye(len(B) + B.shape[1])[B.shape[1] :]
    prior = np.block([[np.eye(B.shape[1]), B.T], [B, B @ B.T + np.diag(D)]])
    at = omega > 0
    G = prior @ H[at].T
    inner = np.linalg.inv(H[at] @ G + np.diag(1 / omega[at]))
    cov = prior - G @ inner @ G.T
    return cov @ H.T @ kappa, cov


@st.composite
def sites(draw, n_classes=2, n_inputs=4):
    """kappa and omega (C, U), some inputs without an observation."""
    size = (n_classes, n_inputs)
    powers = draw(st.lists(st.floats(-4, 4), min_size=8, max_size=8))
    seen = draw(st.lists(st.booleans(), min_size=8, max_size=8))
    kappa = draw(st.lists(st.floats(-5, 5), min_size=8, max_size=8))
    omega = 10.0 ** np.array(powers) * seen
    return np.reshape(np.array(kappa) * seen, size), np.reshape(omega, size)


def assert_draws(field: Field, kappa, omega, maps) -> None:
    """One draw of `field` is Gaussian with the dense mean and covariance of every class."""
    C = len(kappa)

    def draw(rng):
        g, r = field.draw(kappa, omega, rng)
        return np.concatenate([g, r], 1).ravel()

    mean, cov = affine(draw)
    size = len(mean) // C
    for c, (B, D) in enumerate(maps):
        expected_mean, expected_cov = dense(B, D, kappa[c], omega[c])
        own = slice(c * size, (c + 1) * size)
        np.testing.assert_allclose(mean[own], expected_mean, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(cov[own, own], expected_cov, rtol=1e-9, atol=1e-10)
        cov[own, own] = 0
    np.testing.assert_allclose(cov, 0, atol=1e-10)  # classes are independent


INPUTS = np.array([0.0, 0.3, 1.0, 1.9])


@settings(max_examples=40, deadline=None)
@given(sites())
def test_full_draw_is_the_dense_conditional(site):
    K = covariance(INPUTS, INPUTS, 1.0, 3.0)
    L = np.linalg.cholesky(K)
    assert_draws(FullField(K, L), *site, [(L, np.zeros(4))] * 2)
    # The sparse field with an inducing point at every input is the same.
    assert_draws(SparseField(L.T, np.zeros(4)), *site, [(L, np.zeros(4))] * 2)


@settings(max_examples=40, deadline=None)
@given(sites())
def test_sparse_draw_is_the_dense_conditional(site):
    A, residual = sparse_parts(INPUTS, 1.0, 3.0)
    assert_draws(SparseField(A, residual), *site, [(A.T, residual)] * 2)


@settings(max_examples=20, deadline=None)
@given(sites())
def test_a_field_for_every_class(site):
    Ks = [covariance(INPUTS, INPUTS, 1.0, 3.0), covariance(INPUTS, INPUTS, 0.4, 0.5)]
    Ls = [np.linalg.cholesky(K) for K in Ks]
    fields = ClassFields([FullField(K, L) for K, L in zip(Ks, Ls, strict=True)])
    assert_draws(fields, *site, [(L, np.zeros(4)) for L in Ls])


@pytest.mark.parametrize("power", [-12.0, -6.0, 6.0, 8.0, 10.0])
def test_extreme_precisions_keep_their_digits(power):
    # Long after everything is known exactly, and long before anything is.
    rng = np.random.default_rng(0)
    x = np.linspace(0, 3, 30)
    K = np.exp(-0.5 * np.square(x[:, None] - x)) + 1e-6 * np.eye(30)
    L = np.linalg.cholesky(K)
    omega = 10**power * rng.uniform(0.5, 1, (1, 30))
    kappa = omega * rng.standard_normal((1, 30))

    def draw(rng):
        return FullField(K, L).draw(kappa, omega, rng)[1].ravel()

    mean, cov = affine(draw)
    # K - K (K + W)⁻¹ K = W (K + W)⁻¹ K with W = 1/ω, which has no difference.
    W = np.diag(1 / omega[0])
    expected = W @ np.linalg.solve(K + W, K) if power > 0 else K - K @ np.linalg.solve(K + W, K)
    deviation = np.sqrt(np.diag(expected))
    # Draws are differences of numbers of size one, each known to a rounding error: at the largest
    # precision that is a share of 4e-4 of what is left, elsewhere less than 1e-4.
    rounding = np.finfo(float).eps * np.linalg.cond(K + W) / deviation.min()
    atol = max(1e-4, rounding)
    assert atol < 5e-4
    np.testing.assert_allclose(
        cov / np.outer(deviation, deviation), expected / np.outer(deviation, deviation), atol=atol
    )
    np.testing.assert_allclose(
        mean / deviation, expected @ kappa[0] / deviation, atol=atol, rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["full", "sparse", "classes"])
def test_prior_draws(kind):
    problem = case(kind, 3, X, [0, 1, 2])

    def draw(rng):
        return problem.prior.prior(3, rng)[1].ravel()

    mean, cov = affine(draw)
    n = 3 * COPIES
    expected = np.zeros((3 * n, 3 * n))
    for c in range(3):
        own = slice(c * n, (c + 1) * n)
        expected[own, own] = np.kron(np.eye(COPIES), problem.cov[c])
    np.testing.assert_allclose(mean, 0)
    np.testing.assert_allclose(cov, expected, atol=1e-12)


def test_coordinates_of_a_field():
    rng = np.random.default_rng(0)
    A, residual = sparse_parts(INPUTS, 1.0, 3.0)
    sparse = SparseField(A, np.where(INPUTS < 1, residual, 0.0))
    g, noise = rng.standard_normal((2, 2)), rng.standard_normal((2, 4))
    found = sparse.noise(g, sparse.place(g, noise))
    np.testing.assert_allclose(found, np.where(INPUTS < 1, noise, 0.0), atol=1e-12)
    K = covariance(INPUTS, INPUTS, 1.0, 3.0)
    full = FullField(K, np.linalg.cholesky(K))
    r = rng.standard_normal((2, 4))
    value, g = full.log_prior(r)
    np.testing.assert_allclose(full.place(g, full.noise(g, r)), r, atol=1e-12)
    other = full.log_prior(np.zeros((2, 4)))[0]
    law = stats.multivariate_normal(cov=K)
    assert value - other == pytest.approx(law.logpdf(r).sum() - 2 * law.logpdf(np.zeros(4)))
    # Less a constant: the determinant is there.
    wide = FullField(4 * K, 2 * np.linalg.cholesky(K)).log_prior(np.zeros((2, 4)))[0]
    assert other - wide == pytest.approx(8 * np.log(2))


# --- observations, starts, limits ---------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31))
def test_rows_and_inputs(seed):
    rng = np.random.default_rng(seed)
    C, U, N = rng.integers(2, 5), rng.integers(1, 6), rng.integers(1, 12)
    index, y = rng.integers(0, U, N), rng.integers(0, C, N)
    data = Observations(y, int(C), index)
    f, v = rng.standard_normal((C, U)), rng.standard_normal((C, N))
    rows = data.at_rows(f)
    assert rows.flags.c_contiguous and np.array_equal(rows, f[:, index])
    # Summing over rows is the transpose of copying to them.
    assert (rows * v).sum() == pytest.approx((f * data.at_inputs(v, int(U))).sum())
    assert np.array_equal(data.one_hot.argmax(0), y) and np.array_equal(
        data.one_hot.sum(0), y * 0 + 1
    )
    expected = LogisticSoftmax().log_prob(torch.tensor(y), torch.tensor(50 * rows.T)).sum()
    assert log_likelihood(data, 50 * f) == pytest.approx(float(expected), rel=1e-9)


def test_a_start_is_affordable():
    # A plain draw of this prior would ask for e^100 counts at some input.
    n, rng = 60, np.random.default_rng(0)
    K = 1e4 * np.eye(n)
    prior, mean = FullField(K, 100 * np.eye(n)), np.zeros(3)
    data = Observations(rng.integers(0, 3, n), 3)
    chain = start(prior, mean, data, rng)
    assert 1 / expit(chain.f).sum(0).min() <= 100
    np.testing.assert_allclose(100 * chain.g, chain.f)
    for _ in range(20):
        sweep(chain, prior, mean, data, "collapsed", rng)
    assert np.isfinite(chain.f).all()
    # Where the prior itself needs many, it may have them.
    chain = start(FullField(K, 100 * np.eye(n)), np.full(3, -9.0), data, rng)
    assert 1 / expit(chain.f).sum(0).min() <= 2 / (3 * expit(-9.0))


def test_a_start_is_a_draw_of_the_prior():
    problem, rng = case("sparse", 3, X, [0, 1, 2]), np.random.default_rng(0)
    data = problem.observations(np.zeros((COPIES, 3), dtype=int))
    f = [start(problem.prior, problem.mean, data, rng).f.reshape(problem.shape) for _ in range(200)]
    found = latent_functions(np.concatenate(f, 1))
    expected = latent_functions(problem.latents(rng, 100_000))
    assert np.abs(z_scores(found, expected)).max() < 4.5


@pytest.mark.parametrize("level", [-25.0, -800.0])
def test_hopeless_counts_are_an_error(level):
    n, rng = 3, np.random.default_rng(0)
    prior, mean = FullField(1e-6 * np.eye(n), 1e-3 * np.eye(n)), np.full(3, level)
    data = Observations(np.array([0, 1, 2]), 3)
    chain = start(prior, mean, data, rng)
    with pytest.raises(FloatingPointError, match="larger prior_mean"):
        sweep(chain, prior, mean, data, "collapsed", rng)


def test_a_singular_kernel_is_an_error():
    K = np.array([[1.0, 2.0], [2.0, 1.0]])
    with pytest.raises(FloatingPointError, match="positive definite"):
        FullField(K, np.eye(2)).draw(
            np.ones((1, 2)), np.full((1, 2), 100.0), np.random.default_rng(0)
        )


def of_copies(values: np.ndarray) -> np.ndarray:
    """The average of every copy, (sweeps x copies, F) -> (copies, F)."""
    return values.reshape(-1, COPIES, values.shape[1]).mean(0)


# --- the posterior by brute force ---------------------------------------------------------------


def moments(f: np.ndarray, log_p: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """f, ff', σ(f) and log p, one row per copy or their weighted sums, from (C, B, n) and (B,)."""
    flat = f.transpose(1, 0, 2).reshape(len(log_p), -1)
    i, j = np.triu_indices(flat.shape[1])
    if weight is None:
        return np.column_stack([flat, flat[:, i] * flat[:, j], expit(flat), log_p])
    second = (flat.T * weight) @ flat
    return np.concatenate([weight @ flat, second[i, j], weight @ expit(flat), [weight @ log_p]])


def grid_moments(problem: Case, y: np.ndarray, step: float = 1.0, offset: float = 0.0):
    """Posterior averages of `moments`, by the trapezoid rule in whitened latents."""
    C, _, n = problem.shape
    nodes = offset + step * np.arange(np.ceil((-5 - offset) / step), (5 - offset) / step + 1e-9)
    root = np.linalg.cholesky(problem.cov)
    total, mass = 0.0, 0.0
    # One plane of the grid at a time, to bound memory.
    rest = np.array(list(product(nodes, repeat=C * n - 1)))
    for first in nodes:
        z = np.column_stack([np.full(len(rest), first), rest]).reshape(-1, C, n)
        f = problem.mean[:, None, None] + np.einsum("cij,bcj->cbi", root, z)
        log_p = log_likelihoods(problem, f, y)
        weight = np.exp(log_p - 0.5 * np.square(z).sum((1, 2)))
        total = total + moments(f, log_p, weight)
        mass += weight.sum()
    return total / mass


def log_likelihoods(problem: Case, f: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log p(y | f) of every copy, (C, B, n) -> (B,)."""
    s = expit(f[:, :, problem.index])
    return np.log(np.take_along_axis(s, y[None, None], 0)[0] / s.sum(0)).sum(1)


POSTERIORS = {
    "three classes": (3, X[:2], [0, 1], [0, 2]),
    "shared inputs": (2, X, [0, 0, 1, 2, 0], [0, 0, 1, 0, 1]),
}


def test_the_grid_is_fine_enough():
    # Ten times better than the samplers that are compared with it.
    problem, y = case("full", 2, X[:2], [0, 1]), np.array([0, 1])
    fine = grid_moments(problem, y, 0.6, 0.25)
    np.testing.assert_allclose(grid_moments(problem, y), fine, rtol=0, atol=4e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sparse"])
@pytest.mark.parametrize("name", POSTERIORS)
def test_posterior_moments(name, kind):
    n_classes, inputs, index, labels = POSTERIORS[name]
    problem, y = case(kind, n_classes, inputs, index), np.array(labels)
    expected = grid_moments(problem, y)
    data = problem.observations(np.tile(y, (COPIES, 1)))
    for augmentation in AUGMENTATIONS:
        rng = np.random.default_rng(11)
        chain = start(problem.prior, problem.mean, data, rng)
        n_warmup, n_sweeps, kept = 100, 2000, []
        for i in range(n_warmup + n_sweeps):
            sweep(chain, problem.prior, problem.mean, data, augmentation, rng)
            if i >= n_warmup:
                kept.append(chain.f.reshape(problem.shape))
        f = np.concatenate(kept, 1)  # (C, sweeps x copies, n)
        found = of_copies(moments(f, log_likelihoods(problem, f, y)))
        error = found.std(0, ddof=1) / np.sqrt(COPIES)
        assert error.max() < 0.04 and np.median(error) < 0.015
        z = z_scores(found, expected)
        assert np.abs(z).max() < 4.5, (augmentation, np.round(z, 1))


# --- Geweke's joint-distribution test -----------------------------------------------------------


def joint_functions(case: Case, f: np.ndarray, y: np.ndarray, lam: np.ndarray) -> np.ndarray:
    """Functions of everything: (C, B, n), (B, N), (B, N) -> (B, F)."""
    at_rows = f[:, :, case.index]
    own = np.take_along_axis(at_rows, y[None], 0)[0]
    log_p = np.log(expit(own) / expit(at_rows).sum(0))
    log_lam = np.log(lam)
    parts = [y == 0, own, own**2, log_p, log_p.sum(1, keepdims=True), log_lam, log_lam * (y == 0)]
    return np.concatenate([latent_functions(f), *parts], 1)


GEWEKE = {
    "full": ("full", 3, X, [0, 1, 2]),
    "sparse": ("sparse", 3, X, [0, 1, 2]),
    "a kernel for every class, shared inputs": ("classes", 2, X, [0, 0, 1, 2, 0]),
    "sparse, shared and unseen inputs": ("sparse", 3, X, [2, 2, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("name", GEWEKE)
def test_joint_distribution(name, augmentation):
    problem = case(*GEWEKE[name], variance=6.0)
    rng = np.random.default_rng(7)
    # Marginal-conditional: the prior, then labels and λ given latents.
    f = problem.latents(rng, 100_000)
    y = problem.labels(f, rng)
    rate = expit(f[:, :, problem.index]).sum(0)
    expected = joint_functions(problem, f, y, rng.standard_exponential(y.shape) / rate)
    # Successive-conditional: every copy starts there, and labels are drawn anew between sweeps.
    f = problem.latents(rng, COPIES)
    lam = rng.standard_exponential((COPIES, len(problem.index)))
    lam /= expit(f[:, :, problem.index]).sum(0)
    chain = Chain(f.reshape(len(f), -1), np.empty(0), lam.ravel())
    kept = []
    for _ in range(3000):
        y = problem.labels(chain.f.reshape(problem.shape), rng)
        sweep(chain, problem.prior, problem.mean, problem.observations(y), augmentation, rng)
        kept.append((chain.f.reshape(problem.shape), y, chain.lam.reshape(y.shape)))
    f, y, lam = zip(*kept, strict=True)
    found = joint_functions(problem, np.concatenate(f, 1), np.concatenate(y), np.concatenate(lam))
    z = z_scores(of_copies(found), expected)
    assert np.abs(z).max() < 4.5, np.round(z, 1)
