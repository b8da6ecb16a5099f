"""GPClassifier as its users meet it."""

from __future__ import annotations

import inspect
import io
import pickle
from dataclasses import dataclass

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    StratifiedKFold,
    cross_val_predict,
    cross_val_score,
)
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from conftest import KERNEL_CASES
from conjugp import FitOptions, GPClassifier, load
from conjugp._fit.options import seed_of
from conjugp._gp.inducing import kmeans
from conjugp._gp.prediction import apply_temperature
from conjugp._rows.canonical import ordered
from conjugp.kernels import RBF, Kernel, Linear, Matern32, Matern52, Positive, RationalQuadratic
from faces import decoupled, fixed, minibatch, regret, toy
from problems import LIKELIHOOD

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

X, y = toy(60)


def large(**changes) -> GPClassifier:
    """On more than 1,000 rows, so in float32 unless told otherwise."""
    return minibatch(batch_size=256, max_epochs=2, **changes)


# --- labels and frames ---------------------------------------------------------------------------


def test_text_labels():
    kinds = ["zebra", "ant", "cow"]
    names = np.array(kinds)[y]
    clf = fixed().fit(X, names)
    assert clf.classes_.tolist() == ["ant", "cow", "zebra"]
    expected = fixed().fit(X, y).predict_proba(X)[:, [1, 2, 0]]
    np.testing.assert_allclose(clf.predict_proba(X), expected, atol=1e-9)
    assert set(clf.predict(X)) == set(names) and regret(clf, labels=kinds) < 0.15
    as_objects = fixed().fit(X, pd.Series(names, dtype=object))
    np.testing.assert_array_equal(as_objects.predict(X), clf.predict(X))


def test_boolean_labels():
    truth = y == 1
    clf = fixed().fit(X, truth)
    assert clf.classes_.tolist() == [False, True] and clf.predict(X).dtype == bool
    assert clf.predict_proba(X).shape == (60, 2)
    assert regret(clf, labels=[False, True, False]) < 0.1
    assert clf.decision_function(X).shape == (60,)


def test_labels_in_other_forms():
    expected = fixed().fit(X, y).predict_proba(X)
    for labels in (y.tolist(), y - 5, 2.0 * y, pd.Series(y), pl.Series(y), y.astype(np.uint8)):
        np.testing.assert_array_equal(fixed().fit(X, labels).predict_proba(X), expected)
    with pytest.warns(UserWarning, match="column-vector"):
        fixed().fit(X, y[:, None])


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_frames(frame):
    data = frame({"height": X[:, 0], "width": X[:, 1]})
    clf = fixed().fit(data, y)
    assert clf.feature_names_in_.tolist() == ["height", "width"] and clf.n_features_in_ == 2
    expected = fixed().fit(X, y).predict_proba(X)
    np.testing.assert_allclose(clf.predict_proba(data), expected, atol=1e-12)
    for wrong in (
        frame({"height": X[:, 0], "depth": X[:, 1]}),
        frame({"width": X[:, 1], "height": X[:, 0]}),
        frame({"height": X[:, 0]}),
    ):
        for method in ("predict", "predict_proba", "predict_latent"):
            with pytest.raises(ValueError, match="feature names"):
                getattr(clf, method)(wrong)
        with pytest.raises(ValueError, match="feature names"):
            clf.elbo(wrong, y)
    clf.fit(X, y)
    assert not hasattr(clf, "feature_names_in_")


def test_two_classes():
    clf = fixed().fit(X, (y == 0).astype(int))
    p = clf.predict_proba(X)
    assert p.shape == (60, 2)
    np.testing.assert_allclose(clf.decision_function(X), np.log(p[:, 1] / p[:, 0]), rtol=1e-9)
    np.testing.assert_array_equal(clf.decision_function(X) > 0, clf.predict(X) == 1)


def test_fifty_classes():
    A, b = toy(600, 50, 4, gap=6.0)
    place = np.argsort(b, kind="stable").reshape(50, 12)
    new, truth = A[place[:, 4:].ravel()], b[place[:, 4:].ravel()]
    A, b = A[place[:, :4].ravel()], b[place[:, :4].ravel()]
    nearest = KNeighborsClassifier(1).fit(A, b).score(new, truth)
    clf = fixed(kernel=RBF(3.0, 30.0), prior_mean=-4.0).fit(A, b)
    assert clf.predict_proba(A).shape == (200, 50) and clf.score(new, truth) > nearest - 0.03
    many = decoupled(kernel=RBF(3.0, 30.0), n_inducing=100).fit(A, b)
    assert many.predict_proba(A).shape == (200, 50) and many.score(new, truth) > nearest - 0.08


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_a_class_with_one_row(make):
    labels = y.copy()
    labels[X[:, 0].argmax()] = 9
    clf = make(temperature="auto").fit(X, labels)
    assert clf.classes_.tolist() == [0, 1, 2, 9]
    p = clf.predict_proba(X)
    assert p.shape == (60, 4) and np.isfinite(p).all() and (p[:, 3] > 0).all()


