"""Bad input is refused with the argument's name, before any work, and breaks nothing."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.exceptions import NotFittedError

from conjugp import FitOptions, GPClassifier
from conjugp._fit.partial import Stream
from conjugp.kernels import RBF
from faces import decoupled, fitted_attributes, fixed, refuses_rows, toy

X, y = toy(24)


@pytest.fixture
def no_work(monkeypatch):
    """A fit that gets as far as working fails the test."""

    def work(*args, **kwargs):
        pytest.fail("the fit began")

    monkeypatch.setattr("conjugp._estimators.classifier.fit", work)
    monkeypatch.setattr(Stream, "learn", work)


def put(value: object, row: int = 3, column: int = 1) -> np.ndarray:
    bad = X.astype(object if isinstance(value, str) else float)
    bad[row, column] = value
    return bad


BAD_DATA = {
    "infinity": (put(np.inf), y, ValueError, r"X contains inf"),
    "-infinity": (put(-np.inf), y, ValueError, r"X contains inf"),
    "no rows": (X[:0], y[:0], ValueError, r"\bX\b.*0 sample"),
    "no features": (X[:, :0], y, ValueError, r"\bX\b.*0 feature"),
    "one dimension": (X[:, 0], y, ValueError, r"\bX\b.*2D"),
    "three dimensions": (X[:, :, None], y, ValueError, r"\bX\b.*dim"),
    "complex": (X + 1j, y, ValueError, r"\bX\b.*[Cc]omplex"),
    "sparse": (sparse.csr_matrix(X), y, TypeError, r"[Ss]parse.*\bX\b.*dense"),
    "sparse array": (sparse.coo_array(X), y, TypeError, r"[Ss]parse.*\bX\b.*dense"),
    "overflow": (put(1e308), y, ValueError, r"X overflows"),
    "overflow of the difference": (
        np.where(np.arange(48).reshape(24, 2) % 3 == 0, -1.7e308, 1.7e308),
        y,
        ValueError,
        r"X overflows",
    ),
    "too few labels": (X, y[:-1], ValueError, r"\bX\b.*\by\b.*inconsistent"),
    "too many labels": (X, np.append(y, 0), ValueError, r"\bX\b.*\by\b.*inconsistent"),
    "no labels": (X, None, ValueError, r"\by\b"),
    "missing label": (X, np.where(y == 1, np.nan, y), ValueError, r"y contains NaN"),
    "missing text label": (
        X,
        np.where(y == 1, None, y.astype(str).astype(object)),
        ValueError,
        r"\by\b",
    ),
    "one class": (X, np.zeros(24), ValueError, r"\by\b.*at least 2 classes.*one class"),
    "continuous": (X, X[:, 0], ValueError, r"\by\b.*Unknown label type"),
    "two label columns": (X, np.stack([y, y], 1), ValueError, r"\by\b"),
    "one row": (X[:1], y[:1], ValueError, r"\by\b.*one class"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_data(no_work, case):
    bad_X, bad_y, error, match = BAD_DATA[case]
    clf = fixed()
    with pytest.raises(error, match=match):
        clf.fit(bad_X, bad_y)
    assert fitted_attributes(clf) == []


@pytest.mark.parametrize("case", sorted(BAD_DATA.keys() - {"no rows"}))
def test_data_of_a_stream(no_work, case):
    """A batch of a stream is checked as the rows of a fit are."""
    bad_X, bad_y, error, match = BAD_DATA[case]
    clf = fixed()
    with pytest.raises(error, match=match):
        clf.fit_stream([(bad_X, bad_y)])
    assert fitted_attributes(clf) == []


def test_what_overflows_is_an_error_before_the_fit():
    """A constant feature keeps its scale, and roundings of so large a number are large."""
    A, b = toy(2000, 2)
    high = np.nextafter(np.float32(3e38), np.float32(0))
    A = np.column_stack([A, np.where(np.arange(2000) < 2, high, 3e38)]).astype(np.float32)
    seen: list[str] = []
    clf = GPClassifier(n_inducing=5, covariance="full", max_epochs=0.5, random_state=0)
    clf.set_params(options=FitOptions(callback=lambda p: seen.append(p.stage)))
    with pytest.raises(ValueError, match="X overflows"):
        clf.fit(A, b)
    assert not seen and not hasattr(clf, "classes_")


WEIGHTS = {
    "negative": (np.where(y == 1, -1.0, 1.0), r"sample_weight"),
    "nan": (np.where(y == 1, np.nan, 1.0), r"sample_weight contains NaN"),
    "infinite": (np.where(y == 1, np.inf, 1.0), r"sample_weight contains inf"),
    "zero": (np.zeros(24), r"sample_weight"),
    "one class left": ((y == 1) * 1.0, r"\by\b.*positive weight.*one class"),
    "short": (np.ones(23), r"sample_weight"),
    "two columns": (np.ones((24, 2)), r"[Ss]ample.?weight"),
    "text": (["much"] * 24, r"sample_weight|could not convert"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_sample_weight(no_work, case):
    weight, match = WEIGHTS[case]
    clf = fixed()
    with pytest.raises(ValueError, match=match):
        clf.fit(X, y, sample_weight=weight)
    assert fitted_attributes(clf) == []


PARAMETERS = [
    ("kernel", "magic"),
    ("kernel", 1.0),
    ("likelihood", "gaussian"),
    ("likelihood", 3),
    ("bound", "loose"),
    ("bound", 1),
    ("inference", "vi"),
    ("inference", None),
    ("inference", "ep"),
    ("n_inducing", 0),
    ("n_inducing", -3),
    ("n_inducing", 2.5),
    ("n_inducing", True),
    ("n_inducing", "many"),
    ("inducing", "grid"),
    ("inducing", np.zeros((4, 3))),
    ("inducing", np.zeros(2)),
    ("inducing", np.zeros((0, 2))),
    ("inducing", np.full((4, 2), np.nan)),
    ("inducing", [["a", "b"]]),
    ("inducing", None),
    ("learn_inducing", "yes"),
    ("learn_inducing", None),
    ("batch_size", 0),
    ("batch_size", 1.5),
    ("batch_size", "all"),
    ("learn_hyperparameters", "yes"),
    ("shared_kernel", None),
    ("covariance", "low-rank"),
    ("covariance", None),
    ("prior_mean", "zero"),
    ("prior_mean", [0.0, 1.0]),
    ("prior_mean", np.nan),
    ("prior_mean", [0.0, np.inf, 0.0]),
    ("prior_mean", None),
    ("prior_mean", ["a", "b", "c"]),
    ("prior_mean", {}),
    ("temperature", 0),
    ("temperature", -1.0),
    ("temperature", np.nan),
    ("temperature", np.inf),
    ("temperature", "hot"),
    ("temperature", [1.0]),
    ("temperature", True),
    ("max_epochs", 0),
    ("max_epochs", "all"),
    ("tol", -1e-3),
    ("tol", np.nan),
    ("tol", "small"),
    ("learning_rate", 0.0),
    ("learning_rate", np.inf),
    ("learning_rate", None),
    ("class_weight", "heavy"),
    ("class_weight", {0: -1.0}),
    ("class_weight", {0: np.nan}),
    ("class_weight", {0: np.inf}),
    ("class_weight", {0: "a"}),
    ("class_weight", [1.0, 1.0, 1.0]),
    ("class_weight", {0: 0.0, 1: 0.0, 2: 0.0}),
    ("warm_start", 2),
    ("device", "gpu"),
    ("device", None),
    ("dtype", "float16"),
    ("dtype", np.float32),
    ("random_state", "seed"),
    ("random_state", -1),
    ("verbose", -1),
    ("verbose", "loud"),
    ("options", {"min_step": 0.1}),
    ("options", FitOptions),
]


@pytest.mark.parametrize(("name", "value"), PARAMETERS, ids=lambda v: re.sub(r"\s+", " ", str(v)))
@pytest.mark.parametrize("make", [fixed, decoupled])
def test_parameters(no_work, make, name, value):
    clf = make(**{name: value})
    with pytest.raises((ValueError, TypeError), match=name):
        clf.fit(X, y)
    assert fitted_attributes(clf) == []


def test_the_message_shows_what_would_do(no_work):
    for name, value, hint in [
        ("bound", "loose", "tight.*collapsed.*augmented"),
        ("covariance", "low-rank", "full.*shared.*diagonal"),
        ("inducing", "grid", "kmeans.*greedy.*random"),
        ("likelihood", "gaussian", "logistic-softmax"),
        ("n_inducing", 0, "at least 1; got 0"),
        ("inducing", np.zeros((4, 3)), r"\(m, 2\).*\(4, 3\)"),
    ]:
        with pytest.raises(ValueError, match=hint):
            fixed(**{name: value}).fit(X, y)


def test_a_gpu_where_there_is_none(no_work, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ValueError, match=rf"device='{device}'.*CUDA"):
            fixed(device=device).fit(X, y)


@pytest.mark.parametrize("covariance", ["shared", "diagonal"])
def test_one_kernel_per_class_needs_full_covariances(no_work, covariance):
    with pytest.raises(ValueError, match="shared_kernel"):
        fixed(shared_kernel=False, covariance=covariance).fit(X, y)


def test_lengthscales_of_the_wrong_number(no_work):
    clf = fixed(kernel=RBF([1.0, 2.0, 3.0], 1.0))
    with pytest.raises(ValueError, match=r"lengthscale.*3"):
        clf.fit(X, y)
    assert fitted_attributes(clf) == []


# --- prediction ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> GPClassifier:
    return fixed().fit(X, y)


METHODS = [
    "predict",
    "predict_proba",
    "predict_log_proba",
    "predict_latent",
    "decision_function",
    "sample_latent",
]


@pytest.mark.parametrize("method", METHODS)
def test_prediction(model, method):
    call = getattr(model, method)
    refuses_rows(
        call,
        X,
        (np.hstack([X, X]), "X has 4 features.*expecting 2"),
        (put(np.inf), "X contains inf"),
        (put("red"), "X: the column .x[01]. held numbers .*holds texts now, such as .red. in row"),
    )
    with pytest.raises(NotFittedError):
        getattr(GPClassifier(), method)(X)


def test_not_fitted_yet():
    for method in ("elbo", "calibrate", "score"):
        with pytest.raises(NotFittedError):
            getattr(GPClassifier(), method)(X, y)


@pytest.mark.parametrize("method", ["elbo", "calibrate"])
def test_labelled_rows(model, method):
    call = getattr(model, method)
    before = model.temperature_
    for bad_X, bad_y, match in [
        (X, np.where(y == 1, 7, y), r"\by\b.*7"),
        (X, y[:-1], "inconsistent"),
        (X, None, r"\by\b"),
        (X, np.where(y == 1, np.nan, y), "y contains NaN"),
        (put(np.inf), y, "X contains inf"),
        (X[:, :1], y, "1 features"),
    ]:
        with pytest.raises(ValueError, match=match):
            call(bad_X, bad_y)
    with pytest.raises(ValueError, match="sample_weight"):
        call(X, y, sample_weight=-np.ones(24))
    with pytest.raises(ValueError, match=r"\by\b.*red"):
        call(X, np.where(y == 1, "red", "blue"))
    assert model.temperature_ == before


@pytest.mark.parametrize("n_samples", [0, -1, 1.5, "many"])
def test_number_of_draws(model, n_samples):
    with pytest.raises(ValueError, match="n_samples"):
        model.sample_latent(X, n_samples)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_far_away_rows_have_finite_probabilities(dtype):
    """Rows so far off that working precision cannot hold them."""
    A, b = toy(1100, gap=3.0)
    for clf in (fixed().fit(X, y), fixed(n_inducing=10, batch_size=200, max_epochs=2)):
        if not hasattr(clf, "classes_"):
            with pytest.warns(UserWarning):
                clf.fit(A, b)
        for far in (1e10, 1e25, 1e38, 1e60, 1e160, 1e300):
            if far > float(np.finfo(dtype).max):
                continue
            row = np.array([[far, -far], [0.0, far]], dtype=dtype)
            np.testing.assert_allclose(clf.predict_proba(row).sum(1), 1.0, atol=1e-12)


# --- partial_fit ---------------------------------------------------------------------------------


def test_partial_fit(no_work):
    clf = fixed()
    for classes, bad_X, bad_y, match in [
        (None, X, y, "classes must be given"),
        ([0], X, np.zeros(24), "classes.*at least 2"),
        ([0, 1], X, y, r"\by\b.*classes.*2"),
        ([0, 1, 2], put(np.inf), y, "X contains inf"),
        ([0, 1, 2], X, y[:-1], "inconsistent"),
        ([0, 1, 2], put(1e308), y, "X overflows"),
    ]:
        with pytest.raises(ValueError, match=match):
            clf.partial_fit(bad_X, bad_y, classes=classes)
        assert fitted_attributes(clf) == []


def test_partial_fit_after_the_first_call(monkeypatch):
    clf = fixed().partial_fit(X, y, classes=[0, 1, 2])
    expected = clf.predict_proba(X)
    with monkeypatch.context() as m:
        m.setattr(Stream, "learn", lambda *a, **k: pytest.fail("the fit began"))
        for kwargs, bad_X, bad_y, match in [
            ({"classes": [0, 1, 2, 3]}, X, y, "classes changed"),
            ({}, X, np.where(y == 1, 5, y), r"\by\b.*classes.*5"),
            ({}, X[:, :1], y, "1 features"),
            ({}, put(np.inf), y, "X contains inf"),
            ({"sample_weight": np.zeros(24)}, X, y, "sample_weight"),
        ]:
            with pytest.raises(ValueError, match=match):
                clf.partial_fit(bad_X, bad_y, **kwargs)
    np.testing.assert_array_equal(clf.predict_proba(X), expected)


# --- what was fitted before goes on working ------------------------------------------------------


@pytest.mark.parametrize("case", BAD_DATA)
def test_a_failed_refit_leaves_the_old_fit(case):
    bad_X, bad_y, error, _ = BAD_DATA[case]
    frame = pd.DataFrame(X, columns=["a", "b"])
    clf = fixed().fit(frame, y)
    expected, attributes = clf.predict_proba(frame), fitted_attributes(clf)
    if isinstance(bad_X, pd.DataFrame):
        bad_X = bad_X.assign(more=1.0).add_prefix("x")
    with pytest.raises(error):
        clf.fit(bad_X, bad_y)
    np.testing.assert_array_equal(clf.predict_proba(frame), expected)
    assert fitted_attributes(clf) == attributes
    assert clf.feature_names_in_.tolist() == ["a", "b"] and clf.n_features_in_ == 2


@pytest.mark.parametrize(
    ("name", "value"), [("prior_mean", [0.0, 1.0]), ("inducing", np.zeros((2, 2)))]
)
def test_a_failed_refit_on_other_features_leaves_the_old_fit(name, value):
    clf = fixed().fit(X, y)
    expected = clf.predict_proba(X)
    wide = np.hstack([X, X[:, :1]])
    clf.set_params(**{name: value})
    with pytest.raises(ValueError, match=name):
        clf.fit(wide, y)
    clf.set_params(**{name: fixed().get_params()[name]})
    np.testing.assert_array_equal(clf.predict_proba(X), expected)
    assert clf.fit(wide, y).n_features_in_ == 3
