"""How good probabilities are: log loss, Brier score and its parts, calibration errors, sharpness.

All functions but `sharpness` take true labels of any kind and an (n, C) array of probabilities,
one column per class, the columns in the order of `labels`: pass ``labels=estimator.classes_``.
Scores and errors are better the lower they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Band",
    "BrierDecomposition",
    "ReliabilityCurve",
    "bootstrap_band",
    "brier",
    "brier_decomposition",
    "chance_band",
    "class_calibration_errors",
    "class_reliability_curves",
    "classwise_calibration_error",
    "expected_calibration_error",
    "maximum_calibration_error",
    "nll",
    "reliability_curve",
    "sharpness",
]

Strategy = Literal["uniform", "adaptive"]
Floats = NDArray[np.float64]


class ReliabilityCurve(NamedTuple):
    """Confidence against accuracy, one entry per bin that holds any points.

    Attributes
    ----------
    confidence, accuracy : ndarray of shape (n_filled_bins,)
        Weighted means over the bin.
    count : ndarray of shape (n_filled_bins,)
        The number of points in the bin, or the sum of their weights.
    """

    confidence: Floats
    accuracy: Floats
    count: Floats


class BrierDecomposition(NamedTuple):
    """The Brier score in parts: reliability − resolution + uncertainty + within_bins.

    Attributes
    ----------
    reliability : float
        Mean squared distance of a bin's probability from its frequency: 0 if calibrated.
    resolution : float
        Mean squared distance of a bin's frequency from that of all points; the more the better.
    uncertainty : float
        The score of predicting the frequencies of the classes for every point.
    within_bins : float
        What replacing probabilities by their means over bins has changed.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within_bins: float


class Band(NamedTuple):
    """A score, and a band that holds it with a certain confidence."""

    value: float
    low: float
    high: float


