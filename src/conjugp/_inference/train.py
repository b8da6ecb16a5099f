"""The way into a variational fit or one by expectation propagation: rows in, a state out."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conjugp._gp.state import State
from conjugp._inference.ep_training import EPTrainer
from conjugp._inference.training import Progress, Result, Settings, Trainer
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data, Dataset

__all__ = ["Interrupted", "absorb", "train"]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the state as it stood."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state


def train(
    state: State,
    data: Dataset,
    settings: Settings,
    generator: torch.Generator,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stage: str = "fit",
    journal: Journal | None = None,
) -> Result:
    """Fit a state to rows. Its hyperparameters are changed in place; q is not.

    Raises FloatingPointError or NotPositiveDefiniteError where numbers leave their range, and
    `Interrupted` on Ctrl-C.
    """
    trainer = _kind(settings)(state, data, settings, generator, on_progress, stage)
    try:
        return trainer.fit(journal)
    except KeyboardInterrupt:
        raise Interrupted(trainer.state) from None


def absorb(
    state: State,
    data: Data,
    settings: Settings,
    generator: torch.Generator,
    *,
    share: float,
    n_steps: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[State, float]:
    """Add the sites of one more batch to q, and its ELBO: the data are this share of all rows."""
    trainer = _kind(settings)(state, data, settings, generator, on_progress, "stream")
    elbo = trainer.absorb(share, n_steps)
    return trainer.state, elbo


def _kind(settings: Settings) -> type[Trainer]:
    return EPTrainer if settings.inference == "ep" else Trainer
