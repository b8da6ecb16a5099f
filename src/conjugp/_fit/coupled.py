"""One set of inducing points for mean and covariance: the whole model by its ELBO."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conjugp._fit.base import (
    KERNEL_CLASSES,
    Fitted,
    Fitter,
    estimated_elbo,
    largest_classes,
    only_classes,
    saturated,
    unseen,
)
from conjugp._fit.starts import ROWS, best_lengthscales
from conjugp._gp.features import basis, features
from conjugp._gp.model import coupled
from conjugp._gp.posterior import Posterior, marginals, moments, prior
from conjugp._gp.state import State
from conjugp._gp.temperature import Calibration, fit_calibration, variance_scales
from conjugp._inference import svi
from conjugp._inference.settings import Result, Settings
from conjugp._inference.train import Interrupted, train
from conjugp._rows.dataset import Data, Dataset
from conjugp.kernels import RBF, Kernel
from conjugp.likelihoods._base import Likelihood

# Of the kernel with which minibatches start: its variance, and its length in median distances.
FIRST_VARIANCE, FIRST_LENGTH = 3.0, 0.25
LEAST_CHUNK, HELD_CHUNK = 64, 1024  # held-out rows at a time
# Of the variance given the inducing points rows keep this many times M/N, and at least so much.
KEPT, LEAST_KEPT = 3.0, 0.05
SCALE_ROWS = 2048  # that choose how much of the variance counts in such fits
LIKELIHOOD_ROWS = 10_000  # on which a likelihood's own parameters are learned
LEARNED_AGAIN = 10  # rows for each learned number from which on it stays at rest in folds
LIKELIHOOD_ROUNDS = 3  # fits in turn of q and of a likelihood's own parameters


class CoupledFit(Fitter):
    """By natural gradients and Adam, or by expectation propagation."""

    def _run(self, warm: State | None) -> Fitted:
        p, data = self.plan, self.data
        full = p.batch_size is None or p.batch_size >= data.n
        calibrate = p.temperature is None
        rows, held = data, None
        if calibrate and not full:
            rows, held, data = data.hold_out(p.options.hold_out)
        self.data = data
        if held is not None and not held.n:  # with too few rows for a hold-out, folds do instead
            held = None
        # A variance given asks for the usual start, as the paper has it, and for the usual Adam.
        usual = full or bool(p.options.initial_variance)
        state = None if warm is None else self._resumed(warm, rows, not usual)
        if state is None:
            kernel = self._first_kernel(rows, full)
            state = self._start(rows, kernel, p.n_inducing, self.mean, not usual)
        # What is learned changes it in place.
        first = replace(state, **{x: getattr(state, x).clone() for x in ("theta", "Z", "mean")})
        self.kept = self._share_kept(usual, len(state.Z) / data.n)
        settings = self._settings(learning_rate=(2 if full else 1) * p.learning_rate)
        if not usual:
            settings = replace(
                settings,
                kernel_rate=kernel_rate(state),
                inducing_rate=0.5,
                momentum=0.8,
                settled=2,
            )
        result = self._train(state, rows, settings, "fit")
        if full and p.inference != "ep" and p.bound in p.likelihood.conjugate:
            result = self._better_optimum(result, rows, settings)
        for _ in range(LIKELIHOOD_ROUNDS):
            if not self._learn_likelihood(result.state, rows):
                break
            p = self.plan
            settings = replace(settings, likelihood=p.likelihood, first_step=20)
            result = self._train(result.state, rows, settings, "fit")
        last_state = result.state
        calibration = Calibration(p.temperature or 1.0, 1.0, math.inf)
        if held is not None:
            # The held-out rows are trained on after all, the kernel at rest. Steps are as short as
            # the last ones were: what q knows counts as much as the batches that it remembers.
            last_state, calibration = self._taken_in(last_state, held, data.total)
            rest = self._settings(
                learn_kernel=False,
                learn_mean=False,
                learn_inducing=False,
                max_steps=max(7, min(50, last_state.step // 4)),
                min_step=0.02,
                step_exponent=1.0,
                first_step=max(1, round(last_state.step**p.options.step_exponent)),
            )
            last_state = self._train(last_state, data, rest, "all rows").state
        elif calibrate:
            calibration = self._cross_fit(first, settings, result.state, data.head(data.n))
        model = replace(
            coupled(last_state, p.likelihood, p.bound, p.options.jitter),
            calibration=data.group.same(calibration),
            shares=self.shares,
            kept=self.kept,
        )
        # Expectation propagation reports an evidence that is no bound.
        known = full and p.inference != "ep" and self.kept == 1.0
        elbo = result.elbo if known else estimated_elbo(model, data)
        return Fitted(
            model,
            elbo,
            result.epochs,
            result.converged,
            last_state,
            self.history,
            data.total,
            result.class_gap,
            saturated(model, data),
        )

    def _first_kernel(self, data: Dataset, full: bool) -> Kernel:
        """Where a coupled fit starts, of what the user left open."""
        variance = self.plan.options.initial_variance
        if variance:
            return self._filled(variance)
        # A kernel that starts too short learns faster than one that starts too long.
        if full:
            return self._filled(10.0, 0.5)
        kernel = self.kernel if self.kernel is not None else RBF()
        some = data.head(ROWS) if data.n_classes <= KERNEL_CLASSES else data.sample()
        few = only_classes(some, largest_classes(some, KERNEL_CLASSES))
        scale = torch.as_tensor(self.scaling.scale)
        lengths = best_lengthscales(kernel, few, scale, FIRST_VARIANCE)
        lengths = data.group.same_tensor(lengths)
        return kernel.filled(FIRST_LENGTH * lengths, FIRST_VARIANCE)

    def _resumed(self, warm: State, data: Dataset, by_class: bool) -> State | None:
        """A copy of an earlier fit's state that fits this plan; None if there is none."""
        K, X = 1 if self.plan.shared_kernel else data.n_classes, data.like
        if len(warm.theta) != K:
            return None
        if warm.q.h.shape[1] != len(warm.Z):  # the earlier fit was decoupled
            kernel = warm.template.with_theta(warm.theta[0]).frozen()
            return self._start(data, kernel, self.plan.n_inducing, warm.mean.to(X), by_class)
        theta, Z, mean = (t.to(X, copy=True) for t in (warm.theta, warm.Z, warm.mean))
        q = Posterior(warm.q.h.to(X), warm.q.P.to(X))
        return State(warm.template, theta, Z, mean, q, warm.step)

    def _train(self, state: State, data: Dataset, settings: Settings, stage: str) -> Result:
        p = self.plan
        how = {"on_progress": self._progress, "stage": stage, "journal": self.journal}

        def keep(state: State) -> None:
            self._partial = lambda: (coupled(state, p.likelihood, p.bound, p.options.jitter), state)

        try:
            result = self.journal.stage(
                "trained", lambda: train(state, data, settings, self.generator, **how)
            )
        except Interrupted as stop:
            keep(stop.state)
            raise
        keep(result.state)
        return result

    def _better_optimum(self, result: Result, data: Dataset, settings: Settings) -> Result:
        """The fit, or the optimum of its bound near the q of the best bound, if that is higher.

        Where kernels are large these bounds have a second optimum in which all latents are far
        above zero, and nothing is learned (docs/math.md, The corner).
        """
        p, state = self.plan, result.state
        rest = replace(settings, learn_kernel=False, learn_mean=False, learn_inducing=False)
        q = prior(len(state.mean), len(state.Z), state.Z)
        for bound in (p.likelihood.bounds[0], p.bound):
            there = replace(rest, bound=bound)
            at = replace(state, q=q)
            other = self._train(at, data, there, "another optimum")
            q = other.state.q
        # Both may be one optimum, as far as a fit goes to its end.
        if other.elbo > result.elbo + p.tol * data.total:
            return replace(result, state=other.state, elbo=other.elbo, converged=other.converged)
        return result

    def _share_kept(self, usual: bool, points: float) -> float:
        """The share of the variance given the inducing points that rows are fitted with (Q9).

        Less than all of it makes better means and worse variances. Held-out rows mend these, but
        for likelihoods with jumps, which live on them. With few rows for each of the `points`, the
        variance that they leave keeps these from fitting noise.
        """
        p, given = self.plan, self.plan.options.conditional_variance
        if given != "auto":
            return float(given)
        if usual or p.inference == "ep" or not p.likelihood.smooth:
            return 1.0
        if p.temperature is not None or not p.learn_kernel:
            return 1.0
        return min(1.0, max(LEAST_KEPT, KEPT * points))

    def _taken_in(self, state: State, held: Data, total: float) -> tuple[State, Calibration]:
        """q after one step on all held-out rows (Q1-Q4), and a temperature from them before it.

        The latents that a temperature needs are most of such a step. Expectation propagation has
        other sites, and where classes are sampled a step on all of them would take too long.
        """
        p = self.plan
        if p.inference == "ep" or p.class_batch is not None:
            m, v = coupled(state, p.likelihood, p.bound, p.options.jitter).latent(held.X)
            return state, self._calibration(m, v, held)
        b, q = basis(state.kernels, state.Z, p.options.jitter), moments(state.q)
        batch = p.batch_size or held.n
        size, latents = max(LEAST_CHUNK, min(batch, HELD_CHUNK)), list[tuple[Tensor, Tensor]]()

        def statistics() -> Iterator[svi.Statistics]:
            for i in range(0, held.n, size):
                part = held.rows(i, i + size)
                f = features(b, part.X)
                m, v, _ = marginals(q, f)
                m = m + state.mean
                latents.append((m, v))
                v = v - (1.0 - self.kept) * f.residual.T
                site = svi.clamp(p.likelihood.site(part.y, m, v, p.bound), m, batch=True)
                yield svi.statistics(f, site, state.mean, part.weight)

        # A step of size rho leaves 1/rho batches in q, about half of them by another kernel.
        remembered = 0.5 * batch * max(1, state.step) ** p.options.step_exponent
        rho = min(0.5, held.n / (held.n + remembered))
        new = svi.update(state.q, svi.add(statistics()), total / held.total, rho)
        m, v = (torch.cat(column) for column in zip(*latents, strict=True))
        calibration = self._calibration(m, v, held)
        # Ranks compute alike; where their machines round differently, rank 0's is taken.
        new = Posterior(*map(self.data.group.same_tensor, new))
        if bool(torch.isfinite(new.h).all() & torch.isfinite(new.P).all()):
            return replace(state, q=new), calibration
        return state, calibration

    def _calibration(self, m: Tensor, v: Tensor, held: Data) -> Calibration:
        """A temperature and, where q was fitted with less than all its variance, how much counts.

        A few rows choose that share: going through all of them for each takes as long as steps.
        """
        like, scales = self.plan.likelihood, variance_scales("full", self.kept)
        if len(scales) > 1:
            few, n = held.rows(0, SCALE_ROWS), SCALE_ROWS
            found = fit_calibration(like, m[:n], v[:n], few.y, few.weight, scales, self.shares)
            scales = (found.variance_scale,)
        return fit_calibration(like, m, v, held.y, held.weight, scales, self.shares)

    def _learn_likelihood(self, state: State, data: Dataset) -> bool:
        """Fit the likelihood's own parameters to what the rows' latents are; False if it has none.

        Not before q is fitted: at the prior any label is as likely as any other.
        """
        p = self.plan
        if type(p.likelihood).learned is Likelihood.learned:
            return False
        part = data.head(LIKELIHOOD_ROWS)
        m, v = coupled(state, p.likelihood, p.bound, p.options.jitter).latent(part.X)
        learned = p.likelihood.learned(part.y, m, v, part.weight)
        self.plan = replace(p, likelihood=learned)
        return learned is not p.likelihood

    def _cross_fit(self, first: State, learning: Settings, state: State, data: Data) -> Calibration:
        """A temperature from folds: q fitted again without each.

        Kernel and points stay at rest, unless they are so many numbers for so few rows that they
        know the labels of the fold: then all is learned again, from the first state on.
        """
        p = self.plan
        settings = self._settings(
            learn_kernel=False,
            learn_mean=False,
            learn_inducing=False,
            max_epochs=30,
            tol=0.1,
            rough=True,
        )
        numbers = state.theta.numel() * p.learn_kernel + state.mean.numel() * p.learn_mean
        again = numbers * LEARNED_AGAIN > data.n
        learning = replace(learning, max_epochs=math.ceil(0.5 * p.max_epochs), rough=True)

        def predict(rows: Tensor) -> tuple[Tensor, Tensor]:
            rest = data._replace(weight=data.weight * ~rows)

            def fit() -> Result:
                at = first if again else state
                fresh = replace(
                    at, theta=at.theta.clone(), Z=at.Z.clone(), mean=at.mean.clone(), step=0
                )
                fresh.q = prior(len(at.mean), len(at.Z), at.Z)
                how = learning if again else settings
                return train(fresh, rest, how, self.generator, journal=self.journal)

            fitted = self.journal.stage("fold", fit).state
            model = coupled(fitted, p.likelihood, p.bound, p.options.jitter)
            return model.latent(unseen(data, rows))

        return self._folded(data, predict, variance_scales("full", self.kept))


def kernel_rate(state: State) -> float:
    """What to multiply Adam's rate by for kernels with a lengthscale for every feature.

    Adam moves each of them by about its rate, be the gradient signal or noise. Distances sum over
    all, and get noise that grows with the root of their number.
    """
    n_features = state.Z.shape[1]
    alike = state.theta.shape[1] <= max(2, n_features)
    return 1.0 if alike else min(2.0, math.sqrt(50 / n_features))
