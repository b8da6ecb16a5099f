"""From training rows to a calibrated model: which fit, in which order, on which rows.

`coupled`: one set of inducing points for mean and covariance, the whole model by its ELBO.
`decoupled`: a small coupled fit learns the kernel, held-out points settle scales and lengthscale
(`kernel`), the mean is fitted on thousands of inducing points and the covariance added.
"""

from __future__ import annotations

from conjugp.calibration import VARIANCE_SCALES
from conjugp.covariance import NONE
from conjugp.fitting.base import Fitted, Fitter
from conjugp.fitting.coupled import SCALES, CoupledFit
from conjugp.fitting.decoupled import DecoupledFit
from conjugp.model import Model
from conjugp.plan import Plan

__all__ = ["Fitted", "Fitter", "fitter", "variance_scales"]


def fitter(plan: Plan) -> type[Fitter]:
    """Who runs a plan."""
    return CoupledFit if plan.family == "coupled" else DecoupledFit


def variance_scales(model: Model, chosen: float) -> tuple[float, ...]:
    """Shares of the latent variance that a calibration chooses from; once it had `chosen` one.

    All of it, if it was fitted so. A coupled fit of which less was chosen was fitted with less.
    """
    if model.S.family == NONE:
        return (0.0,)
    if model.S.family == "full":
        return (1.0,) if chosen == 1.0 else SCALES
    return VARIANCE_SCALES
