"""Columns of files: what cells are, roles, categories, and that models are Python's own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from commands import conjugp, fails, read_rows, write_trips
from conjugp import GPClassifier, load
from conjugp._inputs.frames import Frame
from conjugp._inputs.table import TableError
from conjugp._persistence import model_file as saving
from conjugp.cli._cells import Table, read_text
from conjugp.cli._roles import Roles, note_rare
from conjugp.cli._scores import split
from conjugp.cli._settings import Reading, Task, Training, prepare
from conjugp.cli.models import Model, load_model

DATA = Path(__file__).parents[1] / "formats" / "tables"
Y = ["a", "b", "a", "b"]


def chosen(folder: Path, columns: dict[str, list[str]], *categorical: str, **settings) -> Training:
    """What is understood of a CSV file with these columns and a target y."""
    pd.DataFrame(columns).to_csv(folder / "t.csv", index=False)
    reading = Reading(list(categorical), **settings)
    return prepare(Task(folder / "t.csv", "y", reading, 0, None, 0, ""))


def table(**columns: list) -> Table:
    arrays = {name: np.array(cells, dtype=object) for name, cells in columns.items()}
    return Table(arrays, len(next(iter(arrays.values()))), typed=False)


# --- cells -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "2.5", "-1e3", "1e40"], "number"),
        (["1", "", "NA", "?"], "number"),
        (["", ""], "number"),
        (["1", "x"], "text"),
        (["1_000", "2"], "text"),
        (["true", "False", ""], "text"),
        (["2024-01-03", "2023-12-31", "NA"], "date"),
        (["2024-01-03T10:00:00Z", "2024-01-03 10:00:00.500+01:00"], "date"),
        (["2024-01-03", "2024-13-01"], "text"),
        (["3.1.2024", "31.12.23"], "text"),
        (["none", "x", "NA"], "text"),
    ],
)
def test_kinds(cells, kind):
    assert read_text(np.array(cells, dtype=object)).kind == kind


def test_what_is_read_of_text():
    numbers = read_text(np.array(["1,5", "NA", "-2e3"], dtype=object), ",")
    np.testing.assert_array_equal(numbers.values, [1.5, np.nan, -2000])
    dates = read_text(np.array(["1970-01-02 12:00:00", "", "1970-01-03T13:00:00+01:00"], object))
    np.testing.assert_array_equal(dates.values, [1.5, np.nan, 2.5])
    assert read_text(np.array(["TRUE", "false", "?"], object)).values.tolist() == [
        *("True", "False", None),
    ]
    # In a column of text only the empty cell is a gap.
    assert read_text(np.array(["x", "NA", ""], object)).values.tolist() == ["x", "NA", None]


def test_codes_of_several_files_stay_as_written():
    parts = [read_text(np.array(cells, dtype=object)) for cells in (["007", "8"], ["09", ""])]
    frame = Frame.joined([Frame({"c": cells}, 2, True) for cells in parts])
    assert frame.columns["c"].as_text().values.tolist() == ["007", "8", "09", None]


def test_numbers_that_are_codes():
    cells = read_text(np.array(["1.0", "007", "2", "", "1.50"], object))
    assert cells.as_text().values.tolist() == ["1", "007", "2", None, "1.5"]
    # What a model knows as it is written stays as it is.
    assert cells.as_text({"1.0", "1.50"}).values.tolist() == ["1.0", "007", "2", None, "1.50"]
    assert read_text(np.array(["2024-01-03"], object)).as_text().values.tolist() == ["2024-01-03"]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_numbers_are_read_to_the_last_digit(numbers):
    cells = read_text(np.array([repr(x) for x in numbers], dtype=object))
    assert cells.values.tolist() == numbers


# --- roles -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["0", "1", "0", "-7"], "int"),
        (["01", "1", "01", "1"], "text"),
        (["1.0", "2.0", "1.0", "2.0"], "text"),
        (["True", "False", "True", "True"], "text"),
        (["none", "NA", "none", "NA"], "text"),
    ],
)
def test_labels_keep_their_type(tmp_path, cells, kind):
    found = chosen(tmp_path, {"x": ["1", "2", "3", "4"], "y": cells})
    assert found.roles.labels == kind
    assert found.all.y.tolist() == ([int(cell) for cell in cells] if kind == "int" else cells)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([True, False, True, True], "bool"),
        ([1, 2, 1, 2], "int"),
        ([1.0, 2.0, 1.0, 2.0], "int"),
        (["1", "2", "1", "2"], "text"),
    ],
)
def test_labels_of_typed_columns(tmp_path, cells, kind):
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"x": [1.0, 2, 3, 4], "y": cells}), path)
    found = prepare(Task(path, "y", Reading(), 0, None, 0, ""))
    assert found.roles.labels == kind and found.all.y.tolist() == cells


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["a"] * 4, "only one class, 'a'"),
        (["a", "b", "", "a"], "no value in row 3"),
        (["a", "b", "c", "d"], "a different value in every row"),
        ([f"{i / 7:.3f}" for i in range(30)] * 2, "does not do regression"),
    ],
)
def test_targets_that_are_no_classes(tmp_path, labels, words):
    with pytest.raises(TableError, match=words):
        chosen(tmp_path, {"x": ["1"] * len(labels), "y": labels})


def test_weights(tmp_path):
    columns = {"x": ["1"] * 4, "w": ["1", "2", "0", "0.5"], "y": Y}
    found = chosen(tmp_path, columns, weight="w")
    assert [*found.all.frame.columns] == ["x"]
    np.testing.assert_array_equal(found.all.weight, [1, 2, 0, 0.5])
    roles = Roles("y", "text", "w")
    for bad in (["1", "-1", "0", "0"], ["1", "", "0", "0"], ["1", "x", "2", "0"], ["0"] * 4):
        with pytest.raises(TableError, match="weights in 'w'"):
            roles.read_weights(table(w=bad))


@pytest.mark.parametrize(
    ("columns", "settings", "words"),
    [
        ({"c": ["1,5", "2,5", "3", "4"]}, {}, "say --decimal ,"),
        (
            {"a": ["u", "v"] * 2, "c": ["1,5", "-2,5e3", "", "4"]},
            {},
            "'1,5'; if a comma stands",
        ),
        ({"c": ["1,5", "2"] * 2}, {"categorical": ["onehot"]}, "say --decimal ,"),
        ({"x": ["1"] * 4}, {"ignore": ["X "]}, "--ignore: there is no column 'X '; did you mean"),
        (
            {"x": ["1", "inf", "2", "1e400"]},
            {},
            "an infinite or too large number in row 2",
        ),
        ({}, {}, "no column besides the target"),
        ({"x": ["1"] * 4}, {"categorical": ["onehot=z"]}, "there is no column 'z'"),
        ({"x": ["1"] * 4}, {"categorical": ["both"]}, "must be a column, as in onehot=COLUMN"),
        ({"x": ["S", "M", "S", "M"]}, {"categorical": ["ordinal=x:S<L"]}, "leaves out"),
        ({"x": ["1"] * 4}, {"categorical": ["ordinal=x:1<1"]}, "twice"),
        ({"x": ["1"] * 4}, {"ignore": ["y"]}, "--ignore 'y' is the target"),
        ({"x": ["1"] * 4}, {"weight": "v"}, "there is no weight column 'v'"),
    ],
)
def test_what_is_refused(tmp_path, columns, settings, words):
    with pytest.raises(TableError) as error:
        chosen(tmp_path, {**columns, "y": Y}, *settings.pop("categorical", ()), **settings)
    assert words in str(error.value)


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    columns = {"c": ["u", "v", "", "v"], "s": ["S"] * 4, "n": ["1,5", "2", "3", "4"], "y": Y}
    choices = ("refuse", "ordinal=s:M<L")
    with pytest.raises(TableError) as error:
        chosen(tmp_path, columns, *choices, missing="refuse")
    said = str(error.value)
    assert "the column 'c' holds text, such as 'u'; the column 'c' has no value in row 3" in said
    assert "the order given for 's' leaves out the value 'S'" in said and "'n' holds text" in said


def test_categories_by_name(tmp_path):
    columns = {
        "code": ["1", "2", "3", "1"],
        "size": ["L", "S", "M", "S"],
        "week": ["3", "12", "7", "7"],
        "city": ["u", "v", "u", "w"],
        "y": Y,
    }
    found = chosen(tmp_path, columns, "code", "ordinal=size:S<M<L", "ordinal=week", "onehot=city")
    cells = found.all.frame.columns
    assert found.categorical == ["code", "city"]
    assert cells["code"].kind == "number" and cells["city"].order == ()
    assert cells["size"].order == ("S", "M", "L") and cells["week"].order == ("3", "7", "12")
    found = chosen(tmp_path, columns, "ordinal")
    assert found.all.frame.columns["city"].order == ("u", "v", "w")


def test_notes_on_what_looks_odd(tmp_path):
    n = 12
    columns = {
        "customer_id": [str(7 * i) for i in range(n)],
        "count": [str(i) for i in range(n)],
        "same": ["1"] * n,
        "fine": [str(i * i % 7) for i in range(n)],
        "y": ["a", "b"] * 5 + ["a", "c"],
    }
    notes = chosen(tmp_path, columns).notes
    assert len(notes) == 4
    assert "'customer_id'" in notes[0] and "--ignore" in notes[0] and "'count'" in notes[1]
    assert "same value in every row" in notes[2] and notes[3:] == note_rare(columns["y"])


# --- models ----------------------------------------------------------------------------------

QUICK = ("--max-epochs", 3, "--inducing", 20)


def people(n: int = 150, seed: int = 0) -> pd.DataFrame:
    """Numbers, text, codes, dates, truth values, an order, an identifier, and gaps."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 10, n).round(2),
            "city": rng.choice(["Aachen", "Bonn", "Celle, Süd"], n),
            "street": rng.choice([f"street {i}" for i in range(30)], n),
            "since": pd.Timestamp("2024-01-31") + pd.to_timedelta(rng.integers(0, 400, n), "D"),
            "member": rng.random(n) < 0.5,
            "code": rng.integers(0, 4, n),
            "ticket": [f"T{i:05d}" for i in range(n)],
        }
    )
    label = np.where((frame["city"] == "Bonn") ^ (frame["code"] == 2), "yes", "no")
    frame.loc[::7, "age"] = np.nan
    frame.loc[::9, "since"] = pd.NaT
    frame.loc[::11, "city"] = None
    frame["code"] = frame["code"].where(np.arange(n) % 13 > 0)  # 2.0 in CSV
    return frame.assign(label=label)


