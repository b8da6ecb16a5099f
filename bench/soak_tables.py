"""Damaged and odd tables through the command line: ``python bench/soak_tables.py 2000``.

Every table goes to `fit`, which stops where the fit would begin, and to `predict` with a model
fitted before; one in ten of those that can be predicted to `report`. Whatever the table, the
command has to end with one of the documented exit codes and one line, and leave files whole: the
old one or the new one.
"""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from typer.main import get_command

from conjugp import cli

COMMAND = get_command(cli.app)
SECONDS = 60  # more than this for one table is a hang
EVERY_REPORT = 10
OK, REFUSED, BAD_FILE, INTERRUPTED = 0, 2, 3, 130

CELLS = [
    *("", " ", "NA", "nan", "?", "None", "inf", "-inf", "1e400", "1e308", "-1e308", "5e-324"),
    *("1_000", "0x10", "1,5", "1.2.3", "+", "-", "1e", "٣", "１２", "TRUE", "false", "yes"),
    *("2024-01-01", "12:30", "<script>alert(1)</script>", "=1+1", "'", '"', '""', "a\nb", "\r"),
    *("\u202e", "\ufeff", "é", "😀", "x" * 5000, "1" * 400, "\t", ";", "|", ",", "$x$", "\x07"),
]


def base_tables() -> dict[str, bytes]:
    """Tables that can be fitted, in several spellings; the target is always called y."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(24):
        a, b = rng.normal(size=2).round(3) + i % 2
        rows.append([a, b, ("S", "M", "L")[i % 3], ("true", "false")[i % 2], "uv"[i % 2]])
    names = ["a", "b", "size", "flag", "y"]
    return {
        "plain": _csv(names, rows),
        "semicolons": _csv(names, rows, delimiter=";"),
        "quoted": _csv(names, rows, quoting=csv.QUOTE_ALL, lineterminator="\r\n"),
        "gaps": _csv(names, [["" if (i + j) % 9 == 0 and j < 4 else c for j, c in enumerate(row)]
                             for i, row in enumerate(rows)]),
        "utf-16": _csv(names, rows).decode().encode("utf-16"),
        "marked": b"\xef\xbb\xbf" + _csv(names, rows),
    }  # fmt: skip


def _csv(names: list[str], rows: list[list[Any]], **form: Any) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, **{"lineterminator": "\n", **form}).writerows([names, *rows])
    return out.getvalue().encode()


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """A table with one or more things wrong with it, in its bytes or its cells."""
    for _ in range(int(rng.geometric(0.6))):
        data = _bytes(data, rng) if rng.random() < 0.5 else _structure(data, rng)
    return data


def _bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip, drop, insert, repeat, cut or move bytes."""
    if not data:
        return rng.bytes(20)
    i, j = sorted(int(k) for k in rng.integers(0, len(data) + 1, 2))
    kind = rng.integers(7)
    if kind == 0:
        i = min(i, len(data) - 1)
        return data[:i] + bytes([data[i] ^ (1 << int(rng.integers(8)))]) + data[i + 1 :]
    if kind == 1:
        return data[:i] + data[min(j, i + 9) :]
    if kind == 2:
        return data[:i] + rng.bytes(int(rng.integers(1, 9))) + data[i:]
    if kind == 3:
        return data[:j] + data[i:j] + data[j:]
    if kind == 4:
        return data[:i]
    if kind == 5:
        return data[:i] + rng.choice([b'"', b"\0", b"\r", b"\n", b",", b";", b"\xff"]) + data[i:]
    return data[j:] + data[:i]


def _structure(data: bytes, rng: np.random.Generator) -> bytes:
    """Change cells, rows, columns or the header, where there is a table to change."""
    text = data.decode("utf-16" if data.startswith(b"\xff\xfe") else "utf-8", "replace")
    delimiter = max(",;\t|", key=text.count)
    rows = list(
        csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), delimiter=delimiter)
    )
    rows = [row for row in rows if row] or [["a"]]
    i = int(rng.integers(len(rows)))
    j = int(rng.integers(len(rows[i])))
    kind = rng.integers(8)
    if kind <= 2:
        rows[i][j] = CELLS[rng.integers(len(CELLS))]
    elif kind == 3:  # a whole column
        cell = CELLS[rng.integers(len(CELLS))]
        for row in rows[1:]:
            if j < len(row):
                row[j] = cell
    elif kind == 4:  # a name twice, or none
        rows[0][min(j, len(rows[0]) - 1)] = rng.choice(["a", "", "y", "Y "])
    elif kind == 5:
        rows = [rows[0], *(rows[k] for k in rng.permutation(np.arange(1, len(rows))))]
        order = rng.permutation(max(map(len, rows)))
        rows = [[row[k] for k in order if k < len(row)] for row in rows]
    elif kind == 6:
        rows = rows[: int(rng.integers(1, 4))]
    else:
        del rows[i][j]
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=str(rng.choice(list(",,,;\t|"))))
    writer.writerows(row for row in rows if row)
    return out.getvalue().encode("utf-8", "replace")


