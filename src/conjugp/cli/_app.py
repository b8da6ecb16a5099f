"""The typer application: options that all commands have, errors as one sentence, exit codes."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from typer.core import TyperGroup

import conjugp
from conjugp._inputs.table import TableError
from conjugp._persistence import files
from conjugp._persistence.files import FileFormatError
from conjugp.cli._tables import MissingPackageError

UNEXPECTED, BAD_INPUT, BAD_FILE, NO_PACKAGE, INTERRUPTED = 1, 2, 3, 4, 130

EXIT_CODES = """\b
Exit codes:
  0    done
  1    unexpected error, a bug
  2    arguments or a table that cannot be used
  3    a file that cannot be read or written, or is not a model
  4    an optional package is not installed
  130  interrupted"""

# Click's own errors, wherever this version of typer keeps them.
_ClickError: Any = typer.BadParameter.__mro__[2]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of splits and fits.")]


class Refusal(Exception):
    """Something that cannot be done as asked, in one sentence."""


class Interrupted(Exception):
    """Ctrl-C, with a sentence on what is kept."""


class Commands(TyperGroup):
    """Commands whose errors are one line and an exit code."""

    def main(self, args: Any = None, *more: Any, **extra: Any) -> NoReturn:
        given = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        extra["obj"] = {"arguments": given}
        try:
            code = super().main(args, *more, **extra)
        except Exception as error:
            if "--debug" in given:
                raise
            code = _explained(error, "--json" in given)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # typer would end without a word
            raise Interrupted("interrupted; files are as they were") from error


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # errors are plain lines that can be searched and piped
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(conjugp.__version__)
        raise typer.Exit()


@app.callback()
def _conjugp(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Calibrated multi-class Gaussian process classification.

    \b
    From a table to a report:
      $ conjugp fit wine.csv --target label -o wine.conjugp
      $ conjugp report wine.conjugp wine.csv -o report.html
    """


def _explained(error: Any, as_json: bool) -> int:
    """Say in one line what went wrong; the exit code."""
    if isinstance(error, _ClickError):
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return BAD_INPUT
        message, code = error.format_message(), BAD_INPUT
    elif isinstance(error, (TableError, Refusal)):
        message, code = str(error), BAD_INPUT
    elif isinstance(error, FileFormatError):
        message, code = str(error), BAD_FILE
    elif isinstance(error, FileNotFoundError) and error.filename:
        message, code = f"there is no file {error.filename}", BAD_FILE
    elif isinstance(error, OSError):
        named = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        message, code = named, BAD_FILE
    elif isinstance(error, MissingPackageError):
        message, code = str(error), NO_PACKAGE
    elif isinstance(error, Interrupted):
        message, code = str(error), INTERRUPTED
    elif isinstance(error, MemoryError):
        message, code = "the machine has too little memory for this", UNEXPECTED
    else:
        kind = type(error).__name__
        message, code = f"unexpected error, {kind}: {error} (--debug shows where)", UNEXPECTED
    message = " ".join(message.split())
    typer.echo(f"conjugp: {message}", err=True)
    if as_json:
        typer.echo(json.dumps({"error": message, "exit_code": code}))
    return code


def note(text: str) -> None:
    """A remark on the error stream, out of the way of results."""
    typer.echo(f"note: {text}", err=True)


@contextmanager
def warnings_as_notes(notes: list[str]) -> Iterator[None]:
    """Collect warnings as sentences instead of printing source lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, (UserWarning, RuntimeWarning)):
            text = " ".join(str(warning.message).split())
            if text not in notes:
                notes.append(text)


@contextmanager
def estimator_errors() -> Iterator[None]:
    """What the estimator does not accept is the table's or the options' fault, not a bug."""
    try:
        yield
    except (TableError, FileFormatError):
        raise
    except (ValueError, TypeError) as error:
        raise Refusal(str(error)) from error


def print_json(data: dict[str, Any]) -> None:
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
