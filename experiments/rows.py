"""From ten thousand rows to ten million, read from disk: seconds and memory of `fit_stream`.

python experiments/rows.py           # all sizes, each in its own process, and a picture
python experiments/rows.py 1e4 1e5   # some of them
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from record import context, keep

RESULTS = Path(__file__).parent / "results" / "rows.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
N_FEATURES, N_CLASSES = 10, 5
# Two passes, whatever the number of rows; fits that stop when they are flat stop sooner.
SETTINGS = {
    "covariance": "shared",
    "n_inducing": 500,
    "max_epochs": 2,
    "learn_hyperparameters": False,
    "random_state": 0,
}
_GROUP = 2**16  # rows of a Parquet file's group


def write_rows(path: Path, n: int, seed: int = 0) -> None:
    """A Parquet file of noisy rows sorted by class: the worst order there is."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(1).standard_normal((N_CLASSES, N_FEATURES)).astype(np.float32)
    names = [f"x{i}" for i in range(N_FEATURES)]
    schema = pa.schema([*((name, pa.float32()) for name in names), ("label", pa.int64())])
    with pq.ParquetWriter(path, schema) as file:
        for start in range(0, n, _GROUP):
            y = np.arange(start, min(start + _GROUP, n)) * N_CLASSES // n
            X = centres[y] + rng.standard_normal((len(y), N_FEATURES), np.float32)
            file.write_table(pa.table([*X.T, y], schema=schema))


def held_out(n: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Fresh rows of the same kind."""
    centres = np.random.default_rng(1).standard_normal((N_CLASSES, N_FEATURES)).astype(np.float32)
    y = np.arange(n) % N_CLASSES
    return centres[y] + np.random.default_rng(2).standard_normal((n, N_FEATURES), np.float32), y


def megabytes() -> float:
    """The highest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """One fit to a file, in this process."""
    import warnings

    from conjugp import FitOptions, GPClassifier
    from conjugp.kernels import RBF
    from conjugp.metrics import nll

    before, reports = megabytes(), []
    options = FitOptions(callback=lambda p: reports.append((p.stage, time.perf_counter())))
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    clf = GPClassifier(RBF(4.0, 10.0), **settings, options=options)
    clf.fit_stream(path, target="label")
    seconds = time.perf_counter() - began
    read = max(t for stage, t in reports if stage == "reading") - began
    grown = megabytes() - before
    X, y = held_out()
    return {
        "seconds": seconds,
        "seconds_reading": read,
        "grown_mb": grown,
        "process_mb": before,
        "nll": nll(y, clf.predict_proba(X), labels=clf.classes_),
    }


def picture(found: dict[str, Any], path: Path) -> None:
    """Seconds and memory against the number of rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n = np.array(sorted(map(int, found)))
    seconds, memory, size = (
        np.array([found[str(i)][key] for i in n]) for key in ("seconds", "grown_mb", "file_mb")
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    left.loglog(n, seconds, "o-", label="fit_stream")
    left.loglog(n, seconds[-1] * n / n[-1], ":", color="grey", label="proportional to rows")
    left.set(xlabel="rows", ylabel="seconds")
    left.legend()
    right.loglog(n, memory, "o-", label="memory of the fit")
    right.loglog(n, size, "s--", color="grey", label="the file")
    right.set(xlabel="rows", ylabel="MB")
    right.legend()
    for ax in (left, right):
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure every size, keep the numbers, draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=float, default=SIZES, help="numbers of rows")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--image", type=Path, default=IMAGES / "rows.png")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, SETTINGS)))
        return
    found: dict[str, Any] = {}
    for n in map(int, args.sizes):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            write_rows(path, n)
            run = subprocess.run(
                [sys.executable, __file__, "--one", str(path)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found[str(n)] = {"file_mb": path.stat().st_size / 2**20, **json.loads(run.stdout)}
        print(n, found[str(n)], flush=True)
    entry = {**context(), "settings": SETTINGS, "n_features": N_FEATURES, "sizes": found}
    keep(args.output, "fit_stream", entry)
    picture(found, args.image)


if __name__ == "__main__":
    main()
