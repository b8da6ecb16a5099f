"""Chains: what they sample, stretches of sweeps, kernel parameters and prior means."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from scipy.special import expit

from conjugp._numerics.linalg import cholesky
from conjugp._sampler.chain import Draws, State, Target, Walk, distinct, first_state, run
from conjugp._sampler.sweep import Chain, FullField, Observations, log_likelihood
from conjugp.kernels import RBF, Kernel, Linear, Matern12
from montecarlo import affine, latent_functions, z_scores

MEAN = np.array([0.3, -0.5])


def target(
    kernels: tuple[Kernel, ...] = (Matern12(0.9, 2.0),),
    n: int = 9,
    sparse: bool = False,
    seed: int = 0,
    **changes: object,
) -> Target:
    """A small problem with two classes; some inputs were seen twice."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 1))
    index = np.concatenate([np.arange(n), [0, 0, n - 1]])
    data = Observations(rng.integers(0, 2, len(index)), 2, index)
    Z = np.linspace(-1.5, 1.5, 4)[:, None] if sparse else None
    return replace(Target(data, X, Z, kernels, MEAN), **changes)


SETTINGS = {
    "fixed": {},
    "paper": {"augmentation": "paper"},
    "sparse": {"sparse": True},
    "means": {"mean_variance": 2.0},
    "sampled": {"kernel_scale": 0.8, "mean_variance": 2.0},
    "sampled, paper": {"kernel_scale": 0.8, "augmentation": "paper"},
    "sampled, sparse": {"kernel_scale": 0.8, "mean_variance": 1.0, "sparse": True},
    "sampled, per class": {
        "kernel_scale": 0.8,
        "kernels": (Matern12(0.9, 2.0), RBF(0.7, 1.0) + Linear(1.0, 0.5)),
    },
}


def assert_same(a: State | Draws, b: State | Draws) -> None:
    """Bit for bit."""
    for name in a.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if name == "rng":
            x, y = repr(x.bit_generator.state), repr(y.bit_generator.state)
        assert np.array_equal(x, y), name


# --- stretches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_one_stretch_or_many(name):
    problem = target(**SETTINGS[name])
    state = first_state(problem, np.random.SeedSequence(4))
    whole, draws = run(problem, state, 23, n_warmup=6, thin=3)
    assert len(draws.g) == 5 and whole.sweeps == 23
    parts = Draws.room(problem, 0)
    for n_sweeps in (1, 6, 2, 0, 5, 9):
        # Through a file or to another process and back.
        problem, state = pickle.loads(pickle.dumps((problem, state)))
        state, more = run(problem, state, n_sweeps, n_warmup=6, thin=3)
        parts = parts + more
    assert_same(state, whole)
    assert_same(parts, draws)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stretch_leaves_what_it_was_given(name):
    problem = target(**SETTINGS[name])
    state, _ = run(problem, first_state(problem, np.random.SeedSequence(4)), 3, 0, 1)
    copy = pickle.loads(pickle.dumps(state))
    once = run(problem, state, 4, 0, 1)
    assert_same(state, copy)
    again = run(problem, state, 4, 0, 1)
    for a, b in zip(once, again, strict=True):
        assert_same(a, b)


def test_thinning_keeps_every_third():
    problem = target()
    state = first_state(problem, np.random.SeedSequence(0))
    last, every = run(problem, state, 20, n_warmup=4, thin=1)
    _, third = run(problem, state, 20, n_warmup=4, thin=3)
    assert_same(third, every[2::3])
    assert len(every.g) == 16 and len(third.g) == 5
    # The last draw is where the chain stands.
    assert np.array_equal(every.g[-1], last.g)
    assert every.log_likelihood[-1] == log_likelihood(problem.data, last.f)
    assert np.array_equal(every.mean, np.tile(MEAN, (16, 1)))


