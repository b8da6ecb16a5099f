"""The user's units: fitted things are in them, and answers do not depend on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conjugp import GPClassifier
from conjugp._inputs.inputs import Scaling, fit_scaling
from conjugp._numerics import threads
from conjugp._rows.canonical import Rows, ordered
from conjugp.kernels import RBF, Linear, Matern32
from faces import decoupled, fixed, minibatch, regret, toy

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

X, y = toy(60)
cpu = torch.device("cpu")


def scaled(X: np.ndarray, weight: np.ndarray, center: bool) -> Scaling:
    return fit_scaling(Rows(X, np.zeros(len(X), np.int64), weight), center)


# --- the scaling itself --------------------------------------------------------------------------


@given(
    st.integers(0, 99),
    st.sampled_from([1e-100, 1e-6, 1.0, 1e6, 1e100]),
    st.sampled_from([0.0, 1.0, -1e3]),
    st.booleans(),
)
def test_working_units(seed, scale, offset, center):
    rng = np.random.default_rng(seed)
    A = scale * (rng.standard_normal((20, 3)) + offset)
    weight = rng.uniform(0.1, 3.0, 20)
    scaling = scaled(A, weight, center)
    out = scaling.apply(A, torch.float64, cpu)
    mean = weight @ out.numpy() / weight.sum()
    sd = np.sqrt(weight @ (out.numpy() - mean) ** 2 / weight.sum())
    np.testing.assert_allclose(sd, 1.0, rtol=1e-9)
    if center:
        np.testing.assert_allclose(mean, 0.0, atol=1e-9)
    else:
        np.testing.assert_array_equal(scaling.shift, 0.0)
    np.testing.assert_allclose(scaling.invert(out), A, rtol=1e-12, atol=1e-9 * scale)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e6, 1e300, 1 / 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_columns_keep_their_scale(value, dtype):
    if abs(value) > float(np.finfo(dtype).max):
        value = 1e30
    A = np.full((7, 1), value, dtype=dtype)
    scaling = scaled(A, np.linspace(0.1, 1, 7), True)
    np.testing.assert_array_equal(scaling.scale, 1.0)
    out = scaling.apply(A, torch.float32, cpu)
    assert np.isfinite(out.numpy()).all()


def test_weights_are_copies():
    copies = np.arange(60) % 4
    weighted = scaled(X, copies.astype(float), True)
    repeated = scaled(np.repeat(X, copies, 0), np.ones(copies.sum()), True)
    np.testing.assert_allclose(weighted.shift, repeated.shift, rtol=1e-12)
    np.testing.assert_allclose(weighted.scale, repeated.scale, rtol=1e-12)


def test_the_digits_of_far_away_float64_survive():
    """The difference is taken before anything is rounded to float32."""
    A = 1e9 + np.arange(10.0)[:, None]
    scaling = scaled(A, np.ones(10), True)
    out = scaling.apply(A, torch.float32, cpu)
    np.testing.assert_allclose(np.diff(out[:, 0]), 1 / scaling.scale[0], rtol=1e-5)


def test_overflow():
    scaling = scaled(X, np.ones(60), True)
    with pytest.raises(ValueError, match="X overflows"):
        scaling.apply(np.array([[1e30, 0.0]]), torch.float32, cpu)
    scaling.apply(np.array([[1e30, 0.0]]), torch.float64, cpu)
    with pytest.raises(ValueError, match="X overflows"):
        scaling.apply(np.array([[0.0, -1e200]]), torch.float64, cpu)
    with pytest.raises(ValueError, match="X overflows"):
        scaled(np.array([[1e308], [-1e308]]), np.ones(2), True)


@pytest.mark.parametrize("unit", [1e-25, 1.0, 1e25])
def test_units_that_squares_in_single_precision_could_not_hold(unit):
    rng = np.random.default_rng(0)
    A = (unit * rng.integers(0, 2, (200_000, 1))).astype(np.float32)
    scaling = fit_scaling(Rows(A, np.zeros(len(A), np.int64), np.ones(len(A))), True)
    wide = A.astype(np.float64)
    np.testing.assert_allclose(scaling.shift, wide.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(scaling.scale, wide.std(axis=0), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_many_blocks_and_threads(monkeypatch, dtype, offset):
    """The moments of all rows, the same bits for any number of threads and any layout of X."""
    monkeypatch.setattr(threads, "BLOCK", 64)
    monkeypatch.setattr("conjugp._rows.canonical._HASHED", 32)
    monkeypatch.setattr("conjugp._inputs.inputs._ROUND", 14)
    rng = np.random.default_rng(0)
    A = (rng.standard_normal((500, 3)) * [1.0, 0.01, 30.0] + offset).astype(dtype)
    A[:, 1] = A[0, 1]
    weight = rng.uniform(0.1, 3.0, 500)
    found = []
    before = torch.get_num_threads()
    try:
        for n_threads, layout in ((1, "C"), (3, "C"), (2, "F")):
            torch.set_num_threads(n_threads)
            given = np.array(A, order=layout)
            given.flags.writeable = False
            rows = ordered(given, np.zeros(500, np.int64), weight)
            scaling = fit_scaling(rows, True)
            out = scaling.apply(rows.X, torch.float32, cpu, rows.place)
            found.append((scaling.shift, scaling.scale, out.numpy(), rows.key))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    shift, scale, out, _ = found[0]
    wide = A.astype(np.float64)
    mean = np.average(wide, axis=0, weights=weight)
    sd = np.sqrt(np.average((wide - mean) ** 2, axis=0, weights=weight))
    np.testing.assert_allclose(shift, mean, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(scale[[0, 2]], sd[[0, 2]], rtol=1e-9)
    assert scale[1] == 1.0 and shift[1] == A[0, 1]
    gathered = rows.gathered()
    np.testing.assert_array_equal(gathered.X, A[rows.place])
    np.testing.assert_array_equal(out, scaling.apply(gathered.X, torch.float32, cpu).numpy())
    assert rows.digests == gathered.digests


# --- predictions do not depend on units ----------------------------------------------------------

UNITS = [
    (np.array([1e6, 1e-6]), 0.0),
    (np.array([1e-6, 1e6]), 0.0),
    (np.array([1e6, 1e6]), np.array([1e6, 0.0])),
    (np.array([1.0, 1.0]), np.array([1e6, -1e6])),
    (np.array([1e-6, 1.0]), np.array([1.0, 0.0])),
]


@pytest.mark.parametrize("units", UNITS, ids=str)
def test_a_learned_fit(units):
    factor, shift = units
    clf = GPClassifier(max_epochs=15, temperature=None, random_state=0)
    expected = clf.fit(X, y).predict_proba(X)
    scales, points, elbo = clf.kernel_.lengthscale, clf.inducing_points_, clf.elbo_
    A = X * factor + shift
    clf.fit(A, y)
    np.testing.assert_allclose(clf.predict_proba(A), expected, atol=1e-6)
    np.testing.assert_allclose(clf.kernel_.lengthscale, scales * factor, rtol=1e-5)
    assert clf.elbo_ == pytest.approx(elbo, rel=1e-6)
    back = (clf.inducing_points_ - shift) / factor
    np.testing.assert_allclose(back, points, atol=1e-6)


def test_the_temperature_hardly_depends_on_units():
    """The folds do, since they come from a hash of the rows; the classes do not."""
    clf = GPClassifier(max_epochs=15, random_state=0).fit(X, y)
    temperature, labels = clf.temperature_, clf.predict(X)
    A = X * [1e6, 1e-6]
    assert clf.fit(A, y).temperature_ == pytest.approx(temperature, rel=0.15)
    np.testing.assert_array_equal(clf.predict(A), labels)


@pytest.mark.parametrize("units", UNITS, ids=str)
@pytest.mark.parametrize("kernel", [RBF([1.0, 2.0], 4.0), Matern32(1.5, 4.0), RBF(variance=4.0)])
def test_a_kernel_in_the_users_units(units, kernel):
    """Rescaled rows with a rescaled kernel are the same model."""
    factor, shift = units
    expected = fixed(kernel=kernel).fit(X, y)
    A = X * factor + shift
    scaled = fixed(kernel=kernel.to_units(factor)).fit(A, y)
    np.testing.assert_allclose(scaled.predict_proba(A), expected.predict_proba(X), atol=1e-6)
    assert scaled.elbo_ == pytest.approx(expected.elbo_, rel=1e-6)
    if kernel.lengthscale is not None:
        np.testing.assert_allclose(
            scaled.kernel_.lengthscale, np.ones(2) * kernel.lengthscale * factor
        )
        np.testing.assert_allclose(
            expected.kernel_.lengthscale, np.ones(2) * kernel.lengthscale, rtol=1e-12
        )
    assert expected.kernel_.variance == pytest.approx(4.0)


def test_a_given_kernel_is_not_a_relative_one():
    """The same numbers in other units are another model."""
    p = fixed(kernel=RBF(1.0, 4.0)).fit(X, y).predict_proba(X)
    q = fixed(kernel=RBF(1.0, 4.0)).fit(100 * X, y).predict_proba(100 * X)
    assert np.abs(p - q).max() > 0.05


def test_decoupled_fits_have_units_too():
    # Powers of two, so that all digits stay.
    factor = np.array([2.0**20, 2.0**-20])
    # Other numbers are another order of the rows, so fits differ where classes overlap.
    clf = decoupled(kernel=RBF([1.0, 2.0], 10.0), random_state=4).fit(X, y)
    scaled = decoupled(kernel=RBF([1.0, 2.0] * factor, 10.0), random_state=4).fit(X * factor, y)
    assert (scaled.predict(X * factor) == clf.predict(X)).mean() >= 0.95
    np.testing.assert_allclose(scaled.kernel_.lengthscale, [1.0, 2.0] * factor)
    low, high = (X * factor).min(0), (X * factor).max(0)
    low, high = low - 1e-12 * abs(low), high + 1e-12 * abs(high)
    assert (scaled.inducing_points_ >= low).all() and (scaled.inducing_points_ <= high).all()


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_inducing_points_are_where_the_data_are(make):
    A = X * [1e6, 1e-3] + [5e6, -2.0]
    clf = make(kernel=None).fit(A, y)
    points = clf.inducing_points_
    assert points.dtype == np.float64 and points.shape[1] == 2
    low, high = X.min(0), X.max(0)
    points = (points - [5e6, -2.0]) / [1e6, 1e-3]
    assert (points >= low - X.std(0)).all() and (points <= high + X.std(0)).all()
    np.testing.assert_allclose((points.mean(0) - X.mean(0)) / X.std(0), 0.0, atol=0.6)
    np.testing.assert_allclose(points.std(0) / X.std(0), 1.0, atol=0.6)


def test_given_inducing_points_come_back():
    points = X[::7] * 1e6
    clf = fixed(kernel=RBF(1.5e6, 4.0), inducing=points).fit(X * 1e6, y)
    np.testing.assert_allclose(clf.inducing_points_, points, rtol=1e-12)


def test_the_model_can_be_rebuilt_from_what_is_reported():
    """kernel_, inducing_points_ and prior_mean_ are all there is to a model."""
    A = X * [1e3, 1e-3] + [7.0, -3.0]
    # Of the bounds this one has a fixed point that every start ends at.
    settings = {"bound": "collapsed", "tol": 1e-6, "temperature": None, "random_state": 0}
    clf = GPClassifier(**settings).fit(A, y)
    again = GPClassifier(
        clf.kernel_,
        inducing=clf.inducing_points_,
        prior_mean=clf.prior_mean_,
        learn_hyperparameters=False,
        learn_inducing=False,
        **settings,
    ).fit(A, y)
    np.testing.assert_allclose(again.predict_proba(A), clf.predict_proba(A), atol=1e-3)
    assert again.elbo_ == pytest.approx(clf.elbo_, abs=1e-3)


# --- odd columns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0, 1e6, -1e-6])
@pytest.mark.parametrize("make", [fixed, GPClassifier])
def test_a_constant_column_changes_nothing(make, value):
    settings = {"max_epochs": 15, "temperature": None, "random_state": 0}
    expected = make(**settings).fit(X, y).predict_proba(X)
    A = np.hstack([X, np.full((60, 1), value)])
    clf = make(**settings).fit(A, y)
    np.testing.assert_allclose(clf.predict_proba(A), expected, atol=1e-8)
    assert np.isfinite(np.asarray(clf.kernel_.lengthscale)).all()


def test_only_constant_columns():
    """Nothing to tell the classes apart by, except how common they are."""
    labels = np.array([0] * 45 + [1] * 15)
    clf = GPClassifier(random_state=0).fit(np.ones((60, 2)), labels)
    p = clf.predict_proba(np.ones((1, 2)))
    assert p[0, 0] == pytest.approx(0.75, abs=0.1)


def test_a_column_of_millions():

    def beside(rows: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(len(rows)).standard_normal((len(rows), 1))
        return np.hstack([rows, 1e6 * noise])

    clf = GPClassifier(random_state=0).fit(beside(X), y)
    assert regret(clf, units=beside) < 0.13
    assert clf.kernel_.lengthscale[2] > 1e5 > 1e2 > clf.kernel_.lengthscale[:2].max()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.float32, bool])
def test_numbers_of_other_kinds(dtype):
    whole = np.rint(5 * X).astype(dtype)
    clf = fixed(kernel=RBF(5.0, 4.0)).fit(whole, y)
    expected = fixed(kernel=RBF(5.0, 4.0)).fit(whole.astype(float), y)
    p = clf.predict_proba(whole)
    np.testing.assert_allclose(p, expected.predict_proba(whole.astype(float)), atol=1e-5)
    np.testing.assert_allclose(p, clf.predict_proba(whole.astype(float)), atol=1e-5)
    assert p.dtype == np.float64


def test_a_linear_kernel_keeps_its_origin():
    """Lines through the origin of the user's coordinates, not through the mean of the data."""
    A = np.array([[1.0], [2.0], [3.0], [4.0]])
    clf = fixed(kernel=Linear(1.0, 1.0), prior_mean=0.0).fit(A, [0, 0, 1, 1])
    mean, variance = clf.predict_latent([[0.0], [1.0], [2.0]])
    np.testing.assert_allclose(mean[0], 0.0, atol=1e-9)
    np.testing.assert_allclose(mean[2], 2 * mean[1], rtol=1e-6)
    np.testing.assert_allclose(variance[2], 4 * variance[1], rtol=1e-3)
    both = fixed(kernel=Linear(1.0, 1.0) + RBF(1.0, 1.0), prior_mean=0.0).fit(A, [0, 0, 1, 1])
    assert both._inputs.scaling.shift == 0
    np.testing.assert_array_equal(fixed().fit(A, [0, 0, 1, 1])._inputs.scaling.shift, [2.5])


def test_a_linear_kernel_away_from_the_origin():
    A = X + 5
    clf = GPClassifier(Linear() + RBF(), max_epochs=30, random_state=0).fit(A, y)
    assert regret(clf, units=lambda rows: rows + 5) < 0.13
