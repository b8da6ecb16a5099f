"""E_q[log p(y | f)] of the logistic-softmax by quadrature over all classes, to compare with.

A tensor Gauss-Hermite rule over all classes, so for three or four classes, and for variances of
order one: logistic functions have poles at distance π, and the rule sees them where v is large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot

from conjugp.likelihoods import Expectation, LogisticSoftmax

_ELEMENTS = 2**22  # grid values at a time


@dataclass(frozen=True)
class Unaugmented(LogisticSoftmax):
    """The same likelihood with another ``"exact"``."""

    n_nodes: int = 24  # per class

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """The expected log-likelihood, or one of the bounds on it."""
        if bound != "exact":
            return super().expectation(y, m, v, bound)
        rows = max(1, _ELEMENTS // self.n_nodes ** m.shape[1])
        parts = zip(y.split(rows), m.double().split(rows), v.double().split(rows), strict=True)
        found = [quadrature(*part, self.n_nodes) for part in parts]
        return Expectation(*(torch.cat(x) for x in zip(*found, strict=True)))


def quadrature(y: Tensor, m: Tensor, v: Tensor, n_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """E[log p(y | f)] under N(m, v), m and v (B, C), and its derivatives in m and v.

    Those in m are expected first derivatives of log p, those in v half the expected second ones.
    """
    x, w = (torch.tensor(a) for a in np.polynomial.hermite_e.hermegauss(n_nodes))
    w = w / w.sum()
    f = m[..., None] + v.sqrt()[..., None] * x  # (B, C, n)
    s, label, n_classes = torch.sigmoid(f), one_hot(y, m.shape[1]).double(), m.shape[1]
    ds = s * torch.sigmoid(-f)
    dds = ds * (1 - 2 * s)
    T = torch.zeros(len(m), *[1] * n_classes, dtype=torch.float64)  # Σσ on the grid
    for c in range(n_classes):
        T = T + s[:, c].reshape(-1, *[n_nodes if k == c else 1 for k in range(n_classes)])
    value = (label * (logsigmoid(f) @ w)).sum(1) - averaged(T.log(), w)
    one, two = T.reciprocal(), T.reciprocal().square()
    first, second = label * (torch.sigmoid(-f) @ w), -label * (ds @ w)
    for c in range(n_classes):
        by_one, by_two = averaged(one, w, keep=c), averaged(two, w, keep=c)  # (B, n)
        first[:, c] -= (ds[:, c] * by_one) @ w
        second[:, c] += (ds[:, c].square() * by_two - dds[:, c] * by_one) @ w
    return value, first, 0.5 * second


def averaged(grid: Tensor, w: Tensor, keep: int | None = None) -> Tensor:
    """The average of (B, n, ..., n) over every class but one."""
    for axis in reversed(range(1, grid.ndim)):
        if axis - 1 != keep:
            grid = torch.tensordot(grid, w, dims=([axis], [0]))
    return grid
