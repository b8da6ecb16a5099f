"""How close variational fits come to the exact posterior: Wine, hyperparameters fixed.

    python experiments/wine.py             # all of it: results/wine.json, a table, the figure
    python experiments/wine.py --figure    # the table and the figure from results/wine.json

The experiment "Effect of the augmentation" of the paper (Galy-Fajou, Wenzel, Donner and Opper,
UAI 2019) with two bounds more. Gibbs sampling gives the truth, with its Monte Carlo error. Every
fit has the same kernel, zero prior means and no inducing points; only the bound differs. A fit by
quadrature over all classes says whether the library's one-dimensional integral is exact.
"""

from __future__ import annotations

import argparse
import json
import warnings
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.datasets import load_wine
from sklearn.exceptions import ConvergenceWarning
from stored import save
from unaugmented import Unaugmented

from conjugp import GibbsGPClassifier, GPClassifier, __version__
from conjugp.kernels import RBF
from conjugp.metrics import nll

RESULTS = Path(__file__).parent / "results" / "wine.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
N_TRAIN = 118
SPLIT_SAMPLES = 2000  # draws of a chain on the splits that are averaged over
OTHER_VARIANCES = (0.1, 10.0)
METHODS = {
    "exact": "exact: VI without augmentation",
    "tight": "tight",
    "collapsed": "collapsed",
    "augmented": "augmented VI, the paper's",
}
COLUMNS = {"p": "probability p", "mean": "latent mean", "variance": "latent variance"}
COLORS = ("#2a6fbb", "#e07b39", "#3a9d5d")

Values = dict[str, Any]


class Split(NamedTuple):
    """Standardised by the training rows."""

    X: NDArray
    y: NDArray
    X_test: NDArray
    y_test: NDArray
    kernel: RBF


def wine(seed: int = 0, variance: float = 1.0) -> Split:
    """One random split, 118 rows to train on and 60 to test on.

    The lengthscale is the median distance between training rows.
    """
    X, y = load_wine(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(X))
    train, test = order[:N_TRAIN], order[N_TRAIN:]
    X = (X - X[train].mean(axis=0)) / X[train].std(axis=0)
    gap = np.linalg.norm(X[train][:, None] - X[train][None], axis=-1)
    lengthscale = float(np.median(gap[np.triu_indices(N_TRAIN, 1)]))
    return Split(X[train], y[train], X[test], y[test], RBF(lengthscale, variance))


# --- the methods --------------------------------------------------------------------------------


def variational(data: Split, bound: str, n_nodes: int | None = None) -> Values:
    """p, latent means and variances of the test points under one bound.

    With nodes E[log p] is by quadrature over all classes.
    """
    clf = GPClassifier(
        data.kernel,
        likelihood="logistic-softmax" if n_nodes is None else Unaugmented(n_nodes=n_nodes),
        bound=bound,
        n_inducing=None,
        batch_size=None,
        learn_hyperparameters=False,
        prior_mean=0.0,
        temperature=None,
        max_epochs=5000,
        tol=1e-7,
        random_state=0,
    ).fit(data.X, data.y)
    mean, variance = clf.predict_latent(data.X_test)
    p = clf.predict_proba(data.X_test)
    return {"p": p, "mean": mean, "variance": variance, "elbo": clf.elbo_}


def gibbs(data: Split, n_runs: int, n_samples: int, n_warmup: int = 300) -> Values:
    """The same by sampling; standard errors from runs that share nothing but the data."""
    runs, found = [], []
    for seed in range(n_runs):
        clf = GibbsGPClassifier(
            data.kernel,
            hyperparameters="fixed",
            prior_mean=0.0,
            n_samples=n_samples,
            n_warmup=n_warmup,
            random_state=seed,
        )
        with warnings.catch_warnings():
            # How well the chains have mixed is part of the result.
            warnings.simplefilter("ignore", ConvergenceWarning)
            clf.fit(data.X, data.y)
        mean, variance = clf.predict_latent(data.X_test)
        found.append((clf.predict_proba(data.X_test), mean, variance + mean**2))
        runs.append(
            {
                "draws": clf.n_chains * clf.n_samples,
                "rhat": clf.rhat_,
                "ess_bulk": clf.ess_bulk_,
                "ess_tail": clf.ess_tail_,
            }
        )
    p, mean, square = (np.array(x) for x in zip(*found, strict=True))  # (n_runs, n_test, C)
    center = mean.mean(axis=0)
    # The delta method: to first order the variance is linear in the averages of f and f².
    spread = {"p": p, "mean": mean, "variance": square - 2 * center * mean}
    out: Values = {"p": p.mean(axis=0), "mean": center}
    out["variance"] = square.mean(axis=0) - center**2
    if n_runs > 1:
        for name, values in spread.items():
            out[f"{name}_se"] = values.std(axis=0, ddof=1) / np.sqrt(n_runs)
    return {**out, "runs": runs}


