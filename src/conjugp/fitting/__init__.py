"""From training rows to a calibrated model: which fit, in which order, on which rows.

`coupled`: one set of inducing points for mean and covariance, the whole model by its ELBO.
`decoupled`: a small coupled fit learns the kernel, held-out points settle scales and lengthscale
(`kernel`), the mean is fitted on thousands of inducing points and the covariance added.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from conjugp.checkpoint import Journal
from conjugp.data import Dataset
from conjugp.fitting.base import Fitted, Fitter, variance_scales
from conjugp.fitting.coupled import CoupledFit
from conjugp.fitting.decoupled import DecoupledFit
from conjugp.kernels import Kernel
from conjugp.plan import Plan
from conjugp.scaling import Scaling
from conjugp.training import Progress

__all__ = ["Fitted", "Fitter", "fitter", "variance_scales"]


def fitter(
    plan: Plan,
    kernel: Kernel | None,
    data: Dataset,
    mean: Tensor,
    scaling: Scaling,
    on_progress: Callable[[Progress], None] | None = None,
    journal: Journal | None = None,
) -> Fitter:
    """Who runs a plan."""
    kind = CoupledFit if plan.family == "coupled" else DecoupledFit
    return kind(plan, kernel, data, mean, scaling, on_progress, journal)
