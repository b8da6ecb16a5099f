"""Expectations over f ~ N(m, v) by sampling, from log p(y | f) alone (L1–L3).

Draws are Sobol points, each with its mirror image, and always the same ones, so that a sampled
expectation is a function of m and v like any other: it can be maximised, and it repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._numerics.expectations import sobol_normals

_PAIRS = 32  # draws and their mirror images for the site of a row ...
_BLOCKS = 16  # ... from so many different sets, in turn, so that rows do not share their errors
_PREDICTION = 4096  # draws of a predictive integral
_ELEMENTS = 2**21  # numbers held at a time
_SEED = 1


class Expectation(NamedTuple):
    """E[log p(y | f)], or a bound on it, with its derivatives."""

    value: Tensor  # (B,)
    dm: Tensor  # (B, C)
    dv: Tensor  # (B, C)
    curvature: Tensor | None = None  # (B, C), see `Site`
    joint: Tensor | None = None  # (B, C), likewise


@lru_cache(maxsize=16)
def _draws(dim: int) -> Tensor:
    """(pairs, blocks, dim): consecutive stretches of one sequence, each spread evenly."""
    return sobol_normals(_BLOCKS * _PAIRS, dim, _SEED).view(_BLOCKS, _PAIRS, dim).transpose(0, 1)


def expectation(
    log_prob: Callable[[Tensor, Tensor], Tensor], smooth: bool, y: Tensor, m: Tensor, v: Tensor
) -> Expectation:
    """E[log p(y | f)] and its derivatives in m and v (B, C), float64 (L1, L2)."""
    m, v = m.double(), v.double()
    # Narrower Gaussians than this would drown differences in rounding.
    sd = torch.maximum(v.sqrt(), 1e-4 * (1.0 + m.abs()))
    one = _reparametrised if smooth else _scored
    size = max(1, _ELEMENTS // (2 * _PAIRS * m.shape[-1]))
    parts = []
    for i in range(0, max(1, len(y)), size):
        rows = slice(i, i + size)
        block = torch.arange(i, min(i + size, len(y)), device=m.device) % _BLOCKS
        z = _draws(m.shape[-1]).to(m.device)[:, block]
        z = torch.cat([z, -z])
        parts.append(one(log_prob, y[rows], m[rows], sd[rows], z))
    return Expectation(*(torch.cat(x) for x in zip(*(part[:3] for part in parts), strict=True)))


def _reparametrised(
    log_prob: Callable[[Tensor, Tensor], Tensor], y: Tensor, m: Tensor, sd: Tensor, z: Tensor
) -> Expectation:
    """∂m = E[∂log p], ∂v = E[z ∂log p]/(2 sd): the derivatives of the average itself (L1)."""
    with torch.enable_grad():
        f = torch.addcmul(m, sd, z).requires_grad_()
        value = log_prob(y, f)
        (slope,) = torch.autograd.grad(value.sum(), f)
    return Expectation(value.detach().mean(0), slope.mean(0), (slope * z).mean(0) / (2.0 * sd))


def _scored(
    log_prob: Callable[[Tensor, Tensor], Tensor], y: Tensor, m: Tensor, sd: Tensor, z: Tensor
) -> Expectation:
    """∂m = E[z log p]/sd, ∂v = E[(z² − 1) log p]/(2 v), which differentiate N(m, v) (L2)."""
    value = log_prob(y, torch.addcmul(m, sd, z))
    mean = value.mean(0)
    rest = (value - mean)[..., None]
    dv = (rest * (z * z - 1.0)).mean(0) / (2.0 * sd * sd)
    return Expectation(mean, (rest * z).mean(0) / sd, dv)


def average(
    prob: Callable[[Tensor], Tensor], m: Tensor, sd: Tensor, z: Tensor, elements: int = _ELEMENTS
) -> Tensor:
    """The mean of p(· | m + sd·z) over draws z (S, C) that all rows share: (B, C) (L3, P5)."""
    p = _added(torch.zeros_like(m), lambda f: prob(f).sum(0), m, sd, z, elements)
    return p / p.sum(-1, keepdim=True)


def _added(
    out: Tensor, of: Callable[[Tensor], Tensor], m: Tensor, sd: Tensor, z: Tensor, elements: int
) -> Tensor:
    """`out` and, row by row, of(m + sd·z), which sums over draws."""
    samples = max(1, min(len(z), elements // max(1, m.shape[-1])))
    rows = max(1, elements // (samples * m.shape[-1]))
    for i in range(0, len(m), rows):
        part = slice(i, i + rows)
        for draws in z.split(samples):
            out[part] += of(torch.addcmul(m[part], sd[part], draws[:, None, :]))
    return out


def integral(prob: Callable[[Tensor], Tensor], m: Tensor, v: Tensor) -> Tensor:
    """E[p(· | f)] under N(m, v) from quasi-random draws: (B, C), float64 (L3)."""
    with torch.no_grad():
        m, sd = m.detach().double(), v.detach().double().sqrt()
        return average(prob, m, sd, _pairs(_PREDICTION // 2, m))


def expected_entropy(
    prob: Callable[[Tensor], Tensor], m: Tensor, v: Tensor, n_draws: int = _PREDICTION
) -> Tensor:
    """E[H[p(· | f)]] under N(m, v) from quasi-random draws: (B, C) -> (B,), float64 (U2)."""
    with torch.no_grad():
        m, sd, z = m.detach().double(), v.detach().double().sqrt(), _pairs(n_draws // 2, m)

        def entropies(f: Tensor) -> Tensor:
            return torch.special.entr(prob(f)).sum((0, -1))

        return _added(m.new_zeros(len(m)), entropies, m, sd, z, _ELEMENTS) / len(z)


def _pairs(n: int, like: Tensor) -> Tensor:
    """(2n, C) standard normal draws: Sobol points and their mirror images."""
    half = sobol_normals(n, like.shape[-1], _SEED).to(like.device)
    return torch.cat([half, -half])
