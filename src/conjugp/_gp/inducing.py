"""Where the inducing points are: k-means++, greedy conditional variance, random, or given."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from conjugp._rows.dataset import Data
from conjugp._rows.hold_out import by_label
from conjugp.kernels import Kernel

STRATEGIES = ("kmeans", "greedy", "random")

_SEED_LIMIT = 300  # beyond this many centres a random start does
_ONE_BY_ONE = 16  # seeds
_LEAST_ROWS, _ROWS_PER_CENTRE = 2000, 16  # that k-means looks at
_NEAR = 1e-4  # lengthscales: points nearer than that are one
_FARTHEST = 1e12  # lengthscales from the origin: squares of float32 stay in range
_DIRECTIONS, _DIRECTION_ROWS = 64, 500  # in which it measures distances, and rows that show them


def choose(
    strategy: str,
    X: Tensor,
    weight: Tensor,
    n: int,
    kernel: Kernel | None,
    generator: torch.Generator,
) -> Tensor:
    """`n` inducing points (n, D) for the rows X (N, D), all distinct rows if n reaches them.

    k-means measures distances in the kernel's lengthscales, "greedy" looks at the kernel itself.
    """
    lengths = None if kernel is None else metric(kernel, X)
    distinct = _distinct(X, lengths) if n * 4 > len(X) else X
    if n >= len(distinct):
        # `unique` sorts, and the first points carry the covariance of a decoupled posterior.
        return distinct[torch.randperm(len(distinct), generator=generator).to(X.device)]
    if strategy == "kmeans":
        return kmeans(X, weight, n, generator, lengths=lengths)
    if strategy == "greedy":
        assert kernel is not None
        return greedy(X, n, kernel)
    return X[_draw(weight, n, generator)]


def by_class(
    data: Data,
    n: int,
    generator: torch.Generator,
    lengths: Tensor | None = None,
    view: Callable[[Tensor], Tensor] = lambda X: X,
) -> Tensor:
    """About `n` k-means centres, each class getting a share in the square root of its size.

    In random order, so that the first few are a sample of all. With too many classes for a centre
    or two each, they share the centres. Distances are measured after division by `lengths` (D,),
    between what `view` makes of rows.
    """
    y, n_classes = data.y, data.n_classes
    if 2 * n_classes > n:
        X = view(data.X)
        if lengths is None:
            return choose("kmeans", X, data.weight, n, None, generator)
        return choose("kmeans", X / lengths, data.weight, n, None, generator) * lengths
    members = torch.bincount(y, minlength=n_classes)
    counts = members.to(data.like.dtype)
    share = counts.sqrt()
    quota = torch.zeros_like(counts)
    # Classes too small for their share take all their rows, and the others take up the rest.
    for _ in range(n_classes):
        open_ = quota < counts
        room = n - quota[~open_].sum()
        new = torch.where(open_, (share * room / share[open_].sum()).ceil(), quota)
        new = torch.minimum(new, counts)
        if torch.equal(new, quota):
            break
        quota = new
    centres = []
    for c, rows in enumerate(by_label(y, n_classes).split(members.tolist())):
        if not len(rows):
            continue
        k = max(1, int(quota[c]))
        # As many as k-means looks at.
        some = data.take(rows[: max(_LEAST_ROWS, _ROWS_PER_CENTRE * k)])
        Xc = view(some.X)
        if k < len(rows):
            Xc = kmeans(Xc, some.weight, k, generator, lengths=lengths)
        centres.append(Xc)
    Z = _distinct(torch.cat(centres), lengths)
    return Z[torch.randperm(len(Z), generator=generator).to(Z.device)][:n]


def _distinct(X: Tensor, lengths: Tensor | None) -> Tensor:
    """The rows of X (N, D) that differ by more than rounding, sorted; one of those nearly equal.

    Two in one place make a kernel matrix singular and say no more than one.
    """
    rows = torch.unique(X, dim=0)
    cells = torch.round(rows.double() / (_NEAR if lengths is None else _NEAR * lengths.double()))
    found, cell = torch.unique(cells, dim=0, return_inverse=True)
    if len(found) == len(rows):
        return rows
    at = torch.arange(len(rows), device=X.device)
    first = torch.full((len(found),), len(rows), device=X.device).scatter_reduce(
        0, cell, at, "amin"
    )
    return rows[first.sort().values]


def metric(kernel: Kernel, X: Tensor) -> Tensor:
    """Lengthscales in which k-means measures distances, (D,): the first part's, or ones."""
    parts = getattr(kernel, "parts", (kernel,))
    value = getattr(parts[0], "lengthscale", None)
    if value is None:
        return torch.ones(X.shape[1], dtype=X.dtype, device=X.device)
    scale = value if isinstance(value, Tensor) else torch.as_tensor(np.array(value))
    return scale.to(X).expand(X.shape[1]).clamp(min=1e-12)


