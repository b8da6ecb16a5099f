"""What it is worth to tame columns with long tails.

    python bench/taming.py [table ...]     # CONJUGP_DATA names the folder of tables/*.parquet

Coupled fits with 300 inducing points and default settings otherwise, at most 3,000 rows to train
on, tables as they are. A kernel of the user's own sees columns as they are: both fits of a table
have a Matérn 5/2 that is learned, and differ in the taming alone (tables of up to 300 rows, where
the default is an RBF, have that).
"""

from __future__ import annotations

import argparse
import json

from bounds import fit_and_score, geometric_mean
from data import Frames, frames_at_hand
from record import add_output, context, keep

from conjugp import GPClassifier
from conjugp.kernels import RBF, Kernel, Matern52


def fitted(data: Frames, kernel: Kernel | None, seed: int) -> tuple[dict[str, float], int]:
    """Scores of one fit and its seconds; how many columns were tamed."""
    clf = GPClassifier(kernel, covariance="full", n_inducing=300, random_state=seed)
    found = fit_and_score(clf, data)
    taming = clf._inputs.scaling.taming
    return found, 0 if taming is None else len(taming.columns)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="table", help="names (all at hand)")
    parser.add_argument("--seed", type=int, default=0, help="of split and fit")
    add_output(parser, "taming.json")
    arguments = parser.parse_args()
    for name, data in frames_at_hand(arguments.tables, arguments.seed):
        tamed, columns = fitted(data, None, arguments.seed)
        entry = {**context(), "n_train": len(data.y_train), "columns": columns, "tamed": tamed}
        if columns:  # else both fits are one
            own = RBF() if len(data.y_train) <= 300 else Matern52()
            entry["plain"] = fitted(data, own, arguments.seed)[0]
            print(name, columns, f"{tamed['nll']:.4f} {entry['plain']['nll']:.4f}", flush=True)
        keep(arguments.output, name, entry)
    sets = json.loads(arguments.output.read_text(encoding="utf-8"))["sets"].values()
    ratios = [e["tamed"]["nll"] / e["plain"]["nll"] for e in sets if "plain" in e]
    better = sum(ratio < 1 for ratio in ratios)
    print(f"{len(ratios)} tables, geometric mean {geometric_mean(ratios):.3f}, {better} better")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
