"""What changes during a fit: kernels, inducing points, prior means, q."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conjugp._gp.posterior import Posterior, prior
from conjugp._persistence.codec import in_checkpoints
from conjugp.kernels import Kernel

in_checkpoints(Posterior)


@in_checkpoints
@dataclass
class State:
    """Everything that changes during a fit."""

    template: Kernel
    theta: Tensor  # (K, T) log kernel parameters
    Z: Tensor  # (M, D)
    mean: Tensor  # (C,)
    q: Posterior
    step: int = 0

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """One kernel, or one for each class."""
        return tuple(self.template.with_theta(t) for t in self.theta)


def initial_state(kernels: list[Kernel], Z: Tensor, mean: Tensor) -> State:
    """The prior: q = N(0, I) for every class."""
    theta = torch.stack([k.theta for k in kernels]).to(Z)
    return State(kernels[0], theta.detach().clone(), Z.clone(), mean, prior(len(mean), len(Z), Z))
