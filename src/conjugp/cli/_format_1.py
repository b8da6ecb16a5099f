"""Columns as model files of the command line described them before its models were the library's.

A column was a number, 0 or 1 for true, a rank, or 0 and 1 for each category, and a gap was what
the training rows have most. All of these are kinds that there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conjugp._estimators.rows import set_inputs
from conjugp._inputs.encoder import Encoder
from conjugp._inputs.kinds import MISSING, Levels, Number, Ordered, Part, Shares
from conjugp._persistence.files import FileFormatError


def roles(data: Any) -> dict[str, Any]:
    """Target, labels, weight and decimal sign."""
    if data.get("format") != 1:
        raise ValueError(f"format {data.get('format')!r}")
    return {k: v for k, v in data.items() if k in ("target", "labels", "weight", "decimal")}


def translate(clf: Any, data: Any) -> None:
    """Have a classifier take the columns that its features were made of; the features are equal."""
    try:
        if all(c["kind"] == "number" and c["fill"] is None for c in data["columns"]):
            return
        means = dict(zip(clf._inputs.names, clf._inputs.scaling.shift.tolist(), strict=True))
        parts = tuple(_part(c, means.get(c["name"], 0.0)) for c in data["columns"])
        names = (*(c["name"] for c in data["columns"]), *data["ignored"])
        left_out = dict.fromkeys(data["ignored"], "ignored")
        encoder = Encoder(names, True, parts, left_out)
        encoder.check()
        if len(encoder.features) != clf._inputs.n_features:
            raise ValueError("columns and features do not fit")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError("the model's description of its columns is damaged") from error
    clf._inputs = replace(clf._inputs, names=encoder.features, encoder=encoder)
    clf._encoder, clf.columns_ = encoder, encoder.columns
    set_inputs(clf, clf._inputs)


def _part(column: dict[str, Any], mean: float) -> Part:
    """A column's part; where a gap was an error it is the mean, or no category at all."""
    name, kind, levels = column["name"], column["kind"], tuple(column["categories"])
    fill = column["fill"]
    if kind in ("number", "boolean", "ordinal"):
        rank = levels.index(fill) if levels and fill is not None else fill
        number = Number(name, float(mean if rank is None else rank), False)
        levels = levels or ("False", "True")
        return number if kind == "number" else Ordered(name, levels, number)
    if kind != "onehot":
        raise ValueError(f"a column of kind {kind!r}")
    if fill is None:
        return Levels(name, levels)
    # As shares, whose levels may stand for others: a gap for the category that fills it.
    found = np.array(sorted({*levels, MISSING}))
    shares = np.array([levels.index(fill if v == MISSING else v) for v in found.tolist()])
    return Shares(name, found, np.eye(len(levels))[shares], np.zeros(len(levels)), levels)
