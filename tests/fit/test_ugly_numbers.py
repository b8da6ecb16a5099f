"""Tables whose numbers are ugly, and kernels that fail: fits go on as long as there is a way."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

from conjugp import FitOptions, GibbsGPClassifier, GPClassifier
from conjugp._fit.calibrate import folded
from conjugp._gp.temperature import Calibration, fit_calibration
from conjugp._inference.settings import Settings
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.hold_out import folds
from conjugp.kernels import RBF, Linear, Matern52, Normalised
from faces import decoupled, fixed, toy
from problems import LIKELIHOOD, blobs
from random_cases import allowed, faults

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

N, N_TEST = 1100, 300  # in float32


def ugly(kind: str, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Four normal columns and one of the kind; labels from two of them."""
    rng = np.random.default_rng(0)
    X, g = rng.standard_normal((n + N_TEST, 5)), rng.standard_normal(n + N_TEST)
    rare = rng.random(len(g)) < 0.08
    X[:, 4] = {
        "mostly zero": np.where(rare, np.exp(8 + g), 0.0),
        "long tail": np.exp(4 * g),
        "longer tail": 1e-12 * np.exp(8 * g),
        "capped": np.where(rare, 99_999.0, np.round(np.exp(g))),
        "two places": np.where(rare, 1e12, 1e-12 * g),
        "far away": 1e9 + g,
        "constant": np.full(len(g), 1e12),
    }[kind]
    y = (X[:, 0] + 0.3 * rng.standard_normal(len(g)) > 0).astype(int) + (g > 1)
    return X, y


KINDS = ["mostly zero", "long tail", "longer tail", "capped", "two places", "far away", "constant"]