def test_two_rows_and_one_per_class():
    clf = GPClassifier(random_state=0).fit([[0.0], [1.0]], ["a", "b"])
    assert clf.predict([[-1.0], [2.0]]).tolist() == ["a", "b"] and clf.temperature_ == 1.0
    many = GPClassifier(random_state=0).fit(np.arange(5.0)[:, None], list("abcde"))
    assert np.isfinite(many.predict_proba([[2.0]])).all()


# --- scikit-learn's tools ------------------------------------------------------------------------


def test_a_pipeline():
    pipe = make_pipeline(StandardScaler(), fixed()).fit(X, y)
    assert regret(pipe) < 0.15
    pipe.set_params(gpclassifier__bound="augmented")
    assert pipe[-1].bound == "augmented"


def test_a_grid_of_kernels():
    grid = {"kernel": [RBF(1.5, 4.0), Matern52(1.5, 4.0), Linear(1.0, 1.0), None]}
    search = GridSearchCV(
        fixed(max_epochs=10), grid, cv=2, scoring="neg_log_loss", error_score="raise"
    ).fit(X, y)
    scores = search.cv_results_["mean_test_score"]
    assert np.isfinite(scores).all() and len(set(scores)) == 4
    assert search.best_params_["kernel"] is grid["kernel"][int(np.argmax(scores))]


def test_a_grid_over_options_and_arguments():
    grid = {"options__min_step": [0.05, 0.3], "bound": ["tight", "collapsed"]}
    clf = fixed(n_inducing=8, batch_size=20, max_epochs=3, options=FitOptions())
    search = GridSearchCV(clf, grid, cv=2, n_jobs=1, error_score="raise").fit(X, y)
    assert search.best_estimator_.options.min_step in (0.05, 0.3)
    assert clf.options.min_step == 0.05


def test_cross_validation():
    p = cross_val_predict(fixed(), X, y, cv=3, method="predict_proba")
    assert p.shape == (60, 3) and (p.argmax(1) == y).mean() > 0.6
    assert cross_val_score(fixed(), X, y, cv=StratifiedKFold(3)).mean() > 0.6
    params = {"sample_weight": np.ones(60)}
    np.testing.assert_allclose(
        cross_val_predict(fixed(), X, y, cv=3, method="predict_proba", params=params), p, atol=1e-9
    )


def test_a_class_that_a_fold_does_not_have():
    order = np.argsort(y, kind="stable")
    with pytest.warns(RuntimeWarning, match="Number of classes"):
        p = cross_val_predict(fixed(), X[order], y[order], cv=KFold(3), method="predict_proba")
    assert p.shape == (60, 3) and np.isfinite(p).all()
    assert (p[:20, 0] == 0).all()  # scikit-learn's filling


@pytest.mark.parametrize("method", ["sigmoid", "isotonic"])
def test_scikit_learns_own_calibration(method):
    A, b = toy(360)
    clf = CalibratedClassifierCV(fixed(), method=method, cv=2).fit(A[:60], b[:60])
    np.testing.assert_allclose(clf.predict_proba(A).sum(1), 1.0)
    alone = fixed().fit(A[:60], b[:60]).score(A[60:], b[60:])
    assert clf.score(A[60:], b[60:]) == pytest.approx(alone, abs=0.03)


def test_parameters():
    clf = GPClassifier(RBF(1.0, 2.0), n_inducing=7, options=FitOptions(min_step=0.3))
    params = clf.get_params()
    assert params["n_inducing"] == 7 and params["options__min_step"] == 0.3
    assert set(inspect.signature(GPClassifier).parameters) <= set(params)
    copy = clone(clf)
    assert copy.kernel == clf.kernel and copy.options.min_step == 0.3
    assert copy.set_params(n_inducing=None, kernel=None).get_params()["kernel"] is None
    with pytest.raises(ValueError, match="no_such"):
        clf.set_params(no_such=1)
    assert "n_inducing=7" in repr(clf)


