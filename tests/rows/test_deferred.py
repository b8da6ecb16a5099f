"""Rows that are scaled when they are read are those that were scaled before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conjugp import GPClassifier
from conjugp._estimators import classifier
from conjugp._fit.base import ELBO_ROWS
from conjugp._inputs.scales import Scaling, can_wait, fit_scaling
from conjugp._rows import dataset as data_module
from conjugp._rows.canonical import Ordered, ordered
from conjugp._rows.dataset import Data
from conjugp._rows.deferred import Deferred
from faces import decoupled, minibatch, toy

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

cpu = torch.device("cpu")


def both(rows: Ordered, scaling: Scaling, dtype: torch.dtype) -> tuple[Deferred, Data]:
    """The same rows, to be scaled and scaled."""
    y, weight = torch.tensor(rows.y), torch.tensor(rows.weight, dtype=dtype)
    here = Data(scaling.apply(rows.X, dtype, cpu, rows.place), y.clone(), weight.clone(), 3)
    return Deferred(rows, scaling, y, weight, 3), here


def alike(a: Data, b: Data) -> None:
    for x, z in zip(a, b, strict=True):
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(z))


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.floats(0.01, 0.5),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 60),
)
def test_the_same_rows(seed, share, given_as, dtype, sample):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((50, 2)).astype(given_as)
    rows = ordered(X, rng.integers(0, 3, 50), rng.random(50) + 0.5)
    later, here = both(rows, Scaling(np.array([1.0, -2.0]), np.array([0.5, 3.0])), dtype)
    before, data_module.SAMPLE_ROWS = data_module.SAMPLE_ROWS, sample
    try:
        alike(later.sample(), here.sample())
    finally:
        data_module.SAMPLE_ROWS = before
    alike(later.shifted(torch.ones(2).to(dtype)), here.shifted(torch.ones(2).to(dtype)))
    # The hold-out of rows in memory moves them, so it comes last.
    pairs = zip([later, *later.hold_out(share)], [here, *here.hold_out(share)], strict=True)
    for a, b in list(pairs)[1:]:
        assert a.n == b.n and a.total == b.total
        assert torch.equal(a.counts, b.counts) and torch.equal(a.mass, b.mass)
        assert a.like.dtype == b.like.dtype and a.like.shape == b.like.shape
        i, j = sorted(rng.integers(0, a.n + 1, 2).tolist()) if a.n else (0, 0)
        a.expect(i, j)
        alike(a.rows(i, j), b.rows(i, j))
        alike(a.rows(0, None), b.rows(0, None))
        for x, z in zip(a.labels(i, j), b.labels(i, j), strict=True):
            assert torch.equal(x, z)
        index = torch.tensor(rng.integers(0, a.n, 5)) if a.n else torch.empty(0, dtype=torch.long)
        alike(a.take(index), b.take(index))
        alike(a.head(4), b.head(4))


@pytest.mark.parametrize("epochs", [0.5, 2.0, 3.0])
@pytest.mark.parametrize("make", [minibatch, decoupled])
def test_the_same_fit(make, epochs, monkeypatch):
    X, y = toy(300, 3)
    clf = make(max_epochs=epochs, temperature="auto")
    later = clf.fit(X, y).predict_proba(X), clf.elbo_, clf.temperature_, clf.inducing_points_
    monkeypatch.setattr(classifier, "can_wait", lambda *_: False)
    clf.fit(X, y)
    now = clf.predict_proba(X), clf.elbo_, clf.temperature_, clf.inducing_points_
    for a, b in zip(later, now, strict=True):
        np.testing.assert_array_equal(a, b)


def test_short_fits_scale_what_they_read_and_no_more(monkeypatch):
    X, y = toy(9000, 3)
    scaled: list[int] = []
    apply = Scaling.apply

    def counting(self, X, dtype, device, place=None):
        scaled.append(len(X) if place is None else len(place))
        return apply(self, X, dtype, device, place)

    monkeypatch.setattr(Scaling, "apply", counting)
    settings = {"n_inducing": 6, "covariance": "full", "batch_size": 100, "random_state": 0}
    GPClassifier(max_epochs=300 / 8100, inducing=X[:6], **settings).fit(X, y)
    # The points, the start, three steps, the hold-out, ten steps on all rows, the ELBO.
    assert sum(scaled) <= 6 + 1000 + 3 * 150 + 900 + 10 * 150 + ELBO_ROWS < 9000
    scaled.clear()
    GPClassifier(max_epochs=3, inducing=X[:6], **settings).fit(X, y)
    assert max(scaled) == 9000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=60)
@given(
    st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=2, max_size=12),
    st.integers(0, 10**6),
    st.sampled_from([1.0, 1e-30]),
)
def test_rows_that_may_wait_cannot_overflow(dtype, values, seed, least):
    rng = np.random.default_rng(seed)
    X = np.array(values, np.float32)[:, None]
    weight = rng.uniform(least, 1.0, len(X)) ** 8 + least
    rows = ordered(X, np.zeros(len(X), np.int64), weight)
    scaling = fit_scaling(rows, True)
    if can_wait(rows, scaling, dtype):
        scaling.apply(rows.X, dtype, cpu, rows.place)


def test_what_overflows_is_an_error_before_the_fit():
    """A constant feature keeps its scale, and roundings of so large a number are large."""
    X, y = toy(2000, 2)
    high = np.nextafter(np.float32(3e38), np.float32(0))
    A = np.column_stack([X, np.where(np.arange(2000) < 1, high, 3e38)]).astype(np.float32)
    seen: list[str] = []
    clf = GPClassifier(n_inducing=5, covariance="full", max_epochs=0.5, random_state=0)
    clf.set_params(options=classifier.FitOptions(callback=lambda p: seen.append(p.stage)))
    with pytest.raises(ValueError, match="X overflows"):
        clf.fit(A, y)
    assert not seen and not hasattr(clf, "classes_")
