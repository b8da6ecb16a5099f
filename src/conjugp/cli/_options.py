"""Options and arguments that commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from conjugp.cli._app import Refusal

_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


def words(
    option: str, *known: str, none: str | None = None, number: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """What reads an option: one of some words, the one that stands for None, or a number."""
    *first, last = (x for x in (*known, none, _NUMBERS.get(number)) if x is not None)

    def read(text: str) -> Any:
        if text in (*known, none):
            return None if text == none else text
        try:
            if number is not None:
                return number(text)
        except ValueError:
            pass
        raise Refusal(f"{option} must be {', '.join(first)} or {last}; got {text!r}")

    return read


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of splits and fits.")]
Table = Annotated[
    Path, typer.Argument(metavar="TABLE", help="CSV, Parquet or NPZ file; - is CSV on stdin.")
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A file that fit wrote.")]
Target = Annotated[str, typer.Option(help="The column to predict.")]
OptionalTarget = Annotated[str | None, typer.Option(help="The column to predict.")]
Categorical = Annotated[
    list[str],
    typer.Option(
        "--categorical",
        metavar="COLUMN",
        help="A column whose numbers are codes; ordinal=COLUMN or ordinal=COLUMN:LOW<MIDDLE<HIGH "
        "for levels in an order. For all text at once: onehot (the default), ordinal, or refuse. "
        "May be repeated.",
    ),
]
Missing = Annotated[
    Any,
    typer.Option(
        parser=words("--missing", "refuse", "impute"),
        metavar="impute|refuse",
        help="Missing values: medians and levels of their own, or an error.",
    ),
]
Ignore = Annotated[
    list[str], typer.Option(metavar="COLUMN", help="Leave a column out. May be repeated.")
]
Keep = Annotated[
    list[str],
    typer.Option(metavar="COLUMN", help="Show a column, also an ignored one. May be repeated."),
]
Weight = Annotated[str | None, typer.Option(metavar="COLUMN", help="Weights of the rows.")]
Delimiter = Annotated[
    str | None,
    typer.Option(metavar="CHARACTER", help="Between the cells of a CSV file; found out if left."),
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", metavar="NAME", help="Of a CSV file; UTF-8 if left.")
]
Decimal = Annotated[
    str | None,
    typer.Option(
        metavar=".|,",
        help="What stands before the decimals in a CSV file; if left, the point, or with a model "
        "what its training table had.",
    ),
]
Unseen = Annotated[
    Any,
    typer.Option(
        parser=words("--unseen", "refuse", "ignore"),
        metavar="ignore|refuse",
        help="Categories that training did not have: as rare ones, or an error.",
    ),
]
TestSize = Annotated[
    float, typer.Option(min=0, max=0.9, help="Share of the rows held out for the scores.")
]
TestFile = Annotated[
    Path | None,
    typer.Option("--test", metavar="TABLE", help="Rows for the scores, instead of a share."),
]
