"""The loop of minibatch fits: rounds of steps until the ELBO is flat, then shorter ones to rest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from conjugp._inference.moving import Loop
from conjugp._inference.settings import Result, Settings
from conjugp._inference.steps import Batches, MinibatchStep, Sizes
from conjugp._numerics.linalg import NotPositiveDefiniteError

ROUND = 50  # steps between two looks at a noisy ELBO
_LONG = 0.6  # of all steps, after which they get shorter whatever the ELBO does


class Annealing:
    """How long steps are: from some step on shorter and shorter, till the fit is at rest."""

    def __init__(self, settings: Settings, n_steps: int) -> None:
        self.settings, self.n_steps = settings, n_steps
        self.rest: tuple[int, int] | None = None  # the first step that is shorter, and the end

    @property
    def end(self) -> int:
        """How many steps there are, as far as is known."""
        return self.n_steps if self.rest is None else self.rest[1]

    def begin(self, t: int) -> None:
        """Come to rest, in half as many steps again as there were."""
        self.rest = t, min(self.n_steps, t + max(2 * ROUND, t // 2))

    def plan(self, t: int, rate: float) -> Iterator[Sizes]:
        """The steps from step t on that can be told in advance: to the end of a round, at most."""
        if self.rest is None and t >= _LONG * self.n_steps:
            self.rest = t, self.n_steps
        stop = min(t + ROUND - t % ROUND, self.end)
        if self.rest is None:
            stop = min(stop, math.ceil(_LONG * self.n_steps))
        return (self._sizes(i, rate) for i in range(t, stop))

    def _sizes(self, t: int, rate: float) -> Sizes:
        cfg, left = self.settings, 1.0
        if self.rest is not None:
            left = 1 - (t - self.rest[0]) / (self.rest[1] - self.rest[0])
        least = cfg.min_step * max(left, 0.1)
        rho = max((cfg.first_step + t) ** -cfg.step_exponent, least)
        return Sizes(left, rho, least, rate * max(left, 0.02))


def fit(loop: Loop, step: MinibatchStep, batches: Batches) -> Result:
    """Steps until they have come to rest. What fails goes back to the last good round."""
    moving, cfg = loop.moving, loop.moving.settings
    per_epoch = max(1, round(batches.n / batches.size))
    n_steps = cfg.max_steps or math.ceil(cfg.max_epochs * per_epoch)
    annealing = Annealing(cfg, n_steps)
    elbos: list[float] = []  # of every step ...
    history: list[float] = []  # ... and their means over rounds
    good, t = moving.snapshot(), 0
    where = loop.left_off()
    if where is not None:
        elbos, history, good, t, annealing.rest = where["at"]
        batches.restore(where["batches"])
        step.restore(where["step"])
    while t < annealing.end:
        if loop.journal.due():
            at = [elbos, history, good, t, annealing.rest]
            loop.keep(at=at, batches=batches.state(), step=step.state())
        try:
            taken = step(batches, annealing.plan(t, moving.rate))
        except (NotPositiveDefiniteError, FloatingPointError) as error:
            moving.go_back(good, error)
            continue
        elbos += taken
        t += len(taken)
        if t % ROUND == 0 or t == n_steps:
            if moving.is_finite():
                good = moving.snapshot()
            else:
                moving.go_back(good)
            history.append(_last(elbos))
            loop.report(t / per_epoch, n_steps / per_epoch, history[-1])
            if annealing.rest is None and _flat(elbos, cfg.tol * moving.total):
                annealing.begin(t)
    converged = annealing.end < n_steps or _flat(elbos, cfg.tol * moving.total)
    moving.state = moving.snapshot() if moving.is_finite() else good
    return Result(moving.state, _last(elbos), t / per_epoch, converged, history, step.gap())


def _last(elbos: list[float]) -> float:
    """The mean of the last round."""
    last = elbos[-ROUND:]
    return sum(last) / max(1, len(last))


def _flat(elbos: list[float], least: float) -> bool:
    """Whether the last rounds gained less than this or than their own noise."""
    w = 3 * ROUND
    if len(elbos) < 2 * w:
        return False
    new, old = torch.tensor(elbos[-w:]), torch.tensor(elbos[-2 * w : -w])
    noise = math.sqrt(float(new.var() + old.var()) / w)
    return float(new.mean() - old.mean()) < max(least, 2 * noise)
