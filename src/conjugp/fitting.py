"""From training rows to a calibrated model: which fit, in which order, on which rows.

Coupled: one set of inducing points for mean and covariance, the whole model by its ELBO.
Decoupled: a small coupled fit learns the kernel, held-out points settle scales and lengthscale,
the mean is fitted on thousands of inducing points and the covariance added (docs/defaults.md).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conjugp import decoupled, inducing
from conjugp.calibration import VARIANCE_SCALES, Calibration, fit_calibration
from conjugp.checkpoint import Journal
from conjugp.covariance import NONE
from conjugp.data import Data, Dataset, class_rank
from conjugp.decoupled import KernelRows, MeanSettings
from conjugp.deferred import Deferred
from conjugp.ep_training import EPTrainer
from conjugp.features import basis, features
from conjugp.inference import svi
from conjugp.inference.mean import Interrupted
from conjugp.joint import JointSettings, learn_kernel
from conjugp.kernels import RBF, Kernel, Matern52, Normalised
from conjugp.likelihoods.base import Likelihood
from conjugp.model import Model, coupled
from conjugp.plan import Plan
from conjugp.posterior import Posterior, marginals, moments, prior
from conjugp.scaling import Scaling
from conjugp.search import Candidate, class_centres, held_out_loss, rescaled, search
from conjugp.starts import ROWS, best_lengthscales, lengthscales, median_distance
from conjugp.training import Progress, Result, Settings, State, Trainer, initial_state

# Of the kernel with which minibatches start: its variance, and its length in median distances.
FIRST_VARIANCE, FIRST_LENGTH = 3.0, 0.25
KERNEL_INDUCING = 128  # inducing points, steps, classes of the fit that learns the kernel
KERNEL_STEPS = 200
KERNEL_CLASSES = 10
JOINT_INDUCING, JOINT_STEPS = 1000, 200  # of the fit in which a decoupled ELBO learns the kernel
RELEVANCE_CLASSES = 50  # beyond so many classes, what tells ten of them apart is not tried
REFIT_ROWS = 20_000  # up to here the last fit to all rows starts afresh
SEARCH_ROWS, SEARCH_INDUCING, SEARCH_CLASSES = 8000, 800, 250
SEARCH_EPOCHS, GLANCE_EPOCHS = 10, 4
REFINE_ROWS, REFINE_INDUCING = 24_000, 2400  # for a last look at the lengthscale
SPHERE_FEATURES = 16  # from here on the rows may be an embedding, of which directions matter
ELBO_ROWS, ELBO_PAIRS = 2048, 2**20  # rows, times classes, that stand for all in the ELBO
LIKELIHOOD_ROWS = 10_000  # and where a likelihood's own parameters are learned
READS = 2  # epochs up to which rows are scaled whenever they are read
LEAST_CHUNK, HELD_CHUNK = 64, 1024  # held-out rows at a time
# Of the variance given the inducing points rows keep this many times M/N, and at least so much.
KEPT, LEAST_KEPT = 3.0, 0.05
SCALES, SCALE_ROWS = (0.1, 1.0), 2048  # shares of the variance for such fits, and who chooses
FOLDS = 5
LIKELIHOOD_ROUNDS = 3  # fits in turn of q and of a likelihood's own parameters
CROSS_FIT_ROWS = 5000  # up to here folds, not one hold-out, give the temperature
FACTORS = (0.12, 0.17, 0.25, 0.36, 0.5, 0.72, 1.0, 1.4, 2.0)
FIRST_FACTORS = (3, 5)  # a third, and twice that: with many classes kernels are smooth


@dataclass
class Fitted:
    """What a fit leaves behind."""

    model: Model
    calibration: Calibration
    elbo: float
    epochs: float
    converged: bool
    state: State | None  # for going on
    history: list[dict[str, float | str]] = field(default_factory=list)
    total: float = 0.0  # weight of the rows
    class_gap: float = 0.0  # what sampling classes cost, in nats per row (docs/math.md, C3)


class Fitter:
    """Runs a plan on data; after Ctrl-C `salvage` gives the last good state."""

    def __init__(
        self,
        plan: Plan,
        kernel: Kernel | None,
        data: Dataset,
        mean: Tensor,
        scaling: Scaling,
        on_progress: Callable[[Progress], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.plan, self.kernel, self.data, self.mean = plan, kernel, data, mean
        self.scaling = scaling  # how the rows came to be; a fit may choose another origin
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.history: list[dict[str, float | str]] = []
        self.journal = journal or Journal()
        self.journal.follow(self.generator, self.history)
        self.began = time.perf_counter() - self.journal.seconds
        self._on_progress = on_progress
        self._trainer = EPTrainer if plan.inference == "ep" else Trainer
        self._partial: Callable[[], tuple[Model, State]] | None = None
        self._class_gap = 0.0

    def run(self, warm: State | None = None) -> Fitted:
        """The whole fit."""
        if self.plan.family == "coupled":
            return self._coupled(warm)
        return self._decoupled(warm)

    def salvage(self) -> Fitted | None:
        """The last good state as a model, uncalibrated; None if there is none yet."""
        if self._partial is None:
            return None
        model, state = self._partial()
        data, plain = self.data, Calibration(self.plan.temperature or 1.0, 1.0, math.inf)
        elbo = estimated_elbo(model, data)
        return Fitted(model, plain, elbo, 0, False, state, self.history, data.total)

    def _progress(self, p: Progress) -> None:
        seconds = time.perf_counter() - self.began
        self.history.append({**p._asdict(), "seconds": seconds})
        if self._on_progress is not None:
            self._on_progress(p)

    # --- coupled ------------------------------------------------------------------------------

    def _settings(self, **changes: object) -> Settings:
        p = self.plan
        settings = Settings(
            p.likelihood,
            p.bound,
            p.learn_kernel,
            p.learn_mean,
            p.learn_inducing,
            p.learning_rate,
            p.batch_size,
            class_batch=p.class_batch,
            max_epochs=p.max_epochs,
            tol=p.tol,
            step_exponent=p.options.step_exponent,
            min_step=p.options.min_step,
            chunk_size=p.options.chunk_size,
            kernel_prior=p.options.kernel_prior,
            jitter=p.options.jitter,
            local_steps=p.options.local_steps,
        )
        return replace(settings, **changes)  # type: ignore[arg-type]

    def _start(
        self,
        data: Dataset,
        kernel: Kernel,
        n_inducing: int,
        mean: Tensor,
        by_class: bool = False,
    ) -> State:
        p = self.plan
        if isinstance(p.inducing, Tensor):
            few = torch.randperm(len(p.inducing), generator=self.generator)[:n_inducing]
            few = few.to(data.like.device)
            Z = p.inducing if n_inducing >= len(p.inducing) else p.inducing[few]
        else:
            if by_class and p.inducing == "kmeans":
                labelled = data.sampled() if isinstance(data, Deferred) else data.sample()
                Z = class_centres(kernel, labelled, n_inducing, self.generator)
            else:
                X, _, weight, _ = data.sample()
                Z = inducing.choose(p.inducing, X, weight, n_inducing, kernel, self.generator)
            Z = data.group.same_tensor(Z)
        kernels = [kernel] * (1 if p.shared_kernel else data.n_classes)
        return initial_state(kernels, Z, mean.clone())

    def _train(self, state: State, data: Dataset, settings: Settings, stage: str) -> Result:
        p = self.plan
        trainer = self._trainer(state, data, settings, self.generator, self._progress, stage)
        self._partial = lambda: (
            coupled(trainer.state, p.likelihood, p.bound, p.options.jitter),
            trainer.state,
        )
        result = self.journal.stage("trained", lambda: trainer.fit(self.journal))
        trainer.state = result.state
        return result

    def _filled(self, variance: float, factor: float = 1.0) -> Kernel:
        """The kernel with what the user left open: a share of the median distance, a variance."""
        kernel = self.kernel if self.kernel is not None else RBF()
        X = self.data.head(1000).X
        d = factor * median_distance(X)
        return kernel.filled(torch.full((X.shape[1],), d, dtype=torch.float64), variance)

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

    def _coupled(self, warm: State | None) -> Fitted:
        p, data = self.plan, self.data
        full = p.batch_size is None or p.batch_size >= data.n
        calibrate = p.temperature is None
        train, held = data, None
        if calibrate and not full:
            train, held, data = data.hold_out(p.options.hold_out)
        often = full or p.max_epochs > READS or p.class_batch is not None or p.inference == "ep"
        if isinstance(data, Deferred) and often:
            data = data.rows(0, None)
            train = data.rows(0, train.n)
        self.data = data
        if held is not None and not held.n:  # with too few rows for a hold-out, folds do instead
            held = None
        # A variance given asks for the usual start, as the paper has it, and for the usual Adam.
        usual = full or bool(p.options.initial_variance)
        state = None if warm is None else self._resumed(warm, train, not usual)
        if state is None:
            kernel = self._first_kernel(train, full)
            state = self._start(train, kernel, p.n_inducing, self.mean, not usual)
        kept = self._kept(usual, len(state.Z) / data.n)
        settings = self._settings(learning_rate=(2 if full else 1) * p.learning_rate, kept=kept)
        if not usual:
            settings = replace(
                settings,
                kernel_rate=kernel_rate(state),
                inducing_rate=0.5,
                momentum=0.8,
                settled=2,
            )
        result = self._train(state, train, settings, "fit")
        for _ in range(LIKELIHOOD_ROUNDS):
            if not self._learn_likelihood(result.state, train):
                break
            p = self.plan
            settings = replace(settings, likelihood=p.likelihood, first_step=20)
            result = self._train(result.state, train, settings, "fit")
        last_state = result.state
        calibration = Calibration(p.temperature or 1.0, 1.0, math.inf)
        if held is not None:
            # The held-out rows are trained on after all, the kernel at rest. Steps are as short as
            # the last ones were: what q knows counts as much as the batches that it remembers.
            last_state, calibration = self._taken_in(last_state, held, data.total, kept)
            rest = self._settings(
                learn_kernel=False,
                learn_mean=False,
                learn_inducing=False,
                max_steps=max(7, min(50, last_state.step // 4)),
                min_step=0.02,
                step_exponent=1.0,
                first_step=max(1, round(last_state.step**p.options.step_exponent)),
                kept=kept,
            )
            last_state = self._train(last_state, data, rest, "all rows").state
        elif calibrate:
            calibration = self._cross_fit(result.state, data.head(data.n), kept)
        model = coupled(last_state, p.likelihood, p.bound, p.options.jitter)
        # Expectation propagation reports an evidence that is no bound.
        known = full and p.inference != "ep" and kept == 1.0
        elbo = result.elbo if known else estimated_elbo(model, data)
        return Fitted(
            model,
            data.group.same(calibration),
            elbo,
            result.epochs,
            result.converged,
            last_state,
            self.history,
            data.total,
            result.class_gap,
        )

    def _kept(self, usual: bool, points: float) -> float:
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

    def _taken_in(
        self, state: State, held: Data, total: float, kept: float
    ) -> tuple[State, Calibration]:
        """q after one step on all held-out rows (Q1-Q4), and a temperature from them before it.

        The latents that a temperature needs are most of such a step. Expectation propagation has
        other sites, and where classes are sampled a step on all of them would take too long.
        """
        p = self.plan
        if p.inference == "ep" or p.class_batch is not None:
            m, v = coupled(state, p.likelihood, p.bound, p.options.jitter).latent(held.X)
            return state, self._calibration(m, v, held, kept)
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
                v = v - (1.0 - kept) * f.residual.T
                site = svi.clamp(p.likelihood.site(part.y, m, v, p.bound), m)
                yield svi.statistics(f, site, state.mean, part.weight)

        # A step of size rho leaves 1/rho batches in q, about half of them by another kernel.
        remembered = 0.5 * batch * max(1, state.step) ** p.options.step_exponent
        rho = min(0.5, held.n / (held.n + remembered))
        new = svi.update(state.q, svi.add(statistics()), total / held.total, rho)
        m, v = (torch.cat(column) for column in zip(*latents, strict=True))
        calibration = self._calibration(m, v, held, kept)
        # Ranks compute alike; where their machines round differently, rank 0's is taken.
        new = Posterior(*map(self.data.group.same_tensor, new))
        if bool(torch.isfinite(new.h).all() & torch.isfinite(new.P).all()):
            return replace(state, q=new), calibration
        return state, calibration

    def _calibration(self, m: Tensor, v: Tensor, held: Data, kept: float) -> Calibration:
        """A temperature and, where q was fitted with less than all its variance, how much counts.

        A few rows choose that share: going through all of them for each takes as long as steps.
        """
        like, scale = self.plan.likelihood, 1.0
        if kept < 1.0:
            few, n = held.rows(0, SCALE_ROWS), SCALE_ROWS
            found = fit_calibration(like, m[:n], v[:n], few.y, few.weight, SCALES)
            scale = found.variance_scale
        return fit_calibration(like, m, v, held.y, held.weight, (scale,))

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

    def _cross_fit(self, state: State, data: Data, kept: float) -> Calibration:
        """A temperature from folds: q fitted again without each, kernel and points at rest."""
        p = self.plan
        settings = self._settings(
            learn_kernel=False,
            learn_mean=False,
            learn_inducing=False,
            max_epochs=30,
            tol=0.1,
            kept=kept,
        )

        def predict(rows: Tensor) -> tuple[Tensor, Tensor]:
            train = data._replace(weight=data.weight * ~rows)
            fresh = replace(state, q=prior(len(state.mean), len(state.Z), state.Z), step=0)
            trainer = self._trainer(fresh, train, settings, self.generator)
            fitted = self.journal.stage("fold", lambda: trainer.fit(self.journal)).state
            return coupled(fitted, p.likelihood, p.bound, p.options.jitter).latent(data.X[rows])

        return self._folded(data, predict, (1.0,) if kept == 1.0 else SCALES)

    def _folded(
        self,
        data: Data,
        predict: Callable[[Tensor], tuple[Tensor, Tensor]],
        scales: tuple[float, ...],
    ) -> Calibration:
        """The calibration of every fold's latent moments, predicted without its rows."""
        masks = folds(data)
        if not masks:
            return Calibration(1.0, 1.0, math.inf)
        m, v = (torch.cat(part) for part in zip(*map(predict, masks), strict=True))
        i = torch.cat([mask.nonzero()[:, 0] for mask in masks])
        return fit_calibration(self.plan.likelihood, m, v, data.y[i], data.weight[i], scales)

    # --- decoupled ----------------------------------------------------------------------------

    def _decoupled(self, warm: State | None) -> Fitted:
        p = self.plan
        # Few rows are all trained on in the end, so more of them can choose the kernel.
        share = max(p.options.hold_out, min(0.3, 500 / self.data.n))
        train, held, data = self.data.hold_out(share)
        if isinstance(data, Deferred):
            data = data.rows(0, None)
            train, held = data.rows(0, train.n), data.rows(train.n, None)
        self.data = data
        by_elbo = p.learn_kernel and p.options.mean_training == "elbo" and p.family != NONE
        if warm is not None:
            kernel = warm.template.with_theta(warm.theta[0])
        elif p.learn_kernel and (p.options.search or not by_elbo):
            kernel = self._choose_kernel(train.sample(), held)
            kernel = self._agreed(kernel, train)
            if self.kernel is None and isinstance(kernel, Normalised):
                train, held = train.shifted(self._origin(train.like)), self._uncentred(held)
                self._uncentre()
                p, data = self.plan, self.data
        else:
            kernel = self._filled(p.options.mean_variance)
        if by_elbo:
            kernel = self._learn_jointly(train, kernel)
        settings = self._mean_settings(data.n)
        if p.temperature is not None:
            calibration = Calibration(p.temperature, 1.0, math.inf)
        elif data.n <= CROSS_FIT_ROWS:
            calibration = self._cross_fit_mean(kernel, data.head(data.n))
        elif not held.n:  # no class has a row to spare
            calibration = Calibration(1.0, 1.0, math.inf)
        else:
            calibration = None
        part = train if calibration is None else data
        Z = self._inducing(kernel, part)
        rows = decoupled.kernel_rows(kernel, Z, data, settings)
        start = decoupled.start_mean(len(Z), self.mean)
        values: list[float] = []
        model = self._fit_mean(part, start, settings, rows, values)
        gain = (values[-1] - values[-2]) / part.total if len(values) > 1 else math.inf
        if calibration is None:
            m, v = model.latent(held.X)
            scales = variance_scales(model)
            calibration = fit_calibration(p.likelihood, m, v, held.y, held.weight, scales)
            # The held-out rows are trained on after all.
            if data.n <= REFIT_ROWS:
                values.clear()
            else:
                start = decoupled.Mean(model.w, model.mean)
                rate, n_epochs = 0.1 * settings.learning_rate, min(2, settings.n_epochs)
                settings = replace(settings, n_epochs=n_epochs, learning_rate=rate)
            model = self._fit_mean(data, start, settings, rows, values, "all rows")
        state = without_posterior(model)
        # Steps shrink to nothing over the epochs: a fit that had them all has converged.
        converged = gain < 10 * p.tol or p.max_epochs >= self._mean_epochs(data.n)
        elbo = estimated_elbo(model, data)
        total, calibration = data.total, data.group.same(calibration)
        epochs, gap = len(values), self._class_gap
        return Fitted(model, calibration, elbo, epochs, converged, state, self.history, total, gap)

    def _choose_kernel(self, train: Data, held: Data) -> Kernel:
        """Learn feature scales by a small ELBO, then try scales and lengthscales on held-out."""
        p = self.plan
        searched = p.options.search and held.n > 0
        if searched and self.kernel is None and train.n_classes > RELEVANCE_CLASSES:
            return self._search(self._starts(train, None), train, held)
        learned = self._learned_kernel(train)
        if not searched:
            return learned
        starts = [("learned", learned)]
        if self.kernel is None:
            starts = self._starts(train, torch.tensor(learned.lengthscale))  # type: ignore[attr-defined]
        return self._search(starts, train, held)

    def _agreed(self, kernel: Kernel, data: Dataset) -> Kernel:
        """Rank 0's choice: machines that round differently may choose differently."""
        if self.kernel is None or data.group.size == 1:
            return data.group.same(kernel)
        # A class of the user's own may not travel; its parameters do.
        return kernel.with_theta(data.group.same(kernel.theta)).frozen()

    def _learned_kernel(self, train: Data) -> Kernel:
        """The kernel that a small coupled fit to the largest classes learns."""
        p = self.plan
        few = only_classes(train, largest_classes(train, KERNEL_CLASSES))
        start = self._filled(10.0)
        state = self._start(few, start, KERNEL_INDUCING, self._mean_of(few))
        settings = self._settings(
            learn_inducing=False,
            batch_size=512,
            max_steps=KERNEL_STEPS,
            tol=0.0,
            learning_rate=0.5 * p.learning_rate,
        )
        trainer = Trainer(state, few, settings, self.generator, self._progress, "kernel")
        result = self.journal.stage("kernel", lambda: trainer.fit(self.journal))
        learned = result.state.template.with_theta(result.state.theta[0]).frozen()
        return self._supple(learned, few.rows(0, 1000).X)

    def _supple(self, kernel: Kernel, X: Tensor) -> Kernel:
        """The kernel with at least `mean_variance`, of what the user left open: as the mean wants.

        What few inducing points learn is small where they explain little.
        """
        if self.kernel is None:
            return kernel  # its variance is not used
        ones = torch.ones(X.shape[1], dtype=torch.float64)
        step = self.kernel.filled(ones, math.e).theta - self.kernel.filled(ones, 1.0).theta
        with torch.no_grad():
            variance = float(kernel.diag(X).double().mean())
        if not 0.0 < variance < self.plan.options.mean_variance:
            return kernel
        missing = math.log(self.plan.options.mean_variance / variance)
        return kernel.with_theta(kernel.theta + missing * step.to(kernel.theta)).frozen()

    def _learn_jointly(self, train: Dataset, kernel: Kernel) -> Kernel:
        """The kernel that the ELBO of the decoupled posterior itself learns (Q8)."""
        p = self.plan
        Z = self._inducing(kernel, train)[:JOINT_INDUCING]
        how = self._mean_settings(train.n, batch_size=p.batch_size or 512)
        rows = decoupled.kernel_rows(kernel, Z, train, how)
        model = self._fit_weights(train, decoupled.start_mean(len(Z), self.mean), how, rows)
        settings = JointSettings(
            replace(how, learning_rate=0.2 * how.learning_rate),
            JOINT_STEPS,
            0.5 * p.learning_rate,
            p.options.kernel_prior,
        )

        def report(step: int, value: float) -> None:
            self._progress(Progress("kernel", step, JOINT_STEPS, value))

        return self.journal.stage(
            "joint", lambda: learn_kernel(model, train, settings, self.generator, report).frozen()
        )

    def _mean_of(self, data: Data) -> Tensor:
        """The prior mean at the start of a fit to some of the classes."""
        if data.n_classes == self.data.n_classes:
            return self.mean
        start = self.plan.likelihood.start_mean(data.n_classes)
        return data.X.new_full((data.n_classes,), start)

    def _starts(self, train: Data, ard: Tensor | None) -> list[tuple[str, Kernel]]:
        """Which features are worth what: learned, all alike, as the user gave them, directions."""
        variance, D = self.plan.options.mean_variance, train.X.shape[1]
        scale = torch.as_tensor(self.scaling.scale)
        std, raw = (lengthscales(train.X, scale, share) for share in (0.0, 1.0))
        lengths = {"ard": ard, "std": std, "raw": raw}
        starts: list[tuple[str, Kernel]] = [
            (name, RBF(s, variance)) for name, s in lengths.items() if s is not None
        ]
        # Few features are not an embedding, and rows of unit length are directions already.
        if D >= SPHERE_FEATURES:
            sphere = Normalised(RBF(1.0, variance), self.scaling.scale)
            X = self._uncentred(train.rows(0, 1000)).X
            length = (X * scale.to(X)).norm(dim=1)
            if float(length.std()) > 1e-3 * float(length.mean()):
                gap = median_distance(sphere.directions(X))
                starts.append(("sphere", replace(sphere, kernel=RBF(gap, variance))))
        return starts

    def _uncentred(self, data: Data) -> Data:
        """The rows in working units with the user's origin."""
        return data.shifted(self._origin(data.like))

    def _origin(self, X: Tensor) -> Tensor:
        """What centring took from rows like X, (D,)."""
        return torch.as_tensor(self.scaling.shift / self.scaling.scale).to(X)

    def _uncentre(self) -> None:
        """Go back to the user's origin, with the rows and with inducing points that were given."""
        given = self.plan.inducing
        if isinstance(given, Tensor):
            self.plan = replace(self.plan, inducing=given + self._origin(given))
        self.data = self.data.shifted(self._origin(self.data.like))
        self.scaling = self.scaling.uncentred()

    def _search(self, starts: list[tuple[str, Kernel]], train: Data, held: Data) -> Kernel:
        """The kernel that predicts held-out rows best."""
        p, D = self.plan, train.X.shape[1]
        kept = largest_classes(train, SEARCH_CLASSES)
        train, held = only_classes(train, kept), only_classes(held, kept)
        mean = self._mean_of(train)

        def loss_at(kernel: Kernel, n: int, M: int, batch: int, n_epochs: int) -> float:
            a, b = train.rows(0, n), held.rows(0, n // 4)
            if self.kernel is None and isinstance(kernel, Normalised):
                a, b = self._uncentred(a), self._uncentred(b)
            M = min(M, a.n // 2 + 1)
            how = self._mean_settings(a.n, batch_size=batch, n_epochs=n_epochs)
            return self.journal.stage(
                "candidate",
                lambda: held_out_loss(kernel, a, b, mean, M, how, p.seed, self.journal),
            )

        def loss(kernel: Kernel, n_epochs: int = SEARCH_EPOCHS) -> float:
            return loss_at(kernel, SEARCH_ROWS, SEARCH_INDUCING, 256, n_epochs)

        def glance(kernel: Kernel) -> float:
            return loss(kernel, GLANCE_EPOCHS)

        def report(c: Candidate) -> None:
            value = -c.loss * held.total
            self._progress(Progress("search", 0, 0, value, "held-out log-likelihood"))

        best = search(starts, FACTORS, FIRST_FACTORS, loss, D, report, glance)
        if self.kernel is None:
            other = search([("rough", rough(best.kernel))], (1.0, 1.4), (0,), loss, D, report)
            best = min(best, other, key=lambda c: c.loss)
        return self._refined(best.kernel, train, held, loss_at, report)

    def _refined(
        self,
        kernel: Kernel,
        train: Data,
        held: Data,
        loss_at: Callable[[Kernel, int, int, int, int], float],
        report: Callable[[Candidate], None],
    ) -> Kernel:
        """The kernel, or the same a little longer or shorter: what many more rows say, if any."""
        if train.n < REFINE_ROWS or held.n < SEARCH_ROWS // 4:
            return kernel
        D = train.X.shape[1]

        def look(factor: float) -> Candidate:
            scaled = rescaled(kernel, factor, D)
            value = loss_at(scaled, REFINE_ROWS, REFINE_INDUCING, 512, SEARCH_EPOCHS)
            found = Candidate(scaled, value)
            report(found)
            return found

        best = look(1.0)
        for step in (1.4, 1 / 1.4):
            factor, other = step, look(step)
            if other.loss >= best.loss:
                continue
            while other.loss < best.loss:
                best, factor = other, factor * step
                other = look(factor)
            break
        return best.kernel

    def _mean_epochs(self, n: int) -> int:
        """Passes over n rows in which the mean is fitted."""
        n_epochs = 10 if n < 100_000 else 6
        # Classes of few rows would otherwise be in few steps.
        n_epochs = max(n_epochs, min(20, 160 * self.data.n_classes // n))
        # A few hundred steps, however large the batch.
        return max(n_epochs, 300 * (self.plan.batch_size or 0) // n)

    def _mean_settings(self, n: int, **changes: object) -> MeanSettings:
        p = self.plan
        n_epochs = math.ceil(min(p.max_epochs, self._mean_epochs(n)))
        batch = p.batch_size or max(256, min(8192, 2 ** round(math.log2(n_epochs * n / 500))))
        settings = MeanSettings(
            p.likelihood,
            p.bound,
            n_epochs=n_epochs,
            batch_size=batch,
            # Larger batches have less noise, and can afford larger steps.
            learning_rate=p.options.mean_learning_rate * min(2.0, max(1.0, batch / 1024) ** 0.5),
            learn_mean=p.learn_mean,
            class_batch=p.class_batch,
            cache_bytes=cache_bytes(p.options.cache_mb, self.data),
            jitter=p.options.jitter,
        )
        return replace(settings, **changes)  # type: ignore[arg-type]

    def _inducing(self, kernel: Kernel, data: Dataset) -> Tensor:
        p = self.plan
        if isinstance(p.inducing, Tensor):
            return p.inducing
        some = data.sample()
        if p.inducing != "kmeans":
            Z = inducing.choose(
                p.inducing, some.X, some.weight, p.n_inducing, kernel, self.generator
            )
        else:
            Z = class_centres(kernel, some, p.n_inducing, self.generator)
        # Ranks choose alike; where their machines round differently, rank 0's are taken.
        return data.group.same_tensor(Z)

    def _fit_mean(
        self,
        data: Dataset,
        start: decoupled.Mean,
        settings: MeanSettings,
        rows: KernelRows,
        values: list[float],
        stage: str = "fit",
    ) -> Model:
        """Mean, then covariance; under "elbo" the mean once more, given that covariance."""

        measure = "log posterior"

        def on_epoch(epoch: int, value: float) -> None:
            self._progress(Progress(stage, epoch + 1, settings.n_epochs, value, measure))

        model = self._fit_weights(data, start, settings, rows, on_epoch, values=values)
        if self.plan.options.mean_training == "elbo":
            start = decoupled.Mean(model.w, model.mean)
            measure = "ELBO of the mean"
            model = self._fit_weights(data, start, settings, rows, on_epoch, model, values)
        return model

    def _fit_weights(
        self,
        data: Dataset,
        start: decoupled.Mean,
        settings: MeanSettings,
        rows: KernelRows,
        on_epoch: Callable[[int, float], None] | None = None,
        under: Model | None = None,
        values: list[float] | None = None,
    ) -> Model:
        p, b = self.plan, rows.b
        kernel = b.kernels[0]

        def assemble(mean: decoupled.Mean) -> Model:
            n = 512 if p.options.n_covariance == "auto" else int(p.options.n_covariance)
            return decoupled.assemble(kernel, b, mean, data, p.family, n, p.likelihood, p.bound)

        def salvaged(mean: decoupled.Mean) -> tuple[Model, State]:
            model = assemble(mean)
            return model, without_posterior(model)

        def fit() -> decoupled.Mean:
            how = (settings, self.generator, on_epoch, under, rows, self.journal)
            return decoupled.fit_weights(kernel, b.Z, data, start, *how)[1]

        try:
            mean = self.journal.stage("mean", fit)
        except Interrupted as stop:
            stopped = stop.mean
            self._partial = lambda: salvaged(stopped)
            raise
        self._partial = lambda: salvaged(mean)
        self._class_gap = mean.class_gap
        if values is not None:
            values.extend(mean.values)
        return assemble(mean)

    def _cross_fit_mean(self, kernel: Kernel, data: Data) -> Calibration:
        """A temperature from folds, each predicted by a mean fitted to the others."""

        def predict(rows: Tensor) -> tuple[Tensor, Tensor]:
            train = Data(data.X[~rows], data.y[~rows], data.weight[~rows], data.n_classes)
            Z = self._inducing(kernel, train)
            start = decoupled.start_mean(len(Z), self.mean)
            settings = self._mean_settings(train.n)
            source = decoupled.kernel_rows(kernel, Z, train, settings)
            return self._fit_weights(train, start, settings, source).latent(data.X[rows])

        def fold(rows: Tensor) -> tuple[Tensor, Tensor]:
            return self.journal.stage("fold", lambda: predict(rows))

        return self._folded(data, fold, (0.0,) if self.plan.family == NONE else VARIANCE_SCALES)


def kernel_rate(state: State) -> float:
    """What to multiply Adam's rate by for kernels with a lengthscale for every feature.

    Adam moves each of them by about its rate, be the gradient signal or noise. Distances sum over
    all, and get noise that grows with the root of their number.
    """
    n_features = state.Z.shape[1]
    alike = state.theta.shape[1] <= max(2, n_features)
    return 1.0 if alike else min(2.0, math.sqrt(50 / n_features))


def variance_scales(model: Model, chosen: float = 1.0) -> tuple[float, ...]:
    """Shares of the latent variance that a calibration chooses from; once it had `chosen` one.

    All of it, if it was fitted so. A coupled fit of which less was chosen was fitted with less.
    """
    if model.S.family == NONE:
        return (0.0,)
    if model.S.family == "full":
        return (1.0,) if chosen == 1.0 else SCALES
    return VARIANCE_SCALES


def without_posterior(model: Model) -> State:
    """What a decoupled fit leaves to go on from: its kernel, inducing points and prior mean."""
    kernel, Z = model.kernels[0], model.Z
    theta = kernel.theta.to(Z).unsqueeze(0)
    return State(kernel, theta, Z, model.mean, prior(model.n_classes, 1, Z))


def estimated_elbo(model: Model, data: Dataset) -> float:
    """The ELBO, its sum over points taken from a sample where there are many."""
    part = data.head(min(ELBO_ROWS, max(1, ELBO_PAIRS // data.n_classes)))
    kl = model.kl()
    return (model.elbo(part) + kl) * (data.total / part.total) - kl


def folds(data: Data) -> list[Tensor]:
    """Masks of folds in which every class keeps rows outside; rarer classes are in none."""
    counts = torch.bincount(data.y, minlength=data.n_classes)
    rank = class_rank(data.y, data.n_classes)
    usable = counts[data.y] >= 3
    masks = [(rank % FOLDS == k) & usable for k in range(FOLDS)]
    return [mask for mask in masks if mask.any()]


def largest_classes(data: Data, most: int) -> Tensor | None:
    """The `most` largest classes; None if there are no more than that."""
    if data.n_classes <= most:
        return None
    counts = torch.bincount(data.y, minlength=data.n_classes)
    return counts.argsort(descending=True, stable=True)[:most]


def only_classes(data: Data, kept: Tensor | None) -> Data:
    """The rows of some classes, relabelled by their place among these."""
    if kept is None:
        return data
    label = torch.full((data.n_classes,), -1, device=data.y.device)
    label[kept] = torch.arange(len(kept), device=label.device)
    rows = label[data.y] >= 0
    return Data(data.X[rows], label[data.y][rows], data.weight[rows], len(kept))


def rough(kernel: Kernel) -> Kernel:
    """A Matérn 5/2 kernel with the parameters of an RBF, on the same inputs."""
    if isinstance(kernel, Normalised):
        return replace(kernel, kernel=rough(kernel.kernel))
    return Matern52(kernel.lengthscale, kernel.variance)  # type: ignore[attr-defined]


def cache_bytes(cache_mb: int | str, data: Dataset) -> int:
    """Bytes that cached kernel values may take."""
    if cache_mb != "auto":
        return int(cache_mb) * 2**20
    if data.like.device.type == "cuda":
        return int(0.4 * torch.cuda.mem_get_info(data.like.device)[0])
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**31
    return int(0.4 * free)
