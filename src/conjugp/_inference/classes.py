"""Class subsampling: a step that looks at some of the classes (docs/math.md, C1-C4).

A step looks at the labels of its batch and at a sample of the other classes, half of it from those
most like the labels. Given the batch every class is there with a known probability, so weights of
one over that make every sum over classes unbiased. What is not a sum, the bound's function of
T = Σ_c t_c, is replaced by its tangent at an estimate τ of T that every row keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._gp.features import Features
from conjugp._gp.posterior import Moments, marginals, pullback
from conjugp._inference.svi import Gradients, Statistics, add, clamp, statistics
from conjugp.kernels import Kernel
from conjugp.likelihoods._base import Site
from conjugp.likelihoods._class_parts import Classes, Part, derivatives
from conjugp.likelihoods._class_parts import part as put_together
from conjugp.likelihoods._logistic_softmax import LogisticSoftmax

# Share of a fresh estimate in the running average of a row's T.
AVERAGE = 0.3
# An estimate of T is at least its label's own term, so this is no more than a guard.
_SMALLEST = 1e-30
_NEAR = 3  # classes that count as near another one
_CHUNK = 1024  # classes at a time that are compared with all


class ClassBatch(NamedTuple):
    """The classes of one step."""

    index: Tensor  # (K,) which
    weight: Tensor  # (K,) inverse inclusion probabilities, given the batch
    y: Tensor  # (B,) labels as positions in `index`


def draw_classes(
    y: Tensor, n_classes: int, n_others: int, generator: torch.Generator, near: Tensor | None = None
) -> ClassBatch:
    """The labels y (B,) and at most `n_others` of the other classes (C1).

    Half of these are from the classes `near` (C, R) the labels, the others from the rest; within
    each half any class is as likely as any other.
    """
    labels, local = torch.unique(y, return_inverse=True)
    kind = torch.zeros(n_classes, dtype=torch.int8, device=y.device)
    left = min(n_others, n_classes - len(labels))
    if near is not None and left > 1:  # a single draw cannot be of both kinds
        kind[near[labels].flatten()] = 1
    kind[labels] = 2
    others, alike = ((kind == k).nonzero().squeeze(1) for k in (0, 1))
    n = min(len(alike), max(left // 2, left - len(others)))
    index, weight = [labels], [torch.ones(len(labels), dtype=torch.float64, device=y.device)]
    for pool, size in ((alike, n), (others, left - n)):
        drawn = torch.randperm(len(pool), generator=generator)[:size].to(y.device)
        index.append(pool[drawn])
        weight.append(weight[0].new_full((size,), len(pool) / max(size, 1)))
    return ClassBatch(torch.cat(index), torch.cat(weight), local)


@torch.no_grad()
def near_classes(kernel: Kernel, X: Tensor, y: Tensor, n_classes: int) -> Tensor:
    """For every class the others whose mean rows are most like its own to the kernel, (C, R)."""
    count = torch.bincount(y, minlength=n_classes).clamp(min=1).to(X)
    centre = X.new_zeros(n_classes, X.shape[1]).index_add_(0, y, X) / count.unsqueeze(1)
    nearest = []
    for i in range(0, n_classes, _CHUNK):
        K = kernel(centre[i : i + _CHUNK], centre)
        torch.diagonal(K, offset=i).fill_(-torch.inf)
        nearest.append(K.topk(min(_NEAR, n_classes - 1)).indices)
    return torch.cat(nearest)


class Multipliers:
    """What every row keeps: a running average τ of the estimates of its T (C3)."""

    def __init__(self, total: Tensor) -> None:
        self.total = total  # (N,), T of every row at the start

    def update(self, rows: slice | Tensor, estimate: Tensor, share: float = AVERAGE) -> None:
        """Take in this step's estimates of T (B,)."""
        fresh = estimate.to(self.total.dtype).clamp(min=_SMALLEST)
        self.total[rows] = torch.lerp(self.total[rows], fresh, share)


class RowsByClass:
    """Which rows belong to which class."""

    def __init__(self, y: Tensor, n_classes: int) -> None:
        self.order = torch.argsort(y, stable=True)
        self.count = torch.bincount(y, minlength=n_classes)
        self.start = torch.cumsum(self.count, 0) - self.count

    def draw(self, index: Tensor, n: int, generator: torch.Generator) -> Tensor:
        """For each class n of its rows, with replacement: (n, K); any row if it has none."""
        u = torch.rand(n, len(index), dtype=torch.float64, generator=generator).to(index.device)
        place = self.start[index] + (u * self.count[index]).long()
        return self.order[place.clamp(max=len(self.order) - 1)]