@pytest.mark.parametrize("name", SETTINGS)
def test_latents_belong_to_their_coordinates(name):
    problem = target(**SETTINGS[name])
    state = first_state(problem, np.random.SeedSequence(1))
    for _ in range(6):
        r = state.f - MEAN[:, None]
        fields = [problem.whitened(k, row).field for k, row in enumerate(state.theta)]
        for c in range(2):
            field = fields[c % len(fields)]
            noise = field.noise(state.g[c : c + 1], r[c : c + 1])
            np.testing.assert_allclose(field.place(state.g[c], noise[0]), r[c], atol=1e-9)
            assert np.abs(noise).max(initial=0.0) < 6
        state, draws = run(problem, state, 1, 0, 1)
        assert np.isfinite(draws.log_likelihood).all()
    assert (state.theta != problem.theta).any() == bool(problem.kernel_scale)


def test_chains_differ_by_their_seed():
    problem = target(**SETTINGS["sampled"])
    first, second = (first_state(problem, s) for s in np.random.SeedSequence(0).spawn(2))
    assert not np.allclose(first.f, second.f) and not np.allclose(first.theta, second.theta)
    assert np.abs(first.theta - problem.theta).max() <= problem.kernel_scale


def test_draws_join_and_part():
    problem = target()
    _, draws = run(problem, first_state(problem, np.random.SeedSequence(0)), 7, 0, 1)
    assert_same(draws[:3] + draws[3:], draws)
    assert_same(Draws.room(problem, 0) + draws, draws)


# --- what is sampled ----------------------------------------------------------------------------


def test_fields_of_a_target():
    full, sparse = (
        target((RBF(0.9, 2.0),), sparse=flag, mean_variance=1.5) for flag in (False, True)
    )
    X, Z = full.X, sparse.Z
    assert Z is not None

    def k(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return 2 * np.exp(-0.5 * np.square((a - b.T) / 0.9)) + 1.5

    jitter = 3.5e-6
    found = full.fields[0]
    assert isinstance(found.field, FullField)
    K = k(X, X) + jitter * np.eye(len(X))
    np.testing.assert_allclose(found.field.K, K, rtol=1e-12)
    np.testing.assert_allclose(found.field.L @ found.field.L.T, K, rtol=1e-10)
    np.testing.assert_allclose(found.field.L @ found.ones, 1, rtol=1e-7)
    field, K = sparse.fields[0].field, k(Z, Z) + jitter * np.eye(len(Z))
    assert not isinstance(field, FullField)
    np.testing.assert_allclose(
        field.A.T @ field.A, k(X, Z) @ np.linalg.solve(K, k(Z, X)), rtol=1e-9
    )
    explained = np.diag(field.A.T @ field.A)
    np.testing.assert_allclose(field.residual, np.maximum(3.5 - explained, 3.5e-6), rtol=1e-6)


def test_kernels_of_different_size():
    problem = target((Matern12(0.9, 2.0), RBF(0.7, 1.0) + Linear(1.0, 0.5)), kernel_scale=1.0)
    assert problem.theta.shape == (2, 4)
    np.testing.assert_allclose(problem.theta[0], [np.log(0.9), np.log(2.0), 0, 0])
    assert problem.kernel(0, problem.theta[0]) == problem.kernels[0]
    _, draws = run(problem, first_state(problem, np.random.SeedSequence(0)), 4, 0, 1)
    assert not draws.theta[:, 0, 2:].any() and (np.diff(draws.theta[:, 1], axis=0) != 0).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_prior_means_given_the_latents(sparse):
    kernels = (Matern12(0.9, 2.0), Matern12(0.4, 1.0))
    problem = target(kernels, sparse=sparse, mean_variance=2.5, jitter=0.0)
    walk = Walk(problem, problem.theta)
    rng = np.random.default_rng(0)
    points = problem.X if problem.Z is None else problem.Z
    g = rng.standard_normal((2, len(points)))
    mean, cov = affine(lambda numbers: walk.draw_mean(g, numbers))
    for c, kernel in enumerate(kernels):
        # u = b + r at the points, b ~ N(0, 2.5): condition the joint Gaussian of b and u on u.
        at = torch.tensor(points)
        K = kernel(at, at).numpy() + 2.5
        u = cholesky(torch.tensor(K), 0.0)[0].numpy() @ g[c]
        weight = np.linalg.solve(K, np.full(len(points), 2.5))
        np.testing.assert_allclose(mean[c], MEAN[c] + weight @ u, rtol=1e-9)
        np.testing.assert_allclose(cov[c, c], 2.5 - 2.5 * weight.sum(), rtol=1e-9)
    assert abs(cov[0, 1]) < 1e-15


def test_an_input_where_the_prior_vanishes():
    # A linear function is 0 at the origin: nothing is left to sample there.
    X = np.array([[0.0], [1.0], [-2.0]])
    data = Observations(np.array([0, 1, 0]), 2)
    for Z in (None, X[1:2]):
        problem = Target(data, X, Z, (Linear(1.0, 2.0),), MEAN, kernel_scale=1.0)
        state, draws = run(problem, first_state(problem, np.random.SeedSequence(0)), 30, 0, 1)
        assert np.isfinite(draws.g).all() and np.isfinite(state.f).all()
        np.testing.assert_allclose(state.f[:, 0], MEAN, atol=0.1 if Z is None else 1e-12)


def test_a_kernel_that_cannot_be_factorised_is_not_chosen(monkeypatch):
    # Parameters beyond some bound fail; the chain stays within it and goes on.
    problem = target(kernel_scale=1.0)
    bound = problem.theta[0, 0] + 0.3
    whole = Target.whitened

    def whitened(self, k, theta):
        if theta[0] > bound:
            return whole(replace(self, X=np.full_like(self.X, np.nan)), k, theta)
        return whole(self, k, theta)

    start = replace(first_state(problem, np.random.SeedSequence(0)), theta=problem.theta)
    monkeypatch.setattr(Target, "whitened", whitened)
    _, draws = run(problem, start, 60, 0, 1)
    assert draws.theta[:, 0, 0].max() <= bound and np.ptp(draws.theta[:, 0, 0]) > 0.1


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 12), st.integers(1, 3)),
        elements=st.sampled_from([0.0, -0.0, 1.0, -1.5]),
    )
)
def test_distinct_inputs(X):
    inputs, index = distinct(X)
    assert len(np.unique(inputs + 0.0, axis=0)) == len(inputs)
    if index is None:
        assert inputs is X
    else:
        assert len(inputs) < len(X) and np.array_equal(inputs[index], X)


