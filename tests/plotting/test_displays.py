"""Displays draw the numbers they promise, on the axes they are given."""

from __future__ import annotations

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression

from conjugp import GPClassifier
from conjugp import kernels as k
from conjugp.metrics import class_calibration_errors, class_reliability_curves
from conjugp.plotting import (
    ClassCalibrationDisplay,
    InducingDisplay,
    PredictionMapDisplay,
    RelevanceDisplay,
    TrainingCurveDisplay,
)
from conjugp.plotting._relevance import relevances
from faces import fixed, toy

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def data():
    return toy(90, 3)


@pytest.fixture(scope="module")
def clf(data):
    return fixed(n_inducing=12, learn_inducing=False).fit(*data)


def drawn(display, ax=None):
    """It renders, where it says."""
    display.figure_.canvas.draw()
    assert display.figure_ is display.ax_.figure
    assert ax is None or display.ax_ is ax
    return display


# --- calibration per class -----------------------------------------------------------------------


def test_class_calibration_draws_the_worst_in_colour(rng):
    p = rng.dirichlet(np.full(9, 0.5), 2000)
    y = (p.cumsum(1) < rng.random((2000, 1))).sum(1).clip(max=8)
    y[(y == 4) & (rng.random(2000) < 0.5)] = 5
    display = drawn(ClassCalibrationDisplay.from_predictions(y, p, max_classes=3))
    assert_allclose(display.errors, class_calibration_errors(y, p, n_bins=10))
    worst = np.argsort(-display.errors)[:3]
    assert {4, 5} <= set(worst.tolist())
    texts = [t.get_text() for t in display.ax_.get_legend().get_texts()]
    assert texts == [f"{c} (error {display.errors[c]:.3f})" for c in worst]
    curve = class_reliability_curves(y, p, n_bins=10)[worst[0]]
    points = display.ax_.collections[0].get_offsets()
    assert_allclose(points, np.stack([curve.confidence, curve.accuracy], 1))
    assert len(display.ax_.get_lines()) == 9 + 1


def test_class_calibration_of_an_estimator():
    X, y = load_wine(return_X_y=True)
    names = load_wine().target_names[y]
    model = LogisticRegression(max_iter=10_000).fit(X, names)
    ax = plt.figure().subplots()
    display = drawn(ClassCalibrationDisplay.from_estimator(model, X, names, n_bins=5, ax=ax), ax)
    assert list(display.labels) == list(model.classes_)


def test_a_class_has_the_same_colour_in_every_display(data, rng):
    X, y = data
    model = LogisticRegression().fit(X, y)
    p = rng.dirichlet(np.ones(3), len(y))  # the worst class is not the first
    worst = ClassCalibrationDisplay.from_predictions(y, p)
    order = np.argsort(-worst.errors, kind="stable")
    map_ = PredictionMapDisplay.from_estimator(model, X, grid_resolution=5)
    colors = map_._palette(None)
    for c, points in zip(order, worst.ax_.collections, strict=True):
        assert_allclose(points.get_facecolor()[0, :3], colors[c])


# --- training curves -----------------------------------------------------------------------------


def test_training_curve_has_every_report_of_its_measure(clf):
    display = drawn(TrainingCurveDisplay.from_estimator(clf))
    assert display.measure == clf.history_[-1]["measure"]
    own = [one for one in clf.history_ if one["measure"] == display.measure]
    values = np.concatenate([line.get_ydata() for line in display.ax_.get_lines()])
    assert sorted(values) == pytest.approx(sorted(one["value"] for one in own))
    low, high = display.ax_.get_ylim()
    assert low < own[-1]["value"] < high


