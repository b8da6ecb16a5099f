"""The way into a variational fit or one by expectation propagation: rows in, a state out.

Or a batch of rows whose sites are added to q, those it holds staying as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from conjugp._gp.posterior import Posterior, State, kl, moments
from conjugp._inference import ep_steps, full_batch, minibatch
from conjugp._inference.class_step import SampledClassesStep
from conjugp._inference.fused import ClosedFormStep, applies
from conjugp._inference.moving import Loop, Moving, evaluated, finite
from conjugp._inference.rounds import RoundsOfSteps
from conjugp._inference.settings import Interrupted, Progress, Result, Settings
from conjugp._inference.steps import Batches, LocalSteps, MinibatchStep, ReadableStep
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data, Dataset

STILL_ROWS = 1000  # that are asked which columns are at rest
_ABSORBED = 0.7  # of a step; not all the way: sites of the tight bound could overshoot


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
    moving, value = _moving(state, data, settings), math.nan
    good, sweep = moving.snapshot(), None
    try:
        step = _added_sites(moving, data, share)
        if settings.inference == "ep":
            step = sweep = ep_steps.SiteSweep(moving, data, held=moving.state.q, share=share)
        for _ in range(n_steps):
            gradients = moving.settled
            try:
                value = step(gradients)
            except (NotPositiveDefiniteError, FloatingPointError) as error:
                moving.go_back(good, error)
                if sweep is not None:
                    sweep.forget()
                continue
            moving.state.step += 1
            if gradients:
                moving.move(moving.rate)
    finally:
        moving.rest()
    Loop(moving, data, generator, "stream", on_progress).report(moving.state.step, 0, value)
    return moving.state, value


def _added_sites(moving: Moving, data: Data, share: float) -> Callable[[bool], float]:
    """A step on the sites of the batch. Statistics are sums over points (Q3)."""
    held, part = moving.state.q, data.rows(0, None)

    def step(gradients: bool) -> float:
        q = moments(moving.state.q)
        stats = evaluated(moving, part, q, 1.0, gradients)
        elbo = finite(float(stats.bound) / share - float(kl(q)))
        moving.state.q = Posterior(
            torch.lerp(moving.state.q.h, held.h + stats.h, _ABSORBED),
            torch.lerp(moving.state.q.P, held.P + stats.P, _ABSORBED),
        )
        return elbo

    return step


def _moving(state: State, data: Dataset, settings: Settings) -> Moving:
    if settings.inference == "ep":
        ep_steps.noise_of(settings.likelihood)  # or this is no likelihood for it
        settings = replace(settings, kept=1.0)  # a site knows of no other variance
    moving = Moving(state, data.total, settings)
    if data.n:
        moving.keep_still(data.head(STILL_ROWS).X)
    return moving


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
