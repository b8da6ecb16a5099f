"""FitOptions: validated, searchable, and each setting does what it says."""

from __future__ import annotations

import inspect
import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.utils.validation import check_is_fitted

from conjugp import FitOptions, GPClassifier
from faces import decoupled, fitted_attributes, fixed, minibatch, toy

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

X, y = toy(60)

OUT_OF_RANGE = {
    "prediction": ["exact", None, 1],
    "n_samples": [0, -1, 2.5, "many", True],
    "initial_variance": [0.0, -1.0, np.nan, np.inf, "big"],
    "conditional_variance": [0.0, -0.1, 1.1, np.nan, None, "all", True],
    "mean_training": ["mode", None],
    "mean_variance": [0.0, -1.0, np.nan, np.inf, "big"],
    "mean_learning_rate": [0.0, np.nan, np.inf, None],
    "n_covariance": [0, 1.5, None, "all"],
    "search": ["yes", None, 2],
    "step_exponent": [-0.1, 1.1, np.nan],
    "min_step": [0.0, 1.1, np.nan, None],
    "kernel_prior": [-1.0, np.nan, np.inf],
    "hold_out": [0.0, 0.6, np.nan],
    "jitter": [-1e-6, 0.1, np.nan, "small"],
    "chunk_size": [0, 2.5],
    "cache_mb": [-1, 0.5, None, "all"],
    "spool": ["/no/such/folder", 3, ["."]],
    "callback": [3, "print"],
    "checkpoint_every": [-1.0, np.nan, np.inf, "often"],
    "on_interrupt": ["ignore", None],
    "distributed": [True, "never", None],
    "local_steps": [0, 1.5],
}


def test_every_setting_has_a_case():
    assert set(OUT_OF_RANGE) == set(inspect.signature(FitOptions).parameters)


@pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in OUT_OF_RANGE.items() for v in values]
)
def test_out_of_range(monkeypatch, name, value):
    work = "conjugp._estimators.classifier.fit"
    monkeypatch.setattr(work, lambda *a: pytest.fail("the fit began"))
    clf = fixed(options=FitOptions(**{name: value}))
    with pytest.raises(ValueError, match=rf"options\.{name}\b"):
        clf.fit(X, y)
    with pytest.raises(ValueError, match=rf"options\.{name}\b"):
        clf.partial_fit(X, y, classes=[0, 1, 2])
    assert fitted_attributes(clf) == []


def test_edges_are_in_range():
    FitOptions(
        n_samples=1,
        n_covariance=1,
        step_exponent=0,
        min_step=1,
        kernel_prior=0,
        hold_out=0.5,
        jitter=0,
        chunk_size=np.int64(1),
        cache_mb=0,
        mean_variance=np.float32(1),
    ).validate()
    FitOptions(step_exponent=1.0).validate()


def test_parameters_are_reached_through_the_classifier():
    clf = GPClassifier(options=FitOptions(min_step=0.2))
    assert clf.get_params()["options__min_step"] == 0.2
    clf.set_params(options__min_step=0.3, options__prediction="qmc", tol=1e-2)
    assert clf.options.min_step == 0.3 and clf.options.prediction == "qmc" and clf.tol == 1e-2
    copy = clone(clf)
    assert copy.options is not clf.options
    assert copy.options.get_params() == clf.options.get_params()
    copy.set_params(options__min_step=0.4)
    assert clf.options.min_step == 0.3
    with pytest.raises(ValueError, match="no_such"):
        clf.set_params(options__no_such=1)


def test_printed_and_pickled():
    options = FitOptions(min_step=0.2)
    assert "min_step=0.2" in repr(options)
    assert pickle.loads(pickle.dumps(options)).get_params() == options.get_params()


