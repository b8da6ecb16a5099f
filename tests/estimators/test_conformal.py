"""Conformal sets against the definition, and their coverage against the exact law."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import betabinom
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.datasets import load_iris
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from conjugp import GPClassifier
from conjugp.conformal import ConformalClassifier
from faces import fixed, toy

METHODS = ["aps", "lac"]


class Rows(ClassifierMixin, BaseEstimator):
    """Predicts the rows it is given: they are the probabilities."""

    def __init__(self, labels=(0, 1, 2)):
        self.labels = labels

    @property
    def classes_(self):
        return np.array(self.labels)

    def fit(self, X, y):
        return self

    def __sklearn_is_fitted__(self):
        return True

    def predict_proba(self, X):
        return np.asarray(X)

    def predict(self, X):
        return self.classes_[np.argmax(X, axis=1)]


def draw(seed: int, n: int, C: int = 3, concentration: float = 0.7):
    """Probabilities that are wrong (too sure), and labels."""
    rng = np.random.default_rng(seed)
    q = rng.dirichlet(np.full(C, concentration), n)
    p = q**2 / (q**2).sum(1, keepdims=True)
    return p, (q.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=C - 1)


def score(p: np.ndarray, c: int, method: str) -> float:
    """By definition."""
    return 1 - p[c] if method == "lac" else sum(sorted((x for x in p if x > p[c]), reverse=True))


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 60),
    alpha=st.sampled_from([0.05, 0.1, 0.2, 0.3, 0.5, 0.9]),
    method=st.sampled_from(METHODS),
    conditional=st.booleans(),
    digits=st.sampled_from([1, 16]),
)
def test_sets_by_definition(seed, n, alpha, method, conditional, digits):
    p, y = draw(seed, n)
    p = np.round(p, digits)  # many ties
    new = np.round(draw(seed + 1, 20)[0], digits)
    conformal = ConformalClassifier(Rows(), method=method, class_conditional=conditional).fit(p, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mask = conformal.predict_set(new, alpha)
    scores = np.array([score(p[i], y[i], method) for i in range(n)])
    for c in range(3):
        own = np.sort(scores[y == c] if conditional else scores)
        # The least k of n + 1 that are a share of 1 − alpha, in whole numbers.
        k = next(
            k for k in range(len(own) + 2) if 100 * k >= (len(own) + 1) * round(100 - 100 * alpha)
        )
        limit = math.inf if k > len(own) else own[k - 1]
        assert_array_equal(mask[:, c], [score(row, c, method) <= limit for row in new])


@pytest.mark.parametrize("method", METHODS)
def test_coverage_follows_the_exact_law(method):
    """Of m new rows the number covered is beta-binomial, if no scores are equal."""
    n, m, alpha, trials = 39, 50, 0.1, 300
    k = math.ceil((n + 1) * (1 - alpha))
    law = betabinom(m, k, n + 1 - k)
    found = []
    for seed in range(trials):
        # Twelve classes of even probabilities: the mass before a class is rarely 0.
        p, y = draw(seed, n + m, 12, 3.0)
        sets = ConformalClassifier(Rows(range(12)), method=method).fit(p[:n], y[:n])
        mask = sets.predict_set(p[n:], alpha)
        found.append(mask[np.arange(m), y[n:]].sum())
    error = law.std() / math.sqrt(trials)
    assert np.mean(found) > law.mean() - 4 * error
    assert np.mean(found) < law.mean() + 4 * error
    assert np.std(found) == pytest.approx(law.std(), rel=0.2)


@pytest.mark.parametrize("method", METHODS)
def test_class_conditional_sets_cover_every_class(method):
    """A class that the classifier hardly knows is covered too, which marginal sets do not do."""
    rng = np.random.default_rng(0)
    n, alpha = 4000, 0.1
    y = rng.choice(3, n, p=[0.47, 0.47, 0.06])
    p = 0.02 + 0.98 * rng.dirichlet([2.0, 2.0, 0.3], n)
    p[np.arange(n), y] += np.where(y == 2, 0.1, 1.5)
    p /= p.sum(1, keepdims=True)
    half = n // 2

    def coverage(**settings):
        sets = ConformalClassifier(Rows(), method=method, **settings).fit(p[:half], y[:half])
        held = sets.predict_set(p[half:], alpha)[np.arange(half), y[half:]]
        return np.array([held[y[half:] == c].mean() for c in range(3)])

    assert coverage()[2] < 0.7
    assert (coverage(class_conditional=True) > 0.83).all()


def test_aps_is_never_empty_and_lac_the_smallest():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(10, 0.5), 4000)  # the smallest if they are the true probabilities
    y = (p.cumsum(1) < rng.random((4000, 1))).sum(1).clip(max=9)
    sizes = {}
    for method in METHODS:
        sets = ConformalClassifier(Rows(range(10)), method=method).fit(p[:2000], y[:2000])
        sizes[method] = sets.predict_set(p[2000:], 0.2).sum(1)
    assert sizes["aps"].min() >= 1
    assert sizes["lac"].mean() <= sizes["aps"].mean()


def test_too_few_rows_bring_all_classes_and_a_warning():
    p, y = draw(0, 8)
    sets = ConformalClassifier(Rows()).fit(p, y)
    with pytest.warns(UserWarning, match="fewer than 9 rows"):
        assert sets.predict_set(p, 0.1).all()
    p, y = draw(0, 9)
    assert np.isfinite(ConformalClassifier(Rows()).fit(p, y).thresholds(0.1)).all()


def test_a_class_without_rows_is_in_every_set():
    p, y = draw(1, 200)
    keep = y != 1
    sets = ConformalClassifier(Rows(), class_conditional=True).fit(p[keep], y[keep])
    with pytest.warns(UserWarning, match="1 of 3 classes"):
        mask = sets.predict_set(p, 0.1)
    assert mask[:, 1].all() and not mask[:, [0, 2]].all()
    assert_array_equal(np.isinf(sets_thresholds(sets)), [False, True, False])


def sets_thresholds(sets: ConformalClassifier) -> np.ndarray:
    with pytest.warns(UserWarning):
        return sets.thresholds(0.1)


def test_smaller_alpha_larger_sets():
    p, y = draw(2, 500)
    for method in METHODS:
        sets = ConformalClassifier(Rows(), method=method).fit(p, y)
        masks = [sets.predict_set(p, alpha) for alpha in (0.3, 0.1, 0.02)]
        for small, large in pairwise(masks):
            assert (small <= large).all()


def test_around_a_gaussian_process():
    X, y = toy(150, 3)
    names = np.array(["ant", "bee", "cat"])[y]
    clf = fixed().fit(X[:50], names[:50])
    sets = ConformalClassifier(clf).fit(X[50:100], names[50:100])
    assert sets.estimator_ is clf and list(sets.classes_) == ["ant", "bee", "cat"]
    mask = sets.predict_set(X[100:], alpha=0.1)
    assert mask.dtype == bool and mask.shape == (50, 3)
    assert mask[np.arange(50), y[100:]].mean() > 0.8
    assert_allclose(sets.predict_proba(X), clf.predict_proba(X))
    assert sets.score(X, names) == clf.score(X, names)


def test_an_unfitted_estimator_is_fitted_to_the_other_rows():
    X, y = load_iris(return_X_y=True)
    sets = ConformalClassifier(GaussianNB(), random_state=0).fit(X, y)
    assert len(sets.scores_[0]) == 30
    assert sets.estimator_.class_count_.tolist() == [40, 40, 40]
    again = ConformalClassifier(GaussianNB(), random_state=0).fit(X, y)
    assert_array_equal(sets.predict_set(X), again.predict_set(X))
    assert cross_val_score(ConformalClassifier(GaussianNB(), random_state=0), X, y).mean() > 0.9


def test_a_frozen_estimator_survives_clone():
    X, y = load_iris(return_X_y=True)
    model = GaussianNB().fit(X[::2], y[::2])
    sets = clone(ConformalClassifier(FrozenEstimator(model))).fit(X[1::2], y[1::2])
    assert len(sets.scores_[0]) == 75
    assert_allclose(sets.predict_proba(X), model.predict_proba(X))


def test_a_class_with_one_row_is_fitted_not_held_out():
    X, y = load_iris(return_X_y=True)
    y = y.copy()
    y[0] = 7
    sets = ConformalClassifier(GaussianNB(), held_out=0.9, random_state=0).fit(X, y)
    assert list(sets.classes_) == [0, 1, 2, 7]


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, math.nan])
def test_bad_alpha_is_named(alpha):
    p, y = draw(0, 50)
    with pytest.raises(ValueError, match="alpha"):
        ConformalClassifier(Rows()).fit(p, y).predict_set(p, alpha)


def test_bad_arguments_are_named():
    p, y = draw(0, 50)
    with pytest.raises(ValueError, match="method"):
        ConformalClassifier(Rows(), method="raps").fit(p, y)
    with pytest.raises(ValueError, match="held_out"):
        ConformalClassifier(Rows(), held_out=1.0).fit(p, y)
    with pytest.raises(TypeError, match="predict_proba"):
        ConformalClassifier(LinearSVC()).fit(p, y)
    with pytest.raises(ValueError, match=r"not fitted to: \[5\]"):
        ConformalClassifier(Rows()).fit(p, np.where(y == 1, 5, y))
    with pytest.raises(ValueError, match="held out"):
        ConformalClassifier(GaussianNB(), held_out=0.01).fit(p[:4], y[:4])


# One of the checks casts NaN to labels.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@parametrize_with_checks([ConformalClassifier(LogisticRegression(), random_state=0)])
def test_scikit_learns_contract(estimator, check):
    check(estimator)


def test_the_docstring_example():
    X, y = load_iris(return_X_y=True)
    clf = GPClassifier(random_state=0).fit(X[::2], y[::2])
    mask = ConformalClassifier(clf).fit(X[1::4], y[1::4]).predict_set(X[3::4], alpha=0.1)
    assert mask.shape == (37, 3)
