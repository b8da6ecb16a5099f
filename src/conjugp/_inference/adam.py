"""Adam (Kingma & Ba 2015) for a handful of tensors.

torch.optim would do, but its first use imports torch's compiler, which takes longer than a fit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def move(
    x: Tensor,
    g: Tensor,
    m: Tensor,
    s: Tensor,
    beta1: float,
    beta2: float,
    least: float,
    length: float,
) -> None:
    """Moments m and s of the gradient g, and x moved along them; all in place."""
    m.lerp_(g, 1 - beta1)
    s.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    x.addcdiv_(m, torch.sqrt(s).add_(least), value=-length)


class Adam:
    """Bias-corrected first and second moments of each tensor's gradient."""

    def __init__(
        self,
        tensors: list[Tensor],
        beta1: float = 0.9,
        beta2: float = 0.999,
        move: Callable[..., None] = move,
    ) -> None:
        """`move`: the function of this name here or one that does the same."""
        self.tensors, self.beta1, self.beta2 = tensors, beta1, beta2
        self.move = move
        self.first = [torch.zeros_like(x) for x in tensors]
        self.second = [torch.zeros_like(x) for x in tensors]
        self.count = 0

    @torch.no_grad()
    def descend(self, gradients: list[Tensor | None], rates: list[float]) -> None:
        """One step against the gradients, in place; None leaves a tensor where it is."""
        self.count += 1
        correction1 = 1 - self.beta1**self.count
        root_correction2 = (1 - self.beta2**self.count) ** 0.5
        for x, g, m, s, rate in zip(
            self.tensors, gradients, self.first, self.second, rates, strict=True
        ):
            if g is not None:
                length = rate * root_correction2 / correction1
                self.move(x, g, m, s, self.beta1, self.beta2, 1e-8 * root_correction2, length)


class RowAdam:
    """Adam on some rows of a tensor at a time.

    The others are where Adam would have them with a gradient of zero, but are moved there only
    when they are next looked at.
    """

    def __init__(self, x: Tensor, beta1: float = 0.9, beta2: float = 0.999) -> None:
        self.x, self.beta1, self.beta2 = x, beta1, beta2
        self.first, self.second = torch.zeros_like(x), torch.zeros_like(x)
        self.last = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        self.count = 0

    @torch.no_grad()
    def look(self, index: Tensor, rate: float) -> Tensor:
        """The rows `index` (K,) after the steps they have missed, all of about this rate."""
        x, first, second = (t[index] for t in (self.x, self.first, self.second))
        if self.count:
            missed = (self.count - self.last[index]).view(-1, *[1] * (x.ndim - 1))
            # Each missed step is shorter than the one before by this factor.
            ratio = self.beta1 / self.beta2**0.5
            length = ratio * (1 - ratio**missed) / (1 - ratio)
            x.sub_(self._step(first, second, rate).mul_(length))
            first.mul_(self.beta1**missed)
            second.mul_(self.beta2**missed)
        self._open = index, x, first, second
        return x

    @torch.no_grad()
    def descend(self, g: Tensor, rate: float, weight: Tensor) -> None:
        """One step of the rows last looked at against their gradients g (K, ...).

        Gradients are `weight` (K,) times those of one step, for as many in which the rows were not
        looked at: so are their squares, and not the square of that.
        """
        index, x, first, second = self._open
        self.count += 1
        first.lerp_(g, 1 - self.beta1)
        one = g / weight.view(-1, *[1] * (g.ndim - 1))
        second.mul_(self.beta2).addcmul_(g, one, value=1 - self.beta2)
        x.sub_(self._step(first, second, rate))
        self.x[index], self.first[index], self.second[index] = x, first, second
        self.last[index] = self.count

    def _step(self, first: Tensor, second: Tensor, rate: float) -> Tensor:
        scale = rate / (1 - self.beta1**self.count)
        root = (second / (1 - self.beta2**self.count)).sqrt_().add_(1e-8)
        return root.reciprocal_().mul_(first).mul_(scale)
