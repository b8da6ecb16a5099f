"""The stages of a fit and where its loops stand, as the loops see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Journal:
    """Keeps nothing and costs nothing; `_persistence.journal` has the one that keeps a file."""

    seed = 0
    seconds = 0.0  # that earlier runs have taken

    def follow(self, generator: torch.Generator, history: list[Any]) -> None:
        """The random numbers and reports of the fit, which belong to its state."""

    def stage(self, name: str, work: Callable[[], T]) -> T:
        """The result of work(), or what it was the last time."""
        return work()

    def due(self) -> bool:
        """Whether it is time to keep where a loop stands."""
        return False

    def keep(self, loop: dict[str, Any]) -> None:
        """Write where the running loop stands, between two of its steps."""

    def left_off(self) -> dict[str, Any] | None:
        """Where the loop that starts now stood when an earlier run ended; None: at its start."""
        return None

    def close(self) -> None:
        """Write what has not been written yet."""
