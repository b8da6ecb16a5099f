"""The stage of a coupled fit that learns: kernel, inducing points, prior means and q by the ELBO.

Where it pays the likelihood's own parameters too, and from another start.
"""

from __future__ import annotations

import math
from dataclasses import replace

from conjugp._fit.plan import Good, Plan, Run
from conjugp._gp.model import Model, coupled
from conjugp._gp.posterior import State, prior
from conjugp._inference.settings import Interrupted, Result, Settings
from conjugp._inference.train import train
from conjugp._rows.dataset import Dataset
from conjugp.likelihoods._base import Likelihood

# Of the variance given the inducing points rows keep this many times M/N, and at least so much.
KEPT, LEAST_KEPT = 3.0, 0.05
LIKELIHOOD_ROWS = 10_000  # on which a likelihood's own parameters are learned
LIKELIHOOD_ROUNDS = 3  # fits in turn of q and of a likelihood's own parameters


def model_of(state: State, settings: Settings) -> Model:
    """The model that a fit of these settings has found."""
    return coupled(state, settings.likelihood, settings.bound, settings.jitter)


def first_settings(plan: Plan, state: State, settings: Settings) -> Settings:
    """How fast what moves: with minibatches kernels early and inducing points slowly."""
    rate = (2 if plan.full_batch else 1) * settings.learning_rate
    settings = replace(settings, learning_rate=rate)
    if plan.usual:
        return settings
    rate = kernel_rate(state)
    return replace(settings, kernel_rate=rate, inducing_rate=0.5, momentum=0.8, settled=2)


def kernel_rate(state: State) -> float:
    """What to multiply Adam's rate by for kernels with a lengthscale for every feature.

    Adam moves each of them by about its rate, be the gradient signal or noise. Distances sum over
    all, and get noise that grows with the root of their number.
    """
    n_features = state.Z.shape[1]
    alike = state.theta.shape[1] <= max(2, n_features)
    return 1.0 if alike else min(2.0, math.sqrt(50 / n_features))


def share_kept(plan: Plan, points: float) -> float:
    """The share of the variance given the inducing points that rows are fitted with (Q9).

    Less than all of it makes better means and worse variances. Held-out rows mend these, but
    for likelihoods with jumps, which live on them. With few rows for each of the `points`, the
    variance that they leave keeps these from fitting noise.
    """
    settings, given = plan.settings, plan.options.conditional_variance
    if given != "auto":
        return float(given)
    if plan.usual or settings.inference == "ep" or not settings.likelihood.smooth:
        return 1.0
    if plan.temperature is not None or not settings.learn_kernel:
        return 1.0
    return min(1.0, max(LEAST_KEPT, KEPT * points))


def trained(
    run: Run, state: State, data: Dataset, settings: Settings, name: str, stage: str = ""
) -> Result:
    """A loop, which the journal knows by name; it reports what it does as a stage, or nothing."""
    report, journal = run.report if stage else None, run.journal
    how = {"on_progress": report, "stage": stage, "journal": journal}
    return journal.stage(name, lambda: train(state, data, settings, run.generator, **how))


def learned(
    run: Run, state: State, data: Dataset, settings: Settings, stage: str = "fit"
) -> Result:
    """The state fitted to rows; whatever comes, the run has the last good one."""
    reported = replace(settings, bound=run.plan.settings.bound)

    def keep(state: State) -> None:
        run.good = lambda: Good(model_of(state, reported), state, settings.kept)

    try:
        result = trained(run, state, data, settings, "trained", stage)
    except Interrupted as stop:
        keep(stop.found)
        raise
    keep(result.state)
    return result


def better_optimum(run: Run, result: Result, data: Dataset, settings: Settings) -> Result:
    """The fit, or the optimum of its bound near the q of the best bound, if that is higher.

    Where kernels are large these bounds have a second optimum in which all latents are far
    above zero, and nothing is learned (docs/math.md, The corner).
    """
    like, state = settings.likelihood, result.state
    if settings.inference == "ep" or settings.bound not in like.conjugate:
        return result
    rest = replace(settings, learn_kernel=False, learn_mean=False, learn_inducing=False)
    q = prior(len(state.mean), len(state.Z), state.Z)
    for bound in (like.bounds[0], settings.bound):
        at, there = replace(state, q=q), replace(rest, bound=bound)
        other = learned(run, at, data, there, "another optimum")
        q = other.state.q
    # Both may be one optimum, as far as a fit goes to its end.
    if other.elbo > result.elbo + settings.tol * data.total:
        return replace(result, state=other.state, elbo=other.elbo, converged=other.converged)
    return result


def with_its_likelihood(
    run: Run, result: Result, data: Dataset, settings: Settings
) -> tuple[Result, Settings]:
    """Fit the likelihood's own parameters to what the rows' latents are, and q again, in turn.

    Not before q is fitted: at the prior any label is as likely as any other.
    """
    if type(settings.likelihood).learned is Likelihood.learned:
        return result, settings  # it has none
    for _ in range(LIKELIHOOD_ROUNDS):
        part, was = data.head(LIKELIHOOD_ROWS), settings.likelihood
        m, v = model_of(result.state, settings).latent(part.X)
        like = was.learned(part.y, m, v, part.weight)
        if like is was:
            break
        settings = replace(settings, likelihood=like, first_step=20)
        result = learned(run, result.state, data, settings)
    return result, settings
