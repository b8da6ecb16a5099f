"""Tables as people have them: this library and others, each with its default settings.

    python bench/tables.py [table ...] [--only name ...]   # CONJUGP_DATA has tables/*.parquet

Three splits of every table, at most 3,000 rows to train on; every contestant gets the columns in
the way it takes them itself. A command that was stopped goes on where it was; `--again name` runs
one contestant afresh. Packages that are not installed are left out, and said.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from bounds import geometric_mean
from data import Frames, frames_at_hand, load_frames, load_table, one_hot, parts_of
from numpy.typing import NDArray
from record import add_output, check_sets, context, keep, put_table, scores
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from conjugp import GPClassifier
from conjugp.metrics import brier

SEEDS = (0, 1, 2)
MOST_LEVELS = 255  # that HistGradientBoosting takes
SCORES = ("nll", "error", "auc", "brier", "ece", "seconds")
MISSING = "missing"
LEAST = 1e-6  # that a probability counts for: forests say 0


# --- columns, as each contestant takes them -------------------------------------------------------


def text_columns(table: pd.DataFrame) -> list[str]:
    """The columns that hold neither numbers nor booleans."""
    return [c for c in table if not pd.api.types.is_numeric_dtype(table[c])]


def as_text(table: pd.DataFrame) -> pd.DataFrame:
    """Categories as strings, missing ones as a level of its own; numbers as floats."""
    text = text_columns(table)
    table = table.astype({c: float for c in table if c not in text})
    table[text] = table[text].astype(object).where(table[text].notna(), MISSING).astype(str)
    return table


def as_categories(data: Frames, most: int | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Categories as pandas has them, or as their numbers where there are more than `most`."""
    train, test = data.X_train.copy(), data.X_test.copy()
    text = text_columns(train)
    for c in train:
        if c not in text:
            train[c], test[c] = train[c].astype(float), test[c].astype(float)
            continue
        levels = pd.CategoricalDtype(sorted(train[c].dropna().astype(str).unique()))
        for part in (train, test):
            part[c] = part[c].astype(object).where(part[c].isna(), part[c].astype(str))
            part[c] = part[c].astype(levels)
            if not len(levels.categories) or len(levels.categories) > (most or len(part)):
                part[c] = part[c].cat.codes.astype(float)
    return train, test


def as_one_hot(data: Frames) -> list[NDArray]:
    """Numbers with medians and an indicator where they are missing, text one-hot."""
    both = pd.concat([data.X_train, data.X_test], ignore_index=True)
    n = len(data.X_train)
    return one_hot(both, np.arange(n), np.arange(n, len(both)))


# --- contestants ----------------------------------------------------------------------------------

Found = tuple[NDArray, NDArray]  # probabilities of the test rows, and the classes of their columns


def ours(data: Frames, seed: int) -> Found:
    clf = GPClassifier(random_state=seed).fit(data.X_train, data.y_train)
    return clf.predict_proba(data.X_test), clf.classes_


def catboost(data: Frames, seed: int) -> Found:
    from catboost import CatBoostClassifier

    text = text_columns(data.X_train)
    clf = CatBoostClassifier(
        random_seed=seed, verbose=False, allow_writing_files=False, cat_features=text
    )
    clf.fit(as_text(data.X_train), data.y_train)
    return clf.predict_proba(as_text(data.X_test)), clf.classes_


def lightgbm(data: Frames, seed: int) -> Found:
    from lightgbm import LGBMClassifier

    train, test = as_categories(data)
    train.columns = test.columns = [f"x{j}" for j in range(train.shape[1])]  # it refuses some names
    clf = LGBMClassifier(random_state=seed, verbose=-1).fit(train, data.y_train)
    return np.asarray(clf.predict_proba(test)), clf.classes_


def xgboost(data: Frames, seed: int) -> Found:
    from xgboost import XGBClassifier

    train, test = as_categories(data)
    classes, y = np.unique(data.y_train, return_inverse=True)
    clf = XGBClassifier(random_state=seed, enable_categorical=True).fit(train, y)
    return clf.predict_proba(test), classes


def hist_gradient_boosting(data: Frames, seed: int) -> Found:
    train, test = as_categories(data, MOST_LEVELS)
    clf = HistGradientBoostingClassifier(categorical_features="from_dtype", random_state=seed)
    clf.fit(train, data.y_train)
    return clf.predict_proba(test), clf.classes_


def random_forest(data: Frames, seed: int) -> Found:
    train, test = as_one_hot(data)
    clf = RandomForestClassifier(random_state=seed, n_jobs=-1).fit(train, data.y_train)
    return clf.predict_proba(test), clf.classes_


def logistic_regression(data: Frames, seed: int) -> Found:
    train, test = as_one_hot(data)
    clf = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    clf.fit(train, data.y_train)
    return clf.predict_proba(test), clf.classes_


CONTESTANTS: dict[str, tuple[str, Callable[[Frames, int], Found]]] = {
    "conjugp": ("conjugp", ours),
    "CatBoost": ("catboost", catboost),
    "LightGBM": ("lightgbm", lightgbm),
    "XGBoost": ("xgboost", xgboost),
    "HistGradientBoosting": ("sklearn", hist_gradient_boosting),
    "random forest": ("sklearn", random_forest),
    "LogisticRegression": ("sklearn", logistic_regression),
}


