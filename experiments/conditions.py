"""Every likelihood under bad conditions: overlap, a class of two rows, separable and wrong labels.

python experiments/conditions.py     # a few minutes; experiments/results/conditions.json
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from conjugp import GPClassifier
from conjugp.kernels import RBF
from likelihoods import METHODS, N_TEST, N_TRAIN, SETTINGS, sample, scores, truth

RESULTS = Path(__file__).parent / "results" / "conditions.json"
N_SEEDS = 5
WRONG = 0.2  # labels replaced by one of the other two
CONDITIONS = {
    "overlapping": "overlapping (σ² = 1)",
    "two of a class": "a class of two rows (σ² = 0.1)",
    "separable": "separable (σ² = 0.005)",
    "wrong labels": "20 % wrong labels (σ² = 0.05)",
}
VARIANCE = {"overlapping": 1.0, "two of a class": 0.1, "separable": 0.005, "wrong labels": 0.05}


def training_rows(condition: str, seed: int) -> tuple[NDArray, NDArray]:
    """500 rows and labels, fewer where a class has only two."""
    X, y = sample(N_TRAIN, VARIANCE[condition], (seed, 0))
    if condition == "two of a class":
        kept = (y != 2) | (np.cumsum(y == 2) <= 2)
        return X[kept], y[kept]
    if condition == "wrong labels":
        rng = np.random.default_rng((seed, 3))
        wrong = rng.random(len(y)) < WRONG
        y = np.where(wrong, (y + rng.integers(1, 3, len(y))) % 3, y)
    return X, y


def probabilities(X: NDArray, condition: str) -> NDArray:
    """p(y | x) of labels as the training set has them.

    In "two of a class" those of the third are as rare as in training.
    """
    p = truth(X, VARIANCE[condition])
    if condition == "two of a class":
        p = p * np.array([1.0, 1.0, 2 / (N_TRAIN / 3)])
        p /= p.sum(axis=1, keepdims=True)
    return (1 - 1.5 * WRONG) * p + 0.5 * WRONG if condition == "wrong labels" else p


def measure(method: str, condition: str, seed: int) -> dict[str, float]:
    """Error, NLL and calibration error; an exception or a NaN would end the experiment."""
    torch.set_num_threads(1)
    X, y = training_rows(condition, seed)
    clf = GPClassifier(RBF(), random_state=seed, **{**SETTINGS, **METHODS[method]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        clf.fit(X, y)
    X_test, y_test = sample(N_TEST, VARIANCE[condition], (seed, 1))
    if condition == "two of a class":
        X_test = X_test[(y_test != 2) | (np.cumsum(y_test == 2) <= 2 * N_TEST / N_TRAIN)]
    p = clf.predict_proba(X_test)
    if not (np.isfinite(p).all() and np.allclose(p.sum(axis=1), 1)):
        raise FloatingPointError(f"{method} under {condition}, seed {seed}: not probabilities")
    return scores(p, probabilities(X_test, condition))


def experiment(n_seeds: int, n_jobs: int) -> dict[str, Any]:
    """All of it, seeds apart."""
    todo = [(m, c, s) for m in METHODS for c in CONDITIONS for s in range(n_seeds)]
    found = Parallel(n_jobs=n_jobs)(delayed(measure)(*each) for each in todo)
    out: dict[str, Any] = {m: {c: [] for c in CONDITIONS} for m in METHODS}
    for (method, condition, _), one in zip(todo, found, strict=True):
        out[method][condition].append({k: float(f"{v:.4g}") for k, v in one.items()})
    return {"n_seeds": n_seeds, "methods": out}


def table(found: dict[str, Any]) -> str:
    """Markdown: NLL and calibration error of every pair under every condition."""
    lines = [
        "| NLL / calibration error | " + " | ".join(CONDITIONS.values()) + " |",
        "|---|" + "--:|" * len(CONDITIONS),
    ]
    for method, each in found["methods"].items():
        cells = []
        for condition in CONDITIONS:
            mean = {k: np.mean([one[k] for one in each[condition]]) for k in ("nll", "ece")}
            cells.append("{nll:.3f} / {ece:.3f}".format(**mean))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only show what is in the file")
    parser.add_argument("--seeds", type=int, default=N_SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.table:
        found = experiment(arguments.seeds, arguments.jobs)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(json.loads(arguments.output.read_text())))


if __name__ == "__main__":
    main()
