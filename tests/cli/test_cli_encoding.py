"""Columns as features: by rows, in any order of columns, and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conjugp._inputs.cells import kind_of
from conjugp._inputs.table import Table, TableError
from conjugp._persistence.files import FileFormatError
from conjugp.cli._encoding import Encoding, choose_encoding


def table(**columns) -> Table:
    made = {
        name: np.array(cells, dtype=object if isinstance(cells[0], str | None) else None)
        for name, cells in columns.items()
    }
    return Table(made, len(next(iter(columns.values()))))


def chosen(rows: Table, *categorical: str, **settings) -> Encoding:
    return choose_encoding(rows, "y", categorical=categorical, **settings)[0]


Y = ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "2.5", "-1e3", "1e400"], "number"),
        (["1", "", "NA", "?"], "number"),
        (["1", "x"], "text"),
        (["1_000", "2"], "text"),
        (["true", "False", ""], "boolean"),
        (["2024-01-03", "2023-12-31"], "date"),
        (["3.1.2024", "31.12.23"], "date"),
        (["3 Jan 2024", "Feb 5, 2023"], "date"),
        (["12:30", "2:05"], "date"),
        (["2024-01-03T10:00:00Z", "2024-01-03 10:00:00.5+01:00"], "date"),
        (["", ""], "empty"),
        (["none", "NA"], "text"),
    ],
)
def test_kinds(cells, kind):
    assert kind_of(np.array(cells, dtype=object)) == kind


def test_kinds_of_typed_columns():
    assert kind_of(np.array([1, 2])) == "number"
    assert kind_of(np.array([np.nan, np.nan])) == "empty"
    assert kind_of(np.array([True, False])) == "boolean"
    assert kind_of(np.array(["2024-01-01"], dtype="M8[D]")) == "date"


def test_what_an_encoding_makes():
    rows = table(
        n=["1", "2", "3", "4"],
        b=["true", "FALSE", "true", "false"],
        c=["x", "y", "z", "x"],
        s=["L", "S", "M", "S"],
        y=["3", "1", "3", "1"],
    )
    encoding = chosen(rows, "onehot", "ordinal=s:S<M<L")
    assert encoding.features == ["n", "b", "c=x", "c=y", "c=z", "s"]
    np.testing.assert_array_equal(
        encoding.encode(rows),
        [[1, 1, 1, 0, 0, 2], [2, 0, 0, 1, 0, 0], [3, 1, 0, 0, 1, 1], [4, 0, 1, 0, 0, 0]],
    )
    labels = encoding.read_labels(rows)
    assert labels.dtype == np.int64 and labels.tolist() == [3, 1, 3, 1]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["0", "1", "0", "-7"], "int"),
        (["01", "1", "01", "1"], "text"),
        (["1.0", "2.0", "1.0", "2.0"], "text"),
        (["True", "False", "True", "True"], "text"),
        (["none", "NA", "none", "NA"], "text"),
        ([True, False, True, True], "bool"),
        ([1, 2, 1, 2], "int"),
        ([1.0, 2.0, 1.0, 2.0], "int"),
    ],
)
def test_labels_keep_their_type(cells, kind):
    rows = table(x=[1.0, 2, 3, 4], y=cells)
    encoding = chosen(rows)
    assert encoding.labels == kind
    expected = [int(cell) for cell in cells] if kind == "int" else cells
    assert encoding.read_labels(rows).tolist() == expected


def test_imputation_is_by_median_and_mode_of_the_training_rows():
    rows = table(n=["1", "", "3", "9"], c=["u", "v", "v", ""], b=["true", "true", "", "false"], y=Y)
    with pytest.raises(TableError, match=r"'n' has no value in row 2.*'c'.*--missing impute"):
        chosen(rows, "onehot")
    encoding = chosen(rows, "onehot", missing="impute")
    np.testing.assert_array_equal(encoding.encode(rows)[1], [3, 0, 1, 1])
    np.testing.assert_array_equal(encoding.encode(rows)[3], [9, 0, 1, 0])
    np.testing.assert_array_equal(encoding.encode(rows)[2], [3, 0, 1, 1])
    fewer = encoding.refilled(rows.take(np.array([0, 2])))
    assert [column.fill for column in fewer.columns] == [2.0, "u", 1.0]


@pytest.mark.parametrize(
    ("columns", "settings", "words"),
    [
        ({"c": ["u", "v", "u", "v"]}, {}, "column 'c' holds text, such as 'u'"),
        ({"c": ["1,5", "2,5", "3", "4"]}, {}, "say --decimal ,"),
        ({"a": ["u", "v"] * 2, "c": ["1,5", "-2,5e3", "", "4"]}, {}, "comma, such as '1,5'; say"),
        ({"c": ["1,5", "2"] * 2}, {"categorical": ["onehot"]}, "say --decimal ,"),
        ({"x": ["1"] * 4}, {"ignore": ["X "]}, "--ignore: there is no column 'X '; did you mean"),
        ({"d": ["2024-01-01"] * 4}, {"categorical": ["onehot"]}, "'d' holds dates or times"),
        ({"e": ["", "", "", ""]}, {"missing": "impute"}, "'e' has no values at all"),
        ({"x": ["1", "inf", "2", "1e400"]}, {}, "too large numbers: 'inf' in row 2"),
        ({}, {}, "no column besides the target"),
        ({"x": ["1"] * 4}, {"categorical": ["onehot=z"]}, "there is no column 'z'"),
        ({"x": ["1"] * 4}, {"categorical": ["both"]}, "must be onehot, ordinal or refuse"),
        ({"x": ["S", "M", "S", "M"]}, {"categorical": ["ordinal=x:S<L"]}, "leaves out"),
        ({"x": ["1"] * 4}, {"categorical": ["ordinal=x:1<1"]}, "twice"),
        ({"x": ["1"] * 4}, {"ignore": ["y"]}, "--ignore 'y' is the target"),
        ({"x": ["1"] * 4}, {"weight": "v"}, "there is no weight column 'v'"),
    ],
)
def test_what_is_refused(columns, settings, words):
    with pytest.raises(TableError) as error:
        encoding, _ = choose_encoding(table(**columns, y=Y), "y", **settings)
        encoding.encode(table(**columns, y=Y))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["a"] * 4, "only one class, 'a'"),
        (["a", "b", "", "a"], "no value in row 3"),
        (["a", "b", "c", "d"], "a different value in every row"),
        ([f"{i / 7:.3f}" for i in range(30)] * 2, "does not do regression"),
    ],
)
def test_targets_that_are_no_classes(labels, words):
    with pytest.raises(TableError, match=words):
        chosen(table(x=["1"] * len(labels), y=labels))


def test_too_many_categories():
    labels = ["a", "b"] * 150
    with pytest.raises(TableError, match="300 different values"):
        chosen(table(c=[f"n{i}" for i in range(300)], y=labels), "onehot")
    with pytest.raises(TableError, match=r"too many for categories; if a comma .* --decimal ,"):
        chosen(table(c=[f"1,{i}" for i in range(300)], y=labels), "onehot=c")


def test_notes_on_what_looks_odd():
    n = 12
    rows = table(
        customer_id=[str(7 * i) for i in range(n)],
        count=[str(i) for i in range(n)],
        same=["1"] * n,
        fine=[str(i * i % 7) for i in range(n)],
        y=["a", "b"] * 5 + ["a", "c"],
    )
    notes = choose_encoding(rows, "y")[1]
    assert len(notes) == 4
    assert "'customer_id'" in notes[0] and "--ignore" in notes[0] and "'count'" in notes[1]
    assert "same value in every row" in notes[2] and "only one row" in notes[3]


def test_other_tables():
    rows = table(n=["1", "2", "3", "4"], c=["u", "v", "u", "v"], y=Y)
    encoding = chosen(rows, "onehot")
    X = encoding.encode(rows)
    moved = table(y=Y, extra=["?"] * 4, c=["u", "v", "u", "v"], n=[1, 2, 3, 4])
    np.testing.assert_array_equal(encoding.encode(moved), X)
    with pytest.raises(TableError, match=r"has not the column 'n'.*did you mean 'N'"):
        encoding.encode(table(N=["1"] * 4, c=["u"] * 4))
    with pytest.raises(TableError, match="has to hold numbers, and has 'x' in row 2, and the like"):
        encoding.encode(table(n=["1", "x", "y", "z"], c=["u"] * 4))
    with pytest.raises(TableError, match="no value in row 2"):
        encoding.encode(table(n=["1", "", "3", "4"], c=["u"] * 4))
    new = table(n=["1"] * 4, c=["u", "w", "u", "u"])
    with pytest.raises(TableError, match=r"did not have: 'w' in row 2$"):
        encoding.encode(new)
    with pytest.raises(TableError, match="'w' in row 2; --unseen ignore makes it zeros"):
        encoding.encode(new, "refuse")
    np.testing.assert_array_equal(encoding.encode(new, "ignore")[1], [1, 0, 0])


def test_weights():
    rows = table(x=["1"] * 4, w=["1", "2", "0", "0.5"], y=Y)
    encoding = chosen(rows, weight="w")
    assert encoding.features == ["x"]
    np.testing.assert_array_equal(encoding.read_weights(rows), [1, 2, 0, 0.5])
    for bad in (["1", "-1", "0", "0"], ["1", "", "0", "0"], ["x"] * 4, ["0"] * 4):
        with pytest.raises(TableError, match="weights in 'w'"):
            encoding.read_weights(table(x=["1"] * 4, w=bad, y=Y))


NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(repr)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=5).map(
    lambda text: "v" + text.strip()
)


@st.composite
def tables(draw):
    """A table with one column of each kind, and the choices that encode it."""
    n = draw(st.integers(4, 12))
    order = draw(st.lists(NAMES, min_size=2, max_size=4, unique=True).filter(_no_order_signs))
    columns = {
        "n": draw(st.lists(NUMBERS, min_size=n, max_size=n)),
        "b": draw(st.lists(st.sampled_from(["true", "false"]), min_size=n, max_size=n)),
        "c": draw(st.lists(NAMES, min_size=n, max_size=n)),
        "o": draw(st.lists(st.sampled_from(order), min_size=n, max_size=n)),
        "y": [("a", "b")[i % 2] for i in range(n)],
    }
    choice = ["onehot=c", f"ordinal=o:{'<'.join(order)}"]
    return table(**columns), choice, order


def _no_order_signs(names: list[str]) -> bool:
    return not any("<" in name or ":" in name for name in names)


@given(tables(), st.randoms())
def test_encoding_is_by_rows_by_name_and_reversible(drawn, random):
    rows, choice, order = drawn
    encoding = chosen(rows, *choice)
    X = encoding.encode(rows)
    # A row's features depend on its own cells alone.
    places = np.array(random.sample(range(rows.n_rows), rows.n_rows // 2))
    np.testing.assert_array_equal(encoding.encode(rows.take(places)), X[places])
    # Columns are found by name.
    names = rows.names
    random.shuffle(names)
    shuffled = Table({name: rows.columns[name] for name in names}, rows.n_rows)
    np.testing.assert_array_equal(encoding.encode(shuffled), X)
    # The cells can be told from the features.
    categories = encoding.columns[2].categories
    assert X[:, 0].tolist() == [float(cell) for cell in rows.columns["n"]]
    assert [("false", "true")[int(v)] for v in X[:, 1]] == list(rows.columns["b"])
    assert [categories[i] for i in X[:, 2:-1].argmax(axis=1)] == list(rows.columns["c"])
    assert (X[:, 2:-1].sum(axis=1) == 1).all()
    assert [order[int(v)] for v in X[:, -1]] == list(rows.columns["o"])
    # It survives the way through a file.
    assert Encoding.from_json(json.loads(json.dumps(encoding.to_json()))) == encoding


GOOD = chosen(table(n=["1", "2", "3", "4"], c=["u", "v", "u", "v"], y=Y), "onehot").to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"columns": []},
        {"columns": [{"name": "n"}]},
        {"columns": [{"name": 3, "kind": "number", "categories": [], "fill": None}]},
        {"columns": [{"name": "n", "kind": "magic", "categories": [], "fill": None}]},
        {"columns": [{"name": "n", "kind": "onehot", "categories": [], "fill": None}]},
        {"columns": [{"name": "n", "kind": "onehot", "categories": ["a"], "fill": "b"}]},
        {"columns": [{"name": "n", "kind": "number", "categories": [], "fill": "0"}]},
        {"target": None},
        {"labels": "float"},
        {"decimal": "x"},
        {"ignored": 3},
    ],
)
def test_a_damaged_description_is_refused(change):
    with pytest.raises(FileFormatError):
        Encoding.from_json({**GOOD, **change})


def test_no_description_is_refused():
    for data in (None, [], "x"):
        with pytest.raises(FileFormatError, match="not made by"):
            Encoding.from_json(data)
