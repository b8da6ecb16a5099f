"""The mean on thousands of inducing points, and a covariance on fewer (docs/defaults.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from conjugp._fit import weights as decoupled
from conjugp._fit.base import Fitted, estimated_elbo, unseen
from conjugp._fit.joint import JointSettings, learn_kernel
from conjugp._fit.kernel_choice import KernelChoice
from conjugp._fit.search import class_centres
from conjugp._fit.weights import KernelRows, MeanSettings
from conjugp._gp import inducing
from conjugp._gp.covariance import NONE
from conjugp._gp.model import Model
from conjugp._gp.posterior import prior
from conjugp._gp.state import State
from conjugp._gp.temperature import Calibration, fit_calibration, variance_scales
from conjugp._inference.mean import Interrupted
from conjugp._inference.settings import Progress
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data, Dataset
from conjugp.kernels import Kernel, Normalised

JOINT_INDUCING, JOINT_STEPS = 1000, 200  # of the fit in which a decoupled ELBO learns the kernel
REFIT_ROWS = 20_000  # up to here the last fit to all rows starts afresh
CROSS_FIT_ROWS = 5000  # up to here folds, not one hold-out, give the temperature


class DecoupledFit(KernelChoice):
    """Kernel, mean, covariance, in this order."""

    _class_gap = 0.0

    def _run(self, warm: State | None) -> Fitted:
        p = self.plan
        # Few rows are all trained on in the end, so more of them can choose the kernel.
        share = max(p.options.hold_out, min(0.3, 500 / self.data.n))
        train, held, data = self.data.hold_out(share)
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
            scales = variance_scales(p.family)
            calibration = fit_calibration(
                p.likelihood, m, v, held.y, held.weight, scales, self.shares
            )
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
        model = replace(model, calibration=data.group.same(calibration), shares=self.shares)
        epochs, gap = len(values), self._class_gap
        return Fitted(model, elbo, epochs, converged, state, self.history, data.total, gap)

    def _agreed(self, kernel: Kernel, data: Dataset) -> Kernel:
        """Rank 0's choice: machines that round differently may choose differently."""
        if self.kernel is None or data.group.size == 1:
            return data.group.same(kernel)
        # A class of the user's own may not travel; its parameters do.
        return kernel.with_theta(data.group.same(kernel.theta)).frozen()

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

        def learned() -> Kernel:
            try:
                return learn_kernel(model, train, settings, self.generator, report).frozen()
            except (NotPositiveDefiniteError, FloatingPointError):
                return kernel  # a good one already

        return self.journal.stage("joint", learned)

    def _uncentre(self) -> None:
        """Go back to the user's origin, with the rows and with inducing points that were given."""
        given = self.plan.inducing
        if isinstance(given, Tensor):
            self.plan = replace(self.plan, inducing=given + self._origin(given))
        self.data = self.data.shifted(self._origin(self.data.like))
        self.scaling = self.scaling.uncentred()

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
            return self._fit_weights(train, start, settings, source).latent(unseen(data, rows))

        def fold(rows: Tensor) -> tuple[Tensor, Tensor]:
            return self.journal.stage("fold", lambda: predict(rows))

        return self._folded(data, fold, variance_scales(self.plan.family))


def without_posterior(model: Model) -> State:
    """What a decoupled fit leaves to go on from: its kernel, inducing points and prior mean."""
    kernel, Z = model.kernels[0], model.Z
    theta = kernel.theta.to(Z).unsqueeze(0)
    return State(kernel, theta, Z, model.mean, prior(model.n_classes, 1, Z))
