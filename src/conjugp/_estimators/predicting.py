"""What every classifier here derives from its probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import Tensor

CHUNK_ELEMENTS = 2**20  # rows times classes at a time
# Entropies below it are too small to be divided: the integrals have six or seven digits.
SMALL_ENTROPY = 1e-5


class Uncertainty(NamedTuple):
    """What is uncertain about the label of every row, in nats, and why; total is their sum.

    Attributes
    ----------
    total : ndarray of shape (n_samples,)
        Entropy of the predicted probabilities.
    aleatoric : ndarray of shape (n_samples,)
        What would be left if the latent functions were known.
    epistemic : ndarray of shape (n_samples,)
        What knowing them would take away: the mutual information of label and latent functions.
    """

    total: NDArray[np.float64]
    aleatoric: NDArray[np.float64]
    epistemic: NDArray[np.float64]


class Predictive(NamedTuple):
    """Some rows under the posterior: their probabilities and E[H[p(y | f)]]."""

    proba: NDArray[np.float64]  # (n, C)
    expected_entropy: NDArray[np.float64]  # (n,)


class ProbabilisticClassifier(ClassifierMixin, BaseEstimator):
    """Labels, logarithms and scores from probabilities, which come in chunks of rows."""

    classes_: NDArray[Any]

    def _inputs(self, X: ArrayLike) -> Tensor:
        """Checked rows in working units; an error before there is a fit."""
        raise NotImplementedError

    def _proba(self, X: Tensor) -> NDArray[np.float64]:
        """Probabilities of rows in working units."""
        raise NotImplementedError

    def _predictive(self, X: Tensor) -> Predictive:
        """The posterior predictive, not calibrated, of rows in working units."""
        raise NotImplementedError

    def _is_calibrated(self) -> bool:
        """Whether probabilities are other than the posterior predictive."""
        return False

    def _chunks(self, X: Tensor) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Some rows and their probabilities at a time, so many that memory is bounded."""
        size = max(1, CHUNK_ELEMENTS // len(self.classes_))
        for i in range(0, len(X), size):
            yield slice(i, i + size), self._proba(X[i : i + size])

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Class probabilities.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        proba : ndarray of shape (n_samples, n_classes)
            float64; the rows sum to 1.
        """
        rows = self._inputs(X)
        out = np.empty((len(rows), len(self.classes_)))
        for i, p in self._chunks(rows):
            out[i] = p
        return out

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
        rows = self._inputs(X)
        best = np.empty(len(rows), dtype=np.intp)
        for i, p in self._chunks(rows):
            best[i] = p.argmax(axis=1)
        return self.classes_[best]

    def predict_topk(self, X: ArrayLike, k: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """The most probable classes of every row, best first.

        Memory does not grow with the number of rows times classes, so thousands of classes and
        millions of rows are no problem.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.
        k : int
            How many classes, at most all.

        Returns
        -------
        labels : ndarray of shape (n_samples, k)
            Labels out of ``classes_``; of equally probable ones the first there comes first.
        proba : ndarray of shape (n_samples, k)
            Their probabilities.
        """
        rows = self._inputs(X)
        C = len(self.classes_)
        if isinstance(k, bool) or not isinstance(k, Integral) or not 1 <= k <= C:
            raise ValueError(f"k must be a whole number from 1 to {C}, the classes; got {k!r}")
        best = np.empty((len(rows), k), dtype=np.intp)
        proba = np.empty((len(rows), k))
        for i, p in self._chunks(rows):
            best[i] = _largest(p, int(k))
            proba[i] = np.take_along_axis(p, best[i], axis=1)
        return self.classes_[best], proba

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

    def predict_uncertainty(self, X: ArrayLike, *, calibrated: bool = True) -> Uncertainty:
        """How uncertain the label of every row is, and how much of that more data could mend.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.
        calibrated : bool, default=True
            Whether the total is the entropy of ``predict_proba``, divided in the proportion that
            the posterior has; or that of the posterior predictive itself, without temperature and
            with the whole latent variance, where the epistemic part is exactly the mutual
            information. Without a temperature both are the same.

        Returns
        -------
        uncertainty : Uncertainty
            ``total``, ``aleatoric`` and ``epistemic``, each of shape (n_samples,), in nats.
        """
        rows = self._inputs(X)
        out = Uncertainty(*np.zeros((3, len(rows))))
        size = max(1, CHUNK_ELEMENTS // len(self.classes_))
        for i in range(0, len(rows), size):
            part = slice(i, i + size)
            p, expected = self._predictive(rows[part])
            total = entropy(p)
            epistemic = np.clip(total - expected, 0.0, total)
            if calibrated and self._is_calibrated():
                share = epistemic / np.maximum(total, SMALL_ENTROPY)
                total = entropy(self._proba(rows[part]))
                epistemic = share * total
            out.total[part], out.epistemic[part] = total, epistemic
            out.aleatoric[part] = total - epistemic
        return out

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


def entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of every row of probabilities, in nats: (n, C) -> (n,)."""
    return np.maximum(-(p * np.log(np.maximum(p, np.finfo(np.float64).tiny))).sum(axis=1), 0.0)


def _largest(p: NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """Columns of the k largest numbers of every row, best first, the leftmost of equal ones."""
    if k == p.shape[1]:
        return np.argsort(-p, axis=1, kind="stable")
    top = np.argpartition(-p, k - 1, axis=1)[:, :k]
    least = np.take_along_axis(p, top, axis=1).min(axis=1, keepdims=True)
    tied = (p >= least).sum(axis=1) > k
    top[tied] = np.argsort(-p[tied], axis=1, kind="stable")[:, :k]
    top.sort(axis=1)
    order = np.argsort(-np.take_along_axis(p, top, axis=1), axis=1, kind="stable")
    return np.take_along_axis(top, order, axis=1)