def test_a_fitted_clone_is_not_fitted():
    clf = fixed().fit(X, y)
    assert not hasattr(clone(clf), "classes_")
    # The constructor's arguments are as they were.
    for name, value in fixed().get_params().items():
        assert repr(clf.get_params()[name]) == repr(value)


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_saving_and_loading(make, tmp_path):
    clf = make(temperature="auto").fit(X, y)
    joblib.dump(clf, tmp_path / "model.joblib")
    stream = io.BytesIO()
    torch.save({"model": clf}, stream)
    stream.seek(0)
    for copy in (
        pickle.loads(pickle.dumps(clf)),
        joblib.load(tmp_path / "model.joblib"),
        torch.load(stream, weights_only=False)["model"],
    ):
        np.testing.assert_array_equal(copy.predict_proba(X), clf.predict_proba(X))
        np.testing.assert_array_equal(copy.inducing_points_, clf.inducing_points_)
        assert copy.kernel_ == clf.kernel_ and copy.elbo(X, y) == clf.elbo(X, y)
        assert (
            copy.calibrate(X, y).temperature_
            == pickle.loads(pickle.dumps(clf)).calibrate(X, y).temperature_
        )


# --- what the answer depends on ------------------------------------------------------------------

MAKERS = {
    "coupled": lambda **c: GPClassifier(max_epochs=10, **c),
    "minibatch": lambda **c: minibatch(**c),
    "decoupled": lambda **c: decoupled(**{"temperature": "auto", **c}),
    "monte carlo": lambda **c: fixed(options=FitOptions(prediction="mc", n_samples=32), **c),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", MAKERS)
def test_the_same_seed_gives_the_same_bits(kind, dtype):
    a, b = (MAKERS[kind](random_state=5, dtype=dtype).fit(X, y) for _ in range(2))
    np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(X))
    np.testing.assert_array_equal(a.inducing_points_, b.inducing_points_)
    assert a.elbo_ == b.elbo_ and a.temperature_ == b.temperature_


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("make", [large, decoupled])
def test_the_same_seed_gives_the_same_bits_on_more_rows(make, dtype):
    A, b = toy(1200, gap=3.0)
    first, second = (
        make(random_state=5, dtype=dtype, temperature=None).fit(A, b) for _ in range(2)
    )
    np.testing.assert_array_equal(first.predict_proba(A), second.predict_proba(A))
    assert first._fitted.model.Z.dtype == getattr(torch, dtype)


def test_another_seed_gives_other_bits():
    a, b = (minibatch(random_state=s).fit(X, y).predict_proba(X) for s in (0, 1))
    assert not np.array_equal(a, b)
    states = [np.random.RandomState(3) for _ in range(2)]
    c, d = (minibatch(random_state=s).fit(X, y).predict_proba(X) for s in states)
    np.testing.assert_array_equal(c, d)
    before = torch.random.get_rng_state()
    minibatch(random_state=0).fit(X, y).predict_proba(X)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_order_of_rows_does_not_matter(kind):
    order = np.random.default_rng(1).permutation(60)
    a = MAKERS[kind](random_state=0).fit(X, y)
    b = MAKERS[kind](random_state=0).fit(X[order], y[order])
    np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(X))


@pytest.mark.parametrize("kind", MAKERS)
def test_weights_are_copies(kind):
    """And rows of no weight are absent."""
    copies = np.arange(60) % 4
    a = MAKERS[kind](random_state=0).fit(X, y, sample_weight=copies)
    b = MAKERS[kind](random_state=0).fit(np.repeat(X, copies, 0), np.repeat(y, copies))
    kept = copies > 0
    c = MAKERS[kind](random_state=0).fit(X[kept], y[kept], sample_weight=copies[kept])
    np.testing.assert_allclose(a.predict_proba(X), b.predict_proba(X), atol=1e-9)
    np.testing.assert_array_equal(a.predict_proba(X), c.predict_proba(X))
    assert a.temperature_ == pytest.approx(b.temperature_, rel=1e-9)


def test_heavier_rows_count_for_more():
    light = fixed().fit(X, y)
    heavy = fixed().fit(X, y, sample_weight=np.where(y == 1, 10.0, 1.0))
    assert heavy.predict_proba(X)[:, 1].mean() > light.predict_proba(X)[:, 1].mean() + 0.02
    assert light.elbo_ > heavy.elbo_


