"""From training rows to a calibrated model.

`coupled`: one set of inducing points for mean and covariance, the whole model by its ELBO.
`decoupled`: a small coupled fit learns the kernel, held-out points settle scales and lengthscale
(`kernel`), the mean is fitted on thousands of inducing points and the covariance added.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from conjugp._fit.coupled import coupled_fit
from conjugp._fit.decoupled import decoupled_fit
from conjugp._fit.run import Fitted, Run, estimated_elbo
from conjugp._fit.starts import origin_for
from conjugp._gp.posterior import State
from conjugp._gp.temperature import Calibration
from conjugp._inputs.inputs import Scaling
from conjugp._rows.dataset import Dataset


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
