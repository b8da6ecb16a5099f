"""Rows that come in batches: natural-gradient steps, inducing points that grow (partial_fit)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from conjugp._fit.fit import Fitted
from conjugp._fit.options import FitOptions, knobs_of
from conjugp._fit.starts import filled
from conjugp._gp import inducing
from conjugp._gp.features import basis, features
from conjugp._gp.model import Model, coupled
from conjugp._gp.posterior import Posterior, State, initial_state, prior
from conjugp._inference.settings import Progress, Settings
from conjugp._inference.train import absorb
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF, Kernel
from conjugp.likelihoods._base import Likelihood

_STEPS = 15  # passes over each batch of rows
_MIN_SHARE = 1e-3  # of its prior variance a row must keep to become an inducing point


class Stream:
    """The state between calls of partial_fit."""

    def __init__(
        self,
        kernel: Kernel | None,
        limit: int,
        likelihood: Likelihood,
        bound: str,
        seed: int,
        inference: str = "vi",
        kept: float = 1.0,
    ) -> None:
        self.kernel, self.limit, self.likelihood, self.bound = kernel, limit, likelihood, bound
        self.inference, self.kept = inference, kept
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = 0.0
        self.epochs = 0
        self.state: State | None = None
        self.history: list[dict[str, float | str]] = []

    def resume(self, fitted: Fitted) -> bool:
        """Go on from a fit; False if its posterior is decoupled, and only its kernel is kept."""
        model, state = fitted.model, fitted.state
        if state is None or not isinstance(model, Model):
            return False
        self.kernel = state.kernels[0]
        if len(state.theta) > 1 or state.q.h.shape[1] != len(state.Z):
            return False
        self.state, self.seen, self.kept = state, fitted.total, model.kept
        self.limit = max(self.limit, len(state.Z))
        return True

    def learn(
        self,
        data: Data,
        mean: Tensor,
        *,
        learn_kernel: bool,
        learn_mean: bool,
        learning_rate: float,
        batch_size: int | None,
        options: FitOptions,
    ) -> Fitted:
        """Take in one batch of rows, `batch_size` of them at a time."""
        settings = Settings(
            self.likelihood,
            self.bound,
            learn_kernel,
            learn_mean,
            learning_rate=learning_rate,
            kept=self.kept,
            inference=self.inference,
            **{**knobs_of(options), "kernel_prior": 0.0},
        )
        size, elbo = batch_size or len(data.y), math.nan
        state, seen = self.state, self.seen
        for i in range(0, len(data.y), size):
            part = data.rows(i, i + size)
            if state is None:
                state = self._started(part, mean, options.initial_variance)
            else:
                state = self._grown(state, part, options)
            seen += part.total
            state, elbo = absorb(
                state,
                part,
                settings,
                self.generator,
                share=part.total / seen,
                n_steps=_STEPS,
                on_progress=self._report,
            )
        assert state is not None
        # All at once, so that a failure or Ctrl-C on the way leaves the stream as it was.
        self.state, self.seen, self.epochs = state, seen, self.epochs + 1
        model = coupled(state, self.likelihood, self.bound, options.jitter)
        model = replace(model, kept=self.kept)
        if self.kept < 1.0:  # what was raised is another bound (Q9)
            kl = model.kl()
            elbo = (model.elbo(part) + kl) * (seen / part.total) - kl
        return Fitted(model, elbo, self.epochs, True, self.state, list(self.history), self.seen)

    def _report(self, p: Progress) -> None:
        self.history.append(p._asdict())

    def _started(self, data: Data, mean: Tensor, variance: float | None) -> State:
        kernel = filled(self.kernel if self.kernel is not None else RBF(), data, variance or 10.0)
        n = min(self.limit, len(data.y))
        Z = inducing.choose("kmeans", data.X, data.weight, n, kernel, self.generator)
        return initial_state([kernel], Z, mean.clone())

    def _grown(self, state: State, data: Data, options: FitOptions) -> State:
        """Add the rows that the present inducing points explain least.

        In whitened coordinates new points come last and leave the old coordinates as they were,
        so the posterior only gains coordinates at their prior.
        """
        theta, Z, mean = state.theta.clone(), state.Z.clone(), state.mean.clone()
        state = replace(state, theta=theta, Z=Z, mean=mean)
        room = self.limit - len(state.Z)
        if room <= 0:
            return state
        f = features(basis(state.kernels, state.Z, options.jitter), data.X)
        share = f.residual[0] / state.kernels[0].diag(data.X)
        order = torch.argsort(share, descending=True)
        new = torch.unique(data.X[order[share[order] > _MIN_SHARE][:room]], dim=0)
        C, M, k = len(state.mean), len(state.Z), len(new)
        grown = prior(C, M + k, state.Z)
        grown.h[:, :M] = state.q.h
        grown.P[:, :M, :M] = state.q.P
        return replace(state, Z=torch.cat([state.Z, new]), q=Posterior(grown.h, grown.P))
