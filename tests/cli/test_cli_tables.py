"""Tables on disk: what is read, and what is refused in which words."""

from __future__ import annotations

import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from conjugp._inputs.table import TableError
from conjugp.cli._cells import escaped, unescaped
from conjugp.cli._tables import MissingPackageError, read_csv, read_table

CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


def seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read(text: str | bytes, **settings):
    data = text if isinstance(text, bytes) else text.encode()
    table = read_csv(data, "x.csv", **settings)
    return {name: list(column) for name, column in table.columns.items()}


PLAIN = {"a": ["1", "3"], "b c": ["2", "x"]}


@pytest.mark.parametrize(
    "data",
    [
        b"a,b c\n1,2\n3,x\n",
        b"a,b c\n1,2\n3,x",
        b"\xef\xbb\xbfa,b c\r\n1,2\r\n3,x\r\n",
        b"a;b c\n1;2\n3;x\n",
        b"a\tb c\n1\t2\n3\tx\n",
        b"a|b c\r1|2\r3|x\r",
        b'"a" , "b c"\n 1 , 2\n"3",x \n'.replace(b' , "', b',"').replace(b'"a" ', b'"a"'),
        b"\n\na,b c\n\n1,2\n\n3,x\n\n",
        b"a,b c,\n1,2,\n3,x,\n",
        "a,b c\n1,2\n3,x\n".encode("utf-16"),
    ],
)
def test_one_table_in_many_spellings(data):
    assert read(data) == PLAIN


def test_quoted_delimiters_quotes_and_line_ends():
    found = read('name,"a ""b"""\n"x, y","1\n2"\n')
    assert found == {"name": ["x, y"], 'a "b"': ["1\n2"]}


def test_a_delimiter_that_is_named():
    assert read("a:b\n1:2\n", delimiter=":") == {"a": ["1"], "b": ["2"]}
    assert read("a\tb\n1,5\t2\n", delimiter="tab") == {"a": ["1,5"], "b": ["2"]}
    assert read("a;b\n1,5;2,5\n") == {"a": ["1,5"], "b": ["2,5"]}


def test_other_encodings():
    assert read("é,b\n1,ü\n".encode("latin-1"), encoding="latin-1") == {"é": ["1"], "b": ["ü"]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "x.csv is empty"),
        (b"\n \n", "is empty"),
        (b"a,b\n", "has no rows below its header"),
        (b"a,b,a,b\n1,2,3,4\n", "the column names 'a', 'b' stand in the header more than once"),
        (b"a,b\n1,2\n3\n", "line 3 has 1 cell where the header has 2"),
        (b"a,b\n1,2\n3,4,5\n", "line 3 has 3 cells where the header has 2"),
        (b'a,b\n1,"2\n', "line 2 is not CSV"),
        (b'a,b\n1,"2"3\n', "line 2 is not CSV"),
        (b"a,b\n1,\xe9\n", "line 2 is not UTF-8 text (byte 0xe9)"),
        (b"a,b\n1,\xe9\n", "--encoding latin-1"),
        (b"a,b\n1,\x80 5\n", "--encoding cp1252"),
        (b"a,b\n1,\0\n", "NUL"),
        (b"\xff\xfea", "UTF-16"),
    ],
)
def test_what_is_refused(data, words):
    with pytest.raises(TableError) as error:
        read(data)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [{"delimiter": ",,"}, {"delimiter": '"'}, {"delimiter": ""}, {"encoding": "latin-x"}],
)
def test_settings_that_cannot_be(settings):
    with pytest.raises(TableError, match=f"--{next(iter(settings))}"):
        read("a,b\n1,2\n", **settings)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_table_or_a_table_error(data):
    try:
        table = read_csv(data, "x")
    except TableError as error:
        assert "\n" not in str(error)
    else:
        assert all(len(column) == table.n_rows for column in table.columns.values())


@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.sampled_from(",;\t|"))
def test_what_the_csv_module_writes_is_read_back(data, d, n, delimiter):
    import csv
    import io

    names = [f"c{i}" for i in range(d)]
    cells = CELL.filter(lambda cell: unescaped(cell.strip()) == cell.strip())
    rows = [[data.draw(cells) for _ in names] for _ in range(n)]
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([names, *rows])
    table = read_csv(out.getvalue().encode(), "x", delimiter)
    assert table.names == names and table.n_rows == n
    assert [list(c) for c in table.columns.values()] == [
        [row[i].strip() for row in rows] for i in range(d)
    ]


@pytest.mark.parametrize(
    "cell", ["=1+1", "+x", "-x", "@SUM(A1)", "\tx", "\rx", "\nx", "-", "+1+1", "'=1", "''@x", "＝1"]
)
def test_cells_that_spreadsheets_would_run_are_written_as_text(cell):
    assert escaped(cell) == "'" + cell and unescaped("'" + cell) == cell


