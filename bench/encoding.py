"""What reading a table costs: memory by the number of levels, and time beside numbers alone.

    python bench/encoding.py                     # both
    python bench/encoding.py levels titanic      # or some

`levels`: a million rows of two columns of numbers and one of text with a thousand, half a million
and a million different texts, each in a process of its own. Seconds of reading and encoding them,
as a fit and as a prediction do, and by how much the process grew. Then `titanic`, `bank_marketing`
and `adult`, tables in CONJUGP_DATA: a fit to the frame beside one to the features that its encoder
made, the same settings, in turn; seconds of both, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from record import add_output, check_sets, context, keep

SETS = ("levels", "titanic", "bank_marketing", "adult")
LEVELS = (1_000, 500_000, 1_000_000)
ROWS, CLASSES = 1_000_000, 3
GROWTH, RATIO = 2.0, 1.2  # memory of most levels over that of the fewest; time over numbers alone
TRAIN_ROWS = 2000


def grown(n_levels: int, n: int) -> dict[str, float]:
    """Seconds and megabytes of an encoding; to be called once in a process."""
    import pandas as pd

    from conjugp._inputs.encoder import Encoder
    from conjugp._inputs.frames import frame_of

    rng = np.random.default_rng(0)
    names = [f"level {i}" for i in range(n_levels)]  # slowly, and with no more memory than is kept
    level = pd.Series([names[i % n_levels] for i in range(n)], dtype=object)
    X = pd.DataFrame({"a": rng.normal(size=n), "b": rng.normal(size=n), "level": level})
    y = rng.integers(0, CLASSES, n)
    labels = [str(k) for k in range(CLASSES)]
    before, began = _megabytes(), time.perf_counter()
    encoder, features = Encoder.fit(frame_of(X), y, np.ones(n), labels)
    fitted = time.perf_counter()
    encoder.rows(X)
    return {
        "fit_seconds": fitted - began,
        "predict_seconds": time.perf_counter() - fitted,
        "grown_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before,
        "features": features.shape[1],
    }


def _megabytes() -> float:
    """What the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def levels(n: int) -> dict[str, Any]:
    """The same for all numbers of levels, each in a process of its own."""
    code = "import json, sys; from encoding import grown; print(json.dumps(grown(*{})))"
    found = {}
    for k in LEVELS:
        k = max(1, k * n // ROWS)
        run = subprocess.run(
            [sys.executable, "-c", code.format((k, n))],
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
        )
        found[str(k)] = json.loads(run.stdout)
    memory = [one["grown_mb"] for one in found.values()]
    ratio = max(memory) / memory[0]
    return {"n_rows": n, "levels": found, "ratio": ratio, "passed": ratio <= GROWTH}


def beside_numbers(name: str, repeats: int) -> dict[str, Any]:
    """Seconds of fits to a table and to its features."""
    import pandas as pd

    from conjugp import GPClassifier

    folder = Path(os.environ["CONJUGP_DATA"]) / "tables"
    table = pd.read_parquet(folder / f"{name}.parquet")
    rows = np.random.default_rng(0).permutation(len(table))[:TRAIN_ROWS]
    table = table.iloc[rows].reset_index(drop=True)
    y = table["target"].astype(str).to_numpy()
    X = table.drop(columns=["target", "is_test"], errors="ignore")
    seconds: dict[str, list[float]] = {"frame": [], "features": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = GPClassifier(random_state=0).fit(X, y)
        features = first._encoder.rows(X)
        GPClassifier(random_state=0).fit(features, y)
        for _ in range(repeats):
            for way, rows_ in (("frame", X), ("features", features)):
                began = time.perf_counter()
                GPClassifier(random_state=0).fit(rows_, y)
                seconds[way].append(time.perf_counter() - began)
    ratio = median(seconds["frame"]) / median(seconds["features"])
    shape = {"n_train": len(X), "n_columns": X.shape[1], "n_features": features.shape[1]}
    return {**shape, "seconds": seconds, "ratio": ratio, "passed": ratio <= RATIO}


def main() -> int:
    """Measure the sets asked for, print and keep what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sets", nargs="*", help=f"some of {', '.join(SETS)}")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of `levels`")
    parser.add_argument("--repeats", type=int, default=5, help="fits of each kind")
    add_output(parser, "encoding.json")
    arguments = parser.parse_args()
    check_sets(parser, arguments.sets, SETS)
    passed = True
    print("| | seconds | beside it | ratio |\n|---|--:|--:|--:|")
    for name in arguments.sets or SETS:
        if name == "levels":
            found = levels(arguments.rows)
            for k, one in found["levels"].items():
                fit, predict = one["fit_seconds"], one["predict_seconds"]
                print(f"| {k} levels | {fit:.2f} + {predict:.2f} | {one['grown_mb']:.0f} MB | |")
            print(f"| memory, most over fewest | | | {found['ratio']:.2f} |")
        else:
            found = beside_numbers(name, arguments.repeats)
            frame, features = (median(s) for s in found["seconds"].values())
            print(f"| {name} | {frame:.2f} | {features:.2f} | {found['ratio']:.2f} |")
        keep(arguments.output, name, {**context(), **found})
        passed &= found["passed"]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
