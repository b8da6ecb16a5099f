"""What the stages of a fit share, and what a fit leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from conjugp._fit.plan import Plan
from conjugp._gp.model import Model
from conjugp._gp.posterior import State
from conjugp._gp.predictor import Predictor
from conjugp._inference.settings import Progress
from conjugp._persistence.codec import in_checkpoints
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Dataset
from conjugp.likelihoods import LogisticSoftmax

ELBO_ROWS, ELBO_PAIRS = 2048, 2**20  # rows, times classes, that stand for all in the ELBO
SATURATED, SATURATED_ROWS = 4.0, 512  # σ is above .98 there; rows that are asked


class Good(NamedTuple):
    """A state that would do, were the fit to end there."""

    model: Model
    state: State
    kept: float = 1.0


class Run:
    """A fit under way: its plan, its random numbers, and what it tells of its way."""

    def __init__(
        self,
        plan: Plan,
        on_progress: Callable[[Progress], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.plan = plan
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.history: list[dict[str, float | str]] = []
        self.journal = journal or Journal()
        self.journal.follow(self.generator, self.history)
        self.good: Callable[[], Good] | None = None  # the last good state
        self._began = time.perf_counter() - self.journal.seconds
        self._on_progress = on_progress

    def report(self, p: Progress) -> None:
        """Write down what a stage says, and tell who listens."""
        seconds = time.perf_counter() - self._began
        self.history.append({**p._asdict(), "seconds": seconds})
        if self._on_progress is not None:
            self._on_progress(p)


@in_checkpoints
@dataclass
class Fitted:
    """What a fit leaves behind."""

    model: Predictor
    elbo: float
    epochs: float
    converged: bool
    state: State | None  # for going on
    history: list[dict[str, float | str]] = field(default_factory=list)
    total: float = 0.0  # weight of the rows
    class_gap: float = 0.0  # what sampling classes cost, in nats per row (docs/math.md, C3)
    saturated: bool = False  # whether all classes are alike to it (docs/math.md, The corner)


def estimated_elbo(model: Model, data: Dataset) -> float:
    """The ELBO, its sum over points taken from a sample where there are many."""
    part = data.head(min(ELBO_ROWS, max(1, ELBO_PAIRS // data.n_classes)))
    kl = model.kl()
    return (model.elbo(part) + kl) * (data.total / part.total) - kl


def saturated(model: Model, data: Dataset) -> bool:
    """Whether most rows have all their latents so far above zero that no class stands out."""
    if model.likelihood.name != LogisticSoftmax.name:
        return False
    m, _ = model.latent(data.head(SATURATED_ROWS).X, variance=False)
    return len(m) > 0 and float(m.amin(1).median()) > SATURATED