@pytest.mark.parametrize(
    "cell", ["-1", "+2.5", "-1,5", "-3e-7", "-inf", "'-1", "it's", "a=b", "'", ""]
)
def test_numbers_and_other_text_are_written_as_they_are(cell):
    assert escaped(cell) == cell and unescaped(cell) == cell


@given(CELL | st.text("'=-@1", max_size=5))
def test_the_apostrophe_is_taken_off_again(cell):
    assert unescaped(escaped(cell)) == cell


def test_names_and_cells_with_an_apostrophe_are_read_as_they_were():
    found = read("'=a,b\n'-x,'-1\n'x,it's\n")
    assert found == {"=a": ["-x", "'x"], "b": ["'-1", "it's"]}


def test_names_are_suggested():
    table = read_csv(b"Label,weight\n1,2\n", "x")
    with pytest.raises(TableError, match="did you mean 'Label'"):
        table.column("labels", "target column")
    with pytest.raises(TableError, match="the columns are 'Label', 'weight'"):
        table.column("zzz")
    names = [f"column{i}" for i in range(30)]
    many = read_csv(f"{','.join(names)}\n{','.join(names)}\n".encode(), "x")
    with pytest.raises(TableError, match=f"the columns are {', '.join(map(repr, names))}$"):
        many.column("zzz")
    with pytest.raises(TableError, match="may have no header"):
        read_csv(b"1.5,2\n1,2\n", "x").column("label")


def test_parquet(tmp_path):
    path = tmp_path / "t.parquet"
    columns = {
        "i": pa.array([1, 2], pa.int32()),
        "gap": pa.array([1, None], pa.int64()),
        "f": pa.array([0.5, None], pa.float32()),
        "b": pa.array([True, False]),
        "s": pa.array(["x ", None]),
        "d": pa.array(["x", "y"]).dictionary_encode(),
        "when": pa.array([0, 1], pa.timestamp("s")),
    }
    parquet.write_table(pa.table(columns), path)
    found = read_table(path).columns
    assert found["i"].dtype == np.int32 and found["i"].tolist() == [1, 2]
    np.testing.assert_array_equal(found["gap"], [1.0, np.nan])
    np.testing.assert_array_equal(found["f"], [0.5, np.nan])
    assert found["b"].dtype == bool and list(found["s"]) == ["x", None]
    assert list(found["d"]) == ["x", "y"] and found["when"].dtype.kind == "M"
    parquet.write_table(pa.table({"l": pa.array([[1, 2], [3]])}), path)
    with pytest.raises(TableError, match="'l' is of type list"):
        read_table(path)
    left = read_table(path, skip=("l",))
    assert left.columns == {} and left.skipped == ("l",)
    path.write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(TableError, match="not a Parquet file"):
        read_table(path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackageError, match=r"conjugp\[parquet\]"):
        read_table(tmp_path / "t.parquet")


def test_npz(tmp_path):
    path = tmp_path / "t.npz"
    X, y = np.arange(6.0).reshape(3, 2), np.array(["a ", "b", "a"])
    np.savez(path, X=X, y=y, other=np.zeros(5))
    with pytest.raises(TableError, match="different lengths \\('X' 3, 'y' 3, 'other' 5\\)"):
        read_table(path)
    table = read_table(path, skip=("other",))
    assert table.skipped == ("other",)
    assert table.names == ["X0", "X1", "y"] and list(table.columns["y"]) == ["a", "b", "a"]
    np.testing.assert_array_equal(table.columns["X1"], X[:, 1])
    np.savez(path, a=np.array([{}, 1], dtype=object))
    with pytest.raises(TableError, match="plain arrays"):
        read_table(path)
    np.savez(path, a=np.zeros((2, 2, 2)))
    with pytest.raises(TableError, match="3 dimensions"):
        read_table(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TableError, match="damaged"):
        read_table(path)


def test_other_files(tmp_path):
    with pytest.raises(TableError, match="save the sheet as CSV"):
        read_table(tmp_path / "t.xlsx")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(TableError, match="is a folder"):
        read_table(tmp_path / "folder.csv")
    for name in ("no.csv", "no.npz", "no.parquet"):
        with pytest.raises(FileNotFoundError):
            read_table(tmp_path / name)
    with pytest.raises(TableError, match="for CSV files"):
        read_table(tmp_path / "no.npz", delimiter=",")


def test_the_time_grows_with_the_number_of_columns_and_no_faster():
    """One table of 40,000 columns takes about as long as 20 of 2,000; it took 13 times that."""

    def table(n_columns: int) -> str:
        names = [f"c{i}" for i in range(n_columns)]
        return "\n".join([",".join(names), *3 * [",".join(["1"] * n_columns)]])

    wide, narrow = table(40_000), table(2_000)
    once = min(seconds(lambda: read(wide)) for _ in range(3))
    parts = min(seconds(lambda: [read(narrow) for _ in range(20)]) for _ in range(3))
    assert once < 5 * parts