# --- how far they are apart ---------------------------------------------------------------------


def compare(found: Values, truth: Values, y: NDArray) -> dict[str, float]:
    """One row of the table."""
    p, mean, variance = (np.asarray(found[name]) for name in COLUMNS)
    gap = np.abs(p - truth["p"])
    return {
        "mean_abs_dp": float(gap.mean()),
        "max_abs_dp": float(gap.max()),
        "rmse_of_means": float(np.sqrt(np.square(mean - truth["mean"]).mean())),
        "variance_ratio": float(np.mean(variance / np.asarray(truth["variance"]))),
        "accuracy": float(np.mean(p.argmax(axis=1) == y)),
        # Numbers from a file are rounded.
        "nll": nll(y, p / p.sum(axis=1, keepdims=True), labels=range(p.shape[1])),
    }


def table(result: Values) -> dict[str, dict[str, float]]:
    """Every method against Gibbs, and Gibbs itself, of one result."""
    y, truth = np.asarray(result["y"]), result["gibbs"]
    everything = {"gibbs": truth, **result["methods"]}
    return {name: compare(found, truth, y) for name, found in everything.items()}


def measured(data: Split, n_runs: int, n_samples: int) -> Values:
    """All methods on one problem, and how far they are from Gibbs."""
    methods = {bound: variational(data, bound) for bound in METHODS}
    truth = gibbs(data, n_runs, n_samples)
    result = {"y": data.y_test, "gibbs": truth, "methods": methods}
    return {**result, "table": table(result)}


def over_splits(n_splits: int, n_samples: int) -> Values:
    """Means and standard deviations of the table over random splits."""
    found = [measured(wine(seed), 1, n_samples) for seed in range(n_splits)]
    out: Values = {"n": n_splits, "rhat": [one["gibbs"]["runs"][0]["rhat"] for one in found]}
    for name, row in found[0]["table"].items():
        values = {key: [one["table"][name][key] for one in found] for key in row}
        out[name] = {
            key: {"mean": np.mean(x), "sd": np.std(x, ddof=1)} for key, x in values.items()
        }
    return out


def over_variances(variances: tuple[float, ...], n_samples: int) -> Values:
    """The table at other kernel variances; the paper does not say which it took."""
    out: Values = {}
    for variance in variances:
        one = measured(wine(variance=variance), 1, n_samples)
        out[f"{variance:g}"] = {**one["gibbs"]["runs"][0], "table": one["table"]}
    return out


def experiment(data: Split, n_runs: int, n_samples: int, n_nodes: int = 24) -> Values:
    """Everything about one split, and whether the integral of ``"exact"`` is."""
    result = measured(data, n_runs, n_samples)
    found, other = result["methods"]["exact"], variational(data, "exact", n_nodes)
    return {
        "date": date.today().isoformat(),
        "conjugp": __version__,
        "setting": {"kernel": repr(data.kernel), "n_train": len(data.y), "prior_mean": 0.0},
        "quadrature": {
            "nodes": n_nodes,
            "max_change": {name: np.abs(found[name] - other[name]).max() for name in COLUMNS},
        },
        **result,
    }


# --- what is shown ------------------------------------------------------------------------------


