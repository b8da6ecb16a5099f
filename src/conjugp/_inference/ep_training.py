"""The fit by expectation propagation: a site for every pair, or one averaged factor per class.

Full batch, every pair of a label and another class keeps its own site (EP). In batches only the
posterior is kept, and the factor taken out of it is an average one (stochastic EP).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from conjugp._gp.features import Features, basis, features
from conjugp._gp.posterior import Posterior, moments, prior
from conjugp._gp.state import State
from conjugp._inference import ep, svi
from conjugp._inference.training import Progress, Result, Settings, Trainer
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data, Dataset
from conjugp.likelihoods import Heaviside

FIRST_STEP = 0.5  # damping that every problem tried converges with; only sites alone go faster
_LEAST_STEP, _LARGEST_STEP = 0.05, 0.95
_WARM_UP = 3  # sweeps before the hyperparameters start to move
_AT_REST = 0.03  # the change of q in its standard deviations below which the evidence is believed


class EPTrainer(Trainer):
    """Runs one fit; the state's q is the prior times all sites, `Result.elbo` the log evidence."""

    def __init__(
        self,
        state: State,
        data: Dataset,
        settings: Settings,
        generator: torch.Generator,
        on_progress: Callable[[Progress], None] | None = None,
        stage: str = "fit",
    ) -> None:
        super().__init__(state, data, settings, generator, on_progress, stage)
        if not isinstance(settings.likelihood, Heaviside):
            raise ValueError(f"EP needs the Heaviside likelihood, got {settings.likelihood!r}")
        self._noise = float(settings.likelihood.noise)
        self._counts = ep.counts(data.mass)
        self._damping, self._gap = FIRST_STEP, math.inf

    @cached_property
    def _all(self) -> Data:
        """All rows: a full sweep has a site for each."""
        return self.data.rows(0, None)

    def _make_features(self, X: Tensor, gradients: bool) -> tuple[Features, Features]:
        """Features with their graph, if gradients are wanted, and without it."""
        s, cfg = self.state, self.settings
        with torch.set_grad_enabled(gradients and (cfg.learn_kernel or cfg.learn_inducing)):
            f = features(basis(s.kernels, s.Z, cfg.jitter), X)
        return f, Features(f.A.detach(), f.residual.detach())

    def absorb(self, share: float, n_steps: int) -> float:
        """Add the data's sites to q, for streams; those it holds stay as they are."""
        held, evidence = self.state.q, math.nan
        self._sites = self._no_sites()
        good, good_sites = self._snapshot(), self._sites
        for _ in range(n_steps):
            gradients = self.learning and self.state.step >= self.settings.settled
            try:
                f, bare = self._make_features(self._all.X, gradients)
                evidence, found = self._sweep(bare, gradients, held, share)
            except (NotPositiveDefiniteError, FloatingPointError):
                self._restore(good)
                self._sites = good_sites
                continue
            self.state.step += 1
            if found is not None:
                self._collect(f, found, 1.0)
                self._move(self._rate)
        self._report(self.state.step, 0, evidence)
        for leaf in self._leaves:
            leaf.requires_grad_(False).grad = None
        return evidence

    def _no_sites(self) -> ep.Sites:
        return ep.no_sites(self.data.n, self.data.n_classes, self.data.like.device)

    def _report(self, epoch: float, n_epochs: float, elbo: float) -> None:
        if self.on_progress is not None:
            self.on_progress(Progress(self.stage, epoch, n_epochs, elbo, "log evidence"))

    # --- minibatches --------------------------------------------------------------------------

    def _step(self, part: Data, scale: float, rho: float, rate: float) -> float:
        """One step of stochastic EP and, once q has settled a little, one Adam step (E7)."""
        s, gradients = self.state, self.learning and self.state.step >= self.settings.settled
        f, bare = self._make_features(part.X, gradients)
        cavity = ep.averaged_cavity(s.q, self._counts)
        solved = moments(cavity)
        found = ep.evaluate(
            solved, bare, part.y, s.mean.detach(), part.weight, self._noise, gradients
        )
        whole = ep.log_norm(s.q)
        norms = self._counts * (ep.log_norm(cavity) - whole) + whole
        evidence = scale * float(found.log_z) + float(norms.sum())
        if not math.isfinite(evidence):
            raise FloatingPointError("the evidence is not finite")
        stats = ep.statistics(bare, found.sites, part.y, part.weight)
        s.q = svi.update(s.q, stats, scale, min(rho, FIRST_STEP))
        if len(bare.A) == 1:
            s.q = ep.centred_posterior(s.q, solved.w.mean(0))
        s.step += 1
        if found.gradients is not None:
            self._collect(f, found.gradients, scale)
            self._move(rate)
        return evidence

    # --- full batch ---------------------------------------------------------------------------

    def _fit_full(self) -> Result:
        """Hyperparameters and sites together, then sites alone."""
        loop = self._left_off()
        history: list[float] = [] if loop is None else loop["history"]
        self._sites = self._no_sites()
        if loop is not None:
            self._sites, self._damping, self._gap = loop["sites"]
        n = math.ceil(self.settings.max_epochs)
        if self.learning and (loop is None or "best" in loop):
            self._learn_all(history, max(1, int(0.8 * n)), loop)
            loop = None
        for leaf in self._leaves:
            leaf.requires_grad_(False)
        converged = self._settle(history, max(n - len(history), 2), loop)
        self.state = self._snapshot()
        return Result(self.state, history[-1], len(history), converged, history)

    def _learn_all(self, history: list[float], n_epochs: int, loop: dict[str, Any] | None) -> None:
        best, best_sites, best_evidence, recent = self._snapshot(), self._sites, -math.inf, 0
        first = 0
        if loop is not None:
            best, best_sites, best_evidence, recent, first = loop["best"]
        for epoch in range(first, n_epochs):
            if self.journal.due():
                here = [best, best_sites, best_evidence, recent, epoch]
                self._keep(history=history, best=here, sites=self._site_state())
            try:
                f, bare = self._make_features(self._all.X, epoch >= _WARM_UP)
                evidence, gradients = self._sweep(bare, epoch >= _WARM_UP)
            except (NotPositiveDefiniteError, FloatingPointError):
                self._restore(best)
                self._sites = best_sites
                continue
            history.append(evidence)
            self._report(epoch + 1, self.settings.max_epochs, evidence)
            if gradients is None:
                continue
            # Far from a fixed point the evidence is no estimate of anything.
            if self._gap < _AT_REST:
                recent += 1
                if evidence > best_evidence + self.settings.tol * self.total:
                    recent = 0
                if evidence > best_evidence:
                    best, best_sites, best_evidence = self._snapshot(), self._sites, evidence
                elif evidence < best_evidence - 0.05 * abs(best_evidence):
                    self._rate *= 0.7
                if recent >= 10:
                    break
            self._collect(f, gradients, 1.0)
            self._move(self._rate)
        if best_evidence > -math.inf:
            self.state, self._sites = best, best_sites
        self._damping, self._gap = FIRST_STEP, math.inf

    def _site_state(self) -> list[Any]:
        return [self._sites, self._damping, self._gap]

    def _settle(self, history: list[float], n_epochs: int, loop: dict[str, Any] | None) -> bool:
        """Sweeps with the hyperparameters at rest until neither sites nor evidence change."""
        _, f = self._make_features(self._all.X, False)
        first, n_epochs = (0, n_epochs) if loop is None else loop["epochs"]
        for epoch in range(first, n_epochs):
            if self.journal.due():
                self._keep(history=history, epochs=[epoch, n_epochs], sites=self._site_state())
            evidence, _ = self._sweep(f, False)
            gain = abs(evidence - history[-1]) if history else math.inf
            history.append(evidence)
            self._report(len(history), self.settings.max_epochs, evidence)
            if self._gap < 0.3 * _AT_REST and gain < self.settings.tol * 1e-2 * self.total:
                return True
        return False

    def _sweep(
        self, f: Features, gradients: bool, held: Posterior | None = None, share: float = 1.0
    ) -> tuple[float, svi.Gradients | None]:
        """Add the sites up to q, match every factor and step towards the matches.

        Returns the log evidence before the step (E5). The sites come on top of those `held`, the
        rows being this share of all.
        """
        data, size, mean = self._all, self.settings.chunk_size, self.state.mean.detach()
        parts = []
        for i in range(0, len(data.y), size):
            c = slice(i, i + size)
            sites = ep.Sites(*(x[:, c] for x in self._sites))
            parts.append((data.rows(i, i + size), Features(f.A[..., c], f.residual[:, c]), sites))
        total = svi.add([ep.statistics(g, sites, d.y, d.weight) for d, g, sites in parts])
        base = prior(data.n_classes, len(self.state.Z), f.A) if held is None else held
        q = Posterior(base.h + total.h, base.P + total.P)
        solved = moments(q)
        found = ep.join(
            [
                ep.evaluate(solved, g, d.y, mean, d.weight, self._noise, gradients, sites)
                for d, g, sites in parts
            ]
        )
        evidence = float(found.log_z / share + ep.log_norm(q).sum())
        if not math.isfinite(evidence):
            raise FloatingPointError("the evidence is not finite")
        self.state.q = q
        gap = math.sqrt(float(found.gap) / float(self._counts.sum()))
        # Sites that move farther than the last time overshoot, unless hyperparameters push them.
        if gap > max(self._gap, _AT_REST if gradients else 0.0):
            self._damping = max(0.5 * self._damping, _LEAST_STEP)
        else:
            self._damping = min(1.2 * self._damping, _LARGEST_STEP)
        self._gap, self._sites = gap, ep.damped(self._sites, found.sites, self._damping)
        if len(f.A) == 1 and held is None:
            self._sites = ep.centred(self._sites, (solved.w.mean(0) @ f.A[0]).double())
        return evidence, found.gradients
