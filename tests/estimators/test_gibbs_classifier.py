"""GibbsGPClassifier: scikit-learn's contract, what a fit promises, and the posterior it samples."""

from __future__ import annotations

import inspect
import json
import pickle
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import expit
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from test_bad_input import BAD_DATA

import conjugp
from conjugp import GibbsGPClassifier, GPClassifier
from conjugp._estimators import gibbs_classifier as gibbs
from conjugp._estimators.problem import problem_of
from conjugp._fit.options import seed_of
from conjugp._persistence.files import FileFormatError, read
from conjugp._sampler import costs
from conjugp._sampler import parallel as chains
from conjugp._sampler.prediction import SampledModel
from conjugp.kernels import RBF, Linear, Matern52
from conjugp.plotting import plot_ranks, plot_trace
from faces import decoupled, fitted_attributes, fixed, refuses_rows, regret, toy
from reference.wine_gibbs import FILE, wine
from samplers import Stop, quick

# Few draws are enough for most of what is tested here, and never enough to say they are.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

X, y = toy(24)


def draws_of(clf: GibbsGPClassifier) -> np.ndarray:
    return np.stack([d.g for d in clf._model.draws])


@parametrize_with_checks([quick(kernel=None, prior_mean="auto", n_samples=3)])
def test_estimator(estimator, check):
    check(estimator)


# --- the face -----------------------------------------------------------------------------------


def test_frames_and_labels_of_any_kind():
    expected = quick().fit(X, y).predict_proba(X)
    frame = pd.DataFrame(X, columns=["height", "width"])
    for labels in (np.array(["ant", "bee", "cat"]), np.array([-7, 0, 40]), np.array([1.5, 2, 9])):
        if labels.dtype.kind == "f":
            labels = labels.astype(int)
        clf = quick().fit(frame, labels[y])
        assert_array_equal(clf.classes_, labels)
        assert_array_equal(clf.predict_proba(frame), expected)
        assert_array_equal(clf.predict(frame), labels[expected.argmax(1)])
    assert clf.feature_names_in_.tolist() == ["height", "width"]
    series = pd.Series(["ant", "bee", "cat"])[y].reset_index(drop=True)
    assert_array_equal(quick().fit(frame, series).predict_proba(frame), expected)


def test_two_classes():
    clf = quick().fit(X, y == 1)
    assert clf.classes_.tolist() == [False, True]
    p = clf.predict_proba(X)
    assert p.shape == (24, 2)
    assert_allclose(clf.decision_function(X), np.log(p[:, 1] / p[:, 0]))
    assert regret(clf, 24, labels=[False, True, False]) < 0.25


def test_pickle_and_clone():
    clf = quick(n_inducing=6).fit(X, y)
    again = pickle.loads(pickle.dumps(clf))
    assert_array_equal(again.predict_proba(X), clf.predict_proba(X))
    assert_array_equal(again.sample_latent(X, 3, 1), clf.sample_latent(X, 3, 1))
    assert again.diagnostics_ == clf.diagnostics_
    assert_array_equal(again.to_arviz()["posterior"]["f"], clf.to_arviz()["posterior"]["f"])
    other = clone(clf)
    assert fitted_attributes(other) == []
    assert_array_equal(other.fit(X, y).predict_proba(X), clf.predict_proba(X))


def test_pickles_hold_the_draws_once():
    clf = quick(n_samples=200).fit(X, y)
    clf.predict_proba(X)
    assert draws_of(clf).nbytes < len(pickle.dumps(clf)) < 1.3 * draws_of(clf).nbytes


def test_pipelines_and_searches():
    pipe = make_pipeline(StandardScaler(), quick(n_samples=8))
    assert regret(pipe.fit(X, y), 24) < 0.4
    search = GridSearchCV(quick(n_samples=6), {"prior_mean": [-1.0, 0.0]}, cv=2).fit(X, y)
    assert search.best_estimator_.predict_proba(X).shape == (24, 3)


