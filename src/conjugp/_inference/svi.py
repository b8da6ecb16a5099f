"""The algorithm on one page: site, statistics, natural-gradient step, ELBO.

Full batch with rho = 1 is coordinate ascent (CAVI). The equation tags are those of docs/math.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._gp.features import Features
from conjugp._gp.posterior import Moments, Posterior, marginals, pullback
from conjugp._rows.group import Group
from conjugp.likelihoods._base import Likelihood, Site

MIN_PRECISION = 1e-6


class Statistics(NamedTuple):
    """Sums over points: batches, chunks, streams and machines simply add up (Q3)."""

    h: Tensor  # (C, M)
    P: Tensor  # (C, M, M), without the prior's identity
    bound: Tensor  # scalar


class Gradients(NamedTuple):
    """Derivatives of the weighted sum of bounds, for the hyperparameters."""

    features: Features
    mean: Tensor  # (C,)


def clamp(site: Site, m: Tensor, batch: bool = False) -> Site:
    """Keep the site's precision positive and its gradient in m unchanged.

    Steps on a `batch`, which are not taken back where the ELBO falls, are no longer than what all
    classes together allow (S2).
    """
    d_mean = site.potential - site.precision * m
    curvature = site.precision if site.curvature is None else site.curvature
    if batch and site.joint is not None:
        curvature = torch.maximum(curvature, site.joint)
    precision = curvature.clamp(min=MIN_PRECISION)
    return Site(d_mean + precision * m, precision, site.bound)


def statistics(f: Features, site: Site, mean: Tensor, weight: Tensor) -> Statistics:
    """Weighted sums A (potential - precision·mean) and A diag(precision) Aᵀ (Q3)."""
    theta = (site.precision * weight.unsqueeze(1)).T.contiguous()
    r = (site.potential * weight.unsqueeze(1)).T - theta * mean.unsqueeze(1)
    if f.A.shape[0] > 1:
        return Statistics(
            (f.A @ r.unsqueeze(-1)).squeeze(-1),
            (f.A * theta.unsqueeze(1)) @ f.A.mT,
            (site.bound * weight).sum(),
        )
    A = f.A[0]
    C, M = theta.shape[0], A.shape[0]
    P = ((A.unsqueeze(0) * theta.unsqueeze(1)).reshape(C * M, -1) @ A.T).reshape(C, M, M)
    return Statistics(r @ A.T, P, (site.bound * weight).sum())


def add(parts: Iterable[Statistics]) -> Statistics:
    """The statistics of several sets of rows together."""
    return reduce(lambda a, b: Statistics(a.h + b.h, a.P + b.P, a.bound + b.bound), parts)


def pooled(s: Statistics, others: list[Tensor], group: Group) -> Statistics:
    """The statistics of all ranks; `others`, such as gradients, are summed in place beside them.

    In one message, and of P, which is symmetric, one half.
    """
    M = s.P.shape[-1]
    row, column = torch.tril_indices(M, M, device=s.P.device)
    h, half, bound = s.h.contiguous(), s.P[:, row, column], s.bound.detach().reshape(1)
    group.sum([h, half, bound, *others])
    P = torch.empty_like(s.P)
    P[:, row, column] = half
    P[:, column, row] = half
    return Statistics(h, P, bound[0])


def update(q: Posterior, s: Statistics, scale: float, rho: float) -> Posterior:
    """Natural-gradient step q <- (1 - rho) q + rho q*, q* = prior + scale·statistics (Q4)."""
    h = torch.lerp(q.h, scale * s.h, rho)
    P = ((1 - rho) * q.P).add_(s.P, alpha=rho * scale)
    torch.diagonal(P, dim1=-2, dim2=-1).add_(rho)
    return Posterior(h, P)


def update_in_place(q: Posterior, h: Tensor, P: Tensor, rho: float | Tensor) -> None:
    """The same step on q itself, by sums that carry their scale; rho for all or each, (C,) (Q4)."""
    of_P, rho = (rho.view(-1, 1, 1), rho.view(-1, 1)) if isinstance(rho, Tensor) else (rho, rho)
    q.h.lerp_(h, rho)
    q.P.lerp_(P, of_P)
    torch.diagonal(q.P, dim1=-2, dim2=-1).add_(rho)


def evaluate(
    q: Moments,
    likelihood: Likelihood,
    bound: str,
    f: Features,
    y: Tensor,
    mean: Tensor,
    weight: Tensor,
    gradients: bool,
    rough: bool = False,
    batch: bool = False,
) -> tuple[Statistics, Gradients | None]:
    """One pass over rows: their statistics for q and, if asked, the hyperparameters' gradients."""
    m, v, W = marginals(q, f)
    m = (m + mean).requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        site = likelihood.site(y, m, v, bound, rough)
        total = (site.bound * weight).sum()
    s = statistics(f, clamp(site, m.detach(), batch), mean, weight)
    if not gradients:
        return s, None
    # Not potential - precision·m: that cancels where an augmented site is very precise.
    (dm,) = torch.autograd.grad(total, m)
    dv = -0.5 * site.precision * weight.unsqueeze(1)
    return s._replace(bound=s.bound.detach()), Gradients(pullback(q, f, W, dm, dv), dm.sum(0))