@pytest.fixture(scope="module")
def people_folder(tmp_path_factory) -> Path:
    """The table as CSV and Parquet, and models of the command line and of Python."""
    folder, frame = tmp_path_factory.mktemp("people"), people()
    frame.to_csv(folder / "people.csv", index=False)
    frame.to_parquet(folder / "people.parquet")
    for kind in ("csv", "parquet"):
        options = ("--target", "label", "--categorical", "code", "-o", f"{kind}.conjugp", *QUICK)
        result = conjugp(folder, "fit", f"people.{kind}", *options)
        assert result.code == 0, result.err
        assert "left out: 'ticket' (an identifier)" in result.err
    y = frame.pop("label").to_numpy()
    train, _ = split(y, 0.2, 0)
    settings = {"max_epochs": 3, "n_inducing": 20, "random_state": 0, "categorical": ["code"]}
    with pytest.warns(UserWarning):
        clf = GPClassifier(**settings).fit(frame.iloc[train], y[train])
    clf.save(folder / "python.conjugp")
    return folder


@pytest.mark.parametrize("model", ["csv", "parquet", "python"])
def test_it_does_not_matter_who_fits_and_who_predicts(people_folder, model):
    frame = people()
    p = load(people_folder / "python.conjugp").predict_proba(frame)
    found = load(people_folder / f"{model}.conjugp")
    np.testing.assert_allclose(found.predict_proba(frame), p, rtol=0, atol=1e-9)
    for kind in ("csv", "parquet"):
        call = ("predict", f"{model}.conjugp", f"people.{kind}", "-o", "-")
        rows = read_rows(conjugp(people_folder, *call).out)
        read = [[float(row["p_no"]), float(row["p_yes"])] for row in rows]
        np.testing.assert_allclose(read, p, rtol=0, atol=1e-9)