def test_class_weights():
    weight = {0: 3.0, 2: 0.5}
    expected = fixed().fit(X, y, sample_weight=np.array([3.0, 1.0, 0.5])[y])
    given_ = fixed(class_weight=weight).fit(X, y)
    np.testing.assert_allclose(given_.predict_proba(X), expected.predict_proba(X), atol=1e-12)
    skewed = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y != 0)[:12]])
    A, b = X[skewed], y[skewed]
    counts = np.bincount(b)
    balanced = fixed(class_weight="balanced").fit(A, b)
    expected = fixed().fit(A, b, sample_weight=(len(b) / (3 * counts))[b])
    np.testing.assert_allclose(balanced.predict_proba(X), expected.predict_proba(X), atol=1e-9)
    # "balanced" goes by weight, so copies balance too.
    copies = 1 + np.arange(len(b)) % 3
    weighted = fixed(class_weight="balanced").fit(A, b, sample_weight=copies)
    repeated = fixed(class_weight="balanced").fit(np.repeat(A, copies, 0), np.repeat(b, copies))
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-9)
    text = fixed(class_weight={"a": 3.0}).fit(X, np.array(list("abc"))[y])
    assert text.predict_proba(X)[:, 0].mean() > fixed().fit(X, y).predict_proba(X)[:, 0].mean()


def test_inputs_are_not_changed():
    A, b, w = X.copy(), y.copy(), np.ones(60)
    for array in (A, b, w):
        array.flags.writeable = False
    for make in (fixed, minibatch, decoupled):
        make().fit(A, b, sample_weight=w).predict_proba(A)
    np.testing.assert_array_equal(A, X)
    fixed().fit(np.asfortranarray(X), y)
    fixed().fit(np.hstack([X, X])[:, ::2], y)


# --- predictions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
@pytest.mark.parametrize("temperature", [None, "auto", 0.3, 3.0])
def test_probabilities(make, temperature):
    clf = make(temperature=temperature).fit(X, y)
    far = np.vstack([X, 1e3 * X, -1e6 * X[:1]])
    p = clf.predict_proba(far)
    assert p.dtype == np.float64 and p.shape == (len(far), 3)
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-12, rtol=0)
    assert ((p >= 0) & (p <= 1)).all()
    np.testing.assert_array_equal(clf.classes_[p.argmax(1)], clf.predict(far))
    log_p = clf.predict_log_proba(far)
    assert np.isfinite(log_p).all()
    np.testing.assert_allclose(np.exp(log_p), p, atol=1e-12)
    np.testing.assert_array_equal(clf.decision_function(far), log_p)
    mean, variance = clf.predict_latent(far)
    assert mean.shape == variance.shape == (len(far), 3) and (variance > 0).all()
    assert mean.dtype == variance.dtype == np.float64 and np.isfinite(mean).all()
    # Far from all data the posterior is the prior.
    prior = np.atleast_1d(np.asarray(clf.kernel_.variance))[0]
    np.testing.assert_allclose(variance[-1], prior, rtol=1e-5)
    np.testing.assert_allclose(mean[-1], clf.prior_mean_, rtol=1e-5)


def test_certain_rows_have_finite_logs():
    A = np.array([[0.0], [1.0]])
    clf = fixed(kernel=RBF(1.0, 1e4), temperature=0.01).fit(
        np.repeat(A, 50, 0), [0] * 50 + [1] * 50
    )
    assert np.isfinite(clf.predict_log_proba(A)).all()
    assert np.isfinite(clf.decision_function(A)).all()


def test_the_temperature_never_changes_the_class():
    A, b = toy(80, 4, gap=1.0, seed=3)
    at = np.random.default_rng(0).uniform(-4, 4, (500, 2))
    settings_ = {"kernel": RBF(1.5, 4.0), "random_state": 0, "max_epochs": 10}
    pure = GPClassifier(temperature=None, **settings_).fit(A, b)
    p = pure.predict_proba(at)
    for temperature in ("auto", 3.0, 0.2, 8):
        clf = GPClassifier(temperature=temperature, **settings_).fit(A, b)
        np.testing.assert_array_equal(clf.predict(at), pure.predict(at))
        expected = apply_temperature(torch.tensor(p), clf.temperature_).numpy()
        np.testing.assert_allclose(clf.predict_proba(at), expected, atol=1e-9)
        assert temperature == "auto" or clf.temperature_ == temperature
    assert pure.temperature_ == 1.0


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_no_temperature_is_the_posterior_predictive(make):
    clf = make(temperature=None).fit(X, y)
    mean, variance = (torch.tensor(a) for a in clf.predict_latent(X))
    expected = LIKELIHOOD.integral(mean, variance).numpy()
    np.testing.assert_allclose(clf.predict_proba(X), expected, atol=1e-6)
    assert clf.temperature_ == clf.variance_scale_ == 1.0


