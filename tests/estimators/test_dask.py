"""A real Dask cluster, scheduler and workers as processes: from Parquet to probabilities."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pandas as pd
import pytest
from dask import dataframe as dd

import conjugp.dask
from conjugp import FitOptions, GPClassifier

pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:.*large graph.*"),
]
CLASSIFIER = GPClassifier(n_inducing=20, max_epochs=5, random_state=0)


@pytest.fixture(scope="module")
def client():
    from distributed import Client, LocalCluster

    os.environ["OMP_NUM_THREADS"] = "1"
    settings: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(processes=True, **settings) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 160)
    X = rng.normal(size=(160, 2)) + 3 * np.array([[0, 0], [1, 0], [0, 1]])[y]
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "kind": np.array(["u", "v", "w"])[y]})


def test_from_parquet_to_probabilities(client, frame, tmp_path):
    for i in range(4):
        frame.iloc[i::4].to_parquet(tmp_path / f"part{i}.parquet")
    rows = dd.read_parquet(tmp_path)
    clf = conjugp.dask.fit(client, rows, target="kind", classifier=CLASSIFIER, timeout=60)
    assert type(clf) is GPClassifier and not hasattr(CLASSIFIER, "classes_")
    alone = GPClassifier(**CLASSIFIER.get_params(deep=False)).fit(frame[["a", "b"]], frame["kind"])
    expected = alone.predict_proba(frame[["a", "b"]])
    np.testing.assert_allclose(clf.predict_proba(frame[["a", "b"]]), expected, atol=1e-6)
    assert list(clf.feature_names_in_) == ["a", "b"]
    proba = conjugp.dask.predict_proba(client, clf, rows[["a", "b"]])
    assert list(proba.columns) == ["u", "v", "w"]
    found = proba.compute()
    np.testing.assert_allclose(found.sort_index().to_numpy(), expected, atol=1e-6)


def test_arrays_and_weights(client, frame):
    import dask.array as da

    X, weight = frame[["a", "b"]].to_numpy(), 1.0 + np.arange(160) % 2
    y = (frame["kind"] == "u").to_numpy()
    rows = da.from_array(X, chunks=(50, 1))
    labels, weights = da.from_array(y, chunks=50), da.from_array(weight, chunks=50)
    clf = conjugp.dask.fit(client, rows, labels, sample_weight=weights, classifier=CLASSIFIER)
    alone = GPClassifier(**CLASSIFIER.get_params(deep=False)).fit(X, y, weight)
    proba = conjugp.dask.predict_proba(client, clf, rows)
    assert proba.shape == (160, 2)
    np.testing.assert_allclose(proba.compute(), alone.predict_proba(X), atol=1e-6)


def test_weights_of_another_scale(client, frame):
    rows = dd.from_pandas(frame.assign(w=0.01), npartitions=3)
    call = {"target": "kind", "classifier": CLASSIFIER, "timeout": 60}
    with pytest.warns(UserWarning, match=r"weight 2 counts .* multiply them by 100, so that"):
        conjugp.dask.fit(client, rows, sample_weight="w", **call)


def test_text_and_gaps(client, frame):
    """The first worker says what columns become, whatever levels the others have."""
    odd = frame.assign(place=np.where(frame["kind"] == "u", "here", "there"))
    odd.loc[::9, "a"] = np.nan
    odd.loc[159, "place"] = "nowhere"
    rows = dd.from_pandas(odd, npartitions=4)
    clf = conjugp.dask.fit(client, rows, target="kind", classifier=CLASSIFIER, timeout=60)
    X = odd.drop(columns="kind")
    assert list(clf.feature_names_in_) == ["a", "b", "place"] and clf.n_features_in_ == 3
    assert clf.columns_ is not None and clf.columns_["place"].startswith("a category of 2 levels")
    assert clf.score(X, odd["kind"]) > 0.9


def test_errors_come_back(client, frame):
    bad = frame.copy()
    bad.loc[7, "a"] = np.inf
    rows = dd.from_pandas(bad, npartitions=4)
    with pytest.raises(ValueError, match=r"rank \d: .*inf.*row \d+"):
        conjugp.dask.fit(client, rows, target="kind", classifier=CLASSIFIER)
    with pytest.raises(ValueError, match="target='kin' is not a column"):
        conjugp.dask.fit(client, rows, target="kin")
    with pytest.raises(ValueError, match="give the labels as y"):
        conjugp.dask.fit(client, rows)
    with pytest.raises(TypeError, match="Dask DataFrame or Array; got DataFrame"):
        conjugp.dask.fit(client, frame, target="kind")


class KillOnce:
    """Ends the process of one rank, the first time that a fit reports."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, progress: Any) -> None:
        from torch import distributed

        grouped = distributed.is_initialized()
        if grouped and distributed.get_rank() == 1 and not os.path.exists(self.path):
            open(self.path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_worker(client, frame, tmp_path):
    """An error that names it, in seconds; with retries and a checkpoint the fit goes on."""
    rows = dd.from_pandas(frame, npartitions=4)

    def killed(name: str) -> GPClassifier:
        options = FitOptions(callback=KillOnce(str(tmp_path / name)), checkpoint_every=0.0)
        return GPClassifier(**{**CLASSIFIER.get_params(deep=False), "options": options})

    began = time.monotonic()
    with pytest.raises(conjugp.dask.LostWorkerError, match=r"tcp://.* was lost during the fit"):
        conjugp.dask.fit(client, rows, target="kind", classifier=killed("first"), timeout=60)
    assert time.monotonic() - began < 60
    client.wait_for_workers(2, timeout=60)
    path = tmp_path / "fit.checkpoint"
    clf = conjugp.dask.fit(
        client, rows, target="kind", classifier=killed("second"), checkpoint=path, retries=1
    )
    alone = GPClassifier(**CLASSIFIER.get_params(deep=False)).fit(frame[["a", "b"]], frame["kind"])
    expected = alone.predict_proba(frame[["a", "b"]])
    np.testing.assert_allclose(clf.predict_proba(frame[["a", "b"]]), expected, atol=1e-6)
