"""``conjugp report``: one HTML page on a model, its scores and the rows to look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from conjugp._estimators.classifier import GPClassifier
from conjugp._persistence import files
from conjugp.cli import _options as options
from conjugp.cli._app import Refusal, app, estimator_errors, warnings_as_notes
from conjugp.cli._contents import contents, headline
from conjugp.cli._evaluate import labelled_rows
from conjugp.cli._findings import Subject, find
from conjugp.cli._fit import fit_model, scored, seen_of
from conjugp.cli._output import check_output, note, print_json, replaced, typed_command
from conjugp.cli._page import render
from conjugp.cli._scores import few_rows
from conjugp.cli._settings import Labelled, Reading, Task, prepare
from conjugp.cli.models import Model, load_model


@app.command()
def report(
    context: typer.Context,
    first: Annotated[
        Path, typer.Argument(metavar="MODEL|TABLE", help="A model, or a table to fit first.")
    ],
    table: Annotated[
        Path | None, typer.Argument(metavar="[TABLE]", help="After a model: labelled rows.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="HTML", help="Where to write the page.")
    ] = Path("report.html"),
    target: options.OptionalTarget = None,
    keep: options.Keep = [],  # noqa: B006
    train: Annotated[
        Path | None,
        typer.Option(metavar="TABLE", help="After a model: what logistic regression learns from."),
    ] = None,
    compare: Annotated[bool, typer.Option(help="Fit a logistic regression beside.")] = True,
    categorical: options.Categorical = [],  # noqa: B006
    missing: options.Missing = "impute",
    ignore: options.Ignore = [],  # noqa: B006
    weight: options.Weight = None,
    test_size: options.TestSize = 0.2,
    test: options.TestFile = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    decimal: options.Decimal = None,
    unseen: options.Unseen = "ignore",
    seed: options.Seed = 0,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write a page on a model: scores, calibration, confusion, odd rows, features, data.

    With a model and a table, the table is scored; of the table that the model was fitted to, only
    the rows that were held out. With a table and --target, a model is fitted to most of its rows
    first. The page is one file and needs no network.

    \b
    Examples:
      $ conjugp report wine.conjugp wine.csv -o report.html
      $ conjugp report wine.csv --target label -o report.html
    """
    existed = check_output(output, (".html", ".htm"), inputs=(first, table, train, test))
    notes: list[str] = []
    command = typed_command(context)
    unused = ("train", "unseen")
    if table is not None:
        unused = ("categorical", "missing", "ignore", "weight", "target", "test")
    given = [n for n in unused if context.get_parameter_source(n).name == "COMMANDLINE"]  # type: ignore[union-attr]
    if given and table is not None:
        raise Refusal(f"--{given[0]} is for a table that is fitted first; the model has its own")
    if given and target is not None:
        raise Refusal(f"--{given[0]} is for a model and a table; here the table is fitted first")
    if table is not None:
        reading = Reading(delimiter=delimiter, encoding=encoding, decimal=decimal, keep=keep)
        model, labelled = _of_model(first, table, train, reading, unseen)
        commands, source, judged = [model.origin["command"], command], table, table
    else:
        if target is None:
            raise Refusal(
                "give a model and a table, or a table with --target and the column to predict"
            )
        if test_size == 0 and test is None:
            raise Refusal("a report needs rows to score: --test-size above 0, or --test TABLE")
        reading = Reading(categorical, missing, ignore, weight, delimiter, encoding, decimal, keep)
        training = prepare(Task(first, target, reading, test_size, test, seed, command))
        notes += training.notes
        clf = GPClassifier(random_state=seed)
        fit_model(clf, training, None, f"no report was written to {output}", notes)
        model, _ = scored(clf, training)
        assert training.test is not None
        seen = seen_of(model, training)
        parts = (training.test, training.all, training.train)
        rows, every, train_rows = (replace(r, frame=model.frame(r.frame)) for r in parts)
        labelled = Labelled(rows, every, train_rows, seen)
        commands, source, judged = [command], first, test or first
    subject = Subject(
        **vars(labelled),
        model=model,
        commands=commands,
        source=source.name,
        scored=judged.name,
        keep=keep,
    )
    if not compare:
        subject.train = None
    with warnings_as_notes(notes), estimator_errors():
        findings = find(subject)
    notes += few_rows(len(subject.rows.y))
    note(*notes)
    page = render(contents(subject, findings, notes))
    with files.replaced(output) as path:
        path.write_text(page, encoding="utf-8", errors="backslashreplace")
    if as_json:
        print_json(
            report=output.resolve(),
            n_rows=len(subject.rows.y),
            trained_on=subject.seen,
            scores=findings.scores,
            relevance=findings.relevance,
            notes=notes,
        )
        return
    typer.echo(headline(subject, findings))
    typer.echo(f"Report written to {output.resolve()}{replaced(existed)}")


def _of_model(
    path: Path, table: Path, train: Path | None, reading: Reading, unseen: str
) -> tuple[Model, Labelled]:
    """A model from a file, and the rows of a table for it."""
    model = load_model(path, table=table)
    with estimator_errors():
        labelled = labelled_rows(model, table, reading, unseen)
        if train is not None:
            given = replace(reading, keep=[]).table(train, model.ignored)
            labelled.train = model.rows(given, unseen)
    return model, labelled