def nll(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Mean negative log-likelihood of the true labels, in nats (log loss).

    Probabilities are clipped at the smallest normal float64, 2.2e-308: a true label that was
    given probability zero costs 708.4 nats rather than infinity.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        The true labels.
    proba : array-like of shape (n, C)
        Probabilities; rows sum to 1.
    labels : array-like of shape (C,), default=None
        The label of each column. ``None`` means the sorted values of `y_true`, all of which must
        then occur.
    sample_weight : array-like of shape (n,), default=None
        Weights of the points.
    """
    codes, p, weight = _checked(y_true, proba, labels, sample_weight)
    p_true = p[np.arange(len(codes)), codes]
    return float(weight @ -np.log(np.maximum(p_true, np.finfo(np.float64).tiny)))


def brier(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Mean multi-class Brier score, Σ_c (p_c − y_c)²: from 0 to 2.

    Parameters are those of :func:`nll`. With two classes it is twice the binary Brier score.
    """
    codes, p, weight = _checked(y_true, proba, labels, sample_weight)
    return float(weight @ np.square(p - np.eye(p.shape[1])[codes]).sum(axis=1))


def brier_decomposition(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    n_bins: int = 15,
    strategy: Strategy = "uniform",
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> BrierDecomposition:
    """Parts of the Brier score, over bins of the probability of each class (Murphy 1973).

    The first three are exactly the score of probabilities that are replaced by their means over
    bins, and with the fourth they are :func:`brier`. Parameters are those of
    :func:`reliability_curve`.
    """
    codes, p, weight = _checked(y_true, proba, labels, sample_weight)
    reliability = resolution = uncertainty = binned = 0.0
    for c, p_c in enumerate(p.T):
        mean, frequency, share = _curve(p_c, codes == c, weight, n_bins, strategy)
        of_all = weight @ (codes == c)
        reliability += share @ np.square(mean - frequency)
        resolution += share @ np.square(frequency - of_all)
        uncertainty += of_all * (1.0 - of_all)
        binned += share @ (np.square(mean - frequency) + frequency * (1.0 - frequency))
    score = weight @ np.square(p - np.eye(p.shape[1])[codes]).sum(axis=1)
    return BrierDecomposition(
        float(reliability), float(resolution), float(uncertainty), float(score - binned)
    )


def sharpness(proba: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    """Mean of Σ_c p_c²: from 1/C where all classes are even to 1 where one is certain.

    It knows no labels. Of two calibrated classifiers the sharper is the better one: calibrated
    probabilities have a Brier score of one minus their sharpness.
    """
    p = _probabilities(proba)
    return float(_weights(sample_weight, len(p)) @ np.square(p).sum(axis=1))


def bootstrap_band(
    metric: Callable[..., float],
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    n_resamples: int = 200,
    confidence: float = 0.95,
    random_state: int | None = 0,
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    **settings: Any,
) -> Band:
    """A score with a band for how much it depends on which points happened to be there.

    Points are drawn anew, with replacement. A calibration error is biased upwards, because noise
    adds to |accuracy − confidence|, and a resampled one is so once more. Both are taken off: the
    ends of the band are as far from the score as the resampled ones are from it, on the other
    side (the basic bootstrap), and never below 0. Where the true error is near 0 the band is still
    too high: compare the score with :func:`chance_band`, which is what calibrated probabilities
    would get.

    Parameters
    ----------
    metric : callable
        One of the functions of this module that give a number, as
        :func:`expected_calibration_error`.
    y_true, proba, labels, sample_weight
        As in :func:`nll`.
    n_resamples : int, default=200
        How often points are drawn.
    confidence : float, default=0.95
        Share of the resampled scores that the band holds.
    random_state : int or None, default=0
        Seed of the draws.
    **settings
        Passed on to the metric, as ``n_bins`` and ``strategy``.
    """
    _positive("n_resamples", n_resamples)
    _share("confidence", confidence)
    codes, p, weight = _checked(y_true, proba, labels, sample_weight)
    settings["labels"] = range(p.shape[1])
    value = metric(codes, p, sample_weight=weight, **settings)
    rng, n = np.random.default_rng(random_state), len(codes)
    found = []
    while len(found) < n_resamples:
        drawn = weight * rng.multinomial(n, np.full(n, 1.0 / n))
        if drawn.sum() > 0:  # weights of 0 may be all there is
            found.append(metric(codes, p, sample_weight=drawn, **settings))
    low, high = np.quantile(found, [0.5 - 0.5 * confidence, 0.5 + 0.5 * confidence])
    return Band(value, max(0.0, float(2 * value - high)), max(0.0, float(2 * value - low)))


def chance_band(
    metric: Callable[..., float],
    proba: ArrayLike,
    *,
    n_resamples: int = 200,
    confidence: float = 0.95,
    random_state: int | None = 0,
    sample_weight: ArrayLike | None = None,
    **settings: Any,
) -> Band:
    """The score that these probabilities would have if labels were drawn from them.

    A calibration error below ``high`` may be chance. ``value`` is the mean over draws; the other
    parameters are those of :func:`bootstrap_band`.
    """
    _positive("n_resamples", n_resamples)
    _share("confidence", confidence)
    p = _probabilities(proba)
    settings |= {"labels": range(p.shape[1]), "sample_weight": sample_weight}
    rng, levels = np.random.default_rng(random_state), p.cumsum(axis=1)
    levels /= levels[:, -1:]
    found = []
    for _ in range(n_resamples):
        drawn = (levels <= rng.random((len(p), 1))).sum(axis=1)
        found.append(metric(drawn, p, **settings))
    low, high = np.quantile(found, [0.5 - 0.5 * confidence, 0.5 + 0.5 * confidence])
    return Band(float(np.mean(found)), float(low), float(high))


def reliability_curve(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    n_bins: int = 15,
    strategy: Strategy = "uniform",
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> ReliabilityCurve:
    """Accuracy of the predicted class against the confidence in it, in bins of confidence.

    Parameters
    ----------
    y_true, proba, labels, sample_weight
        As in :func:`nll`.
    n_bins : int, default=15
        The number of bins.
    strategy : {"uniform", "adaptive"}, default="uniform"
        Bins of equal width, (i/n_bins, (i+1)/n_bins], or of equal weight. Equal confidences are
        always in one bin, so adaptive bins may be uneven where confidences repeat.
    """
    return curve_of_prediction(y_true, proba, n_bins, strategy, labels, sample_weight)


def expected_calibration_error(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    n_bins: int = 15,
    strategy: Strategy = "uniform",
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Mean |accuracy − confidence| of the predicted class over bins of confidence (ECE).

    Parameters are those of :func:`reliability_curve`.
    """
    return mean_gap(curve_of_prediction(y_true, proba, n_bins, strategy, labels, sample_weight))


def maximum_calibration_error(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    n_bins: int = 15,
    strategy: Strategy = "uniform",
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Largest |accuracy − confidence| of the predicted class over bins of confidence (MCE).

    Parameters are those of :func:`reliability_curve`. A bin with few points can decide it;
    ``strategy="adaptive"`` makes that less likely.
    """
    curve = curve_of_prediction(y_true, proba, n_bins, strategy, labels, sample_weight)
    return float(np.abs(curve.accuracy - curve.confidence).max())


def classwise_calibration_error(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    n_bins: int = 15,
    strategy: Strategy = "uniform",
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Mean over classes of |frequency − probability| of that class, over bins of probability.

    Unlike :func:`expected_calibration_error` it sees every probability, not only the largest.
    Parameters are those of :func:`reliability_curve`.
    """
    curves = curves_of_classes(y_true, proba, n_bins, strategy, labels, sample_weight)
    return float(np.mean([mean_gap(curve) for curve in curves]))


def class_calibration_errors(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    n_bins: int = 15,
    strategy: Strategy = "uniform",
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> Floats:
    """|frequency − probability| of each class, over bins of its probability: (C,).

    Parameters are those of :func:`reliability_curve`.
    """
    curves = curves_of_classes(y_true, proba, n_bins, strategy, labels, sample_weight)
    return np.array([mean_gap(curve) for curve in curves])


def class_reliability_curves(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    n_bins: int = 15,
    strategy: Strategy = "uniform",
    labels: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
) -> list[ReliabilityCurve]:
    """Frequency of each class against its probability, in bins of it, in the order of `labels`.

    ``confidence`` is the mean probability and ``accuracy`` the frequency of the class. Parameters
    are those of :func:`reliability_curve`.
    """
    return curves_of_classes(y_true, proba, n_bins, strategy, labels, sample_weight)


def curve_of_prediction(*given: Any) -> ReliabilityCurve:
    """As `curves_of_classes`, of the class that is predicted."""
    return curves_of_classes(*given, predicted=True)[0]


def curves_of_classes(
    y_true: ArrayLike,
    proba: ArrayLike,
    n_bins: int,
    strategy: Strategy,
    labels: ArrayLike | None,
    sample_weight: ArrayLike | None,
    predicted: bool = False,
) -> list[ReliabilityCurve]:
    codes, p, weight = _checked(y_true, proba, labels, sample_weight)
    total = len(codes) if sample_weight is None else np.sum(np.asarray(sample_weight, float))
    pairs = [(p_c, codes == c) for c, p_c in enumerate(p.T)]
    if predicted:
        pairs = [(p.max(axis=1), p.argmax(axis=1) == codes)]
    curves = (_curve(*pair, weight, n_bins, strategy) for pair in pairs)
    return [curve._replace(count=curve.count * total) for curve in curves]


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _share(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} must be between 0 and 1, got {value!r}")


def _bins(confidence: Floats, weight: Floats, n_bins: int, strategy: Strategy) -> NDArray[np.intp]:
    """The bin of each point, 0 to n_bins − 1: (n,)."""
    _positive("n_bins", n_bins)
    if strategy == "uniform":
        edges = np.arange(1, n_bins) / n_bins
        return np.searchsorted(edges, confidence, side="left")
    if strategy == "adaptive":
        # Where the middle of a value's share of the weight falls; so a point of weight 2 counts
        # as two points, and the order of the points does not matter.
        _, group = np.unique(confidence, return_inverse=True)
        share = np.bincount(group, weight)
        middle = np.cumsum(share) - share / 2
        # On the edge between two bins the last digit must not decide.
        return np.minimum((middle * n_bins + 1e-9).astype(np.intp), n_bins - 1)[group]
    raise ValueError(f'strategy must be "uniform" or "adaptive", got {strategy!r}')


def _curve(
    confidence: Floats, correct: NDArray[np.bool_], weight: Floats, n_bins: int, strategy: Strategy
) -> ReliabilityCurve:
    """A curve whose counts are shares of all weight."""
    bins = _bins(confidence, weight, n_bins, strategy)
    sums = [np.bincount(bins, weight * x) for x in (confidence, correct, np.ones(len(bins)))]
    total_confidence, total_correct, count = np.array(sums)[:, sums[-1] > 0]
    return ReliabilityCurve(total_confidence / count, total_correct / count, count)


def mean_gap(curve: ReliabilityCurve) -> float:
    """The calibration error over the bins of a curve."""
    return float(np.average(np.abs(curve.accuracy - curve.confidence), weights=curve.count))


def _checked(
    y_true: ArrayLike, proba: ArrayLike, labels: ArrayLike | None, sample_weight: ArrayLike | None
) -> tuple[NDArray[np.intp], Floats, Floats]:
    """Column of each true label (n,), probabilities (n, C), weights that sum to one (n,)."""
    y = np.asarray(y_true)
    if y.ndim != 1 or len(y) == 0:
        raise ValueError(f"y_true must be a vector that is not empty, got shape {y.shape}")
    p = _probabilities(proba)
    if len(p) != len(y):
        raise ValueError(f"y_true has {len(y)} labels, but proba has {len(p)} rows")
    return _codes(y, labels, p.shape[1]), p, _weights(sample_weight, len(y))


def _probabilities(proba: ArrayLike) -> Floats:
    given = np.asarray(proba)
    if given.ndim != 2 or given.shape[1] < 2:
        raise ValueError(
            f"proba must have shape (n, C), one column per class (two for binary problems), "
            f"got {given.shape}"
        )
    try:
        p = given.astype(np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"proba must hold numbers, got dtype {given.dtype}") from None
    if not len(p):
        raise ValueError("proba must have at least one row")
    if not np.isfinite(p).all():
        raise ValueError("proba contains NaN or infinity")
    if (p < 0).any():
        raise ValueError(f"proba contains negative values, the smallest is {p.min():.3g}")
    precision = np.finfo(given.dtype).eps if given.dtype.kind == "f" else 0.0
    error = np.abs(p.sum(axis=1) - 1).max()
    if error > max(1e-6, np.sqrt(precision)):
        raise ValueError(f"the rows of proba must sum to 1, one is off by {error:.3g}")
    return p


def _codes(y: NDArray[Any], labels: ArrayLike | None, n_columns: int) -> NDArray[np.intp]:
    if y.dtype.kind == "f" and np.isnan(y).any():
        raise ValueError("y_true contains NaN")
    if labels is None:
        columns = sorted(set(y.tolist()))
        if len(columns) != n_columns:
            raise ValueError(
                f"y_true has {len(columns)} different labels, but proba has {n_columns} columns; "
                f"pass labels="
            )
    else:
        columns = np.asarray(labels).tolist()
        if np.ndim(labels) != 1 or len(columns) != n_columns:
            raise ValueError(
                f"labels must name the {n_columns} columns of proba, got shape {np.shape(labels)}"
            )
    # A dictionary compares as Python does: 1 is 1.0 but not "1".
    column_of = {label: i for i, label in enumerate(columns)}
    if len(column_of) != len(columns):
        raise ValueError("labels contains a label twice")
    unknown = set(y.tolist()) - column_of.keys()
    if unknown:
        raise ValueError(f"y_true contains labels that are not in labels: {list(unknown)[:5]}")
    return np.array([column_of[label] for label in y.tolist()], dtype=np.intp)


def _weights(sample_weight: ArrayLike | None, n: int) -> Floats:
    if sample_weight is None:
        return np.full(n, 1.0 / n)
    weight = np.asarray(sample_weight, dtype=np.float64)
    if weight.shape != (n,):
        raise ValueError(f"sample_weight must have shape ({n},), got {weight.shape}")
    if not np.isfinite(weight).all() or (weight < 0).any() or weight.sum() == 0:
        raise ValueError("sample_weight must be finite, not negative and not all zero")
    return weight / weight.sum()
