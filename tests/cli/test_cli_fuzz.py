"""Damaged tables: a small share of what bench/soak_tables.py does, and files of other formats."""

from __future__ import annotations

import importlib
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from conjugp._inputs.table import TableError
from conjugp.cli._tables import read_table

BENCH = Path(__file__).parents[2] / "bench"


def test_a_hundred_damaged_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    soak = importlib.import_module("soak_tables")
    found = soak.fuzz_tables(100, seed=1)
    ends = found["ends"]
    assert found["tables"] == ends["fit: reached"] + ends["fit: refused"] == 100
    assert ends["predict: written"] + ends["predict: refused"] == 100
    # Neither everything nor nothing is refused: both ways are taken.
    assert min(ends["fit: reached"], ends["predict: written"]) >= 10


def file_of(format_: str) -> bytes:
    out = io.BytesIO()
    a, y = np.arange(8.0), np.array(["u", "v"] * 4)
    if format_ == "npz":
        np.savez_compressed(out, a=a, y=y)
    else:
        parquet.write_table(pa.table({"a": a, "y": y}), out)
    return out.getvalue()


@pytest.mark.parametrize("format_", ["npz", "parquet"])
@settings(max_examples=60)
@given(data=st.data())
def test_other_formats_are_tables_or_table_errors(tmp_path_factory, format_, data):
    whole = file_of(format_)
    path = tmp_path_factory.getbasetemp() / f"damaged.{format_}"
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged[: data.draw(st.integers(0, 2 * len(whole)))]))
    try:
        table = read_table(path)
    except TableError as error:
        assert "\n" not in str(error)
    else:
        assert all(len(column) == table.n_rows for column in table.columns.values())
