"""How far variational fits are from the exact posterior, by the variance of their kernel.

python bench/truth.py [set ...]     # wine; penguins, kr_vs_kp and titanic need CONJUGP_DATA

The kernel is an RBF whose lengthscale is the median distance, prior means are 0, there are neither
inducing points nor a temperature, and nothing is learned: fits differ in their bound alone. The
exact posterior comes from annealed populations of chains, `annealing.py`; where kernels are not
too large the Gibbs sampler, another way to the same posterior, stands beside them. Sampling takes
half an hour. What it finds is kept piece by piece, so that a command that was
stopped goes on, and that the tables are made again in a minute when fits have changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from annealing import SETTINGS, population
from data import MissingDataError, Split, load_table, median_distance
from gibbs import target
from numpy.typing import NDArray
from record import add_output, check_sets, context, keep, put_table
from sklearn.datasets import load_wine
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from conjugp import GibbsGPClassifier, GPClassifier
from conjugp._numerics.expectations import sobol_normals
from conjugp._persistence.files import replaced
from conjugp._sampler.chain import Draws
from conjugp._sampler.prediction import SampledModel
from conjugp.kernels import RBF
from conjugp.likelihoods import Expectation, LogisticSoftmax
from conjugp.metrics import nll

TITLES = {"wine": "Wine", "penguins": "Penguins", "kr_vs_kp": "kr_vs_kp", "titanic": "Titanic"}
# Scores, how they are shown, and what of the posterior itself stands beside them.
SCORES = {
    "gap": ("mean \\|Δp\\|", "error of the truth", "error", ".4f"),
    "nll": ("test NLL", "truth", "nll", ".4f"),
    "elbo": ("ELBO", "log p(y)", "log_evidence", ".1f"),
}
ON_PAGE = ("gap", "nll")
VARIANCES = (1.0, 10.0, 100.0)
N_TRAIN, MOST_TEST = 300, 1000
SPLIT_METHODS = ("exact", "tight", "mc")
NOT_FEATURES = {"titanic": ["Name", "Ticket", "Cabin"]}  # different for nearly every row

N_POPULATIONS = 8
MOST_ERROR = {1.0: 0.004, 10.0: 0.004, 100.0: 0.008}  # of the true probabilities
GIBBS_VARIANCES = (1.0, 10.0)  # its chains hardly move where they are larger
GIBBS_CHAINS, GIBBS_WARMUP, GIBBS_DRAWS, THIN = 8, 1000, 1000, 5  # warm-up in sweeps
PIECES = Path(__file__).parents[1] / "build" / "truth"

MAX_EPOCHS, TOL = 2000, 1e-5
N_SETS, N_PAIRS = 16, 256  # of draws for the rows in turn; a pair is a draw and its mirror image


# --- the problems ---------------------------------------------------------------------------------


def problem(name: str, seed: int = 0) -> Split:
    """Rows to train on and to test on, standardised by the former, categories one-hot.

    `seed`: of the split, which Wine has not.

    A number that is missing is at the mean, a category that is missing in none of its columns.
    """
    if name == "wine":
        X, y = load_wine(return_X_y=True)
        train, test = np.arange(0, len(y), 2), np.arange(1, len(y), 2)
    else:
        table = load_table(name).drop(columns=NOT_FEATURES.get(name, []))
        y = np.unique(table.pop("target"), return_inverse=True)[1]
        X = pd.get_dummies(table, dtype=float).to_numpy()
        order = np.random.default_rng(seed).permutation(len(y))
        train, test = order[:N_TRAIN], order[N_TRAIN : N_TRAIN + MOST_TEST]
    center, scale = np.nanmean(X[train], axis=0), np.nanstd(X[train], axis=0)
    X = np.nan_to_num((X - center) / np.where(scale > 0, scale, 1.0), copy=False, nan=0.0)
    return Split(X[train], y[train], X[test], y[test])


def kernel(data: Split, variance: float) -> RBF:
    """The kernel of all fits and of the sampler."""
    return RBF(median_distance(data.X_train), variance)


# --- the exact posterior --------------------------------------------------------------------------


def annealed(data: Split, k: RBF, seed: int, folder: Path) -> dict[str, NDArray]:
    """Probabilities of the test rows from one population, and its log p(y)."""

    def sample(_: Path) -> dict[str, NDArray]:
        posterior = target(data.X_train, data.y_train, k)
        g, log_evidence = population(posterior, seed)
        n, C = g.shape[:2]
        theta = np.repeat(posterior.theta[None], n, axis=0)
        draws = Draws(g, np.zeros(n), theta, np.zeros((n, C)))
        model = SampledModel(posterior, [draws], LogisticSoftmax(), seed)
        p = model.untempered(torch.tensor(data.X_test))
        return {"proba": p.numpy(), "log_evidence": np.array(log_evidence)}

    return kept(folder, digest(data, k, *SETTINGS, seed), sample)


def gibbs(data: Split, k: RBF, seed: int, folder: Path) -> dict[str, NDArray]:
    """Probabilities of the test rows from one chain of the Gibbs sampler."""

    def sample(checkpoint: Path) -> dict[str, NDArray]:
        clf = GibbsGPClassifier(
            k,
            hyperparameters="fixed",
            prior_mean=0.0,
            n_samples=GIBBS_DRAWS,
            n_warmup=GIBBS_WARMUP,
            thin=THIN,
            n_chains=1,
            random_state=seed,
        )
        with warnings.catch_warnings():
            # How far chains are from each other is measured below.
            warnings.simplefilter("ignore", ConvergenceWarning)
            clf.fit(data.X_train, data.y_train, checkpoint=checkpoint)
        return {"proba": clf.predict_proba(data.X_test)}

    return kept(folder, digest(data, k, GIBBS_DRAWS, GIBBS_WARMUP, THIN, seed), sample)


def kept(
    folder: Path, name: str, sample: Callable[[Path], dict[str, NDArray]]
) -> dict[str, NDArray]:
    """What `sample` finds, from a file if there is one; it gets a path for a state of its own."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        state = path.with_suffix(".state")
        found = sample(state)
        with replaced(path) as temporary:
            np.savez(temporary, **found)  # type: ignore[arg-type]
        state.unlink(missing_ok=True)
    with np.load(path) as file:
        return dict(file)


