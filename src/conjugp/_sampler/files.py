"""Draws of the sampler in files: taken apart, checked and put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conjugp._persistence.parts import Parts
from conjugp._sampler.chain import Draws, Target
from conjugp._sampler.diagnostics import Diagnostics
from conjugp._sampler.prediction import SampledModel
from conjugp._sampler.sweep import AUGMENTATIONS, Observations
from conjugp.kernels._base import check_kernels


def model_parts(model: SampledModel) -> dict[str, Any]:
    """What was sampled, and all draws, by the names of the format."""
    t = model.target
    return {
        "y": t.data.y,
        "index": t.data.index,
        "X": t.X,
        "Z": t.Z,
        "kernels": list(t.kernels),
        "mean": t.mean,
        "augmentation": t.augmentation,
        "mean_variance": t.mean_variance,
        "kernel_scale": t.kernel_scale,
        "jitter": t.jitter,
        "seed": model.seed,
        "draws": list(map(vars, model.draws)),
    }


def read_target(take: Parts, C: int, D: int) -> Target:
    """What was sampled, of C classes and D features."""
    X, Z = take.array("X", np.float64, None, D), take.any("Z")
    if Z is not None:
        Z = take.array("Z", np.float64, None, D)
    y, index = take.array("y", np.int64, None), take.any("index")
    points = X if Z is None else Z
    if not (len(X) and len(points) and len(y)) or y.min() < 0 or y.max() >= C:
        raise ValueError("labels are not among the classes, or there are no rows")
    if index is not None:
        index = take.array("index", np.int64, len(y))
    if len(y) != len(X) if index is None else index.min() < 0 or index.max() >= len(X):
        raise ValueError("rows and inputs do not go together")
    kernels, jitter = take.any("kernels"), take.any("jitter")
    check_kernels(kernels, C, torch.tensor(points))
    if take.text("augmentation") not in AUGMENTATIONS:
        raise ValueError("the augmentation is none")
    return Target(
        Observations(y, C, index),
        X,
        Z,
        tuple(kernels),
        take.array("mean", np.float64, C),
        take.text("augmentation"),
        take.number("mean_variance", 0),
        take.number("kernel_scale", 0),
        None if jitter is None else take.number("jitter", 0),
    )


def read_observations(take: Parts, target: Target) -> NDArray[np.int64]:
    """Which observation of the target every row of the user is."""
    observations = take.array("observations", np.int64, None)
    if len(observations) and (observations.min() < 0 or observations.max() >= len(target.data.y)):
        raise ValueError("observations and rows do not go together")
    return observations


def read_draws(take: Parts, target: Target) -> list[Draws]:
    """The draws of every chain, as many of each."""
    shapes = {name: x.shape[1:] for name, x in vars(Draws.room(target, 0)).items()}
    draws, n = list[Draws](), None
    for one in map(Parts, take.object("draws", list)):
        found = {}
        for name, shape in shapes.items():
            found[name] = one.array(name, np.float64, n, *shape)
            n = len(found[name])
        draws.append(Draws(**found))
        one.end()
    if not draws or not len(draws[0].g):
        raise ValueError("there are no draws")
    return draws


def read_diagnostics(take: Parts, draws: list[Draws]) -> Diagnostics:
    """Groups of measures, NaN where there were too few draws."""
    found = take.object("diagnostics", dict)
    if "log_likelihood_total" not in found or "f" not in found:
        raise ValueError("the diagnostics are not those of a sampler")
    for group in found.values():
        measures = Parts(group)
        n = None
        for name in ("rhat", "ess_bulk", "ess_tail"):
            n = len(measures.array(name, np.float64, n, finite=False))
        if not n:
            raise ValueError("a group of the diagnostics is empty")
        measures.end()
    return Diagnostics(found, len(draws), len(draws[0].g))
