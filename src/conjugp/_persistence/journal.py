"""What a fit or a sampler tells of its way, so that another run can go on from there.

A fit is the same sequence of stages whenever it is run on the same data with the same seed. The
mathematics knows this base alone, which keeps nothing; `checkpoint` has the one with a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Journal:
    """The stages of a fit, none of which is kept."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.seconds = 0.0  # that earlier runs have taken

    def follow(self, generator: torch.Generator, history: list[Any]) -> None:
        """The random numbers and reports of the fit, which belong to its state."""

    def stage(self, name: str, work: Callable[[], T]) -> T:
        """The result of work(), or what it was the last time.

        Stages may contain others of other names; when one has ended, those in it are forgotten.
        """
        return work()

    def due(self) -> bool:
        """Whether it is time to keep where a loop stands."""
        return False

    def keep(self, loop: dict[str, Any]) -> None:
        """Keep where the running loop stands, between two of its steps."""

    def left_off(self) -> dict[str, Any] | None:
        """Where the loop that starts now stood when an earlier run ended; None: at its start."""
        return None

    def close(self) -> None:
        """Keep what has not been kept yet."""
