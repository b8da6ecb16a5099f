"""The stage that finds a temperature: from held-out rows, or from folds where rows are few."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conjugp._fit.learn import model_of, trained
from conjugp._fit.plan import Plan, Run
from conjugp._fit.starts import placed
from conjugp._fit.weights import fitted_mean, kernel_rows, mean_settings, start_mean
from conjugp._gp.posterior import State, prior
from conjugp._gp.temperature import PLAIN, SCALES, Calibration, fit_calibration, variance_scales
from conjugp._inference.settings import Settings
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._rows.dataset import Data, Dataset
from conjugp._rows.hold_out import folds
from conjugp.kernels import Kernel

SCALE_ROWS = 2048  # that choose how much of the variance counts in such fits
LEARNED_AGAIN = 10  # rows for each learned number from which on it stays at rest in folds

Moments = tuple[Tensor, Tensor]


def scales_of(plan: Plan, kept: float) -> tuple[float, ...]:
    """Shares of the latent variance that a fit's calibration chooses from."""
    return variance_scales("full" if plan.family == "coupled" else plan.family, kept)


def from_held_out(run: Run, m: Tensor, v: Tensor, held: Data, settings: Settings) -> Calibration:
    """A temperature and, where q was fitted with less than all its variance, how much counts.

    A few rows choose that share: going through all of them for each takes as long as steps.
    """
    like, shares = settings.likelihood, run.plan.shares
    scales = scales_of(run.plan, settings.kept)
    if scales == SCALES:
        few, n = held.rows(0, SCALE_ROWS), SCALE_ROWS
        found = fit_calibration(like, m[:n], v[:n], few.y, few.weight, scales, shares)
        scales = (found.variance_scale,)
    return fit_calibration(like, m, v, held.y, held.weight, scales, shares)


def from_folds(
    run: Run, first: State, state: State, data: Dataset, settings: Settings, learning: Settings
) -> Calibration:
    """From folds of a coupled fit: q fitted again without each.

    Kernel and points stay at rest, unless they are so many numbers for so few rows that they
    know the labels of the fold: then all is `learning` again, from the `first` state on.
    """
    data = data.head(data.n)
    numbers = state.theta.numel() * settings.learn_kernel + state.mean.numel() * settings.learn_mean
    if numbers * LEARNED_AGAIN > data.n:
        at, n_epochs = first, math.ceil(0.5 * settings.max_epochs)
        how = replace(learning, max_epochs=n_epochs, rough=True)
    else:
        rest = {"learn_kernel": False, "learn_mean": False, "learn_inducing": False}
        at, how = state, replace(settings, **rest, max_epochs=30, tol=0.1, rough=True)

    def predict(fold: Tensor) -> Moments:
        theta, Z, mean = (x.clone() for x in (at.theta, at.Z, at.mean))
        fresh = replace(at, theta=theta, Z=Z, mean=mean, q=prior(len(mean), len(Z), Z), step=0)
        rest = data._replace(weight=data.weight * ~fold)
        fitted = trained(run, fresh, rest, how, "fold").state
        return model_of(fitted, settings).latent(unseen(data, fold))

    return folded(run.plan, data, predict, settings)


def mean_from_folds(run: Run, kernel: Kernel, data: Dataset, origin: Tensor | None) -> Calibration:
    """From folds of a decoupled fit, each predicted by a mean fitted to the others."""
    data = data.head(data.n)

    def predict(fold: Tensor) -> Moments:
        rest = Data(data.X[~fold], data.y[~fold], data.weight[~fold], data.n_classes)
        Z, settings = placed(run, kernel, rest, origin), mean_settings(run.plan, rest.n)
        start, rows = start_mean(len(Z), run.plan.mean), kernel_rows(kernel, Z, rest, settings)
        return fitted_mean(run, rest, start, settings, rows).model.latent(unseen(data, fold))

    def work(fold: Tensor) -> Moments:
        return run.journal.stage("fold", lambda: predict(fold))

    return folded(run.plan, data, work, run.plan.settings)


def folded(
    plan: Plan, data: Data, predict: Callable[[Tensor], Moments], settings: Settings
) -> Calibration:
    """The calibration of every fold's latent moments, predicted without its rows."""
    masks, moments = list[Tensor](), list[Moments]()
    for mask in folds(data):
        try:
            m, v = predict(mask)
        except (NotPositiveDefiniteError, FloatingPointError):
            continue  # the others will do
        if bool(torch.isfinite(m).all() & torch.isfinite(v).all()):
            masks.append(mask)
            moments.append((m, v))
    if not masks:
        return PLAIN
    m, v = (torch.cat(part) for part in zip(*moments, strict=True))
    i = torch.cat([mask.nonzero()[:, 0] for mask in masks])
    y, weight = data.y[i], data.weight[i]
    scales = scales_of(plan, settings.kept)
    found = fit_calibration(settings.likelihood, m, v, y, weight, scales, plan.shares)
    # Without rows of some class nothing says that it can be excluded.
    if found.temperature < 1.0 and len(torch.unique(y)) < len(torch.unique(data.y)):
        return found._replace(temperature=1.0)
    return found


def unseen(data: Data, fold: Tensor) -> Tensor:
    """The rows of a fold as they are to a fit without them.

    A column that varies in these rows alone, such as the dummy of a level that only one row has,
    would take them far from all others. It says nothing of new rows, whose levels have no column.
    """
    rest, rows = data.X[~fold & (data.weight > 0)], data.X[fold]
    return torch.where((rest == rest[:1]).all(0), rest[:1], rows) if len(rest) else rows
