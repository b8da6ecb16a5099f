"""The minibatch step that looks at the labels of its batch and a sample of the other classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conjugp._gp.features import basis, features, own_features
from conjugp._gp.posterior import Moments, Posterior, class_kl, marginals, moments
from conjugp._inference import classes, svi
from conjugp._inference.moving import Moving, bare, finite
from conjugp._inference.steps import Batch, MinibatchStep, Sizes
from conjugp._rows.dataset import Dataset
from conjugp.likelihoods._logistic_softmax import LogisticSoftmax

_OWN_ROWS = 4  # that each class brings beside those in the batch
_GAP_ROWS = 512  # that stand for all when the price of subsampling classes is computed
_CHUNK = 128  # classes at a time where all are needed


class SampledClassesStep(MinibatchStep):
    """A step on some of the classes (C1-C4).

    It keeps of every row its T and of every class its KL. q is changed in place, class by class. A
    fit that goes back to an earlier state takes back its hyperparameters only: in whitened
    coordinates q goes with any.
    """

    def __init__(
        self, moving: Moving, data: Dataset, n_others: int, generator: torch.Generator
    ) -> None:
        self.moving, self.data = moving, data
        self.n_others, self.generator = n_others, generator
        moving.own_q()
        s, cfg = moving.state, moving.settings
        assert isinstance(cfg.likelihood, LogisticSoftmax)
        self.likelihood = cfg.likelihood
        self._kl = torch.cat([class_kl(q) for q in self._all_moments()])
        self.touched = torch.zeros(data.n_classes, device=s.Z.device)  # steps of every class
        y, weight = data.labels(0, data.n)
        self._by_class = classes.RowsByClass(y, data.n_classes)
        sample = data.sample()
        self._near = classes.near_classes(s.kernels[0], sample.X, sample.y, data.n_classes)
        with torch.no_grad():
            variance = float(s.kernels[0].diag(data.head(_GAP_ROWS).X).mean())
        total = self.likelihood.start_total(cfg.bound, s.mean.detach(), variance)
        self.multipliers = classes.Multipliers(torch.full_like(weight, total))

    def state(self) -> list[Any]:
        """What it keeps beside the state."""
        return [self._kl, self.touched, self.multipliers.total]

    def restore(self, state: list[Any]) -> None:
        """Go back there."""
        self._kl, self.touched, self.multipliers.total = state

    def take(self, batch: Batch, sizes: Sizes) -> float:
        """One step on these rows; an estimate of the ELBO before.

        While `left` is 1 it believes its own sample about T: what rows keep is an epoch old, and
        would hold the hyperparameters back.
        """
        moving, s, left = self.moving, self.moving.state, sizes.left
        drawn = classes.draw_classes(
            batch.data.y, self.data.n_classes, self.n_others, self.generator, self._near
        )
        q = Posterior(s.q.h[drawn.index], s.q.P[drawn.index])
        look, known = self._look(batch, drawn, moments(q), left)
        elbo = batch.scale * float(look.statistics.bound) - float(self._kl.sum())
        # A class that has been in few steps takes larger ones.
        rho = (moving.settings.first_step + self.touched[drawn.index]) ** (
            -moving.settings.step_exponent
        )
        rho = rho.clamp(min=sizes.least).to(q.h) * known
        svi.update_in_place(q, look.statistics.h, look.statistics.P, rho)
        finite(elbo + float(q.h.sum() + q.P.sum()))
        s.q.h[drawn.index], s.q.P[drawn.index] = q
        self.touched[drawn.index] += 1
        exact = len(drawn.index) == self.data.n_classes
        share = 1.0 if exact else max(left, classes.AVERAGE)
        self.multipliers.update(batch.rows, look.part.total, share)
        s.step += 1
        if look.gradients is not None:
            moving.move(sizes.rate)
        return elbo

    def _look(
        self, batch: Batch, drawn: classes.ClassBatch, q: Moments, left: float
    ) -> tuple[classes.ClassPass, torch.Tensor]:
        """What batch and rows of the classes themselves say, gradients into the leaves too.

        And for which classes the batch has rows of others, (K,).
        """
        moving, part = self.moving, batch.data
        own_rows = self._by_class.draw(drawn.index, _OWN_ROWS, self.generator)
        stands = classes.balance(drawn, self._by_class, _OWN_ROWS)
        gradients = moving.settled
        b, f = moving.features(part.X, gradients)
        theirs = self.data.take(own_rows.flatten())
        look = classes.evaluate(
            q,
            self.likelihood,
            moving.settings.bound,
            drawn,
            self.data.n_classes,
            moving.state.mean.detach()[drawn.index],
            classes.ClassRows(
                bare(f), stands.batch * part.weight.unsqueeze(1), self.multipliers.total[batch.rows]
            ),
            part.weight,
            classes.ClassRows(
                own_features(b, theirs.X.view(*own_rows.shape, -1)),
                stands.own * theirs.weight.view(own_rows.shape),
                self.multipliers.total[own_rows],
            ),
            left,
            gradients,
        )
        self._kl[drawn.index] = class_kl(q)
        if look.gradients is not None:
            mean = torch.zeros_like(self._kl)
            mean[drawn.index] = look.gradients.mean
            moving.collect(f, look.gradients._replace(mean=mean), batch.scale)
        return look, stands.known

    @torch.no_grad()
    def gap(self) -> float:
        """How far the bound of a row lies below what the sum over all classes gives (C3)."""
        s, cfg, part = self.moving.state, self.moving.settings, self.data.head(_GAP_ROWS)
        f = features(basis(s.kernels, s.Z, cfg.jitter, cfg.kept), part.X)
        total = torch.zeros_like(part.weight)
        for q, mean in zip(self._all_moments(), s.mean.split(_CHUNK), strict=True):
            m, v, _ = marginals(q, f)
            total += self.likelihood.total(m + mean, v, cfg.bound)
        mine = self.multipliers.total[: len(total)]
        return float(self.likelihood.shortfall(mine, total, cfg.bound, len(s.mean)).mean())

    def _all_moments(self) -> Iterator[Moments]:
        """q solved for its marginals, a few classes at a time."""
        q = self.moving.state.q
        for h, P in zip(q.h.split(_CHUNK), q.P.split(_CHUNK), strict=True):
            yield moments(Posterior(h, P))
