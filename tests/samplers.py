"""Small posteriors and quick samplers for the tests of GibbsGPClassifier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conjugp import GibbsGPClassifier
from conjugp._sampler import parallel
from conjugp._sampler.chain import Draws, Target
from conjugp._sampler.sweep import Observations
from conjugp.kernels import RBF, Matern52

KINDS = ("full", "paper", "sparse", "classes", "sampled")


def target(kind: str = "full", n: int = 14) -> Target:
    """Three classes in the plane; some rows share an input."""
    rng = np.random.default_rng(1)
    X, y = rng.standard_normal((n, 2)), rng.integers(3, size=n)
    kernel = RBF((1.0, 2.0), 3.0)
    full = Target(
        Observations(np.append(y, [0, 1]), 3, np.append(np.arange(n), [3, 3])),
        X,
        None,
        (kernel,),
        np.array([-0.5, 0.0, 0.5]),
    )
    classes = (kernel, Matern52(1.5, 2.0), RBF(0.7, 5.0))
    changes: dict[str, dict[str, Any]] = {
        "full": {},
        "paper": {"augmentation": "paper"},
        "sparse": {"Z": X[:5] + 0.1},
        "classes": {"kernels": classes},
        "sampled": {"kernel_scale": 0.5, "mean_variance": 2.0},
        "sparse sampled": {"Z": X[:5] + 0.1, "kernel_scale": 0.5},
        "classes sampled": {"kernels": classes, "kernel_scale": 0.5},
    }
    return replace(full, **changes[kind])


def random_draws(t: Target, n_chains: int = 2, n: int = 30, seed: int = 0) -> list[Draws]:
    """Draws of the prior: what is computed from draws need not know where they come from."""
    rng = np.random.default_rng(seed)
    C, M = t.data.n_classes, len(t.X if t.Z is None else t.Z)
    found = []
    for _ in range(n_chains):
        theta = np.repeat(t.theta[None], n, axis=0)
        if t.kernel_scale:
            theta = theta + t.kernel_scale * rng.standard_normal(theta.shape)
            theta[1 : n // 3] = theta[0]  # a step that stays is a group of several draws
        g = rng.standard_normal((n, C, M)) + 0.5
        found.append(Draws(g, rng.standard_normal(n), theta, rng.standard_normal((n, C))))
    return found


def quick(**changes: Any) -> GibbsGPClassifier:
    """Kernel and prior mean at rest, few draws, no other processes."""
    settings: dict[str, Any] = {
        "kernel": RBF(1.5, 4.0),
        "hyperparameters": "fixed",
        "prior_mean": -0.7,
        "n_samples": 20,
        "n_warmup": 10,
        "n_chains": 2,
        "n_jobs": 1,
        "random_state": 0,
    }
    return GibbsGPClassifier(**{**settings, **changes})


class Stop:
    """A stretch that is cut short after so many have been made."""

    def __init__(self, monkeypatch, after: int, error: BaseException | None = None) -> None:
        self.left, self.error = after, error or KeyboardInterrupt()
        self.stretch = parallel._stretch
        monkeypatch.setattr(parallel, "_stretch", self)

    def __call__(self, *args):
        if not self.left:
            raise self.error
        self.left -= 1
        return self.stretch(*args)
