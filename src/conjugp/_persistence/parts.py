"""Values out of a file that may come from a stranger: each must be what it is taken for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Parts:
    """Named parts; none may be left. What is not as it should be is a ValueError."""

    def __init__(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise ValueError("a part is not what it should be")
        self.found, self.left = found, set(found)

    def any(self, name: str) -> Any:
        """The part, whatever it is."""
        if name not in self.found:
            raise ValueError(f"{name} is missing")
        self.left.discard(name)
        return self.found[name]

    def optional(self, name: str) -> Any:
        """The part; None where an older file has none."""
        return self.any(name) if name in self.found else None

    def end(self) -> None:
        """Raise if there is more than was asked for."""
        if self.left:
            raise ValueError(f"unknown parts: {sorted(self.left)[:3]}")

    def real(self, name: str) -> float:
        """A number, finite or not."""
        x = self.any(name)
        if isinstance(x, bool) or not isinstance(x, int | float):
            raise ValueError(f"{name} must be a number; got {x!r}")
        return float(x)

    def number(self, name: str, low: float = -math.inf) -> float:
        """A finite number of at least `low`."""
        x = self.real(name)
        if not (math.isfinite(x) and x >= low):
            raise ValueError(f"{name} is out of range: {self.found[name]!r}")
        return self.found[name]

    def share(self, name: str) -> float:
        """A number in (0, 1]; 1 where an older file has none."""
        if name not in self.found:
            return 1.0
        if not 0.0 < self.real(name) <= 1.0:
            raise ValueError(f"{name} is out of range: {self.found[name]!r}")
        return self.found[name]

    def whole(self, name: str, least: int) -> int:
        """A whole number of at least `least`."""
        x = self.any(name)
        if isinstance(x, bool) or not isinstance(x, int) or not least <= x < 2**63:
            raise ValueError(f"{name} must be a whole number of at least {least}; got {x!r}")
        return x

    def flag(self, name: str) -> bool:
        return self.object(name, bool)

    def text(self, name: str) -> str:
        return self.object(name, str)

    def object(self, name: str, cls: type) -> Any:
        """An object of that class."""
        if not isinstance(self.any(name), cls):
            raise ValueError(f"{name} must be a {cls.__name__}")
        return self.found[name]

    def reports(self, name: str) -> list[dict[str, float | str]]:
        """A history: reports of numbers and words."""
        found = self.object(name, list)
        for report in found:
            plain = isinstance(report, dict) and all(
                isinstance(x, str | int | float) for x in report.values()
            )
            if not plain:
                raise ValueError(f"a report in {name} is not one of numbers")
        return found

    def array(
        self, name: str, dtype: type, *shape: int | None, finite: bool = True
    ) -> NDArray[Any]:
        """An array of that type and shape, None meaning any."""
        x = self.any(name)
        if not isinstance(x, np.ndarray) or x.dtype != dtype:
            raise ValueError(f"{name} must be an array of {np.dtype(dtype)}")
        return _checked(name, x, shape, not finite or bool(np.isfinite(x).all()))

    def tensor(self, name: str, dtype: torch.dtype | None, *shape: int | None) -> Tensor:
        """A finite tensor of that type and shape, None meaning any."""
        x = self.any(name)
        if not isinstance(x, Tensor) or (dtype is not None and x.dtype != dtype):
            raise ValueError(f"{name} must be a tensor of {dtype}")
        return _checked(name, x, shape, bool(x.isfinite().all()))


def _checked(name: str, x: Any, shape: tuple[int | None, ...], finite: bool) -> Any:
    """Numbers that have this shape, and are finite."""
    if len(x.shape) != len(shape) or any(
        e not in (None, n) for n, e in zip(x.shape, shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {tuple(x.shape)}, not {shape}")
    if not finite:
        raise ValueError(f"{name} holds numbers that are not finite")
    return x


def random_state_parts(value: np.random.RandomState) -> dict[str, Any]:
    """The state of the usual kind of generator, MT19937, with which scikit-learn works."""
    state: Any = value.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise TypeError(f"random_state: a RandomState of {state['bit_generator']} cannot be saved")
    return {**state["state"], "has_gauss": state["has_gauss"], "gauss": state["gauss"]}


def read_random_state(take: Parts) -> np.random.RandomState:
    """The generator in that state."""
    out = np.random.RandomState()
    state = {"key": take.array("key", np.uint32, 624), "pos": take.whole("pos", 0)}
    has_gauss, gauss = take.whole("has_gauss", 0), take.number("gauss")
    take.end()
    # NumPy does not look: beyond its end it would read any memory.
    if state["pos"] > 624 or has_gauss > 1:
        raise ValueError("random_state is out of range")
    out.set_state(
        {"bit_generator": "MT19937", "state": state, "has_gauss": has_gauss, "gauss": gauss}
    )
    return out
