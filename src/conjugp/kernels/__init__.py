"""Covariance functions: immutable, on whole matrices, differentiable in parameters and inputs.

A parameter left at ``None`` is taken from the data when a classifier is fitted. A kernel of your
own is one small frozen dataclass: its fields are positive parameters, and everything but the
formula is inherited::

    @dataclass(frozen=True)
    class Polynomial(Kernel):
        lengthscale: Lengths = None
        variance: Positive = None
        degree: int = field(default=2, metadata={"fixed": True})  # not a parameter to learn

        def __call__(self, X, Z):
            products = (X / self.parameter("lengthscale", X).square()) @ Z.T
            return self.parameter("variance", X) * (1 + products).pow(self.degree)

        def diag(self, X):
            squares = (X / self.parameter("lengthscale", X)).square().sum(1)
            return self.parameter("variance", X) * (1 + squares).pow(self.degree)

A stationary one is shorter still: subclass :class:`Stationary` and write ``of_distance``.
"""

from __future__ import annotations

from functools import reduce
from operator import add, mul

from conjugp.kernels._base import Kernel
from conjugp.kernels._combinations import Product, Sum
from conjugp.kernels._directions import Normalised
from conjugp.kernels._linear import Linear
from conjugp.kernels._parameters import Lengths, Positive
from conjugp.kernels._stationary import (
    RBF,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    Stationary,
)

__all__ = [
    "RBF",
    "Kernel",
    "Lengths",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Normalised",
    "Positive",
    "Product",
    "RationalQuadratic",
    "Stationary",
    "Sum",
]

_NAMES: dict[str, type[Kernel]] = {
    "rbf": RBF,
    "matern12": Matern12,
    "matern32": Matern32,
    "matern52": Matern52,
    "rational-quadratic": RationalQuadratic,
    "linear": Linear,
}
KERNELS: tuple[type[Kernel], ...] = (*_NAMES.values(), Normalised, Sum, Product)


def get_kernel(kernel: Kernel | str | None) -> Kernel | None:
    """The kernel of that name, or of names joined by + and *; a kernel, or None, as it is."""
    if kernel is None or kernel == "auto":
        return None
    if isinstance(kernel, Kernel):
        return kernel
    known = f"auto, {', '.join(_NAMES)}"
    if not isinstance(kernel, str):
        raise ValueError(
            f"kernel must be a conjugp.kernels.Kernel, None, or one of {known}, joined by + or *; "
            f"got {kernel!r}"
        )

    def one(name: str) -> Kernel:
        if name.strip() not in _NAMES:
            raise ValueError(f"kernel: {name.strip()!r} is none of {known}")
        return _NAMES[name.strip()]()

    return reduce(add, (reduce(mul, map(one, term.split("*"))) for term in kernel.split("+")))
