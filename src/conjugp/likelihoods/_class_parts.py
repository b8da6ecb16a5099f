"""A bound from some of the classes (docs/math.md, C2, C3).

A bound is the label's own term plus a convex function f of T = Σ_c t_c. A tangent of f at any τ
bounds it from below and is linear in T, so that a sample of the classes estimates it without bias
as long as τ does not depend on the classes drawn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._numerics.expectations import gamma_total, log_gamma_minus_entropy

# Sums over classes that have been averaged in float32 may round to 0 or to C.
_SMALLEST, _LARGEST_REST = 1e-300, 1.0 - 1e-12


class Classes(NamedTuple):
    """Some of the classes, for a few rows."""

    weight: Tensor  # (K,) what each stands for; 1 for every label among the rows
    total: Tensor  # (B,) τ, what the rows keep
    n_classes: int
    # The share of these classes' own estimate of T in τ. Above 0 it costs some bias, but τ is never
    # far behind.
    gain: float = 0.0


class Terms(NamedTuple):
    """What a bound is made of, and its derivatives in m and v."""

    label: Tensor  # (B,)
    label_dm: Tensor  # (B,)
    label_dv: Tensor  # (B,)
    t: Tensor  # (B, K)
    t_dm: Tensor  # (B, K)
    t_dv: Tensor | None  # (B, K), None for zero
    # Where t depends on where the tangent touches: that τ (B,), and which would have been best.
    tau: Tensor | None = None
    best: Tensor | None = None


class Part(NamedTuple):
    """A bound from some of the classes (C2)."""

    value: Tensor  # (B,)
    dm: Tensor  # (B, K), class weights included
    dv: Tensor  # (B, K), class weights included
    total: Tensor  # (B,) an estimate of T from these classes
    slope: Tensor  # (B, 1) λ


def tangent(total: Tensor, bound: str, n_classes: int) -> tuple[Tensor, Tensor]:
    """f and λ = -f' at T (B,), float64 (C2)."""
    total = total.double().clamp_min(_SMALLEST)
    if bound != "augmented":
        return -torch.log(total), 1.0 / total
    log_c, rest = math.log(n_classes), total / n_classes
    log_r = torch.log1p(-rest.clamp_max(_LARGEST_REST))
    G = gamma_total(log_r, torch.log(rest))
    value = log_gamma_minus_entropy(G) + G * log_r - log_c
    return value, torch.exp(torch.digamma(1.0 + G) - log_c)


def part(y: Tensor, e: Terms, bound: str, batch: Classes) -> Part:
    """The terms of some of the classes put together; y are positions among them (C2)."""
    weight = batch.weight.to(e.t.dtype)
    total = e.t @ weight
    # With all classes here the tangent is taken where it touches.
    gain = 1.0 if len(weight) == batch.n_classes else batch.gain
    tau = e.tau
    if tau is None:
        tau = total if gain == 1.0 else torch.lerp(batch.total.to(total), total, gain)
    f, slope = tangent(tau, bound, batch.n_classes)
    value = e.label + (f + slope * (tau - total)).to(e.label.dtype)
    slope = slope.to(e.t.dtype).unsqueeze(1)
    dm, dv = derivatives(y, e, slope * weight)
    return Part(value, dm, dv, total if e.best is None else e.best, slope)


def derivatives(y: Tensor, e: Terms, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of label - Σ slope·t in m and v, (B, K)."""
    rows = torch.arange(len(y), device=y.device)
    dm = -slope * e.t_dm
    dm[rows, y] += e.label_dm
    if e.t_dv is None:
        return dm, torch.zeros_like(dm)
    dv = -slope * e.t_dv
    dv[rows, y] += e.label_dv
    return dm, dv
