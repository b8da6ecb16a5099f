"""ONNX files of models of tables: an input for each column, and the same probabilities."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
from onnx import TensorProto, helper

from conjugp import GPClassifier
from conjugp._inputs.encoder import Encoder
from conjugp._inputs.frames import frame_of
from conjugp._inputs.kinds import Date, Levels, Number, Ordered, Shares
from conjugp.export import _columns, to_onnx
from conjugp.export._graph import ML, ML_OPSET, OPSET, Scope

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
N = 150
PRECISE = 1e-7  # as of models of plain numbers, whose integral is good to 1e-8
EXACT = 1e-10  # features, whose sines are of angles up to 1e6
KINDS = {
    **{"age": "number", "income": "number", "city": "text", "street": "text", "size": "text"},
    **{"since": "date", "at": "date", "member": "text", "code": "text"},
}


def table(n: int = N, seed: int = 0) -> pd.DataFrame:
    """Columns of every kind with gaps; numbers and times are such as float32 has."""
    rng = np.random.default_rng(seed)
    days = [rng.integers(0, 400, n), rng.integers(0, 1600, n) / 4]
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 10, n).round(),
            "income": np.exp(2.5 * rng.standard_normal(n)).astype(np.float32).astype(float),
            "city": rng.choice(["Aachen", "Bonn", "Celle", "Zürich"], n, p=[0.4, 0.3, 0.29, 0.01]),
            "street": rng.choice([f"street {i}" for i in range(30)], n),
            "size": rng.choice(["S", "M", "L"], n),
            "since": pd.Timestamp("2024-01-31") + pd.to_timedelta(days[0], "D"),
            "at": pd.Timestamp("1969-11-30") + pd.to_timedelta(days[1], "D"),
            "member": (rng.random(n) < 0.5).astype(object),
            "code": rng.integers(0, 4, n).astype(float),
            "ticket": [f"T{i:05d}" for i in range(n)],
        }
    )
    frame["size"] = frame["size"].astype(pd.CategoricalDtype(["S", "M", "L"], ordered=True))
    for step, name in ((7, "age"), (9, "since"), (11, "city"), (8, "street"), (13, "size")):
        frame.loc[::step, name] = None
    return frame


def labels(frame: pd.DataFrame, C: int) -> np.ndarray:
    """Two classes or three, which categories, a number and a rank tell."""
    y = ((frame["city"] == "Bonn") ^ (frame["code"] == 2)).to_numpy().astype(int)
    if C == 3:
        y[((frame["age"] > 45) & (frame["size"] != "S")).to_numpy()] = 2
    return np.array(["no", "yes", "perhaps"])[y]


def new_rows(n: int = 60) -> pd.DataFrame:
    """With levels that the fit has not seen, gaps where it had none, and numbers from afar."""
    frame = table(n, seed=1)
    frame["size"] = frame["size"].astype(object)
    frame.loc[0, ["city", "street", "size", "member"]] = ["Xanten", "nowhere", "XXL", "perhaps"]
    frame.loc[1, ["city", "street"]] = ["(missing)", "(other)"]
    frame.loc[2, "code"] = 17.0
    frame.loc[3, ["income", "at", "member", "code"]] = None
    frame.loc[4, ["income", "age"]] = [2.0**40, -1e6]
    frame.loc[5, :] = None
    return frame


def feed(frame: pd.DataFrame, number: Any = np.float64) -> dict[str, np.ndarray]:
    """What a caller gives to the graph, made without conjugp."""
    found = {}
    for name, kind in KINDS.items():
        column = frame[name]
        if kind == "date":
            column = (column - pd.Timestamp(0)) / pd.Timedelta(days=1)
        if kind == "text":
            code = name == "code"
            cells = ["" if pd.isna(v) else str(int(v) if code else v) for v in column]
            found[name] = np.array(cells, dtype=object)[:, None]
        else:
            found[name] = column.to_numpy(dtype=number, na_value=np.nan)[:, None]
    return found


def fit(frame: pd.DataFrame, y: np.ndarray, **changes: Any) -> GPClassifier:
    settings = {"random_state": 0, "max_epochs": 20, "categorical": ["code"], "ignore": ["ticket"]}
    return GPClassifier(**{**settings, **changes}).fit(frame, y)


def session(path: Any) -> onnxruntime.InferenceSession:
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def features(encoder: Encoder, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """What the columns become, by a graph that has nothing else."""
    names = _columns.inputs(encoder)
    scope = Scope(taken=names.values())
    scope.rename(_columns.features(scope, encoder, _columns.cells(scope, encoder, names)), "out")
    declare = helper.make_tensor_value_info
    types = {
        name: TensorProto.STRING if KINDS[name] == "text" else TensorProto.DOUBLE for name in names
    }
    graph = scope.graph(
        [declare(name, kind, ["n", 1]) for name, kind in types.items()],
        [declare("out", TensorProto.DOUBLE, ["n", len(encoder.features)])],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(ML, ML_OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    found = onnxruntime.InferenceSession(model.SerializeToString())
    return found.run(None, {name: feeds[name] for name in names})[0]


@pytest.fixture(scope="module", params=[2, 3])
def model(request: pytest.FixtureRequest) -> GPClassifier:
    frame = table()
    return fit(frame, labels(frame, request.param))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


# --- the whole ------------------------------------------------------------------------------


def test_columns_of_every_kind(path, model):
    to_onnx(model, path)
    found = session(path)
    for frame in (table(), new_rows()):
        label, p = found.run(["label", "probabilities"], feed(frame))
        assert p.dtype == np.float64
        np.testing.assert_allclose(p, model.predict_proba(frame), rtol=0, atol=PRECISE)
        np.testing.assert_array_equal(label, model.predict(frame))


def test_float32_inputs(path, model):
    to_onnx(model, path, input_dtype="float32")
    found = session(path)
    for frame in (table(), new_rows()):
        p = found.run(["probabilities"], feed(frame, np.float32))[0]
        assert p.dtype == np.float32
        np.testing.assert_allclose(p, model.predict_proba(frame), rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 1024, 1025, 2100])
def test_any_number_of_rows(path, model, n):
    """1024 are one chunk."""
    to_onnx(model, path)
    frame = table(max(n, 30), seed=2)[:n]
    label, p = session(path).run(["label", "probabilities"], feed(frame))
    assert label.shape == (n,) and p.shape == (n, len(model.classes_))
    if n:
        np.testing.assert_allclose(p, model.predict_proba(frame), rtol=0, atol=PRECISE)


def test_columns_of_different_lengths_are_an_error(path, model):
    to_onnx(model, path)
    for name in KINDS:
        for n in (1, 29, 31):
            wrong = {**feed(table(30)), name: feed(table(40))[name][:n]}
            with pytest.raises(Exception, match=r"(?i)dimension|shape|Concat"):
                session(path).run(None, wrong)


# --- the file -------------------------------------------------------------------------------


def test_a_file_says_what_its_inputs_are(path, model):
    to_onnx(model, path)
    found = session(path)
    types = {"text": "tensor(string)"}
    given = {i.name: (i.type, i.shape) for i in found.get_inputs()}
    assert given == {n: (types.get(k, "tensor(double)"), ["n", 1]) for n, k in KINDS.items()}
    assert [o.name for o in found.get_outputs()] == ["label", "probabilities"]
    about = found.get_modelmeta().custom_metadata_map
    assert json.loads(about["columns"]) == KINDS
    assert list(json.loads(about["columns"])) == [i.name for i in found.get_inputs()]
    assert json.loads(about["feature_names"]) == list(model._inputs.encoder.features)


def test_operators_are_those_of_onnx(path, model):
    to_onnx(model, path)
    proto = onnx.load(path)
    assert {i.domain: i.version for i in proto.opset_import} == {"": OPSET, ML: ML_OPSET}
    assert {n.op_type for n in proto.graph.node if n.domain == ML} == {"LabelEncoder"}
    numbers = ["age", "income", "since"]
    frame = table()
    to_onnx(fit(frame[numbers], labels(frame, 2), categorical="auto", ignore=()), path)
    proto = onnx.load(path)
    assert [i.name for i in proto.graph.input] == numbers
    assert {i.domain for i in proto.opset_import} == {""}


def test_plain_numbers_have_one_input(path):
    X = table()[["income", "code"]]
    to_onnx(fit(X, labels(table(), 2), categorical="auto", ignore=()), path)
    proto = onnx.load(path)
    assert [i.name for i in proto.graph.input] == ["X"]
    assert {i.domain for i in proto.opset_import} == {""}
    assert "columns" not in session(path).get_modelmeta().custom_metadata_map


def test_arrays_of_objects(path):
    frame, columns = table(), ["age", "city", "code"]
    X = frame[columns].to_numpy(dtype=object)
    clf = fit(X, labels(frame, 3), categorical=[2], ignore=())
    to_onnx(clf, path)
    feeds = feed(frame)
    p = session(path).run(["probabilities"], {f"x{j}": feeds[n] for j, n in enumerate(columns)})[0]
    np.testing.assert_allclose(p, clf.predict_proba(X), rtol=0, atol=PRECISE)


ODD = ["", "_", "label", "label_", "probabilities", "X", "t1", "t1_", "c0", "c1", "out"]
ODD += ["größe (m²)", "a \"b\" 'c'", "a/b:0", "two\nlines", " ", "\N{SNOWMAN}", "x" * 300]


def test_names_of_any_kind(path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            name: rng.standard_normal(N) if j % 2 else rng.choice(["a", "b", "c"], N)
            for j, name in enumerate(ODD)
        }
    )
    clf = fit(frame, (frame["_"] > 0) ^ (frame["t1"] == "a"), categorical="auto", ignore=())
    to_onnx(clf, path)
    found = session(path)
    names = [i.name for i in found.get_inputs()]
    changed = {"": "__", "label": "label__", "probabilities": "probabilities_"}
    assert names == [changed.get(name, name) for name in ODD]
    assert list(json.loads(found.get_modelmeta().custom_metadata_map["columns"])) == ODD
    feeds = {name: frame[c].to_numpy()[:, None] for name, c in zip(names, ODD, strict=True)}
    p = found.run(["probabilities"], feeds)[0]
    np.testing.assert_allclose(p, clf.predict_proba(frame), rtol=0, atol=PRECISE)


# --- features -------------------------------------------------------------------------------


def test_features_are_those_of_the_encoder(model):
    encoder = model._inputs.encoder
    assert {type(part) for part in encoder.parts} == {Number, Ordered, Levels, Shares, Date}
    found = {part.name: part for part in encoder.parts}
    assert found["income"].spread > 0 and found["age"].gaps and found["size"].ranks.gaps
    assert found["at"].cycles == ("year", "week", "day") and found["since"].days.gaps
    for frame in (table(), new_rows()):
        expected = encoder.encode(frame_of(frame))
        np.testing.assert_allclose(features(encoder, feed(frame)), expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    "part",
    [
        Levels("city", ("a", "b")),
        Levels("city", ("a", "(missing)")),
        Levels("city", ("a", "(other)")),
        Levels("city", ("a", "(missing)", "(other)")),
        Levels("city", ("(other)",)),
        Ordered("city", ("b", "a"), Number("city", 0.0, False)),
        Ordered("city", ("b", "(missing)", "a"), Number("city", 1.0, True)),
        Shares("city", np.array(["a", "b"]), np.array([[0.1], [0.7]]), np.array([0.4]), ("yes",)),
        Shares("city", np.array(["(missing)", "a"]), np.eye(2), np.full(2, 0.5), ("no", "yes")),
        Shares("city", np.empty(0, dtype="U1"), np.empty((0, 1)), np.array([0.4]), ("yes",)),
    ],
    ids=repr,
)
def test_gaps_and_levels_that_were_not_seen(part):
    assert part.valid()
    encoder = Encoder(("city",), True, (part,), {})
    cells = ["a", "b", None, "c", "A", "(missing)", "(other)", "a b"]
    frame = pd.DataFrame({"city": pd.Series(cells, dtype=object)})
    text = np.array([cell or "" for cell in cells], dtype=object)[:, None]
    expected = encoder.encode(frame_of(frame))
    np.testing.assert_array_equal(features(encoder, {"city": text}), expected)
