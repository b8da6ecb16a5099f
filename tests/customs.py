"""A kernel and a likelihood that are not in the library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from conjugp import kernels as k
from conjugp.likelihoods import Likelihood


@dataclass(frozen=True)
class Cauchy(k.Stationary):
    """A kernel that is not in the library."""

    lengthscale: k.Lengths = None
    variance: k.Positive = None
    power: int = field(default=2, metadata={"fixed": True})

    def of_distance(self, r2: Tensor) -> Tensor:
        return 1 / (1 + r2.pow(self.power / 2))


@dataclass(frozen=True)
class Noisy(Likelihood):
    """A likelihood that is not in the library."""

    share: float = 0.1
    name: ClassVar[str] = "noisy"

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        p = (1 - self.share) * torch.softmax(f, -1) + self.share / f.shape[-1]
        return p.gather(-1, y[:, None].expand(*f.shape[:-1], 1)).squeeze(-1).log()
