"""Thousands of classes: what a step costs, what a fit needs, and what sampling classes loses.

python experiments/classes.py steps     # seconds per step against classes, and a picture
python experiments/classes.py quality   # 1,000 classes: sampled against summed
python experiments/classes.py memory    # up to 1e6 rows and 10,000 classes: peak memory
python experiments/classes.py rare      # half of the classes have one or two rows
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from record import context, keep, scores

RESULTS = Path(__file__).parent / "results" / "classes.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
N_FEATURES = 32
CLASSES = (100, 300, 1000, 3000, 10_000)
CLASS_BATCH, BATCH, N_INDUCING = 512, 512, 1000
STEPS, REPEATS = 60, 5  # the start of a fit, once for so many steps, is counted in
SIZES = ((100_000, 1000), (100_000, 10_000), (1_000_000, 1000), (1_000_000, 10_000))
KINDS = ("nearest", "hierarchical")


def problem(kind: str, n: int, n_classes: int, seed: int = 0) -> tuple[NDArray, NDArray]:
    """Noisy rows around one centre for each class; "hierarchical" centres come in groups."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((n_classes, N_FEATURES), dtype=np.float32)
    if kind == "hierarchical":
        groups = rng.standard_normal((math.isqrt(n_classes), N_FEATURES), dtype=np.float32)
        centres = groups[np.arange(n_classes) % len(groups)] + 0.6 * centres
    y = rng.integers(0, n_classes, n)
    X = rng.standard_normal((n, N_FEATURES), dtype=np.float32)
    X *= 1.1 if kind == "nearest" else 0.9
    X += centres[y]
    return X, y


# --- steps --------------------------------------------------------------------------------------


def stepper(n_classes: int, class_batch: int | None) -> Callable[[], float]:
    """Gives the seconds of a step of the mean, kernel rows included, whenever it is called."""
    from conjugp._fit.weights import fit_weights, kernel_rows, start_mean
    from conjugp._inference.settings import Settings
    from conjugp._rows.dataset import Data
    from conjugp.kernels import RBF
    from conjugp.likelihoods import LogisticSoftmax

    X, y = problem("nearest", STEPS * BATCH, n_classes)
    data = Data(torch.tensor(X), torch.tensor(y), torch.ones(len(y)), n_classes)
    settings = Settings(
        LogisticSoftmax(),
        "tight",
        max_epochs=1,
        batch_size=BATCH,
        learning_rate=0.1,
        class_batch=class_batch,
        cache_mb=0,
    )
    kernel, Z = RBF(5.0, 30.0), data.X[:N_INDUCING]
    start = start_mean(len(Z), torch.full((n_classes,), -math.log(n_classes)))
    rows = kernel_rows(kernel, Z, data, settings)
    generator = torch.Generator().manual_seed(0)

    def seconds() -> float:
        began = time.perf_counter()
        fit_weights(kernel, Z, data, start, settings, generator, rows=rows)
        return (time.perf_counter() - began) / STEPS

    return seconds


def steps() -> dict[str, Any]:
    """A class batch, and for comparison the sum over all classes."""
    sizes = {"sampled": CLASS_BATCH, "summed": None}
    steppers = {(name, c): stepper(c, size) for name, size in sizes.items() for c in CLASSES}
    seconds: dict[str, dict[str, list[float]]] = {
        name: {str(c): [] for c in CLASSES} for name in sizes
    }
    # In turn, so that whatever else the machine does meets all alike; the first round warms up.
    for turn in range(REPEATS + 1):
        for (name, c), measure in steppers.items():
            found = measure()
            if turn:
                seconds[name][str(c)].append(found)
    median = {
        name: {c: statistics.median(x) for c, x in each.items()} for name, each in seconds.items()
    }
    print(json.dumps(median, indent=1))
    large = [x for c, x in median["sampled"].items() if int(c) >= 1000]
    return {
        **context(),
        "batch_size": BATCH,
        "class_batch": CLASS_BATCH,
        "n_inducing": N_INDUCING,
        "seconds": seconds,
        "median": median,
        "spread": max(large) / min(large),
        "passed": max(large) <= 1.2 * min(large),
    }


