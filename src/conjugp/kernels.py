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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, fields, replace
from functools import reduce
from operator import add, mul
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "RBF",
    "Kernel",
    "Lengths",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Positive",
    "Product",
    "RationalQuadratic",
    "Stationary",
    "Sum",
]

Positive: TypeAlias = float | Tensor | None
Lengths: TypeAlias = float | Sequence[float] | np.ndarray | Tensor | None

# Learned parameters stay within exp(±30), about 1e-13 to 1e13: their squares fit in float32.
LOG_BOUND = 30.0


class Kernel(ABC):
    """A covariance function k(x, z).

    Subclasses are frozen dataclasses. Each field is a positive parameter: a number, ``None`` for
    "from the data", or, where its name starts with ``lengthscale``, one number per input feature
    (ARD). A field may hold another kernel, or a tuple of them. Fields declared with
    ``metadata={"fixed": True}`` are left alone.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `dataclass` keeps what stands in the class itself. Its own repr would print whole ARD
        # arrays, and its own == would fail on them.
        for name in ("__repr__", "__eq__", "__hash__"):
            if cls.__dict__.get(name) is None:
                setattr(cls, name, getattr(cls, name) or getattr(Kernel, name))

    def __post_init__(self) -> None:
        for field, value in self._fields():
            if not _is_kernel(value):
                where = f"{type(self).__name__}: {field.name}"
                ard = field.name.startswith("lengthscale")
                object.__setattr__(self, field.name, _checked(where, value, ard=ard))

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

    def parameter(self, name: str, X: Tensor) -> Tensor:
        """The parameter called `name` as a tensor like X: () or, for ARD, (D,)."""
        value = getattr(self, name)
        where = f"{type(self).__name__}: {name}"
        if value is None:
            raise ValueError(f"{where} is None, to be taken from the data; give it a value first")
        if isinstance(value, float):
            # A fill rather than a copy from the host, which would wait on a GPU.
            return torch.full((), value, dtype=X.dtype, device=X.device)
        if value.ndim == 1 and len(value) != X.shape[-1]:
            raise ValueError(f"{where} has {len(value)} values, but X has {X.shape[-1]} features")
        return _tensor(value).to(X)

    @property
    def theta(self) -> Tensor:
        """The logs of all parameters, field after field: (n_theta,).

        float64, or the dtype of the parameters where all of them are tensors; keeps their graph.
        """
        tensors = [_tensor(value).reshape(-1) for _, value in self._parameters()]
        device = next((t.device for t in tensors if t.device.type != "cpu"), None)
        return torch.cat([t.to(device) for t in tensors] or [torch.zeros(0)]).log()

    @property
    def n_theta(self) -> int:
        """The length of ``theta``."""
        return sum(_tensor(value).numel() for _, value in self._parameters())

    def with_theta(self, theta: Tensor) -> Kernel:
        """The same kernel with parameters exp(theta), clamped to exp(±30): (n_theta,) -> Kernel."""
        if theta.shape != (self.n_theta,):
            raise ValueError(
                f"theta must have shape ({self.n_theta},) for {self!r}, got {tuple(theta.shape)}"
            )
        shapes = [_tensor(value).shape for _, value in self._parameters()]
        values = theta.clamp(-LOG_BOUND, LOG_BOUND).exp().split([s.numel() for s in shapes])
        new = iter([value.reshape(shape) for value, shape in zip(values, shapes, strict=True)])
        return self._with_parameters(lambda name, old: next(new))

    def filled(self, lengthscale: Tensor, variance: float) -> Kernel:
        """The same kernel with every ``None`` replaced: lengthscale (D,), variance () -> Kernel.

        The factors of a product after the first get variance 1, the terms of a sum equal parts.
        """

        def fill(name: str, value: Any) -> Any:
            if value is not None:
                return value
            if name.startswith("lengthscale"):
                return lengthscale
            if name.startswith("variance"):
                return variance
            raise ValueError(f"{type(self).__name__}: {name} cannot be taken from the data")

        return self._with_parameters(fill)

    def to_units(self, scale: np.ndarray | Tensor) -> Kernel:
        """The kernel k' with k'(X, Z) = k(X / scale, Z / scale): (D,) -> Kernel.

        A single lengthscale becomes one per feature unless all scales are equal.
        """
        factor = np.asarray(torch.as_tensor(scale).cpu(), dtype=np.float64)
        if factor.ndim != 1 or not len(factor) or not np.all((factor > 0) & np.isfinite(factor)):
            raise ValueError("scale must be a vector of positive, finite numbers")
        constant = bool(np.all(factor == factor[0]))

        def convert(name: str, value: Any) -> Any:
            if value is None or not name.startswith("lengthscale"):
                return value
            if np.ndim(value) == 0 and constant:
                return value * float(factor[0])
            if np.ndim(value) == 1 and len(value) != len(factor):
                raise ValueError(f"scale has {len(factor)} values, but {name} has {len(value)}")
            return value * (_tensor(factor).to(value) if isinstance(value, Tensor) else factor)

        return self._with_parameters(convert)

    def frozen(self) -> Kernel:
        """The same kernel with plain floats and read-only NumPy arrays for parameters."""
        return self._with_parameters(lambda name, value: _plain(value))

    def __add__(self, other: Kernel) -> Kernel:
        if not isinstance(other, Kernel):
            return NotImplemented
        return Sum((*_parts(self, Sum), *_parts(other, Sum)))

    def __mul__(self, other: Kernel) -> Kernel:
        if not isinstance(other, Kernel):
            return NotImplemented
        return Product((*_parts(self, Product), *_parts(other, Product)))

    def __repr__(self) -> str:
        shown = [(f.name, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        arguments = [f"{name}={_short(value)}" for name, value in shown if value is not None]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # arrays come back from pickle and deepcopy writeable

    def _key(self) -> tuple[Any, ...]:
        values = (_plain(getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return (type(self), *(tuple(v) if isinstance(v, np.ndarray) else v for v in values))

    def _fields(self) -> Iterator[tuple[Field, Any]]:
        """The fields that are not fixed, with their values."""
        for field in fields(self):  # type: ignore[arg-type]
            if not field.metadata.get("fixed", False):
                yield field, getattr(self, field.name)

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        """Every parameter and its value, those of inner kernels included; none may be None."""
        for field, value in self._fields():
            if isinstance(value, Kernel):
                yield from value._parameters()
            elif isinstance(value, tuple):
                for part in value:
                    yield from part._parameters()
            elif value is None:
                raise ValueError(f"{type(self).__name__}: {field.name} is not set yet")
            else:
                yield field.name, value

    def _with_parameters(self, new: Callable[[str, Any], Any]) -> Kernel:
        """The same kernel with value -> new(name, value) for every parameter, in field order."""
        changes = {}
        for field, value in self._fields():
            if isinstance(value, Kernel):
                changes[field.name] = value._with_parameters(new)
            elif isinstance(value, tuple):
                changes[field.name] = tuple(part._with_parameters(new) for part in value)
            else:
                changes[field.name] = new(field.name, value)
        return replace(self, **changes)  # type: ignore[type-var]


class Stationary(Kernel):
    """A kernel of the scaled distance: k(x, z) = variance · of_distance(Σ_d (x_d − z_d)² / ℓ_d²).

    Subclasses have the fields ``lengthscale`` and ``variance``.
    """

    @abstractmethod
    def of_distance(self, r2: Tensor) -> Tensor:
        """The correlation at squared scaled distance `r2` > 0, which may be overwritten."""

    @property
    def stationary(self) -> bool:
        return True

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        correlation = self.of_distance(_squared_distance(X, Z, self.parameter("lengthscale", X)))
        variance = self.parameter("variance", X)
        if correlation.requires_grad or variance.requires_grad:
            return correlation * variance
        return correlation.mul_(variance)

    def diag(self, X: Tensor) -> Tensor:
        return self.parameter("variance", X).expand(len(X))


@dataclass(frozen=True)
class RBF(Stationary):
    """Squared exponential: variance · exp(−r²/2), r the distance in lengthscales.

    Parameters
    ----------
    lengthscale : float, array-like of shape (n_features,) or None
        One for all features, one for each (ARD), or from the data.
    variance : float or None
        The prior variance of the latent functions, or from the data.
    """

    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2: Tensor) -> Tensor:
        return r2.mul_(-0.5).exp_()


@dataclass(frozen=True)
class Matern12(Stationary):
    """Exponential: variance · exp(−r); rough, continuous functions. Parameters as in RBF."""

    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2: Tensor) -> Tensor:
        return r2.sqrt_().neg().exp_()


@dataclass(frozen=True)
class Matern32(Stationary):
    """Matérn 3/2: variance · (1 + s) exp(−s), s = √3 r; differentiable once."""

    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2: Tensor) -> Tensor:
        s = r2.mul_(3.0).sqrt_()
        return (1.0 + s).mul_(s.neg().exp_())


@dataclass(frozen=True)
class Matern52(Stationary):
    """Matérn 5/2: variance · (1 + s + s²/3) exp(−s), s = √5 r; differentiable twice."""

    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2: Tensor) -> Tensor:
        s = r2.mul_(5.0).sqrt_()
        return torch.addcmul(1.0 + s, s, s, value=1 / 3).mul_(s.neg().exp_())


@dataclass(frozen=True)
class RationalQuadratic(Stationary):
    """A mixture of RBF lengthscales: variance · (1 + r²/(2α))^−α; α → ∞ is the RBF."""

    lengthscale: Lengths = None
    variance: Positive = None
    alpha: Positive = 1.0

    def of_distance(self, r2: Tensor) -> Tensor:
        alpha = self.parameter("alpha", r2)
        return torch.log1p(r2 / (2.0 * alpha)).mul(-alpha).exp_()


@dataclass(frozen=True)
class Linear(Kernel):
    """Linear functions through the origin: variance · Σ_d x_d z_d / ℓ_d²."""

    lengthscale: Lengths = None
    variance: Positive = None

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        weight = self.parameter("variance", X) / self.parameter("lengthscale", X).square()
        return X @ (Z * weight).T

    def diag(self, X: Tensor) -> Tensor:
        weight = self.parameter("variance", X) / self.parameter("lengthscale", X).square()
        return (X.square() * weight).sum(1)


class _Combination(Kernel):
    """Kernels joined by one operation; the field ``parts`` holds them."""

    parts: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        if not self.parts or not _is_kernel(self.parts):
            raise TypeError(f"{type(self).__name__}: parts must be a tuple of kernels")

    @property
    def stationary(self) -> bool:
        return all(part.stationary for part in self.parts)


@dataclass(frozen=True)
class Sum(_Combination):
    """k₁ + k₂ + …, usually written with ``+``: a sum of independent functions."""

    parts: tuple[Kernel, ...]

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        return reduce(add, (part(X, Z) for part in self.parts))

    def diag(self, X: Tensor) -> Tensor:
        return reduce(add, (part.diag(X) for part in self.parts))

    def filled(self, lengthscale: Tensor, variance: float) -> Kernel:
        share = variance / len(self.parts)
        return Sum(tuple(part.filled(lengthscale, share) for part in self.parts))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


@dataclass(frozen=True)
class Product(_Combination):
    """k₁ · k₂ · …, usually written with ``*``: similar where all the parts say so."""

    parts: tuple[Kernel, ...]

    def __call__(self, X: Tensor, Z: Tensor) -> Tensor:
        return reduce(mul, (part(X, Z) for part in self.parts))

    def diag(self, X: Tensor) -> Tensor:
        return reduce(mul, (part.diag(X) for part in self.parts))

    def filled(self, lengthscale: Tensor, variance: float) -> Kernel:
        first, *others = self.parts
        rest = (part.filled(lengthscale, 1.0) for part in others)
        return Product((first.filled(lengthscale, variance), *rest))

    def __repr__(self) -> str:
        return " * ".join(f"({p!r})" if isinstance(p, Sum) else repr(p) for p in self.parts)


def _squared_distance(X: Tensor, Z: Tensor, lengthscale: Tensor) -> Tensor:
    """Σ_d (x_d − z_d)² / ℓ_d², never below the smallest normal number: (n, D), (m, D) -> (n, m).

    One matrix product. Only Z is divided by ℓ² in it, so that where X needs no gradient the
    backward pass has one more product and not two. The shift keeps the digits of data far from
    the origin; distances do not depend on it, so neither does the gradient. The floor keeps
    gradients of √r² finite: where points coincide they are zero.
    """
    same = X is Z
    shift = Z.detach().mean(0)
    weight = lengthscale.square().reciprocal().expand(X.shape[-1])
    X, Z = X - shift, Z - shift
    r2 = torch.addmm(Z.square() @ weight, X, (Z * weight).T, alpha=-2.0)
    r2.add_((X.square() @ weight).unsqueeze(1))
    if same:
        r2.fill_diagonal_(0.0)
    return r2.clamp_min_(torch.finfo(r2.dtype).tiny)


def _checked(where: str, value: Any, *, ard: bool) -> float | np.ndarray | Tensor | None:
    """A parameter as it is kept: None, a float, a read-only float64 vector or a tensor."""
    if value is None:
        return None
    if isinstance(value, Tensor) and value.is_floating_point():
        # Looking into a tensor on a GPU would wait for it; those in a graph are ours.
        known = value.requires_grad or value.device.type != "cpu"
        good = known or bool(((value > 0) & value.isfinite()).all())
    else:
        try:
            value = np.array(value, dtype=np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"{where} must be a number, got {value!r}") from None
        value.flags.writeable = False
        good = bool(np.all((value > 0) & np.isfinite(value)))
    if value.ndim > ard or 0 in value.shape:
        expected = "a number or a vector with one per feature" if ard else "one number"
        raise ValueError(f"{where} must be {expected}, got shape {tuple(value.shape)}")
    if not good:
        raise ValueError(f"{where} must be positive and finite, got {_short(value)}")
    return float(value) if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _is_kernel(value: Any) -> bool:
    return isinstance(value, Kernel) or (
        isinstance(value, tuple) and all(isinstance(part, Kernel) for part in value)
    )


def _parts(kernel: Kernel, kind: type[_Combination]) -> tuple[Kernel, ...]:
    return kernel.parts if isinstance(kernel, kind) else (kernel,)


def _tensor(value: float | np.ndarray | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _plain(value: Any) -> Any:
    """A tensor as a float or a float64 array; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    array = value.detach().cpu().double().numpy()
    return array if array.ndim else float(array)


def _short(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, float | np.ndarray):
        return np.array2string(
            np.asarray(value),
            precision=4,
            threshold=6,
            edgeitems=2,
            separator=", ",
            formatter={"float_kind": lambda x: f"{x:.4g}"},
        )
    return repr(value)
