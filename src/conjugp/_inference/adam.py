"""Adam (Kingma & Ba 2015) for a handful of tensors.

torch.optim would do, but its first use imports torch's compiler, which takes longer than a fit.
The formula stands in `remember`, `corrected` and `direction`; all who move by Adam share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST = 1e-8  # added to the root of the second moment


def remember(
    first: Tensor, second: Tensor, g: Tensor, beta1: float, beta2: float, one: Tensor | None = None
) -> None:
    """Take the gradient g into both moments, in place.

    Where g stands for several gradients, `one` is what one of them would be.
    """
    first.lerp_(g, 1 - beta1)
    second.mul_(beta2).addcmul_(g, g if one is None else one, value=1 - beta2)


def corrected(rate: float, count: int, beta1: float, beta2: float) -> tuple[float, float]:
    """What corrects the moments of so many gradients: a length, and what the root is added to."""
    root = (1 - beta2**count) ** 0.5
    return rate * root / (1 - beta1**count), _LEAST * root


def direction(
    first: Tensor, second: Tensor, length: float | Tensor, least: float | Tensor
) -> Tensor:
    """What a step of this length takes away: length·m / (√s + least)."""
    return first.mul(length).div_(second.sqrt().add_(least))


class Adam:
    """Bias-corrected first and second moments of each tensor's gradient."""

    def __init__(self, tensors: list[Tensor], beta1: float = 0.9, beta2: float = 0.999) -> None:
        self.tensors, self.beta1, self.beta2 = tensors, beta1, beta2
        self.first = [torch.zeros_like(x) for x in tensors]
        self.second = [torch.zeros_like(x) for x in tensors]
        self.count = 0

    @torch.no_grad()
    def descend(self, gradients: Sequence[Tensor | None], rates: Sequence[float]) -> None:
        """One step against the gradients, in place; None leaves a tensor where it is."""
        self.count += 1
        self.move(gradients, [self.corrected(rate) for rate in rates])

    def corrected(self, rate: float, ahead: int = 0) -> tuple[float, float]:
        """`corrected` of the last step, or so many steps ahead of it."""
        return corrected(rate, self.count + ahead, self.beta1, self.beta2)

    def move(
        self,
        gradients: Sequence[Tensor | None],
        lengths: Sequence[tuple[float | Tensor, float | Tensor]],
    ) -> None:
        """The step itself, of which nothing is a number where a graph of it is to be recorded."""
        for x, g, first, second, (length, least) in zip(
            self.tensors, gradients, self.first, self.second, lengths, strict=True
        ):
            if g is not None:
                remember(first, second, g, self.beta1, self.beta2)
                x.sub_(direction(first, second, length, least))


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
            x.sub_(self._direction(first, second, rate).mul_(length))
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
        one = g / weight.view(-1, *[1] * (g.ndim - 1))
        remember(first, second, g, self.beta1, self.beta2, one)
        x.sub_(self._direction(first, second, rate))
        self.x[index], self.first[index], self.second[index] = x, first, second
        self.last[index] = self.count

    def _direction(self, first: Tensor, second: Tensor, rate: float) -> Tensor:
        return direction(first, second, *corrected(rate, self.count, self.beta1, self.beta2))
