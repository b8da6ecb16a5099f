"""The benchmark scripts import, say what data they miss, and left results as documented."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parents[1] / "bench"
ENTRIES = {
    "quality": {"n_train", "n_test", "n_features", "n_classes", "n_splits", "models", "splits"}
    | {"targets", "passed"},
    "peers": {"budget", "gpytorch_inputs", "inputs_tried", "same_size"},
    "small": {"seconds", "median", "ratio", "passed"},
    "gibbs": {"n_points", "n_classes", "speed"},
    "rivals": {"budget", "inputs", "peers", "conjugp", "contests"},
    "soak": {"seed", "passed", "seconds"},
    "throughput": {"n_inducing", "n_features", "n_classes"},
}
CONTEST = {"target_nll", "ratio", "passed", "gpytorch", "gpytorch_settings", "gpytorch_seconds"}
CONTEST |= {"conjugp", "conjugp_settings", "conjugp_seconds", "conjugp_nll"}


@pytest.fixture
def script(monkeypatch):
    """Imports a module of bench/ as its scripts do, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(BENCH))
    names = [path.stem for path in BENCH.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name",
    [
        "data",
        "record",
        "quality",
        "peers",
        "small",
        "gibbs",
        "rivals",
        "soak",
        "soak_ranks",
        "scaling",
        "throughput",
    ],
)
def test_scripts_import(script, name):
    assert script(name).__doc__


def test_missing_variable_is_named(script, monkeypatch):
    data = script("data")
    monkeypatch.delenv("CONJUGP_DATA", raising=False)
    with pytest.raises(data.MissingDataError, match=r"CONJUGP_DATA.*letter\.npz"):
        data.load("letter")


def test_missing_file_is_named(script, monkeypatch, tmp_path):
    data = script("data")
    monkeypatch.setenv("CONJUGP_DATA", str(tmp_path))
    with pytest.raises(data.MissingDataError, match=r"letter\.npz is missing: CONJUGP_DATA"):
        data.load("letter")


def test_unknown_sets_and_splits_are_refused(script):
    data = script("data")
    with pytest.raises(ValueError, match="unknown data set 'iris'; there are shuttle"):
        data.load("iris")
    with pytest.raises(ValueError, match="shuttle has splits 0 to 0; got 1"):
        data.load("shuttle", 1)


def test_splits_hold_every_row_once(script, monkeypatch, tmp_path):
    data = script("data")
    monkeypatch.setenv("CONJUGP_DATA", str(tmp_path))
    X = np.arange(50, dtype=np.int16).reshape(-1, 1)
    np.savez(tmp_path / "glass.npz", X=X, y=np.zeros(50, np.uint8))
    parts = {"X_train": X[:30], "X_test": X[30:], "y_train": X[:30, 0], "y_test": X[30:, 0]}
    np.savez(tmp_path / "satimage.npz", **parts)
    np.savez(tmp_path / "mnist.npz", **parts)
    first, second = data.load("glass", 0), data.load("glass", 1)
    assert len(first.X_train) == 40 and not np.array_equal(first.X_test, second.X_test)
    both = data.load("satimage", 4)
    assert np.array_equal(both.X_train[:, 0], both.y_train)
    for split in (first, second, both):
        rows = np.concatenate([split.X_train, split.X_test])
        assert np.array_equal(np.sort(rows, axis=0), X)
    assert np.array_equal(data.load("mnist").X_test, X[30:])


def test_results_are_kept_set_by_set(script, tmp_path):
    record = script("record")
    path = tmp_path / "new" / "results.json"
    record.keep(path, "b", {"nll": 0.12345678, "ratio": math.inf})
    record.keep(path, "a", {"curve": [{"nll": 1.0}]})
    record.keep(path, "b", {"nll": 0.5, "n": 3})
    kept = {"sets": {"a": {"curve": [{"nll": 1.0}]}, "b": {"nll": 0.5, "n": 3}}}
    assert json.loads(path.read_text()) == kept


