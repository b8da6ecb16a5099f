"""What fits leave behind, and streams, in files: taken apart, checked and put together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from conjugp._fit.fit import Fitted
from conjugp._fit.partial import Stream
from conjugp._gp.files import model_parts, read_model, read_state, state_parts
from conjugp._gp.model import Model
from conjugp._persistence.parts import Parts
from conjugp.kernels import Kernel
from conjugp.likelihoods import Likelihood

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
