"""Columns of tables in memory: fitted, filled, encoded; the command line's tests have the rest."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from conjugp._inputs.columns import Column, encoded
from conjugp._inputs.table import Table, TableError

TABLE = Table.of(
    {
        "size": ["S", "L", None, "S"],
        "width": [1.0, np.nan, 3.0, 4.0],
        "new": [True, False, False, True],
    }
)


def test_columns_of_a_table_in_memory():
    size = Column.fit("size", TABLE.column("size"), "ordinal", order=("S", "M", "L"))
    width = Column.fit("width", TABLE.column("width"), "number")
    new = Column.fit("new", TABLE.column("new"), "boolean")
    assert [c.gaps(TABLE.column(c.name)).tolist() for c in (size, width, new)] == [
        [False, False, True, False],
        [False, True, False, False],
        [False] * 4,
    ]
    with pytest.raises(TableError, match="'size' has no value in row 3"):
        encoded((size,), TABLE)
    filled = [c.imputing(TABLE.column(c.name)) for c in (size, width, new)]
    assert [c.fill for c in filled] == ["S", 3.0, 0.0]
    np.testing.assert_array_equal(
        encoded(filled, TABLE), [[0, 1, 1], [2, 3, 0], [0, 3, 0], [0, 4, 1]]
    )
    assert [Column.read(asdict(c)) for c in filled] == filled


def test_categories_become_features():
    city = Column.fit("city", np.array(["b", "a", "b"], dtype=object), "onehot")
    assert city.categories == ("a", "b") and city.features == ["city=a", "city=b"]
    rows = Table.of({"city": ["c", "a"], "more": [1, 2]})
    np.testing.assert_array_equal(encoded((city,), rows, unseen="ignore"), [[0, 0], [1, 0]])
    with pytest.raises(TableError, match="'city' has a category"):
        encoded((city,), rows)
    with pytest.raises(TableError, match="has not the column 'city'"):
        encoded((city,), Table.of({"cities": ["a"]}))


@pytest.mark.parametrize("columns", [{}, {"a": [1, 2], "b": [1]}, {"a": [[1, 2]]}])
def test_what_is_no_table(columns):
    with pytest.raises(TableError, match="1-d and of the same length"):
        Table.of(columns)
