"""Adam (Kingma & Ba 2015) for a handful of tensors.

torch.optim would do, but its first use imports torch's compiler, which takes longer than a fit.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Adam:
    """Bias-corrected first and second moments of each tensor's gradient."""

    def __init__(self, tensors: list[Tensor], beta1: float = 0.9, beta2: float = 0.999) -> None:
        self.tensors, self.beta1, self.beta2 = tensors, beta1, beta2
        self.first = [torch.zeros_like(x) for x in tensors]
        self.second = [torch.zeros_like(x) for x in tensors]
        self.count = 0

    @torch.no_grad()
    def descend(self, gradients: list[Tensor | None], rates: list[float]) -> None:
        """One step against the gradients, in place; None leaves a tensor where it is."""
        self.count += 1
        correction1 = 1 - self.beta1**self.count
        correction2 = 1 - self.beta2**self.count
        for x, g, m, s, rate in zip(
            self.tensors, gradients, self.first, self.second, rates, strict=True
        ):
            if g is None:
                continue
            m.lerp_(g, 1 - self.beta1)
            s.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
            step = (s / correction2).sqrt_().add_(1e-8)
            x.addcdiv_(m, step, value=-rate / correction1)
