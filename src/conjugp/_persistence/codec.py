"""Objects as plain data beside arrays: what model files and checkpoints hold.

Numbers, text, lists and dictionaries become JSON, arrays and tensors go by name into a dictionary,
and dataclasses and named tuples are written field by field. Only classes that the reader was given
are ever built: a file names classes, it cannot bring any.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_DEPTH = 50  # of objects within objects; no kernel that anyone has written comes near
_ARRAY_KINDS = "biuf"
_LAST_CHARACTER = 0x10FFFF

T = TypeVar("T", bound=type)
IN_CHECKPOINTS: list[type] = []  # of ours, as far as they have been defined


def in_checkpoints(cls: T) -> T:
    """Let objects of a class, a dataclass or a named tuple, stand in checkpoints."""
    IN_CHECKPOINTS.append(cls)
    return cls


def name_of(cls: type) -> str:
    """What a class is called in a file: our own by their names, others with their module."""
    own = cls.__module__.split(".")[0] == "conjugp"
    return cls.__qualname__ if own else f"{cls.__module__}.{cls.__qualname__}"


class Encoder:
    """Turns values into plain data; what is large collects in `arrays`.

    With `devices` tensors come back where they were, otherwise on the CPU.
    """

    def __init__(self, devices: bool = False) -> None:
        self.devices = devices
        self.arrays: dict[str, np.ndarray] = {}
        self._tensors: dict[tuple[Any, ...], str] = {}

    def __call__(self, value: Any) -> Any:
        """JSON-able data for a value; TypeError if it holds what has no such form."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, list):
            return [self(x) for x in value]
        if isinstance(value, dict):
            if all(type(key) is str for key in value):
                return {"map": {key: self(x) for key, x in value.items()}}
            return {"dict": [[self(key), self(x)] for key, x in value.items()]}
        fields = fields_of(type(value))
        if fields is not None:
            held = {name: self(getattr(value, name)) for name in fields}
            return {"object": name_of(type(value)), "fields": held}
        if isinstance(value, tuple):
            return {"tuple": [self(x) for x in value]}
        raise TypeError(f"{value!r} of {type(value)} cannot be written to a file")

    def _tensor(self, x: Tensor) -> dict[str, Any]:
        # Tensors that are one stay one, and the order in memory stays: products of the same numbers
        # in another order may differ in the last bit.
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x.device)
        if key not in self._tensors or not x.numel():
            plain = x.detach().cpu()
            turned = x.ndim >= 2 and not x.is_contiguous() and x.mT.is_contiguous()
            plain = plain.mT if turned else plain.contiguous()
            self._tensors[key] = self._put(plain.numpy()) + ("T" if turned else "")
        found: dict[str, Any] = {"tensor": self._tensors[key]}
        if self.devices and x.device.type != "cpu":
            found["device"] = str(x.device)
        return found

    def _array(self, x: np.ndarray) -> dict[str, Any]:
        if x.dtype.kind == "U":
            width = max(1, x.dtype.itemsize // 4)
            letters = np.ascontiguousarray(x, dtype=f"=U{width}").view(np.uint32)
            return {"text": self._put(letters.reshape(*x.shape, width))}
        if x.dtype == object and x.ndim == 1:
            return {"objects": [_scalar(item) for item in x]}
        if x.dtype.kind not in _ARRAY_KINDS or x.dtype.itemsize > 8:
            raise TypeError(f"arrays of {x.dtype} cannot be written to a file")
        return {"array": self._put(x.astype(x.dtype.newbyteorder("="), copy=False))}

    def _put(self, x: np.ndarray) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = x
        return name


class Decoder:
    """Turns plain data back into values, of the classes given and no others.

    Raises ValueError or TypeError for anything an `Encoder` would not have written. A device takes
    the place of the one, other than the CPU, that a tensor was on.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        classes: Iterable[type],
        custom: Iterable[type] = (),
        devices: bool | torch.device = False,
    ) -> None:
        self.arrays, self.devices = arrays, devices
        self.unused = set(arrays)
        self._classes = {name_of(cls): cls for cls in classes}
        self._custom = list(custom)
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, plain: Any, depth: int = 0) -> Any:
        """The value that was written."""
        if depth > _DEPTH:
            raise ValueError("objects are nested too deeply")
        if plain is None or isinstance(plain, bool | int | str):
            return plain
        if isinstance(plain, float):
            if not math.isfinite(plain):
                raise ValueError("a number is not finite")
            return plain
        if isinstance(plain, list):
            return [self(x, depth + 1) for x in plain]
        return self._tagged(plain, depth + 1)

    def _tagged(self, plain: Any, depth: int) -> Any:
        match plain:
            case {"float": "nan" | "inf" | "-inf" as text, **rest} if not rest:
                return float(text)
            case {"tuple": list(items), **rest} if not rest:
                return tuple(self(x, depth) for x in items)
            case {"map": dict(items), **rest} if not rest:
                return {key: self(x, depth) for key, x in items.items()}
            case {"dict": list(pairs), **rest} if not rest:
                return {self(key, depth): self(x, depth) for key, x in pairs}
            case {"array": str(name), **rest} if not rest:
                return self._take(name)
            case {"text": str(name), **rest} if not rest:
                return _text(self._take(name))
            case {"objects": list(items), **rest} if not rest:
                out = np.empty(len(items), dtype=object)
                out[:] = [_scalar(x) for x in items]
                return out
            case {"tensor": str(name), "device": str(device), **rest} if self.devices and not rest:
                return self._tensor(name).to(device if self.devices is True else self.devices)
            case {"tensor": str(name), **rest} if not rest:
                return self._tensor(name)
            case {"object": str(name), "fields": dict(held), **rest} if not rest:
                return self._object(name, {key: self(x, depth) for key, x in held.items()})
        raise ValueError(f"unknown content: {str(plain)[:80]}")

    def _take(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise ValueError(f"the array {name!r} is missing")
        self.unused.discard(name)
        return self.arrays[name]

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            bare = name.removesuffix("T")
            x = torch.from_numpy(self._take(bare))
            self._tensors[name] = x.mT if bare != name else x
        return self._tensors[name]

    def _object(self, name: str, held: dict[str, Any]) -> Any:
        # A class of one's own may have moved to another module since.
        own = [c for c in self._custom if name.endswith(f".{c.__qualname__}")]
        own = [c for c in own if name_of(c) == name] or own
        cls = self._classes.get(name) or (own[0] if own else None)
        if cls is None:
            raise UnknownClassError(name)
        fields = fields_of(cls)
        if fields is None or set(held) != set(fields):
            raise ValueError(f"{name} has the fields {fields}, not {sorted(held)}")
        return cls(**held)


class UnknownClassError(ValueError):
    """A class that a file needs and the reader was not given."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the class {name} is not known")
        self.name = name


def fields_of(cls: type) -> list[str] | None:
    """Arguments that build an object from its own values: of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls) if field.init]
    return list(getattr(cls, "_fields")) if hasattr(cls, "_fields") else None  # noqa: B009


def classes_of(value: Any) -> set[type]:
    """The classes of an object and of all objects in its fields."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return set().union(*(classes_of(x) for x in value))
    fields = fields_of(type(value))
    if fields is None:
        return set()
    return {type(value)}.union(*(classes_of(getattr(value, name)) for name in fields))


def _text(letters: np.ndarray) -> np.ndarray:
    """Text from its letters' numbers (..., width)."""
    if letters.dtype != np.uint32 or letters.ndim < 1 or letters.shape[-1] < 1:
        raise ValueError("text is not stored as letters")
    if letters.size and int(letters.max()) > _LAST_CHARACTER:
        raise ValueError("text holds what is no letter")
    return np.ascontiguousarray(letters).view(f"=U{letters.shape[-1]}")[..., 0]


def _scalar(x: Any) -> bool | int | float | str:
    """A label out of an array of objects."""
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, bool | int | str) or (isinstance(x, float) and math.isfinite(x)):
        return x
    raise TypeError(f"{x!r} in an array of objects cannot be written to a file")
