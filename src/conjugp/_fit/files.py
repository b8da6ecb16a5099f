"""What fits leave behind in files, models, states and streams: taken apart, put together, moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conjugp._fit.fit import Fitted
from conjugp._fit.partial import Stream
from conjugp._gp.covariance import Point, family
from conjugp._gp.model import Model
from conjugp._gp.posterior import Posterior, State
from conjugp._gp.predictor import Predictor
from conjugp._gp.temperature import Calibration
from conjugp._persistence.parts import Parts
from conjugp.kernels import Kernel
from conjugp.kernels._base import check_kernels
from conjugp.likelihoods import Likelihood

DTYPES = {"float32": torch.float32, "float64": torch.float64}
_TENSORS = ("Z", "w", "alpha", "mean", "L_inv")
_INFERENCE = {"vi": "variational", "ep": "ep"}  # as fits have it, and as files do


def fitted_parts(fitted: Fitted) -> dict[str, Any]:
    """All of it by the names of the format."""
    return {
        **model_parts(fitted.model),
        "state": None if fitted.state is None else state_parts(fitted.state),
        "elbo": fitted.elbo,
        "epochs": fitted.epochs,
        "converged": bool(fitted.converged),
        "total": fitted.total,
        "class_gap": fitted.class_gap,
        "history": fitted.history,
    }


def read_fitted(take: Parts, C: int, D: int) -> Fitted:
    """The model of C classes and D features, and how it came about."""
    model, state = read_model(take, C, D), take.any("state")
    return Fitted(
        model,
        take.real("elbo"),
        take.number("epochs", 0),
        take.flag("converged"),
        None if state is None else read_state(Parts(state), C, D, model.Z.dtype),
        take.reports("history"),
        take.number("total", 0),
        take.number("class_gap"),
    )


def stream_parts(stream: Stream) -> dict[str, Any]:
    """The state between calls of partial_fit by the names of the format."""
    assert stream.state is not None
    return {
        "kernel": None if stream.kernel is None else stream.kernel.frozen(),
        "limit": stream.limit,
        "likelihood": stream.likelihood,
        "bound": stream.bound,
        "trainer": _INFERENCE[stream.inference],
        "generator": stream.generator.get_state(),
        "seen": stream.seen,
        "epochs": stream.epochs,
        "state": state_parts(stream.state),
        "history": stream.history,
    }


def read_stream(take: Parts, fitted: Fitted) -> Stream:
    """The stream that has left that fit."""
    model = fitted.model
    if not isinstance(model, Model):
        raise ValueError("a stream goes on from one model alone")
    kernel, likelihood = take.any("kernel"), take.object("likelihood", Likelihood)
    if kernel is not None and not isinstance(kernel, Kernel):
        raise ValueError("the kernel of the stream is none")
    bound, trainer = take.text("bound"), take.text("trainer")
    likelihood.check_bound(bound)
    inference = {name: how for how, name in _INFERENCE.items()}[trainer]
    stream = Stream(kernel, take.whole("limit", 1), likelihood, bound, 0, inference)
    stream.generator.set_state(take.object("generator", Tensor))
    stream.seen, stream.epochs = take.number("seen", 0), take.whole("epochs", 0)
    C, D, stream.kept = model.n_classes, model.Z.shape[1], model.kept
    stream.state = read_state(Parts(take.any("state")), C, D, model.Z.dtype)
    stream.history = take.reports("history")
    take.end()
    return stream


def model_parts(model: Predictor) -> dict[str, Any]:
    """A model by the names of the format."""
    model = _known(model)
    return {
        "likelihood": model.likelihood,
        "bound": model.bound,
        "kernels": list(model.kernels),
        **{name: getattr(model, name) for name in _TENSORS},
        "family": model.S.family,
        "R": model.S.R,
        "calibration": list(model.calibration),
        "temperature": model.calibration.temperature,
        "variance_scale": model.calibration.variance_scale,
        "shares": model.shares,
        "kept": model.kept,
    }


def read_model(take: Parts, C: int, D: int) -> Model:
    """A model of C classes and D features."""
    likelihood, bound = take.object("likelihood", Likelihood), take.text("bound")
    likelihood.check_bound(bound)
    kernels, Z = take.any("kernels"), take.tensor("Z", None, None, D)
    dtype, M = Z.dtype, len(Z)
    if dtype not in DTYPES.values() or not M:
        raise ValueError("Z must hold inducing points in float32 or float64")
    check_kernels(kernels, C, Z)
    w, alpha = take.tensor("w", dtype, C, M), take.tensor("alpha", dtype, C, M)
    mean = take.tensor("mean", dtype, C)
    L_inv = take.tensor("L_inv", dtype, len(kernels), None, None)
    cls, M_v = family(take.text("family")), L_inv.shape[1]
    if L_inv.shape[2] != M_v or M_v > M or (M_v == 0) != (cls is Point):
        raise ValueError("L_inv is not a square matrix on some of the inducing points")
    if len(kernels) > 1 and not cls.own_kernels:
        raise ValueError("one kernel per class needs full covariances")
    S = cls(take.tensor("R", dtype, *cls.shape(C, M_v)))
    calibration, shares, kept = _calibration(take), _shares(take, C), take.share("kept")
    kernels = tuple(kernels)
    arrays = (Z, w, alpha, mean, L_inv)
    model = Model(likelihood, bound, kernels, *arrays, S, calibration, shares, kept)
    m, v = model.latent(Z[:2])
    if not (m.isfinite().all() and v.isfinite().all()):
        raise ValueError("the latent functions are not finite")
    return model


def _calibration(take: Parts) -> Calibration:
    """What the probabilities have now; `calibration` may be what the fit itself had found."""
    found = take.object("calibration", list)
    if len(found) != len(Calibration._fields):
        raise ValueError("calibration must be three numbers")
    numbers = Parts(dict(zip(Calibration._fields, found, strict=True)))
    loss = [numbers.real(name) for name in Calibration._fields][-1]
    temperature, share = take.number("temperature", 0), take.number("variance_scale", 0)
    if not (temperature > 0.0 and share <= 1.0):
        raise ValueError("the temperature or the share of the variance is out of range")
    return Calibration(temperature, share, loss)


def _shares(take: Parts, C: int) -> Tensor | None:
    """The classes' shares of the rows; older files have none."""
    if take.optional("shares") is None:
        return None
    shares = take.tensor("shares", torch.float64, C)
    if not (bool((shares > 0).all()) and abs(float(shares.sum()) - 1.0) < 1e-6):
        raise ValueError("the shares of the classes are no shares")
    return shares


