"""fit, predict, evaluate, info and export, as people call them."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

import commands
from commands import conjugp, fails, read_rows, write_csv
from conjugp import GPClassifier, cli, load, metrics
from conjugp._inputs.table import TableError
from conjugp._persistence import model_file as saving
from conjugp.cli import _demo as demo
from conjugp.cli import _export as export
from conjugp.cli._fit import _kernel
from conjugp.cli._scores import split
from conjugp.cli.models import load_model
from conjugp.kernels import RBF, Linear, Matern32

COMMANDS = ["fit", "predict", "evaluate", "report", "info", "export", "demo"]


@pytest.fixture
def folder(tmp_path, wine):
    """A folder of its own with wine.csv and wine.conjugp."""
    for name in ("wine.csv", "wine.conjugp"):
        shutil.copy(wine / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def no_fit(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("got as far as the fit")

    monkeypatch.setattr(GPClassifier, "fit", refuse)


# --- help ------------------------------------------------------------------------------------


def examples(command: str) -> list[str]:
    text = conjugp(commands.Path.cwd(), command, "--help").out
    return re.findall(r"^ *\$ conjugp (.+)$", text, re.M)


def test_every_command_is_known_and_has_an_example():
    known = {
        name or f.__name__
        for name, f in ((c.name, c.callback) for c in cli.app.registered_commands)
    }
    assert known == set(COMMANDS)
    assert all(examples(command) for command in COMMANDS)
    top = conjugp(commands.Path.cwd(), "--help").out
    assert all(f"  {code}  " in top for code in (0, 1, 2, 3, 4, 130))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_the_help_run(folder, monkeypatch, command):
    commands.write_trips(folder)
    monkeypatch.setattr(demo, "N_TRAIN", 60)
    quick = {"LogisticRegression": LogisticRegression(max_iter=1000)}
    monkeypatch.setattr(demo, "_classifiers", lambda seed: quick)
    for example in examples(command):
        arguments = shlex.split(example)
        assert arguments[0] == command
        result = conjugp(folder, *arguments)
        assert result.code == 0, (example, result.err)
        for flag in ("-o", "--output"):
            if flag in arguments and (name := arguments[arguments.index(flag) + 1]) != "-":
                assert (folder / name).stat().st_size > 100


def test_every_command_has_json_and_debug():
    for command in COMMANDS:
        text = conjugp(commands.Path.cwd(), command, "--help").out
        assert "--json" in text and "--debug" in text


def test_the_commands_of_the_readme(tmp_path):
    text = (commands.Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"```sh\n(.*?)```", text, re.S) if "report" in b)
    install, *lines = block.splitlines()
    assert install.startswith("pip install") and len(lines) == 3
    for line in lines:
        program, *arguments = shlex.split(line)
        result = conjugp(tmp_path, *arguments)
        assert program == "conjugp" and result.code == 0, result.err
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


# --- fit -------------------------------------------------------------------------------------


def test_fit_is_the_estimator_on_the_training_rows(wine):
    model = load_model(wine / "wine.conjugp")
    rows = read_rows((wine / "wine.csv").read_text())
    y = np.array([row.pop("label") for row in rows])
    X = np.array([[float(v) for v in row.values()] for row in rows])
    train, test = split(y, 0.2, 0)
    clf = GPClassifier(random_state=0).fit(X[train], y[train])
    np.testing.assert_array_equal(model.clf.predict_proba(X), clf.predict_proba(X))
    p = clf.predict_proba(X[test])
    scores = model.origin["scores"]
    assert scores["nll"] == pytest.approx(metrics.nll(y[test], p, labels=clf.classes_), rel=1e-12)
    assert scores["error"] == np.mean(clf.predict(X[test]) != y[test])
    counts = [np.mean(y[test] == label) for label in clf.classes_]
    assert counts == pytest.approx([np.mean(y == label) for label in clf.classes_], abs=0.02)


def test_fit_says_what_it_did_in_json(tmp_path):
    X, y = load_iris(return_X_y=True)
    rows = [[*x, label, weight] for x, label, weight in zip(X, y, [1, 2] * 75, strict=True)]
    write_csv(tmp_path / "iris.csv", ["a", "b", "c", "d", "y", "w"], rows, delimiter=";")
    options = ["--weight", "w", "--ignore", "d", "--kernel", "rbf+linear", "--test-size", "0.3"]
    result = conjugp(
        tmp_path, "fit", "iris.csv", "--target", "y", *options, "--max-epochs", 2, "--json"
    )
    assert result.code == 0, result.err
    said = result.json
    assert said["n_train"] == 105 and said["n_test"] == 45 and said["features"] == ["a", "b", "c"]
    assert said["classes"] == [0, 1, 2] and set(said["scores"]) == {"error", "nll", "brier", "ece"}
    assert any("max_epochs" in text for text in said["notes"])
    model = load_model(tmp_path / "model.conjugp")
    assert model.clf.classes_.tolist() == [0, 1, 2] and model.roles.weight == "w"
    # Integers in, integers out; a column that was left out does not have to be there.
    shorter = write_csv(tmp_path / "new.csv", ["c", "b", "a"], X[:3, 2::-1])
    result = conjugp(tmp_path, "predict", "model.conjugp", shorter, "--no-proba", "-o", "-")
    assert [row["prediction"] for row in read_rows(result.out)] == ["0", "0", "0"]
    model.save(tmp_path / "again.conjugp")
    assert load_model(tmp_path / "again.conjugp").origin == model.origin


def test_a_test_table_of_its_own_and_all_rows(tmp_path, wine, monkeypatch):
    seen = []

    def fit(self, X, y, sample_weight=None, **_):
        seen.append(len(y))
        raise KeyboardInterrupt

    monkeypatch.setattr(GPClassifier, "fit", fit)
    arguments = ("fit", wine / "wine.csv", "--target", "label", "-o", tmp_path / "m.conjugp")
    for more in (["--test", wine / "wine.csv"], ["--test-size", 0], ["--test-size", 0.5]):
        assert conjugp(tmp_path, *arguments, *more).code == 130
    assert seen == [178, 178, 89]


def test_kernels_by_name():
    assert _kernel("auto") is None
    assert _kernel("rbf*matern32 + linear") == RBF() * Matern32() + Linear()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "lable"], "did you mean 'label'?"),
        (["--kernel", "rbf+magic"], "'magic' is none of"),
        (["--inducing", "many"], "--inducing must be"),
        (["--temperature", "hot"], "--temperature must be"),
        (["--class-weight", "fair"], "--class-weight must be"),
        (["--missing", "drop"], "--missing must be"),
        (["--decimal", ";"], "--decimal must be"),
        (["--test-size", "0.95"], "--test-size"),
        (["--nonsense"], "--nonsense"),
        (["--test", "other.xlsx"], "tables are read from"),
        (["--ignore", "alcohool"], "--ignore: there is no column 'alcohool'; did you mean"),
        (["--checkpoint", "wine.csv"], "--checkpoint 'wine.csv' is the same file as 'wine.csv'"),
        (["--checkpoint", "new.conjugp"], "is the same file as 'new.conjugp'"),
    ],
)
def test_fit_refuses(folder, no_fit, options, words):
    target = [] if "--target" in options else ["--target", "label"]
    said = fails(folder, "fit", "wine.csv", *target, "-o", "new.conjugp", *options)
    assert words in said and not (folder / "new.conjugp").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--likelihood", "magic"], "likelihood"),
        (["--device", "abacus"], "device"),
        (["--dtype", "float8"], "dtype"),
        (["--max-epochs", "0"], "max_epochs"),
        (["--inducing", "0"], "n_inducing"),
    ],
)
def test_what_the_estimator_refuses(folder, options, words):
    assert words in fails(folder, "fit", "wine.csv", "--target", "label", *options)
    assert not (folder / "model.conjugp").exists()


def test_numbers_too_large_for_the_estimator(tmp_path):
    rows = [[f"{(-1) ** i * 10.0 ** (300 + i % 7)}", "ab"[i % 2]] for i in range(30)]
    write_csv(tmp_path / "big.csv", ["x", "y"], rows)
    result = conjugp(tmp_path, "fit", "big.csv", "--target", "y", "-o", "m.conjugp")
    assert result.code in (0, 2) and "Traceback" not in result.err


def test_files_that_are_not_there_or_cannot_be_written(folder, no_fit):
    said = fails(folder, "fit", "no.csv", "--target", "y", code=3)
    assert said == "there is no file no.csv"
    said = fails(folder, "fit", "wine.csv", "--target", "label", "-o", "no/x.conjugp", code=3)
    assert "no/x.conjugp" in said
    assert fails(folder, "info", "no.conjugp", code=3) == "there is no file no.conjugp"
    said = fails(folder, "predict", "wine.csv", "wine.conjugp", code=3)
    assert said == "wine.csv is not a conjugp model file; give the model first, then the table"
    (folder / "r.py").write_text("print()")
    said = fails(folder, "predict", "r.py", "wine.csv", code=3)
    assert said == "r.py is not a conjugp model file"
    (folder / "cut.conjugp").write_bytes((folder / "wine.conjugp").read_bytes()[:5000])
    assert "damaged" in fails(folder, "predict", "cut.conjugp", "wine.csv", code=3)


def test_no_command_writes_over_what_it_reads(folder, no_fit):
    shutil.copy(folder / "wine.csv", folder / "other.csv")
    (folder / "link.csv").symlink_to("wine.csv")
    (folder / "hard.csv").hardlink_to(folder / "wine.csv")
    (folder / "model.csv").write_bytes((folder / "wine.conjugp").read_bytes())
    (folder / "page.html").write_bytes((folder / "wine.conjugp").read_bytes())
    (folder / "m.onnx").write_bytes((folder / "wine.conjugp").read_bytes())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("wine.csv", "./wine.csv", "link.csv", "hard.csv"):
        said = fails(folder, "predict", "wine.conjugp", "wine.csv", "-o", name)
        assert "is the same file as 'wine.csv'" in said
    assert "same file" in fails(folder, "predict", "model.csv", "wine.csv", "-o", "model.csv")
    assert "same file" in fails(folder, "report", "page.html", "wine.csv", "-o", "page.html")
    assert "same file" in fails(folder, "export", "m.onnx", "m.onnx")
    for name in ("wine.csv", "new.CSV", "new.parquet", "new.npz", "new.json", "new.html"):
        said = fails(folder, "fit", "wine.csv", "--target", "label", "-o", name)
        assert said.endswith(f"call the model {name[: -len(name.split('.')[-1])]}conjugp")
    (folder / "table.data").symlink_to("other.csv")
    options = ("--target", "label", "-o", "table.data")
    assert "same file" in fails(folder, "fit", "wine.csv", "--test", "other.csv", *options)
    (folder / "table.data").unlink()
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_ctrl_c_says_what_is_kept(folder, monkeypatch):
    def interrupted(self, *_, checkpoint=None, **__):
        if checkpoint is not None:
            checkpoint.write_bytes(b"state")
        raise KeyboardInterrupt

    monkeypatch.setattr(GPClassifier, "fit", interrupted)
    before = (folder / "wine.conjugp").read_bytes()
    arguments = ("fit", "wine.csv", "--target", "label", "-o")
    assert "no model was written" in fails(folder, *arguments, "new.conjugp", code=130)
    said = fails(folder, *arguments, "wine.conjugp", "--checkpoint", "c.state", code=130)
    assert "wine.conjugp is as it was" in said and "c.state has the state" in said
    assert (folder / "wine.conjugp").read_bytes() == before


def test_a_checkpoint_changes_nothing_and_belongs_to_its_table(folder):
    call = ("fit", "wine.csv", "--target", "label", "--checkpoint", "c.state", "-o", "new.conjugp")
    for _ in range(2):  # the second time from the state that the first has left
        assert conjugp(folder, *call).code == 0
        old, new = load(folder / "wine.conjugp"), load(folder / "new.conjugp")
        np.testing.assert_array_equal(new.inducing_points_, old.inducing_points_)
        assert new.elbo_ == old.elbo_ and new.temperature_ == old.temperature_
    said = fails(folder, *call, "--seed", 1, code=2)
    assert "checkpoint" in said


def test_a_real_ctrl_c(folder):
    # A process that was started in the background ignores Ctrl-C, and so do its children.
    code = (
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from conjugp import GPClassifier, cli\n"
        "def fit(self, *a, **k): print('fitting', flush=True); time.sleep(60)\n"
        "GPClassifier.fit = fit; cli.main()"
    )
    call = [sys.executable, "-c", code, "fit", "wine.csv", "--target", "label"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(call, cwd=folder, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "fitting\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "conjugp: interrupted; no model was written\n"
    assert sorted(path.name for path in folder.iterdir()) == ["wine.conjugp", "wine.csv"]


def test_a_write_that_fails_leaves_the_old_model(folder, monkeypatch):
    before = (folder / "wine.conjugp").read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device", "wine.conjugp")

    monkeypatch.setattr(saving, "save", full)
    monkeypatch.setattr(GPClassifier, "fit", lambda self, *_, **__: self)
    monkeypatch.setattr(
        "conjugp.cli._fit.scored", lambda *_: (load_model(folder / "wine.conjugp"), None)
    )
    said = fails(folder, "fit", "wine.csv", "--target", "label", "-o", "wine.conjugp", code=3)
    assert "No space left" in said and (folder / "wine.conjugp").read_bytes() == before


def test_errors_that_nobody_thought_of(folder, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug\nin two lines")

    monkeypatch.setattr(saving, "read_info", broken)
    said = fails(folder, "info", "wine.conjugp", code=1)
    assert said == "unexpected error, RuntimeError: a bug in two lines (--debug shows where)"
    with pytest.raises(RuntimeError):
        conjugp(folder, "info", "wine.conjugp", "--debug")


def test_errors_in_json(folder):
    result = conjugp(folder, "fit", "wine.csv", "--target", "lable", "--json")
    assert result.code == 2 and result.json["exit_code"] == 2
    assert result.json["error"] == result.err.strip().removeprefix("conjugp: ")
    result = conjugp(folder, "predict", "wine.conjugp", "--json")
    assert result.code == 2 and "TABLE" in result.json["error"]


# --- predict ---------------------------------------------------------------------------------


def test_predictions_are_the_estimators(folder):
    clf = load_model(folder / "wine.conjugp").clf
    rows = read_rows((folder / "wine.csv").read_text())
    X = np.array([[float(v) for k, v in row.items() if k != "label"] for row in rows])
    p, parts = clf.predict_proba(X), clf.predict_uncertainty(X)
    for name in ("p.csv", "p.parquet", "p.npz"):
        options = ("--uncertainty", "--keep", "label", "-o", name)
        result = conjugp(folder, "predict", "wine.conjugp", "wine.csv", *options)
        assert result.code == 0 and f"178 predictions written to {folder / name}" in result.out
    written = read_rows((folder / "p.csv").read_text())
    assert list(written[0]) == [
        *("label", "prediction", "p_class_0", "p_class_1", "p_class_2"),
        *("entropy", "aleatoric", "epistemic"),
    ]
    assert [float(row["p_class_1"]) for row in written] == p[:, 1].tolist()  # every digit
    assert [row["prediction"] for row in written] == clf.predict(X).tolist()
    assert [float(row["epistemic"]) for row in written] == parts.epistemic.tolist()
    table = parquet.read_table(folder / "p.parquet").to_pydict()
    with np.load(folder / "p.npz") as arrays:
        for name in written[0]:
            assert arrays[name].tolist() == table[name]
    assert table["p_class_1"] == p[:, 1].tolist()
    assert [row["label"] for row in rows] == table["label"]


def test_the_most_probable_classes_from_and_to_a_pipe(folder):
    data = (folder / "wine.csv").read_bytes()
    options = ("--top-k", 2, "-o", "-")
    result = conjugp(folder, "predict", "wine.conjugp", "-", *options, stdin=data)
    clf = load_model(folder / "wine.conjugp").clf
    rows = read_rows(result.out)
    assert list(rows[0]) == ["prediction", "label_1", "p_1", "label_2", "p_2"]
    X = np.array([[float(v) for v in line.split(",")[:-1]] for line in data.decode().split()[1:]])
    labels, p = clf.predict_topk(X, 2)
    assert [row["label_2"] for row in rows] == labels[:, 1].tolist()
    assert [float(row["p_2"]) for row in rows] == p[:, 1].tolist()


def test_other_formats_in_give_the_same(folder):
    rows = read_rows((folder / "wine.csv").read_text())
    columns = {k: [row[k] for row in rows] for k in rows[0]}
    typed = {k: v if k == "label" else [float(x) for x in v] for k, v in columns.items()}
    parquet.write_table(pa.table(dict(reversed(typed.items()))), folder / "wine.parquet")
    np.savez(folder / "wine.npz", **{k: np.array(v) for k, v in typed.items()})
    outputs = []
    for name in ("wine.csv", "wine.parquet", "wine.npz"):
        outputs.append(conjugp(folder, "predict", "wine.conjugp", name, "-o", "-").out)
        # Recognised as the table of the fit, so that only the rows held out are scored.
        scored = conjugp(folder, "evaluate", "wine.conjugp", name, "--json").json
        assert scored["n_rows"] == 36 and not scored["trained_on"]
    assert outputs[0] == outputs[1] == outputs[2] and outputs[0].count("\n") == 179


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "x.xlsx"], "--output must end in"),
        (["-o", "-", "--json"], "standard output"),
        (["--keep", "nothing"], "there is no column 'nothing'"),
        (["--unseen", "guess"], "--unseen must be"),
        (["--top-k", "-1"], "--top-k"),
    ],
)
def test_predict_refuses(folder, options, words):
    assert words in fails(folder, "predict", "wine.conjugp", "wine.csv", *options)


def test_rows_that_the_model_cannot_take(folder):
    (folder / "new.csv").write_text("alcohol,malic_acid\n1,2\n")
    said = fails(folder, "predict", "wine.conjugp", "new.csv")
    assert "the columns 'ash', 'alcalinity_of_ash', 'magnesium'" in said
    text = (folder / "wine.csv").read_text().replace("14.23,1.71", "lots,few", 1)
    (folder / "new.csv").write_text(text)
    said = fails(folder, "predict", "wine.conjugp", "new.csv")
    for name, cell in (("alcohol", "lots"), ("malic_acid", "few")):  # all that is wrong, at once
        assert f"{name!r} held numbers when the model was fitted" in said
        assert f"holds texts now, such as {cell!r} in row 1" in said
    # A gap where the fit had none is the mean.
    (folder / "new.csv").write_text(text.replace("lots,few", "NA,", 1))
    assert conjugp(folder, "predict", "wine.conjugp", "new.csv").code == 0
    (folder / "new.csv").write_text((folder / "wine.csv").read_text().replace("class_2", "novel"))
    assert "the class 'novel', which" in fails(folder, "evaluate", "wine.conjugp", "new.csv")


def test_columns_that_are_not_used_are_named(folder):
    lines = (folder / "wine.csv").read_text().splitlines()
    (folder / "new.csv").write_text("\n".join(f"{line},{i}" for i, line in enumerate(lines)))
    result = conjugp(folder, "predict", "wine.conjugp", "new.csv")
    assert result.code == 0 and "not used" in result.err and "'0'" in result.err


def test_the_decimal_sign_is_the_tables(tmp_path, wine):
    text = (wine / "wine.csv").read_text()
    (tmp_path / "comma.csv").write_text(text.replace(",", ";").replace(".", ","))
    shutil.copy(wine / "wine.csv", tmp_path)
    call = ("predict", wine / "wine.conjugp", "comma.csv", "-o", "-")
    said = fails(tmp_path, *call)
    assert (
        "'14,23' in row 1" in said and "'malic_acid'" in said and said.endswith("say --decimal ,")
    )
    expected = conjugp(tmp_path, "predict", wine / "wine.conjugp", "wine.csv", "-o", "-").out
    assert conjugp(tmp_path, *call, "--decimal", ",").out == expected
    call = (wine / "wine.conjugp", "comma.csv", "--decimal", ",", "--json")
    assert conjugp(tmp_path, "evaluate", *call).json["n_rows"] == 36
    assert conjugp(tmp_path, "report", *call).json["n_rows"] == 36
    # A model of a table with commas takes either, and its own without a word.
    model = load_model(wine / "wine.conjugp")
    model = replace(model, roles=replace(model.roles, decimal=","))
    model.save(tmp_path / "comma.conjugp")
    call = ("predict", "comma.conjugp")
    assert conjugp(tmp_path, *call, "comma.csv", "-o", "-").out == expected
    assert fails(tmp_path, *call, "wine.csv").endswith("say --decimal .")
    assert conjugp(tmp_path, *call, "wine.csv", "--decimal", ".", "-o", "-").out == expected


def test_models_from_python(folder):
    clf, model = load(folder / "wine.conjugp"), load_model(str(folder / "wine.conjugp"))
    rows = read_rows((folder / "wine.csv").read_text())
    names = [name for name in rows[0] if name != "label"]
    assert clf.feature_names_in_.tolist() == names
    columns = {name: [float(row[name]) for row in rows] for name in reversed(names)}
    p = model.predict_proba(folder / "wine.csv")
    np.testing.assert_array_equal(model.predict_proba(columns), p)
    np.testing.assert_array_equal(model.predict_proba(pa.table(columns)), p)
    np.testing.assert_array_equal(clf.predict_proba(pa.table(columns).select(names)), p)
    with pytest.raises(TableError, match="same length"):
        model.predict_proba(columns | {"ash": [1.0]})


def test_parquet_without_pyarrow(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    said = fails(folder, "predict", "wine.conjugp", "wine.csv", "-o", "p.parquet", code=4)
    assert 'pip install "conjugp[parquet]"' in said


# --- evaluate, info, export ------------------------------------------------------------------


def test_evaluate(folder):
    result = conjugp(folder, "evaluate", "wine.conjugp", "wine.csv", "--json", "--plots", "plots")
    said = result.json
    origin = load_model(folder / "wine.conjugp").origin
    assert said["scores"] == pytest.approx(origin["scores"], rel=1e-12)
    assert [c["rows"] for c in said["classes"]] == [12, 14, 10]
    assert len(said["plots"]) == len(list((folder / "plots").iterdir())) == 3
    right = sum(c["recall"] * c["rows"] for c in said["classes"])
    assert right / 36 == pytest.approx(1 - said["scores"]["error"])
    text = conjugp(folder, "evaluate", "wine.conjugp", "wine.csv").out
    assert "36 rows it has not seen" in text and "class_2" in text
    lines = (folder / "wine.csv").read_text().splitlines()
    (folder / "few.csv").write_text("\n".join(lines[:1] + lines[1::9]))
    assert (
        "note: only 20 rows are scored"
        in conjugp(folder, "evaluate", "wine.conjugp", "few.csv").err
    )
    (folder / "a-file").write_text("")
    said = fails(folder, "evaluate", "wine.conjugp", "wine.csv", "--plots", "a-file")
    assert "--plots" in said


def test_info(folder):
    text = conjugp(folder, "info", "wine.conjugp").out
    assert "142 rows of wine.csv, 36 more held out" in text and "magnesium" in text
    said = conjugp(folder, "info", "wine.conjugp", "--json").json
    assert "rows" not in said["extra"]["table"]["origin"]
    assert said["kind"] == "GPClassifier" and said["summary"]["n_classes"] == 3
    (folder / "cut.conjugp").write_bytes((folder / "wine.conjugp").read_bytes()[:-9])
    assert "cut.conjugp" in fails(folder, "info", "cut.conjugp", code=3)


def test_a_model_that_was_not_made_here(folder):
    load(folder / "wine.conjugp").save(folder / "plain.conjugp")
    assert conjugp(folder, "info", "plain.conjugp").code == 0
    outputs = [
        conjugp(folder, "predict", model, "wine.csv", "-o", "-").out
        for model in ("wine.conjugp", "plain.conjugp")
    ]
    assert outputs[0] == outputs[1] and outputs[0].count("\n") == 179
    said = fails(folder, "evaluate", "plain.conjugp", "wine.csv", code=3)
    assert "not made by `conjugp fit`" in said and "which column is the target" in said


@pytest.mark.parametrize(
    "change",
    [
        {"seed": -1},
        {"seed": "0"},
        {"test_size": 7},
        {"command": None},
        {"scores": 3},
        {"rows": "x"},
    ],
)
def test_a_forged_origin_is_refused(folder, change):
    clf = load_model(folder / "wine.conjugp").clf
    extra = saving.read_info(folder / "wine.conjugp")["extra"]
    extra["table"]["origin"] |= change
    saving.save(clf, folder / "forged.conjugp", extra=extra)
    said = fails(folder, "evaluate", "forged.conjugp", "wine.csv", code=3)
    assert "training rows is damaged" in said
    assert fails(folder, "info", "forged.conjugp", code=3) == said


def test_an_ignored_column_may_be_kept(tmp_path, wine):
    lines = (wine / "wine.csv").read_text().splitlines()
    numbered = [f"{i},{line}" for i, line in enumerate(lines)]
    (tmp_path / "t.csv").write_text("\n".join(["id" + numbered[0][1:], *numbered[1:]]))
    options = ("--target", "label", "--ignore", "id", "--max-epochs", 2, "-o", "m.conjugp")
    assert conjugp(tmp_path, "fit", "t.csv", *options).code == 0
    result = conjugp(tmp_path, "predict", "m.conjugp", "t.csv", "--keep", "id", "-o", "-")
    assert [row["id"] for row in read_rows(result.out)] == [str(i) for i in range(1, 179)]


def test_labels_that_are_true_or_false(tmp_path):
    x = np.linspace(-1, 1, 40)
    table = pa.table({"x": x, "y": (x > 0.1) ^ (np.arange(40) % 13 == 0)})
    parquet.write_table(table, tmp_path / "t.parquet")
    result = conjugp(tmp_path, "fit", "t.parquet", "--target", "y", "--test-size", 0, "--json")
    assert result.json["classes"] == [False, True] and result.json["scores"] is None
    conjugp(tmp_path, "predict", "model.conjugp", "t.parquet", "-o", "p.parquet")
    written = parquet.read_table(tmp_path / "p.parquet")
    assert written.schema.field("prediction").type == pa.bool_()
    assert conjugp(tmp_path, "evaluate", "model.conjugp", "t.parquet", "--json").json["trained_on"]


def test_labels_that_spreadsheets_would_run(tmp_path):
    labels, cities = ("=1+1", "-none", "@x", "-1"), ("+up", "-2,5", "down")
    rows = [(i % 4 + i / 100, cities[i % 3], labels[i % 4]) for i in range(80)]
    write_csv(tmp_path / "t.csv", ["far", "city", "=l"], rows)
    options = ("--target", "=l", "--categorical", "onehot", "--max-epochs", 1)
    assert conjugp(tmp_path, "fit", "t.csv", *options, "-o", "t.conjugp").code == 0
    keep = [part for name in ("far", "city", "=l") for part in ("--keep", name)]
    said = conjugp(tmp_path, "predict", "t.conjugp", "t.csv", "-o", "p.csv", *keep, "--top-k", 2)
    assert said.code == 0
    with (tmp_path / "p.csv").open(newline="") as file:
        header, *written = list(csv.reader(file))
    assert header[:3] == ["far", "city", "'=l"]
    texts = [[row[i] for row in written] for i in (1, 2, header.index("label_2"))]
    assert set(texts[0]) == {"'+up", "-2,5", "down"}
    assert set(texts[1]) == {"'=1+1", "'-none", "'@x", "-1"} >= set(texts[2])
    # The tool reads its own file as what it was.
    first, again = (
        conjugp(tmp_path, "evaluate", "t.conjugp", table, "--json").json
        for table in ("t.csv", "p.csv")
    )
    assert first == again and {c["label"] for c in again["classes"]} == set(labels)


def test_a_device_is_not_replaced(folder, no_fit):
    said = fails(folder, "fit", "wine.csv", "--target", "label", "-o", "/dev/null")
    assert "device" in said and not commands.Path("/dev/null").is_file()


def test_export_refuses(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    said = fails(folder, "export", "wine.conjugp", "x.onnx", code=4)
    assert said == 'ONNX files need onnx: pip install "conjugp[onnx]"'
    assert "must end in .onnx" in fails(folder, "export", "wine.conjugp", "x.pb")
    assert "cut" in fails(folder, "export", "cut.conjugp", "x.onnx", code=3)
    assert not (folder / "x.onnx").exists()


def test_commands_start_quickly_enough_and_json_is_one_line(folder):
    began = time.perf_counter()
    result = conjugp(folder, "info", "wine.conjugp", "--json")
    assert time.perf_counter() - began < 2 and result.out.count("\n") == 1
    assert json.loads(result.out)["file"].endswith("wine.conjugp")
    assert export.app is cli.app
