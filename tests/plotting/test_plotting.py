"""Pictures show the numbers they are made from; reliability diagrams behave like scikit-learn's."""

from __future__ import annotations

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression

from conjugp.metrics import expected_calibration_error, reliability_curve
from conjugp.plotting import ReliabilityDisplay, plot_ranks, plot_trace, reliability_diagram

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def predictions(rng):
    p = rng.dirichlet([0.4, 0.4, 0.4], size=500)
    y = (rng.random(500)[:, None] > p.cumsum(1)).sum(1)
    return np.array(["ant", "bee", "cat"])[y], p


def curve_of(ax, i=0):
    """The i-th drawn curve; line 0 is the diagonal."""
    return ax.get_lines()[1 + i].get_xydata().T


def test_draws_the_reliability_curve(predictions):
    y, p = predictions
    display = reliability_diagram(y, p, n_bins=10, name="model")
    expected = reliability_curve(y, p, n_bins=10)
    assert_allclose(curve_of(display.ax_), [expected.confidence, expected.accuracy])
    error = expected_calibration_error(y, p, n_bins=10)
    assert display.calibration_error == pytest.approx(error)
    (text,) = display.ax_.get_legend().get_texts()
    assert text.get_text() == f"model (ECE {error:.3f})"
    bars = display.histogram_ax_.collections[0].get_segments()
    assert_allclose([bar[1][1] for bar in bars], expected.count / 500)
    assert display.figure_ is display.ax_.figure
    display.figure_.canvas.draw()


def test_adaptive_and_weighted(predictions):
    y, p = predictions
    given = {"strategy": "adaptive", "sample_weight": np.linspace(0, 1, 500), "n_bins": 7}
    display = ReliabilityDisplay.from_predictions(y, p, **given)
    expected = reliability_curve(y, p, **given)
    assert_allclose(curve_of(display.ax_), [expected.confidence, expected.accuracy])
    assert display.calibration_error == pytest.approx(expected_calibration_error(y, p, **given))


def test_from_estimator():
    X, y = load_wine(return_X_y=True)
    names = load_wine().target_names[y]
    model = LogisticRegression(max_iter=10_000).fit(X, names)
    display = ReliabilityDisplay.from_estimator(model, X, names)
    assert display.name == "LogisticRegression"
    expected = reliability_curve(names, model.predict_proba(X), labels=model.classes_)
    assert_allclose(curve_of(display.ax_), [expected.confidence, expected.accuracy])


def test_several_on_one_diagram(predictions):
    y, p = predictions
    first = reliability_diagram(y, p, name="a")
    second = reliability_diagram(y, p**2 / (p**2).sum(1, keepdims=True), ax=first.ax_, name="b")
    assert second.ax_ is first.ax_ and second.histogram_ax_ is first.histogram_ax_
    assert len(first.figure_.axes) == 2
    assert len(first.ax_.get_legend().get_texts()) == 2
    a, b = (line.get_color() for line in first.ax_.get_lines()[1:])
    assert a != b


def test_on_axes_of_the_user(predictions, tmp_path):
    y, p = predictions
    figure, (left, right) = plt.subplots(1, 2)
    shown = [reliability_diagram(y, p, ax=ax) for ax in (left, right)]
    assert [d.ax_ for d in shown] == [left, right]
    assert shown[0].histogram_ax_ is not shown[1].histogram_ax_
    figure.savefig(tmp_path / "diagram.png")
    assert (tmp_path / "diagram.png").stat().st_size > 0
    free = reliability_diagram(y, p, ax=plt.figure().add_axes((0.2, 0.4, 0.7, 0.5)))
    assert free.histogram_ax_ is not free.ax_
    free.figure_.canvas.draw()


def test_bad_input_is_named(predictions):
    y, p = predictions
    with pytest.raises(ValueError, match="sum to 1"):
        reliability_diagram(y, 2 * p)
    with pytest.raises(ValueError, match="n_bins"):
        reliability_diagram(y, p, n_bins=0)


# --- chains ---------------------------------------------------------------------------------------


class Chains:
    """What the plots ask of a fitted sampler."""

    def __init__(self, **traces):
        self.given = traces

    def traces(self, n_traces):
        return dict(list(self.given.items())[:n_traces])


def test_trace_plot_has_every_chain(rng):
    clf = Chains(first=rng.standard_normal((4, 100)), second=rng.standard_normal((4, 100)))
    figure = plot_trace(clf)
    assert len(figure.axes) == 4
    for (name, trace), ax in zip(clf.given.items(), figure.axes[1::2], strict=True):
        assert ax.get_title(loc="left") == name
        assert_allclose([line.get_ydata() for line in ax.get_lines()], trace)
    assert len(plot_trace(clf, n_traces=1).axes) == 2
    figure.canvas.draw()


def test_rank_plot_counts_ranks(rng):
    trace = rng.standard_normal((3, 500))
    trace[0] += 10.0  # all of this chain's ranks are in the last third
    figure = plot_ranks(Chains(apart=trace, same=rng.standard_normal((3, 500))))
    apart, same = (np.array([p.get_data()[0] for p in ax.patches[1:]]) for ax in figure.axes)
    edges = figure.axes[0].patches[1].get_data()[1]
    assert_allclose(apart.mean(axis=1), 1.0)
    assert_allclose(apart[0][edges[1:] <= 2 / 3], 0.0)
    assert_allclose(apart[0][edges[:-1] >= 2 / 3 + 1e-9], 3.0)
    assert_allclose(apart.sum(axis=0), 3.0)
    band = figure.axes[1].patches[0]
    low, high = band.get_y(), band.get_y() + band.get_height()
    assert np.mean((same > low) & (same < high)) > 0.85
    figure.canvas.draw()


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (12, 30)])
def test_chains_of_any_length(shape, rng, tmp_path):
    still, moving = np.zeros(shape), rng.standard_normal(shape)
    for i, plot in enumerate((plot_trace, plot_ranks)):
        for j, clf in enumerate(
            (Chains(a=still, b=moving), Chains(**dict.fromkeys("abcd", moving)))
        ):
            plot(clf).savefig(tmp_path / f"{i}{j}.png")


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, conjugp.plotting; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
