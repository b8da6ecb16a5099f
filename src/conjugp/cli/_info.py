"""``conjugp info``: what is in a model file, without loading the model."""

from __future__ import annotations

from typing import Any

import typer

from conjugp.cli import _options as options
from conjugp.cli._app import app
from conjugp.cli._output import print_json
from conjugp.cli.models import KEY, ROWS, read_header, table_part


@app.command()
def info(model: options.Model, as_json: options.Json = False, debug: options.Debug = False) -> None:
    """Say what is in a model file.

    \b
    Example:
      $ conjugp info wine.conjugp
    """
    header = read_header(model)
    if as_json:
        if KEY in header["extra"]:
            table_part(header)[1].pop(ROWS, None)  # digests, which say nothing to a reader
        print_json(file=model.resolve(), **header)
        return
    lines: dict[str, Any] = {"file": model.resolve(), "kind": header["kind"]}
    lines["version"] = f"conjugp {header['version']}, file format {header['format']}"
    lines |= {name.replace("_", " "): value for name, value in header["summary"].items()}
    if KEY in header["extra"]:
        roles, origin = table_part(header)
        lines["target"] = roles.target
        held = f", {origin['n_test']} more held out" if origin["n_test"] else ""
        lines["trained on"] = f"{origin['n_train']} rows of {origin['source']}{held}"
        lines["scores"] = ", ".join(f"{k} {_shown(v)}" for k, v in (origin["scores"] or {}).items())
    params = {k: v for k, v in header["params"].items() if isinstance(v, (str, int, float))}
    lines["settings"] = ", ".join(f"{k}={v!r}" for k, v in params.items())
    width = max(map(len, lines))
    for name, value in lines.items():
        if value is not None and value != "":
            typer.echo(f"{name:<{width}}  {_shown(value)}")


def _shown(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        value = [f"{name} ({words})" for name, words in value.items()]
    if isinstance(value, list):
        text = ", ".join(map(str, value[:12])) + (", ..." if len(value) > 12 else "")
    else:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())