def test_training_curves_by_stage_measure_and_name():
    def report(stage, measure, value, seconds):
        return {"stage": stage, "measure": measure, "value": value, "seconds": seconds}

    history = [report("search", "held-out", -3.0, 1.0), report("search", "held-out", -2.0, 2.0)]
    history += [report("fit", "ELBO", -1e9, 3.0), report("fit", "ELBO", -50.0, 4.0)]
    history += [report("all rows", "ELBO", -40.0, 5.0)]
    display = drawn(TrainingCurveDisplay(history, name="mine").plot())
    assert display.measures == ["held-out", "ELBO"]
    assert [line.get_label() for line in display.ax_.get_lines()] == ["mine: fit", "mine: all rows"]
    assert_allclose(display.ax_.get_lines()[0].get_xdata(), [3.0, 4.0])
    other = drawn(TrainingCurveDisplay(history, measure="held-out").plot())
    assert_allclose(other.ax_.get_lines()[0].get_ydata(), [-3.0, -2.0])
    second = TrainingCurveDisplay(history, name="other").plot(display.ax_)
    assert second.ax_ is display.ax_ and len(display.ax_.get_lines()) == 4
    with pytest.raises(ValueError, match="measure"):
        TrainingCurveDisplay(history, measure="NLL")
    with pytest.raises(ValueError, match="history"):
        TrainingCurveDisplay([])


def test_the_whole_fit_is_shown_where_measures_differ():
    def reports(stage, measure, first, last):
        times = np.linspace(first, last, 5)
        return [{"stage": stage, "measure": measure, "value": t, "seconds": t} for t in times]

    history = reports("kernel", "ELBO", 1, 7) + reports("search", "held-out", 8, 9)
    history += reports("fit", "log posterior", 10, 10.05)
    display = drawn(TrainingCurveDisplay(history).plot())
    assert [ax.get_ylabel() for ax in display.axes_] == ["ELBO", "held-out", "log posterior"]
    assert display.ax_ is display.axes_[-1]
    shown = np.concatenate([line.get_xdata() for ax in display.axes_ for line in ax.get_lines()])
    assert_allclose(shown, [one["seconds"] for one in history])
    places = [ax.get_position().x0 for ax in display.axes_]
    assert places == sorted(places) and len(set(places)) == 3
    # Another fit goes into the same panels, those of its measures.
    other = TrainingCurveDisplay(history[5:], name="other").plot(display.ax_)
    assert other.axes_ == display.axes_[1:]
    assert [len(ax.get_lines()) for ax in display.axes_] == [1, 2, 2]
    # Neighbours in a grid are left alone.
    left, right = plt.figure().subplots(1, 2)
    inside = drawn(TrainingCurveDisplay(history).plot(right), right)
    assert not left.get_lines() and len(inside.axes_) == 3
    assert min(ax.get_position().x0 for ax in inside.axes_) > left.get_position().x1
    free = plt.figure().add_axes((0.1, 0.1, 0.8, 0.8))
    assert drawn(TrainingCurveDisplay(history).plot(free), free).axes_ == [free]


# --- maps ----------------------------------------------------------------------------------------


def test_the_map_of_probabilities(clf, data):
    X, y = data
    display = drawn(PredictionMapDisplay.from_estimator(clf, X, y, grid_resolution=7, colors="rgb"))
    first, second = np.meshgrid(display.first, display.second)
    p = clf.predict_proba(np.stack([first.ravel(), second.ravel()], 1))
    assert_allclose(display.values, p.reshape(7, 7, 3))
    # The picture of the paper: probabilities are the channels.
    assert_allclose(display.ax_.images[0].get_array(), p.reshape(7, 7, 3), atol=1e-12)
    assert display.first[0] < X[:, 0].min() and display.second[-1] > X[:, 1].max()
    shown = np.concatenate([c.get_offsets() for c in display.ax_.collections])
    assert len(shown) == len(X)


