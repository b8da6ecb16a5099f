"""Where a kernel starts: how long, and which features count for how much."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from conjugp._gp.features import basis, features
from conjugp._gp.posterior import kl, moments, prior
from conjugp._inference import svi
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data
from conjugp.kernels import Kernel
from conjugp.likelihoods import LogisticSoftmax

# 0: all features count alike; 1: as much as they vary in the user's units; and between the two.
SHARES = (0.0, 0.5, 1.0)

# The small fits that choose: rows, inducing points among them, sweeps, and of the median distance.
ROWS, POINTS, SWEEPS, LENGTH = 350, 50, 3, 0.7
LEAST = 200  # rows, with fewer all features count alike


def median_distance(X: Tensor) -> float:
    """The median distance between distinct points of a sample; 1 if there are none.

    Within what a kernel can learn, were all points but a few as good as equal.
    """
    sample = X[:1000]
    d = torch.pdist(sample) if len(sample) > 1 else X.new_zeros(0)
    d = d[d > 0]
    return float(d.median().clamp(1e-12, 1e12)) if len(d) else 1.0


def lengthscales(X: Tensor, scale: Tensor, share: float) -> Tensor:
    """One per feature of rows in working units, the median distance long, (D,), float64.

    `scale` (D,) is how large a working unit is in the user's.
    """
    relative = ((scale.mean() / scale) ** share).clamp(1e-6, 1e6)  # within what kernels can learn
    return relative * median_distance(X / relative.to(X))


def best_lengthscales(kernel: Kernel, data: Data, scale: Tensor, variance: float) -> Tensor:
    """The lengthscales (D,) with which a kernel says most of a few rows; float64."""
    few, tried = data.rows(0, ROWS), list[tuple[Tensor, Kernel]]()
    for share in SHARES if few.n >= LEAST else SHARES[:1]:
        lengths = lengthscales(few.X, scale, share)
        filled = kernel.filled(LENGTH * lengths, variance)
        # What a kernel leaves open may hardly depend on the units.
        if not any(torch.allclose(filled.theta, k.theta, atol=0.1) for _, k in tried):
            tried.append((lengths, filled))
    if len(tried) == 1:
        return tried[0][0]
    return max(tried, key=lambda candidate: evidence(candidate[1], few))[0]


@torch.no_grad()
def evidence(kernel: Kernel, data: Data) -> float:
    """The ELBO of a small fit in which q alone moves; minus infinity where there is none (Q1-Q4).

    By the likelihood of the default, whatever that of the fit to come: this is about the inputs.
    """
    n = min(POINTS, data.n // 2)
    Z, rows, C = data.X[:n], data.rows(n, None), data.n_classes
    like, q = LogisticSoftmax(), prior(C, n, data.X)
    mean, value = Z.new_full((C,), like.start_mean(C)), -math.inf
    try:
        f = features(basis((kernel,), Z), rows.X)
        for t in range(SWEEPS):
            solved = moments(q)
            found, _ = svi.evaluate(solved, like, "tight", f, rows.y, mean, rows.weight, False)
            value = float(found.bound) - float(kl(solved))
            q = svi.update(q, found, 1.0, (1 + t) ** -0.6)
    except (NotPositiveDefiniteError, FloatingPointError):
        return -math.inf
    return value if math.isfinite(value) else -math.inf