def test_draws():
    clf = fixed().fit(X, y)
    at = np.vstack([X[:3], [[9.0, 9.0]]])
    draws = clf.sample_latent(at, 20_000, random_state=0)
    assert draws.shape == (20_000, 4, 3) and draws.dtype == np.float64
    mean, variance = clf.predict_latent(at)
    error = np.sqrt(variance / 20_000)
    assert (np.abs(draws.mean(0) - mean) < 4.5 * error).all()
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.05)
    # Jointly: close points are drawn together, so differences are less noisy than the sum of parts.
    near = clf.sample_latent([[0.0, 0.0], [1e-3, 0.0]], 500, random_state=0)
    assert np.abs(near[:, 0] - near[:, 1]).max() < 0.2
    # Averaged over, the draws give the probabilities.
    p = LIKELIHOOD.prob(torch.tensor(draws)).mean(0).numpy()
    np.testing.assert_allclose(p, clf.predict_proba(at), atol=0.01)


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_draws_of_every_family(make):
    clf = make().fit(X, y)
    draws = clf.sample_latent(X[:5], 4000, random_state=0)
    mean, variance = clf.predict_latent(X[:5])
    assert (np.abs(draws.mean(0) - mean) < 5 * np.sqrt(variance / 4000)).all()
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.15)
    again = clf.sample_latent(X[:5], 4000, random_state=0)
    np.testing.assert_array_equal(draws, again)
    assert clf.sample_latent(X[:5]).shape == (1, 5, 3)


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_the_elbo_of_the_training_data(make):
    weight = 0.5 + np.arange(60) % 3
    clf = make(temperature="auto").fit(X, y, sample_weight=weight)
    assert clf.elbo(X, y, weight) == pytest.approx(clf.elbo_, rel=1e-6)
    assert clf.elbo(X, (y + 1) % 3, weight) < clf.elbo_
    with_class = make(class_weight={0: 2.0}).fit(X, y)
    assert with_class.elbo(X, y, np.where(y == 0, 2.0, 1.0)) == pytest.approx(
        with_class.elbo_, rel=1e-6
    )


@pytest.mark.parametrize("make", [fixed, decoupled])
def test_calibrate(make):
    A, b = toy(300, gap=1.0, seed=2)
    clf = make().fit(A[:60], b[:60])
    before, labels = clf.predict_proba(A[60:]), clf.predict(A[60:])
    assert clf.calibrate(A[60:], b[60:]) is clf
    assert clf.temperature_ != 1.0 and 1 / 8 <= clf.temperature_ <= 8
    after = clf.predict_proba(A[60:])
    rows = np.arange(240)
    assert -np.log(after[rows, b[60:]]).mean() < -np.log(before[rows, b[60:]]).mean()
    if make is fixed:
        np.testing.assert_array_equal(clf.predict(A[60:]), labels)
    copies = np.arange(240) % 3
    weighted = clf.calibrate(A[60:], b[60:], sample_weight=copies).temperature_
    clf.calibrate(np.repeat(A[60:], copies, 0), np.repeat(b[60:], copies))
    assert clf.temperature_ == pytest.approx(weighted, rel=1e-3)
    clf.calibrate(A[60:61], b[60:61])
    assert abs(np.log(clf.temperature_)) < 0.3  # one row hardly moves it


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [c for cases in KERNEL_CASES.values() for c in cases], ids=repr)
def test_every_kernel(kernel):
    A, b = toy(45, 3, 3)
    rest, points = fixed(kernel=kernel).fit(A, b), torch.tensor(A)
    expected = kernel(points, points)
    np.testing.assert_allclose(rest.kernel_(points, points), expected, rtol=1e-9, atol=1e-12)
    learned = GPClassifier(kernel, max_epochs=8, temperature=None).fit(A, b)
    assert type(learned.kernel_) is type(kernel)
    assert regret(learned, 45, 3, 3) < 0.65 and np.isfinite(learned.elbo_)
    coarse = decoupled(kernel=kernel).fit(A, b)
    assert np.isfinite(coarse.predict_proba(A)).all()


