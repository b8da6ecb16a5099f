"""Immutable objects with positive parameters that can be read, filled in, learned and rescaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Lengths", "Parametric", "Positive"]

Positive: TypeAlias = float | Tensor | None
Lengths: TypeAlias = float | Sequence[float] | np.ndarray | Tensor | None

# Learned parameters stay within exp(±30), about 1e-13 to 1e13: their squares fit in float32.
LOG_BOUND = 30.0


class Parametric:
    """The base of frozen dataclasses whose fields are positive parameters.

    A field holds a number, ``None`` for "from the data", or, where its name starts with
    ``lengthscale``, one number per input feature (ARD). It may hold another such object, or a
    tuple of them. Fields declared with ``metadata={"fixed": True}`` are left alone.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `dataclass` keeps what stands in the class itself. Its own repr would print whole ARD
        # arrays, and its own == would fail on them.
        for name in ("__repr__", "__eq__", "__hash__"):
            if cls.__dict__.get(name) is None:
                setattr(cls, name, getattr(cls, name) or getattr(Parametric, name))

    def __post_init__(self) -> None:
        for field, value in self._fields():
            if not _is_parametric(value):
                where = f"{type(self).__name__}: {field.name}"
                ard = field.name.startswith("lengthscale")
                object.__setattr__(self, field.name, _checked(where, value, ard=ard))

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

    def with_theta(self, theta: Tensor) -> Self:
        """A copy with parameters exp(theta), theta (n_theta,) clamped to ±30; keeps its graph."""
        if theta.shape != (self.n_theta,):
            raise ValueError(
                f"theta must have shape ({self.n_theta},) for {self!r}, got {tuple(theta.shape)}"
            )
        shapes = [_tensor(value).shape for _, value in self._parameters()]
        values = theta.clamp(-LOG_BOUND, LOG_BOUND).exp().split([s.numel() for s in shapes])
        new = iter([value.reshape(shape) for value, shape in zip(values, shapes, strict=True)])
        return self._with_parameters(lambda name, old: next(new))

    def prior_slope(self, moved: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the prior's −log at theta moved (..., n_theta) from where it is centred.

        A parameter of one number is standard normal. One of several, moved by d, is their common
        part and what each has besides, all of them standard normal, so the prior of d has the
        covariance I + 11ᵀ: together they move as easily as one. Those of which the data say
        nothing, their `gradient` is 0, stay where they are and the others do without them.
        """
        parts, values = [], [_tensor(value) for _, value in self._parameters()]
        sizes = [value.numel() for value in values]
        for value, d, g in zip(
            values, moved.split(sizes, -1), gradient.split(sizes, -1), strict=True
        ):
            if value.dim():
                told = (g != 0).to(d)
                common = (told * d).sum(-1, keepdim=True) / (1 + told.sum(-1, keepdim=True))
                d = told * (d - common)
            parts.append(d)
        return torch.cat(parts, -1)

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """A copy with every ``None`` replaced, by lengthscale (D,) or variance ()."""

        def fill(name: str, value: Any) -> Any:
            if value is not None:
                return value
            if name.startswith("lengthscale"):
                return lengthscale
            if name.startswith("variance"):
                return variance
            raise ValueError(f"{type(self).__name__}: {name} cannot be taken from the data")

        return self._with_parameters(fill)

    def to_units(self, scale: np.ndarray | Tensor) -> Self:
        """A copy for inputs multiplied by scale (D,): k'(X·scale, Z·scale) = k(X, Z).

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

    def frozen(self) -> Self:
        """A copy with plain floats and read-only NumPy arrays for parameters."""
        return self._with_parameters(lambda name, value: _plain(value))

    def __repr__(self) -> str:
        shown = [(f.name, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        arguments = [f"{name}={_short(value)}" for name, value in shown if value is not None]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parametric) and self._key() == other._key()

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
        """Every parameter and its value, those of inner objects included; none may be None."""
        for field, value in self._fields():
            if isinstance(value, Parametric):
                yield from value._parameters()
            elif isinstance(value, tuple):
                for part in value:
                    yield from part._parameters()
            elif value is None:
                raise ValueError(f"{type(self).__name__}: {field.name} is not set yet")
            else:
                yield field.name, value

    def _with_parameters(self, new: Callable[[str, Any], Any]) -> Self:
        """A copy with new(name, value) for every parameter, in the order of ``theta``."""
        changes = {}
        for field, value in self._fields():
            if isinstance(value, Parametric):
                changes[field.name] = value._with_parameters(new)
            elif isinstance(value, tuple):
                changes[field.name] = tuple(part._with_parameters(new) for part in value)
            else:
                changes[field.name] = new(field.name, value)
        return replace(self, **changes)  # type: ignore[type-var]


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


def _is_parametric(value: Any) -> bool:
    return isinstance(value, Parametric) or (
        isinstance(value, tuple)
        and len(value) > 0
        and all(isinstance(part, Parametric) for part in value)
    )


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
