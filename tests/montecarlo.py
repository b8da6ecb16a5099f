"""Monte Carlo averages against the truth, with standard errors that know about autocorrelation."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np


def z_scores(replicates: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Deviations in standard errors of averages over independent replicates (R, F).

    `expected` is known, (F,), or has replicates of its own, (R', F). A replicate may be the
    average of a whole chain: how its parts depend on each other does not matter.
    """
    known = expected.ndim == 1
    target = expected if known else expected.mean(0)
    variance = replicates.var(0, ddof=1) / len(replicates)
    if not known:
        variance = variance + expected.var(0, ddof=1) / len(expected)
    return (replicates.mean(0) - target) / np.sqrt(variance)


def latent_functions(f: np.ndarray) -> np.ndarray:
    """Functions of the latents that a wrong sampler gets wrong, (C, B, n) -> (B, F)."""
    C, B, n = f.shape
    f = f.transpose(1, 0, 2)
    flat = f.reshape(B, C * n)
    found = [flat, flat**2, np.abs(flat)]
    found += [f[:, :, i] * f[:, :, j] for i, j in combinations(range(n), 2)]
    found += [f[:, c] * f[:, d] for c, d in combinations(range(C), 2)]
    return np.concatenate(found, 1)


class Given:
    """Stands in for a random generator and hands out these normal numbers, or zeros."""

    def __init__(self, numbers: np.ndarray | None = None) -> None:
        self.numbers, self.used = numbers, 0

    def standard_normal(self, shape: Any) -> np.ndarray:
        size = int(np.prod(shape))
        self.used += size
        if self.numbers is None:
            return np.zeros(shape)
        return self.numbers[self.used - size : self.used].reshape(shape)


def affine(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean (D,) and covariance (D, D) of draw(rng), an affine map of normal numbers, exactly."""
    count = Given()
    mean = draw(count)
    root = np.array([draw(Given(row)) - mean for row in np.eye(count.used)])
    return mean, root.T @ root
