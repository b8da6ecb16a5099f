"""What the epistemic part is worth out of scope, and whether conformal sets cover.

python experiments/uncertainty.py scope      # CLINC150's out-of-scope queries
python experiments/uncertainty.py coverage   # 20 splits of clinc150, letter, dry_bean, satimage,
                                             # glass and wine (all need CONJUGP_DATA but wine)
python experiments/uncertainty.py --figure   # the picture from results/uncertainty.json

The first fit to CLINC150 serves both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin

sys.path.append(str(Path(__file__).parents[1] / "bench"))
sys.path.append(str(Path(__file__).parent))
from data import Embedded, load, load_embeddings
from embeddings import INPUTS, STRENGTHS, auroc, histograms, prepared
from record import context, keep, scores

RESULTS = Path(__file__).parent / "results" / "uncertainty.json"
IMAGES = Path(__file__).parents[1] / "docs" / "images"

N_SPLITS = 20
ALPHAS = (0.05, 0.1, 0.2)
# One fit, and splits of the rows it has not seen; or small sets, fitted anew to every split.
ONE_FIT = ("clinc150", "letter", "dry_bean", "satimage")
REFITTED = ("glass", "wine")
KINDS = {"marginal": False, "class-conditional": True}


@cache
def clinc() -> tuple[Embedded, Any]:
    """The data and GPClassifier() fitted to its training rows."""
    from conjugp import GPClassifier

    data = load_embeddings("clinc150")
    return data, GPClassifier(random_state=0).fit(data.split.X_train, data.split.y_train)


def entropy(p: NDArray) -> NDArray:
    """Of every row, in nats."""
    p = p.astype(np.float64)  # LogisticRegression answers in the precision of its inputs
    return -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1)


# --- out of scope ---------------------------------------------------------------------------------


def doubts(clf: Any, X: NDArray) -> dict[str, NDArray]:
    """What may say that a row belongs to no class; larger is more doubtful."""
    p = clf.predict_proba(X)
    mean, variance = clf.predict_latent(X)
    found = {"max probability": -p.max(axis=1)}
    for kind, calibrated in (("", True), (", posterior", False)):
        u = clf.predict_uncertainty(X, calibrated=calibrated)
        found |= {f"{name}{kind}": part for name, part in u._asdict().items()}
    found["largest latent mean"] = -mean.max(axis=1)
    found["latent variance"] = variance.mean(axis=1)
    return found


def scope() -> dict[str, Any]:
    """AUROC of every kind of doubt, and of LogisticRegression's."""
    data, clf = clinc()
    began = time.perf_counter()
    inside, outside = (doubts(clf, X) for X in (data.split.X_test, data.X_outside))
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {
        "auroc": {name: auroc(-inside[name], -outside[name]) for name in inside},
        "mean_inside": {name: float(x.mean()) for name, x in inside.items()},
        "mean_outside": {name: float(x.mean()) for name, x in outside.items()},
        "histograms": {
            name: histograms(inside[name], outside[name]) for name in ("total", "epistemic")
        },
        "temperature": clf.temperature_,
        "variance_scale": clf.variance_scale_,
        "seconds": seconds,
        "rows": len(data.split.y_test) + len(data.X_outside),  # type: ignore[arg-type]
    }
    return {"conjugp": result, "logistic_regression": logistic(data)}


def logistic(data: Embedded) -> dict[str, Any]:
    """LogisticRegression by strength and scaling; chosen by validation NLL, and the best of all."""
    from sklearn.linear_model import LogisticRegression

    split, found = data.split, []
    for inputs in INPUTS:
        X, X_val, X_test, X_out = (
            prepared(A, split.X_train, inputs)
            for A in (split.X_train, data.X_val, split.X_test, data.X_outside)
        )
        for C in STRENGTHS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it has not converged: it is stopped early
                model = LogisticRegression(C=C, max_iter=300).fit(X, split.y_train)
            p, out = model.predict_proba(X_test), model.predict_proba(X_out)
            nll = scores(data.y_val, model.predict_proba(X_val), model.classes_)["nll"]
            one = {"inputs": inputs, "C": C, "validation_nll": nll}
            one["max probability"] = auroc(p.max(axis=1), out.max(axis=1))
            one["entropy"] = auroc(-entropy(p), -entropy(out))
            found.append(one)
    return {
        "chosen": min(found, key=lambda one: one["validation_nll"]),
        "best": max(found, key=lambda one: one["max probability"]),
        "best_entropy": max(found, key=lambda one: one["entropy"]),
    }