def test_contest_takes_the_fastest_fit_that_is_as_good(script):
    peers = script("peers")
    curve = [{"seconds": s, "nll": x} for s, x in ((10.0, 0.9), (20.0, 0.5004), (30.0, 0.5))]
    peer = {"settings": {}, "curve": curve}
    fits = [
        {"settings": {"max_epochs": n}, "seconds": s, "nll": x}
        for n, s, x in ((1, 1.0, 0.51), (3, 4.0, 0.4), (2, 2.0, 0.5))
    ]
    found = peers.verdict(peers.best_nll(peer), peer, fits)
    assert found["target_nll"] == 0.5 and found["gpytorch_seconds"] == 20.0
    assert found["conjugp_settings"] == {"max_epochs": 2}
    assert found["ratio"] == 10.0 and found["passed"]
    missed = peers.verdict(0.3, peer, fits)
    assert missed["ratio"] is None and not missed["passed"]


def test_rivals_take_the_fastest_fit_that_is_as_good(script):
    rivals = script("rivals")
    peer = {"curve": [{"seconds": s, "nll": x} for s, x in ((5.0, 0.4), (9.0, 0.3))]}
    fits = [{"settings": {"max_epochs": n}, "seconds": 3.0 * n, "nll": 0.5 / n} for n in (1, 2, 3)]
    found = rivals.verdict(peer, fits)
    assert (found["peer_seconds"], found["conjugp_seconds"], found["ratio"]) == (9.0, 6.0, 1.5)
    assert found["passed"]
    slower = rivals.verdict(peer, [{**fits[0], "nll": 0.3, "seconds": 18.0}])
    assert slower["ratio"] == 0.5 and not slower["passed"]
    missed = rivals.verdict(peer, fits[:1])
    assert missed["ratio"] is None and not missed["passed"]


def test_missing_gpflow_is_seen(script, tmp_path):
    assert not script("rivals").has_gpflow(str(tmp_path / "python"))


def test_the_sampler_is_measured(script, monkeypatch):
    gibbs = script("gibbs")
    monkeypatch.setattr(gibbs, "N_SAMPLES", 30)
    monkeypatch.setattr(gibbs, "N_WARMUP", 5)
    monkeypatch.setattr(gibbs, "SPEED_SECONDS", 0.005)
    rng = np.random.default_rng(0)
    posterior = gibbs.standardised(rng.standard_normal((12, 2)), np.arange(12) % 3, 1.0)
    state = gibbs.first_state(posterior, np.random.SeedSequence(0))
    orders = gibbs.sizes(posterior, state, 4)
    assert len(orders) == 4 * 3 and max(orders) <= 12
    # Every point has a pseudo-observation in the class of its label at least.
    assert min(orders) >= 4
    assert gibbs.floor(posterior, orders) > 0
    monkeypatch.setattr(gibbs, "SPEED_REPEATS", 2)
    speed = gibbs.speed(posterior)
    assert speed["ratio"].keys() == speed["passed"].keys() == {"cholesky", "own_cholesky"}
    assert speed["median"]["sampler"] > 0 and 4 <= speed["mean_order"] <= 12
    mixing = gibbs.mixing(posterior, 1)
    assert mixing["ratio"].keys() == set(gibbs.ESS)
    assert all(np.isfinite(list(one.values())).all() for one in mixing["median"].values())


def test_throughput_is_measured(script):
    throughput = script("throughput")
    found = throughput.peak(3, 4, 2000, 20)
    assert found["result_mb"] == pytest.approx(2000 * 3 * 8 / 2**20)
    assert 0 <= found["grown_mb"] < throughput.MEMORY_LIMIT_MB
    X, y = throughput.data(60, 4, 3)
    clf = throughput.fitted(X, y, 20, "full")
    assert throughput.rows_in(clf.predict_proba, X) >= 60


def test_results_are_as_documented():
    for path in (BENCH / "results").glob("*.json"):
        for entry in json.loads(path.read_text())["sets"].values():
            assert {"date", "machine", "versions"} | ENTRIES[path.stem] <= entry.keys()
            assert {"cpu", "cores", "threads"} == entry["machine"].keys()
            assert {"python", "conjugp", "torch", "numpy"} <= entry["versions"].keys()
            for contest in entry.keys() & {"same_size", "own_best"}:
                assert CONTEST <= entry[contest].keys()
            if path.stem == "quality":
                assert entry["passed"].keys() == entry["targets"].keys()
                own = entry["models"]["GPClassifier"]
                assert {"error", "nll", "ece", "temperature", "fit_seconds"} <= own.keys()
