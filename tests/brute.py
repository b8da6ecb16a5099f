"""Expectations over f ~ N(m, v) by a dense grid in all its dimensions, for any likelihood."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from conjugp.likelihoods import Likelihood

NODES = {2: 161, 3: 41}


def grid(m: np.ndarray, v: np.ndarray) -> tuple[Tensor, Tensor]:
    """Points f (n, C) and their weights (n,), C = 2 or 3."""
    z = np.linspace(-8.0, 8.0, NODES[len(m)])
    w = np.exp(-0.5 * z * z)
    w /= w.sum()
    axes = [mc + math.sqrt(vc) * z for mc, vc in zip(m, v, strict=True)]
    f = np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")], -1)
    weight = math.prod(np.meshgrid(*[w] * len(m), indexing="ij")).ravel()
    keep = weight > 1e-18
    return torch.tensor(f[keep]), torch.tensor(weight[keep])


def expected_log_prob(likelihood: Likelihood, y: int, m: np.ndarray, v: np.ndarray) -> float:
    """E[log p(y | f)]."""
    f, weight = grid(m, v)
    label = torch.full((len(f),), y)
    return float(likelihood.log_prob(label, f) @ weight)


def expected_prob(likelihood: Likelihood, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """E[p(· | f)], (C,)."""
    f, weight = grid(m, v)
    return (weight @ likelihood.prob(f)).numpy()
