"""What every classifier here derives from its probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin


class ProbabilisticClassifier(ClassifierMixin, BaseEstimator):
    """Labels, logarithms and scores from ``predict_proba`` and ``classes_``."""

    classes_: NDArray[Any]

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Class probabilities, float64, rows summing to 1."""
        raise NotImplementedError

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class of every row.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        labels : ndarray of shape (n_samples,)
            Labels out of ``classes_``.
        """
        p = self.predict_proba(X)
        return self.classes_[p.argmax(axis=1)]

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Logarithms of ``predict_proba``, finite.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        log_proba : ndarray of shape (n_samples, n_classes)
        """
        return np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny))

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """Log-probabilities, or with two classes the log-odds of the second.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        scores : ndarray of shape (n_samples, n_classes) or (n_samples,)
        """
        log_p = self.predict_log_proba(X)
        return log_p[:, 1] - log_p[:, 0] if log_p.shape[1] == 2 else log_p