def fuzz_tables(n: int, seed: int = 0) -> dict[str, Any]:
    """Send n mutated tables through the command line; counts of how they ended.

    Raises AssertionError, with the number of the table, for any end that is not documented.
    """
    rng = np.random.default_rng(seed)
    bases = base_tables()
    ends: Counter[str] = Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        # The library's warnings are for users, who see them as notes.
        warnings.simplefilter("ignore")
        folder = Path(name)
        base = folder / "base.csv"
        base.write_bytes(bases["gaps"])
        options = ["--target", "y", "--categorical", "onehot", "--missing", "impute"]
        model = str(folder / "model.conjugp")
        code, _ = _call("fit", str(base), *options, "--inducing", "5", "--max-epochs", "2",
                        "-o", model)  # fmt: skip
        assert code == OK
        whole = Path(model).read_bytes()
        for i in range(n):
            kind = str(rng.choice(list(bases)))
            data = mutate(bases[kind], rng)
            table, out, page = folder / "table.csv", folder / "out.csv", folder / "report.html"
            table.write_bytes(data)
            for path in (out, page):
                path.write_bytes(b"old")
            began = time.perf_counter()
            try:
                with _limit(SECONDS):
                    more = options if rng.random() < 0.7 else ["--target", "y"]
                    with mock.patch("conjugp.cli._fit.fit_model", side_effect=KeyboardInterrupt):
                        code, said = _call("fit", str(table), *more, "-o", model)
                    _check(code, said, {REFUSED, INTERRUPTED})
                    ends["fit: reached" if code == INTERRUPTED else "fit: refused"] += 1
                    code, said = _call("predict", model, str(table), "-o", str(out))
                    _check(code, said, {OK, REFUSED})
                    ends["predict: written" if code == OK else "predict: refused"] += 1
                    _check_output(out, code, b"prediction,p_u,p_v")
                    if code == OK and ends["predict: written"] % EVERY_REPORT == 1:
                        code, said = _call("report", model, str(table), "-o", str(page))
                        _check(code, said, {OK, REFUSED})
                        ends["report: written" if code == OK else "report: refused"] += 1
                        _check_output(page, code, b"<!doctype html>")
                assert Path(model).read_bytes() == whole, "the model was changed"
                assert table.read_bytes() == data, "the table was changed"
                left = {path.name for path in folder.iterdir()} - {
                    *("base.csv", "model.conjugp", "table.csv", "out.csv", "report.html")
                }
                assert not left, f"left behind: {left}"
            except Exception as error:
                kept = Path(tempfile.gettempdir()) / f"soak-table-{seed}-{i}.csv"
                kept.write_bytes(data)
                raise AssertionError(
                    f"table {i} of seed {seed}, kept as {kept}: {error}"
                ) from error
            slowest = max(slowest, time.perf_counter() - began)
    return {"tables": n, "seed": seed, "ends": dict(sorted(ends.items())), "slowest_s": slowest}


def _call(*arguments: str) -> tuple[int, str]:
    """Run conjugp in this process: its exit code and what it said on the error stream."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            COMMAND.main(list(arguments), prog_name="conjugp")
        except SystemExit as end:
            return int(end.code or 0), err.getvalue()
    raise AssertionError("the command did not exit")


def _check(code: int, said: str, allowed: set[int]) -> None:
    assert code in allowed, f"exit code {code}: {said}"
    lines = [line for line in said.splitlines() if not line.startswith("note: ")]
    assert len(lines) == (code != OK), f"exit code {code} with {lines}"
    assert "Traceback" not in said, said


def _check_output(path: Path, code: int, start: bytes) -> None:
    """The new file, whole, after success; the old one otherwise."""
    data = path.read_bytes()
    assert data.startswith(start) if code == OK else data == b"old", f"{path.name}: {data[:40]!r}"


@contextmanager
def _limit(seconds: int) -> Any:
    """Raise TimeoutError in what takes longer; does nothing where there are no alarms."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print(json.dumps(fuzz_tables(count, 0), indent=2))
