"""Rows in memory: what is held out, and what stands for all of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from conjugp._rows import dataset as data_module
from conjugp._rows import hold_out
from conjugp._rows.dataset import Data, sample_size
from problems import labelled

class_counts = st.lists(st.integers(0, 40), min_size=2, max_size=8).filter(lambda c: sum(c) > 0)
scans = st.sampled_from([1, 3, 50, 2**20])


@given(class_counts, st.floats(0.01, 0.5), st.integers(0, 99), scans)
def test_hold_out_takes_the_same_share_of_every_class(counts, share, seed, scan):
    data = labelled(counts, seed)
    here = Data(data.X.clone(), data.y.clone(), data.weight.clone(), data.n_classes)
    before = data_module._SCAN, data_module._MOVED
    data_module._SCAN = data_module._MOVED = scan
    try:
        train, held, ordered = here.hold_out(share)
    finally:
        data_module._SCAN, data_module._MOVED = before
    for c, count in enumerate(counts):
        theirs = data.X[data.y == c]
        n = int(count * min(share, 5000 / sum(counts)))
        # The last of them, in order.
        assert torch.equal(held.X[held.y == c], theirs[count - n :])
        assert torch.equal(train.X[train.y == c], theirs[: count - n])
        assert count == 0 or count > n  # the rarest class is still trained on
    # The same rows with the same labels and weights, in another order.
    at = ordered.X[:, 0].long()
    assert sorted(at.tolist()) == list(range(sum(counts)))
    assert torch.equal(ordered.y, data.y[at]) and torch.equal(ordered.weight, data.weight[at])
    assert torch.equal(ordered.X, torch.cat([train.X, held.X]))


def test_many_small_classes_give_a_row_each():
    """A share of less than a row is none, but a fit needs rows to calibrate with."""
    held = labelled([30] * 200 + [2] * 50).hold_out(0.02)[1]
    assert held.n == int(0.02 * 6100)
    per_class = torch.bincount(held.y, minlength=250)
    assert per_class.max() == 1 and not per_class[200:].any()


def test_hold_out_has_an_upper_limit(monkeypatch):
    monkeypatch.setattr(hold_out, "MOST_HELD", 100)
    assert 95 <= labelled([400, 600]).hold_out(0.5)[1].n <= 100


@given(st.integers(1, 60), st.integers(0, 99), scans)
def test_a_sample_has_rows_of_every_rare_class(n, seed, scan):
    data = labelled([200, 30, 3, 0, 1], seed)
    before = data_module._SCAN, data_module.SAMPLE_ROWS
    data_module._SCAN, data_module.SAMPLE_ROWS = scan, n
    try:
        sample = data.sample()
        assert sample_size(data.n, 1) == n
        assert (sample.X[n:, 0].diff() > 0).all()  # in their order
    finally:
        data_module._SCAN, data_module.SAMPLE_ROWS = before
    assert torch.equal(sample.X[:n], data.X[:n])
    for c, count in enumerate([200, 30, 3, 0, 1]):
        theirs = data.X[data.y == c]
        first = int((data.y[:n] == c).sum())
        wanted = max(first, min(count, 16))
        assert torch.equal(sample.X[sample.y == c], theirs[:wanted])
    at = sample.X[:, 0].long()
    assert torch.equal(sample.y, data.y[at]) and torch.equal(sample.weight, data.weight[at])


def test_totals():
    data = labelled([3, 0, 2])
    assert data.n == 5 and data.counts.tolist() == [3, 0, 2]
    assert data.total == float(data.weight.sum())
    expected = [float(data.weight[data.y == c].sum()) for c in range(3)]
    assert np.allclose(data.mass, expected, rtol=1e-15)
    assert torch.equal(data.shifted(torch.tensor([2.0])).X, data.X + 2)