def digest(data: Split, k: RBF, *settings: float) -> str:
    """A name for all that a piece depends on: rows, kernel, and how it was sampled."""
    found = hashlib.sha256()
    for array in (data.X_train, data.y_train, data.X_test):
        found.update(repr((array.shape, array.dtype)).encode())
        found.update(np.ascontiguousarray(array).tobytes())
    found.update(repr((k.lengthscale, k.variance, *settings)).encode())
    return found.hexdigest()[:24]


def together(pieces: list[dict[str, NDArray]]) -> tuple[NDArray, float]:
    """Probabilities (n, C) averaged over an even number of pieces, and their mean error.

    That is half of what the means of two halves of the pieces differ by, since half the difference
    of two independent numbers spreads as their mean does; averaged over all ways to halve.
    """
    p = np.stack([one["proba"] for one in pieces])
    halves = np.stack([p[list(h)].mean(0) for h in combinations(range(len(p)), len(p) // 2)])
    # The other half of the first combination is the last one, that of the second the last but one.
    return p.mean(axis=0), 0.5 * float(np.abs(halves - halves[::-1]).mean())


# --- the fits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled(LogisticSoftmax):
    """E[log p(y | f)] from 512 draws, as if it were a bound; the library's own `mc` has 64."""

    bounds: ClassVar[tuple[str, ...]] = ("sampled",)

    def expectation(self, y: Tensor, m: Tensor, v: Tensor, bound: str) -> Expectation:
        """The average and its derivatives (L1); rows have different draws, in turn."""
        m, sd = m.double(), v.double().sqrt()
        z = sobol_normals(N_SETS * N_PAIRS, m.shape[1], 1).view(N_SETS, N_PAIRS, -1)
        z = z[torch.arange(len(y)) % N_SETS].transpose(0, 1)  # (draws, rows, classes)
        z = torch.cat([z, -z])
        value, slope = self.slope(y.expand(z.shape[:2]), m + sd * z)
        return Expectation(value.mean(0), slope.mean(0), (slope * z).mean(0) / (2.0 * sd))


def methods() -> dict[str, tuple[LogisticSoftmax, str]]:
    """The likelihood's bounds and, last, E[log p(y | f)] by sampling."""
    own = {bound: (LogisticSoftmax(), bound) for bound in LogisticSoftmax.bounds}
    return {**own, "mc": (Sampled(), "sampled")}


def fit(data: Split, k: RBF, likelihood: LogisticSoftmax, bound: str) -> GPClassifier:
    """A fit in which nothing is approximated but the posterior."""
    clf = GPClassifier(
        k,
        likelihood=likelihood,
        bound=bound,
        n_inducing=None,
        covariance="full",
        batch_size=None,
        learn_hyperparameters=False,
        prior_mean=0.0,
        temperature=None,
        max_epochs=MAX_EPOCHS,
        tol=TOL,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the results say which have not
        return clf.fit(data.X_train, data.y_train)


# --- results --------------------------------------------------------------------------------------


def cell(data: Split, variance: float, folder: Path) -> dict[str, Any]:
    """The exact posterior and all fits at one kernel variance."""
    k = kernel(data, variance)
    found = [annealed(data, k, seed, folder) for seed in range(N_POPULATIONS)]
    truth, error = together(found)
    evidence = [one["log_evidence"] for one in found]
    known = {
        "nll": nll(data.y_test, truth),
        "error": error,
        "passed": error < MOST_ERROR[variance],
        "log_evidence": float(np.logaddexp.reduce(evidence) - np.log(N_POPULATIONS)),
    }
    cell: dict[str, Any] = {"truth": known, "fits": {}}
    if variance in GIBBS_VARIANCES:
        p, error = together([gibbs(data, k, seed, folder) for seed in range(GIBBS_CHAINS)])
        cell["gibbs"] = {**score(p, truth, data), "error": error}
    for name, (likelihood, bound) in methods().items():
        began = time.perf_counter()
        clf = fit(data, k, likelihood, bound)
        seconds = time.perf_counter() - began
        cell["fits"][name] = {
            **score(clf.predict_proba(data.X_test), truth, data),
            "elbo": clf.elbo_,
            "n_iter": clf.n_iter_,
            "converged": clf.converged_,
            "seconds": seconds,
        }
    return cell


def score(p: NDArray, truth: NDArray, data: Split) -> dict[str, float]:
    """How far probabilities are from the true ones, and how good."""
    return {"gap": float(np.abs(p - truth).mean()), "nll": nll(data.y_test, p)}


def result(name: str, folder: Path) -> dict[str, Any]:
    """One set at all kernel variances."""
    data = problem(name)
    return {
        **context(),
        "n_train": len(data.y_train),
        "n_test": len(data.y_test),
        "n_features": data.X_train.shape[1],
        "n_classes": len(np.unique(data.y_train)),
        "lengthscale": kernel(data, 1.0).lengthscale,
        "variances": {f"{v:g}": cell(data, v, folder) for v in VARIANCES},
    }


def over_splits(name: str, variance: float, n: int, folder: Path) -> dict[str, Any]:
    """How far fits are from the exact posterior on n random splits: one split is a draw of many."""
    found: dict[str, list[float]] = {"error of the truth": []}
    for seed in range(n):
        data = problem(name, seed)
        k = kernel(data, variance)
        truth, error = together([annealed(data, k, i, folder) for i in range(N_POPULATIONS)])
        found["error of the truth"].append(error)
        for method, (likelihood, bound) in methods().items():
            if method in SPLIT_METHODS:
                p = fit(data, k, likelihood, bound).predict_proba(data.X_test)
                found.setdefault(method, []).append(score(p, truth, data)["gap"])
    return found


def table(sets: dict[str, Any], score: str = "gap") -> str:
    """Markdown: one of `SCORES` for every fit, a line for every set and kernel variance."""
    title, beside, key, digits = SCORES[score]
    cells = [
        (TITLES[name], variance, found)
        for name in (name for name in TITLES if name in sets)
        for variance, found in sets[name]["variances"].items()
    ]
    has_gibbs = any(score in found.get("gibbs", {}) for *_, found in cells)
    heads = [title, "kernel variance", beside, *["Gibbs"] * has_gibbs, *cells[0][2]["fits"]]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for name, variance, found in cells:
        values = [found["truth"][key]]
        values += [found.get("gibbs", {}).get(score)] * has_gibbs
        values += [one[score] for one in found["fits"].values()]
        row = ["" if value is None else f"{value:{digits}}" for value in values]
        lines.append("| " + " | ".join([name, variance, *row]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", metavar="set", help=", ".join(TITLES) + " (all)")
    parser.add_argument(
        "--pieces", type=Path, default=PIECES, help="folder of what was sampled (%(default)s)"
    )
    parser.add_argument(
        "--splits",
        type=int,
        help="instead, mean |Δp| on so many random splits at kernel variance 10, beside the table",
    )
    parser.add_argument("--page", type=Path, help="a page whose tables of Δp and NLL are replaced")
    add_output(parser, "truth.json")
    arguments = parser.parse_args()
    check_sets(parser, arguments.sets, TITLES)
    for name in arguments.sets or TITLES:
        try:
            if arguments.splits:
                sets = json.loads(arguments.output.read_text(encoding="utf-8"))["sets"]
                splits = over_splits(name, 10.0, arguments.splits, arguments.pieces)
                keep(arguments.output, name, {**sets[name], "splits": {"10": splits}})
                for method, gaps in splits.items():
                    spread = f"({min(gaps):.4f} to {max(gaps):.4f})"
                    print(f"{name}, {method}: {np.mean(gaps):.4f} {spread}", flush=True)
                continue
            found = result(name, arguments.pieces)
        except MissingDataError as error:
            print(f"{name} is left out: {error}\n")
            continue
        keep(arguments.output, name, found)
        print(table({name: found}) + "\n", flush=True)
    sets = json.loads(arguments.output.read_text(encoding="utf-8"))["sets"]
    for score in SCORES:
        print(table(sets, score) + "\n")
    if arguments.page:
        for score in ON_PAGE:
            put_table(arguments.page, table(sets, score))


if __name__ == "__main__":
    main()
