"""The command line in a folder, and tables for it."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sklearn.datasets import load_wine
from typer.testing import CliRunner

from conjugp import cli

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """A Chromium on this machine: CONJUGP_CHROMIUM, or one on the path."""
    named = os.environ.get("CONJUGP_CHROMIUM")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


class Result(NamedTuple):
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def conjugp(folder: Path, *arguments: Any, stdin: bytes | None = None) -> Result:
    """Call conjugp in a folder; an exception that gets out is the test's failure."""
    with inside(folder):
        result = CliRunner().invoke(cli.app, list(map(str, arguments)), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def fails(folder: Path, *arguments: Any, code: int = 2) -> str:
    """Call conjugp where it should refuse: the one line that it says."""
    result = conjugp(folder, *arguments)
    assert result.code == code, (result.out, result.err)
    lines = [line for line in result.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and lines[0].startswith("conjugp: ")
    assert not result.out or "--json" in arguments
    return lines[0].removeprefix("conjugp: ")


def write_csv(
    path: Path, header: Iterable[Any], rows: Iterable[Iterable[Any]], **form: Any
) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, **form)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def read_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def write_wine(folder: Path) -> Path:
    """scikit-learn's Wine with its first five features, and the names of the classes."""
    data: Any = load_wine()
    names = [*data.feature_names[:5], "label"]
    rows = [
        [*x[:5].tolist(), data.target_names[y]] for x, y in zip(data.data, data.target, strict=True)
    ]
    return write_csv(folder / "wine.csv", names, rows)


def write_trips(folder: Path) -> Path:
    """A small table with text, an order and gaps."""
    rows = []
    for i in range(60):
        far, size = (i * 7) % 20 + i / 100, ("small", "medium", "large")[i % 3]
        mode = "train" if far > 12 else "bus" if size == "large" else "on foot"
        rows.append([far, "" if i % 11 == 5 else 20 + i % 9, size, ("Oslo", "Köln")[i % 2], mode])
    return write_csv(folder / "trips.csv", ["far", "age", "size", "city", "mode"], rows)
