"""Slice sampling along a line (Neal 2003), for what has no conjugate conditional."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

_MOST_STEPS = 50


def slice_step(
    log_density: Callable[[float], float],
    width: float,
    rng: np.random.Generator,
    at_zero: float | None = None,
) -> float:
    """A point t of a Markov step from 0 that leaves exp(log_density(t)) unchanged.

    An interval of this width is placed at random around 0, stepped out in both directions, and
    shrunk towards 0 until a point of the slice is found. `at_zero` is log_density(0) if known.
    Unless it is 0, the point returned is the last that log_density was asked about.
    """
    level = (log_density(0.0) if at_zero is None else at_zero) + math.log(1.0 - rng.random())
    low = -width * rng.random()
    high = low + width
    # Shared out at random: as likely from any other point of the interval, hence reversible.
    steps = int(rng.integers(_MOST_STEPS))
    for _ in range(steps):
        if not log_density(low) > level:
            break
        low -= width
    for _ in range(_MOST_STEPS - 1 - steps):
        if not log_density(high) > level:
            break
        high += width
    while high - low > 1e-12 * width:
        t = low + (high - low) * rng.random()
        if log_density(t) > level:
            return t
        if t < 0:
            low = t
        else:
            high = t
    return 0.0
