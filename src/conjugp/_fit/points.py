"""The stage that places inducing points."""

from __future__ import annotations

import torch
from torch import Tensor

from conjugp._fit.run import Run
from conjugp._gp import inducing
from conjugp._rows.dataset import Data, Dataset
from conjugp.kernels import Kernel, Normalised


def first_points(run: Run, kernel: Kernel, data: Dataset, n: int, by_class: bool) -> Tensor:
    """n points for a coupled fit: some of the user's, or chosen."""
    given = run.plan.inducing
    if not isinstance(given, Tensor):
        return _chosen(run, kernel, data, n, given, by_class)
    few = torch.randperm(len(given), generator=run.generator)[:n].to(data.like.device)
    return given if n >= len(given) else given[few]


def placed(run: Run, kernel: Kernel, data: Dataset, origin: Tensor | None) -> Tensor:
    """The points of a mean: the user's, which go with the rows to another `origin`, or chosen."""
    given = run.plan.inducing
    if not isinstance(given, Tensor):
        return _chosen(run, kernel, data, run.plan.n_inducing, given, by_class=True)
    return given if origin is None else given + origin


def _chosen(run: Run, kernel: Kernel, data: Dataset, n: int, how: str, by_class: bool) -> Tensor:
    some = data.sample()
    if by_class and how == "kmeans":
        Z = class_centres(kernel, some, n, run.generator)
    else:
        Z = inducing.choose(how, some.X, some.weight, n, kernel, run.generator)
    # Ranks choose alike; where their machines round differently, rank 0's are taken.
    return data.group.same_tensor(Z)


def class_centres(kernel: Kernel, data: Data, n: int, generator: torch.Generator) -> Tensor:
    """About `n` k-means centres of the classes' rows, in the kernel's own metric."""
    like = data.like
    if not isinstance(kernel, Normalised):
        return inducing.by_class(data, n, generator, inducing.metric(kernel, like))
    metric = inducing.metric(kernel.kernel, like)
    Z = inducing.by_class(data, n, generator, metric, kernel.directions)
    if kernel.units is None:
        return Z
    return Z / torch.tensor(kernel.units, dtype=like.dtype, device=like.device)
