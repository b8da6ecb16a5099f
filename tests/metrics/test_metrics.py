"""Metrics against scikit-learn, brute-force loops, hand-made cases and known truths."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sklearn.metrics import brier_score_loss, log_loss

from conjugp import metrics
from conjugp.metrics import (
    bootstrap_band,
    brier,
    brier_decomposition,
    chance_band,
    class_calibration_errors,
    class_reliability_curves,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    nll,
    reliability_curve,
    sharpness,
)

ALL = [
    nll,
    brier,
    expected_calibration_error,
    maximum_calibration_error,
    classwise_calibration_error,
]
BINNED = ALL[2:]


def problem(seed: int, n: int = 200, C: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(C, 0.6), size=n)
    return rng.integers(C, size=n), p, rng.uniform(0, 3, size=n)


def test_every_metric_is_tested():
    functions = {name for name in metrics.__all__ if name[0].islower()}
    others = {bootstrap_band, brier_decomposition, chance_band, class_calibration_errors}
    others |= {class_reliability_curves, reliability_curve, sharpness}
    assert functions == {metric.__name__ for metric in (*ALL, *others)}


@pytest.mark.parametrize("C", [2, 3, 10])
def test_nll_and_brier_against_scikit_learn(C):
    y, p, w = problem(C, C=C)
    labels = np.arange(C)
    assert_allclose(nll(y, p, labels=labels), log_loss(y, p, labels=labels), rtol=1e-12)
    weighted = log_loss(y, p, labels=labels, sample_weight=w)
    assert_allclose(nll(y, p, labels=labels, sample_weight=w), weighted, rtol=1e-12)
    onehot = np.eye(C)[y]
    assert_allclose(brier(y, p, labels=labels), np.square(p - onehot).sum(1).mean(), rtol=1e-12)


def test_binary_brier_is_twice_scikit_learns():
    y, p, w = problem(0, C=2)
    expected = 2 * brier_score_loss(y, p[:, 1], sample_weight=w)
    assert_allclose(brier(y, p, sample_weight=w), expected, rtol=1e-12)


def test_nll_is_finite_where_scikit_learn_clips_early():
    p = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert nll([0, 0], p, labels=[0, 1]) == 0.0
    assert nll([1, 1], p, labels=[0, 1]) == pytest.approx(-math.log(np.finfo(float).tiny))
    assert nll([0, 1], [[1.0, 0.0], [1.0, 1e-200]]) == pytest.approx(100 * math.log(10))


def by_hand(confidence, correct, weight, n_bins):
    """Expected and maximum gap with a loop over bins and points."""
    expected, largest = 0.0, 0.0
    for b in range(n_bins):
        low, high = b / n_bins, (b + 1) / n_bins
        members = [i for i, c in enumerate(confidence) if low < c <= high or (b == 0 and c == 0.0)]
        mass = sum(weight[i] for i in members)
        if mass == 0:
            continue
        gap = abs(sum(weight[i] * (float(correct[i]) - confidence[i]) for i in members)) / mass
        expected += gap * mass / sum(weight)
        largest = max(largest, gap)
    return expected, largest


@pytest.mark.parametrize("n_bins", [1, 7, 15])
@pytest.mark.parametrize("weighted", [False, True])
def test_calibration_errors_against_a_loop(n_bins, weighted):
    y, p, w = problem(3)
    w = w if weighted else np.ones(len(y))
    given = {"n_bins": n_bins, "sample_weight": w if weighted else None}
    expected, largest = by_hand(p.max(1), p.argmax(1) == y, w, n_bins)
    assert_allclose(expected_calibration_error(y, p, **given), expected, rtol=1e-10)
    assert_allclose(maximum_calibration_error(y, p, **given), largest, rtol=1e-10)
    classes = [by_hand(p[:, c], y == c, w, n_bins)[0] for c in range(p.shape[1])]
    assert_allclose(classwise_calibration_error(y, p, **given), np.mean(classes), rtol=1e-10)


def test_calibration_errors_computed_on_paper():
    # Ten points at confidence .8, six right; ten at .6, all right.
    p = np.array([[0.8, 0.2]] * 10 + [[0.4, 0.6]] * 10)
    y = np.array([0] * 6 + [1] * 4 + [1] * 10)
    assert expected_calibration_error(y, p, n_bins=10) == pytest.approx((0.2 + 0.4) / 2)
    assert maximum_calibration_error(y, p, n_bins=10) == pytest.approx(0.4)
    # One bin: confidence .7, accuracy .8.
    assert expected_calibration_error(y, p, n_bins=1) == pytest.approx(0.1)
    # Both classes: p₀ = .8 is right 6 of 10 times, .4 never; p₁ mirrors it.
    assert classwise_calibration_error(y, p, n_bins=10) == pytest.approx((0.2 + 0.4) / 2)
    curve = reliability_curve(y, p, n_bins=10)
    assert_allclose(curve.confidence, [0.6, 0.8])
    assert_allclose(curve.accuracy, [1.0, 0.6])
    assert_allclose(curve.count, [10, 10])


def test_bins_are_closed_on_the_right():
    p = np.array([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]])
    curve = reliability_curve([0, 1, 0], p, n_bins=4)
    assert_allclose(curve.confidence, [0.5, 0.75, 1.0])
    assert_allclose(curve.accuracy, [1.0, 0.0, 1.0])


def test_adaptive_bins_hold_equal_counts():
    y, p, _ = problem(1, n=300)
    curve = reliability_curve(y, p, n_bins=15, strategy="adaptive")
    assert_allclose(curve.count, np.full(15, 20))
    order = np.argsort(p.max(1))
    assert_allclose(curve.confidence, p.max(1)[order].reshape(15, 20).mean(1))
    correct = (p.argmax(1) == y)[order].reshape(15, 20).mean(1)
    assert_allclose(curve.accuracy, correct)
    gap = np.abs(curve.accuracy - curve.confidence)
    adaptive = {"n_bins": 15, "strategy": "adaptive"}
    assert expected_calibration_error(y, p, **adaptive) == pytest.approx(gap.mean())
    assert maximum_calibration_error(y, p, **adaptive) == pytest.approx(gap.max())


def test_adaptive_bins_keep_ties_together():
    p = np.array([[0.9, 0.1]] * 50 + [[0.6, 0.4]] * 3)
    curve = reliability_curve([0] * 50 + [1] * 3, p, n_bins=15, strategy="adaptive")
    assert_allclose(curve.count, [3, 50])
    assert_allclose(curve.accuracy, [0, 1])


@pytest.mark.parametrize("strategy", ["uniform", "adaptive"])
def test_calibrated_probabilities_have_small_errors(strategy):
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(5, 0.5), size=200_000)
    y = (rng.random(len(p))[:, None] > p.cumsum(1)).sum(1)
    # By chance a bin of n points has a gap of standard deviation at most 1/(2√n), and the mean
    # over B bins of N points in all is at most √(B/N)/2.
    chance = math.sqrt(15 / len(p)) / 2
    assert expected_calibration_error(y, p, strategy=strategy) < chance
    assert classwise_calibration_error(y, p, strategy=strategy) < chance
    sharpened = p**2 / (p**2).sum(1, keepdims=True)
    assert expected_calibration_error(y, sharpened, strategy=strategy) > 0.1
    assert classwise_calibration_error(y, sharpened, strategy=strategy) > 0.04


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize("strategy", ["uniform", "adaptive"])
@given(seed=st.integers(0, 1000), C=st.integers(2, 6), n=st.integers(1, 40))
def test_invariances(metric, strategy, seed, C, n):
    y, p, _ = problem(seed, n, C)
    rng = np.random.default_rng(seed)
    options = {"strategy": strategy, "n_bins": 5} if metric in BINNED else {}
    value = metric(y, p, labels=np.arange(C), **options)
    assert 0 <= value <= (1 if metric in BINNED else 2 if metric is brier else math.inf)

    order = rng.permutation(n)
    assert metric(y[order], p[order], labels=np.arange(C), **options) == pytest.approx(value)
    columns = rng.permutation(C)
    assert metric(y, p[:, columns], labels=columns, **options) == pytest.approx(value)

    # A weight of k is the point k times over, none is no point at all, and the unit is free.
    repeats = rng.integers(0, 4, size=n)
    repeats[0] = 1
    weighted = metric(y, p, labels=np.arange(C), sample_weight=0.37 * repeats, **options)
    several = metric(y.repeat(repeats), p.repeat(repeats, axis=0), labels=np.arange(C), **options)
    assert weighted == pytest.approx(several, abs=1e-12)


@pytest.mark.parametrize("metric", ALL)
def test_labels_of_any_kind(metric):
    y, p, _ = problem(5, C=3)
    expected = metric(y, p)
    names = np.array(["ant", "bee", "cat"])
    assert metric(names[y], p) == expected
    assert metric(names[y].astype(object), p, labels=names) == expected
    assert metric(pd.Series(names[y], dtype="category"), pd.DataFrame(p), labels=names) == expected
    assert metric(list(names[y]), p.tolist(), labels=["ant", "bee", "cat"]) == expected
    assert metric(y.astype(float), p, labels=[0, 1, 2]) == expected
    two = p[:, :2] / p[:, :2].sum(1, keepdims=True)
    assert metric(y > 0, two, labels=[False, True]) == metric((y > 0).astype(int), two)
    # Columns need not be sorted, and a class may be absent.
    assert metric(names[y], p[:, ::-1], labels=names[::-1]) == pytest.approx(expected)
    assert metric(["ant"], p[:1], labels=names) >= 0


@pytest.mark.parametrize("metric", ALL)
def test_float32_probabilities(metric):
    y, p, _ = problem(6, C=50, n=500)
    single = p.astype(np.float32)
    assert metric(y, single, labels=np.arange(50)) == pytest.approx(
        metric(y, p, labels=np.arange(50)), rel=1e-4
    )


@pytest.mark.parametrize("metric", [*ALL, reliability_curve])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proba": [[0.5, 0.4], [0.5, 0.5]]}, "sum to 1"),
        ({"proba": [[np.nan, 0.4], [0.5, 0.5]]}, "proba contains NaN"),
        ({"proba": [[-0.1, 1.1], [0.5, 0.5]]}, "proba contains negative"),
        ({"proba": [0.5, 0.5]}, r"proba must have shape \(n, C\)"),
        ({"proba": [[1.0], [1.0]]}, r"proba must have shape \(n, C\)"),
        ({"proba": [[0.5, 0.5]]}, "y_true has 2 labels, but proba has 1 rows"),
        ({"y_true": [0, 0]}, "pass labels="),
        ({"y_true": [0.0, np.nan]}, "y_true contains NaN"),
        ({"y_true": [[0], [1]]}, "y_true must be a vector"),
        ({"y_true": []}, "y_true must be a vector that is not empty"),
        ({"y_true": [0, 3], "labels": [0, 1]}, r"not in labels: \[3\]"),
        ({"y_true": ["0", "1"], "labels": [0, 1]}, "not in labels"),
        ({"labels": [0, 1, 2]}, "labels must name the 2 columns"),
        ({"labels": [1, 1]}, "labels contains a label twice"),
        ({"sample_weight": [1.0]}, "sample_weight must have shape"),
        ({"sample_weight": [1.0, -1.0]}, "sample_weight must be finite, not negative"),
        ({"sample_weight": [0.0, 0.0]}, "not all zero"),
    ],
)
def test_bad_input_is_named(metric, change, message):
    arguments = {"y_true": [0, 1], "proba": [[0.5, 0.5], [0.2, 0.8]]} | change
    with pytest.raises(ValueError, match=message):
        metric(**arguments)


def test_bad_probabilities_and_bins():
    with pytest.raises(TypeError, match="proba must hold numbers"):
        nll([0, 1], [["a", "b"], ["c", "d"]])
    for metric in (*BINNED, reliability_curve):
        for n_bins in (0, 2.5, True, "ten"):
            with pytest.raises(ValueError, match="n_bins must be a positive integer"):
                metric([0, 1], np.eye(2), n_bins=n_bins)
        with pytest.raises(ValueError, match="strategy must be"):
            metric([0, 1], np.eye(2), strategy="quantile")


# --- parts of the Brier score, sharpness, classes, bands -----------------------------------


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 60),
    C=st.integers(2, 6),
    n_bins=st.integers(1, 20),
    strategy=st.sampled_from(["uniform", "adaptive"]),
    digits=st.sampled_from([1, 2, 16]),
)
def test_parts_of_the_brier_score_add_up(seed, n, C, n_bins, strategy, digits):
    """Murphy's identity for the binned score, which is computed here point by point."""
    y, p, w = problem(seed, n, C)
    p = np.round(p, digits) + 1e-3
    p /= p.sum(1, keepdims=True)
    given = {"n_bins": n_bins, "strategy": strategy, "labels": range(C), "sample_weight": w + 0.1}
    parts = brier_decomposition(y, p, **given)
    share = (w + 0.1) / (w + 0.1).sum()
    binned = np.empty_like(p)
    for c in range(C):
        curve = class_reliability_curves(y, p, **given)[c]
        # The bin of a point is found by rank: bins are intervals.
        order = np.argsort(p[:, c], kind="stable")
        ends = np.cumsum(curve.count) / curve.count.sum()
        place = np.searchsorted(ends + 1e-9, np.cumsum(share[order]), side="left")
        binned[order, c] = curve.confidence[np.minimum(place, len(ends) - 1)]
    score = share @ np.square(binned - np.eye(C)[y]).sum(1)
    assert parts.reliability - parts.resolution + parts.uncertainty == pytest.approx(
        score, abs=1e-9
    )
    whole = brier(y, p, labels=range(C), sample_weight=w + 0.1)
    assert score + parts.within_bins == pytest.approx(whole, abs=1e-9)
    assert parts.reliability >= 0 and parts.resolution >= 0