def check(clf: GPClassifier | GibbsGPClassifier, X: np.ndarray, y: np.ndarray) -> None:
    """Probabilities that are no worse than the frequencies, and finite latents."""
    p = clf.predict_proba(X)
    assert not faults(p)
    frequencies = np.bincount(y) / len(y)
    assert -np.log(p[np.arange(len(y)), y]).mean() <= allowed(-np.log(frequencies[y]).mean())
    m, v = clf.predict_latent(X)
    assert np.isfinite(m).all() and np.isfinite(v).all() and (v >= 0).all()
    assert np.isfinite(clf.sample_latent(X[:20], 2, random_state=0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_default_fits(kind):
    X, y = ugly(kind)
    check(GPClassifier(random_state=0).fit(X[:N], y[:N]), X[N:], y[N:])


@pytest.mark.parametrize("kernel", [RBF(), Matern52(), Normalised(RBF())])
@pytest.mark.parametrize("kind", KINDS)
def test_coupled_fits_in_batches(kind, kernel):
    X, y = ugly(kind)
    clf = GPClassifier(
        kernel, covariance="full", n_inducing=60, batch_size=200, max_epochs=10, random_state=0
    )
    check(clf.fit(X[:N], y[:N]), X[N:], y[N:])


@pytest.mark.parametrize("kind", KINDS)
def test_streams(kind):
    X, y = ugly(kind)
    clf = GPClassifier(n_inducing=60, random_state=0)
    for i in range(0, N, 275):
        clf.partial_fit(X[i : i + 275], y[i : i + 275], classes=[0, 1, 2])
    check(clf, X[N:], y[N:])


@pytest.mark.parametrize("kind", KINDS)
def test_samplers(kind):
    X, y = ugly(kind, 120)
    clf = GibbsGPClassifier(n_samples=40, n_warmup=20, n_chains=1, n_inducing=40, random_state=0)
    with pytest.warns(match="R-hat"):
        clf.fit(X[:120], y[:120])
    check(clf, X[120:], y[120:])


@pytest.mark.filterwarnings("ignore:.*says next to nothing:UserWarning")  # with such weights
@pytest.mark.parametrize("kind", KINDS)
def test_weights_from_very_small_to_very_large(kind):
    X, y = ugly(kind)
    weight = 10.0 ** np.random.default_rng(1).uniform(-6, 6, N)
    clf = GPClassifier(covariance="full", n_inducing=60, batch_size=200, max_epochs=10)
    with pytest.warns(UserWarning, match="sample_weight averages"):
        clf.set_params(random_state=0).fit(X[:N], y[:N], weight)
    assert not faults(clf.predict_proba(X[N:]))


class Coarse(RBF):
    """One that needs more digits than float32 has."""

    def __call__(self, X, Z):
        K = super().__call__(X, Z)
        return K * torch.nan if X.dtype == torch.float32 else K


class Wrong(RBF):
    """No kernel at all."""

    def __call__(self, X, Z):
        return -super().__call__(X, Z)


@pytest.mark.parametrize("how", [decoupled, fixed])
def test_a_fit_that_fails_in_float32_is_made_in_float64(how, tmp_path):
    X, y = toy(1100, gap=1.0)
    more = {} if how is decoupled else {"covariance": "full", "n_inducing": 10, "max_epochs": 2}
    found = how(kernel=Coarse(1.5, 4.0), **more).fit(X, y, checkpoint=tmp_path / "fit")
    expected = how(kernel=RBF(1.5, 4.0), dtype="float64", **more).fit(X, y)
    np.testing.assert_allclose(found.predict_proba(X), expected.predict_proba(X), rtol=1e-9)
    again = how(kernel=Coarse(1.5, 4.0), **more).fit(X, y, checkpoint=tmp_path / "fit")
    np.testing.assert_array_equal(found.predict_proba(X), again.predict_proba(X))


@pytest.mark.parametrize("how", [decoupled, fixed])
@pytest.mark.parametrize("learn", [True, False])
def test_what_is_no_kernel_is_refused(how, learn):
    X, y = toy(1100, gap=1.0)
    clf = how(kernel=Wrong(1.5, 4.0), learn_hyperparameters=learn, max_epochs=2)
    with pytest.raises(NotPositiveDefiniteError, match="not positive definite"):
        clf.fit(X, y)


def test_where_all_candidates_fail_a_plain_kernel_is_taken(monkeypatch):
    X, y = toy(400, gap=1.0)
    monkeypatch.setattr("conjugp._fit.search.held_out_loss", lambda *_: np.inf)
    clf = GPClassifier(covariance="shared", random_state=0, max_epochs=3).fit(X, y)
    assert isinstance(clf.kernel_, RBF)
    assert clf.kernel_.variance == FitOptions().mean_variance
    gap = np.median(pdist(X / X.std(axis=0)))
    np.testing.assert_allclose(clf.kernel_.lengthscale / X.std(axis=0), gap, rtol=0.05)
    check(clf, X, y)


def test_where_learning_fails_kernels_are_tried_all_the_same(monkeypatch):
    X, y = toy(400, gap=1.0)

    def fails(*_, **__):
        raise FloatingPointError

    monkeypatch.setattr("conjugp._fit.kernel.trained", fails)
    check(GPClassifier(random_state=0, max_epochs=3).fit(X, y), X, y)


def test_draws_of_what_is_known_almost_exactly():
    """Of a variance of 1e6 rows leave so little that its rounding is more."""
    X, y = toy(1100, gap=1.0)
    clf = fixed(kernel=Linear(1.0, 1e6), covariance="full", n_inducing=20, max_epochs=3).fit(X, y)
    draws = clf.sample_latent(X[:60], 500, random_state=0)
    m, v = clf.predict_latent(X[:60])
    assert np.isfinite(draws).all()
    np.testing.assert_allclose(draws.mean(0), m, rtol=0.05, atol=5 * (v.max() / 500) ** 0.5)


def test_a_fold_that_fails_is_left_out():
    data = blobs(60, 3)
    plan, settings = SimpleNamespace(family="coupled", shares=None), Settings(LIKELIHOOD, "tight")
    masks, seen = folds(data), []

    def predict(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(rows)
        if len(seen) == 1:
            raise FloatingPointError
        m = data.X[rows] @ torch.ones(2, 3).double()
        return m * (torch.nan if len(seen) == 2 else 1.0), torch.ones_like(m)

    found = folded(plan, data, predict, settings)
    assert len(seen) == len(masks) == 5
    i = torch.cat([mask.nonzero()[:, 0] for mask in masks[2:]])
    m = data.X[i] @ torch.ones(2, 3).double()
    expected = fit_calibration(LIKELIHOOD, m, torch.ones_like(m), data.y[i], data.weight[i], (1.0,))
    assert found == expected

    def fails(_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotPositiveDefiniteError

    found = folded(plan, data, fails, settings)
    assert found == Calibration(1.0, 1.0, np.inf)


def test_a_kernel_that_cannot_be_learned_jointly_stays(monkeypatch):
    X, y = toy(60)

    def fails(*_):
        raise FloatingPointError

    monkeypatch.setattr("conjugp._fit.weights.learn_kernel", fails)
    options = FitOptions(mean_training="elbo", search=False)
    clf = decoupled(learn_hyperparameters=True, options=options).fit(X, y)
    np.testing.assert_allclose(clf.kernel_.theta, RBF([1.5, 1.5], 10.0).theta, rtol=1e-9)


@pytest.mark.parametrize("n", [200, 400])
def test_a_column_that_one_row_has_to_itself_says_nothing(n):
    """A dummy for every row, of which new rows have none; labels that bend among the others."""
    rng = np.random.default_rng(4)
    Z = rng.standard_normal((n + N_TEST, 12))
    Z = Z @ np.cumsum(rng.standard_normal((12, 12)), axis=0)
    Z /= Z.std(axis=0)
    centres = rng.standard_normal((6, 12))
    y = np.square(Z[:, None] - centres).sum(2).argmin(1) % 2
    rows, new = np.c_[Z[:n], np.eye(n)], np.c_[Z[n:], np.zeros((N_TEST, n))]
    found = []
    for train, test in ((rows, new), (Z[:n], Z[n:])):
        clf = GPClassifier(random_state=0).fit(train, y[:n])
        p = clf.predict_proba(test)
        found.append(-np.log(p[np.arange(N_TEST), y[n:]]).mean())
    assert found[0] <= allowed(found[1])


def test_a_column_at_rest_leaves_minibatches_free_to_learn():
    """Inducing points move by steps that are small beside all other columns."""
    rng = np.random.default_rng(0)
    X = (rng.random((1200, 12)) < 0.5).astype(float)
    y = X[:, 0] != X[:, 1]
    X[:, 11] = np.arange(1200) == 7
    clf = GPClassifier(covariance="full", n_inducing=60, max_epochs=12, random_state=0).fit(X, y)
    assert clf.score(X, y) > 0.95


@pytest.mark.parametrize("kernel", ["rbf + linear", "rbf * linear"])
@pytest.mark.parametrize("n", [100, 1100])
def test_linear_parts_reach_columns_far_from_the_origin(kernel, n):
    """Such as a year: they had all of the variance, and every answer was the classes' shares."""
    X, y = toy(n + 200, gap=1.0)
    far = X + np.array([0.0, 2000.0])
    clf = GPClassifier(kernel, covariance="full", n_inducing=30, random_state=0)
    found = []
    for rows in (far, X):
        p = clf.fit(rows[:n], y[:n]).predict_proba(rows[n:])
        found.append(-np.log(p[np.arange(200), y[n:]]).mean())
    assert found[0] <= allowed(found[1])
