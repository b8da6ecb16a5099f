"""What is checked of rows, labels and weights, and the weights of classes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    _num_samples,
    column_or_1d,
    validate_data,
)

from conjugp._estimators.tables import encoded, is_table, warn
from conjugp._inputs.frames import Frame, frame_of, holds_columns
from conjugp._inputs.inputs import Inputs
from conjugp._rows.canonical import Rows, ordered

MOST_SCALE = 3.0  # weights that average more than this, or less than its inverse, are no counts
MOST_COUNT = 1000.0  # ... nor are whole ones that average more, or than the next with many rows
MOST_OF_MANY, MANY = 30.0, 100


def no_rows(X: Any, y: Any) -> bool:
    """Whether there are neither rows nor labels: a batch or a rank may have none."""

    def empty(x: Any) -> bool:
        if hasattr(x, "shape"):
            return tuple(x.shape[:1]) == (0,)
        return hasattr(x, "__len__") and not len(x)

    return empty(X) and empty(y)


def check_rows(
    clf: Any, X: Any, y: Any, reset: bool, weight: Any = None, fitted: Inputs | None = None
) -> tuple[NDArray[np.floating], Any]:
    """Checked X as float32 or float64, features of a table's columns in float64, and y.

    Where `fitted` inputs are numbers, gaps in new rows are their means.
    """
    plain = isinstance(X, np.ndarray) and X.dtype.kind in "iubf"  # the short way
    if reset:
        plain &= isinstance(clf.categorical, str) and not len(clf.ignore)
    else:
        plain &= getattr(clf, "_encoder", None) is None
    if not plain and is_table(clf, X, reset):
        return _check_table(clf, X, y, reset, weight)
    if reset:
        clf._encoder = None
    if isinstance(X, Frame):
        return _check_numbers(clf, X, y, reset, fitted)
    if isinstance(X, np.ndarray) and X.dtype.kind in "iub" and X.dtype.itemsize <= 2:
        X = X.astype(np.float32)  # exact, and half the memory of scikit-learn's float64
    try:
        labels: Any = {} if y is None and not reset else {"y": y}
        rows: Any = X
        with np.errstate(over="ignore", invalid="ignore"):
            out: Any = validate_data(
                clf, rows, reset=reset, dtype=(np.float64, np.float32), **labels
            )
    except (TypeError, ValueError, OverflowError) as error:
        numbers = X if reset or not holds_columns(X) else np.asarray(frame_of(X))
        gaps = "X contains NaN" in str(error)
        if isinstance(error, TypeError):
            gaps = numbers is not X  # one of those that NumPy does not know
            if not gaps:
                raise
        if gaps and np.ndim(numbers) == 2 and not np.isinf(np.asarray(numbers)).any():
            if reset:
                return _check_table(clf, X, y, reset, weight)
            if fitted is not None and np.shape(numbers)[1] == fitted.n_features:
                numbers = np.where(np.isnan(numbers), fitted.scaling.shift, numbers)
                with warnings.catch_warnings():  # names were looked at before
                    warnings.filterwarnings("ignore", "X does not have valid feature names")
                    return check_rows(clf, numbers, y, reset)
        if re.search(r"\b[Xy]\b", str(error)):
            raise
        name = "X and y" if "inconsistent" in str(error) else "X"
        raise ValueError(f"{name}: {error}") from error
    return out if isinstance(out, tuple) else (out, None)


def _check_numbers(
    clf: Any, X: Frame, y: Any, reset: bool, fitted: Inputs | None
) -> tuple[NDArray[np.floating], Any]:
    """Checked rows of a frame of numbers, found by name."""
    names = list(X.columns if reset else getattr(clf, "feature_names_in_", X.columns))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "X does not have valid feature names")
        out = check_rows(clf, np.asarray(X.only(names)), y, reset, fitted=fitted)
    if reset and X.named:
        set_features(clf, len(names), names)
    return out


def _check_table(
    clf: Any, X: Any, y: Any, reset: bool, weight: Any
) -> tuple[NDArray[np.float64], Any]:
    """The features of a table's rows, and y."""
    if y is None and not reset:
        return encoded(clf, X, None, None, reset), None
    labels, n = check_labels(y), _num_samples(X)
    if len(labels) != n:
        raise ValueError(
            f"X and y: Found input variables with inconsistent numbers of samples: "
            f"{[n, len(labels)]}"
        )
    if not reset:
        return encoded(clf, X, None, None, reset), labels
    weight = check_weight(weight, np.empty((n, 1)))
    return encoded(clf, X, labels, weight, reset), labels


def names_of(clf: Any) -> tuple[str, ...] | None:
    """The names of the features, where X had any."""
    names = getattr(clf, "feature_names_in_", None)
    return None if names is None else tuple(map(str, names))


def set_inputs(clf: Any, inputs: Inputs) -> None:
    """Set what scikit-learn keeps of the user's columns."""
    encoder = inputs.encoder
    if encoder is None:
        set_features(clf, inputs.n_features, inputs.names)
    else:
        set_features(clf, len(encoder.names), encoder.names if encoder.named else None)


def set_features(clf: Any, n_features: int, names: Sequence[str] | None) -> None:
    """Set what scikit-learn keeps of the features."""
    clf.n_features_in_ = n_features
    if names is not None:
        clf.feature_names_in_ = np.asarray(names, dtype=object)


