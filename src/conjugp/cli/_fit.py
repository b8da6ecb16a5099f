"""``conjugp fit``: from a table to a model file."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from conjugp._estimators.classifier import GPClassifier
from conjugp._rows.group import ALONE, Group, joined
from conjugp.cli import _options as options
from conjugp.cli._app import Interrupted, Refusal, app, estimator_errors, warnings_as_notes
from conjugp.cli._output import check_output, note, print_json, print_table, replaced, typed_command
from conjugp.cli._scores import SCORES, few_rows, scores_of, shown_scores, table_digest, these_rows
from conjugp.cli._settings import Reading, Task, Training, prepare
from conjugp.cli._tables import FORMATS
from conjugp.cli.models import ROWS, Model, packed_digests
from conjugp.kernels import Kernel, get_kernel

# Endings of tables and of what other commands write: a model of that name would mislead.
NO_MODELS = (*FORMATS, ".onnx", ".html", ".htm", ".json")


def _kernel(text: str) -> Kernel | None:
    """A kernel from names joined by + and *."""
    try:
        return get_kernel(text)
    except ValueError as error:
        raise Refusal(f"--{error}") from error


@app.command()
def fit(
    context: typer.Context,
    table: options.Table,
    target: options.Target,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="MODEL", help="Where to write the model.")
    ] = Path("model.conjugp"),
    categorical: options.Categorical = [],  # noqa: B006
    missing: options.Missing = "impute",
    ignore: options.Ignore = [],  # noqa: B006
    weight: options.Weight = None,
    test_size: options.TestSize = 0.2,
    test: options.TestFile = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    decimal: options.Decimal = None,
    kernel: Annotated[
        Any,
        typer.Option(
            parser=_kernel,
            metavar="NAME",
            help="As in Python: auto, rbf, matern32, linear and others, also joined: rbf+linear.",
        ),
    ] = "auto",
    likelihood: Annotated[
        str, typer.Option(help="logistic-softmax, softmax, robust-max, heaviside or dirichlet.")
    ] = "logistic-softmax",
    inducing: Annotated[
        Any,
        typer.Option(
            parser=options.words("--inducing", "auto", none="all", number=int),
            metavar="N|auto|all",
            help="Number of inducing points, auto, or all rows.",
        ),
    ] = "auto",
    temperature: Annotated[
        Any,
        typer.Option(
            parser=options.words("--temperature", "auto", none="none", number=float),
            metavar="T|auto|none",
            help="auto, none, or a number that divides log-probabilities.",
        ),
    ] = "auto",
    class_weight: Annotated[
        Any,
        typer.Option(
            parser=options.words("--class-weight", "balanced", none="none"),
            metavar="none|balanced",
            help="balanced gives every class the same total weight.",
        ),
    ] = "none",
    max_epochs: Annotated[float, typer.Option(help="Most passes over the rows.")] = 100,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    seed: options.Seed = 0,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Keep the state of the fit here; the same command goes on from it."),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Fit a classifier to a table and write it to a file.

    A fifth of the rows is held out for the scores, unless --test-size or --test say otherwise;
    the model in the file is the one that was scored. Columns may hold numbers, text, dates and
    gaps; --categorical, --ignore and --weight say what cannot be seen of them.

    \b
    Examples:
      $ conjugp fit wine.csv --target label -o wine.conjugp
      $ conjugp fit trips.csv --target mode --categorical 'ordinal=size:small<medium<large'
    """
    clf = GPClassifier(
        kernel,
        likelihood=likelihood,
        n_inducing=inducing,
        temperature=temperature,
        class_weight=class_weight,
        max_epochs=max_epochs,
        device=device,
        dtype=dtype,
        random_state=seed,
    )
    if output.suffix.lower() in NO_MODELS:
        raise Refusal(
            f"--output {str(output)!r} ends as another kind of file does; "
            f"call the model {output.stem}.conjugp"
        )
    reading = Reading(categorical, missing, ignore, weight, delimiter, encoding, decimal)
    task = Task(table, target, reading, test_size, test, seed, typed_command(context))
    with joined() as group:
        _fit_table(clf, task, output, checkpoint, as_json, group)


