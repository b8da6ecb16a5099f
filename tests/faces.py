"""Small data sets and quick classifiers for the tests of the estimator."""

from __future__ import annotations

from typing import Any

import numpy as np

from conjugp import FitOptions, GPClassifier
from conjugp.kernels import RBF


def toy(
    n: int = 60, n_classes: int = 3, n_features: int = 2, *, gap: float = 2.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """One Gaussian cloud per class, all classes of about the same size."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % n_classes)
    centres = gap * rng.standard_normal((n_classes, n_features))
    return rng.standard_normal((n, n_features)) + centres[y], y


def fixed(**changes: Any) -> GPClassifier:
    """Kernel and prior mean at rest, no temperature: milliseconds."""
    settings: dict[str, Any] = {
        "kernel": RBF(1.5, 4.0),
        "learn_hyperparameters": False,
        "prior_mean": -0.7,
        "temperature": None,
        "random_state": 0,
    }
    return GPClassifier(**{**settings, **changes})


def minibatch(**changes: Any) -> GPClassifier:
    """Fewer inducing points than rows, batches, everything learned a little."""
    settings: dict[str, Any] = {
        "n_inducing": 8,
        "batch_size": 20,
        "max_epochs": 20,
        "random_state": 0,
    }
    return GPClassifier(**{**settings, **changes})


def decoupled(**changes: Any) -> GPClassifier:
    """Mean and covariance on different inducing points, the kernel given."""
    settings: dict[str, Any] = {
        "kernel": RBF(1.5, 10.0),
        "learn_hyperparameters": False,
        "covariance": "shared",
        "n_inducing": 20,
        "temperature": None,
        "random_state": 0,
        "options": FitOptions(n_covariance=10),
    }
    return GPClassifier(**{**settings, **changes})


def fitted_attributes(estimator: Any) -> list[str]:
    """Names of what a fit has set."""
    given = estimator.get_params(deep=False)
    return sorted(name for name in vars(estimator) if name not in given)
