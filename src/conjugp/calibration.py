"""One temperature for the probabilities, from labels the fit has not seen (docs/math.md, P6)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from conjugp.likelihoods.base import Likelihood
from conjugp.prediction import predict_proba

# log T is normal with this deviation beforehand: thirty points can hardly move it, thousands can.
PRIOR_SD = 0.3
LOG_BOUND = math.log(8.0)
VARIANCE_SCALES = (0.0, 0.03, 0.1, 0.3, 1.0)
MAX_PAIRS = 10**7  # rows times classes that a calibration looks at


class Calibration(NamedTuple):
    """A temperature and the share of the latent variance that predictions integrate over."""

    temperature: float
    variance_scale: float
    loss: float


def fit_temperature(p: Tensor, y: Tensor, weight: Tensor) -> tuple[float, float]:
    """T that minimises the weighted NLL of p^(1/T), shrunk towards 1, and the loss there.

    `p` (n, C) are probabilities of points the fit has not seen.
    """
    log_p = torch.log(p.double().clamp(min=1e-300))
    of_label = log_p.gather(1, y[:, None]).squeeze(1)
    w = weight.double()

    def loss(log_t: float) -> float:
        beta = math.exp(-log_t)
        nll = torch.logsumexp(beta * log_p, 1) - beta * of_label
        return float(w @ nll) + 0.5 * (log_t / PRIOR_SD) ** 2

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
    """The best temperature for every share of the variance, and the largest share that will do.

    The whole variance is what the model says: less of it is taken only if that lowers the loss by
    more than the standard error of the difference. With many classes the first rows alone decide:
    rows come in random order.
    """
    rows = slice(max(1, MAX_PAIRS // m.shape[1]))
    m, v, y, weight = m[rows], v[rows], y[rows], weight[rows].double()
    found: list[tuple[Calibration, Tensor]] = []
    for scale in sorted(variance_scales, reverse=True):
        p = predict_proba(likelihood, m, v, variance_scale=scale)
        t, loss = fit_temperature(p, y, weight)
        log_p = torch.log(p.double().clamp(min=1e-300)) / t
        each = torch.logsumexp(log_p, 1) - log_p.gather(1, y[:, None]).squeeze(1)
        found.append((Calibration(t, scale, loss), each))
    best, least = min(found, key=lambda one: one[0].loss)
    for calibration, each in found:
        excess = weight * (each - least)
        error = float((excess - excess.mean()).square().sum().sqrt())
        if calibration.loss - best.loss <= error:
            return calibration
    return best