def check_labels(y: Any) -> NDArray[Any]:
    """Labels of one kind, (n,)."""
    if y is None:
        raise ValueError("this classifier requires y to be passed, but the target y is None")
    try:
        with np.errstate(invalid="ignore"):
            check_classification_targets(y)
        return column_or_1d(y, warn=True)
    except ValueError as error:
        if "label type: unknown" not in str(error):
            raise ValueError(f"y: {error}") from error
        raise ValueError(
            "y must hold labels of one kind, and none missing (Unknown label type)"
        ) from error
    except TypeError as error:
        raise ValueError(f"y must hold labels of one kind, and none missing ({error})") from error


def check_classes(found: NDArray[Any]) -> None:
    """Raise unless there are at least two."""
    if len(found) < 2:
        raise ValueError(
            f"y must hold at least 2 classes with positive weight, got one class: {found.tolist()}"
        )


def check_weight(sample_weight: ArrayLike | None, X: NDArray[Any]) -> NDArray[np.float64]:
    """Non-negative, finite weights of the rows, (n,)."""
    try:
        return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    except ValueError as error:
        if "sample_weight" in str(error):
            raise
        raise ValueError(f"sample_weight: {error}") from error


class WeightScale(NamedTuple):
    """How large weights are: the sum of those above 0, their number, whether all are whole."""

    total: float = 0.0
    n: int = 0
    whole: bool = True

    @classmethod
    def of(cls, weight: NDArray[np.float64]) -> WeightScale:
        """That of checked weights."""
        some = weight[weight > 0]
        # Beyond 2^53 floats have no fractions left to tell by.
        whole = (some == np.rint(some)) & (some <= 2.0**53)
        with np.errstate(over="ignore"):
            return cls(float(some.sum()), len(some), bool(whole.all()))

    def plus(self, other: WeightScale) -> WeightScale:
        """That of both."""
        return WeightScale(self.total + other.total, self.n + other.n, self.whole and other.whole)

    def warn(self) -> None:
        """Say what a weight means where it is unlikely that these were meant to count rows."""
        mean = self.total / max(self.n, 1)
        if not self.n or 1 / MOST_SCALE <= mean <= MOST_SCALE:
            return
        if self.whole and mean <= (MOST_OF_MANY if self.n > MANY else MOST_COUNT):
            return
        warn(
            f"sample_weight averages {self.total / self.n:.4g}, and a row of weight 2 counts like "
            f"two rows: these {self.n} count like {self.total:.4g}, and the posterior is as wide "
            "as with so many. If the weights only compare rows with one another, multiply them by "
            f"{self.n / self.total:.4g}, so that they average 1",
        )


def check_labelled(
    clf: Any, X: Any, y: Any, sample_weight: ArrayLike | None, reset: bool
) -> tuple[NDArray[np.floating], NDArray[Any], NDArray[np.float64]]:
    """Checked rows of positive weight (n, D), their labels (n,) and weights (n,)."""
    X, y = check_rows(clf, X, y, reset, sample_weight)
    y, weight = check_labels(y), check_weight(sample_weight, X)
    some = weight > 0
    return (X, y, weight) if some.all() else (X[some], y[some], weight[some])


def check_training_data(
    clf: Any,
    X: ArrayLike,
    y: ArrayLike,
    sample_weight: ArrayLike | None,
    classes: NDArray[Any] | None = None,
    reset: bool = True,
) -> tuple[Rows, NDArray[Any]]:
    """Checked, weighted, merged rows, and the classes."""
    return merged(clf, *check_labelled(clf, X, y, sample_weight, reset), classes)


def merged(
    clf: Any,
    X_: NDArray[np.floating],
    y_: NDArray[Any],
    weight: NDArray[np.float64],
    classes: NDArray[Any] | None = None,
) -> tuple[Rows, NDArray[Any]]:
    """The same of checked rows."""
    if not len(y_):
        raise ValueError("sample_weight is zero for every row: there is nothing to fit")
    WeightScale.of(weight).warn()
    found = np.unique(y_)
    if classes is None:
        classes = found
        check_classes(classes)
    check_known(found, classes)
    labels = np.searchsorted(classes, y_)
    mass = np.bincount(labels, weights=weight, minlength=len(classes))
    weight = weight * class_factors(getattr(clf, "class_weight", None), classes, mass)[labels]
    rows = ordered(X_, labels, weight)
    check_some(rows.n)
    return rows, classes


def check_known(labels: NDArray[Any], classes: NDArray[Any]) -> None:
    """Raise for labels that are no classes."""
    unseen = np.setdiff1d(labels, classes)
    if len(unseen):
        raise ValueError(f"y holds labels that are not in classes: {unseen.tolist()}")


def check_some(n: int) -> None:
    """Raise if weights have left none of the rows."""
    if not n:
        raise ValueError("class_weight and sample_weight leave no row with any weight")


def class_factors(
    class_weight: Any, classes: NDArray[Any], mass: NDArray[Any]
) -> NDArray[np.float64]:
    """What multiplies the weights of every class, (C,), which come to `mass` (C,) without it."""
    if class_weight is None:
        return np.ones(len(classes))
    if isinstance(class_weight, str) and class_weight == "balanced":
        factor = mass.sum() / (len(classes) * np.maximum(mass, np.finfo(float).tiny))
    else:
        try:
            factor = compute_class_weight(class_weight, classes=classes, y=classes)
        except (TypeError, ValueError) as error:
            raise ValueError(f"class_weight: {error}") from error
    if not np.all(np.isfinite(factor)) or np.any(factor < 0):
        raise ValueError("class_weight must be non-negative and finite")
    return np.asarray(factor, dtype=np.float64)


@contextmanager
def unchanged_on_error(clf: Any) -> Iterator[None]:
    """Leave a fitted estimator as it was when new rows turn out to be bad."""
    before = dict(clf.__dict__)
    try:
        yield
    except BaseException:
        clf.__dict__.clear()
        clf.__dict__.update(before)
        raise
