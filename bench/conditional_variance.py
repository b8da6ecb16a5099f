"""Test NLL by the share of their conditional variance with which rows are fitted (math.md, Q9).

python bench/conditional_variance.py [case ...]

Small tables, likelihoods and noise: where a small share might do harm. `optimiser.py` has the
large sets.
"""

from __future__ import annotations

import argparse
import warnings
from statistics import mean
from typing import Any

import numpy as np
from data import SPLITS, Split, load
from record import add_output, context, keep, scores

from conjugp import FitOptions, GPClassifier

SHARES = (1.0, 0.3, 0.1, 0.05, "auto")
SETTINGS: dict[str, Any] = {"n_inducing": 200, "covariance": "full", "batch_size": 512}
# Data, likelihood, epochs.
CASES: dict[str, tuple[str, str, int]] = {
    "noise": ("noise", "logistic-softmax", 50),
    "satimage": ("satimage", "logistic-softmax", 20),
    "satimage, softmax": ("satimage", "softmax", 20),
    "satimage, robust-max": ("satimage", "robust-max", 20),
    "dry bean": ("dry_bean", "logistic-softmax", 20),
    "letter": ("letter", "logistic-softmax", 20),
}
N_SPLITS = 3


def noise(seed: int) -> Split:
    """2,100 rows of 50 features, of which five matter, and three labels in ten of another class."""
    rng = np.random.default_rng(seed)
    centres = 1.5 * rng.standard_normal((3, 5))

    def rows(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(3, size=n)
        X = rng.standard_normal((n, 50))
        X[:, :5] += centres[y]
        wrong = rng.random(n) < 0.3
        return X, np.where(wrong, (y + rng.integers(1, 3, size=n)) % 3, y)

    return Split(*rows(2100), *rows(10_000))


def nlls(case: str) -> dict[str, float]:
    """Mean NLL over splits, by share."""
    name, likelihood, epochs = CASES[case]
    n = N_SPLITS if name == "noise" else min(N_SPLITS, SPLITS[name])
    found: dict[str, list[float]] = {str(share): [] for share in SHARES}
    for seed in range(n):
        split = noise(seed) if name == "noise" else load(name, seed)
        for share in SHARES:
            options = FitOptions(conditional_variance=share)
            model = GPClassifier(
                **SETTINGS,
                likelihood=likelihood,
                max_epochs=epochs,
                random_state=0,
                options=options,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the same number of epochs for all
                model.fit(split.X_train, split.y_train)
            proba = model.predict_proba(split.X_test)
            found[str(share)].append(scores(split.y_test, proba, model.classes_)["nll"])
    return {share: mean(values) for share, values in found.items()}


def main() -> None:
    """Print a line for every case, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=", ".join(CASES))
    add_output(parser, "conditional_variance.json")
    args = parser.parse_args()
    unknown = set(args.cases) - CASES.keys()
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    print("| | " + " | ".join(map(str, SHARES)) + " |\n|---|" + "--:|" * len(SHARES))
    for case in args.cases or CASES:
        found = nlls(case)
        print(f"| {case} | " + " | ".join(f"{v:.4f}" for v in found.values()) + " |", flush=True)
        keep(args.output, case, {**context(), "nll": found})


if __name__ == "__main__":
    main()