def test_colours_are_those_of_the_classes_and_fade(clf, data):
    display = PredictionMapDisplay([0, 1], [0], [[[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]])
    colors = ["#102030", "#405060", "#708090"]
    sure, unsure = display.image(colors)[0]
    assert_allclose(sure, np.array([0x10, 0x20, 0x30]) / 255)
    assert_allclose(unsure, 0.93)
    latent = PredictionMapDisplay(
        [0], [0, 1], [[[50.0, -50.0]], [[-50.0, -50.0]]], response="latent"
    )
    own, none = latent.image(colors[:2])[:, 0]
    assert_allclose(own, np.array([0x10, 0x20, 0x30]) / 255)
    assert_allclose(none, 1.0)
    for bad in ("blue", ["red"]):
        with pytest.raises(ValueError, match="colors"):
            display.plot(colors=bad)


@pytest.mark.parametrize("response", ["variance", "total", "aleatoric", "epistemic"])
def test_maps_of_one_number(clf, data, response):
    X, y = data
    display = drawn(
        PredictionMapDisplay.from_estimator(clf, X, y, response=response, grid_resolution=5)
    )
    first, second = np.meshgrid(display.first, display.second)
    grid = np.stack([first.ravel(), second.ravel()], 1)
    if response == "variance":
        expected = clf.predict_latent(grid)[1].mean(1)
    else:
        expected = getattr(clf.predict_uncertainty(grid), response)
    assert_allclose(display.ax_.images[0].get_array().ravel(), expected)


def test_maps_of_other_features_of_a_frame():
    X, y = load_wine(return_X_y=True, as_frame=True)
    clf = fixed(kernel=k.RBF([5.0] * 12 + [500.0], 4.0), n_inducing=10).fit(X, y)
    display = drawn(
        PredictionMapDisplay.from_estimator(
            clf, X, response="latent", features=(9, 0), grid_resolution=4
        )
    )
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("color_intensity", "alcohol")
    row = X.median().to_frame().T
    row["color_intensity"], row["alcohol"] = display.first[1], display.second[2]
    assert_allclose(display.values[2, 1], clf.predict_latent(row)[0][0])
    with pytest.raises(ValueError, match="features"):
        PredictionMapDisplay.from_estimator(clf, X, features=(0, 13))
    named = PredictionMapDisplay.from_estimator(
        clf, X, response="latent", features=("color_intensity", 0), grid_resolution=4
    )
    assert_allclose(named.values, display.values)
    for bad in (("color", "alcohol"), ("alcohol", 0)):
        with pytest.raises(ValueError, match=r"features must be two of alcohol, .* by name"):
            PredictionMapDisplay.from_estimator(clf, X, features=bad)
    with pytest.raises(ValueError, match="response"):
        PredictionMapDisplay.from_estimator(clf, X, response="odds")


def test_many_classes_and_any_classifier():
    X, y = toy(120, 12)
    model = LogisticRegression().fit(X, y)
    display = drawn(PredictionMapDisplay.from_estimator(model, X, y, grid_resolution=6))
    assert display.image().shape == (6, 6, 3)


# --- relevance -----------------------------------------------------------------------------------


def test_relevance_is_free_of_units(rng):
    X = rng.standard_normal((60, 3)) * [1.0, 1e4, 1e-3]
    kernel = k.RBF([2.0, 4e4, 8e-3], 3.0)
    found = relevances(kernel, X)
    scale = np.array([100.0, 1e-3, 7.0])
    assert_allclose(relevances(kernel.to_units(scale), X * scale), found, rtol=1e-9)
    assert found[0] > found[1] > found[2] > 0


def test_relevance_of_an_rbf_by_definition(rng):
    """Pairs of rows, one feature at a time; for long lengthscales it is variance/ℓ²."""
    X = rng.standard_normal((4000, 2)) * [1.0, 3.0]
    found = relevances(k.RBF([20.0, 30.0], 5.0), X, n_rows=600)
    assert_allclose(found, X.var(0) / np.square([20.0, 30.0]), rtol=0.2)
    pairs = np.random.default_rng(0).integers(len(X), size=(50, 2))
    gap = (X[pairs[:, 0]] - X[pairs[:, 1]]) / [0.5, 2.0]
    expected = (1 - np.exp(-0.5 * gap**2)).mean(0)
    assert_allclose(relevances(k.RBF([0.5, 2.0], 5.0), X, n_rows=50), expected, rtol=1e-9)


def test_relevance_in_any_kernel(kernel, rng):
    X = np.column_stack([rng.standard_normal((30, 2)) + 3.0, np.full(30, 2.0)])
    found = relevances(kernel, X, n_rows=20)
    assert (found[:2] > 0).all() and found[2] == 0.0  # a feature that does not vary


def test_relevance_display(data):
    X, y = data
    frame = pd.DataFrame(X, columns=["length", "width"])
    clf = fixed(kernel=k.RBF([0.7, 9.0], 2.0)).fit(frame, y)
    display = drawn(RelevanceDisplay.from_estimator(clf, frame))
    assert [t.get_text() for t in display.ax_.get_yticklabels()] == ["length", "width"]
    assert_allclose([bar.get_width() for bar in display.ax_.patches], display.relevance[0])
    assert_allclose(display.relevance[0], relevances(clf.kernel_, X))
    several = drawn(RelevanceDisplay([[0.1, 0.5, 0.2], [0.3, 0.1, 0.2]], list("abc")).plot())
    assert_allclose([bar.get_width() for bar in several.ax_.patches], [0.3, 0.2, 0.2])
    assert len(several.ax_.collections) == 2
    some = RelevanceDisplay(np.linspace(0, 1, 30), [f"x{i}" for i in range(30)]).plot(
        max_features=4
    )
    assert [t.get_text() for t in some.ax_.get_yticklabels()] == ["x29", "x28", "x27", "x26"]


# --- inducing points -----------------------------------------------------------------------------


def test_inducing_points_of_two_features(clf, data):
    X, y = data
    display = drawn(InducingDisplay.from_estimator(clf, X, y))
    assert_allclose(display.ax_.collections[-1].get_offsets(), clf.inducing_points_)
    rows = np.concatenate([c.get_offsets() for c in display.ax_.collections[:-1]])
    assert_allclose(np.sort(rows, 0), np.sort(X, 0))
    assert "12 inducing points" in [t.get_text() for t in display.ax_.get_legend().get_texts()]


def test_inducing_points_on_a_map(clf, data):
    shown = PredictionMapDisplay.from_estimator(clf, data[0], grid_resolution=5)
    limits = shown.ax_.get_xlim()
    display = drawn(InducingDisplay.from_estimator(clf, data[0], ax=shown.ax_), shown.ax_)
    assert display.ax_.get_xlim() == limits and len(display.ax_.collections) == 1


def test_inducing_points_in_principal_components(rng):
    X = rng.standard_normal((80, 4)) * [1.0, 5.0, 1.0, 2.0] + 3.0
    X[:, 0] += X[:, 1]
    clf = fixed(kernel=k.RBF(5.0, 2.0), n_inducing=9).fit(X, np.arange(80) % 2)
    display = drawn(InducingDisplay.from_estimator(clf, X))
    standard = (X - X.mean(0)) / X.std(0)
    values = np.linalg.eigvalsh(np.cov(standard.T, bias=True))[::-1]
    assert_allclose(display.rows.var(0), values[:2], rtol=1e-9)
    assert len(display.points) == len(clf.inducing_points_)
    chosen = InducingDisplay.from_estimator(clf, X, features=(3, 1))
    assert_allclose(chosen.points, clf.inducing_points_[:, [3, 1]])
    named = InducingDisplay.from_estimator(clf, X, features=("feature 3", 1))
    assert_allclose(named.points, chosen.points)


def test_inducing_points_of_directions(rng):
    """Points and rows of other lengths lie at the same place if their directions do."""

    class Fitted:
        kernel_ = k.Normalised(k.RBF(1.0, 1.0))
        inducing_points_ = rng.standard_normal((5, 3))

    X = np.vstack([7.0 * Fitted.inducing_points_, rng.standard_normal((20, 3))])
    display = drawn(InducingDisplay.from_estimator(Fitted, X))
    assert_allclose(display.points, display.rows[:5], atol=1e-9)
    assert torch.allclose(Fitted.kernel_.diag(torch.tensor(X)), torch.ones(25).double())


def test_bad_rows_are_named(clf):
    for display in (PredictionMapDisplay, InducingDisplay, RelevanceDisplay):
        with pytest.raises(ValueError, match="X"):
            display.from_estimator(clf, [[np.nan, 1.0]])


def test_relevance_of_a_table_is_by_column():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"level": rng.choice(list("abc"), 90), "noise": rng.normal(size=90)})
    clf = GPClassifier(random_state=0).fit(frame, frame["level"] == "b")
    display = RelevanceDisplay.from_estimator(clf, frame)
    assert list(display.names) == ["level", "noise"] and display.relevance.shape == (1, 2)
    assert display.relevance[0, 0] > 5 * display.relevance[0, 1]
