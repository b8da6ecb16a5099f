"""What commands print, and the files that they may write to."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from conjugp._persistence import files
from conjugp.cli._app import Refusal


def note(*texts: str) -> None:
    """Remarks on the error stream, out of the way of results."""
    for text in texts:
        typer.echo(f"note: {text}", err=True)


def print_json(**data: Any) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(plain(data), allow_nan=False))


def plain(value: Any) -> Any:
    """NumPy's types as JSON has them; what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def print_table(columns: list[str], rows: list[tuple[str, ...]], title: str | None = None) -> None:
    """A table, its first column to the left and numbers to the right, never cut in a file."""
    table = RichTable(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    # Markup is off: a class called [red] is text.
    console = Console(markup=False, emoji=False, highlight=False)
    console.width = max(console.width, 100)
    console.print(table)


def check_output(
    path: Path,
    formats: tuple[str, ...] = (),
    option: str = "--output",
    inputs: Sequence[Path | None] = (),
) -> bool:
    """Whether there is such a file already; raises if it could not be written, before any work.

    Nor may it be one of the inputs, by whatever name.
    """
    for given in inputs:
        if given is not None and _same_file(path, given):
            raise Refusal(f"{option} {str(path)!r} is the same file as {str(given)!r}")
    if formats and path.suffix.lower() not in formats:
        raise Refusal(f"{option} must end in {', '.join(formats)}; got {str(path)!r}")
    existed = path.exists()
    if existed and not path.is_file() and not path.is_dir():
        raise Refusal(f"{option} {str(path)!r} is a device or pipe; give the path of a file")
    try:
        with path.open("ab"):  # the only sure test, and it leaves a file as it is
            pass
        if not existed:
            files.target(path).unlink()
    except OSError as error:
        raise OSError(f"{option} {str(path)!r} cannot be written: {error.strerror}") from error
    return existed


def _same_file(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


def typed_command(context: typer.Context) -> str:
    """The command as it was typed, without the folders of absolute paths."""
    given = (context.obj or {}).get("arguments", [])
    return shlex.join(["conjugp", *(Path(a).name if Path(a).is_absolute() else a for a in given)])


def replaced(existed: bool) -> str:
    """What to say after the name of a written file."""
    return ", in place of the file that was there" if existed else ""
