"""The clock of a peer's training run, and the size of its natural-gradient steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

# Shares of the budget after which the test set is looked at: often at first, then evenly.
LOOKS = (1 / 30, 1 / 10, 1 / 4, 1 / 2, 2 / 3, 5 / 6, 1.0)

TENFOLD = 20  # natural-gradient steps in which their size grows tenfold
SAVED = 20  # steps between two copies of the parameters
LEAST_STEP = 1e-6


class Warmup:
    """Natural-gradient steps that grow, and become a tenth as long after one that failed."""

    def __init__(self, first: float, most: float) -> None:
        self.first, self.most, self.t = first, most, 0

    @property
    def size(self) -> float:
        """Of the next step."""
        return min(self.most, self.first * 10.0 ** (self.t / TENFOLD))

    def failed(self) -> bool:
        """Shorter steps from here on; False if they would be too short to try."""
        self.most = 0.1 * self.size
        return self.most >= LEAST_STEP


class Clock:
    """Seconds spent inside `with clock:`, out of a budget."""

    def __init__(self, budget: float, looks: Sequence[float] = LOOKS) -> None:
        self.budget, self.looks = budget, looks
        self.seconds, self._taken = 0.0, 0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.seconds += time.perf_counter() - self._began

    @property
    def over(self) -> bool:
        """Whether the budget is spent."""
        return self.seconds >= self.budget

    def look(self) -> bool:
        """Whether another look at the test set is due; if so it counts as taken."""
        passed = sum(self.seconds >= self.budget * share for share in self.looks)
        due, self._taken = passed > self._taken, passed
        return due
