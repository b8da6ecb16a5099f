"""Steps of expectation propagation: a site for every pair, or one averaged factor per class.

Full batch, every pair of a label and another class keeps its own site (EP). In batches only the
posterior is kept, and the factor taken out of it is an average one (stochastic EP).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from conjugp._gp.features import Features
from conjugp._gp.posterior import Posterior, moments, prior
from conjugp._inference import ep, svi
from conjugp._inference.moving import Loop, Moving, bare, finite
from conjugp._inference.settings import Result
from conjugp._inference.steps import Batch, MinibatchStep, Sizes
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data
from conjugp.likelihoods import Heaviside, Likelihood

FIRST_STEP = 0.5  # damping that every problem tried converges with; only sites alone go faster
_LEAST_STEP, _LARGEST_STEP = 0.05, 0.95
_LEARNING = 0.8  # of the epochs, at most
_WARM_UP = 3  # sweeps before the hyperparameters start to move
_AT_REST = 0.03  # the change of q in its standard deviations below which the evidence is believed


def noise_of(likelihood: Likelihood) -> float:
    """σ0² of the only likelihood that has these moments."""
    if not isinstance(likelihood, Heaviside):
        raise ValueError(f"EP needs the Heaviside likelihood, got {likelihood!r}")
    return float(likelihood.noise)


class AveragedStep(MinibatchStep):
    """One step of stochastic EP (E6, E7)."""

    def __init__(self, moving: Moving, mass: Tensor) -> None:
        """`mass`: the weight of every class, (C,)."""
        self.moving, self.counts = moving, ep.counts(mass)
        self._noise = noise_of(moving.settings.likelihood)

    def take(self, batch: Batch, sizes: Sizes) -> float:
        """Move q and, once it has settled a little, the hyperparameters; the evidence before."""
        moving, s, part = self.moving, self.moving.state, batch.data
        gradients = moving.settled
        _, f = moving.features(part.X, gradients)
        cavity = ep.averaged_cavity(s.q, self.counts)
        solved, given = moments(cavity), bare(f)
        matched = ep.evaluate(
            solved, given, part.y, s.mean.detach(), part.weight, self._noise, gradients
        )
        whole = ep.log_norm(s.q)
        norms = self.counts * (ep.log_norm(cavity) - whole) + whole
        evidence = batch.scale * float(matched.log_z) + float(norms.sum())
        finite(evidence, "the evidence")
        stats = ep.statistics(given, matched.sites, part.y, part.weight)
        s.q = svi.update(s.q, stats, batch.scale, min(sizes.rho, FIRST_STEP))
        if len(given.A) == 1:
            s.q = ep.centred_posterior(s.q, solved.w.mean(0))
        s.step += 1
        if matched.gradients is not None:
            moving.collect(f, matched.gradients, batch.scale)
            moving.move(sizes.rate)
        return evidence


class SiteSweep:
    """One sweep of EP over all rows and their sites, on top of those a posterior holds already."""

    def __init__(
        self, moving: Moving, data: Data, *, held: Posterior | None = None, share: float = 1.0
    ) -> None:
        """`held`: the prior if None; `share`: which part of all rows the data are."""
        self.moving, self.data, self.held, self.share = moving, data, held, share
        self._noise = noise_of(moving.settings.likelihood)
        self._factors = float(ep.counts(data.mass).sum())
        self.forget()
        self.start_again()

    def forget(self) -> None:
        """Sites that say nothing yet."""
        self.sites = ep.no_sites(self.data.n, self.data.n_classes, self.data.like.device)

    def start_again(self) -> None:
        """Damp as at the start."""
        self.damping = FIRST_STEP
        self.gap = math.inf  # the last change of q in its standard deviations

    def state(self) -> list[Any]:
        """Where it stands, for a checkpoint."""
        return [self.sites, self.damping, self.gap]

    def restore(self, state: list[Any]) -> None:
        """Go back there."""
        self.sites, self.damping, self.gap = state

    def __call__(self, gradients: bool, f: Features | None = None) -> float:
        """Add the sites up to q, match every factor and step towards the matches.

        The log evidence before the step (E5). Features are computed if there are none; gradients
        go to the leaves.
        """
        moving, data = self.moving, self.data
        with_graph = f if f is not None else moving.features(data.X, gradients)[1]
        f, C = bare(with_graph), data.n_classes
        parts = self._parts(f)
        total = svi.add([ep.statistics(g, sites, d.y, d.weight) for d, g, sites in parts])
        base = prior(C, f.A.shape[1], f.A) if self.held is None else self.held
        q = Posterior(base.h + total.h, base.P + total.P)
        solved, mean = moments(q), moving.state.mean.detach()
        matched = ep.join(
            [
                ep.evaluate(solved, g, d.y, mean, d.weight, self._noise, gradients, sites)
                for d, g, sites in parts
            ]
        )
        evidence = float(matched.log_z / self.share + ep.log_norm(q).sum())
        finite(evidence, "the evidence")
        moving.state.q = q
        self._step_to(matched, 0.0 if not gradients else _AT_REST)
        if len(f.A) == 1 and self.held is None:
            self.sites = ep.centred(self.sites, (solved.w.mean(0) @ f.A[0]).double())
        if matched.gradients is not None:
            moving.collect(with_graph, matched.gradients, 1.0)
        return evidence

    def _parts(self, f: Features) -> list[tuple[Data, Features, ep.Sites]]:
        """All rows with their features and sites, a chunk at a time."""
        data, size, parts = self.data, self.moving.settings.chunk_size, []
        for i in range(0, data.n, size):
            c = slice(i, i + size)
            sites = ep.Sites(*(x[:, c] for x in self.sites))
            parts.append((data.rows(i, i + size), Features(f.A[..., c], f.residual[:, c]), sites))
        return parts

    def _step_to(self, matched: ep.Evaluation, unrest: float) -> None:
        """From the sites towards those that match; `unrest`: a change of q that is no overshoot."""
        gap = math.sqrt(float(matched.gap) / self._factors)
        # Sites that move farther than the last time overshoot, unless hyperparameters push them.
        if gap > max(self.gap, unrest):
            self.damping = max(0.5 * self.damping, _LEAST_STEP)
        else:
            self.damping = min(1.2 * self.damping, _LARGEST_STEP)
        self.gap, self.sites = gap, ep.damped(self.sites, matched.sites, self.damping)


def fit(loop: Loop) -> Result:
    """Hyperparameters and sites of all rows together, then sites alone."""
    moving, sweep = loop.moving, SiteSweep(loop.moving, loop.data.rows(0, None))
    where = loop.left_off()
    history: list[float] = []
    if where is not None:
        history = where["history"]
        sweep.restore(where["sites"])
    n = math.ceil(moving.settings.max_epochs)
    if moving.learning and (where is None or "best" in where):
        learn(loop, sweep, history, max(1, int(_LEARNING * n)), where)
        where = None
    moving.rest()
    converged = settle(loop, sweep, history, max(n - len(history), 2), where)
    return Result(moving.snapshot(), history[-1], len(history), converged, history)


def learn(
    loop: Loop, sweep: SiteSweep, history: list[float], n_epochs: int, where: dict[str, Any] | None
) -> None:
    """Sweeps between which hyperparameters move; the state of the highest evidence is left."""
    moving, cfg = loop.moving, loop.moving.settings
    best, best_sites, best_evidence, recent = moving.snapshot(), sweep.sites, -math.inf, 0
    first = 0
    if where is not None:
        best, best_sites, best_evidence, recent, first = where["best"]
    for epoch in range(first, n_epochs):
        if loop.journal.due():
            here = [best, best_sites, best_evidence, recent, epoch]
            loop.keep(history=history, best=here, sites=sweep.state())
        gradients = epoch >= _WARM_UP
        try:
            evidence = sweep(gradients)
        except (NotPositiveDefiniteError, FloatingPointError) as error:
            moving.go_back(best, error)
            sweep.sites = best_sites
            continue
        history.append(evidence)
        loop.report(epoch + 1, cfg.max_epochs, evidence)
        if not gradients:
            continue
        # Far from a fixed point the evidence is no estimate of anything.
        if sweep.gap < _AT_REST:
            recent += 1
            if evidence > best_evidence + cfg.tol * moving.total:
                recent = 0
            if evidence > best_evidence:
                best, best_sites, best_evidence = moving.snapshot(), sweep.sites, evidence
            elif evidence < best_evidence - 0.05 * abs(best_evidence):
                moving.rate *= 0.7
            if recent >= 10:
                break
        moving.move(moving.rate)
    if best_evidence > -math.inf:
        moving.state, sweep.sites = best, best_sites
    sweep.start_again()


def settle(
    loop: Loop, sweep: SiteSweep, history: list[float], n_epochs: int, where: dict[str, Any] | None
) -> bool:
    """Sweeps with the hyperparameters at rest until neither sites nor evidence change."""
    moving, cfg = loop.moving, loop.moving.settings
    _, f = moving.features(sweep.data.X, False)
    first, n_epochs = (0, n_epochs) if where is None else where["epochs"]
    for epoch in range(first, n_epochs):
        if loop.journal.due():
            loop.keep(history=history, epochs=[epoch, n_epochs], sites=sweep.state())
        evidence = sweep(False, f)
        gain = abs(evidence - history[-1]) if history else math.inf
        history.append(evidence)
        loop.report(len(history), cfg.max_epochs, evidence)
        if sweep.gap < 0.3 * _AT_REST and gain < cfg.tol * 1e-2 * moving.total:
            return True
    return False
