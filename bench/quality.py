"""How good the default settings are: error, NLL and calibration error of GPClassifier().

python bench/quality.py [set ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

from data import SPLITS, Split, load
from record import add_output, check_sets, context, keep, scores

# Test error, NLL and ECE that the defaults are held to.
TARGETS = {
    "shuttle": {"error": 0.0015, "nll": 0.0050, "ece": 0.002},
    "mnist": {"error": 0.024, "nll": 0.080, "ece": 0.008},
    "fashion_mnist": {"error": 0.115, "nll": 0.325, "ece": 0.018},
    "covtype": {"error": 0.185, "nll": 0.405, "ece": 0.015},
    "letter": {"error": 0.035, "nll": 0.105, "ece": 0.012},
}
# On these the target is the NLL of every rival.
RIVALRY = ("satimage", "dry_bean", "glass")
SETS = (*TARGETS, *RIVALRY)
MEASURES = ("error", "nll", "ece")


def rivals() -> dict[str, Any]:
    """What people use today, as they would use it."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    def svc(ensemble: bool) -> Any:
        return make_pipeline(StandardScaler(), CalibratedClassifierCV(SVC(), ensemble=ensemble))

    return {
        "LogisticRegression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "HistGradientBoosting": HistGradientBoostingClassifier(random_state=0),
        "calibrated SVC, ensemble": svc(True),
        "calibrated SVC, one": svc(False),
    }


def measure(model: Any, split: Split) -> dict[str, Any]:
    """Fit and predict once: scores, and seconds of both with everything included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.perf_counter()
        model.fit(split.X_train, split.y_train)
        fitted = time.perf_counter()
        proba = model.predict_proba(split.X_test)
        done = time.perf_counter()
    return {
        **scores(split.y_test, proba, model.classes_),
        "fit_seconds": fitted - began,
        "predict_seconds": done - fitted,
        "warnings": sorted({f"{w.category.__name__}: {w.message}"[:200] for w in caught}),
    }


def run(name: str, n_splits: int | None = None) -> dict[str, Any]:
    """One data set: GPClassifier, and on the small sets its rivals on the same splits."""
    from conjugp import GPClassifier

    runs: dict[str, list[dict[str, Any]]] = {"GPClassifier": []}
    shape: dict[str, int] = {}
    for seed in range(min(SPLITS[name], n_splits or SPLITS[name])):
        split = load(name, seed)
        shape = {
            "n_train": len(split.y_train),
            "n_test": len(split.y_test),
            "n_features": split.X_train.shape[1],
            "n_classes": len(set(split.y_train.tolist())),
        }
        model = GPClassifier(random_state=0)
        found = measure(model, split)
        found["temperature"] = model.temperature_
        runs["GPClassifier"].append(found)
        for rival, estimator in (rivals() if name in RIVALRY else {}).items():
            runs.setdefault(rival, []).append(measure(estimator, split))
    models = {model: mean(found) for model, found in runs.items()}
    own = models["GPClassifier"]
    if name in RIVALRY:
        targets = {"nll": best_rival(models)}
        passed = {"nll": own["nll"] < targets["nll"]}
    else:
        targets = TARGETS[name]
        passed = {key: own[key] <= most for key, most in targets.items()}
    return {
        **context(),
        **shape,
        "n_splits": len(runs["GPClassifier"]),
        "models": models,
        "splits": runs["GPClassifier"],
        "targets": targets,
        "passed": passed,
    }


def mean(found: list[dict[str, Any]]) -> dict[str, float]:
    """The means over splits of all that is a number."""
    return {
        key: statistics.fmean(f[key] for f in found)
        for key, value in found[0].items()
        if isinstance(value, float)
    }


def best_rival(models: dict[str, dict[str, float]]) -> float:
    """The lowest mean NLL of a rival, of two calibrated SVCs the better one included."""
    return min(scores["nll"] for model, scores in models.items() if model != "GPClassifier")


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: every set with its targets, then the rivals."""
    lines = [
        "| set | rows | error | target | NLL | target | ECE | target | T | fit s | predict s | |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, r in results.items():
        own = r["models"]["GPClassifier"]
        cells = [name, f"{r['n_train']:,} / {r['n_test']:,}"]
        for key in MEASURES:
            target = r["targets"].get(key)
            cells += [f"{own[key]:.4f}", "" if target is None else f"{target:.4f}"]
        cells += [f"{own[k]:.2f}" for k in ("temperature", "fit_seconds", "predict_seconds")]
        cells.append("pass" if all(r["passed"].values()) else "FAIL")
        lines.append("| " + " | ".join(cells) + " |")
    if not any(name in RIVALRY for name in results):
        return "\n".join(lines)
    lines += ["", "| set | model | error | NLL | ECE | fit s |", "|---|---|--:|--:|--:|--:|"]
    for name in (name for name in results if name in RIVALRY):
        for model, found in results[name]["models"].items():
            values = " | ".join(f"{found[key]:.4f}" for key in MEASURES)
            lines.append(f"| {name} | {model} | {values} | {found['fit_seconds']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", metavar="set", help=", ".join(SETS) + " (all)")
    parser.add_argument("--splits", type=int, help="of the sets with several, only the first few")
    add_output(parser, "quality.json")
    arguments = parser.parse_args()
    check_sets(parser, arguments.sets, SETS)
    results = {}
    for name in arguments.sets or SETS:
        results[name] = run(name, arguments.splits)
        keep(arguments.output, name, results[name])
        print(f"{name}: {table({name: results[name]}).splitlines()[2]}", flush=True)
    print("\n" + table(results))


if __name__ == "__main__":
    main()