class Balance(NamedTuple):
    """How many rows a row of the step stands for, in the statistics of a class (C4)."""

    batch: Tensor  # (B, K), rows of the batch
    own: Tensor  # (K,), rows drawn for the class itself
    known: Tensor  # (K,) whether the batch has rows of other classes, if there are any


def balance(classes: ClassBatch, rows: RowsByClass, n_own: int) -> Balance:
    """Positives are n_c/(b_c + n_own) rows each, negatives (N - n_c)/(B - b_c) (C4)."""
    count, y = rows.count[classes.index].double(), classes.y
    N, B = len(rows.order), len(y)
    here = torch.bincount(y, minlength=len(count))
    own = count / (here + n_own)
    batch = ((N - count) / (B - here).clamp(min=1)).repeat(B, 1)
    batch[torch.arange(B, device=y.device), y] = own[y]
    return Balance(batch, own, (here < B) | (count == N))


class ClassRows(NamedTuple):
    """Rows of a step: n of them for all K classes, or n for each class."""

    features: Features  # (1, M, n) or (K, M, n)
    share: Tensor  # (n, K), in the statistics of a class
    total: Tensor  # τ, what they keep: (n,) or (n, K)


class ClassPass(NamedTuple):
    """What a step learns."""

    statistics: Statistics  # of its classes, for all rows; the bound is the batch's alone
    gradients: Gradients | None  # of the batch's bound
    part: Part


def evaluate(
    q: Moments,
    likelihood: LogisticSoftmax,
    bound: str,
    classes: ClassBatch,
    n_classes: int,
    mean: Tensor,
    batch: ClassRows,
    weight: Tensor,
    own: ClassRows,
    gain: float,
    gradients: bool,
) -> ClassPass:
    """One pass over a batch and rows of the classes themselves; q and mean are theirs (C2, C4)."""
    m, v, W = marginals(q, batch.features)
    m = m + mean
    seen = Classes(classes.weight, batch.total, n_classes, gain)
    terms = likelihood.terms(classes.y, m, v, bound, seen)
    part = put_together(classes.y, terms, bound, seen)
    # The site of a class knows nothing of the others it stands for in a sum.
    s = _statistics(batch, *derivatives(classes.y, terms, part.slope), m, mean)
    s = add([s, _own_statistics(q, likelihood, bound, n_classes, mean, own)])
    s = s._replace(bound=(part.value.to(m.dtype) * weight).sum())
    if not gradients:
        return ClassPass(s, None, part)
    dm, dv = (x.to(m.dtype) * weight.unsqueeze(1) for x in (part.dm, part.dv))
    return ClassPass(s, Gradients(pullback(q, batch.features, W, dm, dv), dm.sum(0)), part)


def _own_statistics(
    q: Moments,
    likelihood: LogisticSoftmax,
    bound: str,
    n_classes: int,
    mean: Tensor,
    own: ClassRows,
) -> Statistics:
    """The statistics of rows that meet one class, their label."""
    m, v, _ = marginals(q, own.features)
    m = m + mean
    y = torch.zeros(m.numel(), dtype=torch.long, device=m.device)
    seen = Classes(m.new_ones(1), own.total.reshape(-1), n_classes)
    part = likelihood.part(y, m.reshape(-1, 1), v.reshape(-1, 1), bound, seen)
    return _statistics(own, part.dm.view(m.shape), part.dv.view(m.shape), m, mean)


def _statistics(rows: ClassRows, dm: Tensor, dv: Tensor, m: Tensor, mean: Tensor) -> Statistics:
    """Sums of sites (S1) in which every row and class has a weight of its own."""
    precision = -2.0 * dv
    potential, precision = (x.to(m.dtype) for x in (dm + precision * m.double(), precision))
    site = clamp(Site(potential, precision, m.new_zeros(len(m))), m)
    share = rows.share.to(m.dtype)
    site = site._replace(potential=site.potential * share, precision=site.precision * share)
    return statistics(rows.features, site, mean, m.new_ones(len(m)))
