"""How many inducing points, and one kernel or one for each class: NLL and time on Shuttle.

    python experiments/inducing_points.py             # fits, results/inducing_points.json, figure
    python experiments/inducing_points.py --figure    # the table and the figure from that file

The experiment "Inducing points and hyperparameters" of the paper (Galy-Fajou, Wenzel, Donner and
Opper, UAI 2019). Every fit is a process of its own, with the same number of epochs; its seconds are
all of `fit`, k-means and temperature included. The table goes into docs/comparison.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from contestants import alone, conjugp_fit
from data import MissingDataError, load
from record import context, keep, put_table

RESULTS = Path(__file__).parent / "results" / "inducing_points.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
PAGE = Path(__file__).parents[1] / "docs" / "comparison.md"
SET = "shuttle"
SIZES = (5, 10, 20, 50, 100, 200, 400)
EPOCHS = 5.0
KINDS = {"shared": True, "independent": False}
LABELS = {"shared": "one kernel for all classes", "independent": "a kernel for each class"}
COLORS = {"shared": "#e07b39", "independent": "#2a6fbb"}  # as in the paper


def run(sizes: tuple[int, ...], epochs: float) -> dict[str, Any]:
    """Fits of both kinds, the small ones first."""
    fits: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for n_inducing in sizes:
        for kind, shared in KINDS.items():
            settings = {
                "n_inducing": n_inducing,
                "covariance": "full",
                "shared_kernel": shared,
                "max_epochs": epochs,
            }
            found = alone(conjugp_fit, SET, settings)
            fits[kind].append(found)
            print(f"{kind}, M = {n_inducing}: {found['nll']:.4f} in {found['seconds']:.1f} s")
    return {**context(), "max_epochs": epochs, "fits": fits}


def table(result: dict[str, Any]) -> str:
    """Markdown: a line for every number of inducing points."""
    heads = [f"{kind}: error | NLL | s" for kind in LABELS.values()]
    lines = ["| M | " + " | ".join(heads) + " |", "|--:|" + "--:|" * 6]
    for both in zip(*(result["fits"][kind] for kind in KINDS), strict=True):
        cells = [str(both[0]["settings"]["n_inducing"])]
        for one in both:
            cells += [f"{one['error']:.4f}", f"{one['nll']:.4f}", f"{one['seconds']:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(result: dict[str, Any]) -> Figure:
    """NLL (solid, left) and seconds (dashed, right) against the number of inducing points."""
    drawn = Figure(figsize=(6.4, 4.0), layout="constrained")
    left = drawn.subplots()
    right = left.twinx()
    for kind, fits in result["fits"].items():
        sizes = [one["settings"]["n_inducing"] for one in fits]
        style = {"color": COLORS[kind], "markersize": 5}
        left.plot(sizes, [one["nll"] for one in fits], "o-", label=LABELS[kind], **style)
        right.plot(sizes, [one["seconds"] for one in fits], "s--", alpha=0.8, **style)
    left.set(xscale="log", yscale="log", xlabel="inducing points M")
    left.set_ylabel("test NLL (solid)")
    right.set_ylabel("seconds of fit (dashed)")
    right.set_yscale("log")
    left.set_xticks(sizes, [str(n) for n in sizes])
    for ax, digits in ((left, (1, 2, 3, 5)), (right, (1, 2, 5))):
        low, high = ax.get_ylim()
        ticks = [digit * 10.0**power for power in range(-4, 5) for digit in digits]
        shown = [tick for tick in ticks if low <= tick <= high]
        ax.set_yticks(shown, [f"{tick:g}" for tick in shown])
        ax.minorticks_off()
    left.grid(alpha=0.25)
    left.set_title("Shuttle: inducing points and hyperparameters", loc="left", fontsize=11)
    left.legend(frameon=False, loc="upper center", fontsize=9)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", action="store_true", help="only draw what is in the file")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--image", type=Path, default=IMAGES / "inducing_points.png")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    if not arguments.figure:
        try:
            load(SET)  # says what is missing before any work
        except MissingDataError as error:
            parser.error(str(error))
        keep(arguments.output, SET, run(tuple(arguments.sizes), arguments.epochs))
    result = json.loads(arguments.output.read_text(encoding="utf-8"))["sets"][SET]
    figure(result).savefig(arguments.image, dpi=150)
    put_table(arguments.page, table(result))
    print(table(result))


if __name__ == "__main__":
    main()
