"""Test error and NLL against training time, conjugp and its peers: a column for each data set.

    python experiments/numerical_comparison.py    # from bench/results/compare.json

It also puts the table into docs/comparison.md. The figure "Numerical comparison" of the paper
(Galy-Fajou, Wenzel, Donner and Opper, UAI 2019), against the libraries of today.
`python bench/compare.py` makes the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from compare import PEERS, table
from record import RESULTS, put_table

COMPARE = RESULTS / "compare.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
TITLES = {
    "shuttle": "Shuttle",
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "covtype": "CovType",
    "sensit": "SensIT Combined",
    "letter": "Letter",
}
OURS = {"color": "#c0392b", "marker": "o", "lw": 2.4}
STYLES = {
    "gpytorch-adam": {"color": "#2a6fbb", "marker": "s"},
    "gpytorch-ngd": {"color": "#7fb0e0", "marker": "D"},
    "gpflow-softmax": {"color": "#3a9d5d", "marker": "^"},
    "gpflow-robust-max": {"color": "#9b8a2f", "marker": "v"},
    "scikit-learn": {"color": "#777777", "marker": "x"},
}
PAGE = Path(__file__).parents[1] / "docs" / "comparison.md"
MEASURES = {"error": "test error", "nll": "test NLL"}
MOST = {"error": 1.0, "nll": 3.0}  # a run that has gone astray leaves the picture at the top


def figure(sets: dict[str, dict[str, Any]]) -> Figure:
    """Two rows of panels, logarithmic in time and in the measure."""
    names = [name for name in TITLES if name in sets]
    drawn = Figure(figsize=(1.6 + 2.9 * len(names), 6.6), layout="constrained")
    panels = drawn.subplots(2, len(names), squeeze=False, sharex=True)
    for column, name in enumerate(names):
        for row, (measure, label) in enumerate(MEASURES.items()):
            ax = panels[row, column]
            for key, run in sets[name]["peers"].items():
                line(ax, run["curve"], measure, STYLES[key], PEERS[key].label)
            line(ax, sets[name]["conjugp"], measure, OURS, "conjugp, complete fits")
            ax.set(xscale="log", yscale="log")
            ax.set_ylim(top=min(ax.get_ylim()[1], MOST[measure]))
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
            ax.grid(which="major", alpha=0.25)
            if column == 0:
                ax.set_ylabel(label)
        panels[0, column].set_title(TITLES[name], loc="left", fontsize=11)
        panels[1, column].set_xlabel("training seconds")
    handles: dict[str, Any] = {}
    for ax in panels.flat:
        found, labels = ax.get_legend_handles_labels()
        handles.update(zip(labels, found, strict=True))
    drawn.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=1 if len(names) < 3 else 3,
        frameon=False,
    )
    return drawn


def line(ax: Any, points: list[dict[str, Any]], measure: str, style: Any, label: str) -> None:
    """One contestant's way; nothing if it has none."""
    shown = sorted((p["seconds"], p[measure]) for p in points if p[measure] is not None)
    if shown:
        x, y = zip(*shown, strict=True)
        ax.plot(x, y, ms=4, label=label, **{"lw": 1.4, **style})


def shown(sets: dict[str, dict[str, Any]]) -> str:
    """The table as it stands on the page."""
    return table({TITLES[name]: sets[name] for name in TITLES if name in sets})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, default=COMPARE)
    parser.add_argument("--image", type=Path, default=IMAGES / "numerical_comparison.png")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    sets = json.loads(arguments.input.read_text(encoding="utf-8"))["sets"]
    figure(sets).savefig(arguments.image, dpi=130)
    put_table(arguments.page, shown(sets))
    print(shown(sets))


if __name__ == "__main__":
    main()
