"""A decoupled fit: the mean on thousands of inducing points, a covariance on fewer; its stages."""

from __future__ import annotations

import math
from dataclasses import replace

from conjugp._fit.calibrate import from_held_out, mean_from_folds
from conjugp._fit.kernel import chosen_kernel
from conjugp._fit.mean import (
    jointly_learned,
    mean_epochs,
    mean_settings,
    trained_mean,
    without_posterior,
)
from conjugp._fit.points import placed
from conjugp._fit.run import Fitted, Run, estimated_elbo
from conjugp._fit.starts import filled, origin_for
from conjugp._fit.weights import kernel_rows, start_mean
from conjugp._gp.covariance import NONE
from conjugp._gp.posterior import State
from conjugp._gp.temperature import PLAIN, Calibration
from conjugp._inference.mean import Mean
from conjugp._inputs.inputs import Scaling
from conjugp._rows.dataset import Dataset

REFIT_ROWS = 20_000  # up to here the last fit to all rows starts afresh
CROSS_FIT_ROWS = 5000  # up to here folds, not one hold-out, give the temperature


def decoupled_fit(
    run: Run, data: Dataset, scaling: Scaling, warm: State | None
) -> tuple[Fitted, Scaling]:
    """Kernel, mean, covariance, in this order (docs/defaults.md)."""
    p, learn = run.plan, run.plan.settings.learn_kernel
    # Few rows are all trained on in the end, so more of them can choose the kernel.
    train, held, everything = data.hold_out(max(p.options.hold_out, min(0.3, 500 / data.n)))
    by_elbo = learn and p.options.mean_training == "elbo" and p.family != NONE
    if warm is not None:
        kernel = warm.template.with_theta(warm.theta[0])
    elif learn and (p.options.search or not by_elbo):
        kernel = chosen_kernel(run, train, held, everything, scaling)
    else:
        kernel = filled(p.template, everything, p.options.mean_variance)
    origin = origin_for(p, kernel, scaling, data.like)
    if origin is not None:
        train, held = train.shifted(origin), held.shifted(origin)
        everything, scaling = everything.shifted(origin), scaling.uncentred()
    if by_elbo:
        kernel = jointly_learned(run, train, kernel, placed(run, kernel, train, origin))
    settings, calibration = mean_settings(p, everything.n), None
    if p.temperature is not None:
        calibration = Calibration(p.temperature)
    elif everything.n <= CROSS_FIT_ROWS:
        calibration = mean_from_folds(run, kernel, everything, origin)
    elif not held.n:  # no class has a row to spare
        calibration = PLAIN
    part = train if calibration is None else everything
    Z = placed(run, kernel, part, origin)
    rows, start = kernel_rows(kernel, Z, everything, settings), start_mean(len(Z), p.mean)
    found = trained_mean(run, part, start, settings, rows)
    values = found.values
    gain = (values[-1] - values[-2]) / part.total if len(values) > 1 else math.inf
    if calibration is None:
        m, v = found.model.latent(held.X)
        calibration = from_held_out(run, m, v, held, settings)
        # The held-out rows are trained on after all.
        if everything.n <= REFIT_ROWS:
            values = ()
        else:
            start = Mean(found.model.w, found.model.mean)
            n_epochs, rate = min(2, settings.max_epochs), 0.1 * settings.learning_rate
            settings = replace(settings, max_epochs=n_epochs, learning_rate=rate)
        found = trained_mean(run, everything, start, settings, rows, "all rows")
        values += found.values
    # Steps shrink to nothing over the epochs: a fit that had them all has converged.
    had_all = p.settings.max_epochs >= mean_epochs(p, everything.n)
    model = replace(found.model, calibration=data.group.same(calibration), shares=p.shares)
    return Fitted(
        model,
        estimated_elbo(model, everything),
        len(values),
        gain < 10 * p.settings.tol or had_all,
        without_posterior(model),
        run.history,
        everything.total,
        found.class_gap,
    ), scaling