@pytest.mark.slow
def test_cross_validation_in_processes_that_have_no_more_to_give():
    clf = quick(n_jobs=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # joblib's, about loops in loops
        warnings.simplefilter("ignore", ConvergenceWarning)
        alone = cross_val_predict(clf, X, y, cv=2, method="predict_proba")
        beside = cross_val_predict(clf, X, y, cv=2, method="predict_proba", n_jobs=2)
    assert_allclose(beside, alone, rtol=1e-9)


def test_only_what_a_sampler_can_do():
    assert list(inspect.signature(GibbsGPClassifier.fit).parameters) == [
        "self",
        "X",
        "y",
        "checkpoint",
    ]
    assert not hasattr(GibbsGPClassifier, "partial_fit")
    assert not hasattr(GibbsGPClassifier, "calibrate")
    for name in ("predict_latent", "sample_latent", "predict_proba", "predict"):
        theirs = inspect.signature(getattr(GPClassifier, name))
        assert str(inspect.signature(getattr(GibbsGPClassifier, name))) == str(theirs)


def test_loaded_only_when_asked_for():
    code = """
import sys
sys.modules["polyagamma"] = None
import conjugp
from conjugp import *
assert "conjugp._estimators.gibbs_classifier" not in sys.modules
try:
    conjugp.GibbsGPClassifier
except ImportError as error:
    assert 'needs polyagamma: pip install "conjugp[gibbs]"' in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Gibbs'"):
        _ = conjugp.Gibbs


def test_the_same_seed_gives_the_same_draws():
    first = quick(random_state=3).fit(X, y)
    assert_array_equal(draws_of(quick(random_state=3).fit(X, y)), draws_of(first))
    assert not np.array_equal(draws_of(quick(random_state=4).fit(X, y)), draws_of(first))
    rng = np.random.RandomState(3)
    a, b = quick(random_state=rng).fit(X, y), quick(random_state=rng).fit(X, y)
    assert_array_equal(draws_of(a), draws_of(first))
    assert not np.array_equal(draws_of(b), draws_of(a))
    a, b = quick(random_state=None).fit(X, y), quick(random_state=None).fit(X, y)
    assert not np.array_equal(draws_of(b), draws_of(a))


def test_the_order_of_rows_does_not_matter():
    order = np.random.default_rng(0).permutation(24)
    first, second = quick().fit(X, y), quick().fit(X[order], y[order])
    assert_array_equal(draws_of(first), draws_of(second))
    assert_array_equal(first.predict_proba(X), second.predict_proba(X))


def test_working_units_are_the_same_model():
    """The kernel between inputs is what the user's kernel is between the user's inputs."""
    A = X * (1e3, 1e-4) + (5.0, 0.1)
    kernel = RBF((2e3, 3e-4), 3.0) + Matern52(None, 2.0)
    for one in (kernel, [kernel, RBF(500.0, 1.0), Matern52((1.0, 1.0), 2.0)]):
        clf = quick(kernel=one).fit(A, y)
        target, found = clf._model.target, clf.inducing_points_
        assert_allclose(found[np.lexsort(found.T)], A[np.lexsort(A.T)], rtol=1e-12)
        Z = torch.tensor(found)
        shown = clf.kernel_ if isinstance(clf.kernel_, list) else [clf.kernel_]
        for user, work in zip(shown, target.kernels, strict=True):
            inputs = torch.tensor(target.X)
            assert_allclose(user(Z, Z), work(inputs, inputs), rtol=1e-8)
    assert_allclose(shown[0].parts[0].lengthscale, (2e3, 3e-4), rtol=1e-12)
    assert_allclose(shown[1].lengthscale, 500.0, rtol=1e-12)


@pytest.mark.parametrize("hyperparameters", ["fixed", "fit", "sample"])
def test_duplicates_and_contradictions(hyperparameters):
    """Equal inputs share a latent value, with equal labels and with different ones."""
    A = np.concatenate([X, X[:6], X[:6], X[:3]])
    b = np.concatenate([y, y[:6], (y[:6] + 1) % 3, y[:3]])
    clf = quick(hyperparameters=hyperparameters).fit(A, b)
    assert clf.inducing_points_.shape == (24, 2)
    data = clf._model.target.data
    assert len(data.y) == 39 and np.bincount(data.y).tolist() == np.bincount(b).tolist()
    assert np.isfinite(clf.predict_proba(A)).all()
    y_ = clf.to_arviz()["log_likelihood"]["y"].values
    assert y_.shape == (2, 20, 39)
    assert_array_equal(y_[:, :, 24:30], y_[:, :, :6])


def test_the_api_page_has_every_argument_method_and_attribute():
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    section = page.split("## GibbsGPClassifier\n")[1].split("\n## ")[0]
    methods = [name for name in vars(GibbsGPClassifier) if not name.startswith(("_", "set_"))]
    attributes = re.findall(r"^    (\w+_)(?:, (\w+_))? : ", str(GibbsGPClassifier.__doc__), re.M)
    names = [*methods, *(name for pair in attributes for name in pair if name)]
    for name in {*names} - {"n_features_in_", "feature_names_in_"}:
        assert re.search(rf"`[^`\n]*\b{name}\b", section), name
    for name, parameter in inspect.signature(GibbsGPClassifier).parameters.items():
        (row,) = (r for r in section.splitlines() if re.match(rf"\|[^|]*`{name}`", r))
        default = "" if name in ("on_interrupt", "random_state", "verbose") else parameter.default
        assert str(default) in row.split("|")[2], row


# --- what goes in -------------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch):
    def work(*args, **kwargs):
        pytest.fail("the fit began")

    monkeypatch.setattr(gibbs, "sample_chains", work)
    monkeypatch.setattr(gibbs, "seconds", work)
    monkeypatch.setattr(GPClassifier, "fit", work)


PARAMETERS = [
    ("kernel", "magic"),
    ("kernel", []),
    ("kernel", [RBF(), None, RBF()]),
    ("kernel", [RBF(), RBF()]),
    ("kernel", RBF((1.0, 2.0, 3.0), 1.0)),
    ("hyperparameters", "learn"),
    ("hyperparameters", None),
    ("prior_mean", "zero"),
    ("prior_mean", [0.0, 1.0]),
    ("prior_mean", np.nan),
    ("prior_mean", None),
    ("augmentation", "none"),
    ("n_inducing", 0),
    ("n_inducing", "auto"),
    ("n_inducing", 2.5),
    ("inducing", "grid"),
    ("inducing", np.zeros((4, 3))),
    ("inducing", np.full((4, 2), np.nan)),
    ("inducing", None),
    ("n_samples", 0),
    ("n_samples", 10.0),
    ("n_warmup", -1),
    ("n_chains", 0),
    ("n_chains", True),
    ("thin", 0),
    ("prior_scale", 0.0),
    ("prior_scale", np.inf),
    ("n_jobs", 0),
    ("n_jobs", 1.5),
    ("n_jobs", True),
    ("n_jobs", "all"),
    ("max_memory", 0),
    ("max_memory", 1e-9),
    ("on_interrupt", "stop"),
    ("random_state", "seed"),
    ("random_state", -1),
    ("verbose", -1),
]


@pytest.mark.parametrize(("name", "value"), PARAMETERS, ids=lambda v: re.sub(r"\s+", " ", str(v)))
def test_bad_parameters(no_work, name, value):
    clf = quick(**{name: value})
    match = "lengthscale" if isinstance(value, RBF) else name
    with pytest.raises((ValueError, TypeError), match=match):
        clf.fit(X, y)
    assert fitted_attributes(clf) == []


def test_one_kernel_per_class_cannot_be_fitted(no_work):
    with pytest.raises(ValueError, match="hyperparameters='fit' takes one kernel"):
        quick(kernel=[RBF(), RBF(), RBF()], hyperparameters="fit").fit(X, y)


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(no_work, case):
    bad_X, bad_y, error, match = BAD_DATA[case]
    clf = quick()
    with pytest.raises(error, match=match):
        clf.fit(bad_X, bad_y)
    assert fitted_attributes(clf) == []


@pytest.mark.parametrize("case", ["infinity", "one class", "too few labels", "no features"])
def test_a_failed_refit_leaves_the_old_fit(case):
    clf = quick().fit(pd.DataFrame(X, columns=["a", "b"]), y)
    attributes, p = fitted_attributes(clf), clf.predict_proba(pd.DataFrame(X, columns=["a", "b"]))
    with pytest.raises(ValueError):
        clf.fit(*BAD_DATA[case][:2])
    assert fitted_attributes(clf) == attributes
    assert_array_equal(clf.predict_proba(pd.DataFrame(X, columns=["a", "b"])), p)


METHODS = ("predict", "predict_proba", "predict_latent", "sample_latent", "decision_function")


@pytest.mark.parametrize("method", METHODS)
def test_bad_rows_to_predict(method):
    clf = quick().fit(X, y)
    call = getattr(clf, method)
    refuses_rows(
        call,
        X,
        (np.full((2, 2), np.inf), "X contains inf"),
        (np.array([["a", "b"]]), "X: the column 'x0' held numbers.*'a'.*; the column 'x1'"),
    )
    with pytest.raises(NotFittedError):
        getattr(GibbsGPClassifier(), method)(X)


def test_bad_numbers_afterwards():
    clf = quick().fit(X, y)
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="n_samples"):
            clf.sample_latent(X, bad)
        with pytest.raises(ValueError, match="n_traces"):
            clf.traces(bad)
    for name in ("to_arviz", "traces"):
        with pytest.raises(NotFittedError):
            getattr(GibbsGPClassifier(), name)()


finite = st.floats(-1e3, 1e3, allow_subnormal=False)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(finite, finite, st.integers(0, 2)), min_size=2, max_size=8),
    st.sampled_from([None, RBF(), Matern52(1.0, 100.0), Linear(), RBF() + Linear()]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from(["collapsed", "paper"]),
)
def test_finite_in_finite_out(rows, kernel, n_inducing, augmentation):
    A, b = np.array([row[:2] for row in rows]), np.array([row[2] for row in rows])
    b[:2] = 0, 1
    clf = quick(
        kernel=kernel, n_samples=3, n_warmup=2, n_inducing=n_inducing, augmentation=augmentation
    ).fit(A, b)
    for at in (A, A * 10 + 1, np.array([[1e9, -1e9], [0.0, 0.0]])):
        p = clf.predict_proba(at)
        assert_allclose(p.sum(1), 1.0, atol=1e-12)
        mean, variance = clf.predict_latent(at)
        assert np.isfinite(mean).all() and np.isfinite(variance).all() and (variance >= 0).all()
        assert np.isfinite(clf.sample_latent(at, 2, 0)).all()


def test_constant_and_huge_features():

    def beside(rows: np.ndarray) -> np.ndarray:
        return np.column_stack([rows, np.ones(len(rows)), 1e12 * rows[:, 0]])

    A = beside(X)
    clf = quick(kernel=None).fit(A, y)
    assert regret(clf, 24, units=beside) < 0.4
    far = A.copy()
    far[:, 3] = 1e200
    try:
        assert np.isfinite(clf.predict_proba(far)).all()
    except ValueError as error:
        assert "X overflows" in str(error)


def test_float32_rows_and_memory_maps(tmp_path):
    path = tmp_path / "X.npy"
    np.save(path, X.astype(np.float32))
    A = np.load(path, mmap_mode="r")
    clf = quick().fit(A, y)
    assert clf.predict_proba(A).dtype == np.float64 and regret(clf, 24) < 0.4
    assert_array_equal(clf.predict_proba(A), quick().fit(np.array(A), y).predict_proba(A))


# --- hyperparameters ----------------------------------------------------------------------------


def test_fixed_ones_stay():
    kernel = RBF((0.3, 20.0), 7.0)
    clf = quick(kernel=kernel, prior_mean=[0.0, -1.0, 2.0]).fit(X, y)
    assert_allclose(clf.kernel_.lengthscale, kernel.lengthscale, rtol=1e-12)
    assert clf.kernel_.variance == pytest.approx(7.0, rel=1e-12)
    assert_array_equal(clf.prior_mean_, [0.0, -1.0, 2.0])
    assert set(clf.diagnostics_) == {"log_likelihood_total", "f"}
    assert set(clf.to_arviz()["posterior"].data_vars) == {"f"}


def test_fitted_ones_are_those_of_a_variational_fit():
    clf = quick(kernel=None, prior_mean="auto", hyperparameters="fit").fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = GPClassifier(
            RBF(), n_inducing=24, covariance="full", temperature=None, random_state=seed_of(0)
        ).fit(X, y)
    assert_allclose(clf.kernel_.theta, theirs.kernel_.theta, atol=1e-4)
    assert_allclose(clf.prior_mean_, theirs.prior_mean_, atol=1e-4)


SOURCES = {
    "coupled": lambda: fixed(learn_hyperparameters=True, max_epochs=20, prior_mean="auto"),
    "decoupled": lambda: decoupled(),
    "one kernel per class": lambda: fixed(
        learn_hyperparameters=True, shared_kernel=False, max_epochs=20
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_from_a_fitted_classifier(source):
    A = X * (3.0, 40.0)
    theirs = SOURCES[source]().fit(A, y)
    clf = GibbsGPClassifier.from_classifier(theirs, n_samples=10, n_warmup=5, n_chains=2, n_jobs=1)
    assert clf.hyperparameters == "fixed" and clf.random_state == 0 and clf.n_samples == 10
    assert fitted_attributes(clf) == []
    clone(clf).fit(A, y)
    clf.fit(A, y)
    ours, given_ = ([k] if not isinstance(k, list) else k for k in (clf.kernel_, theirs.kernel_))
    assert len(ours) == len(given_) == (3 if source == "one kernel per class" else 1)
    for a, b in zip(ours, given_, strict=True):
        assert type(a) is type(b)
        assert_allclose(a.theta, b.theta, rtol=1e-12, atol=1e-12)
    assert_allclose(clf.prior_mean_, theirs.prior_mean_)
    assert np.mean(clf.predict(A) == theirs.predict(A)) > 0.8
    changed = GibbsGPClassifier.from_classifier(theirs, hyperparameters="sample", random_state=7)
    assert changed.hyperparameters == "sample" and changed.random_state == 7


def test_from_what_is_no_fitted_classifier():
    with pytest.raises(NotFittedError):
        GibbsGPClassifier.from_classifier(GPClassifier())
    clf = fixed().fit(X, y)
    clf.likelihood = "softmax" if "softmax" in conjugp.likelihoods.LIKELIHOODS else _Other()
    with pytest.raises(ValueError, match=r"likelihood.*logistic-softmax"):
        GibbsGPClassifier.from_classifier(clf)


class _Other(conjugp.likelihoods.LogisticSoftmax):
    name = "other"


def test_sampled_ones_move():
    clf = quick(hyperparameters="sample", prior_mean="auto", n_samples=30).fit(X, y)
    theta = np.stack([d.theta for d in clf._model.draws])
    assert len(np.unique(theta[:, :, 0, 0])) > 30
    assert set(clf.diagnostics_) == {"log_likelihood_total", "f", "kernel", "prior_mean"}
    posterior = clf.to_arviz()["posterior"]
    assert set(posterior.data_vars) == {"f", "lengthscale", "variance", "prior_mean"}
    # The kernel shown is at the mean of the logs, in the units of X.
    assert_allclose(
        np.log(clf.kernel_.lengthscale),
        np.log(posterior["lengthscale"]).mean(("chain", "draw")),
        rtol=1e-9,
    )
    assert_allclose(clf.prior_mean_, posterior["prior_mean"].mean(("chain", "draw")))
    given_mean = quick(hyperparameters="sample", prior_mean=-0.7).fit(X, y)
    assert "prior_mean" not in given_mean.diagnostics_
    assert_allclose(given_mean.prior_mean_, [-0.7] * 3)


@pytest.mark.slow
def test_sampled_ones_find_the_truth():
    """Labels from a model whose second feature does nothing, and a start that is far off."""
    rng = np.random.default_rng(3)
    A = rng.uniform(-2, 2, (120, 2)) * (1.0, 10.0)
    truth = RBF((0.8, 1e3), 16.0)
    K = truth(torch.tensor(A), torch.tensor(A)).numpy() + 1e-8 * np.eye(120)
    f = rng.standard_normal((3, 120)) @ np.linalg.cholesky(K).T
    p = expit(f) / expit(f).sum(0)
    labels = (rng.random(120) > p.cumsum(0)).sum(0)
    clf = GibbsGPClassifier(
        RBF((2.0, 20.0), 4.0),
        hyperparameters="sample",
        prior_mean=0.0,
        prior_scale=2.0,
        random_state=0,
        **{"n_samples": 150, "n_warmup": 150, "n_chains": 2, "n_jobs": 1},
    ).fit(A, labels)
    posterior = clf.to_arviz()["posterior"]
    first, second = np.log(posterior["lengthscale"].values.reshape(-1, 2)).T
    variance = np.log(posterior["variance"].values.ravel())
    assert abs(first.mean() - np.log(0.8)) < 3 * first.std() and first.std() < 0.7
    assert second.mean() - first.mean() > np.log(10.0) + 1.0
    assert abs(variance.mean() - np.log(16.0)) < 3 * variance.std() and variance.std() < 1.5


@pytest.mark.parametrize("n_inducing", [5, 24, 100, None])
def test_inducing_points(n_inducing):
    for strategy in ("kmeans", "greedy", "random"):
        clf = quick(n_inducing=n_inducing, inducing=strategy).fit(X, y)
        full = n_inducing != 5
        assert (clf._model.target.Z is None) == full
        assert clf.inducing_points_.shape == (24 if full else 5, 2)
        if full or strategy != "kmeans":  # rows
            nearest = np.abs(clf.inducing_points_[:, None] - X).max(2).min(1)
            assert nearest.max() < 1e-12
    own = quick(inducing=X[:3] + 0.5).fit(X, y)
    assert_allclose(own.inducing_points_, X[:3] + 0.5, rtol=1e-12)


# --- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_inducing", [None, 7])
def test_predictions_follow_from_the_public_draws(n_inducing):
    """Everything in the user's units: latents from ArviZ, kernel_, prior_mean_, inputs."""
    A, new = X * (5.0, 0.1), (X[:9] + 0.3) * (5.0, 0.1)
    clf = quick(kernel=RBF((6.0, 0.2), 4.0), n_inducing=n_inducing, n_samples=60).fit(A, y)
    f = clf.to_arviz()["posterior"]["f"].values.reshape(120, 3, -1)
    Z, x, kernel = torch.tensor(clf.inducing_points_), torch.tensor(new), clf.kernel_
    K = kernel(Z, Z).numpy()
    K = K + 1e-6 * np.diag(K).mean() * np.eye(len(K))
    weights = np.linalg.solve(K, kernel(Z, x).numpy())  # (M, n)
    m = clf.prior_mean_[:, None] + (f - clf.prior_mean_[:, None]) @ weights
    v = kernel.diag(x).numpy() - (kernel(x, Z).numpy() * weights.T).sum(1)
    mean, variance = clf.predict_latent(new)
    assert_allclose(mean, m.mean(0).T, rtol=1e-6, atol=1e-8)
    assert_allclose(variance, (m.var(0) + v).T, rtol=1e-5)
    z = np.random.default_rng(0).standard_normal((400, *m.shape))
    s = expit(m + np.sqrt(v) * z)
    p = (s / s.sum(2, keepdims=True)).mean((0, 1)).T
    assert_allclose(clf.predict_proba(new), p, atol=0.015)


def test_joint_draws_have_the_moments_of_predict_latent():
    clf = quick(n_samples=50).fit(X, y)
    new = np.concatenate([X[:3] + 0.5, X[:1] + 0.5])
    f = clf.sample_latent(new, 20_000, random_state=0)
    mean, variance = clf.predict_latent(new)
    assert f.shape == (20_000, 4, 3)
    assert np.abs((f.mean(0) - mean) / np.sqrt(variance)).max() < 4.5 / np.sqrt(20_000)
    assert_allclose(f.var(0), variance, rtol=4.5 * np.sqrt(3 / 20_000))
    assert_array_equal(f[:, 0], f[:, 3])
    assert_array_equal(clf.sample_latent(new, 5, 1), clf.sample_latent(new, 5, 1))
    assert not np.array_equal(clf.sample_latent(new, 5, 1), clf.sample_latent(new, 5, 2))


def test_rows_do_not_depend_on_each_other():
    clf = quick().fit(X, y)
    p = clf.predict_proba(X)
    assert_allclose(clf.predict_proba(X[7:8]), p[7:8], rtol=1e-12)
    assert_allclose(clf.predict_proba(X[::-1]), p[::-1], rtol=1e-12)
    assert_allclose(np.exp(clf.predict_log_proba(X)), p)


def test_the_training_log_likelihood_is_in_the_order_of_the_rows():
    A = np.concatenate([X, X[:4]])
    b = np.concatenate([y, (y[:4] + 1) % 3])
    names = np.array(["ant", "bee", "cat"])
    order = np.random.default_rng(3).permutation(28)
    clf = quick().fit(A[order], names[b[order]])
    data = clf.to_arviz()
    assert data["observed_data"]["y"].values.tolist() == names[b[order]].tolist()
    f = data["posterior"]["f"].values  # (chain, draw, C, point)
    for row in range(28):
        point = np.abs(clf.inducing_points_ - A[order][row]).sum(1).argmin()
        s = expit(f[:, :, :, point])
        expected = np.log(s[:, :, b[order][row]] / s.sum(2))
        assert_allclose(data["log_likelihood"]["y"].values[:, :, row], expected, rtol=1e-6)
    total = data["sample_stats"]["log_likelihood_total"]
    assert_allclose(data["log_likelihood"]["y"].sum("row"), total, rtol=1e-6)


def test_frames_give_arviz_their_names():
    frame = pd.DataFrame(X, columns=["height", "width"])
    data = quick(hyperparameters="sample").fit(frame, y).to_arviz(log_likelihood=False)
    assert data["posterior"]["lengthscale"].sel(feature="width").shape == (2, 20)
    assert data["constant_data"]["X"].dims == ("point", "feature")


# --- warnings, progress, costs ------------------------------------------------------------------


def test_chains_that_have_not_mixed_are_named():
    with pytest.warns(ConvergenceWarning, match=r"have not mixed.*Raise n_warmup and n_samples"):
        clf = quick(n_samples=20, kernel=RBF(1.5, 100.0)).fit(X, y)
    assert not clf.converged_ and clf.rhat_ > 1.01
    with pytest.warns(ConvergenceWarning, match="3 draws of a chain are too few to tell"):
        clf = quick(n_samples=3).fit(X, y)
    assert np.isnan(clf.rhat_) and np.isfinite(clf.predict_proba(X)).all()


def test_chains_that_have_mixed_say_nothing():
    clf = quick(n_samples=1500, n_warmup=50, n_chains=4, kernel=RBF(1.5, 0.5), prior_mean=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf.fit(X, y)
    assert clf.converged_ and clf.rhat_ <= 1.01
    assert min(clf.ess_bulk_, clf.ess_tail_) > 400
    assert clf.n_iter_ == 1550
    assert clf.diagnostics_["f"]["rhat"] <= clf.rhat_


def test_progress_of_every_chain(capsys):
    quick(verbose=1, n_samples=10, thin=2).fit(X, y)
    out, err = capsys.readouterr()
    assert re.search(
        r"2 chains of 30 sweeps, 3 classes at 24 points: about 1 second and [\d.e-]+ GB", out
    )
    assert "chain 1: 100%" in err and "chain 2: 100%" in err and "30/30" in err
    quick(verbose=0).fit(X, y)
    assert capsys.readouterr() == ("", "")


def test_memory_is_said_and_bounded(no_work):
    """1,000 draws of 4 chains of 3 classes at 24 points, and small matrices."""
    clf = quick(n_samples=1000, n_chains=4, max_memory=2e-3)
    with pytest.raises(ValueError, match=r"needs 0\.0 GB \(4 chains of 1000 draws of 3 classes"):
        clf.fit(X, y)
    problem = problem_of(clf, X, y, 0)
    schedule = chains.Schedule(4, 1000, 10, 1, 0)
    size = costs.gigabytes(problem.target, schedule, 1)
    assert_allclose(size, 8e-9 * (4 * 1000 * 3 * 24 + 5 * 24**2), rtol=1e-12)
    more = costs.gigabytes(problem.target, replace(schedule, n_samples=2000), 4)
    assert_allclose(more, 8e-9 * (4 * 2000 * 3 * 24 + 4 * 5 * 24**2), rtol=1e-12)


def test_a_long_run_is_announced(monkeypatch):
    monkeypatch.setattr(gibbs, "LONG_SECONDS", 1e-6)
    monkeypatch.setattr(costs, "SPARSE_INDUCING", 10)
    with pytest.warns(UserWarning) as caught:
        quick().fit(X, y)
    (text,) = (str(w.message) for w in caught if w.category is UserWarning)
    assert re.fullmatch(
        r"this will take about 1 second: a sweep costs n_classes · n_rows³ / 3 operations, here "
        r"3 · 24³ / 3\. n_inducing=10 samples a sparse model instead, in about 1 second",
        text,
    )
    assert caught[0].filename == __file__
    with pytest.warns(
        UserWarning, match=r"n_classes · n_rows · n_inducing² .* 3 · 24 · 6²\. Fewer"
    ):
        quick(n_inducing=6).fit(X, y)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 second"),
        (45.3, "46 seconds"),
        (100, "2 minutes"),
        (7200, "2.0 hours"),
        (1e6, "11.6 days"),
    ],
)
def test_durations_in_words(seconds, text):
    assert costs.duration(seconds) == text


