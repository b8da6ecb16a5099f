"""Immutable objects with parameters that can be read, filled in, learned and rescaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

Positive: TypeAlias = float | Tensor | None
Lengths: TypeAlias = float | Sequence[float] | np.ndarray | Tensor | None

# Learned parameters stay within exp(±30), about 1e-13 to 1e13: their squares fit in float32.
LOG_BOUND = 30.0


class Transform(NamedTuple):
    """From the values of a parameter to numbers that may be anything, and back."""

    free: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]


POSITIVE = Transform(torch.log, lambda free: free.clamp(-LOG_BOUND, LOG_BOUND).exp())
FREE = Transform(lambda value: value, lambda free: free)  # such as the weights of a network


class Leaf(NamedTuple):
    """One thing that can be learned."""

    name: str  # of its field
    value: float | np.ndarray | Tensor | None  # None: from the data
    transform: Transform

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its value."""
        return np.shape(self.value)  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """How many numbers of theta are its."""
        return math.prod(self.shape)

    @property
    def together(self) -> bool:
        """Whether its numbers have a common part in the prior."""
        return self.transform is POSITIVE and len(self.shape) > 0


class Parametric:
    """The base of frozen dataclasses whose fields are parameters, the leaves of what is learned.

    A field holds a positive number, ``None`` for "from the data", or, where its name starts with
    ``lengthscale``, one number per input feature (ARD). It may hold another such object, or a
    tuple of them. Fields declared with ``metadata={"fixed": True}`` are left alone; those with
    ``metadata={"transform": FREE}`` hold numbers of any sign and arrays of any shape.
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
            if _parts(value) is None:
                where = f"{type(self).__name__}: {field.name}"
                most = 1 if field.name.startswith("lengthscale") else 0
                object.__setattr__(
                    self, field.name, _checked(where, value, _transform_of(field), most)
                )

    def parameter(self, name: str, X: Tensor) -> Tensor:
        """The parameter called `name` as a tensor like X: () or, for ARD, (D,)."""
        value = getattr(self, name)
        where = f"{type(self).__name__}: {name}"
        if value is None:
            raise ValueError(f"{where} is None, to be taken from the data; give it a value first")
        if isinstance(value, float):
            # A fill rather than a copy from the host, which would wait on a GPU.
            return torch.full((), value, dtype=X.dtype, device=X.device)
        ard = name.startswith("lengthscale") and value.ndim == 1
        if ard and len(value) != X.shape[-1]:
            raise ValueError(f"{where} has {len(value)} values, but X has {X.shape[-1]} features")
        return _tensor(value).to(X)

    @property
    def theta(self) -> Tensor:
        """The leaves one after the other, positive numbers as their logs: (n_theta,).

        float64, or the dtype of the parameters where all of them are tensors; keeps their graph.
        """
        leaves = list(self._leaves())
        tensors = [_tensor(leaf.value).reshape(-1) for leaf in leaves]  # type: ignore[arg-type]
        device = next((t.device for t in tensors if t.device.type != "cpu"), None)
        own, found = iter(tensors), list[Tensor]()
        for transform, run in groupby(leaves, lambda leaf: leaf.transform):
            found.append(transform.free(torch.cat([next(own).to(device) for _ in run])))
        return torch.cat(found) if found else torch.zeros(0)

    @property
    def n_theta(self) -> int:
        """The length of ``theta``."""
        return sum(leaf.size for leaf in self._leaves())

    def with_theta(self, theta: Tensor) -> Self:
        """A copy with the leaves that theta (n_theta,) stands for; keeps its graph.

        Logs are clamped to ±30.
        """
        leaves = list(self._leaves())
        n = sum(leaf.size for leaf in leaves)
        if theta.shape != (n,):
            raise ValueError(f"theta must have shape ({n},) for {self!r}, got {tuple(theta.shape)}")
        values, at = list[Tensor](), 0
        for transform, group in groupby(leaves, lambda leaf: leaf.transform):
            run = list(group)
            sizes = [leaf.size for leaf in run]
            parts = transform.value(theta[at : at + sum(sizes)]).split(sizes)
            values += [part.reshape(leaf.shape) for part, leaf in zip(parts, run, strict=True)]
            at += sum(sizes)
        new = iter(values)
        return self._with_leaves(lambda leaf: next(new))

    def prior_slope(self, moved: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the prior's −log at theta moved (..., n_theta) from where it is centred.

        A parameter of one number is standard normal. One of several, moved by d, is their common
        part and what each has besides, all of them standard normal, so the prior of d has the
        covariance I + 11ᵀ: together they move as easily as one. Those of which the data say
        nothing, their `gradient` is 0, stay where they are and the others do without them.
        """
        parts, leaves = [], list(self._leaves())
        sizes = [leaf.size for leaf in leaves]
        for leaf, d, g in zip(
            leaves, moved.split(sizes, -1), gradient.split(sizes, -1), strict=True
        ):
            if leaf.together:
                told = (g != 0).to(d)
                common = (told * d).sum(-1, keepdim=True) / (1 + told.sum(-1, keepdim=True))
                d = told * (d - common)
            parts.append(d)
        return torch.cat(parts, -1)

    def filled(self, lengthscale: Tensor, variance: float) -> Self:
        """A copy with every ``None`` replaced, by lengthscale (D,) or variance ()."""

        def fill(leaf: Leaf) -> Any:
            if leaf.value is not None:
                return leaf.value
            if leaf.name.startswith("lengthscale"):
                return lengthscale
            if leaf.name.startswith("variance"):
                return variance
            raise ValueError(f"{type(self).__name__}: {leaf.name} cannot be taken from the data")

        return self._with_leaves(fill, lambda part: part.filled(lengthscale, variance))

    def to_units(self, scale: np.ndarray | Tensor) -> Self:
        """A copy for inputs multiplied by scale (D,): k'(X·scale, Z·scale) = k(X, Z).

        A single lengthscale becomes one per feature unless all scales are equal.
        """
        factor = np.asarray(torch.as_tensor(scale).cpu(), dtype=np.float64)
        if factor.ndim != 1 or not len(factor) or not np.all((factor > 0) & np.isfinite(factor)):
            raise ValueError("scale must be a vector of positive, finite numbers")
        constant = bool(np.all(factor == factor[0]))

        def convert(leaf: Leaf) -> Any:
            value: Any = leaf.value
            if value is None or not leaf.name.startswith("lengthscale"):
                return value
            if np.ndim(value) == 0 and constant:
                return value * float(factor[0])
            if np.ndim(value) == 1 and len(value) != len(factor):
                raise ValueError(
                    f"scale has {len(factor)} values, but {leaf.name} has {len(value)}"
                )
            return value * (_tensor(factor).to(value) if isinstance(value, Tensor) else factor)

        # Each part in its own way: some see other units than those of X.
        return self._with_leaves(convert, lambda part: part.to_units(scale))

    def shared(self, groups: Sequence[int]) -> Tensor | None:
        """Where each number of theta counts if features of one group (D,) share lengthscales.

        (n_theta,), the position of the first that it is one with; None where all stand alone.
        """
        first, owners = dict[Any, int](), self._owners(groups)
        found = [first.setdefault(owner, place) for place, owner in enumerate(owners)]
        return torch.tensor(found) if len(first) < len(found) else None

    def _owners(self, groups: Sequence[int]) -> list[Any]:
        """For each number of theta what it belongs to: a lengthscale of a group, or itself."""
        owners: list[Any] = []
        for field, value in self._fields():
            parts = _parts(value)
            if parts is not None:
                for i, part in enumerate(parts):
                    owners += [(field.name, i, owner) for owner in part._owners(groups)]
                continue
            leaf = Leaf(field.name, value, _transform_of(field))
            ard = field.name.startswith("lengthscale") and leaf.shape == (len(groups),)
            owners += [(field.name, g) for g in (groups if ard else range(leaf.size))]
        return owners

    def frozen(self) -> Self:
        """A copy with plain floats and read-only NumPy arrays for parameters."""
        return self._with_leaves(lambda leaf: _plain(leaf.value))

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
        plain = ((v.shape, *v.flat) if isinstance(v, np.ndarray) else v for v in values)
        return (type(self), *plain)

    def _fields(self) -> Iterator[tuple[Field, Any]]:
        """The fields that are not fixed, with their values."""
        for field in fields(self):  # type: ignore[arg-type]
            if not field.metadata.get("fixed", False):
                yield field, getattr(self, field.name)

    def _leaves(self) -> Iterator[Leaf]:
        """Everything that is learned, that of inner objects included, in the order of theta.

        None may be None.
        """
        for field, value in self._fields():
            parts = _parts(value)
            if parts is not None:
                for part in parts:
                    yield from part._leaves()
            elif value is None:
                raise ValueError(f"{type(self).__name__}: {field.name} is not set yet")
            else:
                yield Leaf(field.name, value, _transform_of(field))

    def _with_leaves(
        self,
        new: Callable[[Leaf], Any],
        of_part: Callable[[Parametric], Parametric] | None = None,
    ) -> Self:
        """A copy with new(leaf) for the value of every leaf; inner objects by of_part, if given."""
        changes, of_part = {}, of_part or (lambda part: part._with_leaves(new))
        for field, value in self._fields():
            parts = _parts(value)
            if parts is not None:
                new_parts = tuple(map(of_part, parts))
                changes[field.name] = new_parts if isinstance(value, tuple) else new_parts[0]
            else:
                changes[field.name] = new(Leaf(field.name, value, _transform_of(field)))
        return replace(self, **changes)  # type: ignore[type-var]


