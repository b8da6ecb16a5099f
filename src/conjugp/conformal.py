"""Sets of labels that hold the true one at a promised rate (split conformal prediction)."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from conjugp._estimators.wrapper import PostHocClassifier
from conjugp._numerics.threads import blocks

__all__ = ["ConformalClassifier"]

_ELEMENTS = 2**20  # rows times classes that are sorted at a time


class ConformalClassifier(PostHocClassifier):
    """Sets of labels around any classifier, which hold the true label at the rate asked for.

    Rows that the classifier was not fitted to say how far down its list of classes one has to go.
    If new rows come from where those came from, a set holds the true label with a probability of
    at least 1 − alpha, whatever the classifier is worth; a bad one has large sets.

    Parameters
    ----------
    estimator : classifier with ``predict_proba``
        If it is fitted, it is kept, and all rows given to ``fit`` calibrate. If not, a clone is
        fitted to some of them, and the others calibrate. ``clone`` forgets a fit: wrap the
        estimator in ``sklearn.frozen.FrozenEstimator`` where that must not happen.
    method : {"aps", "lac"}, default="aps"
        How unlikely a class is. ``"aps"``: the probability of all classes before it; sets are
        never empty, and grow where the classifier is unsure. ``"lac"``: one minus its own
        probability; sets are the smallest on average, but may be empty.
    class_conditional : bool, default=False
        Whether the rate is promised for the rows of every class, or only for all rows together.
    held_out : float, default=0.2
        Share of the rows that calibrate where the estimator is not fitted.
    random_state : int, RandomState instance or None, default=None
        Which rows those are.

    Attributes
    ----------
    estimator_ : classifier
        The fitted classifier.
    scores_ : list of ndarray
        Scores of the calibrating rows, sorted: of each class, or of all rows.
    classes_ : ndarray of shape (n_classes,)
        Labels of the columns of a set.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from conjugp import GPClassifier
    >>> from conjugp.conformal import ConformalClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = GPClassifier(random_state=0).fit(X[::2], y[::2])
    >>> sets = ConformalClassifier(clf).fit(X[1::4], y[1::4]).predict_set(X[3::4], alpha=0.1)
    >>> sets.shape
    (37, 3)
    """

    def __init__(
        self,
        estimator: Any,
        *,
        method: str = "aps",
        class_conditional: bool = False,
        held_out: float = 0.2,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.estimator = estimator
        self.method = method
        self.class_conditional = class_conditional
        self.held_out = held_out
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> ConformalClassifier:
        """Score labelled rows that the estimator has not seen.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows that calibrate; with an estimator that is not fitted, rows for both.
        y : array-like of shape (n_samples,)
            Their labels.

        Returns
        -------
        self : ConformalClassifier
        """
        if self.method not in ("aps", "lac"):
            raise ValueError(f"method must be 'aps' or 'lac', got {self.method!r}")
        rows = self._fit_estimator(X, y)
        scores = np.empty(len(rows.y))
        for i in blocks(len(rows.y), rows.proba.shape[1], _ELEMENTS):
            scores[i] = np.take_along_axis(self._scores(rows.proba[i]), rows.y[i, None], 1)[:, 0]
        if self.class_conditional:
            classes = range(rows.proba.shape[1])
            self.scores_ = [np.sort(scores[rows.y == c]) for c in classes]
        else:
            self.scores_ = [np.sort(scores)]
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The probabilities of the estimator.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        proba : ndarray of shape (n_samples, n_classes)
        """
        check_is_fitted(self)
        return np.asarray(self.estimator_.predict_proba(X))

    def predict_set(self, X: ArrayLike, alpha: float = 0.1) -> NDArray[np.bool_]:
        """Which labels the set of every row holds.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.
        alpha : float, default=0.1
            The rate at which the true label may be missing. With fewer than 1/alpha − 1 rows to
            calibrate on (of a class, if ``class_conditional``) nothing can be promised but all
            classes (that class in every set), and a warning says so.

        Returns
        -------
        mask : ndarray of bool of shape (n_samples, n_classes)
            ``classes_[mask[i]]`` are the labels in the set of row i.
        """
        limits = self.thresholds(alpha)
        p = np.asarray(self.estimator_.predict_proba(X), dtype=np.float64)
        mask = np.empty(p.shape, dtype=np.bool_)
        for i in blocks(len(p), p.shape[1], _ELEMENTS):
            mask[i] = self._scores(p[i]) <= limits
        return mask

    def thresholds(self, alpha: float = 0.1) -> NDArray[np.float64]:
        """The largest score with which a class is in a set.

        Parameters
        ----------
        alpha : float, default=0.1
            As in :meth:`predict_set`.

        Returns
        -------
        thresholds : ndarray of shape (n_classes,)
            Of n scores the k-th smallest, k = ⌈(n + 1)(1 − alpha)⌉; infinite where k > n.
        """
        check_is_fitted(self)
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
        # As it is written: 10 times 1 − 0.1 is 9, not 9 and a bit.
        kept = 1 - Fraction(repr(float(alpha)))
        limits = []
        for scores in self.scores_:
            k = math.ceil((len(scores) + 1) * kept)
            limits.append(scores[k - 1] if k <= len(scores) else math.inf)
        few = int(np.isinf(limits).sum())
        if few:
            need = math.ceil(1 / (1 - kept)) - 1
            what = (
                f"{few} of {len(limits)} classes have fewer than {need} rows to calibrate on and "
                "are in every set"
                if self.class_conditional
                else f"there are fewer than {need} rows to calibrate on, and sets hold all classes"
            )
            warnings.warn(f"alpha={alpha}: {what}", UserWarning, stacklevel=2)
        return np.broadcast_to(limits, len(self.classes_)).astype(np.float64)

    def _scores(self, p: NDArray[np.float64]) -> NDArray[np.float64]:
        """How unlikely every class is, (n, C)."""
        if self.method == "lac":
            return 1.0 - p
        order = np.argsort(-p, axis=1, kind="stable")
        ordered = np.take_along_axis(p, order, axis=1)
        before = np.zeros_like(p)
        np.cumsum(ordered[:, :-1], axis=1, out=before[:, 1:])
        # Classes that are equally probable have the same classes before them.
        new = np.ones(p.shape, dtype=bool)
        new[:, 1:] = ordered[:, 1:] < ordered[:, :-1]
        first = np.maximum.accumulate(np.where(new, np.arange(p.shape[1]), 0), axis=1)
        scores = np.empty_like(p)
        np.put_along_axis(scores, order, np.take_along_axis(before, first, axis=1), axis=1)
        return scores
