"""The clock of a peer's training run: it runs during steps alone, and says when to look."""

from __future__ import annotations

import time
from types import TracebackType

# Shares of the budget after which the test set is looked at: often at first, then evenly.
LOOKS = (1 / 96, 1 / 48, 1 / 24, *(k / 16 for k in range(1, 17)))


class Clock:
    """Seconds spent inside `with clock:`, out of a budget."""

    def __init__(self, budget: float) -> None:
        self.budget, self.seconds, self._looks = budget, 0.0, 0

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
        passed = sum(self.seconds >= self.budget * share for share in LOOKS)
        due, self._looks = passed > self._looks, max(passed, self._looks)
        return due