def _known(model: Predictor) -> Model:
    """The model, if it is one that files have."""
    if not isinstance(model, Model):
        raise TypeError(f"{type(model).__name__} cannot be written to a file")
    return model


def moved_model(model: Predictor, device: torch.device, dtype: torch.dtype | None) -> Model:
    """The model on another device, in another precision unless that is None."""
    m = _known(model)
    dtype = dtype or m.Z.dtype
    if device.type == "cpu" and dtype == m.Z.dtype:
        return m

    def moved(x: Any) -> Any:
        return x.to(device=device, dtype=dtype) if isinstance(x, Tensor) else x

    return replace(
        m,
        kernels=tuple(k._with_leaves(lambda leaf: moved(leaf.value)) for k in m.kernels),
        S=type(m.S)(moved(m.S.R)),
        **{name: moved(getattr(m, name)) for name in _TENSORS},
    )


def state_parts(s: State) -> dict[str, Any]:
    """The state of a fit by the names of the format."""
    return {
        "template": s.template.frozen(),
        "theta": s.theta,
        "Z": s.Z,
        "mean": s.mean,
        "h": s.q.h,
        "P": s.q.P,
        "step": s.step,
    }


def read_state(take: Parts, C: int, D: int, dtype: torch.dtype) -> State:
    """The state of a fit of C classes and D features."""
    template = take.object("template", Kernel)
    theta = take.tensor("theta", dtype, None, template.n_theta)
    if len(theta) not in (1, C):
        raise ValueError("theta must be one row, or one for each class")
    Z, mean = take.tensor("Z", dtype, None, D), take.tensor("mean", dtype, C)
    h = take.tensor("h", dtype, C, None)
    M = h.shape[1]
    if not len(Z) or M not in (1, len(Z)):
        raise ValueError("the posterior does not stand on the inducing points")
    P, step = take.tensor("P", dtype, C, M, M), take.whole("step", 0)
    take.end()
    check_kernels([template.with_theta(theta[0])], C, Z)
    return State(template, theta, Z, mean, Posterior(h, P), step)


def moved_state(s: State, device: torch.device, dtype: torch.dtype | None) -> State:
    """The state on another device, in another precision unless that is None."""
    theta, Z, mean, h, P = (
        x.to(device=device, dtype=dtype or s.Z.dtype) for x in (s.theta, s.Z, s.mean, s.q.h, s.q.P)
    )
    return State(s.template, theta, Z, mean, Posterior(h, P), s.step)
