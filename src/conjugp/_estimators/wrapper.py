"""What classifiers around another one share: the fitted one, and rows it was not fitted to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import Tags, _safe_indexing, check_random_state, get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    has_fit_parameter,
    indexable,
)


class HeldOut(NamedTuple):
    """Rows the estimator has not seen, with labels as columns of its probabilities."""

    proba: NDArray[np.float64]  # (n, C)
    y: NDArray[np.intp]  # (n,)
    weight: NDArray[np.float64]  # (n,)


class PostHocClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """The base of classifiers that correct or complete the probabilities of another one."""

    estimator: Any
    held_out: float
    random_state: int | np.random.RandomState | None
    estimator_: Any

    def _fit_estimator(self, X: Any, y: Any, sample_weight: Any = None) -> HeldOut:
        """Keep a fitted estimator, or fit a clone to some of the rows; the rest is held out."""
        if not hasattr(self.estimator, "predict_proba"):
            raise TypeError(
                f"estimator must have predict_proba, which {type(self.estimator).__name__} has not"
            )
        if not 0.0 < self.held_out < 1.0:
            raise ValueError(f"held_out must be between 0 and 1, got {self.held_out!r}")
        if y is None:
            raise ValueError("this classifier requires y to be passed, but the target y is None")
        X, y, sample_weight = indexable(X, y, sample_weight)
        labels = column_or_1d(y, warn=True)
        check_classification_targets(labels)
        weight: Any = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        estimator: Any = self.estimator
        if not is_fitted(estimator):
            train, held = split(labels, self.held_out, self.random_state)
            estimator = clone(estimator)
            given = {}
            if weight is not None and has_fit_parameter(estimator, "sample_weight"):
                given["sample_weight"] = weight[train]
            estimator.fit(_safe_indexing(X, train), labels[train], **given)
            if not len(held):
                raise ValueError(
                    f"none of n_samples={len(labels)} rows can be held out: raise held_out or "
                    "give more"
                )
            X, labels = _safe_indexing(X, held), labels[held]
            weight = None if weight is None else weight[held]
        proba = np.asarray(estimator.predict_proba(X), dtype=np.float64)
        weight = np.ones(len(labels)) if weight is None else weight.astype(np.float64)
        rows = HeldOut(proba, codes_of(labels, estimator.classes_), weight)
        self.estimator_ = estimator
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(estimator, name):
                setattr(self, name, getattr(estimator, name))
        return rows

    @property
    def classes_(self) -> NDArray[Any]:
        """Labels of the columns."""
        return self.estimator_.classes_

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The labels that the estimator predicts.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        labels : ndarray of shape (n_samples,)
        """
        check_is_fitted(self)
        return self.estimator_.predict(X)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        of_estimator = get_tags(self.estimator)
        tags.input_tags = of_estimator.input_tags
        if tags.classifier_tags is not None and of_estimator.classifier_tags is not None:
            tags.classifier_tags.multi_class = of_estimator.classifier_tags.multi_class
        return tags


def is_fitted(estimator: Any) -> bool:
    """Whether there is anything to keep."""
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        return False
    return True


def split(
    y: NDArray[Any], share: float, random_state: int | np.random.RandomState | None
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows to fit and rows to hold out, of all classes alike; every class keeps a row to fit."""
    _, codes = np.unique(y, return_inverse=True)
    shuffled = check_random_state(random_state).permutation(len(y))
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    place = np.arange(len(y))
    held = np.floor((place + 1) * share + 0.5) > np.floor(place * share + 0.5)
    held[np.diff(codes[order], prepend=-1) > 0] = False
    return np.sort(order[~held]), np.sort(order[held])


def codes_of(y: NDArray[Any], classes: NDArray[Any]) -> NDArray[np.intp]:
    """The column of every label; ValueError for one that the estimator does not know."""
    unseen = np.setdiff1d(y, classes)
    if len(unseen):
        raise ValueError(f"y holds labels that the estimator was not fitted to: {unseen.tolist()}")
    return np.searchsorted(classes, y)
