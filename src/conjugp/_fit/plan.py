"""Every choice of a fit, settled before it starts, and what its stages share under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from conjugp._fit.options import Checked, FitOptions, knobs_of
from conjugp._gp.model import Model
from conjugp._gp.posterior import State
from conjugp._inference.moving import at_rest
from conjugp._inference.settings import Progress, Settings
from conjugp._inputs.inputs import Inputs, Scaling
from conjugp._inputs.taming import FEW_VALUES
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data, Dataset, class_shares
from conjugp.kernels import RBF, Kernel, Matern52
from conjugp.likelihoods import Likelihood, LogisticSoftmax
from conjugp.likelihoods._base import MC

# Mean and covariance share their points up to so many rows, rows times classes, and features.
COUPLED_ROWS, COUPLED_PAIRS, COUPLED_FEATURES = 3000, 60_000, 200
LEAST_INDUCING, COUPLED_INDUCING = 150, 300  # a quarter of the rows, within these
SMALL, SMALL_INDUCING = 300, 100  # rows up to which fewer points do, and smooth kernels
STREAM_INDUCING = 200
MEAN_INDUCING = 3000
MANY_CLASSES = 2000  # more than these are sampled ...
CLASS_BATCH = 512  # ... so many at a time, beside the batch's labels
CLASS_ROWS = 512  # in batches of so many rows, lest their labels be all there are
LOOKED_AT = 1000  # rows that are asked which columns are numbers, or at rest
SHARES_ROWS = 300  # up to which learned prior means start at the classes' shares


@dataclass(frozen=True)
class Plan:
    """Every choice of a fit, "auto" already settled; no stage changes it."""

    settings: Settings  # of its loops, where a stage says nothing else
    family: str  # "coupled", or the covariance family of a decoupled fit
    kernel: Kernel | None  # the user's, in working units
    template: Kernel  # what kernels are made of: the user's, or ours
    shared_kernel: bool
    full_batch: bool  # whether a coupled fit looks at all rows in every step
    mean: Tensor  # (C,), where prior means start
    n_inducing: int
    inducing: str | Tensor
    temperature: float | None  # None: to be found
    shares: Tensor | None  # of the classes among the rows (C,), where that is so
    options: FitOptions
    seed: int

    @property
    def usual(self) -> bool:
        """Whether a coupled fit starts and moves as the paper has it: minibatches have their own.

        A kernel variance that is given asks for that too.
        """
        return self.full_batch or bool(self.options.initial_variance)


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


def make_plan(
    clf: Any,
    data: Dataset,
    inputs: Inputs,
    checked: Checked,
    seed: int,
) -> Plan:
    """Settle every "auto" from N, C and D."""
    (kernel, likelihood, bound, options), n, scaling = checked, data.n, inputs.scaling
    given = clf.inducing
    if not isinstance(given, str):
        given = given_inducing(given, data.like, scaling)
    M = clf.n_inducing
    if isinstance(given, Tensor):
        M = len(given)
    auto = clf.covariance == "auto"
    few = _few(data, inputs) if M == "auto" else M is None or int(M) <= COUPLED_INDUCING
    # A decoupled mean follows the gradient of log p(y | f) at zero variance.
    only_coupled = clf.inference != "auto" or not likelihood.smooth or not clf.shared_kernel
    coupled = clf.covariance == "full" or only_coupled or (auto and few)
    if M is None:
        M = n
    elif M == "auto":
        many = max(1000, min(MEAN_INDUCING, n // 5))
        some = min(COUPLED_INDUCING, max(SMALL_INDUCING if n <= SMALL else LEAST_INDUCING, n // 4))
        M = min(n, some if coupled else many)
    batch = clf.batch_size
    if batch == "auto":
        batch = _coupled_batch(n) if coupled else 0
    elif batch is None and not coupled:
        batch = n
    class_batch = clf.class_batch
    if class_batch == "auto":
        parts = likelihood.class_parts and bound != MC and clf.shared_kernel
        parts = parts and data.group.size == 1  # sampled classes bring rows of their own
        class_batch = CLASS_BATCH if data.n_classes > MANY_CLASSES and parts else None
    if class_batch is not None and class_batch >= data.n_classes:
        class_batch = None
    if class_batch is not None and batch == 0:
        batch = CLASS_ROWS
    learn_inducing = clf.learn_inducing
    if learn_inducing == "auto":
        learn_inducing = coupled and n > SMALL and int(M) < n and not isinstance(given, Tensor)
    temperature = 1.0 if clf.temperature is None else clf.temperature
    found = None if temperature == "auto" else float(temperature)
    settings = Settings(
        likelihood,
        bound,
        learn_kernel=clf.learn_hyperparameters,
        learn_mean=isinstance(clf.prior_mean, str),
        learn_inducing=bool(learn_inducing),
        learning_rate=clf.learning_rate,
        batch_size=batch,
        class_batch=class_batch,
        max_epochs=clf.max_epochs,
        tol=clf.tol,
        inference="ep" if clf.inference == "ep" else "vi",
        groups=inputs.groups,
        **knobs_of(options),
    )
    own = None if kernel is None else kernel.to_units(1 / scaling.scale)
    ours = Matern52() if coupled and n > SMALL and _has_numbers(data) else RBF()
    return Plan(
        settings,
        "coupled" if coupled else ("shared" if auto else clf.covariance),
        own,
        ours if own is None else own,
        clf.shared_kernel,
        coupled and (batch is None or batch >= n),
        start_mean(clf.prior_mean, data, likelihood),
        min(int(M), n) if not isinstance(given, Tensor) else int(M),
        given,
        found,
        # A temperature that is given does what its definition says, whatever the classes are.
        class_shares(data) if found is None else None,
        replace(options, callback=None),  # a copy that can travel
        seed,
    )


def _few(data: Dataset, inputs: Inputs) -> bool:
    """Whether mean and covariance share their points: few rows, and no embedding of more."""
    n = data.n
    if n <= SMALL or n > COUPLED_ROWS or n * data.n_classes > COUPLED_PAIRS or inputs.embedding:
        return n <= SMALL
    return int((~at_rest(data.head(LOOKED_AT).X)).sum()) <= COUPLED_FEATURES


def _has_numbers(data: Dataset) -> bool:
    """Whether a column is more than a few levels: functions of numbers are seldom very smooth."""
    X = data.head(LOOKED_AT).X
    return any(len(torch.unique(column)) > FEW_VALUES for column in X.T)


def _coupled_batch(n: int) -> int | None:
    """Rows in a batch of a coupled fit to n rows; None: all."""
    return None if n <= 1000 else 512 if n <= 10_000 else 1024


def given_inducing(inducing: Any, X: Tensor, scaling: Scaling) -> Tensor:
    """The user's points in working units, for rows like X."""
    try:
        Z = np.asarray(inducing, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"inducing must be a strategy or an array of numbers ({error})") from error
    if Z.ndim != 2 or Z.shape[1] != X.shape[1] or not len(Z):
        raise ValueError(f"inducing must have shape (m, {X.shape[1]}); got {Z.shape}")
    if not np.isfinite(Z).all():
        raise ValueError("inducing contains NaN or infinity")
    return scaling.apply(Z, X.dtype, X.device)


