"""Rows per second of `predict_proba`, beside GPyTorch and scikit-learn, and its peak memory.

    python bench/throughput.py            # everything: results/throughput.json and two tables
    python bench/throughput.py speed      # rows per second alone
    python bench/throughput.py memory     # peak memory on a million rows alone

Predictions cost the same whatever the parameters are, so models are trained for a moment only.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import add_output, context, keep

REPEATS = 5
N_CLASSES = 10
SIZES = [(200, 20), (1000, 20), (200, 784), (1000, 784)]  # M, features
MEMORY = [(10, 20), (150, 20)]  # classes, features
MEMORY_ROWS = 1_000_000
MEMORY_LIMIT_MB = 1000  # above the table of probabilities and one copy of X
_SECONDS = 1.0  # a contestant predicts so many rows that it takes about this long
_MOST_ROWS = 50_000


def data(n: int, n_features: int, n_classes: int) -> tuple[NDArray, NDArray]:
    """Clouds about random centres, float32."""
    rng = np.random.default_rng(0)
    centres = 2.0 * rng.standard_normal((n_classes, n_features)) / np.sqrt(n_features / 20)
    y = np.arange(n) % n_classes
    X = rng.standard_normal((n, n_features), dtype=np.float32)
    for i in range(0, n, 10_000):  # in parts: a million rows are not to be there twice
        X[i : i + 10_000] += centres[y[i : i + 10_000]]
    return X, y


def fitted(X: NDArray, y: NDArray, M: int, covariance: str) -> Any:
    """A GPClassifier on M inducing points that was trained for a moment."""
    from conjugp import FitOptions, GPClassifier
    from conjugp.kernels import RBF

    clf = GPClassifier(
        RBF(np.full(X.shape[1], 2.0 * np.sqrt(X.shape[1])), 10.0),
        n_inducing=M,
        inducing="random",
        covariance=covariance,
        learn_hyperparameters=False,
        learn_inducing=False,
        max_epochs=0.5,
        temperature=0.9,
        options=FitOptions(search=False),
        random_state=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return clf.fit(X, y)


def contestants(M: int, n_features: int, folder: Path) -> dict[str, Callable[[NDArray], Any]]:
    """Functions from rows to probabilities; all models have M points and 10 classes."""
    import gpytorch
    import onnxruntime
    import torch
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF
    from svgp import SVGP

    from conjugp.export import to_onnx

    X, y = data(M + 1200, n_features, N_CLASSES)
    found: dict[str, Callable[[NDArray], Any]] = {}
    shared, each = fitted(X, y, M, "shared"), fitted(X, y, M, "full")
    shared.variance_scale_ = 1.0  # the dearer case: at 0 variances are not needed
    to_onnx(shared, folder / "model.onnx", input_dtype="float32")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    found["conjugp"] = shared.predict_proba
    found["conjugp in ONNX Runtime"] = lambda x: session.run(None, {"X": x})[1]
    found["conjugp, a covariance per class"] = each.predict_proba
    model = SVGP(torch.as_tensor(X[:M]), N_CLASSES, 2.0 * np.sqrt(n_features))
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=N_CLASSES, mixing_weights=False)
    model.eval()
    likelihood.eval()

    def sampled(x: NDArray) -> Any:
        """The default: the softmax of ten joint draws, which cost the cube of the rows."""
        with torch.no_grad():
            chunks = torch.as_tensor(x).split(100)
            return torch.cat([likelihood(model(one)).probs.mean(0) for one in chunks]).numpy()

    def at_the_mean(x: NDArray) -> Any:
        """The softmax of the latent means; no variance is asked for."""
        with torch.no_grad():
            chunks = torch.as_tensor(x).split(1000)
            return torch.cat([model(one).mean.softmax(-1) for one in chunks]).numpy()

    found["GPyTorch, ten draws"], found["GPyTorch, at the mean"] = sampled, at_the_mean
    peer = GaussianProcessClassifier(10.0 * RBF(2.0 * np.sqrt(n_features)), optimizer=None)
    found["scikit-learn, M training rows"] = peer.fit(X[:M], y[:M]).predict_proba
    return found


def rows_in(predict: Callable[[NDArray], Any], X: NDArray) -> int:
    """How many rows take about a second."""
    n = 200
    predict(X[:n])
    while True:
        began = time.perf_counter()
        predict(X[:n])
        took = time.perf_counter() - began
        if took > _SECONDS / 4 or n == len(X):
            return max(100, min(len(X), int(n * _SECONDS / took)))
        n = min(4 * n, len(X))


def speed(M: int, n_features: int, repeats: int) -> dict[str, Any]:
    """Rows per second, all contestants in turn so that other work meets them alike."""
    X, _ = data(_MOST_ROWS, n_features, N_CLASSES)
    with tempfile.TemporaryDirectory() as folder:
        models = contestants(M, n_features, Path(folder))
        sizes = {name: rows_in(predict, X) for name, predict in models.items()}
        rates: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(repeats):
            for name, predict in models.items():
                began = time.perf_counter()
                predict(X[: sizes[name]])
                rates[name].append(sizes[name] / (time.perf_counter() - began))
    median = {name: statistics.median(found) for name, found in rates.items()}
    ours = median["conjugp"]
    return {
        "n_inducing": M,
        "n_features": n_features,
        "n_classes": N_CLASSES,
        "rows": sizes,
        "rows_per_second": rates,
        "median": median,
        "ratio": {name: ours / rate for name, rate in median.items()},
    }


def peak(n_classes: int, n_features: int, n_rows: int, M: int) -> dict[str, float]:
    """Peak memory of `predict_proba` in this process, above what is there before it."""
    clf = fitted(*data(M + 1500, n_features, n_classes), M, "shared")
    clf.variance_scale_ = 1.0
    X, _ = data(n_rows, n_features, n_classes)
    clf.predict_proba(X[:3000])  # tables and threads are there once and for all
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize() / 2**20
    began = time.perf_counter()
    p = clf.predict_proba(X)
    seconds = time.perf_counter() - began
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"grown_mb": highest - before, "result_mb": p.nbytes / 2**20, "seconds": seconds}


def memory(n_classes: int, n_features: int, n_rows: int, M: int = 1000) -> dict[str, Any]:
    """`peak` in a process of its own."""
    arguments = ["peak", *map(str, (n_classes, n_features, n_rows, M))]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=True
    )
    grown, result, seconds = map(float, done.stdout.split())
    copy = n_rows * n_features * 4 / 2**20
    working = grown - result - copy
    return {
        "n_rows": n_rows,
        "n_classes": n_classes,
        "n_features": n_features,
        "n_inducing": M,
        "grown_mb": grown,
        "probabilities_mb": result,
        "inputs_mb": copy,
        "working_mb": working,
        "limit_mb": MEMORY_LIMIT_MB,
        "seconds": seconds,
        "passed": working <= MEMORY_LIMIT_MB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=["speed", "memory", "peak"])
    parser.add_argument("numbers", nargs="*", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--rows", type=int, default=MEMORY_ROWS, help="rows of the memory part")
    add_output(parser, "throughput.json")
    arguments = parser.parse_args()
    if arguments.part == "peak":
        print(*peak(*arguments.numbers).values())
        return
    if arguments.part in (None, "speed"):
        for M, n_features in SIZES:
            result = speed(M, n_features, arguments.repeats)
            keep(arguments.output, f"M = {M}, D = {n_features}", {**context(), **result})
            print(f"\n| M = {M}, D = {n_features} | rows/s | conjugp is faster by |\n|---|--:|--:|")
            for name, rate in result["median"].items():
                print(f"| {name} | {rate:,.0f} | {result['ratio'][name]:.2f} |", flush=True)
    if arguments.part in (None, "memory"):
        print("\n| classes | grown MB | probabilities MB | inputs MB | the rest MB | |")
        print("|--:|--:|--:|--:|--:|---|")
        for n_classes, n_features in MEMORY:
            result = memory(n_classes, n_features, arguments.rows)
            keep(arguments.output, f"memory, C = {n_classes}", {**context(), **result})
            numbers = [result[f"{k}_mb"] for k in ("grown", "probabilities", "inputs", "working")]
            cells = " | ".join(f"{x:.0f}" for x in numbers)
            print(
                f"| {n_classes} | {cells} | {'pass' if result['passed'] else 'FAIL'} |", flush=True
            )


if __name__ == "__main__":
    main()