def _fit_table(
    clf: GPClassifier,
    task: Task,
    output: Path,
    checkpoint: Path | None,
    as_json: bool,
    group: Group,
) -> None:
    """The command, its options understood; of several ranks the first writes and speaks."""

    def check() -> bool:
        if group.rank:
            return False
        tables = (task.table, task.test)
        if checkpoint is not None:
            check_output(checkpoint, option="--checkpoint", inputs=(*tables, output))
        return check_output(output, inputs=tables)

    with estimator_errors():
        existed = group.all(check)
        training = prepare(task, group)
    notes = list(training.notes)
    if group.rank == 0:
        note(*notes)
    began = time.perf_counter()
    kept = f"{output} is as it was" if existed else "no model was written"
    fit_model(clf, training, checkpoint, kept, notes)
    seconds = time.perf_counter() - began
    model, scores = scored(clf, training, group)
    seen = None if training.test is None else seen_of(model, training, group)
    if group.rank:
        return
    n_train, n_test = model.origin["n_train"], model.origin["n_test"]
    if scores is not None:
        notes += few_rows(n_test)
    model.save(output)
    if as_json:
        print_json(
            model=output.resolve(),
            n_train=n_train,
            n_test=n_test,
            trained_on=seen,
            features=model.encoder.features,
            classes=clf.classes_,
            kernel=str(clf.kernel_),
            temperature=clf.temperature_,
            elbo=clf.elbo_,
            seconds=seconds,
            scores=scores,
            notes=notes,
        )
        return
    note(*notes[len(training.notes) :])
    typer.echo(
        f"Fitted {n_train} rows, {len(model.encoder.features)} features and "
        f"{len(clf.classes_)} classes in {seconds:.1f} s."
    )
    if scores is not None:
        source = task.table if task.test is None else task.test
        title = f"On {these_rows(n_test, seen, source.name)}; lower is better"
        print_table(["", *SCORES.values()], [("conjugp", *shown_scores(scores))], title)
    typer.echo(f"Model written to {output.resolve()}{replaced(existed)}")


def fit_model(
    clf: GPClassifier, training: Training, checkpoint: Path | None, kept: str, notes: list[str]
) -> None:
    """Fit to the training rows, with a bar where somebody looks on; warnings become notes."""
    rows = training.train
    clf.set_params(verbose=int(sys.stderr.isatty()), ignore=tuple(training.task.reading.ignore))
    if training.categorical:
        clf.set_params(categorical=training.categorical)
    settings: dict[str, Any] = {} if checkpoint is None else {"checkpoint": checkpoint}
    try:
        with warnings_as_notes(notes), estimator_errors():
            clf.fit(rows.frame, rows.y, rows.weight, **settings)
    except KeyboardInterrupt as error:
        if checkpoint is not None and checkpoint.exists():
            kept += f"; {checkpoint} has the state of the fit, and the same command goes on from it"
        raise Interrupted(f"interrupted; {kept}") from error
    clf.set_params(verbose=0)


def scored(
    clf: GPClassifier, training: Training, group: Group = ALONE
) -> tuple[Model, dict[str, float] | None]:
    """The model with its origin, and its scores on the rows held out, of all ranks."""
    task, held_out, scores, n_test = training.task, training.test, None, 0
    model, rows = Model(clf, training.roles), training.train
    if held_out is not None:
        with estimator_errors():
            proba = clf.predict_proba(model.frame(held_out.frame))
        y, proba = (np.concatenate(group.gather(a)) for a in (held_out.y, proba))
        weights = [w for w in group.gather(held_out.weight) if w is not None]
        weight = np.concatenate(weights) if weights else None
        scores, n_test = scores_of(y, proba, clf.classes_, weight), len(y)
    every, encoder = training.all, model.encoder
    shares = group.gather(table_digest(encoder.encode(every.frame), every.y))
    origin = {
        "source": task.table.name,
        "fingerprint": "+".join(shares),
        "n_rows": sum(group.gather(len(every.y))),
        "n_train": sum(group.gather(len(rows.y))),
        "n_test": n_test,
        "test_size": 0 if task.test is not None else task.test_size,
        "seed": task.seed,
        "command": task.command,
        "scores": scores,
        ROWS: packed_digests(encoder.encode(rows.frame), rows.y, group),
    }
    return replace(model, origin=origin), scores


def seen_of(model: Model, training: Training, group: Group = ALONE) -> int | None:
    """How many of the rows held out were trained on; of the training table's own, none."""
    if training.task.test is None or training.test is None:
        return 0
    seen = group.gather(model.count_seen(training.test))
    return None if None in seen else sum(seen)  # type: ignore[arg-type]
