"""What fits leave behind, and streams, in files: taken apart, checked and put together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conjugp._fit.partial import Stream
from conjugp._fit.run import Fitted
from conjugp._gp.files import model_parts, read_model, read_state, state_parts
from conjugp._gp.model import Model
from conjugp._gp.temperature import Calibration
from conjugp._persistence.parts import Parts
from conjugp.kernels import Kernel
from conjugp.likelihoods import Likelihood

_INFERENCE = {"vi": "variational", "ep": "ep"}  # as fits have it, and as files do
_CALIBRATION = Calibration._fields


def fitted_parts(fitted: Fitted) -> dict[str, Any]:
    """All of it by the names of the format."""
    return {
        **model_parts(fitted.model),
        "state": None if fitted.state is None else state_parts(fitted.state),
        "calibration": list(fitted.calibration),
        "elbo": fitted.elbo,
        "epochs": fitted.epochs,
        "converged": bool(fitted.converged),
        "total": fitted.total,
        "class_gap": fitted.class_gap,
        "kept": fitted.kept,
        "shares": fitted.shares,
        "history": fitted.history,
    }


def read_fitted(take: Parts, C: int, D: int) -> Fitted:
    """The model of C classes and D features, and how it came about."""
    model, state = read_model(take, C, D), take.any("state")
    calibration = take.object("calibration", list)
    if len(calibration) != len(_CALIBRATION):
        raise ValueError("calibration must be three numbers")
    numbers = Parts(dict(zip(_CALIBRATION, calibration, strict=True)))
    return Fitted(
        model,
        Calibration(*(numbers.real(name) for name in _CALIBRATION)),
        take.real("elbo"),
        take.number("epochs", 0),
        take.flag("converged"),
        None if state is None else read_state(Parts(state), C, D, model.Z.dtype),
        take.reports("history"),
        take.number("total", 0),
        take.number("class_gap"),
        take.share("kept"),
        shares=_shares(take, C),
    )


def _shares(take: Parts, C: int) -> Tensor | None:
    """The classes' shares of the rows; older files have none."""
    if take.optional("shares") is None:
        return None
    shares = take.tensor("shares", torch.float64, C)
    if not (bool((shares > 0).all()) and abs(float(shares.sum()) - 1.0) < 1e-6):
        raise ValueError("the shares of the classes are no shares")
    return shares


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


def read_stream(take: Parts, model: Model) -> Stream:
    """The stream that has left that model."""
    kernel, likelihood = take.any("kernel"), take.object("likelihood", Likelihood)
    if kernel is not None and not isinstance(kernel, Kernel):
        raise ValueError("the kernel of the stream is none")
    bound, trainer = take.text("bound"), take.text("trainer")
    likelihood.check_bound(bound)
    inference = {name: how for how, name in _INFERENCE.items()}[trainer]
    stream = Stream(kernel, take.whole("limit", 1), likelihood, bound, 0, inference)
    stream.generator.set_state(take.object("generator", Tensor))
    stream.seen, stream.epochs = take.number("seen", 0), take.whole("epochs", 0)
    C, D = model.n_classes, model.Z.shape[1]
    stream.state = read_state(Parts(take.any("state")), C, D, model.Z.dtype)
    stream.history = take.reports("history")
    take.end()
    return stream
