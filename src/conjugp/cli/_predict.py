"""``conjugp predict``: labels, probabilities and uncertainties of the rows of a table."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from conjugp._inputs.frames import Frame
from conjugp._inputs.table import listed
from conjugp._persistence import files
from conjugp.cli import _options as options
from conjugp.cli._app import Refusal, app, estimator_errors
from conjugp.cli._cells import Table, escaped, texts
from conjugp.cli._output import check_output, note, print_json, replaced
from conjugp.cli._settings import Reading
from conjugp.cli._tables import CSV, FORMATS, NPZ, PARQUET, need_pyarrow
from conjugp.cli.models import Model, load_model


@app.command()
def predict(
    model: options.Model,
    table: options.Table,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="CSV, Parquet or NPZ file; - is CSV on stdout.")
    ] = Path("predictions.csv"),
    proba: Annotated[bool, typer.Option(help="Write the probability of every class.")] = True,
    top_k: Annotated[
        int, typer.Option(min=0, help="Write the K most probable classes instead of all.")
    ] = 0,
    uncertainty: Annotated[
        bool, typer.Option(help="Write the entropy and its parts, aleatoric and epistemic.")
    ] = False,
    keep: Annotated[
        list[str],
        typer.Option(metavar="COLUMN", help="Copy a column of the table. May be repeated."),
    ] = [],  # noqa: B006
    unseen: options.Unseen = "ignore",
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    decimal: options.Decimal = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Predict the rows of a table.

    Columns are found by name: their order does not matter, and those that the model does not know
    are left alone.

    \b
    Examples:
      $ conjugp predict wine.conjugp wine.csv -o predictions.csv
      $ conjugp predict wine.conjugp wine.csv --top-k 2 --uncertainty --keep label -o -
    """
    to_stdout = str(output) == "-"
    if to_stdout and as_json:
        raise Refusal("--json and -o - both need standard output; write the predictions to a file")
    existed = not to_stdout and check_output(output, FORMATS, inputs=(model, table))
    if output.suffix.lower() in PARQUET:
        need_pyarrow()
    found = load_model(model, table=table)
    reading = Reading(delimiter=delimiter, encoding=encoding, decimal=decimal, keep=keep)
    rows = reading.table(table, found.ignored)
    with estimator_errors():
        X = found.frame(rows, unseen)
    note_unused(rows, X, found)
    columns: dict[str, NDArray[Any]] = {name: rows.column(name) for name in keep}
    with estimator_errors():
        made = _predictions(found.clf, X, proba, top_k, uncertainty)
    for name, column in made.items():
        if name in columns:
            raise Refusal(f"--keep {name!r} has the name of a column that predictions are put in")
        columns[name] = column
    if to_stdout:
        typer.echo(_csv_text(columns), nl=False)
        return
    with files.replaced(output) as path:
        _write(path, columns)
    if as_json:
        labels, counts = np.unique(columns["prediction"], return_counts=True)
        shown = [{"label": label, "rows": n} for label, n in zip(labels, counts, strict=True)]
        print_json(output=output.resolve(), n_rows=rows.n_rows, columns=list(columns), counts=shown)
        return
    typer.echo(f"{rows.n_rows} predictions written to {output.resolve()}{replaced(existed)}")


def note_unused(table: Table, frame: Frame, model: Model) -> None:
    """Say which columns, and which levels of those that it looks at, the model does not know."""
    note(*model.unseen(frame))
    known = {*(model.encoder.names if model.encoder.named else table.names)}
    known |= {model.roles.target, model.roles.weight} if model.roles else set()
    unused = [name for name in table.names if name not in known]
    if unused:
        note(f"not used, as the model was fitted without: {listed('column', unused)}")


def _predictions(
    clf: Any, X: Frame, proba: bool, top_k: int, uncertainty: bool
) -> dict[str, NDArray[Any]]:
    """Columns of predictions by name."""
    columns: dict[str, NDArray[Any]] = {}
    if top_k:
        k = min(top_k, len(clf.classes_))
        labels, p = clf.predict_topk(X, k)
        columns["prediction"] = labels[:, 0]
        for i in range(k):
            columns[f"label_{i + 1}"], columns[f"p_{i + 1}"] = labels[:, i], p[:, i]
    elif proba:
        p = clf.predict_proba(X)
        columns["prediction"] = clf.classes_[p.argmax(axis=1)]
        columns |= {f"p_{label}": p[:, i] for i, label in enumerate(clf.classes_)}
    else:
        columns["prediction"] = clf.predict(X)
    if uncertainty:
        parts = clf.predict_uncertainty(X)
        columns |= {
            "entropy": parts.total,
            "aleatoric": parts.aleatoric,
            "epistemic": parts.epistemic,
        }
    return columns


def _csv_text(columns: dict[str, NDArray[Any]]) -> str:
    """A CSV table; numbers with all their digits, and text that spreadsheets do not run."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(escaped, columns))
    cells = [
        column.tolist()
        if column.dtype.kind == "f"
        else ["" if t is None else escaped(t) for t in texts(column)]
        for column in columns.values()
    ]
    writer.writerows(zip(*cells, strict=True))
    return out.getvalue()


def _write(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    """A table in the format that the name of the file asks for."""
    suffix = path.suffix.lower()
    if suffix in CSV:
        path.write_text(_csv_text(columns), encoding="utf-8", newline="")
        return
    typed = {
        name: np.array(["" if t is None else t for t in texts(c)]) if c.dtype == object else c
        for name, c in columns.items()
    }
    if suffix in NPZ:
        with path.open("wb") as file:
            np.savez_compressed(file, **typed)  # type: ignore[arg-type]
        return
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({n: pyarrow.array(c) for n, c in typed.items()}), path)
