"""Expectation propagation on one page: cavity, moments, new sites, statistics, evidence.

The label's latent beats every other one: a factor Θ(f_y − f_c) for each pair of a row's label and
another class. A factor touches two latents, so arrays over pairs have two ends in front, (2, B, C):
first the label's latent, then that of class c. The label's own column means nothing and is left
out of every sum. Scalars are float64. The equation tags are those of docs/math.md.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._gp.features import Features
from conjugp._gp.posterior import Moments, Posterior, marginals, pullback
from conjugp._inference import svi
from conjugp._numerics.linalg import cholesky
from conjugp._persistence.codec import in_checkpoints
from conjugp.likelihoods._base import Site

_MIN_REST = 1e-4  # of its precision a posterior keeps without one site, rounding aside


class Cavity(NamedTuple):
    """Gaussians of x = Aᵀũ without one factor; the prior mean is not in them (E3, E6)."""

    a: Tensor  # (2, B, C) means
    h: Tensor  # (2, B, C) variances


@in_checkpoints
class Sites(NamedTuple):
    """exp(potential·x − ½ precision·x²) at both ends of every pair (E2)."""

    potential: Tensor  # (2, B, C)
    precision: Tensor  # (2, B, C), never negative


class Match(NamedTuple):
    """A factor times its cavity: the normaliser, its derivatives, the site that matches (E4)."""

    log_z: Tensor  # (B, C)
    d_a: Tensor  # (2, B, C), ∂ log Z/∂a
    d_s: Tensor  # (B, C), ∂ log Z/∂s
    sites: Sites


class Evaluation(NamedTuple):
    """One pass over a batch."""

    sites: Sites  # matched, not damped
    log_z: Tensor  # the weighted sum of log Z, or log Z̃ where sites are kept (E5)
    gap: Tensor  # weighted sum of squared changes of q, in its standard deviations
    gradients: svi.Gradients | None


def pairs(x: Tensor, y: Tensor) -> Tensor:
    """x (B, C) at both ends of every pair, (2, B, C)."""
    return torch.stack([x.gather(1, y.unsqueeze(1)).expand_as(x), x])


def fold(x: Tensor, y: Tensor) -> Tensor:
    """Sums of x (2, B, C) over the pairs that touch a latent, (B, C)."""
    label = y.unsqueeze(1)
    own = x[0].scatter(1, label, 0.0).sum(1, keepdim=True)
    return x[1].scatter(1, label, own)


def no_sites(n: int, n_classes: int, device: torch.device) -> Sites:
    """Sites that say nothing yet."""
    empty = torch.zeros(2, n, n_classes, dtype=torch.float64, device=device)
    return Sites(empty, empty)


def damped(old: Sites, new: Sites, step: float) -> Sites:
    """A step from the old sites towards the new ones."""
    return Sites(*(torch.lerp(a, b, step) for a, b in zip(old, new, strict=True)))


def centred(sites: Sites, x: Tensor) -> Sites:
    """Move both ends of every pair down by x (B,), what all latents of a row have in common.

    No factor sees it, and it is zero at a fixed point; but every site holds it where it is, and
    propagation alone takes as many sweeps as P is large to lose it (E9).
    """
    return sites._replace(potential=sites.potential - sites.precision * x.unsqueeze(1))


def centred_posterior(q: Posterior, w: Tensor) -> Posterior:
    """The same for the sum of all sites: moved down by w (M,) in whitened coordinates (E9)."""
    return q._replace(h=q.h - q.P @ w + w)


def without(q: Cavity, sites: Sites, share: Tensor) -> Cavity:
    """Take a share (B,) of each site out of the marginals it is in (E3)."""
    potential, precision = (share.unsqueeze(1) * x for x in sites)
    # In exact arithmetic the rest is positive: what stays of P is never below the prior's.
    h = q.h / (1 - precision * q.h).clamp(min=_MIN_REST)
    return Cavity(q.a + h * (precision * q.a - potential), h)


def match(cavity: Cavity, mean: Tensor, residual: Tensor) -> Match:
    """Moments of Φ(β) under the cavity and the sites that give them (E4).

    ``mean`` is the prior mean, ``residual`` the variance k̃ + σ0², both (2, B, C).
    """
    a, h = cavity
    b = residual + h
    s = b.sum(0)
    level = a + mean
    beta = (level[0] - level[1]) / s.sqrt()
    alpha = math.sqrt(2 / math.pi) / torch.special.erfcx(-beta / math.sqrt(2))
    # α(α+β) rises from 0 to 1 as β falls; far out the sum in it cancels.
    series = 1 - beta.clamp(max=-1.0).pow(-2)
    curvature = torch.where(beta < -1e3, series, alpha * (alpha + beta)).clamp(0.0, 1.0)
    # 1/(1/ν − h) with ν = curvature/s; s − h is what the other end and the residual add.
    precision = curvature / (residual + b.flip(0) + (1 - curvature) * h)
    slope = alpha / s.sqrt()
    d_a = torch.stack([slope, -slope])
    potential = d_a * (1 + precision * h) + precision * a
    d_s = -0.5 * alpha * beta / s
    return Match(torch.special.log_ndtr(beta), d_a, d_s, Sites(potential, precision))


def change(q: Cavity, old: Sites, new: Sites) -> Tensor:
    """What new sites would do to the means and variances they are in, squared, (2, B, C)."""
    r, t = new.potential - old.potential, new.precision - old.precision
    return q.h * (r - t * q.a).square() + (q.h * t).square()


def log_scale(cavity: Cavity, sites: Sites) -> Tensor:
    """log ∫ N(x | a, h) exp(potential·x − ½ precision·x²) dx for both ends together, (B, C)."""
    (a, h), (r, t) = cavity, sites
    x = 1 + t * h
    return (0.5 * (r * r * h + 2 * r * a - t * a * a) / x - 0.5 * x.log()).sum(0)


def statistics(f: Features, sites: Sites, y: Tensor, weight: Tensor) -> svi.Statistics:
    """Weighted sums of the sites in whitened coordinates (Q3)."""
    r, t = (fold(x, y).to(f.A.dtype) for x in sites)
    zero = torch.zeros_like(weight)
    return svi.statistics(f, Site(r, t, zero), zero.new_zeros(t.shape[1]), weight)


def counts(mass: Tensor) -> Tensor:
    """How many factors touch each class of these weights, (C,) (E6).

    One a rival's row, C − 1 a row of its own.
    """
    own = mass.double()
    return own.sum() + (len(own) - 2) * own


def averaged_cavity(q: Posterior, n: Tensor) -> Posterior:
    """The posterior without one of the n (C,) factors, all taken to be equal (E6)."""
    keep = (1 - 1 / n.clamp(min=1.0)).to(q.h.dtype)
    P = keep.view(-1, 1, 1) * q.P
    torch.diagonal(P, dim1=-2, dim2=-1).add_((1 - keep).unsqueeze(1))
    return Posterior(keep.unsqueeze(1) * q.h, P)


def log_norm(q: Posterior) -> Tensor:
    """log ∫ exp(hᵀũ − ½ũᵀPũ) dũ relative to the prior's, (C,): g in the text (E5).

    In float64: the evidence multiplies differences of it by the number of factors.
    """
    L, _ = cholesky(q.P.double(), jitter=0.0)
    z = torch.linalg.solve_triangular(L, q.h.double().unsqueeze(-1), upper=False)
    return 0.5 * z.square().sum((1, 2)) - torch.diagonal(L, dim1=-2, dim2=-1).log().sum(1)


def evaluate(
    q: Moments,
    f: Features,
    y: Tensor,
    mean: Tensor,
    weight: Tensor,
    noise: float,
    gradients: bool,
    sites: Sites | None = None,
) -> Evaluation:
    """Match every factor of a batch, given q with the sites in it, or the cavity of all rows.

    Gradients are those of the evidence with sites and cavities held in place (E8).
    """
    m, v, W = marginals(q, f._replace(residual=torch.zeros_like(f.residual)))
    whole = Cavity(pairs(m.double(), y), pairs(v.double(), y))
    w, share = weight.double(), weight.double().clamp(max=1.0)
    present = no_sites(len(y), m.shape[1], m.device) if sites is None else sites
    cavity = without(whole, present, share)
    residual = (f.residual.T.double() + noise).expand_as(m)
    matched = match(cavity, pairs(mean.double().expand_as(m), y), pairs(residual, y))
    rows = (matched.log_z - log_scale(cavity, present)).scatter(1, y.unsqueeze(1), 0.0).sum(1)
    log_z, gap = rows @ w, fold(change(whole, present, matched.sites), y).sum(1) @ w
    if not gradients:
        return Evaluation(matched.sites, log_z, gap, None)
    d_s = matched.d_s.expand_as(matched.d_a)
    # A cavity is q with a rank-one change along A: its mean moves with A through P⁻¹A as well.
    r, t = (share.unsqueeze(1) * x for x in present)
    along = 0.5 * (t * cavity.a - r) * matched.d_a + d_s * (1 + t * cavity.h)
    dm, dv, dk = (weight.unsqueeze(1) * fold(x, y).to(m) for x in (matched.d_a, along, d_s))
    g = pullback(q, f, W, dm, dv)
    d_residual = dk.T if len(f.A) > 1 else dk.sum(1).unsqueeze(0)
    slopes = svi.Gradients(Features(g.A, d_residual), dm.sum(0))
    return Evaluation(matched.sites, log_z, gap, slopes)


def join(parts: list[Evaluation]) -> Evaluation:
    """The evaluation of several sets of rows together."""
    sites = Sites(*(torch.cat(x, 1) for x in zip(*(p.sites for p in parts), strict=True)))
    log_z = torch.stack([p.log_z for p in parts]).sum()
    gap = torch.stack([p.gap for p in parts]).sum()
    found = [p.gradients for p in parts if p.gradients is not None]
    if not found:
        return Evaluation(sites, log_z, gap, None)
    A = torch.cat([g.features.A for g in found], -1)
    residual = torch.cat([g.features.residual for g in found], -1)
    mean = torch.stack([g.mean for g in found]).sum(0)
    return Evaluation(sites, log_z, gap, svi.Gradients(Features(A, residual), mean))
