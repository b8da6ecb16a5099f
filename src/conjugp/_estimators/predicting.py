"""What every classifier here asks of its predictor, and derives from the probabilities."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from conjugp._estimators.rows import check_rows, check_weight
from conjugp._fit.options import seed_of, whole
from conjugp._gp.predictor import EXACT, Integration, Predictor, entropy
from conjugp._inputs.inputs import Inputs
from conjugp._rows.canonical import Rows
from conjugp._rows.dataset import Data

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


class ProbabilisticClassifier(ClassifierMixin, BaseEstimator):
    """Labels, units and checks around a predictor, which is asked in chunks of rows."""

    classes_: NDArray[Any]
    _inputs: Inputs

    @property
    def _predictor(self) -> Predictor:
        """What answers; an error before there is a fit."""
        raise NotImplementedError

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.categorical = True
        tags.input_tags.string = True
        return tags

    def _integration(self) -> Integration:
        """How probabilities are integrated."""
        return EXACT

    def _rows(self, X: ArrayLike) -> Tensor:
        """Checked rows in working units; an error before there is a fit."""
        Z = self._predictor.Z
        return self._inputs.apply(check_rows(self, X, None, False, fitted=self._inputs)[0], Z)

    def _labelled(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> Data:
        """Checked rows with labels out of ``classes_``, in working units."""
        Z = self._predictor.Z
        X_, y_ = check_rows(self, X, y, False, fitted=self._inputs)
        y_ = column_or_1d(y_, warn=True)
        unseen = np.setdiff1d(y_, self.classes_)
        if len(unseen):
            raise ValueError(f"y holds labels that were not in the fit: {unseen.tolist()}")
        rows = Rows(X_, np.searchsorted(self.classes_, y_), check_weight(sample_weight, X_))
        return rows.in_memory(self._inputs.scaling, len(self.classes_), Z.dtype, Z.device)

    def _keep_face(self, predictor: Predictor, inputs: Inputs, classes: NDArray[Any]) -> None:
        """Set the fitted attributes that every classifier has, in the user's units."""
        inner, mean = predictor.prior()
        kernels = [inputs.outward(kernel) for kernel in inner]
        self.classes_, self._inputs, self._encoder = classes, inputs, inputs.encoder
        self.columns_ = inputs.columns
        self.kernel_ = kernels[0] if len(kernels) == 1 else kernels
        self.inducing_points_ = inputs.invert(predictor.Z)
        self.prior_mean_ = mean.cpu().double().numpy()

    @property
    def features_(self) -> list[str] | None:
        """Names of the features, which `kernel_` and `inducing_points_` speak of."""
        check_is_fitted(self)
        return None if self._inputs.names is None else list(self._inputs.names)

    @property
    def inducing_columns_(self) -> dict[str, NDArray[Any]] | None:
        """Inducing points in the columns of a table; None for plain numbers."""
        check_is_fitted(self)
        encoder = self._inputs.encoder
        return None if encoder is None else encoder.decode(self.inducing_points_)

    def _slices(self, X: Tensor) -> Iterator[slice]:
        """Some rows at a time, so many that memory is bounded."""
        size = max(1, CHUNK_ELEMENTS // len(self.classes_))
        return (slice(i, i + size) for i in range(0, len(X), size))

    def _chunks(self, X: Tensor) -> Iterator[tuple[slice, NDArray[np.float64]]]:
        """Some rows and their probabilities at a time."""
        predictor, how = self._predictor, self._integration()
        for i in self._slices(X):
            yield i, predictor.proba(X[i], how)

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
        rows = self._rows(X)
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
        rows = self._rows(X)
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
        rows = self._rows(X)
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
        rows, predictor, how = self._rows(X), self._predictor, self._integration()
        out = Uncertainty(*np.zeros((3, len(rows))))
        for part in self._slices(rows):
            p, expected = predictor.predictive(rows[part])
            total = entropy(p)
            epistemic = np.clip(total - expected, 0.0, total)
            if calibrated and not predictor.calibration.plain:
                share = epistemic / np.maximum(total, SMALL_ENTROPY)
                total = entropy(predictor.proba(rows[part], how))
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

    def predict_latent(self, X: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and variance of the latent functions under the posterior.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        mean, variance : ndarray of shape (n_samples, n_classes)
        """
        m, v = self._predictor.latent(self._rows(X))
        return m.cpu().double().numpy(), v.cpu().double().numpy().copy()

    def sample_latent(
        self,
        X: ArrayLike,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = None,
    ) -> NDArray[np.float64]:
        """Joint draws of the latent functions at the rows of X, at a cost of n_rows³.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_features)
            Where to draw.
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        draws : ndarray of shape (n_samples, n_rows, n_classes)
        """
        whole("n_samples", n_samples, 1)
        predictor = self._predictor
        generator = torch.Generator().manual_seed(seed_of(random_state))
        return predictor.sample(self._rows(X), n_samples, generator).cpu().double().numpy()


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


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Let Ctrl-C do nothing; signals are the main thread's."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
