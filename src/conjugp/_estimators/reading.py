"""From a source of batches to checked rows: in memory if they are few, else on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._estimators.rows import (
    WeightScale,
    check_classes,
    check_known,
    check_labelled,
    check_some,
    class_factors,
    no_rows,
    set_features,
)
from conjugp._rows.canonical import Rows
from conjugp._rows.on_disk import Spool, Store
from conjugp._rows.sources import Batch

MEMORY_BYTES = 2**28  # rows that take no more than this are kept in memory


class _Labels:
    """Numbers for labels in the order in which they come."""

    def __init__(self, classes: NDArray[Any] | None) -> None:
        self.classes, self.found = classes, None
        self._number: dict[Any, int] = {}

    def __call__(self, y: NDArray[Any]) -> NDArray[np.int64]:
        labels, inverse = np.unique(y, return_inverse=True)
        if self.classes is not None:
            check_known(labels, self.classes)
        if self.found is None:
            self.found = labels
        elif (self.found.dtype.kind in "OUS") != (labels.dtype.kind in "OUS"):
            raise ValueError(f"y must hold labels of one kind; got {self.found[0]!r} and {y[0]!r}")
        else:
            self.found = np.unique(np.concatenate([self.found, labels]))
        number = [self._number.setdefault(x, len(self._number)) for x in labels.tolist()]
        return np.array(number)[inverse.ravel()]

    def settled(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All classes, and where among them each number's label is."""
        assert self.found is not None
        classes = self.found if self.classes is None else self.classes
        index = {label: i for i, label in enumerate(classes.tolist())}
        return classes, np.array([index[label] for label in self._number])


def read(
    clf: Any,
    batches: Iterable[Batch],
    classes: NDArray[Any] | None,
    folder: str | os.PathLike[str] | None,
    report: Callable[[int], None],
) -> tuple[Rows | Store, NDArray[Any]]:
    """Checked, weighted, merged rows in their order, and the classes.

    `report` is called with the number of rows after every batch.
    """
    label, spool, scale, names = _Labels(classes), None, WeightScale(), None
    mass: NDArray[Any] = np.zeros(0)
    try:
        for batch in batches:
            if no_rows(batch.X, batch.y):
                continue
            try:
                X, y, weight = check_labelled(clf, batch.X, batch.y, batch.weight, spool is None)
                number = label(y) if len(y) else np.zeros(0, np.int64)
            except ValueError as error:
                raise ValueError(f"source, {batch.where}: {error}") from error
            if spool is None:
                wide = getattr(clf, "dtype", "float32") == "float64"
                spool = Spool(X.shape[1], np.dtype(np.float64) if wide else X.dtype, folder)
                names = batch.names
            spool.add(X, number, weight)
            scale = scale.plus(WeightScale.of(weight))
            mass = _sum(mass, np.bincount(number, weights=weight))
            report(spool.n)
        if spool is None or not spool.n:
            raise ValueError("source holds no rows with positive weight")
        # At the end: arrays from the batches of a frame would be warned of.
        if names is not None and clf._encoder is None:
            set_features(clf, len(names), names)
        scale.warn()
        known, place = label.settled()
        if classes is None:
            check_classes(known)
        in_place = np.zeros(len(known))
        in_place[place] = mass
        factor = class_factors(getattr(clf, "class_weight", None), known, in_place)
        store = spool.finish(place, factor)
    finally:
        if spool is not None:
            spool.close()
    check_some(store.n)
    return (store.read(0, store.n) if store.nbytes <= MEMORY_BYTES else store), known


def _sum(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The sum of two arrays, the shorter one filled up with zeros."""
    out = np.zeros(max(len(a), len(b)))
    out[: len(a)] += a
    out[: len(b)] += b
    return out
