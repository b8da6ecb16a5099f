"""What must agree: the ranks of a group before they fit, and a fit with its checkpoint."""

from __future__ import annotations

import os
import warnings
from functools import reduce
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_consistent_length

from conjugp._estimators.rows import (
    WeightScale,
    check_classes,
    check_labelled,
    check_labels,
    check_some,
    check_weight,
    class_factors,
    names_of,
    no_rows,
    set_features,
)
from conjugp._estimators.tables import is_table, to_fit
from conjugp._fit.fit import Fitted
from conjugp._fit.options import FitOptions
from conjugp._inputs.frames import Frame
from conjugp._persistence.checkpoint import FIT, Checkpoint
from conjugp._persistence.codec import classes_of
from conjugp._persistence.fingerprint import data_fingerprint, fingerprint
from conjugp._persistence.journal import Journal
from conjugp._rows.canonical import Rows, ordered
from conjugp._rows.dataset import Dataset
from conjugp._rows.group import Group
from conjugp._rows.on_disk import Store
from conjugp.kernels import KERNELS, get_kernel
from conjugp.likelihoods import LIKELIHOODS, get_likelihood

_ENCODED = 100_000  # rows of all ranks, about, that say what columns become
# What does not change the result, or whose effect is marked by itself.
_UNMARKED = {"verbose", "device", "options", "class_weight"}
_UNMARKED_OPTIONS = {"callback", "on_interrupt", "checkpoint_every", "cache_mb", "spool"}


def _marks(clf: Any, *others: str) -> dict[str, Any]:
    """The parameters that change the result, by name; not the `others`."""
    values = {k: v for k, v in clf.get_params(deep=False).items() if k not in _UNMARKED}
    for name in ("inducing", "prior_mean"):
        if not isinstance(values[name], str):
            values[name] = np.asarray(values[name])
    options = (clf.options or FitOptions()).get_params(deep=False).items()
    values |= {f"options.{k}": v for k, v in options if k not in _UNMARKED_OPTIONS}
    return {name: value for name, value in values.items() if name not in others}


def check_parameters_agree(clf: Any, group: Group, has_checkpoint: bool) -> None:
    """Raise, on every rank, if the ranks were told different things."""
    values = _marks(clf, "random_state")
    values |= {"class_weight": repr(clf.class_weight), "checkpoint": has_checkpoint}
    found = group.gather(fingerprint(values))
    for name, (digest, shown) in found[0].items():
        for rank, other in enumerate(found):
            if other.get(name, [None])[0] != digest:
                there = other.get(name, [None, None])[1]
                raise ValueError(
                    f"{name} must be the same on all ranks: {shown} on rank 0, {there} on {rank}"
                    if shown is not None and there is not None
                    else f"{name} must be the same on all ranks; it differs on rank {rank}"
                )


def check_distributed(clf: Any) -> None:
    """Raise for what one process can do and a group cannot."""
    advice = "in a process group; options=FitOptions(distributed=False) fits on this rank alone"
    if clf.inference == "ep":
        raise ValueError(f"inference='ep' does not work {advice}")
    if clf.class_batch is not None and clf.class_batch != "auto":
        raise ValueError(f"class_batch={clf.class_batch!r} does not work {advice}")
    if (clf.options or FitOptions()).mean_training == "elbo":
        raise ValueError(f"options.mean_training='elbo' does not work {advice}")


def check_shards(
    clf: Any, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, group: Group
) -> tuple[Rows, NDArray[Any]]:
    """Checked, weighted, merged rows of this rank, which know the group, and the classes.

    A rank may have no rows. Equal rows of different ranks are not merged.
    """
    X_, y_, weight = _by_one_encoder(clf, X, y, sample_weight, group)
    scale = reduce(WeightScale.plus, group.gather(WeightScale.of(weight)))
    names = names_of(clf)
    told = None if not len(X_) else (X_.shape[1], X_.dtype, _kind(y_), np.unique(y_))
    found = group.gather((told, None if told is None else names))
    some = [(rank, told, names) for rank, (told, names) in enumerate(found) if told is not None]
    if not some:
        raise ValueError("no rank has rows of positive weight: there is nothing to fit")
    if group.rank == 0:
        scale.warn()
    first, (width, _, kind, _), names = some[0]
    for rank, (other, _, its_kind, _), its_names in some:
        if other != width:
            raise ValueError(f"X has {width} features on rank {first} and {other} on rank {rank}")
        if its_names != names:
            raise ValueError(f"X has other column names on rank {rank} than on rank {first}")
        if its_kind != kind:
            raise ValueError(
                f"y must hold labels of one kind: {kind} on rank {first}, {its_kind} on rank {rank}"
            )
    dtype = np.result_type(*(told[1] for _, told, _ in some))
    classes = np.unique(np.concatenate([told[3] for _, told, _ in some]))
    check_classes(classes)
    if clf._encoder is None:
        set_features(clf, width, names)
    X_ = X_.astype(dtype, copy=False) if len(X_) else np.empty((0, width), dtype)
    labels = np.searchsorted(classes, y_) if len(X_) else np.empty(0, np.int64)
    mass = np.bincount(labels, weights=weight, minlength=len(classes))
    mass = np.sum(group.gather(mass), axis=0)
    factors = group.all(lambda: class_factors(getattr(clf, "class_weight", None), classes, mass))
    rows = ordered(X_, labels, weight * factors[labels])
    check_some(sum(group.gather(rows.n)))
    return rows._replace(group=group), classes