@pytest.mark.parametrize("kind", [RBF, Matern52, RationalQuadratic, Linear])
def test_open_parameters_come_from_the_data(kind):
    clf = GPClassifier(kind(), max_epochs=8, temperature=None).fit(1e4 * X, y)
    scales = np.asarray(clf.kernel_.lengthscale)
    assert scales.shape == (2,) and (scales > 1e2).all() and clf.kernel_.variance > 0
    half = fixed(kernel=kind(variance=2.0)).fit(X, y)
    assert half.kernel_.variance == pytest.approx(2.0)


def test_one_kernel_per_class():
    clf = GPClassifier(shared_kernel=False, max_epochs=12, temperature=None).fit(X, y)
    assert isinstance(clf.kernel_, list) and len(clf.kernel_) == 3
    assert all(isinstance(k, RBF) for k in clf.kernel_) and len(set(clf.kernel_)) == 3
    assert regret(clf) < 0.15
    assert isinstance(GPClassifier(max_epochs=3).fit(X, y).kernel_, RBF)
    assert minibatch(shared_kernel=False).fit(X, y).sample_latent(X[:2]).shape == (1, 2, 3)


@dataclass(frozen=True)
class Cosine(Kernel):
    """A kernel as a user would write it."""

    lengthscale: Positive = None
    variance: Positive = None

    def __call__(self, X, Z):
        angle = (X.unsqueeze(1) - Z) / self.parameter("lengthscale", X)
        return self.parameter("variance", X) * torch.cos(angle).mean(-1)

    def diag(self, X):
        return self.parameter("variance", X).expand(len(X))

    @property
    def stationary(self):
        return True


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_a_kernel_of_the_users_own(make):
    clf = make(kernel=Cosine() + RBF(), learn_hyperparameters=True).fit(X, y)
    assert regret(clf) < 0.25 and "Cosine" in repr(clf.kernel_)
    again = pickle.loads(pickle.dumps(clf))
    np.testing.assert_array_equal(again.predict_proba(X), clf.predict_proba(X))


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [None, "tight", "collapsed", "augmented"])
def test_every_bound(bound):
    for make in (fixed, minibatch, decoupled):
        clf = make(bound=bound).fit(X, y)
        assert regret(clf) < 0.3 and np.isfinite(clf.elbo_)


def test_the_tightest_bound_is_the_default_and_the_highest():
    elbo = {b: fixed(bound=b, tol=1e-6).fit(X, y).elbo_ for b in (None, "exact", "tight")}
    assert elbo[None] == elbo["exact"] > elbo["tight"]
    for b in ("collapsed", "augmented"):
        elbo[b] = fixed(bound=b, tol=1e-6).fit(X, y).elbo_
    assert elbo["tight"] > elbo["collapsed"] >= elbo["augmented"] - 1e-6


@pytest.mark.parametrize("covariance", ["full", "shared", "diagonal", "auto"])
@pytest.mark.parametrize("n_inducing", [None, 10, "auto"])
def test_every_covariance(covariance, n_inducing):
    clf = fixed(covariance=covariance, n_inducing=n_inducing).fit(X, y)
    assert regret(clf) < (0.15 if covariance in ("full", "auto") else 0.4)
    n = len(clf.inducing_points_)
    assert n == 60 if n_inducing != 10 else n <= 10
    assert np.isfinite(clf.predict_latent(X)[1]).all() and np.isfinite(clf.elbo_)


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
@pytest.mark.parametrize("inducing", ["kmeans", "greedy", "random", X[::6] + 0.1])
def test_every_way_to_place_inducing_points(make, inducing):
    clf = make(inducing=inducing, n_inducing=10).fit(X, y)
    assert regret(clf) < (0.35 if make is decoupled else 0.15) and clf.inducing_points_.shape == (
        10,
        2,
    )
    if not isinstance(inducing, str):
        np.testing.assert_allclose(clf.inducing_points_, inducing, rtol=1e-9)
        as_list = make(inducing=inducing.tolist(), n_inducing=3).fit(X, y)
        assert len(as_list.inducing_points_) == 10  # the array says how many


def test_inducing_points_move_if_asked_to():
    start = X[::6] + 0.1
    still = minibatch(inducing=start, learn_inducing=False).fit(X, y)
    moved = minibatch(inducing=start, learn_inducing=True).fit(X, y)
    np.testing.assert_allclose(still.inducing_points_, start, rtol=1e-9)
    assert np.abs(moved.inducing_points_ - start).max() > 0.01


