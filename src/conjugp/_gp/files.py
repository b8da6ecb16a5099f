"""Models and the states of fits in files: taken apart, checked and put together, moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conjugp._gp.covariance import Point, family
from conjugp._gp.model import Model
from conjugp._gp.posterior import Posterior
from conjugp._gp.state import State
from conjugp._persistence.parts import Parts
from conjugp.kernels import Kernel
from conjugp.kernels._base import check_kernels
from conjugp.likelihoods import Likelihood

DTYPES = {"float32": torch.float32, "float64": torch.float64}
_TENSORS = ("Z", "w", "alpha", "mean", "L_inv")


def model_parts(model: Model) -> dict[str, Any]:
    """A model by the names of the format."""
    return {
        "likelihood": model.likelihood,
        "bound": model.bound,
        "kernels": list(model.kernels),
        **{name: getattr(model, name) for name in _TENSORS},
        "family": model.S.family,
        "R": model.S.R,
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
    model = Model(likelihood, bound, tuple(kernels), Z, w, alpha, mean, L_inv, S)
    m, v = model.latent(Z[:2])
    if not (m.isfinite().all() and v.isfinite().all()):
        raise ValueError("the latent functions are not finite")
    return model


def moved_model(m: Model, device: torch.device, dtype: torch.dtype | None) -> Model:
    """The model on another device, in another precision unless that is None."""
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
