"""Many classes and embeddings from the outside: class batches, rare classes, directions, no S."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sklearn.metrics import log_loss

from conjugp import FitOptions, GPClassifier
from conjugp._inference.adam import Adam, RowAdam
from conjugp.kernels import RBF, Normalised
from problems import generator


def centres(n: int, n_classes: int, n_features: int, noise: float, seed: int = 0):
    """Rows around one centre per class; every class has some."""
    rng = np.random.default_rng(seed)
    middle = rng.standard_normal((n_classes, n_features))
    y = np.r_[np.arange(n_classes), rng.integers(0, n_classes, n - n_classes)]
    return middle[y] + noise * rng.standard_normal((n, n_features)), y


def head(**changes) -> GPClassifier:
    usual = {"kernel": RBF(3.0, 30.0), "learn_hyperparameters": False, "random_state": 0}
    return GPClassifier(**{**usual, "n_inducing": 320, "covariance": "shared", **changes})


# --- class batches ------------------------------------------------------------------------------


def test_sampling_classes_hardly_costs_anything():
    X, y = centres(2400, 60, 8, 0.5)
    train, test = slice(0, 1600), slice(1600, None)
    loss = {}
    for class_batch in (None, 16):
        clf = head(class_batch=class_batch, batch_size=32, temperature=None)
        p = clf.fit(X[train], y[train]).predict_proba(X[test])
        loss[class_batch] = log_loss(y[test], p)
    assert loss[16] < 1.03 * loss[None]


def test_all_classes_are_the_sum_over_classes():
    X, y = centres(600, 12, 4, 0.4)
    a, b = (head(class_batch=n).fit(X, y).predict_proba(X) for n in (None, 12))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mean_training", ["map", "elbo"])
@pytest.mark.parametrize("bound", ["tight", "collapsed", "augmented"])
def test_every_bound_takes_class_batches(bound, mean_training):
    X, y = centres(500, 20, 4, 0.3)
    changes = {"batch_size": 32, "options": FitOptions(mean_training=mean_training)}
    score = {}
    for n in (None, 5):
        clf = head(bound=bound, class_batch=n, temperature=None, **changes)  # never moves a label
        score[n] = clf.fit(X, y).score(X, y)
    assert score[5] > 0.8 and abs(score[5] - score[None]) < 0.03


def test_rare_classes_are_not_forgotten():
    """Half of the classes have one or two rows: sampling finds those that the sum finds."""
    rng = np.random.default_rng(3)
    n_classes = 60
    counts = np.where(np.arange(n_classes) % 2, 30, 1 + np.arange(n_classes) % 4 // 2)
    middle = 3 * rng.standard_normal((n_classes, 6))
    y = np.repeat(np.arange(n_classes), counts)
    X = middle[y] + 0.4 * rng.standard_normal((len(y), 6))
    fresh = middle + 0.2 * rng.standard_normal((n_classes, 6))
    found = {}
    for class_batch in (None, 16):
        # All classes alike beforehand: their shares alone would make single rows unlikely.
        alike = {"prior_mean": -np.log(n_classes - 1), "temperature": None}
        clf = head(class_batch=class_batch, batch_size=32, n_inducing=400, **alike)
        clf.fit(X, y)
        assert len(np.unique(clf.predict(X))) == n_classes
        found[class_batch] = clf.predict(fresh) == np.arange(n_classes)
    rare = counts <= 2
    assert found[16][~rare].all()
    assert found[16][rare].mean() >= found[None][rare].mean() - 0.05 > 0.85


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_batch": 0}, "class_batch"),
        ({"class_batch": 2.5}, "class_batch"),
        ({"class_batch": 5, "likelihood": "softmax"}, "class_batch=5 needs"),
        ({"class_batch": 5, "inference": "mc-vi"}, "class_batch=5 needs"),
        ({"class_batch": 5, "shared_kernel": False}, "shared_kernel=True"),
    ],
)
def test_class_batches_that_cannot_be(changes, message):
    X, y = centres(60, 12, 2, 0.1)
    with pytest.raises(ValueError, match=message):
        GPClassifier(**changes).fit(X, y)


def test_thousands_of_classes_by_default():
    X, y = centres(4200, 2100, 8, 0.05)
    clf = head(n_inducing=400, temperature=None, max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two passes are not enough
        clf.fit(X, y)
    labels, p = clf.predict_topk(X[:50], 3)
    assert labels.shape == p.shape == (50, 3) and (np.diff(p, axis=1) <= 0).all()


# --- Adam on rows -------------------------------------------------------------------------------


def test_adam_on_all_rows_is_adam():
    x = torch.randn(7, 3, dtype=torch.float64, generator=generator())
    y = x.clone()
    whole, rows = Adam([x]), RowAdam(y)
    for i in range(5):
        g = torch.randn(7, 3, dtype=torch.float64, generator=generator(i))
        whole.descend([g], [0.1])
        rows.look(torch.arange(7), 0.1)
        rows.descend(g, 0.1, torch.ones(7).double())
    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_adam_on_some_rows_is_adam_with_zeros_for_the_others():
    x = torch.randn(5, 3, dtype=torch.float64, generator=generator())
    y = x.clone()
    whole, rows = Adam([x]), RowAdam(y)
    for i in range(300):
        index = torch.randperm(5, generator=generator(i))[:2]
        g = torch.randn(2, 3, dtype=torch.float64, generator=generator(i)) + 0.5
        dense = torch.zeros_like(x)
        dense[index] = g
        whole.descend([dense], [0.1])
        rows.look(index, 0.1)
        rows.descend(g, 0.1, torch.ones(2).double())
    y = rows.look(torch.arange(5), 0.1)
    # The bias corrections of missed steps are those of the last one.
    torch.testing.assert_close(x, y, rtol=0.02, atol=0.1)
    moved = (x - torch.randn(5, 3, dtype=torch.float64, generator=generator())).abs()
    assert moved.min() > 3


def test_adam_leaves_other_rows_alone():
    x = torch.randn(7, 3, dtype=torch.float64, generator=generator())
    before, adam = x.clone(), RowAdam(x)
    some = torch.tensor([5, 0])
    for _ in range(3):
        adam.look(some, 0.1)
        adam.descend(torch.ones(2, 3).double(), 0.1, torch.ones(2).double())
    others = torch.tensor([1, 2, 3, 4, 6])
    assert torch.equal(x[others], before[others]) and not adam.first[others].any()


# --- directions ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directions():
    """Classes are directions; lengths vary by a factor of ten and say nothing."""
    X, y = centres(900, 6, 24, 0.5, seed=1)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    X *= np.exp(np.random.default_rng(2).normal(0, 1.2, len(X)))[:, None]
    return X[:600], y[:600], X[600:], y[600:]


@pytest.fixture(scope="module")
def embedded(directions):
    X, y, _, _ = directions
    return GPClassifier(random_state=0).fit(X, y)


def test_the_default_recognises_directions(directions, embedded):
    _, _, X, y = directions
    assert isinstance(embedded.kernel_, Normalised) and embedded.kernel_.units is None
    assert embedded.score(X, y) > 0.95
    p = embedded.predict_proba(X)
    np.testing.assert_allclose(embedded.predict_proba(100 * X), p, atol=1e-4)


def test_a_kernel_of_directions_goes_where_kernels_go(directions, embedded):
    X, y, X_test, _ = directions
    p = embedded.predict_proba(X_test)
    again = pickle.loads(pickle.dumps(embedded))
    np.testing.assert_array_equal(again.predict_proba(X_test), p)
    given = GPClassifier(
        embedded.kernel_, covariance="shared", learn_hyperparameters=False, random_state=0
    ).fit(X, y)
    assert np.abs(given.predict_proba(X_test) - p).max() < 0.2
    assert given.kernel_ == embedded.kernel_
    warm = GPClassifier(warm_start=True, random_state=0).fit(X, y).fit(X, y)
    assert isinstance(warm.kernel_, Normalised)


def test_given_inducing_points_keep_their_place(directions):
    """Directions are seen from the user's origin, by inducing points as well as by rows."""
    X, y, X_test, y_test = directions
    Z = X[:320]
    clf = GPClassifier(inducing=Z, random_state=0).fit(X, y)
    assert isinstance(clf.kernel_, Normalised)
    np.testing.assert_allclose(clf.inducing_points_, Z, rtol=1e-4, atol=1e-4)
    assert clf.score(X_test, y_test) > 0.95
    assert clf.n_iter_ == 10  # passes of the final fit, not of those before it


