"""The stage of a coupled fit that takes the held-out rows in, after they have told a temperature.

They are trained on after all: by one step on all of them, and a few on all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conjugp._fit.calibrate import from_held_out
from conjugp._fit.learn import learned, model_of
from conjugp._fit.plan import Run
from conjugp._gp.features import basis, features
from conjugp._gp.posterior import Posterior, State, marginals, moments
from conjugp._gp.temperature import Calibration
from conjugp._inference import svi
from conjugp._inference.settings import Settings
from conjugp._rows.dataset import Data, Dataset

LEAST_CHUNK, HELD_CHUNK = 64, 1024  # held-out rows at a time


def taken_in(
    run: Run, state: State, held: Data, everything: Dataset, settings: Settings
) -> tuple[State, Calibration]:
    """q after one step on all held-out rows (Q1-Q4), and a temperature from them before it.

    The latents that a temperature needs are most of such a step. Expectation propagation has
    other sites, and where classes are sampled a step on all of them would take too long.
    """
    s = settings
    if s.inference == "ep" or s.class_batch is not None:
        m, v = model_of(state, s).latent(held.X)
        return state, from_held_out(run, m, v, held, s)
    b, q = basis(state.kernels, state.Z, s.jitter), moments(state.q)
    batch = s.batch_size or held.n
    size, latents = max(LEAST_CHUNK, min(batch, HELD_CHUNK)), list[tuple[Tensor, Tensor]]()

    def statistics() -> Iterator[svi.Statistics]:
        for i in range(0, held.n, size):
            part = held.rows(i, i + size)
            f = features(b, part.X)
            m, v, _ = marginals(q, f)
            m = m + state.mean
            latents.append((m, v))
            v = v - (1.0 - s.kept) * f.residual.T
            site = svi.clamp(s.likelihood.site(part.y, m, v, s.bound), m, batch=True)
            yield svi.statistics(f, site, state.mean, part.weight)

    # A step of size rho leaves 1/rho batches in q, about half of them by another kernel.
    remembered = 0.5 * batch * max(1, state.step) ** s.step_exponent
    rho = min(0.5, held.n / (held.n + remembered))
    new = svi.update(state.q, svi.add(statistics()), everything.total / held.total, rho)
    m, v = (torch.cat(column) for column in zip(*latents, strict=True))
    calibration = from_held_out(run, m, v, held, s)
    # Ranks compute alike; where their machines round differently, rank 0's is taken.
    new = Posterior(*map(everything.group.same_tensor, new))
    if bool(torch.isfinite(new.h).all() & torch.isfinite(new.P).all()):
        state = replace(state, q=new)
    return state, calibration


def settled(run: Run, state: State, everything: Dataset, settings: Settings) -> State:
    """The state after a few steps on all rows, the kernel at rest.

    They are as short as the last ones were: what q knows counts as much as the batches that it
    remembers.
    """
    rest = replace(
        settings,
        learn_kernel=False,
        learn_mean=False,
        learn_inducing=False,
        max_steps=max(7, min(50, state.step // 4)),
        min_step=0.02,
        step_exponent=1.0,
        first_step=max(1, round(state.step**settings.step_exponent)),
    )
    return learned(run, state, everything, rest, "all rows").state