# --- steps of kernel parameters -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["centred", "whitened", "sparse", "per class"])
def test_a_move_leaves_the_joint_law_unchanged(kind):
    # From exact draws of parameters, latents and labels, one step leads to such draws again.
    changes = {"sparse": {"sparse": True}, "per class": {"kernels": (Matern12(0.9, 2.0),) * 2}}
    problem = target(n=5, kernel_scale=0.8, mean_variance=0.5, **changes.get(kind, {}))
    rng = np.random.default_rng(6)
    index = np.tile(np.arange(5), 8)  # many labels, that they matter

    def functions(walk: Walk, chain: Chain, data: Observations) -> np.ndarray:
        size = np.log(np.square(chain.f - MEAN[:, None]).mean(1))
        parts = [walk.theta, walk.theta**2, walk.theta * size[: len(walk.theta), None]]
        latent = latent_functions(chain.f[:, None, :2])[0]
        g = np.square(chain.g).mean()
        return np.concatenate([*map(np.ravel, parts), latent, [g, log_likelihood(data, chain.f)]])

    gaps = []
    for i in range(600):
        theta = problem.theta + 0.8 * rng.standard_normal(problem.theta.shape)
        walk = Walk(problem, theta)
        g, r = walk.prior.prior(2, rng)
        f = MEAN[:, None] + r
        s = expit(f[:, index])
        data = Observations((rng.random(len(index)) > s[0] / s.sum(0)).astype(int), 2, index)
        walk.target = replace(problem, data=data)
        chain = Chain(f, g, np.ones(len(index)))
        before = functions(walk, chain, data)
        walk.move(chain, rng, centred=kind == "centred" or (kind == "per class" and i % 2 == 0))
        assert (walk.theta != theta).all()
        # The two kinds of steps keep the latents or their coordinates.
        if kind == "centred":
            assert chain.f is f
        elif kind != "per class":
            assert chain.g is g
        gaps.append(functions(walk, chain, data) - before)
    moved = np.array(gaps)
    moved = moved[:, moved.std(0) > 0]
    assert np.abs(z_scores(moved, np.zeros(moved.shape[1]))).max() < 4


