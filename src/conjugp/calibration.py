"""One temperature for the probabilities, from labels the fit has not seen (docs/math.md, P6)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from conjugp.likelihoods.base import Likelihood
from conjugp.prediction import predict_proba

# log T is normal with this deviation beforehand: thirty points can hardly move it, thousands can.
PRIOR_SD = 0.3
LOG_BOUND = math.log(8.0)
VARIANCE_SCALES = (0.0, 0.03, 0.1, 0.3, 1.0)


class Calibration(NamedTuple):
    """A temperature and the share of the latent variance that predictions integrate over."""

    temperature: float
    variance_scale: float
    loss: float


def fit_temperature(p: Tensor, y: Tensor, weight: Tensor) -> tuple[float, float]:
    """T that minimises the weighted NLL of p^(1/T), shrunk towards 1, and the loss there.

    `p` (n, C) are probabilities of points the fit has not seen.
    """
    log_p = torch.log(p.double().clamp(min=1e-300)).cpu().numpy()
    labels, w = y.cpu().numpy(), weight.double().cpu().numpy()
    rows = np.arange(len(labels))

    def loss(log_t: float) -> float:
        z = log_p * math.exp(-log_t)
        top = z.max(axis=1)
        log_norm = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
        return float(w @ (log_norm - z[rows, labels])) + 0.5 * (log_t / PRIOR_SD) ** 2

    found = minimize_scalar(
        loss, bounds=(-LOG_BOUND, LOG_BOUND), method="bounded", options={"xatol": 1e-4}
    )
    return math.exp(float(found.x)), float(found.fun)


def fit_calibration(
    likelihood: Likelihood,
    m: Tensor,
    v: Tensor,
    y: Tensor,
    weight: Tensor,
    variance_scales: tuple[float, ...] = (1.0,),
) -> Calibration:
    """The best temperature for every share of the variance, and the best of those."""
    best = Calibration(1.0, 1.0, math.inf)
    for scale in variance_scales:
        t, loss = fit_temperature(predict_proba(likelihood, m, scale * v), y, weight)
        if loss < best.loss:
            best = Calibration(t, scale, loss)
    return best
