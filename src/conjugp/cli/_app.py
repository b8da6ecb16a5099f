"""The typer application: options that all commands have, errors as one sentence, exit codes."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import conjugp
from conjugp._inputs.table import TableError
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
        # What Python calls X is a table here.
        message = re.sub(r"^X (?=ha)", "the table ", str(error).removeprefix("X: "))
        code = BAD_INPUT
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
