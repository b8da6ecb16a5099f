"""From training rows to a calibrated model: the sequences of stages, and what they leave behind.

`coupled`: one set of inducing points for mean and covariance, the whole model by its ELBO.
`decoupled`: a small coupled fit learns the kernel, held-out points settle scales and lengthscale
(`kernel`), the mean is fitted on thousands of inducing points and the covariance added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from conjugp._fit.calibrate import from_folds, from_held_out, mean_from_folds
from conjugp._fit.held_out import settled, taken_in
from conjugp._fit.kernel import chosen_kernel
from conjugp._fit.learn import (
    better_optimum,
    first_settings,
    learned,
    model_of,
    share_kept,
    with_its_likelihood,
)
from conjugp._fit.plan import Run
from conjugp._fit.starts import filled, origin_for, placed, started
from conjugp._fit.weights import (
    jointly_learned,
    kernel_rows,
    mean_epochs,
    mean_settings,
    start_mean,
    trained_mean,
    without_posterior,
)
from conjugp._gp.covariance import NONE
from conjugp._gp.model import Model
from conjugp._gp.posterior import State
from conjugp._gp.predictor import Predictor
from conjugp._gp.temperature import PLAIN, Calibration
from conjugp._inference.mean import Mean
from conjugp._inputs.inputs import Scaling
from conjugp._persistence.codec import in_checkpoints
from conjugp._rows.dataset import Dataset
from conjugp.likelihoods import LogisticSoftmax

ELBO_ROWS, ELBO_PAIRS = 2048, 2**20  # rows, times classes, that stand for all in the ELBO
SATURATED, SATURATED_ROWS = 4.0, 512  # σ is above .98 there; rows that are asked
REFIT_ROWS = 20_000  # up to here the last fit to all rows starts afresh
CROSS_FIT_ROWS = 5000  # up to here folds, not one hold-out, give the temperature


@in_checkpoints
@dataclass
class Fitted:
    """What a fit leaves behind."""

    model: Predictor
    elbo: float
    epochs: float
    converged: bool
    state: State | None  # for going on
    history: list[dict[str, float | str]] = field(default_factory=list)
    total: float = 0.0  # weight of the rows
    class_gap: float = 0.0  # what sampling classes cost, in nats per row (docs/math.md, C3)
    saturated: bool = False  # whether all classes are alike to it (docs/math.md, The corner)


def fit(
    run: Run, data: Dataset, scaling: Scaling, warm: State | None = None
) -> tuple[Fitted, Scaling]:
    """The whole fit, from an earlier one's state if there is one; and the units of its model.

    Raises FloatingPointError or NotPositiveDefiniteError where numbers leave their range.
    """
    stages = coupled_fit if run.plan.family == "coupled" else decoupled_fit
    with torch.no_grad():
        fitted, scaling = run.journal.stage("whole", lambda: stages(run, data, scaling, warm))
    if not fitted.model.is_finite():
        raise FloatingPointError("the fit left the range of floating-point numbers")
    return fitted, scaling


def coupled_fit(
    run: Run, data: Dataset, scaling: Scaling, warm: State | None
) -> tuple[Fitted, Scaling]:
    """One set of inducing points: by natural gradients and Adam, or expectation propagation."""
    p, rows, held, everything = run.plan, data, None, data
    if p.temperature is None and not p.full_batch:
        rows, held, everything = data.hold_out(p.options.hold_out)
    state = started(run, rows, scaling, warm)
    # What is learned changes it in place.
    first = replace(state, theta=state.theta.clone(), Z=state.Z.clone(), mean=state.mean.clone())
    settings = replace(p.settings, kept=share_kept(p, len(state.Z) / data.n))
    how = first_settings(p, state, settings)
    result = learned(run, state, rows, how)
    if p.full_batch:
        result = better_optimum(run, result, rows, how)
    result, how = with_its_likelihood(run, result, rows, how)
    settings = replace(settings, likelihood=how.likelihood)
    state, calibration = result.state, Calibration(p.temperature or 1.0)
    if held is not None and held.n:
        state, calibration = taken_in(run, state, held, everything, settings)
        state = settled(run, state, everything, settings)
    elif p.temperature is None:  # with too few rows for a hold-out, folds do instead
        calibration = from_folds(run, first, state, everything, settings, how)
    model = replace(
        model_of(state, settings),
        calibration=data.group.same(calibration),
        shares=p.shares,
        kept=settings.kept,
    )
    # Expectation propagation reports an evidence that is no bound.
    known = p.full_batch and settings.inference != "ep" and settings.kept == 1.0
    return Fitted(
        model,
        result.elbo if known else estimated_elbo(model, everything),
        result.epochs,
        result.converged,
        state,
        run.history,
        everything.total,
        result.class_gap,
        saturated(model, everything),
    ), scaling


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


def salvage(run: Run, data: Dataset, scaling: Scaling) -> tuple[Fitted, Scaling] | None:
    """After Ctrl-C the last good state as a model, uncalibrated; None if there is none yet."""
    if run.good is None:
        return None
    model, state, kept = run.good()
    origin = origin_for(run.plan, model.kernels[0], scaling, data.like)
    if origin is not None:
        data, scaling = data.shifted(origin), scaling.uncentred()
    plain = Calibration(run.plan.temperature or 1.0)
    model = replace(model, calibration=plain, shares=run.plan.shares, kept=kept)
    passes = [float(p["epoch"]) for p in run.history if p["stage"] in ("fit", "all rows")]
    epochs, elbo = max(passes, default=0.0), estimated_elbo(model, data)
    return Fitted(model, elbo, epochs, False, state, run.history, data.total), scaling


def estimated_elbo(model: Model, data: Dataset) -> float:
    """The ELBO, its sum over points taken from a sample where there are many."""
    part = data.head(min(ELBO_ROWS, max(1, ELBO_PAIRS // data.n_classes)))
    kl = model.kl()
    return (model.elbo(part) + kl) * (data.total / part.total) - kl


def saturated(model: Model, data: Dataset) -> bool:
    """Whether most rows have all their latents so far above zero that no class stands out."""
    if model.likelihood.name != LogisticSoftmax.name:
        return False
    m, _ = model.latent(data.head(SATURATED_ROWS).X, variance=False)
    return len(m) > 0 and float(m.amin(1).median()) > SATURATED