# --- coverage -------------------------------------------------------------------------------------


def splits(name: str) -> Any:
    """(classifier, calibrating rows and labels, test rows and labels), N_SPLITS times."""
    if name in REFITTED:
        yield from refitted(name)
        return
    if name == "clinc150":
        data, clf = clinc()
        X = np.concatenate([data.X_val, data.split.X_test])
        y = np.concatenate([data.y_val, data.split.y_test])
    else:
        from conjugp import GPClassifier

        split = load(name)
        clf = GPClassifier(random_state=0).fit(split.X_train, split.y_train)
        X, y = split.X_test, split.y_test
    p = clf.predict_proba(X)
    known = Known(clf.classes_)
    for seed in range(N_SPLITS):
        order = np.random.default_rng(seed).permutation(len(y))
        a, b = order[: len(y) // 2], order[len(y) // 2 :]
        yield known, p[a], y[a], p[b], y[b]


class Known(ClassifierMixin, BaseEstimator):
    """A classifier whose rows are its probabilities: they are computed once for all splits."""

    def __init__(self, classes: NDArray) -> None:
        self.classes = self.classes_ = classes

    def fit(self, X: NDArray, y: NDArray) -> Known:
        """Nothing to do."""
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict_proba(self, X: NDArray) -> NDArray:
        """The rows."""
        return X


def refitted(name: str) -> Any:
    """Half of the rows to fit, a quarter to calibrate on, a quarter to test on."""
    from sklearn.datasets import load_wine
    from sklearn.model_selection import train_test_split

    from conjugp import GPClassifier

    if name == "wine":
        X, y = load_wine(return_X_y=True)
    else:
        whole = load(name)
        X, y = np.r_[whole.X_train, whole.X_test], np.r_[whole.y_train, whole.y_test]
    for seed in range(N_SPLITS):
        parts = train_test_split(X, y, train_size=0.5, stratify=y, random_state=seed)
        X_fit, X_rest, y_fit, y_rest = parts
        clf = GPClassifier(random_state=0).fit(X_fit, y_fit)
        order = np.random.default_rng(seed).permutation(len(y_rest))
        a, b = order[: len(order) // 2], order[len(order) // 2 :]
        yield clf, X_rest[a], y_rest[a], X_rest[b], y_rest[b]


def coverage(name: str) -> dict[str, Any]:
    """Coverage and size of sets over the splits, and coverage of the worst tenth of classes."""
    from conjugp.conformal import ConformalClassifier

    found: dict[str, dict[str, list[Any]]] = {}
    sizes = {"calibrate": 0, "test": 0}
    for clf, X_cal, y_cal, X_test, y_test in splits(name):
        sizes = {"calibrate": len(y_cal), "test": len(y_test)}
        columns = np.searchsorted(clf.classes_, y_test)
        for method in ("aps", "lac"):
            for kind, conditional in KINDS.items():
                sets = ConformalClassifier(clf, method=method, class_conditional=conditional)
                sets.fit(X_cal, y_cal)
                for alpha in ALPHAS:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)  # counted below
                        mask = sets.predict_set(X_test, alpha)
                        open_ = int(np.isinf(sets.thresholds(alpha)).sum())
                    held = mask[np.arange(len(y_test)), columns]
                    one = found.setdefault(
                        f"{method}, {kind}, {alpha}",
                        {"coverage": [], "size": [], "empty": [], "open": [], "each": []},
                    )
                    one["coverage"].append(float(held.mean()))
                    one["size"].append(float(mask.sum(axis=1).mean()))
                    one["empty"].append(float((mask.sum(axis=1) == 0).mean()))
                    one["open"].append(open_)
                    counts = [np.bincount(columns, w, len(clf.classes_)) for w in (held, None)]
                    one["each"].append(counts)
    result: dict[str, Any] = {"rows": sizes, "n_splits": N_SPLITS}
    for key, one in found.items():
        held, n = np.sum(one["each"], axis=0)
        of_class = held[n > 0] / n[n > 0]
        result[key] = {
            "coverage": float(np.mean(one["coverage"])),
            "deviation": float(np.std(one["coverage"], ddof=1)),
            "size": float(np.mean(one["size"])),
            "empty": float(np.mean(one["empty"])),
            "classes_without_limit": float(np.mean(one["open"])),
            "worst_class": float(of_class.min()),
            "classes_below": float(np.mean(of_class < 1 - float(key.split(", ")[2]) - 0.02)),
            "splits": one["coverage"],
        }
    return result


# --- picture and tables ---------------------------------------------------------------------------


def draw(kept: dict[str, Any]) -> None:
    """Known and out-of-scope queries; coverage over splits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    blue, orange, grey = "#0072B2", "#D55E00", "0.55"
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    own, rival = kept["scope"]["conjugp"], kept["scope"]["logistic_regression"]
    h = own["histograms"]["epistemic"]
    for key, label, color in (
        ("inside", "known intents", blue),
        ("outside", "out of scope", orange),
    ):
        axes[0].stairs(h[key], h["edges"], fill=True, alpha=0.55, color=color, label=label)
    axes[0].set(xlabel="epistemic part (nats)", ylabel="share of queries")
    axes[0].set_title("CLINC150: what more data would mend", loc="left", fontsize=10)
    axes[0].legend(frameon=False)

    bars = {
        "largest latent mean": own["auroc"]["largest latent mean"],
        "total, posterior": own["auroc"]["total, posterior"],
        "epistemic, posterior": own["auroc"]["epistemic, posterior"],
        "epistemic": own["auroc"]["epistemic"],
        "total": own["auroc"]["total"],
        "max probability": own["auroc"]["max probability"],
        "latent variance": own["auroc"]["latent variance"],
        "LR, lowest NLL: entropy": rival["chosen"]["entropy"],
        "LR, lowest NLL: max probability": rival["chosen"]["max probability"],
        "LR, best of 10: entropy": rival["best_entropy"]["entropy"],
        "LR, best of 10: max probability": rival["best"]["max probability"],
    }
    place = np.arange(len(bars))[::-1]
    colors = [grey if name.startswith("LR") else blue for name in bars]
    axes[1].scatter(bars.values(), place, 60, color=colors, zorder=3)
    axes[1].hlines(place, 0.85, list(bars.values()), color=colors, lw=2)
    for y, value in zip(place, bars.values(), strict=True):
        axes[1].text(value + 0.003, y, f"{value:.3f}", va="center", fontsize=8.5)
    axes[1].set(yticks=place, yticklabels=list(bars), xlim=(0.85, 0.975), xlabel="AUROC")
    axes[1].set_title("Telling out of scope from known", loc="left", fontsize=10)

    names = [name for name in (*ONE_FIT, *REFITTED) if name in kept]
    for j, (kind, color) in enumerate(zip(KINDS, (blue, orange), strict=True)):
        for i, name in enumerate(names):
            for alpha in ALPHAS:
                one = kept[name][f"lac, {kind}, {alpha}"]
                label = kind if i == 0 and alpha == ALPHAS[0] else None
                axes[2].errorbar(
                    i + 0.3 * j - 0.15,
                    one["coverage"],
                    one["deviation"],
                    fmt="o",
                    ms=5,
                    color=color,
                    lw=1.2,
                    label=label,
                )
    for alpha in ALPHAS:
        axes[2].axhline(1 - alpha, color="0.3", lw=0.8, ls=(0, (4, 3)), zorder=0)
    axes[2].set(xticks=range(len(names)), xticklabels=names, ylabel="coverage", ylim=(0.62, 1.02))
    axes[2].set_title("Coverage of sets: 20 splits, mean ± sd", loc="left", fontsize=10)
    axes[2].tick_params(axis="x", labelrotation=25, labelsize=8.5)
    axes[2].legend(frameon=False, loc="lower left", fontsize=8.5)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / "conformal.png", dpi=150)


def print_coverage(name: str, result: dict[str, Any]) -> None:
    """A line for each kind of set."""
    for key, one in result.items():
        if isinstance(one, dict) and "coverage" in one:
            print(
                f"{name} {key}: {one['coverage']:.3f} ± {one['deviation']:.3f}, "
                f"size {one['size']:.2f}, worst class {one['worst_class']:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="scope, coverage, or sets of the latter (all)")
    parser.add_argument("--figure", action="store_true", help="only draw what is in the file")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.figure:
        what = arguments.what or ["scope", "coverage"]
        if "scope" in what:
            found = scope()
            keep(arguments.output, "scope", {**context(), **found})
            print(json.dumps(found["conjugp"]["auroc"], indent=1), flush=True)
            print(json.dumps(found["logistic_regression"], indent=1), flush=True)
        for name in (*ONE_FIT, *REFITTED):
            if name in what or "coverage" in what:
                found = coverage(name)
                keep(arguments.output, name, {**context(), **found})
                print_coverage(name, found)
    kept = json.loads(arguments.output.read_text())["sets"]
    if "scope" in kept and arguments.output == RESULTS:
        draw(kept)


if __name__ == "__main__":
    main()