def _by_one_encoder(
    clf: Any, X: Any, y: Any, sample_weight: Any, group: Group
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Checked rows; what columns of tables become is chosen from rows of all ranks."""
    clf._encoder = None
    tables = group.gather(group.all(lambda: not no_rows(X, y) and is_table(clf, X, True)))
    if True not in tables:
        return group.all(lambda: _checked(clf, X, y, sample_weight))

    def own() -> tuple[Frame | None, NDArray[Any], NDArray[Any], NDArray[np.intp]]:
        if no_rows(X, y):
            return None, np.empty(0), np.empty(0), np.empty(0, np.intp)
        frame, labels = to_fit(clf, X), check_labels(y)
        weight = check_weight(sample_weight, np.empty((frame.n, 0)))
        check_consistent_length(labels, weight)
        some = np.flatnonzero(weight > 0)
        frame, n = frame.take(some), len(some)
        # Every k-th row, and of each column the first one that has a gap.
        gaps = [np.flatnonzero(c.gaps)[:1] for c in frame.columns.values()]
        rows = np.concatenate([np.arange(0, n, 1 + n * group.size // _ENCODED), *gaps])
        return frame, labels[some], weight[some], np.unique(rows)

    frame, labels, weight, some = group.all(own)
    part = None if frame is None else frame.take(some)
    parts = group.gather((part, labels[some], weight[some]))

    def encoded() -> NDArray[Any]:
        frames, ys, weights = zip(*(part for part in parts if part[0] is not None), strict=True)
        with warnings.catch_warnings():
            if group.rank:
                warnings.simplefilter("ignore")
            X, y, weight = Frame.joined(frames), np.concatenate(ys), np.concatenate(weights)
            found = check_labelled(clf, X, y, weight, True)[0]
        if frame is None:
            return np.empty((0, 0))
        first = sum(len(part[1]) for part in parts[: group.rank])
        out = found[:0] if not len(labels) else clf._encoder.encode(frame)
        out[some] = found[first : first + len(some)]
        return out

    return group.all(encoded), labels, weight


def _checked(
    clf: Any, X: Any, y: Any, sample_weight: Any
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Rows of positive weight on this rank; there may be none."""
    if no_rows(X, y):
        return np.empty((0, 0)), np.empty(0), np.empty(0)
    try:
        found = check_labelled(clf, X, y, sample_weight, True)
        if clf._encoder is not None:
            raise ValueError("X contains NaN, and in a process group only frames may have gaps")
        return found
    except ValueError as error:
        where = _where(X)
        if not where:
            raise
        what, _, more = str(error).partition("\n")
        raise ValueError(f"{what.removesuffix('.')}{where}. {more}".strip()) from error


def _where(X: Any) -> str:
    """The first row that holds what no row may."""
    try:
        bad = np.flatnonzero(~np.isfinite(np.asarray(X, dtype=np.float64)).all(axis=1))
    except (ValueError, TypeError):
        return ""
    return f" (row {bad[0]} of those given, counted from 0)" if len(bad) else ""


def _kind(y: NDArray[Any]) -> str:
    """What sort of labels these are, in a word."""
    if y.dtype.kind == "O":
        return type(y[0]).__name__
    return {"b": "booleans", "U": "str", "S": "bytes"}.get(y.dtype.kind, "numbers")


def open_journal(
    clf: Any,
    path: str | os.PathLike[str],
    rows: Rows | Store,
    classes: NDArray[Any],
    data: Dataset,
    warm: Fitted | None,
    seed: int,
) -> Journal:
    """What keeps the state of a fit in a file, as an earlier run of the same fit has left it.

    Of several ranks the first reads and writes the file.
    """
    import conjugp

    group, every = data.group, (clf.options or FitOptions()).checkpoint_every
    values = _marks(clf, "dtype", "warm_start", "options.distributed")
    if not isinstance(clf.random_state, Integral):
        values["random_state"] = None  # the seed that was drawn is in the file
    values |= {
        "the working precision": str(data.like.dtype).removeprefix("torch."),
        "the device": data.like.device.type,
        "the fit to go on from": None if warm is None else warm.state,
        "the version of conjugp": conjugp.__version__,
        "the version of torch": torch.__version__,
    }
    own = classes_of([get_kernel(clf.kernel), get_likelihood(clf.likelihood)])
    known = {*KERNELS, *LIKELIHOODS.values(), *own}
    size = (rows.n_features, data.n)
    mark = data_fingerprint(size, rows.digests, classes) | fingerprint(values)
    where = path if group.rank == 0 else None
    journal = group.all(lambda: Checkpoint(where, FIT, mark, seed=seed, every=every, classes=known))
    if group.size > 1:
        journal.share(group, data.like.device)
    return journal
