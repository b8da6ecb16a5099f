"""One temperature for the probabilities of any classifier (docs/math.md, P6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from conjugp._estimators.wrapper import PostHocClassifier
from conjugp._gp.prediction import apply_temperature
from conjugp._gp.temperature import TINY, fit_temperature

__all__ = ["TemperatureScaled"]


class TemperatureScaled(PostHocClassifier):
    """Any classifier with its probabilities set right by one temperature, p^(1/T) normalised.

    The temperature is the one ``GPClassifier.calibrate`` finds: of the lowest log loss on rows
    that the classifier has not seen, drawn towards 1 where they are few. Predicted labels stay.

    Parameters
    ----------
    estimator : classifier with ``predict_proba``
        If it is fitted, it is kept, and all rows given to ``fit`` set the temperature. If not, a
        clone is fitted to some of them, and the others set it. ``clone`` forgets a fit: wrap the
        estimator in ``sklearn.frozen.FrozenEstimator`` where that must not happen.
    held_out : float, default=0.2
        Share of the rows that set the temperature where the estimator is not fitted.
    random_state : int, RandomState instance or None, default=None
        Which rows those are.

    Attributes
    ----------
    estimator_ : classifier
        The fitted classifier.
    temperature_ : float
        Above 1 where the classifier was too sure.
    classes_ : ndarray of shape (n_classes,)
        Labels of the columns.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from conjugp.calibration import TemperatureScaled
    >>> X, y = load_digits(return_X_y=True)
    >>> clf = TemperatureScaled(GaussianNB().fit(X[::2], y[::2])).fit(X[1::4], y[1::4])
    >>> clf.predict_proba(X[3::4]).shape
    (449, 10)
    """

    def __init__(
        self,
        estimator: Any,
        *,
        held_out: float = 0.2,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.estimator = estimator
        self.held_out = held_out
        self.random_state = random_state

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> TemperatureScaled:
        """Find the temperature.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows the estimator has not seen; with one that is not fitted, rows for both.
        y : array-like of shape (n_samples,)
            Their labels.
        sample_weight : array-like of shape (n_samples,) or None, default=None
            Weights of the rows.

        Returns
        -------
        self : TemperatureScaled
        """
        rows = self._fit_estimator(X, y, sample_weight)
        p, labels, weight = (torch.as_tensor(a) for a in rows)
        self.temperature_, _ = fit_temperature(p, labels, weight)
        return self

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Probabilities of the estimator at the temperature.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        proba : ndarray of shape (n_samples, n_classes)
        """
        check_is_fitted(self)
        p = np.asarray(self.estimator_.predict_proba(X), dtype=np.float64)
        return apply_temperature(torch.as_tensor(p).clamp(min=TINY), self.temperature_).numpy()