def test_parts_of_known_predictions():
    y = np.repeat([0, 1, 1, 1], 25)
    climate = np.tile([0.25, 0.75], (100, 1))
    assert_allclose(brier_decomposition(y, climate), [0, 0, 2 * 0.1875, 0], atol=1e-12)
    perfect = np.eye(2)[y]
    assert_allclose(brier_decomposition(y, perfect), [0, 0.375, 0.375, 0], atol=1e-12)
    wrong = brier_decomposition(y, perfect[:, ::-1])
    assert_allclose(wrong, [2, 0.375, 0.375, 0], atol=1e-12)


def test_sharpness():
    assert sharpness(np.full((7, 4), 0.25)) == pytest.approx(0.25)
    assert sharpness(np.eye(3)) == 1.0
    p = np.array([[1.0, 0.0], [0.5, 0.5]])
    assert sharpness(p, sample_weight=[3, 1]) == pytest.approx(0.875)
    with pytest.raises(ValueError, match="at least one row"):
        sharpness(np.zeros((0, 3)))


def test_errors_of_classes_average_to_the_class_wise_error():
    y, p, w = problem(3, C=5)
    given = {"n_bins": 7, "strategy": "adaptive", "sample_weight": w}
    each = class_calibration_errors(y, p, **given)
    assert each.shape == (5,)
    assert each.mean() == pytest.approx(classwise_calibration_error(y, p, **given), rel=1e-14)
    for c in range(5):
        two = np.stack([1 - p[:, c], p[:, c]], 1)
        alone = class_calibration_errors(y == c, two, labels=[False, True], **given)
        assert alone[1] == pytest.approx(each[c], rel=1e-12)
    curve = class_reliability_curves(y, p, sample_weight=w)[2]
    assert curve.count.sum() == pytest.approx(w.sum())
    assert np.average(curve.accuracy, weights=curve.count) == pytest.approx(w @ (y == 2) / w.sum())


