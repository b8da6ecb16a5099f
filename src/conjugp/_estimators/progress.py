"""The progress bar of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

from conjugp._inference.settings import Progress

_TITLES = {"reading": "reading rows", "kernel": "learning the kernel", "search": "trying kernels"}
_UNITS = {"reading": "batch", "search": "kernel"}


class ProgressBar:
    """One bar per stage with epoch, ELBO and seconds left; also calls the user's callback."""

    def __init__(self, callback: Callable[[Progress], Any] | None, verbose: int) -> None:
        self.callback, self.verbose = callback, verbose
        self._bar: Any = None
        self._stage = ""

    def __call__(self, p: Progress) -> None:
        if self.callback is not None:
            self.callback(p)
        if not self.verbose:
            return
        if p.stage != self._stage:
            self.close()
            self._stage = p.stage
            total = round(p.n_epochs, 2) or None
            title, unit = _TITLES.get(p.stage, p.stage), _UNITS.get(p.stage, "epoch")
            self._bar = tqdm(total=total, desc=title, unit=unit)
        # The last round of steps may go a little further than was planned.
        end = self._bar.total or p.epoch
        self._bar.update(min(p.epoch, end) - self._bar.n if p.n_epochs else 1)
        self._bar.set_postfix_str(f"{p.measure} {p.value:.6g}")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the bar that is open."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class ChainBars:
    """One bar per chain of a sampler, with sweeps and seconds left."""

    def __init__(self, n_chains: int, n_sweeps: int, verbose: int) -> None:
        self._bars = [
            tqdm(total=n_sweeps, desc=f"chain {i + 1}", unit="sweep", position=i)
            for i in range(n_chains if verbose else 0)
        ]

    def __call__(self, sweeps: int) -> None:
        for bar in self._bars:
            bar.update(sweeps - bar.n)

    def close(self) -> None:
        """End all bars."""
        for bar in self._bars:
            bar.close()
