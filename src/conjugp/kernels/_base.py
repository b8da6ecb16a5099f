"""What a kernel is: a covariance function with positive parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from conjugp.kernels._parameters import Parametric


class Kernel(Parametric, ABC):
    """A covariance function k(x, z).

    Subclasses are frozen dataclasses. Each field is a positive parameter: a number, ``None`` for
    "from the data", or, where its name starts with ``lengthscale``, one number per input feature
    (ARD). A field may hold another kernel, or a tuple of them. Fields declared with
    ``metadata={"fixed": True}`` are left alone.
    """

    @abstractmethod
    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        """The matrix k(X, Z): (n, D), (m, D) -> (n, m), in the dtype and on the device of X."""

    @abstractmethod
    def diag(self, X: Tensor) -> Tensor:
        """The diagonal of k(X, X): (n, D) -> (n,)."""

    @property
    def stationary(self) -> bool:
        """Whether k(x, z) depends on x − z alone, so that ``diag`` is constant."""
        return False

    def __add__(self, other: Kernel) -> Kernel:
        from conjugp.kernels._combinations import Sum

        return Sum.of(self, other) if isinstance(other, Kernel) else NotImplemented

    def __mul__(self, other: Kernel) -> Kernel:
        from conjugp.kernels._combinations import Product

        return Product.of(self, other) if isinstance(other, Kernel) else NotImplemented


def check_kernels(found: Any, n_classes: int, X: Tensor) -> None:
    """Raise ValueError unless these are one kernel of inputs like X, or one for each class."""
    if not isinstance(found, list) or len(found) not in (1, n_classes):
        raise ValueError(f"kernels must be one or {n_classes}")
    x = X[:1]
    for kernel in found:
        if not isinstance(kernel, Kernel):
            raise ValueError(f"{kernel!r} is not a kernel")
        K, k = kernel(x, x), kernel.diag(x)
        if K.shape != (1, 1) or k.shape != (1,) or not (K.isfinite().all() and k >= 0):
            raise ValueError(f"{kernel!r} gives no covariance")
