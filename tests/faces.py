"""Small data sets and quick classifiers for the tests of the estimator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.special import rel_entr, softmax

from conjugp import FitOptions, GPClassifier
from conjugp.kernels import RBF


def toy(
    n: int = 60, n_classes: int = 3, n_features: int = 2, *, gap: float = 2.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """One Gaussian cloud per class, all classes of about the same size."""
    rng, y, centres = _clouds(n, n_classes, n_features, gap, seed)
    return rng.standard_normal((n, n_features)) + centres[y], y


def regret(
    clf: Any,
    n: int = 60,
    n_classes: int = 3,
    n_features: int = 2,
    *,
    gap: float = 2.0,
    seed: int = 0,
    labels: Sequence[Any] | None = None,
    units: Callable[[np.ndarray], Any] = np.asarray,
) -> float:
    """Nats that a fit to `toy` of these arguments loses on new rows to who knows the clouds.

    `labels` are the names of the classes, several may have the same; `units` makes what the
    classifier was fitted to out of rows as `toy` gives them.
    """
    _, _, centres = _clouds(n, n_classes, n_features, gap, seed)
    rng = np.random.default_rng(seed + 1000)
    X = rng.standard_normal((500, n_features)) + centres[rng.integers(n_classes, size=500)]
    share = softmax(-0.5 * np.square(X[:, None] - centres).sum(-1), axis=1)
    names = np.asarray(range(n_classes) if labels is None else labels)
    truth = np.stack([share[:, names == name].sum(1) for name in clf.classes_], axis=1)
    return float(rel_entr(truth, clf.predict_proba(units(X))).sum(1).mean())


def _clouds(
    n: int, n_classes: int, n_features: int, gap: float, seed: int
) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    """What draws the rows, their labels, and the centres of the classes."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % n_classes)
    return rng, y, gap * rng.standard_normal((n_classes, n_features))


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


def refuses_rows(call: Callable[[Any], Any], X: np.ndarray, *more: tuple[Any, str]) -> None:
    """Rows of two features are refused that are too narrow, none, sparse, or one of these."""
    cases = ((X[:, :1], "X has 1 features.*expecting 2"), *more, (X[:0], r"\bX\b.*0 sample"))
    for bad, match in cases:
        with pytest.raises(ValueError, match=match):
            call(bad)
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        call(sparse.csr_matrix(X))
