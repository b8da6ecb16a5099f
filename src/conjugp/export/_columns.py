"""Columns of a table as ONNX nodes: an input for each, and the features that they become."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs import kinds as e
from conjugp._inputs import taming as t
from conjugp._inputs.encoder import Encoder
from conjugp._inputs.inputs import Scaling
from conjugp.export._graph import ML, Scope, Value

OUTPUTS = ("label", "probabilities")
GAP = ""  # in text; in numbers it is NaN


def inputs(encoder: Encoder) -> dict[str, str]:
    """What the inputs of the columns are called: as they are, unless an output or nothing is."""
    columns, not_free = encoder.kinds, {*OUTPUTS, GAP}
    scope = Scope(taken={*columns, *not_free})
    return {name: scope.free(name) if name in not_free else name for name in columns}


def cells(scope: Scope, encoder: Encoder, names: dict[str, str]) -> Value:
    """A number for every part of the encoder (n, parts): of text, which row of a table it has."""
    found = []
    for part in encoder.parts:
        x = scope.value(names[part.name])
        if not isinstance(part, e.Number | e.Date):
            rows, other, _ = _table(part)
            coding = {"keys_strings": list(rows), "values_int64s": list(rows.values())}
            x = scope.op("LabelEncoder", x, domain=ML, default_int64=other, **coding)
        found.append(scope.cast(x, "double"))
    return scope.op("Concat", *found, axis=1)


def features(scope: Scope, encoder: Encoder, x: Value) -> Value:
    """Rows x (R, parts) of `cells` -> (R, D), as `Encoder.encode` has them."""
    n = len(encoder.parts)
    columns = scope.ops("Split", n, x, np.ones(n, np.int64), axis=1)
    found = [_features(scope, part, c) for part, c in zip(encoder.parts, columns, strict=True)]
    return scope.op("Concat", *found, axis=1)


def _features(scope: Scope, part: e.Part, x: Value) -> Value:
    """One part, x (R, 1)."""
    if isinstance(part, e.Number):
        return _number(scope, part, x)
    if isinstance(part, e.Date):
        return _date(scope, part, x)
    place = scope.op("Squeeze", scope.cast(x, "int64"), np.array([1]))
    found = scope.op("Gather", _table(part)[2], place, axis=0)
    return _number(scope, part.ranks, found) if isinstance(part, e.Ordered) else found


def _number(scope: Scope, part: e.Number, x: Value) -> Value:
    missing = scope.op("IsNaN", x)
    x = scope.op("Where", missing, part.fill, x)
    if part.spread:
        a = (x - part.middle) / part.spread
        bent = a / e.BEND
        x = a * part.spread / scope.op("Sqrt", bent * bent + 1.0) + part.middle
    return scope.op("Concat", x, scope.cast(missing, "double"), axis=1) if part.gaps else x


def _date(scope: Scope, part: e.Date, x: Value) -> Value:
    filled = scope.op("Where", scope.op("IsNaN", x), part.days.fill, x)
    found = [_number(scope, part.days, x)]
    for cycle in part.cycles:
        angle = filled * (2 * np.pi) / e.CYCLES[cycle]
        # The cosine as a sine: runtimes have the one in float64, and not all the other.
        found += [scope.op("Sin", angle), scope.op("Sin", angle + np.pi / 2)]
    return scope.op("Concat", *found, axis=1)


def scaled(scope: Scope, scaling: Scaling, x: Value) -> Value:
    """Features x (R, D) in working units, as `Scaling.apply` has them."""
    z, taming = (x - scaling.shift) / scaling.scale, scaling.taming
    if taming is None:
        return z
    place = np.zeros((len(taming.columns), len(scaling.scale)))
    place[np.arange(len(place)), taming.columns] = 1.0
    found = []
    for j, slope, knots, scores in zip(*taming, strict=True):
        one, own = (scope.op("Gather", a, np.array([j]), axis=1) for a in (x, z))
        found.append(_tamed(scope, one, own, slope, knots, scores))
    values = scope.op("Concat", *found, axis=1) @ place
    return scope.op("Where", place.sum(axis=0, keepdims=True) > 0.0, values, z)


def _tamed(
    scope: Scope, x: Value, z: Value, weight: float, knots: NDArray, scores: NDArray
) -> Value:
    """One column (R, 1), as `Taming.apply` has it."""
    z = scope.op("Min", scope.op("Max", z, -t.FAR), t.FAR)
    bent = z / t.BEND
    bent = z / scope.op("Sqrt", bent * bent + 1.0)
    steps = np.diff(knots)
    slopes = np.divide(np.diff(scores), steps, out=np.zeros(len(steps)), where=steps > 0)
    below = scope.cast(x > knots[None, 1:-1], "int64")
    place = scope.op("ReduceSum", below, np.array([1]), keepdims=0)
    x = scope.op("Min", scope.op("Max", x, knots[0]), knots[-1])
    knot, score, slope = (
        scope.column(scope.op("Gather", a, place, axis=0))
        for a in (knots[:-1], scores[:-1], slopes)
    )
    return bent * weight + score + (x - knot) * slope


def _table(part: e.Ordered | e.Levels | e.Shares) -> tuple[dict[str, int], int, NDArray]:
    """Which row each text has, which one all other texts have, and the rows themselves."""
    n = len(part.levels)
    rows = {str(level): i for i, level in enumerate(part.levels)}
    other = rows.get(e.OTHER, n) if isinstance(part, e.Levels) else n
    gap = n if isinstance(part, e.Ordered) else rows.get(e.MISSING, other)
    if isinstance(part, e.Ordered):
        table = np.append(np.arange(n), np.nan)[:, None]
    elif isinstance(part, e.Levels):
        table = np.eye(n + 1)[:, :n]
    else:
        table = np.vstack([part.shares, part.prior])
    return {**rows, GAP: gap}, other, table