def test_grid_search():
    grid = {"options__min_step": [0.05, 0.5], "options__step_exponent": [0.6, 1.0]}
    search = GridSearchCV(minibatch(temperature=None, options=FitOptions()), grid, cv=2)
    search.fit(X, y)
    assert set(search.best_params_) == set(grid)
    assert search.best_estimator_.options.min_step == search.best_params_["options__min_step"]
    check_is_fitted(search.best_estimator_)
    assert not np.isnan(search.cv_results_["mean_test_score"]).any()


def test_monte_carlo_predictions_agree_with_the_integral():
    clf = fixed(options=FitOptions(n_samples=4096)).fit(X, y)
    integral = clf.predict_proba(X)
    for method, tolerance in [("mc", 0.05), ("qmc", 0.003)]:
        clf.set_params(options__prediction=method)
        p = clf.predict_proba(X)
        np.testing.assert_allclose(p, integral, atol=tolerance)
        assert not np.array_equal(p, integral)
        np.testing.assert_array_equal(clf.predict_proba(X), p)  # the same draws every time
        np.testing.assert_allclose(clf.predict_proba(X[5:9]), p[5:9], atol=1e-14)


def test_more_draws_are_more_accurate():
    clf = fixed(options=FitOptions(prediction="mc", n_samples=8)).fit(X, y)
    few = clf.predict_proba(X)
    many = clf.set_params(options__n_samples=4096).predict_proba(X)
    exact = clf.set_params(options__prediction="integral").predict_proba(X)
    assert np.abs(many - exact).mean() < 0.2 * np.abs(few - exact).mean()


def test_chunks_and_caches_do_not_change_the_answer():
    expected = fixed().fit(X, y).predict_proba(X)
    small = fixed(options=FitOptions(chunk_size=7)).fit(X, y)
    np.testing.assert_allclose(small.predict_proba(X), expected, atol=1e-9)
    cached = decoupled(options=FitOptions(n_covariance=10)).fit(X, y).predict_proba(X)
    without = decoupled(options=FitOptions(n_covariance=10, cache_mb=0)).fit(X, y)
    np.testing.assert_array_equal(without.predict_proba(X), cached)


def test_jitter():
    """More of it blurs the kernel matrix, so the answer moves a little."""
    expected = fixed().fit(X, y).predict_proba(X)
    blurred = fixed(options=FitOptions(jitter=0.01)).fit(X, y).predict_proba(X)
    assert 1e-6 < np.abs(blurred - expected).max() < 0.1


def test_a_strong_kernel_prior_keeps_the_kernel():
    moved = []
    for strength in (0.0, 10.0, 100.0):
        options = FitOptions(kernel_prior=strength, initial_variance=1.0)
        clf = GPClassifier(max_epochs=15, temperature=None, random_state=0, options=options)
        moved.append(abs(np.log(clf.fit(X, y).kernel_.variance)))
    assert moved[0] > 2 * moved[1] > 4 * moved[2]


def test_mean_training_is_a_choice():
    modal = decoupled().fit(X, y)
    variational = decoupled(options=FitOptions(n_covariance=10, mean_training="elbo")).fit(X, y)
    assert variational.elbo_ != modal.elbo_
    assert (variational.predict(X) == modal.predict(X)).mean() > 0.9
    assert variational.n_iter_ > modal.n_iter_


def test_the_covariance_has_as_many_inducing_points_as_asked_for():
    few = decoupled(options=FitOptions(n_covariance=2)).fit(X, y)
    many = decoupled(options=FitOptions(n_covariance=20)).fit(X, y)
    assert len(few.inducing_points_) == len(many.inducing_points_)
    assert few.predict_latent(X)[1].mean() > many.predict_latent(X)[1].mean()


def test_search_is_a_choice():
    stages = {}
    for search in (True, False):
        clf = GPClassifier(
            covariance="shared",
            n_inducing=20,
            max_epochs=2,
            temperature=None,
            random_state=0,
            options=FitOptions(search=search),
        ).fit(X, y)
        stages[search] = {row["stage"] for row in clf.history_}
    assert stages[True] - stages[False] == {"search"} and "fit" in stages[False]