def markdown(rows: dict[str, dict[str, float]]) -> str:
    """The table as the documentation has it."""
    out = [
        "| | mean \\|Δp\\| | max \\|Δp\\| | rmse of means | variance ratio | accuracy | NLL |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, label in {"gibbs": "Gibbs", **METHODS}.items():
        r = rows[name]
        near = (
            " | | | |"
            if name == "gibbs"
            else f" {r['mean_abs_dp']:.4f} | {r['max_abs_dp']:.4f} | {r['rmse_of_means']:.3f} "
            f"| {r['variance_ratio']:.2f} |"
        )
        out.append(f"| {label} |{near} {r['accuracy']:.3f} | {r['nll']:.3f} |")
    return "\n".join(out)


def figure(result: Values) -> Figure:
    """Every method against Gibbs: one row each; p, mean and variance of every point and class."""
    truth, methods = result["gibbs"], result["methods"]
    fig = Figure(figsize=(9.0, 2.9 * len(methods)), layout="constrained")
    axes = fig.subplots(len(methods), len(COLUMNS), squeeze=False)
    for column, (name, label) in enumerate(COLUMNS.items()):
        x = np.asarray(truth[name])
        values = [x, *(np.asarray(found[name]) for found in methods.values())]
        low, high = min(v.min() for v in values), max(v.max() for v in values)
        margin = 0.05 * (high - low) or 0.05
        limits = (low - margin, high + margin)
        for row, (method, found) in enumerate(methods.items()):
            ax, y = axes[row, column], np.asarray(found[name])
            ax.plot(limits, limits, color="0.5", lw=1, zorder=1)
            for c in range(x.shape[1]):
                color = COLORS[c % len(COLORS)]
                ax.scatter(x[:, c], y[:, c], 14, color=color, alpha=0.6, lw=0, label=f"class {c}")
            ax.set(xlim=limits, ylim=limits, aspect="equal")
            ax.spines[["top", "right"]].set_visible(False)
            if row == 0:
                ax.set_title(label)
            if row == len(methods) - 1:
                ax.set_xlabel("Gibbs")
            if column == 0:
                ax.set_ylabel(METHODS.get(method, method))
    axes[0, 0].legend(frameon=False, loc="upper left", handletextpad=0.1, borderaxespad=0.1)
    return fig


def report(result: Values) -> str:
    """The tables, and whether the truth is true enough."""
    truth, splits = result["gibbs"], result["splits"]
    runs = truth["runs"]
    error = ", ".join(f"{name} {np.mean(truth[f'{name}_se']):.1e}" for name in COLUMNS)
    means = {
        name: {key: x["mean"] for key, x in splits[name].items()} for name in ("gibbs", *METHODS)
    }
    lines = [
        markdown(result["table"]),
        "",
        f"Gibbs: {len(runs)} runs, {sum(run['draws'] for run in runs)} draws, R-hat at most "
        f"{max(run['rhat'] for run in runs):.4f}, effective sample sizes at least "
        f"{min(run['ess_bulk'] for run in runs):.0f} (bulk) and "
        f"{min(run['ess_tail'] for run in runs):.0f} (tails) in each run.",
        f"Its standard errors, on average: {error}.",
        f"\nMeans over {splits['n']} splits, R-hat at most {max(splits['rhat']):.3f}:\n",
        markdown(means),
    ]
    for variance, one in result["variances"].items():
        quality = f"R-hat {one['rhat']:.3f}, effective sample size {one['ess_bulk']:.0f}"
        lines += [f"\nKernel variance {variance} ({quality}):\n", markdown(one["table"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", action="store_true", help="only draw what is in the file")
    parser.add_argument("--runs", type=int, default=8, help="Gibbs runs of four chains")
    parser.add_argument("--samples", type=int, default=5000, help="draws of every chain")
    parser.add_argument("--splits", type=int, default=20, help="random splits for the averages")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--image", type=Path, default=IMAGES / "wine.png")
    arguments = parser.parse_args()
    if not arguments.figure:
        result = experiment(wine(), arguments.runs, arguments.samples)
        result["splits"] = over_splits(arguments.splits, SPLIT_SAMPLES)
        result["variances"] = over_variances(OTHER_VARIANCES, 2 * arguments.samples)
        save(arguments.output, result)
    result = json.loads(arguments.output.read_text(encoding="utf-8"))
    print(report(result))
    figure(result).savefig(arguments.image, dpi=130)
    print(f"{arguments.output}, {arguments.image}")


if __name__ == "__main__":
    main()