def test_repeated_rows_are_one_inducing_point():
    clf = fixed(n_inducing=None).fit(np.repeat(X, 3, 0), np.repeat(y, 3))
    assert len(clf.inducing_points_) == 60
    assert len(fixed(n_inducing=500).fit(X, y).inducing_points_) == 60


@pytest.mark.parametrize("batch_size", [None, 1, 7, 60, 1000, "auto"])
def test_every_batch_size(batch_size):
    clf = fixed(batch_size=batch_size, max_epochs=20).fit(X, y)
    assert regret(clf) < 0.2
    if batch_size in (None, 60, 1000, "auto"):
        expected = fixed(max_epochs=20).fit(X, y).predict_proba(X)
        np.testing.assert_array_equal(clf.predict_proba(X), expected)
    assert regret(decoupled(batch_size=batch_size).fit(X, y)) < 0.3


def test_prior_means():
    for value in (0.0, -2, [0.0, 1.0, -1.0], np.float32(0.5)):
        clf = fixed(prior_mean=value).fit(X, y)
        np.testing.assert_allclose(clf.prior_mean_, np.broadcast_to(value, 3))
    learned = GPClassifier(max_epochs=20, temperature=None).fit(X, y)
    assert learned.prior_mean_.shape == (3,) and len(set(learned.prior_mean_)) == 3
    common = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y != 0)[:8]])
    skewed = GPClassifier(max_epochs=40, temperature=None).fit(X[common], y[common])
    assert skewed.prior_mean_.argmax() == 0
    eager = fixed(prior_mean=[3.0, -3.0, -3.0]).fit(X, y)
    assert eager.predict([[100.0, 100.0]]) == [0]


@pytest.mark.parametrize("covariance", ["full", "shared"])
def test_precisions_agree(covariance):
    A, b = toy(1100, gap=2.0)
    settings_ = {"covariance": covariance, "inducing": A[:15], "batch_size": 200, "max_epochs": 10}

    def difference(jitter: float | None) -> float:
        p, q = (
            fixed(dtype=dtype, options=FitOptions(jitter=jitter), **settings_)
            .fit(A, b)
            .predict_proba(A)
            for dtype in ("float32", "float64")
        )
        return np.abs(p - q).max()

    assert 0 < difference(1e-5) < 2e-4
    assert difference(None) < 0.05  # float32 needs more jitter, and so has another prior


def test_small_data_is_float64_in_any_case():
    a, b = (fixed(dtype=d).fit(X, y) for d in ("float32", "float64"))
    np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(X))


def test_devices():
    expected = fixed().fit(X, y).predict_proba(X)
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        np.testing.assert_array_equal(fixed(device=device).fit(X, y).predict_proba(X), expected)


def test_the_paper():
    clf = GPClassifier.paper()
    params = clf.get_params()
    expected = {
        "bound": "augmented",
        "prior_mean": 0.0,
        "temperature": None,
        "n_inducing": 200,
        "inducing": "kmeans",
        "learn_inducing": False,
        "batch_size": 200,
        "covariance": "full",
        "learn_hyperparameters": True,
        "shared_kernel": True,
        "likelihood": "logistic-softmax",
        "options__prediction": "mc",
        "options__kernel_prior": 0.0,
    }
    assert {name: params[name] for name in expected} == expected
    assert isinstance(clf, GPClassifier) and GPClassifier.paper(n_inducing=9).n_inducing == 9
    small = GPClassifier.paper(n_inducing=10, batch_size=20, max_epochs=20, random_state=0)
    small.fit(X, y)
    assert isinstance(small.kernel_, RBF) and small.kernel_.lengthscale.shape == (2,)
    assert small.temperature_ == 1.0 and (small.prior_mean_ == 0).all()
    assert regret(small) < 0.3 and len(small.inducing_points_) == 10


def test_the_papers_kernel_starts_at_variance_one_and_the_median_distance():
    start = GPClassifier.paper(learn_hyperparameters=False, n_inducing=10, max_epochs=1).fit(X, y)
    scaled = X / X.std(0)
    distance = np.sqrt(((scaled[:, None] - scaled) ** 2).sum(-1))
    median = torch.tensor(distance[np.triu_indices(60, 1)]).median().item()
    np.testing.assert_allclose(start.kernel_.lengthscale, median * X.std(0), rtol=1e-6)
    assert start.kernel_.variance == pytest.approx(1.0)


