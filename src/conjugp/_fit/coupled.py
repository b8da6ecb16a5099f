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
from conjugp._fit.run import PLAIN, Fitted, Run, estimated_elbo, saturated
from conjugp._fit.starts import started
from conjugp._gp.state import State
from conjugp._inputs.scales import Scaling
from conjugp._rows.dataset import Dataset


def coupled_fit(
    run: Run, data: Dataset, scaling: Scaling, warm: State | None
) -> tuple[Fitted, Scaling]:
    """By natural gradients and Adam, or by expectation propagation."""
    p, size = run.plan, run.plan.settings.batch_size
    full = size is None or size >= data.n
    rows, held, everything = data, None, data
    if p.temperature is None and not full:
        rows, held, everything = data.hold_out(p.options.hold_out)
    # A variance given asks for the usual start, as the paper has it, and for the usual Adam.
    usual = full or bool(p.options.initial_variance)
    state = started(run, rows, scaling, warm, full, usual)
    # What is learned changes it in place.
    first = replace(state, theta=state.theta.clone(), Z=state.Z.clone(), mean=state.mean.clone())
    kept = share_kept(p, usual, len(state.Z) / data.n)
    settings = replace(p.settings, kept=kept)
    how = first_settings(settings, state, full, usual)
    result = learned(run, state, rows, how)
    if full:
        result = better_optimum(run, result, rows, how)
    result, how = with_its_likelihood(run, result, rows, how)
    settings = replace(settings, likelihood=how.likelihood)
    state, calibration = result.state, PLAIN._replace(temperature=p.temperature or 1.0)
    if held is not None and held.n:
        state, calibration = taken_in(run, state, held, everything, settings)
        state = settled(run, state, everything, settings)
    elif p.temperature is None:  # with too few rows for a hold-out, folds do instead
        calibration = from_folds(run, first, state, everything, settings, how)
    model = model_of(state, settings)
    # Expectation propagation reports an evidence that is no bound.
    known = full and settings.inference != "ep" and kept == 1.0
    return Fitted(
        model,
        data.group.same(calibration),
        result.elbo if known else estimated_elbo(model, everything),
        result.epochs,
        result.converged,
        state,
        run.history,
        everything.total,
        result.class_gap,
        kept,
        saturated(model, everything),
        p.shares,
    ), scaling
