"""One temperature for the probabilities, from labels the fit has not seen (docs/math.md, P6)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.optimize import minimize_scalar, root_scalar
from torch import Tensor

from conjugp._gp.covariance import NONE
from conjugp._gp.prediction import predict_proba
from conjugp._persistence.codec import in_checkpoints
from conjugp.likelihoods._base import Likelihood

# log T is normal with this deviation beforehand: thirty points can hardly move it, thousands can.
PRIOR_SD = 0.3
LOG_LEAST, LOG_MOST = -math.log(8.0), math.log(1000.0)
MORE = 4.0  # times a temperature is what is still credible
LUCK = 1.0  # nats that a few rows may gain by chance
UNEVEN = 1 / 3  # of the rows: weights are uneven where they count for fewer than that
VARIANCE_SCALES = (0.0, 0.03, 0.1, 0.3, 1.0)
SCALES = (0.1, 1.0)  # of coupled fits with less than all of the conditional variance
ENOUGH = 25.0  # rows of even weights that a standard error needs
TINY = 1e-300  # a probability of 0, as some classifiers give
MAX_PAIRS = 10**7  # rows times classes that a calibration looks at
ROUGH_PAIRS = 10**4  # from here on their probabilities need no more than four digits


@in_checkpoints
class Calibration(NamedTuple):
    """A temperature and the share of the latent variance that predictions integrate over."""

    temperature: float = 1.0
    variance_scale: float = 1.0
    loss: float = math.inf

    @property
    def plain(self) -> bool:
        """Whether probabilities stay the posterior predictive."""
        return (self.temperature, self.variance_scale) == (1.0, 1.0)


PLAIN = Calibration()


def variance_scales(family: str, kept: float = 1.0) -> tuple[float, ...]:
    """Shares of the latent variance that a calibration chooses from, by covariance family."""
    if family == NONE:
        return (0.0,)
    if family != "full":
        return VARIANCE_SCALES
    return (1.0,) if kept == 1.0 else SCALES


def fit_temperature(
    p: Tensor, y: Tensor, weight: Tensor, shares: Tensor | None = None
) -> tuple[float, float]:
    """T that minimises the weighted NLL of p^(1/T), shrunk towards 1, and the loss there.

    `p` (n, C) are probabilities of points the fit has not seen, `shares` (C,) those of the classes,
    which they go to as T rises above 1; else all classes are alike there.
    """
    log_p = torch.log(p.double().clamp(min=TINY))
    w = weight.double()
    # To be surer than the model takes rows, however much a few of them weigh.
    rows = 1.0 if shares is None else min(1.0, _count(w) / float(w.sum().clamp_min(TINY)))
    at_one = float(w @ _nll(log_p, y, 1.0, shares))

    def loss(log_t: float) -> float:
        more = float(w @ _nll(log_p, y, math.exp(log_t), shares)) - at_one
        return at_one + more * (rows if log_t < 0 else 1.0) + 0.5 * (log_t / PRIOR_SD) ** 2

    found = minimize_scalar(
        loss, bounds=(LOG_LEAST, LOG_MOST), method="bounded", options={"xatol": 1e-4}
    )
    return math.exp(float(found.x)), float(found.fun)


def _nll(log_p: Tensor, y: Tensor, temperature: float, shares: Tensor | None) -> Tensor:
    """−log of the labels' probabilities at a temperature, (n,)."""
    x = log_p / temperature
    if shares is not None and temperature > 1.0:
        x += (1.0 - 1.0 / temperature) * torch.log(shares.to(x))
    return torch.logsumexp(x, 1) - x.gather(1, y[:, None]).squeeze(1)


def fit_calibration(
    likelihood: Likelihood,
    m: Tensor,
    v: Tensor,
    y: Tensor,
    weight: Tensor,
    variance_scales: tuple[float, ...] = (1.0,),
    shares: Tensor | None = None,
) -> Calibration:
    """The best temperature for every share of the variance, and the largest share that will do.

    The whole variance is what the model says: less of it is taken only if that lowers the loss by
    more than the standard error of the difference. With many classes the first rows alone decide:
    rows come in random order.
    """
    rows = slice(max(1, MAX_PAIRS // m.shape[1]))
    m, v, y, weight = m[rows], v[rows], y[rows], weight[rows].double()
    rough = m.numel() > ROUGH_PAIRS
    found: list[tuple[Calibration, Tensor, Tensor]] = []
    for scale in sorted(variance_scales, reverse=True):
        p = predict_proba(likelihood, m, v, variance_scale=scale, rough=rough)
        t, loss = fit_temperature(p, y, weight, shares)
        log_p = torch.log(p.double().clamp(min=TINY))
        found.append((Calibration(t, scale, loss), log_p, _nll(log_p, y, t, shares)))
    best, of_best, least = min(found, key=lambda one: one[0].loss)
    will_do = (
        (one, log_p)
        for one, log_p, each in found
        if one.loss - best.loss <= _sum_and_error(weight * (each - least))[1]
    )
    calibration, log_p = next(will_do, (best, of_best))
    if shares is None:
        return calibration
    t, positive = calibration.temperature, (weight > 0).double()
    doubt, count = 1.0, _count(weight)
    if count < UNEVEN * float(positive.sum()):  # it is to do for the other rows as well
        t = max(t, fit_temperature(log_p.exp(), y, positive, shares)[0])
        doubt = max(1.0, ENOUGH / max(1.0, count))
    return calibration._replace(temperature=_credible(t, log_p, y, weight, shares, doubt))


def _count(weight: Tensor) -> float:
    """As many rows of even weights say as much."""
    w = weight / weight.amax().clamp_min(TINY) if len(weight) else weight
    return float(w.sum() ** 2 / w.square().sum().clamp_min(TINY))


def _sum_and_error(x: Tensor) -> tuple[float, float]:
    """The sum of what rows have, and its standard error."""
    return float(x.sum()), float((x - x.mean()).square().sum().sqrt())


def _credible(
    t: float, log_p: Tensor, y: Tensor, weight: Tensor, shares: Tensor, doubt: float = 1.0
) -> float:
    """A temperature, or a higher one where rows do not show that the classes' shares are worse.

    What few rows gain over these is partly luck. Where it is less than its standard error, or than
    `LUCK` nats of an average row, what it lacks is given up too. Where a few rows have nearly all
    the weight the error itself is known badly: `doubt` multiplies it.
    """
    each = _nll(log_p, y, t, shares)

    def lost(log_t: float) -> Tensor:
        return weight * (_nll(log_p, y, math.exp(log_t), shares) - each)

    gain, error = _sum_and_error(lost(LOG_MOST))
    least = LUCK * float(weight[weight > 0].mean()) if bool((weight > 0).any()) else 0.0
    error = max(doubt * error, least)
    begin = math.log(t)
    end = min(begin + math.log(MORE * doubt), LOG_MOST)

    def left(log_t: float) -> float:
        return float(lost(log_t).sum()) - (error - gain)

    if gain >= error or end <= 0.0:
        return t
    if gain <= 0.0 or left(end) <= 0.0:
        return math.exp(end)
    return math.exp(root_scalar(left, bracket=(begin, end)).root)