def test_the_papers_inducing_points_are_k_means_of_all_rows():
    # Of unequal classes, of which centres within classes would have others.
    clf = GPClassifier.paper(n_inducing=10, batch_size=20, max_epochs=1, random_state=0)
    with pytest.warns(ConvergenceWarning):
        clf.fit(X, y)
    rows = ordered(X, y, None)
    data = torch.tensor((rows.gathered().X - X.mean(0)) / X.std(0))
    seed = torch.Generator().manual_seed(seed_of(0))
    expected = kmeans(data, torch.ones(len(y)), 10, seed).numpy() * X.std(0) + X.mean(0)
    np.testing.assert_allclose(clf.inducing_points_, expected, rtol=1e-6)


def test_a_curved_boundary_is_learned():
    """Two interleaved arcs, which no line can part."""
    rng = np.random.default_rng(0)
    t = rng.uniform(0, np.pi, 120)
    side = np.arange(120) % 2
    A = np.stack([np.cos(t) * (1 - 2 * side) + side, np.sin(t) * (1 - 2 * side) + side / 2], 1)
    A += 0.1 * rng.standard_normal(A.shape)
    clf = GPClassifier(RBF(0.5, 10.0), random_state=0).fit(A[:80], side[:80])
    assert clf.score(A[80:], side[80:]) > 0.95
    p = clf.predict_proba(A[80:])[np.arange(40), side[80:]]
    assert -np.log(p).mean() < 0.15


# --- whatever comes ------------------------------------------------------------------------------


@st.composite
def data_sets(draw):
    """Odd scales, duplicates, constant columns, tiny N, many classes."""
    n, d = draw(st.integers(1, 14)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    A = rng.standard_normal((n, d))
    if draw(st.booleans()):
        A = np.rint(A)
    A *= 10.0 ** np.array([draw(st.sampled_from([-300, -30, -6, 0, 6, 30, 140])) for _ in range(d)])
    A += draw(st.sampled_from([0.0, 0.0, 1.0, -1e6]))
    if draw(st.booleans()):
        A[:, draw(st.integers(0, d - 1))] = draw(st.sampled_from([0.0, 3.0, 1e200]))
    if draw(st.booleans()):
        A = A[rng.integers(0, n, n)]
    b = rng.integers(0, draw(st.integers(1, 10)), n)
    weight = draw(st.sampled_from([None, "odd"]))
    if weight is not None:
        weight = 10.0 ** rng.integers(-6, 6, n) * (rng.random(n) < 0.8)
    return A, b, weight


@pytest.mark.filterwarnings("ignore:sample_weight averages:UserWarning")  # they are odd
@settings(max_examples=40)
@given(data_sets(), st.sampled_from(["coupled", "full", "minibatch", "decoupled"]))
def test_any_data_is_fitted_or_refused(case, kind):
    A, b, weight = case
    clf = {
        "coupled": lambda: GPClassifier(max_epochs=8, random_state=0),
        "full": lambda: fixed(temperature="auto", n_inducing=None, max_epochs=20),
        "minibatch": lambda: minibatch(n_inducing=3, batch_size=4, max_epochs=3),
        "decoupled": lambda: decoupled(temperature="auto", kernel=None, n_inducing=5),
    }[kind]()
    try:
        clf.fit(A, b, sample_weight=weight)
    except ValueError as error:
        assert any(word in str(error) for word in ("one class", "X overflows", "sample_weight"))
        return
    p = clf.predict_proba(A)
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-12)
    assert np.isfinite(clf.elbo_) and np.isfinite(clf.inducing_points_).all()
    assert 1 / 8 <= clf.temperature_ <= 1000
    assert set(clf.predict(A)) <= set(b)


def test_kernels_by_name(tmp_path):
    """The words of the command line; what a name leaves open comes from the data."""
    X, y = toy(80)
    named, given = (
        GPClassifier(kernel, random_state=0).fit(X, y)
        for kernel in ("rbf*matern32 + linear", RBF() * Matern32() + Linear())
    )
    np.testing.assert_array_equal(named.predict_proba(X), given.predict_proba(X))
    assert named.get_params()["kernel"] == "rbf*matern32 + linear"
    named.save(tmp_path / "iris.conjugp")
    assert load(tmp_path / "iris.conjugp").get_params()["kernel"] == "rbf*matern32 + linear"
    with pytest.raises(ValueError, match="kernel: 'magic' is none of auto, rbf, matern12"):
        GPClassifier("rbf + magic").fit(X, y)
    auto, none = (GPClassifier(kernel, random_state=0).fit(X, y) for kernel in ("auto", None))
    assert auto.kernel_ == none.kernel_