def test_lambda_is_drawn_anew_after_a_move():
    # Steps integrate λ out: the one from before does not belong to the latents they lead to.
    problem = target(n=200, kernel_scale=0.5, augmentation="paper")
    state = first_state(problem, np.random.SeedSequence(0))
    chain, walk = Chain(state.f, state.g, np.full_like(state.lam, 1e6)), Walk(problem, state.theta)
    walk.move(chain, state.rng, centred=False)
    rate = expit(problem.data.at_rows(chain.f)).sum(0)
    assert stats.kstest(chain.lam * rate, "expon").pvalue > 1e-3


# --- Geweke's joint-distribution test -----------------------------------------------------------


GEWEKE = {
    "full, paper": {"augmentation": "paper"},
    "full, per class": {"kernels": (Matern12(0.8, 1.5), Matern12(1.5, 0.7))},
    "sparse": {"Z": np.array([[-0.4], [0.9]])},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GEWEKE)
def test_joint_distribution(name):
    # Geweke's test, with kernel parameters and prior means among what is sampled. There are three
    # inputs; two rows share the first.
    X, index = np.array([[0.0], [0.5], [1.4]]), np.array([0, 1, 2, 0])
    empty = Observations(np.zeros(4, dtype=int), 2, index)
    problem = Target(
        empty, X, None, (Matern12(0.8, 1.5),), MEAN, mean_variance=0.8, kernel_scale=0.7
    )
    problem = replace(problem, **GEWEKE[name])
    rng = np.random.default_rng(2)

    def labels(f: np.ndarray) -> np.ndarray:
        s = expit(f[:, index])
        return (rng.random(4) > s[0] / s.sum(0)).astype(int)

    def functions(f: np.ndarray, theta: np.ndarray, mean: np.ndarray, y: np.ndarray) -> np.ndarray:
        own = f[:, index][y, np.arange(4)]
        size = np.log(np.square(f - MEAN[:, None]).mean(1))
        return np.concatenate(
            [
                latent_functions(f[:, None])[0],
                theta.ravel(),
                theta.ravel() ** 2,
                (theta[:, 1] * size[: len(theta)]),
                mean,
                mean**2,
                mean * f[:, 0],
                own,
                y,
            ]
        )

    def joint() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        theta = problem.theta + 0.7 * rng.standard_normal(problem.theta.shape)
        f, mean = np.empty((2, 3)), np.empty(2)
        for c in range(2):
            length, variance = np.exp(theta[c % len(theta)])
            mean[c] = MEAN[c] + np.sqrt(0.8) * rng.standard_normal()

            def k(a: np.ndarray, b: np.ndarray, v=variance, ell=length) -> np.ndarray:
                return v * np.exp(-np.abs(a - b.T) / ell)

            if problem.Z is None:
                f[c] = mean[c] + np.linalg.cholesky(k(X, X)) @ rng.standard_normal(3)
            else:
                # Given u, which knows the mean, f is that of the sparse model alone.
                Z = problem.Z
                u = mean[c] + np.linalg.cholesky(k(Z, Z)) @ rng.standard_normal(len(Z))
                weight = np.linalg.solve(k(Z, Z) + 0.8, k(Z, X) + 0.8)
                residual = variance + 0.8 - (weight * (k(Z, X) + 0.8)).sum(0)
                noise = np.sqrt(residual) * rng.standard_normal(3)
                f[c] = MEAN[c] + weight.T @ (u - MEAN[c]) + noise
        return f, theta, mean, labels(f)

    expected = np.array([functions(*joint()) for _ in range(5_000)])
    found = []
    for _ in range(24):
        f, theta, _, y = joint()
        lam = rng.standard_exponential(4) / expit(f[:, index]).sum(0)
        state = State(f, np.empty(0), lam, theta, rng)
        total, n_sweeps = np.zeros(expected.shape[1]), 50
        for _ in range(n_sweeps):
            now = replace(problem, data=Observations(y, 2, index))
            state, draws = run(now, state, 1, 0, 1)
            rng = state.rng
            total += functions(state.f, state.theta, draws.mean[0], y)
            y = labels(state.f)
        found.append(total / n_sweeps)
    z = z_scores(np.array(found), expected)
    assert np.abs(z).max() < 5, np.round(z, 1)
