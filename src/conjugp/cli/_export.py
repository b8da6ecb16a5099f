"""``conjugp export``: a model as an ONNX graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conjugp.cli import _options as options
from conjugp.cli._app import app, estimator_errors
from conjugp.cli._output import check_output, print_json, replaced
from conjugp.cli._tables import MissingPackageError
from conjugp.cli.models import load_model


@app.command()
def export(
    model: options.Model,
    output: Annotated[Path, typer.Argument(metavar="ONNX", help="Where to write: a .onnx file.")],
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write the probabilities of a model as an ONNX graph.

    Its input is a matrix with the features in the order that is printed, or where the model's
    table had text, dates or gaps each column by its name. Needs onnx: pip install "conjugp[onnx]".

    \b
    Example:
      $ conjugp export wine.conjugp wine.onnx
    """
    from conjugp.export import to_onnx

    existed = check_output(output, (".onnx",), "ONNX", inputs=(model,))
    found = load_model(model)
    try:
        with estimator_errors():
            to_onnx(found.clf, output)
    except ImportError as error:
        raise MissingPackageError('ONNX files need onnx: pip install "conjugp[onnx]"') from error
    table = found.clf.columns_ is not None
    inputs, features = found.encoder.kinds, found.encoder.features
    if as_json:
        classes = found.clf.classes_
        inputs = inputs if table else None
        print_json(output=output.resolve(), features=features, inputs=inputs, classes=classes)
        return
    typer.echo(f"Graph written to {output.resolve()}{replaced(existed)}")
    if table:
        typer.echo(f"Inputs: {', '.join(f'{name} ({kind})' for name, kind in inputs.items())}")
    else:
        typer.echo(f"Features in order: {', '.join(features)}")
