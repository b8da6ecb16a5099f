"""What the likelihood does to error, NLL and calibration, on three Gaussians that overlap.

    python experiments/likelihoods.py            # all: results/likelihoods.json, tables, figures
    python experiments/likelihoods.py --figures  # tables and figures from results/likelihoods.json
    python experiments/likelihoods.py --quick --output /tmp/quick.json --images /tmp

The experiment "Comparison of the different likelihoods" of the paper (Galy-Fajou, Wenzel, Donner
and Opper, UAI 2019) with more bounds, expectation propagation and a Dirichlet baseline. Every fit
has the same rows, inducing points and first kernel; no temperature mends its probabilities.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from conjugp import GPClassifier
from conjugp.kernels import RBF
from conjugp.likelihoods import Dirichlet, RobustMax
from conjugp.metrics import expected_calibration_error, nll, reliability_curve

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from record import context
from stored import save

RESULTS = Path(__file__).parent / "results" / "likelihoods.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"

LEVELS = tuple(k / 6 for k in range(7))  # σ²
MIDDLE = 0.5
N_TRAIN, N_TEST, N_SEEDS, N_BINS = 500, 2000, 10, 15
N_GRID = 64
BOX = (-2.4, 2.4)  # what the maps show, in both directions

SETTINGS: dict[str, Any] = {
    "n_inducing": 50,
    "learn_inducing": False,
    "temperature": None,
    "learning_rate": 0.05,
    "tol": 3e-4,
    "max_epochs": 200,
}
METHODS: dict[str, dict[str, Any]] = {
    "logistic-softmax exact": {"bound": "exact"},
    "logistic-softmax tight": {"bound": "tight"},
    "logistic-softmax collapsed": {"bound": "collapsed"},
    "logistic-softmax augmented": {"bound": "augmented"},
    "logistic-softmax augmented, zero mean": {"bound": "augmented", "prior_mean": 0.0},
    "logistic-softmax mc-vi": {"inference": "mc-vi"},
    "softmax": {"likelihood": "softmax"},
    "heaviside": {"likelihood": "heaviside"},
    "heaviside EP": {"likelihood": "heaviside", "inference": "ep"},
    # Its q is at the optimum after one step, and larger steps of Adam look like a loss.
    "dirichlet": {"likelihood": "dirichlet", "learning_rate": 0.01, "tol": 1e-4},
    "dirichlet, α = 0.1": {"likelihood": Dirichlet(0.1), "learning_rate": 0.01, "tol": 1e-4},
    "robust-max": {"likelihood": "robust-max"},
    "robust-max, ε learned": {"likelihood": RobustMax(learn_epsilon=True)},
}
ASIDE = {  # variations of the others, at some variances only
    "logistic-softmax augmented, zero mean": (MIDDLE, LEVELS[-1]),
    "dirichlet, α = 0.1": (MIDDLE, LEVELS[-1]),
    "robust-max, ε learned": (MIDDLE,),
}
SCORES = {"error": "test error", "nll": "NLL", "ece": "calibration error"}
STYLES = {
    "logistic-softmax exact": ("#12406f", "-"),
    "logistic-softmax tight": ("#2a6fbb", "-"),
    "logistic-softmax collapsed": ("#2a6fbb", "--"),
    "logistic-softmax augmented": ("#2a6fbb", ":"),
    "logistic-softmax augmented, zero mean": ("#2a6fbb", "-"),
    "logistic-softmax mc-vi": ("#7fb2e5", "-"),
    "softmax": ("#3a9d5d", "-"),
    "heaviside": ("#8a5cb8", "-"),
    "heaviside EP": ("#8a5cb8", "--"),
    "dirichlet": ("#c9a227", "-"),
    "dirichlet, α = 0.1": ("#c9a227", "-"),
    "robust-max": ("#d1495b", "-"),
    "robust-max, ε learned": ("#d1495b", "-"),
}

Values = dict[str, Any]

# --- the data -----------------------------------------------------------------------------------


def centers() -> NDArray:
    """Three points at distance 1 from one another, around the origin."""
    angle = np.pi / 2 + 2 * np.pi * np.arange(3) / 3
    return np.stack([np.cos(angle), np.sin(angle)], axis=1) / np.sqrt(3)


def sample(n: int, variance: float, seed: tuple[int, ...]) -> tuple[NDArray, NDArray]:
    """Rows and labels of the mixture of N(center, variance·I), all classes alike."""
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=n)
    return centers()[y] + np.sqrt(variance) * rng.standard_normal((n, 2)), y


def truth(X: NDArray, variance: float) -> NDArray:
    """p(y | x) of the mixture, (n, 3); with no variance the nearest centre has it all."""
    squared = np.square(X[:, None] - centers()).sum(axis=-1)
    squared -= squared.min(axis=1, keepdims=True)
    p = np.exp(-squared / (2 * variance)) if variance > 0 else (squared == 0).astype(float)
    return p / p.sum(axis=1, keepdims=True)


# --- one fit ------------------------------------------------------------------------------------


def all_labels(p: NDArray, true: NDArray) -> tuple[NDArray, NDArray, Values]:
    """Every row with each of its labels, weighted by their true probabilities.

    So scores are expectations over the labels, and only the rows are random.
    """
    n, C = true.shape
    weight = {"labels": np.arange(C), "sample_weight": true.ravel()}
    return np.tile(np.arange(C), n), np.repeat(p, C, axis=0), weight


def scores(p: NDArray, true: NDArray) -> dict[str, float]:
    """Error, NLL, calibration error, and how many rows are answered with more than 95 %."""
    y, rows, weight = all_labels(p, true)
    return {
        "error": float(1 - true[np.arange(len(p)), p.argmax(axis=1)].mean()),
        "nll": nll(y, rows, **weight),
        "ece": expected_calibration_error(y, rows, n_bins=N_BINS, **weight),
        "sure": float(np.mean(p.max(axis=1) > 0.95)),
    }


def reliability(p: NDArray, true: NDArray) -> dict[str, list[float]]:
    """The reliability diagram, and shares of the confidences in as many bins."""
    y, rows, weight = all_labels(p, true)
    curve = reliability_curve(y, rows, n_bins=N_BINS, **weight)
    share = np.histogram(p.max(axis=1), bins=N_BINS, range=(0, 1))[0] / len(p)
    return {
        "confidence": curve.confidence.tolist(),
        "accuracy": curve.accuracy.tolist(),
        "histogram": share.tolist(),
    }


def grid() -> NDArray:
    """Points of the maps, row after row from below."""
    side = np.linspace(*BOX, N_GRID)
    return np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)


def colors(p: NDArray) -> list[str]:
    """Probabilities on the grid as red, green and blue: six hexadecimal digits a point."""
    level = np.rint(255 * p).astype(np.uint8).reshape(N_GRID, -1)
    return [row.tobytes().hex() for row in level]


def fit(method: str, variance: float, seed: int, **changes: Any) -> tuple[GPClassifier, Values]:
    """One fit and what it took; the processor's seconds, whatever else the machine does."""
    X, y = sample(N_TRAIN, variance, (seed, 0))
    clf = GPClassifier(RBF(), random_state=seed, **{**SETTINGS, **METHODS[method], **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it is in the result
        began = time.process_time()
        clf.fit(X, y)
    seconds = time.process_time() - began
    return clf, {"elbo": clf.elbo_, "converged": clf.converged_, "seconds": seconds}


def measure(method: str, variance: float, seed: int, pictures: bool, **changes: Any) -> Values:
    """Fit and score; for one set also the reliability diagram and the map."""
    torch.set_num_threads(1)
    clf, out = fit(method, variance, seed, **changes)
    X, _ = sample(N_TEST, variance, (seed, 1))
    p, true = clf.predict_proba(X), truth(X, variance)
    out |= scores(p, true)
    if pictures:
        out |= {"reliability": reliability(p, true), "map": colors(clf.predict_proba(grid()))}
    return out


def ideal(variance: float, seed: int, pictures: bool) -> Values:
    """The same of the true probabilities: the best there is."""
    X, _ = sample(N_TEST, variance, (seed, 1))
    true = truth(X, variance)
    out: Values = scores(true, true)
    if pictures:
        out |= {"reliability": reliability(true, true), "map": colors(truth(grid(), variance))}
    return out


def chance(n: int, n_repeats: int = 100) -> float:
    """The calibration error that the true probabilities show on n drawn labels, on average."""
    found = []
    for k in range(n_repeats):
        X, y = sample(n, MIDDLE, (k, 2))
        p = truth(X, MIDDLE)
        found.append(expected_calibration_error(y, p, n_bins=N_BINS, labels=np.arange(3)))
    return float(np.mean(found))


# --- all fits -----------------------------------------------------------------------------------


def levels_of(method: str, levels: tuple[float, ...]) -> tuple[float, ...]:
    """The variances a method is tried at."""
    return tuple(s2 for s2 in levels if s2 in ASIDE.get(method, levels))


def stricter(method: str) -> dict[str, float]:
    """Half the step size, a tenth of the tolerance and more passes."""
    own = {**SETTINGS, **METHODS[method]}
    return {"learning_rate": own["learning_rate"] / 2, "tol": own["tol"] / 10, "max_epochs": 1000}


def experiment(levels: tuple[float, ...], n_seeds: int, n_jobs: int, path: Path) -> Values:
    """Every method at every variance and seed; the file is written after each seed."""
    torch.set_num_threads(1)  # as in every process
    result: Values = {
        **context(),
        "setting": {
            **SETTINGS,
            "n_train": N_TRAIN,
            "n_test": N_TEST,
            "n_bins": N_BINS,
            "processes": n_jobs,
            "box": BOX,
        },
        "levels": levels,
        "chance": {str(n): chance(n) for n in (100, 500, N_TEST)},
        "runs": {name: {} for name in ("truth", *METHODS)},
        "pictures": dict(zip(("points", "labels"), sample(N_TRAIN, MIDDLE, (0, 0)), strict=True)),
    }
    jobs = [(m, s2) for m in reversed(METHODS) for s2 in levels_of(m, levels)]
    with Parallel(n_jobs=n_jobs) as parallel:
        for seed in range(n_seeds):
            began = time.perf_counter()
            found: Any = parallel(
                delayed(measure)(m, s2, seed, seed == 0 and s2 == MIDDLE) for m, s2 in jobs
            )
            best = [(("truth", s2), ideal(s2, seed, seed == 0 and s2 == MIDDLE)) for s2 in levels]
            for (name, s2), one in [*best, *zip(jobs, found, strict=True)]:
                if "map" in one:
                    drawn = {key: one.pop(key) for key in ("reliability", "map")}
                    result["pictures"][name] = drawn
                for key, value in one.items():
                    result["runs"][name].setdefault(key, {}).setdefault(str(s2), []).append(value)
            save(path, result, digits=5)
            print(f"seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
        # The same fits with a stricter end: what stopping where we do has cost.
        checked = [m for m in METHODS if m not in ASIDE]
        found = parallel(
            delayed(measure)(m, MIDDLE, 0, False, **stricter(m)) for m in reversed(checked)
        )
    result["stricter"] = dict(zip(reversed(checked), found, strict=True))
    save(path, result, digits=5)
    return result


# --- what is shown ------------------------------------------------------------------------------


def summary(result: Values, name: str, score: str) -> tuple[NDArray, NDArray, NDArray]:
    """Variances, mean and standard deviation over seeds of one score of one method."""
    found = result["runs"][name][score]
    values = np.array(list(found.values()), dtype=float)
    spread = values.std(axis=1, ddof=1) if values.shape[1] > 1 else np.zeros(len(values))
    return np.array([float(s2) for s2 in found]), values.mean(axis=1), spread


def table(result: Values, level: float) -> str:
    """Means and standard deviations at one variance."""
    lines = [
        "| | error | NLL | calibration error | surer than 95 % | CPU seconds |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in result["runs"]:
        cells = []
        for score, digits in {"error": 3, "nll": 3, "ece": 3, "sure": 2, "seconds": 1}.items():
            if score not in result["runs"][name]:
                cells.append("")
                continue
            s2, mean, spread = summary(result, name, score)
            at = np.flatnonzero(np.isclose(s2, level))
            if not len(at):
                break
            text = f"{mean[at[0]]:.{digits}f}"
            if score in SCORES and name != "truth":
                text += f" ± {spread[at[0]]:.{digits}f}"
            cells.append(text)
        else:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_level(result: Values, score: str) -> str:
    """Means of one score at all variances."""
    levels = result["levels"]
    heads = " | ".join(f"{s2:.2f}" for s2 in levels)
    lines = [f"| {SCORES[score]} at σ² = | {heads} |", "|---" + "|--:" * len(levels) + "|"]
    for name in result["runs"]:
        s2, mean, _ = summary(result, name, score)
        if len(s2) == len(levels):
            lines.append(f"| {name} | {' | '.join(f'{x:.3f}' for x in mean)} |")
    return "\n".join(lines)


def ratios(result: Values, level: float) -> dict[str, float]:
    """Robust-max's mean calibration error over that of every other method."""
    mean = {name: np.mean(runs["ece"][str(level)]) for name, runs in result["runs"].items()}
    worst = mean.pop("robust-max")
    del mean["truth"]
    return {name: float(worst / value) for name, value in mean.items()}


def report(result: Values) -> str:
    """The tables, and whether the fits had ended."""
    lines = [f"σ² = {MIDDLE}, means and standard deviations over seeds:\n", table(result, MIDDLE)]
    lines += ["\n" + by_level(result, score) for score in SCORES]
    lines.append("\nCalibration error of robust-max over that of")
    lines += [f"  {name}: {ratio:.1f}" for name, ratio in ratios(result, MIDDLE).items()]
    errors = ", ".join(f"{error:.3f} with {n}" for n, error in result["chance"].items())
    lines.append(f"\nCalibration error of the true probabilities on drawn labels: {errors}")
    ended = {
        name: np.mean([x for found in runs["converged"].values() for x in found])
        for name, runs in result["runs"].items()
        if "converged" in runs
    }
    lines.append("\nShare of fits whose objective became flat, and seed 0 with a stricter end:")
    for name, share in ended.items():
        text = f"  {name}: {share:.3f}"
        if name in result.get("stricter", {}):
            new, runs = result["stricter"][name], result["runs"][name]
            for score in ("elbo", "nll", "ece"):
                text += f", {score} {runs[score][str(MIDDLE)][0]:.4g} -> {new[score]:.4g}"
        lines.append(text)
    return "\n".join(lines)


def curves(result: Values) -> Figure:
    """Error, NLL, NLL above the best possible, and calibration error against the variance."""
    fig = Figure(figsize=(10.0, 7.6), layout="constrained")
    axes = fig.subplots(2, 2)
    panels: list[tuple[Axes, str]] = [
        (axes[0, 0], "error"),
        (axes[0, 1], "nll"),
        (axes[1, 0], "ece"),
        (axes[1, 1], "excess"),
    ]
    for ax, score in panels:
        key = "nll" if score == "excess" else score
        _, best, _ = summary(result, "truth", key)
        if score in ("error", "nll"):
            ax.plot(result["levels"], best, color="0.4", lw=5, alpha=0.3, label="true p(y | x)")
        for name, (color, dash) in STYLES.items():
            if name in ASIDE:
                continue
            s2, mean, spread = summary(result, name, key)
            if score == "excess":
                ax.plot(s2, np.maximum(mean - best, 1e-4), color=color, ls=dash, lw=1.6)
                continue
            ax.plot(s2, mean, color=color, ls=dash, lw=1.6, label=name)
            ax.fill_between(s2, mean - spread, mean + spread, color=color, alpha=0.12, lw=0)
        ax.set(xlabel="variance σ² of every class", xlim=(0, 1))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="0.92", lw=0.8)
        if score == "excess":
            ax.set(yscale="log", ylabel="NLL above that of the true p(y | x)")
        else:
            ax.set(ylabel=SCORES[score], ylim=(0, None))
    handles, names = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return fig


def diagrams(result: Values) -> Figure:
    """Histogram of confidences above the reliability diagram, for every method."""
    pictures = result["pictures"]
    across = (len(METHODS) + 1) // 2
    fig = Figure(figsize=(2.3 * across, 8.2), layout="constrained")
    axes = fig.subplots(4, across, sharex=True, height_ratios=(1, 1.6, 1, 1.6))
    edges = np.linspace(0, 1, N_BINS + 1)
    for k, name in enumerate(METHODS):
        row, column = 2 * (k // across), k % across
        above, below = axes[row, column], axes[row + 1, column]
        drawn, color = pictures[name]["reliability"], STYLES[name][0]
        best = pictures["truth"]["reliability"]["histogram"]
        above.stairs(best, edges, color="0.4", label="true p(y | x)")
        above.stairs(drawn["histogram"], edges, fill=True, color=color, alpha=0.75)
        above.set(ylim=(0, 1), title=name.replace("softmax ", "softmax\n"))
        above.title.set_fontsize(10)
        below.plot([0, 1], [0, 1], color="0.5", lw=1)
        below.plot(drawn["confidence"], drawn["accuracy"], "o-", color=color, ms=4, lw=1.2)
        error = result["runs"][name]["ece"][str(MIDDLE)][0]
        below.text(0.04, 0.92, f"ECE {error:.3f}", va="top")
        below.set(ylim=(0, 1), xlim=(0, 1), xticks=(0, 0.5, 1), aspect="equal")
        if k // across == 1:
            below.set_xlabel("confidence")
        if column == 0:
            above.set_ylabel("share")
            below.set_ylabel("accuracy")
        else:
            above.tick_params(labelleft=False)
            below.tick_params(labelleft=False)
        for ax in (above, below):
            ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[2:, len(METHODS) - across :].flat:
        ax.set_axis_off()
    axes[0, 0].legend(frameon=False, fontsize=8, loc="upper left", borderaxespad=0.0)
    return fig


def maps(result: Values) -> Figure:
    """Predictive probabilities of the three classes as red, green and blue."""
    pictures = result["pictures"]
    fig = Figure(figsize=(12.0, 7.8), layout="constrained")
    axes = fig.subplots(3, 5).flatten()
    points, labels = np.array(pictures["points"]), np.array(pictures["labels"])
    axes[0].set_title(f"{len(points)} points, σ² = {MIDDLE}", fontsize=10)
    for c, color in enumerate(("#ff0000", "#00b000", "#0000ff")):
        axes[0].scatter(*points[labels == c].T, 7, color=color, alpha=0.6, lw=0)
    names = ("truth", *METHODS)
    for ax in axes[1 + len(names) :]:
        ax.set_axis_off()
    for ax, name in zip(axes[1:], names, strict=False):
        digits = "".join(pictures[name]["map"])
        rgb = np.frombuffer(bytes.fromhex(digits), np.uint8).reshape(N_GRID, N_GRID, 3)
        ax.imshow(rgb, extent=BOX * 2, origin="lower", interpolation="bilinear")
        title = "true p(y | x)" if name == "truth" else name.replace("softmax ", "softmax\n")
        ax.set_title(title, fontsize=10)
    for ax in axes:
        ax.set(xlim=BOX, ylim=BOX, xticks=(), yticks=(), aspect="equal")
    return fig


FIGURES = {
    IMAGES / "likelihoods.png": curves,
    IMAGES / "likelihood_reliability.png": diagrams,
    IMAGES / "likelihood_maps.png": maps,
}


def draw(result: Values, folder: Path) -> None:
    """The figures, from the result alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, figure in FIGURES.items():
        figure(result).savefig(folder / path.name, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figures", action="store_true", help="only show what is in the file")
    parser.add_argument("--quick", action="store_true", help="two variances, one seed")
    parser.add_argument("--seeds", type=int, default=N_SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    chosen = parser.parse_args(arguments)
    if chosen.quick and chosen.output == RESULTS:
        parser.error("--quick needs --output: it would replace the results")
    if not chosen.figures:
        levels = (LEVELS[1], MIDDLE) if chosen.quick else LEVELS
        experiment(levels, 1 if chosen.quick else chosen.seeds, chosen.jobs, chosen.output)
    result = json.loads(chosen.output.read_text(encoding="utf-8"))
    print(report(result))
    draw(result, chosen.images)


if __name__ == "__main__":
    main()