def test_unit_length_is_seen(directions):
    """Rows of one length are directions already: nothing more to try."""
    X, y, _, _ = directions
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    clf = GPClassifier(random_state=0).fit(X, y)
    assert not isinstance(clf.kernel_, Normalised)


# --- the mode alone -----------------------------------------------------------------------------


def test_without_covariance_there_is_a_point():
    X, y = centres(400, 5, 3, 0.5)
    clf = head(covariance="none").fit(X, y)
    m, v = clf.predict_latent(X)
    assert not v.any() and clf.variance_scale_ == 0.0
    log_p = log_softmax(-np.log1p(np.exp(-m)), axis=1)
    tempered = log_softmax(log_p / clf.temperature_, axis=1)
    np.testing.assert_allclose(np.log(clf.predict_proba(X)), tempered, rtol=1e-5, atol=1e-9)
    draws = clf.sample_latent(X[:4], n_samples=3, random_state=0)
    np.testing.assert_array_equal(draws, np.broadcast_to(m[:4], (3, 4, 5)))
    # The log posterior: no entropy to speak of.
    w = clf._fitted.model.w.double().square().sum()
    expected = log_p[np.arange(len(y)), y].sum() - 0.5 * float(w)
    assert clf.elbo(X, y) == pytest.approx(expected, rel=1e-6)


def test_calibrate_without_covariance():
    X, y = centres(400, 5, 3, 0.5)
    clf = head(covariance="none", temperature=None).fit(X[:200], y[:200])
    assert clf.temperature_ == 1.0
    clf.calibrate(X[200:], y[200:])
    assert clf.variance_scale_ == 0.0 and clf.temperature_ != 1.0
