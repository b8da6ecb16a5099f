"""What the loops of a fit share: what they read and move, whom they tell, where they left off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from conjugp._inference.moving import Moving
from conjugp._inference.settings import Progress
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Dataset


@dataclass(frozen=True)
class Loop:
    """A fit that is under way."""

    moving: Moving
    data: Dataset
    generator: torch.Generator
    stage: str = "fit"
    on_progress: Callable[[Progress], None] | None = None
    journal: Journal = field(default_factory=Journal)

    def report(self, epoch: float, n_epochs: float, value: float) -> None:
        """Tell who listens about an epoch or a round."""
        if self.on_progress is None:
            return
        cfg = self.moving.settings
        # Fitted with less variance, what rises is another bound, less a constant (Q9).
        measure = "ELBO" if cfg.kept == 1.0 else "relaxed ELBO"
        measure = "log evidence" if cfg.inference == "ep" else measure
        self.on_progress(Progress(self.stage, epoch, n_epochs, value, measure))

    def keep(self, **own: Any) -> None:
        """Write where the fit stands: what every loop has, and what this one has."""
        generator = self.generator.get_state()
        self.journal.keep({"moving": self.moving.checkpoint(), "generator": generator, **own})

    def left_off(self) -> dict[str, Any] | None:
        """Go back to where an earlier run stood, if there was one; what its loop has kept."""
        loop = self.journal.left_off()
        if loop is not None:
            self.moving.restore(loop["moving"])
            self.generator.set_state(loop["generator"])
        return loop
