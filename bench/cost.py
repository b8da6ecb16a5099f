"""What E[log p] itself costs beside the bound `tight`: a training step, and small fits.

    python bench/cost.py [--repeats 15]

Closed-form steps, all passes by torch, take turns, each bound on data and state of its own; fits
are the default ones to rows of scikit-learn's sets, full batches.
"""

from __future__ import annotations

import argparse
import time
import warnings
from statistics import median
from typing import Any

import torch
from record import add_output, context, keep
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from step import data, stepper

from conjugp import GPClassifier

BOUNDS = ("exact", "tight")
# (M, B, C), and the most that `exact` may take of what `tight` takes.
SHAPES = {(200, 1024, 10): 1.3, (200, 1024, 100): 1.6}
FEATURES = (784, 20)
FITS = {"iris": load_iris, "wine": load_wine, "breast cancer": load_breast_cancer}
FITS["digits"] = load_digits
ROWS, MOST = 300, 2.0


def in_turn(work: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Median seconds of each, and the ratio of the first to the second."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for i in range(repeats + 1):
        for name, do in work.items():
            began = time.perf_counter()
            do()
            if i:
                times[name].append(time.perf_counter() - began)
    found = {name: median(t) for name, t in times.items()}
    return {"seconds": found, "ratio": found["exact"] / found["tight"]}


def fits(name: str, repeats: int) -> dict[str, Any]:
    """Default fits to some rows of a set."""
    X, y = FITS[name](return_X_y=True)
    rows = slice(None, None, -(-len(y) // ROWS))

    def fit(bound: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            GPClassifier(bound=bound, random_state=0).fit(X[rows], y[rows])

    found = in_turn({bound: lambda bound=bound: fit(bound) for bound in BOUNDS}, repeats)
    return {**found, "n_train": len(y[rows])}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_output(parser, "cost.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    passed = True

    def record(name: str, found: dict[str, Any], most: float) -> None:
        nonlocal passed
        passed &= found["ratio"] <= most
        keep(arguments.output, name, {**context(), **found, "passed": found["ratio"] <= most})
        ms = {bound: 1e3 * s for bound, s in found["seconds"].items()}
        print(f"{name}: exact {ms['exact']:.1f} ms, tight {ms['tight']:.1f}, {found['ratio']:.2f}")

    for (M, B, C), most in SHAPES.items():
        for n_features in FEATURES:
            rows = data(4 * B, C, n_features)
            steps = {b: stepper(rows, M, B, b, fused=True) for b in BOUNDS}
            name = f"step, M={M}, B={B}, C={C}, D={n_features}"
            record(name, in_turn(steps, arguments.repeats), most)
    for name in FITS:
        record(f"fit, {name}", fits(name, max(3, arguments.repeats // 3)), MOST)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
