"""From training rows to a calibrated model: which fit, in which order, on which rows.

`coupled`: one set of inducing points for mean and covariance, the whole model by its ELBO.
`decoupled`: a small coupled fit learns the kernel, held-out points settle scales and lengthscale
(`kernel`), the mean is fitted on thousands of inducing points and the covariance added.
"""

from __future__ import annotations

from conjugp._fit.base import Fitted, Fitter
from conjugp._fit.coupled import CoupledFit
from conjugp._fit.decoupled import DecoupledFit
from conjugp._fit.plan import Plan

__all__ = ["Fitted", "Fitter", "kind_of"]


def kind_of(plan: Plan) -> type[Fitter]:
    """Who runs a plan."""
    return CoupledFit if plan.family == "coupled" else DecoupledFit