def test_models_of_numbers_with_and_without_names(tmp_path):
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(size=(60, 3)), columns=list("abc"))
    X["on"] = rng.random(60) < 0.5
    y = np.where(X["a"] + X["on"] > 0.5, "u", "v")
    named = GPClassifier(max_epochs=2, random_state=0).fit(X, y)
    by_place = GPClassifier(max_epochs=2, random_state=0).fit(X.to_numpy(float), y)
    named.save(tmp_path / "named.conjugp")
    by_place.save(tmp_path / "place.conjugp")
    X.to_csv(tmp_path / "t.csv", index=False)
    X.iloc[:, ::-1].assign(more="?").to_csv(tmp_path / "other.csv", index=False)
    for model, name in (("named", "t"), ("named", "other"), ("place", "t")):
        call = ("predict", f"{model}.conjugp", f"{name}.csv", "-o", "-")
        rows = read_rows(conjugp(tmp_path, *call).out)
        p = [float(row["p_v"]) for row in rows]
        np.testing.assert_allclose(p, named.predict_proba(X)[:, 1], rtol=0, atol=1e-9)
    cells = X.assign(id=[f"n{i}" for i in range(60)], city=np.where(X["b"] > 0, "u", "v"))
    cells.to_csv(tmp_path / "cells.csv", index=False)
    with pytest.warns(UserWarning, match="identifier"):
        clf = GPClassifier(max_epochs=2, random_state=0).fit(cells.to_numpy(object), y)
    clf.save(tmp_path / "cells.conjugp")
    rows = read_rows(conjugp(tmp_path, "predict", "cells.conjugp", "cells.csv", "-o", "-").out)
    p = clf.predict_proba(cells.to_numpy(object))[:, 1]
    np.testing.assert_allclose([float(row["p_v"]) for row in rows], p, rtol=0, atol=1e-9)
    said = fails(tmp_path, "predict", "place.conjugp", "other.csv")
    assert said == "the table has 5 features, but the model was fitted with 4"
    X.drop(columns=["a", "on"]).to_csv(tmp_path / "less.csv", index=False)
    assert "has not the columns 'a', 'on'" in fails(
        tmp_path, "predict", "named.conjugp", "less.csv"
    )


