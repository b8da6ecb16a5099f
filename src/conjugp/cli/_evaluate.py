"""``conjugp evaluate``: scores and pictures of a model on labelled rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from sklearn.metrics import confusion_matrix

from conjugp._persistence import files
from conjugp.cli import _options as options
from conjugp.cli._app import Refusal, app, estimator_errors
from conjugp.cli._output import note, print_json, print_table
from conjugp.cli._predict import note_unused
from conjugp.cli._scores import (
    SCORES,
    check_known,
    few_rows,
    scores_of,
    shown_scores,
    split,
    table_digest,
    these_rows,
)
from conjugp.cli._settings import Labelled, Reading, TableRows
from conjugp.cli.models import Model, load_model

MOST_CLASSES = 40  # in the table of classes and in the picture of the confusion matrix


@app.command()
def evaluate(
    model: options.Model,
    table: options.Table,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw reliability and confusion in this folder."),
    ] = None,
    unseen: options.Unseen = "ignore",
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    decimal: options.Decimal = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Score a model on the rows of a table that has the target.

    Of the very table that the model was fitted to, only the rows that were held out are scored.
    Of another table all rows are, and it is said how many of them the model was trained on.

    \b
    Example:
      $ conjugp evaluate wine.conjugp wine.csv --plots plots
    """
    if plots is not None and plots.exists() and not plots.is_dir():
        raise Refusal(f"--plots {str(plots)!r} is a file; give a folder")
    found = load_model(model, table=table)
    reading = Reading(delimiter=delimiter, encoding=encoding, decimal=decimal)
    with estimator_errors():
        labelled, clf = labelled_rows(found, table, reading, unseen), found.clf
        rows, seen = labelled.rows, labelled.seen
        proba = clf.predict_proba(rows.frame)
    scores = scores_of(rows.y, proba, clf.classes_, rows.weight)
    classes = class_table(rows.y, proba, clf.classes_)
    written = [] if plots is None else _draw(plots, rows, proba, clf.classes_)
    if as_json:
        print_json(
            n_rows=len(rows.y), trained_on=seen, scores=scores, classes=classes, plots=written
        )
        return
    note(*few_rows(len(rows.y)))
    flatters = ", which flatters it" if seen else ""
    title = f"On {these_rows(len(rows.y), seen, table.name)}{flatters}; lower is better"
    print_table(["", *SCORES.values()], [("conjugp", *shown_scores(scores))], title)
    shown = [
        (str(c["label"]), str(c["rows"]), _percent(c["recall"]), _percent(c["precision"]))
        for c in classes[:MOST_CLASSES]
    ]
    print_table(["class", "rows", "found", "right when predicted"], shown)
    if len(classes) > MOST_CLASSES:
        note(f"{len(classes) - MOST_CLASSES} more classes; --json has all")
    for path in written:
        typer.echo(f"Picture written to {path}")


def labelled_rows(model: Model, path: Path, reading: Reading, unseen: str = "ignore") -> Labelled:
    """The rows of a table to score: of the one that the model was fitted to, those held out."""
    roles, origin = model.known_roles(), model.origin
    table = reading.table(path, model.ignored)
    rows = model.rows(table, unseen)
    note_unused(table, rows.frame, model)
    check_known(rows.y, model.clf.classes_, roles.target)
    if table_digest(model.encoder.encode(rows.frame), rows.y) != origin["fingerprint"]:
        return Labelled(rows, rows, None, model.count_seen(rows))
    if not origin["test_size"]:
        return Labelled(rows, rows, rows, len(rows.y))
    train, test = split(rows.y, origin["test_size"], origin["seed"])
    return Labelled(rows.take(test), rows, rows.take(train), 0)


def class_table(y: Any, proba: Any, classes: Any) -> list[dict[str, Any]]:
    """Rows, recall and precision of every class; None where there is nothing to divide by."""
    counts = confusion(y, proba, classes)
    table = []
    for c, (true, named) in enumerate(zip(counts.sum(axis=1), counts.sum(axis=0), strict=True)):
        recall, precision = (counts[c, c] / n if n else None for n in (true, named))
        line = {"label": classes[c], "rows": true, "predicted": named}
        table.append({**line, "recall": recall, "precision": precision})
    return table


def confusion(y: Any, proba: Any, classes: Any) -> Any:
    """Counts (C, C): true class by predicted class."""
    return confusion_matrix(y, classes[proba.argmax(axis=1)], labels=classes)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _draw(folder: Path, rows: TableRows, proba: Any, classes: Any) -> list[Path]:
    """Pictures as PNG files in a folder; their paths."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    from conjugp.plotting import ClassCalibrationDisplay, ReliabilityDisplay

    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    with rc_context({"text.parse_math": False}):
        figures["reliability"] = Figure(figsize=(5.6, 6.2), layout="constrained")
        ReliabilityDisplay.from_predictions(
            rows.y, proba, labels=classes, ax=figures["reliability"].subplots()
        )
        figures["classes"] = Figure(figsize=(6.4, 5.0), layout="constrained")
        ClassCalibrationDisplay.from_predictions(
            rows.y, proba, labels=classes, ax=figures["classes"].subplots()
        )
        if len(classes) <= MOST_CLASSES:
            size = 3.5 + 0.3 * len(classes)
            figures["confusion"] = Figure(figsize=(size, size), layout="constrained")
            counts = confusion(rows.y, proba, classes)
            ConfusionMatrixDisplay(counts, display_labels=classes).plot(
                ax=figures["confusion"].subplots(),
                cmap="Blues",
                colorbar=False,
                xticks_rotation="vertical",
            )
        written = []
        for name, figure in figures.items():
            path = folder / f"{name}.png"
            with files.replaced(path) as temporary:
                figure.savefig(temporary, dpi=150)
            written.append(path)
    return written
