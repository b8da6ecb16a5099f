"""A coupled fit: mean and covariance on one set of inducing points; the sequence of its stages."""

from __future__ import annotations

from dataclasses import replace

from conjugp._fit.calibrate import from_folds
from conjugp._fit.held_out import settled, taken_in
from conjugp._fit.learn import (
    better_optimum,
    first_settings,
    learned,
    model_of,
    share_kept,
    with_its_likelihood,
)
from conjugp._fit.run import Fitted, Run, estimated_elbo, saturated
from conjugp._fit.starts import started
from conjugp._gp.posterior import State
from conjugp._gp.temperature import Calibration
from conjugp._inputs.inputs import Scaling
from conjugp._rows.dataset import Dataset


def coupled_fit(
    run: Run, data: Dataset, scaling: Scaling, warm: State | None
) -> tuple[Fitted, Scaling]:
    """By natural gradients and Adam, or by expectation propagation."""
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