def test_columns_that_are_ignored_hold_anything():
    n, rng = 40, np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=n), "t": rng.choice(["x", "y"], n), "b": [[1]] * n})
    clf = GPClassifier(ignore=["b"], max_epochs=2, random_state=0).fit(frame, frame["a"] > 0)
    p = clf.predict_proba(frame)
    for X in (frame, frame.to_dict("list"), pa.Table.from_pandas(frame)):
        np.testing.assert_array_equal(Model(clf).predict_proba(X), p)
    with pytest.raises(
        TypeError, match=r"'a' holds a list in row 1.*; the column 't' holds a list"
    ):
        Model(clf).predict_proba({"a": [[1]], "t": [[1]], "b": [1]})


def test_a_table_that_does_not_fit_its_model(people_folder, tmp_path):
    frame = people(20, seed=1)
    frame.drop(columns=["city", "age"]).to_csv(tmp_path / "less.csv", index=False)
    said = fails(tmp_path, "predict", people_folder / "csv.conjugp", "less.csv")
    assert "the table has not the columns 'age', 'city', which the model needs" in said
    frame["age"], frame["since"] = "old", 3.5
    frame.to_csv(tmp_path / "odd.csv", index=False)
    said = fails(tmp_path, "predict", people_folder / "csv.conjugp", "odd.csv")
    assert "the column 'age' held numbers when the model was fitted, and holds texts now" in said
    assert "'old' in row 1; the column 'since' held dates" in said and "X:" not in said


def test_levels_that_training_did_not_have(people_folder, tmp_path):
    frame = people(20, seed=1).assign(city="Xanten", member=None)
    frame.to_csv(tmp_path / "new.csv", index=False)
    call = ("predict", people_folder / "csv.conjugp", "new.csv")
    result = conjugp(tmp_path, *call)
    assert result.code == 0 and "'city' has a category that the training table did" in result.err
    said = fails(tmp_path, *call, "--unseen", "refuse")
    assert said.endswith("did not have: 'Xanten' in row 1, and the like in 19 more rows")


def test_a_report_says_what_became_of_each_column(people_folder, tmp_path):
    for name in ("people.csv", "csv.conjugp"):
        shutil.copy(people_folder / name, tmp_path)
    for call in (
        ("csv.conjugp", "people.csv"),
        ("people.csv", "--target", "label", "--categorical", "code", "--ignore", "ticket"),
    ):
        result = conjugp(tmp_path, "report", *call, "-o", "r.html", "--json")
        assert result.code == 0, result.err
        assert set(result.json["scores"]) == {"conjugp", "logistic regression", "class frequencies"}
        assert set(result.json["relevance"]) == set(people().columns) - {"label", "ticket"}
        text = (tmp_path / "r.html").read_text(encoding="utf-8")
        for words in (
            "and a feature of its own where it is missing",
            "a category of 4 levels, (missing)",
            "the classes&#39; shares in",
            "a date, its place in the year",
            "left out: an identifier" if len(call) == 2 else "left out: ignored",
        ):
            assert words in text, words
        assert re.search(r"2024-0\d-\d\d to 2025-0\d-\d\d, median 2024-\d\d-\d\d<", text)
    text = conjugp(tmp_path, "info", "csv.conjugp").out
    assert "ticket (left out: an identifier)" in text and "code (a category of 4 levels" in text