def test_plots_of_a_fit():
    matplotlib.use("Agg")
    clf = quick(hyperparameters="sample", n_samples=40).fit(X, y)
    assert list(clf.traces(1)) == ["log likelihood"]
    traces = clf.traces()
    assert len(traces) == 6 and all(x.shape == (2, 40) for x in traces.values())
    for plot in (plot_trace, plot_ranks):
        figure = plot(clf, n_traces=4)
        titles = [ax.get_title(loc="left") for ax in figure.axes]
        assert [t for t in titles if t] == list(clf.traces(4))
        matplotlib.pyplot.close(figure)


# --- interruptions and checkpoints --------------------------------------------------------------


@pytest.fixture
def small_stretches(monkeypatch):
    monkeypatch.setattr(chains, "_STRETCH_SECONDS", 0.0)


def test_an_interrupted_fit_keeps_its_draws(monkeypatch, small_stretches):
    whole = quick().fit(X, y)
    for how in ("raise", "return"):
        clf = quick(on_interrupt=how)
        with monkeypatch.context() as m:
            Stop(m, 2 * 17)
            if how == "raise":
                with pytest.raises(KeyboardInterrupt):
                    clf.fit(X, y)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    assert clf.fit(X, y) is clf
        assert_array_equal(draws_of(clf), draws_of(whole)[:, :7])
        assert clf.n_iter_ == 17
        assert_allclose(clf.predict_proba(X).sum(1), 1.0)
        assert clf.to_arviz()["posterior"]["f"].shape == (2, 7, 3, 24)
        pickle.loads(pickle.dumps(clf)).predict(X)