def test_a_bootstrap_band_covers_the_truth():
    """Labels from p^(1/T): the error of a hundred thousand points is the truth."""

    def draw(seed, n):
        rng = np.random.default_rng(seed)
        p = rng.dirichlet([0.3] * 4, n)
        q = p ** (1 / 1.6)
        q /= q.sum(1, keepdims=True)
        return (q.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=3), p

    for metric in (expected_calibration_error, nll):
        truth = metric(*draw(10**6, 100_000), labels=range(4))
        bands = [
            bootstrap_band(metric, *draw(s, 1500), labels=range(4), n_resamples=50)
            for s in range(25)
        ]
        held = np.mean([b.low <= truth <= b.high for b in bands])
        assert 0.85 <= held <= 1.0
        assert all(b.low <= b.value <= b.high for b in bands) or metric is not nll
        width = np.mean([b.high - b.low for b in bands])
        assert width < 6 * np.std([b.value for b in bands])


def test_bands_repeat_and_pass_settings_on():
    y, p, w = problem(1)
    given = {"sample_weight": w, "n_bins": 5, "strategy": "adaptive", "n_resamples": 20}
    band = bootstrap_band(expected_calibration_error, y, p, **given)
    again = bootstrap_band(expected_calibration_error, y, p, **given)
    assert (
        band == again != bootstrap_band(expected_calibration_error, y, p, random_state=1, **given)
    )
    settings = {"n_bins": 5, "strategy": "adaptive", "sample_weight": w}
    assert band.value == pytest.approx(expected_calibration_error(y, p, **settings))
    names = np.array(["a", "b", "c", "d"])[y]
    assert bootstrap_band(expected_calibration_error, names, p, **given) == band
    wide = bootstrap_band(expected_calibration_error, y, p, confidence=0.5, **given)
    assert wide.high - wide.low < band.high - band.low


def test_scores_by_chance_are_those_of_calibrated_probabilities():
    _, p, w = problem(2, n=400)
    entropy = -(p * np.log(p)).sum(1)
    by_chance = chance_band(nll, p, sample_weight=w, n_resamples=400)
    assert by_chance.value == pytest.approx(w @ entropy / w.sum(), abs=0.01)
    assert chance_band(brier, p).value == pytest.approx(1 - sharpness(p), abs=0.01)
    y, q = problem(5, n=400)[:2]
    assert expected_calibration_error(y, q) > chance_band(expected_calibration_error, q).high
    drawn = (p.cumsum(1) < np.random.default_rng(7).random((400, 1))).sum(1)
    assert expected_calibration_error(drawn, p) < chance_band(expected_calibration_error, p).high


@pytest.mark.parametrize("bad", [{"n_resamples": 0}, {"n_resamples": 1.5}, {"confidence": 1.0}])
def test_bad_settings_of_bands_are_named(bad):
    y, p, _ = problem(0)
    with pytest.raises(ValueError, match=next(iter(bad))):
        bootstrap_band(nll, y, p, **bad)
    with pytest.raises(ValueError, match=next(iter(bad))):
        chance_band(nll, p, **bad)