def _transform_of(field: Field) -> Transform:
    return field.metadata.get("transform", POSITIVE)


def _checked(
    where: str, value: Any, transform: Transform, most: int
) -> float | np.ndarray | Tensor | None:
    """A parameter as it is kept: None, a float, a read-only float64 array or a tensor.

    `most` are the axes that a positive one may have.
    """
    positive = transform is POSITIVE
    if value is None:
        return None
    if isinstance(value, Tensor) and value.is_floating_point():
        # Looking into a tensor on a GPU would wait for it; those in a graph are ours.
        known = value.requires_grad or value.device.type != "cpu"
        good = known or bool((((value > 0) | (not positive)) & value.isfinite()).all())
    else:
        try:
            value = np.array(value, dtype=np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"{where} must be a number, got {value!r}") from None
        value.flags.writeable = False
        good = bool(np.all(((value > 0) | (not positive)) & np.isfinite(value)))
    if (positive and value.ndim > most) or 0 in value.shape:
        expected = "a number or a vector with one per feature" if most else "one number"
        raise ValueError(f"{where} must be {expected}, got shape {tuple(value.shape)}")
    if not good:
        sign = "positive and " if positive else ""
        raise ValueError(f"{where} must be {sign}finite, got {_short(value)}")
    return float(value) if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _parts(value: Any) -> tuple[Parametric, ...] | None:
    """The inner objects that a field holds; None where it is a leaf."""
    parts = value if isinstance(value, tuple) else (value,)
    return parts if parts and all(isinstance(part, Parametric) for part in parts) else None


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
