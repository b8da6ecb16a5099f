"""Rows on disk are those in memory, in the same order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conjugp._inputs.inputs import Scaling
from conjugp._rows import dataset, on_disk
from conjugp._rows.canonical import Rows, canonical
from conjugp._rows.dataset import Data
from conjugp._rows.on_disk import OnDisk, Spool, Store


def stored(rows: Rows, n_classes: int) -> Store:
    s = Spool(rows.n_features, rows.X.dtype, None)
    for i in range(0, rows.n, 7):
        s.add(rows.X[i : i + 7], rows.y[i : i + 7], rows.weight[i : i + 7])
    store = s.finish(np.arange(n_classes), np.ones(n_classes))
    s.close()
    return store


@settings(max_examples=15)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from("fd"))
def test_the_order_is_that_of_rows_in_memory(n, D, seed, kind):
    rng = np.random.default_rng(seed)
    A = rng.integers(0, 3, (n, D)).astype(kind)
    rows = Rows(A, rng.integers(0, 3, n), rng.integers(0, 3, n).astype(float))
    before, on_disk.SORTED_BYTES = on_disk.SORTED_BYTES, 400
    try:
        store = stored(rows, 3)
    finally:
        on_disk.SORTED_BYTES = before
    pairs = zip(store.read(0, store.n)[:3], canonical(*rows[:3])[:3], strict=True)
    for found, expected in pairs:
        assert np.array_equal(found, expected) and found.dtype == expected.dtype


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(0.01, 0.5))
def test_rows_on_disk_are_those_in_memory(seed, share):
    rng = np.random.default_rng(seed)
    rows = canonical(rng.standard_normal((50, 2)), rng.integers(0, 3, 50), rng.random(50) + 0.5)
    scaling = Scaling(np.array([1.0, -2.0]), np.array([0.5, 3.0]))
    cpu = torch.device("cpu")
    here = Data(
        scaling.apply(rows.X, torch.float64, cpu),
        torch.tensor(rows.y),
        torch.tensor(rows.weight),
        3,
    )
    disk = OnDisk(stored(rows, 3), scaling, 3, torch.empty(0, 2, dtype=torch.float64))

    def alike(a: Data, b: Data) -> None:
        for x, z in zip(a, b, strict=True):
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(z))

    other = Data(here.X.clone(), here.y.clone(), here.weight.clone(), 3)
    pairs = zip([disk, *disk.hold_out(share)], [here, *other.hold_out(share)], strict=True)
    for a, b in pairs:
        assert a.n == b.n and torch.equal(a.counts, b.counts)
        assert a.total == pytest.approx(b.total, rel=1e-12)
        assert torch.allclose(a.mass, b.mass, rtol=1e-12)
        i, j = sorted(rng.integers(0, a.n + 1, 2).tolist()) if a.n else (0, 0)
        a.expect(i, j)
        alike(a.rows(i, j), b.rows(i, j))
        alike(a.rows(0, None), b.rows(0, None))
        for x, z in zip(a.labels(i, j), b.labels(i, j), strict=True):
            assert torch.equal(x, z)
        index = torch.tensor(rng.integers(0, a.n, 5)) if a.n else torch.empty(0, dtype=torch.long)
        alike(a.take(index), b.take(index))
        alike(a.head(4), b.head(4))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dataset, "SAMPLE_ROWS", 10)
            patch.setattr("conjugp._rows.dataset._SCAN", 7)
            alike(a.sample(), b.sample())
        alike(a.shifted(torch.ones(2).double()).rows(i, j), b.shifted(torch.ones(2)).rows(i, j))


def test_what_tells_rows_from_others_is_the_same_wherever_they_are():
    rng = np.random.default_rng(0)
    rows = Rows(rng.standard_normal((60, 2)), rng.integers(0, 3, 60), rng.random(60) + 0.5)
    digests = stored(rows, 3).digests
    assert digests == canonical(*rows[:3]).digests
    assert set(digests) == {"X", "y", "weight"}
    other = rows._replace(weight=np.roll(rows.weight, 1))
    assert {name for name, d in stored(other, 3).digests.items() if d != digests[name]} == {
        "weight"
    }
