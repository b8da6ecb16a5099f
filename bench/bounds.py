"""What E[log p] itself is worth in fits that learn their kernels, beside the bound `tight`.

    python bench/bounds.py [table ...]     # CONJUGP_DATA names the folder of tables/*.parquet

Coupled fits with 300 inducing points and default settings otherwise, at most 3,000 rows to train
on, tables as they are. Both fits of a table differ in the bound alone.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterable
from typing import Any

from data import Frames, frames_at_hand
from record import add_output, context, keep, scores

from conjugp import GPClassifier

BOUNDS = ("exact", "tight")
WANTED = 0.94  # geometric mean of the ratios of NLL, at most


def fitted(data: Frames, bound: str, seed: int) -> dict[str, float]:
    """Scores of one fit, and its seconds."""
    clf = GPClassifier(bound=bound, covariance="full", n_inducing=300, random_state=seed)
    found = fit_and_score(clf, data)
    return {**found, "temperature": clf.temperature_, "elbo": clf.elbo_}


def fit_and_score(clf: GPClassifier, data: Frames) -> dict[str, float]:
    """Scores of a fit to a table, and its seconds."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf.fit(data.X_train, data.y_train)
    seconds = time.perf_counter() - began
    p = clf.predict_proba(data.X_test)
    return {**scores(data.y_test, p, clf.classes_), "seconds": seconds}


def geometric_mean(ratios: Iterable[float]) -> float:
    """exp of the mean of the logs."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def ratio(entry: dict[str, Any]) -> float:
    """NLL of `exact` over that of `tight`."""
    return entry["exact"]["nll"] / entry["tight"]["nll"]


def table(sets: dict[str, Any]) -> str:
    """Markdown: a line for every table, and the geometric mean."""
    lines = ["| table | rows | exact | tight | ratio |", "|---|--:|--:|--:|--:|"]
    for name, entry in sets.items():
        exact, tight = (entry[bound]["nll"] for bound in BOUNDS)
        lines.append(
            f"| {name} | {entry['n_train']} | {exact:.4f} | {tight:.4f} | {ratio(entry):.3f} |"
        )
    mean = geometric_mean(ratio(entry) for entry in sets.values())
    lines.append(f"| geometric mean | | | | {mean:.3f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="table", help="names (all at hand)")
    parser.add_argument("--seed", type=int, default=0, help="of split and fit")
    add_output(parser, "bounds.json")
    arguments = parser.parse_args()
    for name, data in frames_at_hand(arguments.tables, arguments.seed):
        found = {bound: fitted(data, bound, arguments.seed) for bound in BOUNDS}
        entry = {**context(), "n_train": len(data.y_train), "seed": arguments.seed, **found}
        keep(arguments.output, name, entry)
        print(table({name: entry}).splitlines()[2], flush=True)
    sets = json.loads(arguments.output.read_text(encoding="utf-8"))["sets"]
    print(table(sets))
    return 0 if geometric_mean(ratio(entry) for entry in sets.values()) <= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