@pytest.mark.parametrize("how", ["raise", "return"])
def test_before_the_first_draw_nothing_changes(monkeypatch, small_stretches, how):
    for clf in (quick(on_interrupt=how), quick(on_interrupt=how).fit(X, y)):
        attributes = fitted_attributes(clf)
        with monkeypatch.context() as m:
            Stop(m, 2 * 8)
            with pytest.raises(KeyboardInterrupt):
                clf.fit(X[:, ::-1] + 1, (y + 1) % 3)
        assert fitted_attributes(clf) == attributes
    assert_array_equal(clf.predict_proba(X), quick().fit(X, y).predict_proba(X))


def test_a_second_ctrl_c_does_not_lose_the_draws(monkeypatch, small_stretches, request):
    """It comes while the draws up to the first one are judged."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    original = gibbs.diagnose

    def impatient(model):
        signal.raise_signal(signal.SIGINT)
        return original(model)

    monkeypatch.setattr(gibbs, "diagnose", impatient)
    Stop(monkeypatch, 2 * 15)
    clf = quick()
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X, y)
    assert np.isfinite(clf.predict_proba(X)).all()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_hyperparameters_are_fitted(monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    clf = quick(hyperparameters="fit", on_interrupt="return")
    monkeypatch.setattr(GPClassifier, "fit", stop)
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X, y)
    assert fitted_attributes(clf) == []


@pytest.mark.parametrize("hyperparameters", ["fixed", "fit", "sample"])
def test_a_checkpointed_fit_goes_on(monkeypatch, small_stretches, tmp_path, hyperparameters):
    changes = {"hyperparameters": hyperparameters, "prior_mean": "auto", "n_inducing": 8}
    changes |= {"n_samples": 10, "n_warmup": 5}
    whole = quick(**changes).fit(X, y)
    path = tmp_path / "run"
    for after in (2 * 3, 2 * 6):
        with monkeypatch.context() as m:
            Stop(m, after)
            with pytest.raises(KeyboardInterrupt):
                quick(**changes).fit(X, y, checkpoint=path)
    clf = quick(**changes).fit(X, y, checkpoint=path)
    assert_array_equal(draws_of(clf), draws_of(whole))
    assert_array_equal(clf.predict_proba(X), whole.predict_proba(X))
    # More draws, from where it ended.
    longer = quick(**{**changes, "n_samples": 13})
    with monkeypatch.context() as m:
        Stop(m, 2 * 3)
        longer.fit(X, y, checkpoint=str(path))
    assert_array_equal(draws_of(longer), draws_of(quick(**{**changes, "n_samples": 13}).fit(X, y)))


def test_checkpoints_that_do_not_belong(tmp_path):
    path = tmp_path / "run"
    quick().fit(X, y, checkpoint=path)
    for clf, A, b in [
        (quick(random_state=1), X, y),
        (quick(kernel=RBF(1.4, 4.0)), X, y),
        (quick(thin=2), X, y),
        (quick(n_inducing=5), X, y),
        (quick(hyperparameters="sample"), X, y),
        (quick(), X + np.eye(24, 2) * 1e-9, y),
        (quick(), X, np.roll(y, 1)),
    ]:
        with pytest.raises(ValueError, match=r"checkpoint.*belongs to other data, settings"):
            clf.fit(A, b, checkpoint=path)
        assert fitted_attributes(clf) == []
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileFormatError, match="run is damaged"):
        quick().fit(X, y, checkpoint=path)


@pytest.mark.parametrize("state", [None, np.random.RandomState(1)])
def test_a_checkpoint_keeps_a_seed_that_was_drawn(monkeypatch, small_stretches, tmp_path, state):
    path = tmp_path / "run"
    with monkeypatch.context() as m:
        Stop(m, after=6)
        with pytest.raises(KeyboardInterrupt):
            quick(random_state=state).fit(X, y, checkpoint=path)
    seed = read(path)[1]["seed"]
    found = quick(random_state=state).fit(X, y, checkpoint=path)
    assert read(path)[1]["seed"] == seed == found._model.seed


def test_checkpoints_are_checked_before_any_work(no_work, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint: .* is a folder"):
        quick().fit(X, y, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="checkpoint: there is no folder"):
        quick().fit(X, y, checkpoint=tmp_path / "no" / "run")
    with pytest.raises(TypeError, match="checkpoint must be a path"):
        quick().fit(X, y, checkpoint=3.5)


# --- the posterior ------------------------------------------------------------------------------


def batch_errors(clf: GibbsGPClassifier, A: np.ndarray, n_batches: int) -> dict[str, np.ndarray]:
    """Standard errors of p, mean and variance from the means of batches of every chain."""
    found = []
    at = clf._rows(A)
    n = clf.n_samples // n_batches
    for d in clf._model.draws:
        for i in range(n_batches):
            part = SampledModel(clf._model.target, [d[i * n : (i + 1) * n]], clf._model.likelihood)
            m, v = part.latent(at)
            found.append((part.untempered(at).numpy(), m.numpy(), (v + m * m).numpy()))
    p, m, m2 = (np.array(x) for x in zip(*found, strict=True))
    influence = m2 - 2 * m.mean(0) * m  # the delta method
    return {
        name: x.std(0, ddof=1) / np.sqrt(len(x))
        for name, x in (("p", p), ("mean", m), ("variance", influence))
    }


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", ["collapsed", "paper"])
def test_wine_agrees_with_a_long_run_of_another_program(augmentation):
    """Within Monte Carlo error: tests/reference/wine_gibbs.py shares no code with conjugp."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    reference = {k: np.array(v) for k, v in stored.items() if isinstance(v, list)}
    d = wine()
    # In the order of the paper draws hang together for longer, and so must batches be.
    n_samples, n_batches = (1200, 6) if augmentation == "collapsed" else (4000, 4)
    clf = GibbsGPClassifier(
        RBF(d.lengthscale, 1.0),
        hyperparameters="fixed",
        prior_mean=0.0,
        augmentation=augmentation,
        n_samples=n_samples,
        n_warmup=200,
        n_jobs=1,
        random_state=0,
    ).fit(d.X, d.y)
    p = clf.predict_proba(d.X_test)
    mean, variance = clf.predict_latent(d.X_test)
    errors = batch_errors(clf, d.X_test, n_batches)
    for name, found in (("p", p), ("mean", mean), ("variance", variance)):
        z = (found - reference[name]) / np.hypot(errors[name], reference[f"{name}_se"])
        assert np.abs(z).max() < 5.5, name
        assert np.sqrt(np.square(z).mean()) < 1.7, name
    if augmentation == "collapsed":
        assert np.abs(p - reference["p"]).max() < 0.01
        assert_allclose(variance, reference["variance"], rtol=0.15)
