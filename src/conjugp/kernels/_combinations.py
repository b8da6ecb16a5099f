"""Sums and products of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add, mul
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from conjugp.kernels._base import Kernel

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class _Combination(Kernel):
    """Kernels joined by one operation; the field ``parts`` holds them."""

    parts: tuple[Kernel, ...]

    join: ClassVar[Callable[[Any, Any], Any]]

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        return reduce(self.join, (part(X, Z) for part in self.parts))

    def diag(self, X: Tensor) -> Tensor:
        return reduce(self.join, (part.diag(X) for part in self.parts))

    def __post_init__(self) -> None:
        given = self.parts if isinstance(self.parts, tuple) else ()
        if not given or not all(isinstance(part, Kernel) for part in given):
            raise TypeError(f"{type(self).__name__}: parts must be a tuple of kernels")

    @classmethod
    def of(cls, *kernels: Kernel) -> Self:
        """The kernels joined; those that are such a combination give their parts."""
        every = ((k.parts if isinstance(k, cls) else (k,)) for k in kernels)
        return cls(tuple(part for parts in every for part in parts))

    @property
    def stationary(self) -> bool:
        return all(part.stationary for part in self.parts)


@dataclass(frozen=True)
class Sum(_Combination):
    """k₁ + k₂ + …, usually written with ``+``: a sum of independent functions."""

    join: ClassVar[Callable[[Any, Any], Any]] = add

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """As in every kernel; the terms get equal parts of the variance."""
        share = variance / len(self.parts)
        return replace(self, parts=tuple(part.filled(lengthscale, share) for part in self.parts))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Product(_Combination):
    """k₁ · k₂ · …, usually written with ``*``: similar where all the parts say so."""

    join: ClassVar[Callable[[Any, Any], Any]] = mul

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """As in every kernel; the first factor gets the variance, the others 1."""
        shares = [variance] + [1.0] * (len(self.parts) - 1)
        filled = (p.filled(lengthscale, v) for p, v in zip(self.parts, shares, strict=True))
        return replace(self, parts=tuple(filled))

    def __repr__(self) -> str:
        return " * ".join(f"({p!r})" if isinstance(p, Sum) else repr(p) for p in self.parts)
