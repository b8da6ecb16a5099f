"""``conjugp demo``: GPClassifier beside scikit-learn's own classifiers."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from sklearn.datasets import load_digits, load_wine
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from conjugp._estimators.classifier import GPClassifier
from conjugp._persistence import files
from conjugp.cli import _options as options
from conjugp.cli._app import app
from conjugp.cli._output import check_output, print_json, print_table, replaced
from conjugp.cli._scores import SCORES, scores_of, shown_scores

N_TRAIN = 400  # of 1,797 digits: GaussianProcessClassifier's time grows as the cube of it
FORMATS = (".pdf", ".png", ".svg")


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option(help="Where to write the reliability diagram: .png, .pdf or .svg.")
    ] = Path("conjugp-demo.png"),
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Write a table to try the other commands on, and do no more."
        ),
    ] = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Classify handwritten digits beside two of scikit-learn's classifiers. Under a minute.

    \b
    Examples:
      $ conjugp demo --output digits.png
      $ conjugp demo --table wine.csv
    """
    if table is not None:
        _write_wine(table, as_json)
        return
    existed = check_output(output, FORMATS)
    X, y = load_digits(return_X_y=True)
    parts: Any = train_test_split(X, y, train_size=N_TRAIN, stratify=y, random_state=seed)
    X_train, X_test, y_train, y_test = parts
    if not as_json:
        typer.echo(
            f"Digits of scikit-learn: {len(X_train)} to train on, {len(X_test)} to test, "
            f"{X.shape[1]} pixels, {len(np.unique(y))} classes.\nconjugp takes the pixels as "
            "they are, scikit-learn's two classifiers get them scaled."
        )
    classes, proba, seconds = np.unique(y), dict[str, np.ndarray](), dict[str, float]()
    # One thread each: as fair, and on matrices this small two threads mostly wait for each other.
    with threadpool_limits(1):
        for name, classifier in _classifiers(seed).items():
            typer.echo(f"Fitting {name} ...", err=True)
            began = time.perf_counter()
            classifier.fit(X_train, y_train)
            seconds[name] = time.perf_counter() - began
            proba[name] = classifier.predict_proba(X_test)
    _draw(proba, y_test, output)
    scores = {n: {**scores_of(y_test, p, classes), "fit": seconds[n]} for n, p in proba.items()}
    if as_json:
        print_json(classifiers=scores, output=output.resolve())
        return
    rows = [(name, *shown_scores(s), f"{s['fit']:.1f} s") for name, s in scores.items()]
    print_table(["", *SCORES.values(), "fit"], rows, "Lower is better")
    typer.echo(f"Reliability diagram written to {output.resolve()}{replaced(existed)}")


def _write_wine(path: Path, as_json: bool) -> None:
    """scikit-learn's Wine as CSV: 13 measurements of 178 wines, and who made them."""
    existed = check_output(path, (".csv",), "--table")
    wine: Any = load_wine()
    with files.replaced(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*wine.feature_names, "label"])
        for x, y in zip(wine.data.tolist(), wine.target_names[wine.target], strict=True):
            writer.writerow([*x, y])
    if as_json:
        print_json(output=path.resolve())
        return
    typer.echo(f"{len(wine.data)} wines written to {path.resolve()}{replaced(existed)}")


def _classifiers(seed: int) -> dict[str, Any]:
    """The three, scikit-learn's with scaled inputs and the GP's kernel started where it can learn.

    conjugp comes first: it is what people are here for.
    """
    # With 64 scaled pixels distances are about 8 and more: from a lengthscale of 1, the default,
    # all kernel values are zero and nothing is learned.
    gp = GaussianProcessClassifier(1.0 * RBF(8.0), random_state=seed)
    return {
        "conjugp GPClassifier": GPClassifier(random_state=seed, verbose=int(sys.stderr.isatty())),
        "LogisticRegression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "GaussianProcessClassifier": make_pipeline(StandardScaler(), gp),
    }


def _draw(proba: dict[str, np.ndarray], y: np.ndarray, output: Path) -> None:
    # Imported late, as it is slow; and a figure without pyplot needs no display.
    from matplotlib.figure import Figure

    from conjugp.plotting import ReliabilityDisplay

    figure = Figure(figsize=(6.4, 6.8), layout="constrained")
    ax = figure.subplots()
    for name, p in proba.items():
        ReliabilityDisplay.from_predictions(y, p, name=name, ax=ax)
    ax.set_title(
        f"Handwritten digits, {N_TRAIN} to train on and {len(y)} to test\n"
        "On the dashed line probabilities mean what they say; small dots are few images",
        loc="left",
        fontsize="medium",
    )
    with files.replaced(output) as path:
        figure.savefig(path, dpi=150)
