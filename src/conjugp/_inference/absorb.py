"""Rows that come in batches: their sites are added to q, those it holds stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from conjugp._gp.posterior import Posterior, State, kl, moments
from conjugp._inference.ep_steps import SiteSweep
from conjugp._inference.moving import Loop, Moving, evaluated, finite
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data

_STEP = 0.7  # not all the way: sites of the tight bound could overshoot


def fit(loop: Loop, data: Data, share: float, n_steps: int) -> tuple[State, float]:
    """The state with one more batch in it, and its ELBO; the data are this share of all rows."""
    moving, value = loop.moving, math.nan
    sweep, step = None, added_sites(moving, data, share)
    if moving.settings.inference == "ep":
        step = sweep = SiteSweep(moving, data, held=moving.state.q, share=share)
    good = moving.snapshot()
    for _ in range(n_steps):
        gradients = moving.settled
        try:
            value = step(gradients)
        except (NotPositiveDefiniteError, FloatingPointError):
            moving.go_back(good)
            if sweep is not None:
                sweep.forget()
            continue
        moving.state.step += 1
        if gradients:
            moving.move(moving.rate)
    loop.report(moving.state.step, 0, value)
    return moving.state, value


def added_sites(moving: Moving, data: Data, share: float) -> Callable[[bool], float]:
    """A step on the sites of the batch. Statistics are sums over points (Q3)."""
    held, part = moving.state.q, data.rows(0, None)

    def step(gradients: bool) -> float:
        q = moments(moving.state.q)
        stats = evaluated(moving, part, q, 1.0, gradients)
        elbo = finite(float(stats.bound) / share - float(kl(q)))
        moving.state.q = Posterior(
            torch.lerp(moving.state.q.h, held.h + stats.h, _STEP),
            torch.lerp(moving.state.q.P, held.P + stats.P, _STEP),
        )
        return elbo

    return step
