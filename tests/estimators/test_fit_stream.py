"""Rows that come in batches and go to disk: the same model as from memory, whatever their order."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from conjugp import FitOptions, GPClassifier
from conjugp._estimators import reading
from conjugp._rows import on_disk
from conjugp._rows.on_disk import OnDisk
from faces import decoupled, minibatch, toy

X, CODES = toy(120)
Y = np.array(["birch", "ash", "cedar"])[CODES]
quiet = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
# Models of frames are compared on arrays.
unnamed = pytest.mark.filterwarnings("ignore:X does not have valid feature names")
pytestmark = [quiet, unnamed]


@pytest.fixture
def from_disk(monkeypatch):
    """Nothing fits in memory, and buckets are divided again and again."""
    monkeypatch.setattr(reading, "MEMORY_BYTES", 0)
    monkeypatch.setattr(on_disk, "SORTED_BYTES", 200)
    monkeypatch.setattr(on_disk, "_KEPT_BYTES", 1000)


def batches(*columns: Any, size: int = 17) -> list[tuple[Any, ...]]:
    n = len(columns[0])
    return [tuple(c[i : i + size] for c in columns) for i in range(0, n, size)]


def same(a: GPClassifier, b: GPClassifier, rtol: float = 0.0) -> None:
    """To the last bit, unless weights add up to something else in another order."""
    assert a.classes_.tolist() == b.classes_.tolist()
    np.testing.assert_allclose(
        [a.elbo_, a.temperature_], [b.elbo_, b.temperature_], rtol=rtol, atol=0
    )
    np.testing.assert_allclose(
        a.predict_proba(rows_for(a)), b.predict_proba(rows_for(b)), rtol=rtol, atol=0
    )


def rows_for(clf: GPClassifier) -> Any:
    """X as it was fitted: with names, if there were any."""
    names = getattr(clf, "feature_names_in_", None)
    return X if names is None else pd.DataFrame(X, columns=names)


# --- the same fit ---------------------------------------------------------------------------------


FITS = {
    "minibatch": minibatch(max_epochs=2),
    "full batch": minibatch(batch_size=None, max_epochs=4),
    "class batch": minibatch(max_epochs=2, class_batch=1, temperature=None),
    "decoupled": decoupled(max_epochs=2),
    "by elbo": decoupled(max_epochs=2, options=FitOptions(mean_training="elbo", n_covariance=8)),
    "ep": minibatch(max_epochs=2, likelihood="heaviside", inference="ep"),
}


@pytest.mark.parametrize("name", FITS)
def test_the_same_as_fit(name, from_disk, monkeypatch):
    def clf() -> GPClassifier:
        return GPClassifier(**FITS[name].get_params(deep=False))

    monkeypatch.setattr("conjugp._rows.dataset._SCAN", 25)
    # Every row is in the sample, the rare ones of all classes last.
    monkeypatch.setattr("conjugp._rows.dataset.SAMPLE_ROWS", 120)
    by_class = np.argsort(Y)
    weight = np.linspace(0.5, 2, len(Y))
    expected = clf().fit(X, Y, weight)
    found = clf().fit_stream(batches(X[by_class], Y[by_class], weight[by_class]))
    same(found, expected, 1e-8)


def test_in_memory_if_they_are_few(monkeypatch):
    monkeypatch.setattr("conjugp._rows.on_disk.OnDisk", lambda *_: pytest.fail("on disk"))
    expected = minibatch(max_epochs=2).fit(X, Y)
    same(minibatch(max_epochs=2).fit_stream(iter(batches(X, Y))), expected)


def test_class_weights_and_rows_without_weight(from_disk):
    weight = np.where(np.arange(len(Y)) % 5, 1.0, 0.0)

    def clf() -> GPClassifier:
        return minibatch(max_epochs=1, class_weight="balanced")

    same(clf().fit_stream(batches(X, Y, weight)), clf().fit(X, Y, weight), 1e-8)


def test_equal_rows_are_merged(from_disk):
    twice = np.concatenate([X, X[:40]]), np.concatenate([Y, Y[:40]])
    weight = np.where(np.arange(len(Y)) < 40, 2.0, 1.0)
    same(
        minibatch(max_epochs=1).fit_stream(batches(*twice)),
        minibatch(max_epochs=1).fit(X, Y, weight),
    )


def test_a_memmap_stays_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("conjugp._estimators.classifier.MEMORY_BYTES", 1000)
    monkeypatch.setattr(reading, "MEMORY_BYTES", 0)
    monkeypatch.setattr("conjugp._rows.sources._BATCH", 50)
    seen = []
    monkeypatch.setattr("conjugp._rows.on_disk.OnDisk", lambda *a: seen.append(1) or OnDisk(*a))
    mapped = np.memmap(tmp_path / "X", X.dtype, "w+", shape=X.shape)
    mapped[:] = X
    same(minibatch(max_epochs=1).fit(mapped, Y), minibatch(max_epochs=1).fit(X, Y))
    assert seen
    mapped[70, 1] = np.nan
    with pytest.raises(ValueError, match=r"rows 50 to 99: .*NaN"):
        minibatch().fit(mapped, Y)
    with pytest.raises(ValueError, match="inconsistent"):
        minibatch().fit(mapped, Y[:-1])


# --- sources --------------------------------------------------------------------------------------


class Numbered(Dataset):
    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return X[i], int(CODES[i])


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return ((X[i], int(CODES[i])) for i in range(len(Y)))


def test_torch_sources():
    expected = minibatch(max_epochs=1).fit(X, CODES)
    tensors = TensorDataset(torch.tensor(X), torch.tensor(CODES))
    for source in (tensors, Numbered(), Endless(), DataLoader(tensors, 16, shuffle=True)):
        same(minibatch(max_epochs=1).fit_stream(source), expected)


def table(**changes: Any) -> pa.Table:
    columns = {"a": X[:, 0], "b": X[:, 1], "kind": Y, "w": np.ones(len(Y))}
    return pa.table({**columns, **changes})


def test_parquet(tmp_path, from_disk):
    expected = minibatch(max_epochs=1).fit(pd.DataFrame({"a": X[:, 0], "b": X[:, 1]}), Y)
    one = tmp_path / "one.parquet"
    pq.write_table(table(kind=pa.array(Y).dictionary_encode()), one, row_group_size=30)
    found = minibatch(max_epochs=1).fit_stream(one, target="kind", sample_weight="w")
    same(found, expected)
    assert found.feature_names_in_.tolist() == ["a", "b"]
    folder = tmp_path / "several"
    folder.mkdir()
    for i in range(3):
        pq.write_table(table().slice(40 * i, 40), folder / f"{i}.parquet")
    same(
        minibatch(max_epochs=1).fit_stream(str(folder), target="kind", sample_weight="w"), expected
    )


@pytest.mark.filterwarnings("error:X does not have valid feature names:UserWarning")
def test_frames_with_a_target(from_disk):
    frame = table().to_pandas()
    found = minibatch(max_epochs=1).fit_stream(
        [frame[:50], frame[50:]], target="kind", sample_weight="w"
    )
    same(found, minibatch(max_epochs=1).fit(frame[["a", "b"]], Y))
    assert found.feature_names_in_.tolist() == ["a", "b"]


@pytest.mark.parametrize(
    "kind", [pl.DataFrame, lambda f: pa.Table.from_pandas(f, preserve_index=False)]
)
def test_frames_that_are_not_pandas(from_disk, kind):
    frame = table(w=np.linspace(0.5, 2, len(Y))).to_pandas()
    parts = [kind(frame[:50]), kind(frame[50:])]
    found = minibatch(max_epochs=1).fit_stream(parts, target="kind", sample_weight="w")
    same(found, minibatch(max_epochs=1).fit(frame[["a", "b"]], Y, frame["w"]), 1e-8)
    assert found.feature_names_in_.tolist() == ["a", "b"]
    with pytest.raises(
        ValueError, match=r"batch 1: there is no column 'kin'; .*\['a', 'b', 'kind'"
    ):
        minibatch().fit_stream(parts, target="kin")


def test_parquet_that_cannot_be_used(tmp_path):
    path = tmp_path / "rows.parquet"

    def refused(match: str, error: type[Exception] = ValueError, **how: Any) -> None:
        with pytest.raises(error, match=match):
            minibatch().fit_stream(path, **{"target": "kind", **how})

    refused("there is no file", FileNotFoundError)
    path.write_bytes(b"no table")
    refused("cannot be read as Parquet")
    pq.write_table(table(b=[[i] for i in range(120)]), path)
    refused("the column 'b' holds a list in row 1", TypeError)
    pq.write_table(table(kind=pa.array([None, *Y[1:]])), path)
    refused("column 'kind' has missing values")
    refused("no column 'label'; it has", target="label")
    pq.write_table(table(), path)
    other = tmp_path / "several"
    other.mkdir()
    pq.write_table(table(), other / "1.parquet")
    pq.write_table(table().drop(["b"]), other / "2.parquet")
    with pytest.raises(ValueError, match="cannot be read"):
        minibatch().fit_stream(other, target="kind")
    refused("target must name", target=None)


def test_sources_that_cannot_be_used():
    def refused(match: str, source: Any, error: type[Exception] = ValueError, **how: Any) -> None:
        clf = minibatch(max_epochs=1)
        with pytest.raises(error, match=match):
            clf.fit_stream(source, **how)
        assert not hasattr(clf, "n_features_in_") and not hasattr(clf, "classes_")

    refused("for rows in memory use fit", X, TypeError)
    refused("for rows in memory use fit", table().to_pandas(), TypeError)
    refused("source must be .*; got int", 3, TypeError)
    refused("source holds no rows", [])
    refused("source holds no rows", [(X[:0], Y[:0])])
    refused("batch 2: a batch must be .*; got float", [(X, Y), 1.0])
    bad = X.copy()
    bad[7, 1] = np.inf
    refused("source, batch 2: .*infinity", [(X, Y), (bad, Y)])
    refused("source, batch 2: .*inconsistent", [(X, Y), (X, Y[:-1])])
    refused("source, batch 2: X has 1 features", [(X, Y), (X[:, :1], Y)])
    refused("source, batch 2: y must hold labels of one kind", [(X, Y), (X, CODES)])
    refused("source, batch 1: y", [(X, X[:, 0])])
    refused("got one class", [(X, np.zeros(120, int))])
    refused("batch 1: y holds labels .*cedar", [(X, Y)], classes=["ash", "birch"])
    refused("classes must hold at least 2", [(X, Y)], classes=["ash"])
    refused("batch 1: with target='kind' a batch must be a DataFrame", [(X, Y)], target="kind")
    refused("batch 1: there is no column 'kin'", [table().to_pandas()], target="kin")
    refused("sample_weight names a column", [(X, Y)], sample_weight="w")
    refused("sample_weight", [(X, Y, -np.ones(120))])


def test_classes_that_the_source_does_not_have(from_disk):
    names = ["ash", "birch", "cedar", "oak"]
    clf = minibatch(max_epochs=1).fit_stream(batches(X, Y), classes=names)
    assert clf.classes_.tolist() == names
    assert clf.predict_proba(X).shape == (120, 4)
    assert "oak" not in clf.predict(X)


# --- nothing lost, nothing left -------------------------------------------------------------------


class Stopped(Exception):
    """Stands for the end of a process."""


def test_a_fit_that_was_stopped_goes_on(from_disk, tmp_path):
    path = tmp_path / "fit"
    expected = minibatch(max_epochs=4).fit(X, Y)

    def clf(stop: bool) -> GPClassifier:
        calls = []

        def callback(p: Any) -> None:
            calls.append(p)
            if stop and p.stage == "all rows":
                raise Stopped

        return minibatch(max_epochs=4, options=FitOptions(callback=callback, checkpoint_every=0.0))

    with pytest.raises(Stopped):
        clf(True).fit_stream(batches(X, Y), checkpoint=path)
    order = np.random.default_rng(0).permutation(len(Y))
    same(clf(False).fit_stream(batches(X[order], Y[order]), checkpoint=path), expected)
    with pytest.raises(ValueError, match="belongs to another fit: y differs"):
        clf(False).fit_stream(batches(X, np.roll(Y, 1)), checkpoint=path)


def test_ctrl_c(from_disk):
    def stop(p: Any) -> None:
        if p.stage == where:
            raise KeyboardInterrupt

    clf = minibatch(options=FitOptions(callback=stop))
    where = "reading"
    with pytest.raises(KeyboardInterrupt):
        clf.fit_stream(batches(X, Y))
    assert not hasattr(clf, "classes_")
    where = "fit"
    with pytest.raises(KeyboardInterrupt):
        clf.fit_stream(batches(X, Y))
    assert clf.predict_proba(X).shape == (120, 3)


def test_progress_of_reading(from_disk):
    seen = []
    options = FitOptions(callback=lambda p: seen.append((p.stage, p.value)))
    minibatch(max_epochs=1, options=options).fit_stream(batches(X, Y, size=50))
    assert seen[:3] == [("reading", 50), ("reading", 100), ("reading", 120)]


def test_a_full_disk(from_disk, monkeypatch):
    class Full:
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, "full")

        def close(self) -> None:
            pass

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    clf = minibatch()
    with pytest.raises(OSError, match=r"no space is left in .* options\.spool"):
        clf.fit_stream(batches(X, Y))
    assert not hasattr(clf, "classes_")


def test_the_folder(from_disk, tmp_path, monkeypatch):
    folders = set()
    make = tempfile.TemporaryFile
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda dir, **how: folders.add(dir) or make(dir=dir, **how)
    )
    options = FitOptions(spool=tmp_path)
    minibatch(max_epochs=1, options=options).fit_stream(batches(X, Y))
    assert folders == {str(tmp_path)} and not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"options\.spool must be a folder"):
        minibatch(options=FitOptions(spool=tmp_path / "no")).fit(X, Y)


# --- memory --------------------------------------------------------------------------------------


GROWTH = """
import resource, sys
import numpy as np, torch
from conjugp import GPClassifier
from conjugp._estimators import reading
from conjugp._rows import dataset, on_disk
torch.set_num_threads(1)
reading.MEMORY_BYTES, dataset.SAMPLE_ROWS, on_disk._KEPT_BYTES = 0, 10_000, 2**20
def rows(n):
    rng = np.random.default_rng(0)
    for _ in range(n):
        X = rng.standard_normal((4096, 60), np.float32)
        yield X, (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)
def fit(n):
    clf = GPClassifier(covariance="full", n_inducing=5, max_epochs=0.01, random_state=0)
    clf.fit_stream(rows(n))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
fit(2)
print(fit(8), fit(40))
"""


@pytest.mark.slow
def test_memory_does_not_grow():
    """Five times the rows, 30 MB more of them: the highest memory grows by less than 10 MB."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GROWTH], capture_output=True, text=True, check=True
    )
    first, second = map(int, run.stdout.split())
    assert second - first < 10