def run(name: str, data: Frames, seed: int) -> dict[str, float]:
    """Scores of one contestant on one split, and the seconds of its fit and predictions."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p, classes = CONTESTANTS[name][1](data, seed)
    seconds = time.perf_counter() - began
    p = np.asarray(p, dtype=np.float64).clip(LEAST)
    p = p / p.sum(axis=1, keepdims=True)
    return {
        **scores(data.y_test, p, classes),
        "brier": brier(data.y_test, p, labels=classes),
        "auc": auc(data.y_test, p, classes),
        "seconds": seconds,
    }


def auc(y: NDArray, p: NDArray, classes: NDArray) -> float:
    """Area under the ROC curve, the mean over classes that test rows have against the rest."""
    here = [i for i, c in enumerate(classes) if 0 < (y == c).sum() < len(y)]
    if len(classes) == 2:
        here = here[-1:]
    return float(np.mean([roc_auc_score(y == classes[i], p[:, i]) for i in here]))


# --- results --------------------------------------------------------------------------------------


def mean_of(entry: dict[str, Any], name: str, score: str) -> float:
    """The mean of a score over a contestant's splits."""
    found = [one[score] for one in entry["scores"].get(name, {}).values()]
    found = [math.nan if value is None else value for value in found]
    return float(np.mean(found)) if found else math.nan


def table(sets: dict[str, Any], score: str = "nll") -> str:
    """Markdown: a line for every table, the best of a line in bold."""
    names = [n for n in CONTESTANTS if any(n in entry["scores"] for entry in sets.values())]
    lines = ["| " + " | ".join([score, "rows", *names]) + " |", "|---|" + "--:|" * (len(names) + 1)]
    for key, entry in sets.items():
        means = np.array([mean_of(entry, name, score) for name in names])
        best = np.nanmax(means) if score == "auc" else np.nanmin(means)
        cells = [f"**{m:.3f}**" if m == best else f"{m:.3f}" for m in means]
        lines.append("| " + " | ".join([key, str(entry["n_train"]), *cells]) + " |")
    return "\n".join(lines)


def summary(sets: dict[str, Any]) -> str:
    """Markdown: what all tables say of every contestant, where all of them have been run."""
    names = [n for n in CONTESTANTS if any(n in entry["scores"] for entry in sets.values())]
    whole = {k: e for k, e in sets.items() if all(n in e["scores"] for n in names)}
    nll = np.array([[mean_of(e, n, "nll") for n in names] for e in whole.values()])
    ranks = nll.argsort(axis=1).argsort(axis=1) + 1.0
    heads = ["", "NLL", "geometric", "rank", "error", "AUC", "Brier", "ECE", "median s"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for i, name in enumerate(names):
        means = {s: [mean_of(e, name, s) for e in whole.values()] for s in SCORES}
        values = [nll[:, i].mean(), geometric_mean(nll[:, i]), ranks[:, i].mean()]
        values += [float(np.nanmean(means[s])) for s in ("error", "auc", "brier", "ece")]
        values += [float(np.median(means["seconds"]))]
        digits = ("3f", "3f", "2f", "3f", "3f", "3f", "3f", "1f")
        cells = [f"{v:.{d}}" for v, d in zip(values, digits, strict=True)]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="table", help="names (all at hand)")
    parser.add_argument("--only", nargs="+", metavar="name", help=", ".join(CONTESTANTS))
    parser.add_argument("--again", nargs="+", metavar="name", default=[], help="run afresh")
    parser.add_argument("--page", type=Path, help="a page whose tables are replaced")
    add_output(parser, "tables.json")
    arguments = parser.parse_args()
    wanted = arguments.only or list(CONTESTANTS)
    check_sets(parser, [*wanted, *arguments.again], CONTESTANTS)
    for name in [n for n in wanted if find_spec(CONTESTANTS[n][0]) is None]:
        print(f"{name} is left out: the package {CONTESTANTS[name][0]} is not installed")
        wanted.remove(name)
    for key, first in frames_at_hand(arguments.tables):
        splits = {0: first, **{seed: load_frames(key, seed) for seed in SEEDS[1:]}}
        known = {}
        if arguments.output.is_file():
            known = json.loads(arguments.output.read_text(encoding="utf-8"))["sets"]
        entry = known.get(key, {"scores": {}})
        features = parts_of(load_table(key))[0]
        entry |= {"n_train": len(splits[0].y_train), "text": len(text_columns(features))}
        for name in wanted:
            found = {} if name in arguments.again else entry["scores"].get(name, {})
            for seed, data in splits.items():
                if str(seed) in found:
                    continue
                found[str(seed)] = run(name, data, seed)
                entry["scores"][name] = found
                keep(arguments.output, key, {**context(), **entry})
        print(table({key: entry}).splitlines()[2], flush=True)
    sets = json.loads(arguments.output.read_text(encoding="utf-8"))["sets"]
    for text in (summary(sets), *(table(sets, score) for score in ("nll", "auc"))):
        print(text + "\n")
        if arguments.page:
            put_table(arguments.page, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
