"""Full-batch fits: hyperparameters and q together, then q alone by steps that raise the ELBO."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from conjugp._gp.features import Features, basis, features
from conjugp._gp.posterior import Moments, kl, moments
from conjugp._inference import svi
from conjugp._inference.moving import Loop, Moving, evaluated, finite, over_ranks
from conjugp._inference.settings import Result
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data, Dataset

_LEARNING = 0.8  # of the epochs, at most
_WARM_UP = 3  # sweeps before the hyperparameters start to move
_CACHED = 2**27  # numbers of features that are kept while the kernel rests


class Sweep:
    """One pass over all rows, chunk after chunk."""

    def __init__(self, moving: Moving, data: Dataset) -> None:
        self.moving, self.data = moving, data
        self.rough = moving.settings.rough  # whether five digits of E[log p] do
        self.forget()

    def __call__(self, q: Moments, gradients: bool) -> svi.Statistics:
        """Their statistics; gradients, if they are wanted, go to the leaves."""

        def here() -> svi.Statistics:
            if not gradients:
                return self._at_rest(q)
            self.forget()
            return svi.add(self._of(p, q, True) for p in self._chunks())

        return over_ranks(self.moving, self.data.group, here, gradients)

    def forget(self) -> None:
        """The hyperparameters have moved: features have to be computed again."""
        self._features: list[Features] | None = None

    def _chunks(self) -> Iterator[Data]:
        """All rows that are here, a chunk at a time."""
        n, size = self.data.n, self.moving.settings.chunk_size * self.data.group.size
        for i in range(0, n, size):
            self.data.expect(i + size, min(i + 2 * size, n))
            yield self.data.rows(i, min(i + size, n))

    def _at_rest(self, q: Moments) -> svi.Statistics:
        """With the kernel at rest features are computed once, where they fit in memory."""
        if self._features is None:
            self._start()
        known, make = self._features or [], self._make
        parts = enumerate(self._chunks())
        return svi.add(self._of(p, q, False, known[i] if known else make(p)) for i, p in parts)

    def _start(self) -> None:
        s, cfg = self.moving.state, self.moving.settings
        kernels = [k.with_theta(k.theta.detach()) for k in s.kernels]
        b = basis(kernels, s.Z.detach(), cfg.jitter, cfg.kept)
        self._make = lambda part: features(b, part.X)
        size = self.data.n // self.data.group.size * len(s.Z) * len(kernels)
        self._features = [self._make(p) for p in self._chunks()] if size < _CACHED else []

    def _of(
        self, part: Data, q: Moments, gradients: bool, f: Features | None = None
    ) -> svi.Statistics:
        how = {"rough": self.rough, "batch": False, "known": f}
        return evaluated(self.moving, part, q, 1.0, gradients, **how)


def fit(loop: Loop) -> Result:
    """Sweeps over all rows until the ELBO stands still."""
    moving, sweep = loop.moving, Sweep(loop.moving, loop.data)
    where = loop.left_off()
    history: list[float] = [] if where is None else where["history"]
    n = math.ceil(moving.settings.max_epochs)
    if moving.learning and (where is None or "best" in where):
        sweep.rough = True  # hyperparameters need not know better where to go
        learn(loop, sweep, history, max(1, int(_LEARNING * n)), where)
        sweep.rough, where = moving.settings.rough, None
    moving.rest()
    converged = ascend(loop, sweep, history, max(n - len(history), 2), where)
    return Result(moving.snapshot(), history[-1], len(history), converged, history)


def learn(
    loop: Loop, sweep: Sweep, history: list[float], n_epochs: int, where: dict[str, Any] | None
) -> None:
    """Hyperparameters and q together; the state of the highest ELBO is left."""
    moving, cfg = loop.moving, loop.moving.settings
    rho = 1.0 if cfg.bound in cfg.likelihood.conjugate else 0.7
    best, best_elbo, recent, first = moving.snapshot(), -math.inf, 0, 0
    if where is not None:
        rho, first = where["rho"], where["epoch"]
        best, best_elbo, recent = where["best"]
    for epoch in range(first, n_epochs):
        if loop.journal.due():
            loop.keep(history=history, rho=rho, epoch=epoch, best=[best, best_elbo, recent])
        try:
            q = moments(moving.state.q)
            gradients = moving.learning and epoch >= _WARM_UP
            stats = sweep(q, gradients)
            elbo = finite(float(stats.bound) - float(kl(q)))
        except (NotPositiveDefiniteError, FloatingPointError) as error:
            moving.go_back(best, error)
            continue
        history.append(elbo)
        loop.report(epoch + 1, cfg.max_epochs, elbo)
        if elbo > best_elbo + cfg.tol * moving.total:
            recent = 0
        elif gradients:
            recent += 1
        if elbo > best_elbo:
            best, best_elbo = moving.snapshot(), elbo
        elif elbo < best_elbo - 0.05 * abs(best_elbo):
            moving.rate, rho = 0.7 * moving.rate, max(0.7 * rho, 0.2)
        if recent >= 5:
            break
        moving.state.q = svi.update(moving.state.q, stats, 1.0, rho)
        if gradients:
            moving.move(moving.rate)
    moving.state = best


def ascend(
    loop: Loop, sweep: Sweep, history: list[float], n_epochs: int, where: dict[str, Any] | None
) -> bool:
    """Move q alone; a step that lowers the ELBO is halved. Whether it came to its optimum."""
    moving, cfg = loop.moving, loop.moving.settings
    sweep.forget()
    q = moments(moving.state.q)
    stats = sweep(q, False)
    elbo = float(stats.bound) - float(kl(q))
    slack, least = 1e-9, cfg.tol * 1e-2 * moving.total
    if sweep.rough or moving.state.Z.dtype != torch.float64:
        slack = 1e-6
    rho, first = 1.0, 0
    if where is None:
        history.append(elbo)
    else:
        rho, first, n_epochs = where["rho"], where["epoch"], where["n_epochs"]
    for epoch in range(first, n_epochs):
        if loop.journal.due():
            loop.keep(history=history, rho=rho, epoch=epoch, n_epochs=n_epochs)
        while True:
            candidate = svi.update(moving.state.q, stats, 1.0, rho)
            try:
                q = moments(candidate)
                new_stats = sweep(q, False)
                new = float(new_stats.bound) - float(kl(q))
            except FloatingPointError:
                new, new_stats = -math.inf, stats
            if new >= elbo - slack * abs(elbo):
                break
            rho *= 0.5
            if rho < 1e-3:
                return True  # no step along the natural gradient rises: q is at its optimum
        gain, elbo, stats, moving.state.q = new - elbo, new, new_stats, candidate
        history.append(elbo)
        loop.report(len(history), cfg.max_epochs, elbo)
        # Below what rough values can tell apart there is nothing to gain.
        if gain < (max(least, 1e-4 * abs(elbo)) if sweep.rough else least):
            return True
        rho = min(1.0, 1.5 * rho)
    return False
