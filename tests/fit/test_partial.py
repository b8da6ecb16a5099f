"""partial_fit and warm_start: learning that goes on."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch

from conjugp import FitOptions, GPClassifier
from conjugp._gp.features import basis, features
from conjugp._gp.model import coupled
from conjugp.kernels import RBF, Matern52
from faces import decoupled, fixed, regret, toy

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

X, y = toy(200, gap=4.0)
CLASSES = [0, 1, 2]


def streamed(clf: GPClassifier, size: int = 40, rounds: int = 1) -> GPClassifier:
    for _ in range(rounds):
        for i in range(0, len(X), size):
            clf.partial_fit(X[i : i + size], y[i : i + size], classes=CLASSES)
    return clf


def test_it_learns():
    A, b = toy(300, gap=4.0)
    clf = GPClassifier(random_state=0)
    scores = []
    for i in range(0, 200, 40):
        clf.partial_fit(A[i : i + 40], b[i : i + 40], classes=CLASSES)
        scores.append(clf.score(A[200:], b[200:]))
    assert scores[-1] > 0.9
    batch = GPClassifier(random_state=0).fit(A[:200], b[:200])
    assert scores[-1] >= batch.score(A[200:], b[200:]) - 0.03
    p = clf.predict_proba(A)
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-12)


def test_more_rows_make_it_surer():
    clf = fixed()
    variances = []
    for i in range(0, 200, 50):
        clf.partial_fit(X[i : i + 50], y[i : i + 50], classes=CLASSES)
        variances.append(clf.predict_latent(X)[1].mean())
    assert np.all(np.diff(variances) < 0)


def test_n_is_the_weight_seen_so_far():
    clf = fixed()
    for k in range(3):
        weight = np.full(40, 0.5 + k)
        clf.partial_fit(X[:40], y[:40], classes=CLASSES, sample_weight=weight)
        assert clf._stream.seen == pytest.approx(40 * sum(0.5 + j for j in range(k + 1)))
    assert clf.n_iter_ == 3 and len(clf.history_) == 3


def test_one_batch_is_a_fit():
    clf = fixed(n_inducing=60, bound="collapsed").partial_fit(X[:60], y[:60], classes=CLASSES)
    batch = fixed(bound="collapsed", tol=1e-6).fit(X[:60], y[:60])
    np.testing.assert_allclose(clf.predict_proba(X), batch.predict_proba(X), atol=5e-3)


def test_a_batch_adds_its_sites_and_keeps_those_before():
    """P is I plus the sites of all rows, and those of the first batch stay what they were."""
    clf = fixed(n_inducing=60, bound="collapsed").partial_fit(X[:60], y[:60], classes=CLASSES)
    before = clf._stream.state.q.P.clone()
    clf.partial_fit(X[60:80], y[60:80])
    added = clf._stream.state.q.P - before
    assert float(torch.linalg.eigvalsh(added).min()) > -1e-8
    sites = clf._labelled(X[60:80], y[60:80], None)
    b = basis(clf._stream.state.kernels, clf._stream.state.Z)
    A = features(b, sites.X).A[0]
    m, v = clf._fitted.model.latent(sites.X)
    theta = clf._fitted.model.likelihood.site(sites.y, m, v, "collapsed").precision
    expected = torch.einsum("mb,bc,nb->cmn", A, theta, A)
    torch.testing.assert_close(added, expected, rtol=0.02, atol=2e-3)


def unexplained(clf, Z, rows):
    """How many rows keep more than a thousandth of their prior variance, given those at Z."""
    Z, rows = torch.tensor(Z), torch.tensor(rows)
    K = clf.kernel_(Z, Z)
    K += 1e-6 * K.diagonal().mean() * torch.eye(len(Z))
    cross = clf.kernel_(Z, rows)
    prior = clf.kernel_.diag(rows)
    left = prior - (cross * torch.linalg.solve(K, cross)).sum(0)
    return int((left > 1e-3 * prior).sum())


def test_inducing_points_grow_up_to_the_limit():
    clf = fixed(n_inducing=50)
    numbers = []
    for i in range(0, 80, 20):
        clf.partial_fit(X[i : i + 20], y[i : i + 20], classes=CLASSES)
        numbers.append(len(clf.inducing_points_))
    # A row that the points before it explain does not become one.
    second = 20 + unexplained(clf, X[:20], X[20:40])
    assert 20 < second < 40
    assert numbers == [20, second, 50, 50]
    first = clf.inducing_points_[:20]
    assert {tuple(x) for x in np.round(first, 9)} == {tuple(x) for x in np.round(X[:20], 9)}


def test_new_points_leave_the_posterior_as_it_was():
    clf = fixed(n_inducing=100).partial_fit(X[:40], y[:40], classes=CLASSES)
    m, v = clf.predict_latent(X)
    stream = clf._stream
    data = clf._labelled(X[40:80], y[40:80], None)
    state = stream._grown(stream.state, data, FitOptions())
    assert len(state.Z) == 40 + unexplained(clf, X[:40], X[40:80])
    clf._fitted.model = coupled(state, stream.likelihood, stream.bound)
    m2, v2 = clf.predict_latent(X)
    np.testing.assert_allclose(m2, m, atol=1e-3)
    assert (v2 <= v + 1e-3).all()


def test_scales_come_from_the_first_call():
    clf = GPClassifier(random_state=0).partial_fit(X[:40], y[:40], classes=CLASSES)
    shift, scale, _ = clf._inputs.scaling
    clf.partial_fit(1e3 * X[40:80], y[40:80])
    np.testing.assert_array_equal(clf._inputs.scaling.shift, shift)
    np.testing.assert_array_equal(clf._inputs.scaling.scale, scale)
    assert np.isfinite(clf.predict_proba(X)).all()


def test_all_classes_are_there_before_their_rows():
    clf = GPClassifier(random_state=0)
    for c in range(3):  # one class at a time, and one that never comes
        rows = y == c
        clf.partial_fit(X[rows], y[rows], classes=[3, 2, 1, 0])
        p = clf.predict_proba(X)
        assert p.shape == (200, 4) and np.isfinite(p).all()
    assert clf.classes_.tolist() == [0, 1, 2, 3]
    assert regret(clf, 200, gap=4.0) < 0.65 and p[:, 3].max() < 0.5


def test_labels_of_text():
    names = np.array(["blue", "green", "red"])
    clf = fixed()
    for i in (0, 40):
        clf.partial_fit(X[i : i + 40], names[y[i : i + 40]], classes=names)
    assert set(clf.predict(X)) == set(names)
    assert regret(clf, 200, gap=4.0, labels=names) < 0.22


def test_the_temperature_waits_for_calibrate():
    clf = GPClassifier(random_state=0)
    for i in (0, 40):
        clf.partial_fit(X[i : i + 40], y[i : i + 40], classes=CLASSES)
        assert clf.temperature_ == 1.0
    found = clf.calibrate(X[150:], y[150:]).temperature_
    assert found != 1.0 and 1 / 8 <= found <= 8
    clf.partial_fit(X[80:120], y[80:120])
    assert clf.temperature_ == found


def test_a_fit_starts_afresh():
    clf = streamed(fixed())
    clf.fit(X[:60], y[:60])
    np.testing.assert_array_equal(
        clf.predict_proba(X), fixed().fit(X[:60], y[:60]).predict_proba(X)
    )


def test_on_from_a_fit():
    clf = GPClassifier(random_state=0).fit(X[:60], y[:60])
    v = clf.predict_latent(X[100:])[1]
    kernel = clf.kernel_
    clf.set_params(learn_hyperparameters=False).partial_fit(X[60:100], y[60:100])
    assert clf._stream.seen == pytest.approx(100.0)
    assert len(clf.inducing_points_) >= 60
    np.testing.assert_allclose(clf.kernel_.lengthscale, kernel.lengthscale, rtol=1e-9)
    assert clf.predict_latent(X[100:])[1].mean() < v.mean()
    assert clf.score(X[100:], y[100:]) > 0.9
    with pytest.raises(ValueError, match="classes changed"):
        clf.partial_fit(X[:5], y[:5], classes=[0, 1])


def test_on_from_a_decoupled_fit_only_the_kernel_goes_on():
    clf = decoupled().fit(X[:100], y[:100])
    with pytest.warns(UserWarning, match="decoupled"):
        clf.partial_fit(X[100:], y[100:])
    np.testing.assert_allclose(clf.kernel_.lengthscale, 1.5, rtol=1e-9)
    assert regret(clf, 200, gap=4.0) < 0.13
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf.partial_fit(X[:100], y[:100])  # said once


@pytest.mark.parametrize("bound", ["tight", "collapsed", "augmented"])
def test_every_bound(bound):
    clf = streamed(fixed(bound=bound))
    assert regret(clf, 200, gap=4.0) < 0.25 and np.isfinite(clf.elbo_)


@pytest.mark.parametrize("batch_size", [None, 16, "auto"])
def test_batches_within_a_batch(batch_size):
    assert regret(streamed(fixed(batch_size=batch_size)), 200, gap=4.0) < 0.1


def test_a_given_kernel_and_prior_mean_stay():
    clf = streamed(fixed(kernel=Matern52([1.0, 2.0], 3.0), prior_mean=[0.0, 1.0, -1.0]))
    np.testing.assert_allclose(clf.kernel_.lengthscale, [1.0, 2.0], rtol=1e-9)
    np.testing.assert_allclose(clf.prior_mean_, [0.0, 1.0, -1.0])
    learned = streamed(GPClassifier(RBF(1.0, 3.0), random_state=0))
    assert not np.allclose(learned.kernel_.lengthscale, 1.0, rtol=1e-3)


def test_weights_are_copies_and_rows_of_no_weight_are_absent():
    copies = np.arange(40) % 3
    weighted = fixed().partial_fit(X[:40], y[:40], CLASSES, sample_weight=copies)
    repeated = fixed().partial_fit(np.repeat(X[:40], copies, 0), np.repeat(y[:40], copies), CLASSES)
    np.testing.assert_allclose(
        weighted.predict_proba(X), repeated.predict_proba(X), rtol=0, atol=1e-9
    )


def test_the_same_seed_gives_the_same_bits():
    a, b = (streamed(GPClassifier(random_state=3, batch_size=16)) for _ in range(2))
    np.testing.assert_array_equal(a.predict_proba(X), b.predict_proba(X))


def test_a_pickled_stream_goes_on_alike():
    clf = fixed().partial_fit(X[:40], y[:40], classes=CLASSES)
    copy = pickle.loads(pickle.dumps(clf))
    for c in (clf, copy):
        c.partial_fit(X[40:80], y[40:80])
    np.testing.assert_array_equal(copy.predict_proba(X), clf.predict_proba(X))


def test_float32_streams():
    A, b = toy(1200, gap=4.0)
    clf = GPClassifier(random_state=0, n_inducing=20)
    clf.partial_fit(A, b, classes=CLASSES).partial_fit(A[:50], b[:50])
    assert clf._fitted.model.Z.dtype.itemsize == 4
    assert regret(clf, 1200, gap=4.0) < 0.01 and clf.predict_proba(A).dtype == np.float64


# --- warm_start ----------------------------------------------------------------------------------


def test_warm_start_goes_on():
    clf = GPClassifier(random_state=0, max_epochs=10, temperature=None, warm_start=True)
    first = clf.fit(X[:60], y[:60]).elbo_
    second = clf.fit(X[:60], y[:60]).elbo_
    cold = clf.set_params(warm_start=False).fit(X[:60], y[:60]).elbo_
    assert second > first and cold == pytest.approx(first, rel=1e-9)


def test_warm_start_leaves_the_old_fit_alone_until_it_is_done():
    clf = GPClassifier(random_state=0, max_epochs=10, temperature=None, warm_start=True)
    clf.fit(X[:60], y[:60])
    old = clf._fitted
    m, _ = old.model.latent(old.model.Z)
    clf.fit(X[60:120], y[60:120])
    m2, _ = old.model.latent(old.model.Z)
    np.testing.assert_array_equal(m2.numpy(), m.numpy())


def test_warm_start_with_other_classes_or_features_starts_afresh():
    clf = fixed(warm_start=True).fit(X[:60], y[:60])
    for A, b in [(X[:60], y[:60] + 10), (np.hstack([X[:60], X[:60]]), y[:60])]:
        expected = fixed().fit(A, b).predict_proba(A)
        np.testing.assert_allclose(clf.fit(A, b).predict_proba(A), expected, atol=1e-9)


@pytest.mark.parametrize("first", [fixed, decoupled])
@pytest.mark.parametrize("second", [fixed, decoupled])
def test_warm_start_from_any_fit_to_any_other(first, second):
    clf = first(warm_start=True).fit(X[:60], y[:60])
    clf.set_params(**{**second().get_params(deep=False), "warm_start": True}).fit(X, y)
    # A mean without a temperature is surer than the rows allow.
    assert regret(clf, 200, gap=4.0) < (0.75 if second is decoupled else 0.12)
    clf.set_params(covariance="full", shared_kernel=False).fit(X, y)
    assert len(clf.kernel_) == 3 and regret(clf, 200, gap=4.0) < 0.12
    clf.set_params(shared_kernel=True).fit(X, y)
    assert regret(clf, 200, gap=4.0) < 0.12


def test_warm_start_from_few_rows_to_many():
    """float64 before, float32 after."""
    A, b = toy(1200, gap=4.0)
    settings = {"n_inducing": 15, "batch_size": 200, "max_epochs": 3, "warm_start": True}
    clf = fixed(**settings).fit(A[:100], b[:100])
    assert regret(clf.fit(A, b), 1200, gap=4.0) < 0.05
    assert clf._fitted.model.Z.dtype.itemsize == 4
    assert regret(clf.fit(A[:100], b[:100]), 1200, gap=4.0) < 0.2
