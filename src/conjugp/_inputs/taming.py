"""Numbers whose distances say little: long tails, most values in one place.

Such a column is seen half as it is, its tails bent, and half by ranks: distances then say something
of all of its rows, and the order of values stays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from conjugp._persistence.codec import in_checkpoints

Array = NDArray[np.float64]

FEW_VALUES = 12  # columns of so many different ones stay as they are
NORMAL = 0.9  # and those whose values and normal scores have this squared correlation
EMBEDDING = 16  # columns, fewer are no embedding
BEND = 3.0  # standard deviations to which a tail is bent
# Values of a column between which scores are linear; among them so many at each of its ends.
KNOTS, ENDS = 256, 32
FAR = 1e6  # standard deviations, which are as good as infinitely many


@in_checkpoints
class Taming(NamedTuple):
    """The columns that are tamed, and the normal scores of some of their values."""

    columns: NDArray[np.int64]  # (W,)
    slopes: Array  # (W,) what the bent values count, such that all is of order one
    knots: Array  # (W, K) values in the user's units, in order; the last may be there repeatedly
    scores: Array  # (W, K)

    def apply(self, X: NDArray, z: NDArray) -> None:
        """Change the columns of z (n, D), the standardised rows X (n, D), in place."""
        for j, slope, knots, scores in zip(*self, strict=True):
            z[:, j] = _value(X[:, j], z[:, j], slope, knots, scores)

    def invert(self, w: Array, shift: Array, scale: Array) -> None:
        """Take the columns of w (n, D), tamed, to the user's units, in place.

        Standardised values have this `shift` and `scale` (D,).
        """
        for j, *how in zip(*self, strict=True):
            knots, w_j = how[1], w[:, j].copy()
            low, high = np.full(len(w), knots[0]), np.full(len(w), knots[-1])
            for _ in range(64):
                middle = low + 0.5 * (high - low)
                below = _value(middle, (middle - shift[j]) / scale[j], *how) < w_j
                low, high = np.where(below, middle, low), np.where(below, high, middle)
            # Beyond the last value that has a score the bent part alone goes on.
            slope, _, scores = how
            ends = knots[[0, -1]]
            first, last = _value(ends, (ends - shift[j]) / scale[j], *how)
            s = (w_j - np.where(w_j < first, scores[0], scores[-1])) / slope
            s = s.clip(-BEND * (1 - 1e-9), BEND * (1 - 1e-9))
            outside = shift[j] + scale[j] * s / np.sqrt(1.0 - (s / BEND) ** 2)
            w[:, j] = np.where((w_j >= first) & (w_j <= last), high, outside)

    def check(self, n_features: int) -> None:
        """Raise ValueError unless it is one that a fit could have made; files hold any."""
        arrays = all(isinstance(a, np.ndarray) and a.dtype.kind in "if" for a in self)
        good = arrays and self.columns.ndim == 1 and self.knots.ndim == 2
        good = good and self.knots.shape == self.scores.shape and self.knots.shape[1] > 0
        good = good and len(self.knots) == len(self.columns) == len(np.unique(self.columns))
        good = good and self.slopes.shape == self.columns.shape and bool((self.slopes > 0).all())
        if not good or not bool(
            ((self.columns >= 0) & (self.columns < n_features)).all()
            and np.isfinite(self.knots).all()
            and np.isfinite(self.scores).all()
            and (np.diff(self.knots) >= 0).all()
            and (np.diff(self.scores) >= 0).all()
        ):
            raise ValueError("the columns with long tails are not described as they should be")


def _value(x: NDArray, z: NDArray, slope: float, knots: Array, scores: Array) -> Array:
    """Of values x, standardised z."""
    return slope * bent(z) + np.interp(x, knots, scores)


def bent(z: NDArray) -> Array:
    """z, in float64, with tails that end at `BEND`."""
    z = np.asarray(z, dtype=np.float64).clip(-FAR, FAR)
    return z / np.sqrt(1.0 + (z / BEND) ** 2)


def tamed(
    X: NDArray, weight: Array, shift: Array, scale: Array, among: NDArray[np.bool_]
) -> Taming | None:
    """Which columns of X (n, D) `among` these (D,) have to be tamed; None: none."""
    found: list[tuple[int, float, Array, Array]] = []
    for j in np.flatnonzero(among):
        seen = _far_from_normal(X[:, j], weight)
        if seen is None:
            continue
        values, scores, share = seen
        w = 0.5 * (bent((values - shift[j]) / scale[j]) + scores)
        middle = share @ w
        spread = max(float(share @ (w - middle) ** 2) ** 0.5, 1e-3)
        scores = (0.5 * scores - middle) / spread
        last = len(values) - 1
        some = np.linspace(0, last, KNOTS - 2 * ENDS).round().astype(np.intp)
        ends = np.arange(ENDS)
        some = np.unique(np.concatenate([some, ends, last - ends]).clip(0, last))
        fill = (0, KNOTS - len(some))
        knots, scores = (np.pad(a[some], fill, mode="edge") for a in (values, scores))
        found.append((int(j), 0.5 / spread, knots, scores))
    if not found:
        return None
    columns, slopes, knots, scores = zip(*found, strict=True)
    columns, slopes = np.array(columns, dtype=np.int64), np.array(slopes)
    return Taming(columns, slopes, np.stack(knots), np.stack(scores))


def directions(X: NDArray, weight: Array, taming: Taming | None) -> bool:
    """Whether most columns of X (n, D) have long tails because the rows' lengths differ.

    Then rows are likely an embedding, of which directions matter.
    """
    n_columns = 0 if taming is None else len(taming.columns)
    if X.shape[1] < EMBEDDING or 2 * n_columns < X.shape[1]:
        return False
    X = X / np.abs(X).max()
    length = np.linalg.norm(X.astype(np.float64), axis=1, keepdims=True)
    unit = X / np.where(length > 0, length, 1.0)
    return 2 * sum(_far_from_normal(x, weight) is not None for x in unit.T) < n_columns


def _far_from_normal(x: NDArray, weight: Array) -> tuple[Array, Array, Array] | None:
    """Of a column that is: its values in order, their normal scores and shares."""
    values, place = np.unique(x.astype(np.float64), return_inverse=True)
    if len(values) <= FEW_VALUES:
        return None
    share = np.bincount(place, weight) / weight.sum()
    # The middle of the ranks of equal values: a row of weight 2 is as two rows.
    scores = ndtri((np.cumsum(share) - 0.5 * share).clip(1e-12, 1 - 1e-12))
    return None if _correlation(values, scores, share) ** 2 >= NORMAL else (values, scores, share)


def _correlation(a: Array, b: Array, share: Array) -> float:
    """Of two rows of numbers whose pairs have these shares; 0 where it is not known."""
    a = a / max(float(np.abs(a).max()), np.finfo(np.float64).tiny)
    a, b = a - share @ a, b - share @ b
    spread = float((share @ a**2) * (share @ b**2))
    return float(share @ (a * b)) / spread**0.5 if spread > 0 else 0.0