def start_mean(prior_mean: Any, data: Dataset, likelihood: Likelihood | None = None) -> Tensor:
    """The prior mean of every class at the start, (C,).

    One that is to be learned, which needs the likelihood, starts where the classes have about the
    shares of the rows, if these are few; many teach it themselves, and what is rare may be sure
    where it is, so that it starts where all classes are alike, as one that stays does.
    """
    C = data.n_classes
    if isinstance(prior_mean, str) and likelihood is not None:
        few = min(1.0, SHARES_ROWS / max(data.n, 1))
        shares = likelihood.start_means(class_shares(data))
        even = torch.full_like(shares, likelihood.start_mean(C))
        return torch.lerp(even, shares, few).to(data.like)
    if isinstance(prior_mean, str):
        return data.like.new_full((C,), LogisticSoftmax().start_mean(C))
    try:
        mean = np.broadcast_to(np.asarray(prior_mean, dtype=np.float64), (C,))
    except (TypeError, ValueError) as error:
        raise ValueError(f"prior_mean must be a number or {C} numbers") from error
    if not np.isfinite(mean).all():
        raise ValueError("prior_mean contains NaN or infinity")
    return torch.tensor(mean).to(data.like)


def mean_of(plan: Plan, data: Data) -> Tensor:
    """The prior mean at the start of a fit to some of the classes."""
    if data.n_classes == len(plan.mean):
        return plan.mean
    return start_mean("learn", data, plan.settings.likelihood)