def plot(found: dict[str, Any]) -> None:
    """Step time against the number of classes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    styles = {"summed": ("o--", "sum over all classes"), "sampled": ("o-", "class batch of 512")}
    for name, (style, label) in styles.items():
        median = found["median"][name]
        x = [int(c) for c in median]
        ax.loglog(x, [1e3 * s for s in median.values()], style, label=label)
    ax.set_xlabel("classes")
    ax.set_ylabel("milliseconds per step")
    ax.set_title(f"{found['batch_size']:,} rows, {found['n_inducing']:,} inducing points")
    ax.grid(which="both", alpha=0.25)
    ax.legend(frameon=False)
    figure.savefig(IMAGES / "classes.png", dpi=150)


# --- whole fits ---------------------------------------------------------------------------------


def fit(kind: str, n: int, n_classes: int, n_test: int, **settings: Any) -> dict[str, Any]:
    """One fit and its scores on rows of the same kind, in a process of its own."""
    from conjugp import GPClassifier

    # One draw of centres for both parts.
    X, y = problem(kind, n + n_test, n_classes)
    began = time.perf_counter()
    clf = GPClassifier(random_state=0, n_inducing=N_INDUCING, **settings).fit(X[:n], y[:n])
    fitted = time.perf_counter()
    found: dict[str, Any] = {"fit_seconds": fitted - began}
    labels, _ = clf.predict_topk(X[n:], 10)
    found["predict_seconds"] = time.perf_counter() - fitted
    found["error"] = float(np.mean(labels[:, 0] != y[n:]))
    found["top_10_error"] = float(np.mean((labels != y[n:, None]).all(axis=1)))
    few = slice(n, n + 2000)
    found["nll"] = scores(y[few], clf.predict_proba(X[few]), clf.classes_)["nll"]
    found["temperature"], found["variance_scale"] = clf.temperature_, clf.variance_scale_
    found["never_predicted"] = int(n_classes - len(np.unique(labels)))
    found["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def alone(*arguments: Any, **settings: Any) -> dict[str, Any]:
    """`fit` in a fresh process: peak memory is that of one fit."""
    call = json.dumps([list(arguments), settings])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--one", call],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def quality() -> dict[str, Any]:
    """1,000 classes, with and without sampling them."""
    result: dict[str, Any] = {**context(), "fits": {}}
    for kind in KINDS:
        found = {
            name: alone(kind, 100_000, 1000, 10_000, class_batch=size, batch_size=BATCH)
            for name, size in (("sampled", CLASS_BATCH), ("summed", None))
        }
        ratio = found["sampled"]["nll"] / found["summed"]["nll"]
        result["fits"][kind] = {**found, "nll_ratio": ratio, "passed": ratio <= 1.02}
        print(kind, json.dumps(result["fits"][kind], indent=1), flush=True)
    return result


def memory(max_epochs: float) -> dict[str, Any]:
    """Fits of up to a million rows to up to 10,000 classes."""
    result: dict[str, Any] = {**context(), "max_epochs": max_epochs, "fits": {}}
    for n, n_classes in SIZES:
        found = alone(
            "hierarchical",
            n,
            n_classes,
            20_000,
            class_batch=CLASS_BATCH,
            max_epochs=max_epochs,
            device="cpu",
        )
        found["passed"] = found["peak_memory_gb"] < 8
        result["fits"][f"{n} x {n_classes}"] = found
        print(n, n_classes, found, flush=True)
    return result


# --- rare classes -------------------------------------------------------------------------------


def rare_problem(n_classes: int, seed: int, n_test: int = 10) -> tuple[NDArray, ...]:
    """Every other class has 15 rows, the rest one or two; of each `n_test` to predict."""
    rng = np.random.default_rng(seed)
    i = np.arange(n_classes)
    counts = np.where(i % 2, 15, 1 + i % 4 // 2)
    centres = 2 * rng.standard_normal((n_classes, 16))
    y, y_test = np.repeat(i, counts), np.repeat(i, n_test)
    X, X_test = (centres[c] + 0.8 * rng.standard_normal((len(c), 16)) for c in (y, y_test))
    return X.astype(np.float32), y, X_test.astype(np.float32), y_test, counts


def class_errors(p: NDArray, y: NDArray, weight: NDArray) -> NDArray:
    """Of every class the calibration error of its column, 15 bins of equal width, (C,)."""
    from conjugp.metrics import classwise_calibration_error

    columns = [np.c_[1 - p[:, c], p[:, c]] for c in range(p.shape[1])]
    return np.array(
        [
            classwise_calibration_error(y == c, q, labels=[False, True], sample_weight=weight)
            for c, q in enumerate(columns)
        ]
    )


def fit_rare(n_classes: int, seed: int, **settings: Any) -> dict[str, Any]:
    """What becomes of classes with one or two rows, beside those with 15."""
    from conjugp import GPClassifier
    from conjugp.metrics import expected_calibration_error

    X, y, X_test, y_test, counts = rare_problem(n_classes, seed)
    began = time.perf_counter()
    clf = GPClassifier(random_state=0, n_inducing=1500, batch_size=256, **settings).fit(X, y)
    found: dict[str, Any] = {"fit_seconds": time.perf_counter() - began}
    found["never_predicted"] = int(n_classes - len(np.unique(clf.predict(X))))
    found["class_gap"] = clf.class_gap_
    p = clf.predict_proba(X_test)
    weight = counts[y_test].astype(float)  # classes as frequent as they were in training
    errors, best = class_errors(p, y_test, weight), p.argmax(1)
    for name, those in (("rare", counts <= 2), ("frequent", counts > 2)):
        rows, named = those[y_test], those[best]
        found[name] = {
            "error": float(np.mean(best[rows] != y_test[rows])),
            "nll": float(-np.log(p[rows, y_test[rows]]).mean()),
            "ece_when_predicted": expected_calibration_error(
                y_test[named], p[named], labels=clf.classes_, sample_weight=weight[named]
            ),
            "classwise_error": float(errors[those].mean()),
            "mean_probability": float(np.average(p[:, those].sum(1), weights=weight)),
            "share_of_rows": float(np.average(rows, weights=weight)),
        }
    return found


def rare() -> dict[str, Any]:
    """Half of 2,000 classes have one or two rows: sampled classes against all of them."""
    result: dict[str, Any] = {**context(), "n_classes": 2000, "fits": {}}
    for seed in (3, 4, 5):
        found = {
            name: fit_rare(2000, seed, class_batch=size)
            for name, size in (("sampled", CLASS_BATCH), ("summed", None))
        }
        lost = found["sampled"]["never_predicted"] - found["summed"]["never_predicted"]
        result["fits"][str(seed)] = {**found, "lost_by_sampling": lost}
        print(seed, json.dumps(result["fits"][str(seed)], indent=1), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="steps, quality, memory, rare (all)")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--epochs", type=float, default=1, help="of the memory fits")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        positional, settings = json.loads(arguments.one)
        print(json.dumps(fit(*positional, **settings)))
        return
    for what in arguments.what or ("steps", "quality", "memory", "rare"):
        if what == "steps":
            found = steps()
            plot(found)
        elif what == "memory":
            found = memory(arguments.epochs)
        else:
            found = {"quality": quality, "rare": rare}[what]()
        keep(arguments.output, what, found)


if __name__ == "__main__":
    main()