def test_ordered_categories_of_a_parquet_file(tmp_path):
    sizes = pd.CategoricalDtype(["S", "M", "L"], ordered=True)
    frame = pd.DataFrame({"size": pd.Series(list("SML") * 20, dtype=sizes), "x": range(60)})
    y = np.where(frame["size"] == "L", "u", "v")
    frame.assign(y=y).to_parquet(tmp_path / "t.parquet")
    result = conjugp(tmp_path, "fit", "t.parquet", "--target", "y", *QUICK, "-o", "t.conjugp")
    assert result.code == 0, result.err
    clf = load(tmp_path / "t.conjugp")
    assert clf.columns_["size"] == "the rank among 3 levels"
    # Where there is no type they are asked for.
    frame.assign(y=y).to_csv(tmp_path / "t.csv", index=False)
    options = ("--categorical", "ordinal=size:S<M<L", *QUICK, "-o", "c.conjugp")
    assert conjugp(tmp_path, "fit", "t.csv", "--target", "y", *options).code == 0
    for table in (frame, pa.Table.from_pandas(frame), frame.astype({"size": str})):
        np.testing.assert_array_equal(
            load(tmp_path / "c.conjugp").predict_proba(table), clf.predict_proba(frame)
        )


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["table-1", "table-1-numbers"])
def test_models_of_the_first_format_predict_as_they_did(tmp_path, name):
    """Written by the command line when it had encodings of its own; `fit`'s options are in them."""
    expected = json.loads((DATA / "table-1.json").read_text(encoding="utf-8"))
    model, rows = load_model(DATA / f"{name}.conjugp"), DATA / "table-1.csv"
    np.testing.assert_allclose(
        model.predict_proba(rows), expected["proba"][name], rtol=0, atol=1e-9
    )
    said = conjugp(tmp_path, "evaluate", DATA / f"{name}.conjugp", rows, "--json").json
    assert said["trained_on"] == 0 and said["n_rows"] == model.origin["n_test"]
    assert said["scores"] == pytest.approx(model.origin["scores"], rel=1e-9)
    assert "target" in conjugp(tmp_path, "info", DATA / f"{name}.conjugp").out
    model.save(tmp_path / "again.conjugp")
    again = load_model(tmp_path / "again.conjugp")
    np.testing.assert_array_equal(again.predict_proba(rows), model.predict_proba(rows))
    assert again.roles == model.roles and again.origin == model.origin
    if name == "table-1":
        (tmp_path / "new.csv").write_text(expected["new"], encoding="utf-8")
        p = model.predict_proba(tmp_path / "new.csv")
        np.testing.assert_allclose(p, expected["proba"]["table-1 new"], rtol=0, atol=1e-9)
        assert model.ignored == ("id",) and "new" in model.clf.columns_


COLUMN = {"name": "n", "kind": "number", "categories": [], "fill": 1.0}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"columns": [{"name": "n"}]},
        {"columns": [{**COLUMN, "name": 3}]},
        {"columns": [{**COLUMN, "kind": "magic"}]},
        {"columns": [{**COLUMN, "kind": "onehot"}]},
        {"columns": [{**COLUMN, "kind": "onehot", "categories": ["a"], "fill": "b"}]},
        {"columns": [{**COLUMN, "fill": "x"}]},
        {"columns": [COLUMN]},
        {"target": None},
        {"labels": "float"},
        {"decimal": "x"},
        {"ignored": 3},
    ],
)
def test_a_damaged_description_is_refused(tmp_path, change):
    extra = saving.read_info(DATA / "table-1.conjugp")["extra"]
    extra["table"]["encoding"] |= change
    saving.save(load(DATA / "table-1.conjugp"), tmp_path / "forged.conjugp", extra=extra)
    said = fails(tmp_path, "predict", "forged.conjugp", DATA / "table-1.csv", code=3)
    assert "description of its columns is damaged" in said


@pytest.mark.parametrize("change", [{"format": 3}, {"target": 3}, {"labels": "x"}, {"more": 1}])
def test_damaged_roles_are_refused(tmp_path, change):
    write_trips(tmp_path)
    assert conjugp(tmp_path, "fit", "trips.csv", "--target", "mode", *QUICK).code == 0
    extra = saving.read_info(tmp_path / "model.conjugp")["extra"]
    extra["table"] |= change
    saving.save(load(tmp_path / "model.conjugp"), tmp_path / "forged.conjugp", extra=extra)
    assert "columns" in fails(tmp_path, "info", "forged.conjugp", code=3)
