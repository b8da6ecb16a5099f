"""The way into a variational fit or one by expectation propagation: rows in, a state out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from conjugp._gp.posterior import State
from conjugp._inference import absorb as one_more
from conjugp._inference import ep_steps, full_batch, minibatch
from conjugp._inference.batches import Batches
from conjugp._inference.class_step import SampledClassesStep
from conjugp._inference.fused import ClosedFormStep, applies
from conjugp._inference.moving import Loop, Moving
from conjugp._inference.rounds import RoundsOfSteps
from conjugp._inference.settings import Interrupted, Progress, Result, Settings
from conjugp._inference.steps import LocalSteps, MinibatchStep, ReadableStep
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data, Dataset


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
    n_others = _sampled_beside_labels(state, settings, data.n_classes)
    moving = _moving(state, data, settings)
    loop = Loop(moving, data, generator, stage, on_progress, journal or Journal())
    size = settings.batch_size
    try:
        if size is None or size >= data.n:
            return (ep_steps if settings.inference == "ep" else full_batch).fit(loop)
        # In fixed batches some rows of a class would always count for more than others (C4).
        batches = Batches(data, size, generator, shuffled=n_others is not None)
        return minibatch.fit(loop, _step(loop, batches, n_others), batches)
    except KeyboardInterrupt:
        raise Interrupted(moving.state) from None
    finally:
        moving.rest()


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
    moving = _moving(state, data, settings)
    loop = Loop(moving, data, generator, "stream", on_progress)
    try:
        return one_more.fit(loop, data, share, n_steps)
    finally:
        moving.rest()


def _moving(state: State, data: Dataset, settings: Settings) -> Moving:
    if settings.inference == "ep":
        ep_steps.noise_of(settings.likelihood)  # or this is no likelihood for it
        settings = replace(settings, kept=1.0)  # a site knows of no other variance
    return Moving(state, data.total, settings)


def _step(loop: Loop, batches: Batches, n_others: int | None) -> MinibatchStep:
    """How steps of this fit are taken: the fastest way there is for it."""
    moving, data, s = loop.moving, loop.data, loop.moving.settings
    if s.inference == "ep":
        return ep_steps.AveragedStep(moving, data.mass)
    if n_others is not None:
        return SampledClassesStep(moving, data, n_others, loop.generator)
    if data.group.size > 1:
        return (LocalSteps if s.local_steps > 1 else ReadableStep)(moving, data.group)
    if len(moving.state.theta) > 1 or not applies(moving.state.template, s.likelihood, s.bound):
        return ReadableStep(moving, data.group)
    step = ClosedFormStep(moving, batches.largest)
    if isinstance(data, Data) and data.X.is_cuda:
        return RoundsOfSteps(step, data, minibatch.ROUND)
    return step


def _sampled_beside_labels(state: State, settings: Settings, n_classes: int) -> int | None:
    """How many classes a step samples beside its labels; None if it sums over all."""
    n, like = settings.class_batch, settings.likelihood
    if n is None:
        return None
    if n < 1:
        raise ValueError(f"class_batch must be at least 1, got {n}")
    if not like.class_parts or settings.bound not in like.bounds:
        raise ValueError(
            f"class_batch={n} needs a bound that is a sum over classes; {settings.bound!r} of "
            f"{like.name!r} is not"
        )
    if len(state.theta) > 1:
        raise ValueError(f"class_batch={n} needs one kernel shared by all classes")
    return n if n < n_classes - 1 else None
