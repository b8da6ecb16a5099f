"""Latent moments to probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from conjugp._numerics.expectations import sobol_normals
from conjugp.likelihoods._base import Likelihood
from conjugp.likelihoods._monte_carlo import average

__all__ = ["METHODS", "apply_temperature", "predict_proba"]

METHODS = ("integral", "mc", "qmc")


def predict_proba(
    likelihood: Likelihood,
    m: Tensor,
    v: Tensor,
    method: str = "integral",
    n_samples: int = 1024,
    seed: int = 0,
    chunk_elements: int = 2**21,
    variance_scale: float = 1.0,
    rough: bool = False,
) -> Tensor:
    """E[p(· | f)] under f ~ N(m, v): m and v (B, C) -> (B, C), float64, rows sum to 1 (P1, P5).

    With a ``variance_scale`` of 0 the probabilities at the mean; otherwise it multiplies v.
    ``"integral"`` is deterministic; ``"mc"`` and ``"qmc"`` average over ``n_samples`` standard
    normal draws of C numbers, scrambled Sobol points for ``"qmc"`` (best with a power of 2). All
    rows share the draws, so a row's answer does not depend on which others are asked for.
    No more than ``chunk_elements`` draws of latents are held at a time. A ``rough`` integral is
    good to four digits.
    """
    if method not in METHODS:
        known = ", ".join(repr(name) for name in METHODS)
        raise ValueError(f"method must be one of {known}, got {method!r}")
    if n_samples < 1:
        raise ValueError(f"n_samples must be at least 1, got {n_samples}")
    with torch.no_grad():
        m = m.detach().double()
        if variance_scale == 0.0:
            return likelihood.prob(m)
        # One variance for all classes stays one number.
        v = v[:, :1] if v.stride(-1) == 0 else v
        v = (variance_scale * v.detach().double()).expand_as(m)
        if method == "integral":
            p = likelihood.rough_integral(m, v) if rough else likelihood.integral(m, v)
        else:
            z = _normal_draws(method, n_samples, m.shape[-1], seed).to(m.device)
            p = average(likelihood.prob, m, v.sqrt(), z, chunk_elements)
        return p / p.sum(-1, keepdim=True)


def _normal_draws(method: str, n: int, dim: int, seed: int) -> Tensor:
    """(n, dim) standard normals; the same seed gives the same draws on every device."""
    if method == "mc":
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return sobol_normals(n, dim, seed)


def apply_temperature(p: Tensor, temperature: float, shares: Tensor | None = None) -> Tensor:
    """p^{1/T}, normalised over the last axis, in logs and float64 (P6).

    With T above 1 and the classes' shares π (C,) it is π (p/π)^{1/T}: who knows nothing says how
    frequent the classes are, not that all are alike.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    p = p.double()
    if temperature == 1.0:
        return p
    log_p = torch.log(p) / temperature
    if shares is not None and temperature > 1.0:
        log_p += (1.0 - 1.0 / temperature) * torch.log(shares.to(log_p))
    return torch.softmax(log_p, -1)
