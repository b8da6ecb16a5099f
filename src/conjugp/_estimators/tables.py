"""Rows of tables, with text, dates and gaps, as the numbers that an encoder makes of them."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.encoder import Encoder, said
from conjugp._inputs.frames import Frame, frame_of, holds_columns
from conjugp._inputs.table import listed, suggestion


def is_table(clf: Any, X: Any, reset: bool) -> bool:
    """Whether rows go by an encoder: one of the fit, or for a fit one that its columns ask for."""
    if not reset:
        return getattr(clf, "_encoder", None) is not None
    if _named(getattr(clf, "categorical", "auto")) or _named(getattr(clf, "ignore", ())):
        return True
    return holds_columns(X) and not _only_numbers(X)


def _named(columns: Any) -> bool:
    return not isinstance(columns, str) and len(columns) > 0


def _only_numbers(X: Any) -> bool:
    """Whether the cells are numbers and all there; truth values are numbers too."""
    if hasattr(X, "isna") and hasattr(X, "dtypes"):  # pandas
        if any(hasattr(dtype, "fill_value") for dtype in X.dtypes):  # sparse
            return False
        kinds = {getattr(dtype, "kind", "O") for dtype in X.dtypes}
        if kinds <= set("biuf") or not kinds <= set("biufO"):
            return kinds <= set("biuf") and not bool(X.isna().to_numpy().any())
    if isinstance(X, np.ndarray | list | tuple):
        try:
            cells = np.asarray(X)
            return cells.dtype.kind != "c" and bool(np.isfinite(cells.astype(np.float64)).all())
        except (TypeError, ValueError, OverflowError):
            return False
    # Text is seen in the first rows: most tables are not read twice.
    return _all_numbers(frame_of(X, 50)) and _all_numbers(frame_of(X))


def _all_numbers(frame: Frame) -> bool:
    truths = {"True", "False"}
    return all(
        not c.gaps.any() and (c.kind == "number" or set(c.values) <= truths)
        for c in frame.columns.values()
    )


def to_fit(clf: Any, X: Any) -> Frame:
    """The columns of a fit; those that it ignores hold anything."""
    return frame_of(X, unread=lambda names, _: _positions("ignore", clf.ignore, names))


def encoded(
    clf: Any, X: Any, y: NDArray[Any] | None, weight: NDArray[np.float64] | None, reset: bool
) -> NDArray[np.float64]:
    """The features (n, D) of rows of a table; a fit chooses what they are."""
    if not reset:
        return _some(clf._encoder.rows(X))
    frame = to_fit(clf, X)
    assert y is not None
    _some(y)
    ignore = _positions("ignore", clf.ignore, list(frame.columns))
    categorical = _positions("categorical", clf.categorical, list(frame.columns))
    chosen = {name: frame.columns[name] for name in categorical}
    dates = [name for name, c in chosen.items() if c.kind == "date" and c.written is None]
    if dates:
        raise ValueError(f"categorical: {listed('column', dates)} must hold codes, not dates")
    columns = {n: c.as_text() if n in categorical else c for n, c in frame.columns.items()}
    frame = replace(frame, columns=columns)
    weight = np.ones(frame.n) if weight is None else weight
    some = weight > 0 if (weight > 0).any() else weight == 0
    labels, codes = np.unique(y[some], return_inverse=True)
    texts = [str(label) for label in labels.tolist()]
    clf._encoder, found = Encoder.fit(frame.take(some), codes, weight[some], texts, ignore)
    X_ = np.zeros((frame.n, found.shape[1]))  # rows of no weight are dropped
    X_[some] = found
    clf.n_features_in_ = len(frame.columns)
    if frame.named:
        clf.feature_names_in_ = np.asarray(list(frame.columns), dtype=object)
    elif hasattr(clf, "feature_names_in_"):
        del clf.feature_names_in_
    left_out = {n: why for n, why in clf._encoder.left_out.items() if why != "ignored"}
    if left_out:
        warn(f"columns that say nothing of new rows are left out: {said(left_out)}")
    return X_


def _some(rows: NDArray[Any]) -> NDArray[Any]:
    if not len(rows):
        raise ValueError("X: Found array with 0 sample(s) while a minimum of 1 is required.")
    return rows


def _positions(argument: str, given: Any, names: list[str]) -> tuple[str, ...]:
    """Names of the columns that an argument lists, by name or position."""
    if isinstance(given, str):
        return ()
    found, wrong, known = [], [], set(names)
    for one in given:
        if isinstance(one, str) and one in known:
            found.append(one)
        elif isinstance(one, Integral) and -len(names) <= int(one) < len(names):
            found.append(names[int(one)])
        else:
            wrong.append(one)
    if wrong:
        hint = suggestion(wrong[0], names) if isinstance(wrong[0], str) else ""
        raise ValueError(f"{argument}: X has no column {', '.join(map(repr, wrong))}{hint}")
    return tuple(dict.fromkeys(found))


def warn(text: str) -> None:
    """A warning that points at the line of the user's that called us."""
    level, frame = 2, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("conjugp."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
