"""What a loop is told, what it says on the way, and what it ends with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conjugp._gp.posterior import State
from conjugp._persistence.codec import in_checkpoints
from conjugp.likelihoods._base import Likelihood


@dataclass(kw_only=True, eq=False, repr=False)
class Knobs:
    """The rarer settings that loops read; `FitOptions`, which has them too, says what they do."""

    step_exponent: float = 0.6
    min_step: float = 0.05
    kernel_prior: float = 1.0
    jitter: float | None = None
    chunk_size: int = 4096
    cache_mb: int | str = "auto"
    local_steps: int = 1


@dataclass(eq=False)
class Settings(Knobs):
    """What a loop is told; the state is elsewhere. Nobody changes it: others are made of it."""

    likelihood: Likelihood
    bound: str
    learn_kernel: bool = True
    learn_mean: bool = True
    learn_inducing: bool = False
    learning_rate: float = 0.05
    batch_size: int | None = None
    # Classes a minibatch step samples beside the labels of its batch; None: it sums over all.
    # Full-batch sweeps always sum over all.
    class_batch: int | None = None
    max_epochs: float = 100
    max_steps: int | None = None
    tol: float = 1e-3
    first_step: int = 1  # the first natural-gradient step has size first_step ** -step_exponent
    momentum: float = 0.9  # Adam's
    # What its rate is multiplied by, for kernels and for inducing points.
    kernel_rate: float = 1.0
    inducing_rate: float = 1.0
    groups: tuple[int, ...] | None = None  # of every feature; those of one have one lengthscale
    settled: int = 5  # steps of q alone, before it says anything about hyperparameters
    kept: float = 1.0  # the share of the variance given the inducing points that rows keep (Q9)
    inference: str = "vi"  # or "ep", which has no bound
    rough: bool = False  # whether five digits of E[log p] do for all of the fit


class Progress(NamedTuple):
    """What a fit reports after every epoch or round."""

    stage: str
    epoch: float
    n_epochs: float
    value: float
    measure: str = "ELBO"


@in_checkpoints
@dataclass
class Result:
    """A fitted state and how it came about."""

    state: State
    elbo: float
    epochs: float
    converged: bool
    history: list[float] = field(default_factory=list)
    # What subsampling classes costs at the end, in nats of ELBO per row (C3).
    class_gap: float = 0.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what a loop has found so far."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found