def kmeans(
    X: Tensor,
    weight: Tensor,
    k: int,
    generator: torch.Generator,
    n_iter: int = 5,
    lengths: Tensor | None = None,
) -> Tensor:
    """Weighted k-means on a sample of the rows, seeded by k-means++.

    Distances are measured after division by `lengths` (D,).
    """
    # The rows come in random order (see `_rows.canonical`), so the first ones are a sample.
    sample = slice(0, max(_LEAST_ROWS, _ROWS_PER_CENTRE * k))
    X, weight = X[sample], weight[sample].to(X.dtype)
    if lengths is not None:
        X = (X / lengths).clamp_(-_FARTHEST, _FARTHEST)
    # Who belongs together shows in few directions.
    flat = X @ _directions(X) if X.shape[1] >= 2 * _DIRECTIONS else X
    chosen, nearest = _seed(flat, weight, k, generator), None
    Z, weighted = flat[chosen], flat * weight.unsqueeze(1)
    for _ in range(n_iter):
        nearest = torch.addmm(Z.square().sum(1), flat, Z.T, alpha=-2).argmin(1)
        Z = _means(weighted, weight, nearest, Z)
    if flat is not X:  # the centres are means of whole rows
        Z = X[chosen]
        if nearest is not None:
            Z = _means(X * weight.unsqueeze(1), weight, nearest, Z)
    return Z if lengths is None else Z * lengths


def _means(weighted: Tensor, weight: Tensor, nearest: Tensor, Z: Tensor) -> Tensor:
    """The mean of the rows of every centre; one without rows stays where it is in Z (k, D)."""
    mass = weight.new_zeros(len(Z)).index_add_(0, nearest, weight)
    total = torch.zeros_like(Z).index_add_(0, nearest, weighted)
    return torch.where(mass.unsqueeze(1) > 0, total / mass.unsqueeze(1), Z)


def _directions(X: Tensor) -> Tensor:
    """Orthogonal directions (D, d) in which rows differ most: a step of subspace iteration."""
    some = X[:_DIRECTION_ROWS] - X[:_DIRECTION_ROWS].mean(0)
    some = some / some.abs().max().clamp(min=torch.finfo(X.dtype).tiny)  # lest cubes overflow
    return torch.linalg.qr(some.T @ (some @ some[:_DIRECTIONS].T))[0]


def _seed(X: Tensor, weight: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Which rows k-means++ starts from, (k,).

    They are drawn with probability weight × squared distance to those before. Few are drawn one
    by one; of many, an eighth at a time: about as good, and few large products instead of many
    small ones.
    """
    if k > _SEED_LIMIT:
        return _draw(weight, k, generator)
    chosen = _draw(weight, 1, generator)
    norm, free = torch.linalg.vector_norm(X, dim=1).square_(), weight.clone()
    distance = torch.full_like(norm, float("inf"))
    new, size = chosen, 1 if k <= _ONE_BY_ONE else -(-(k - 1) // 8)
    while len(chosen) < k:
        free[new] = 0
        Z = X[new]
        to_new = torch.addmm(Z.square().sum(1), X, Z.T, alpha=-2).amin(1).add_(norm)
        distance = torch.minimum(distance, to_new.clamp_(min=0))
        p = distance * free
        # Rows that equal a seed come last.
        p = torch.maximum(p, 1e-12 * p.max() * free).where(p.sum() > 0, free)
        new = _draw(p, min(k - len(chosen), size), generator)
        chosen = torch.cat([chosen, new])
    return chosen


def _draw(weight: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """`n` rows without replacement. Drawn on the CPU: the same rows on every device."""
    drawn = torch.multinomial(weight.double().cpu(), n, generator=generator)
    return drawn.to(weight.device)


def greedy(X: Tensor, n: int, kernel: Kernel) -> Tensor:
    """The points of greatest variance given those before: a pivoted Cholesky factorisation."""
    X = X[: max(_LEAST_ROWS, _ROWS_PER_CENTRE * n)]
    residual = kernel.diag(X).clone()
    floor = 1e-6 * residual.max()
    rows = torch.zeros(n, len(X), dtype=X.dtype, device=X.device)
    chosen: list[int] = []
    for i in range(n):
        j = int(residual.argmax())
        if i and not residual[j] > floor:
            break
        row = kernel(X[j : j + 1], X)[0] - rows[:i, j] @ rows[:i]
        rows[i] = row / residual[j].clamp(min=floor).sqrt()
        residual = (residual - rows[i].square()).clamp_(min=0)
        residual[j] = 0
        chosen.append(j)
    return X[chosen].clone()
