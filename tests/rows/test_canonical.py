"""The canonical form of weighted rows depends on the weighted data alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conjugp._rows.canonical import Rows, canonical, row_hash


def assert_same(a: Rows, b: Rows, rtol: float = 0.0) -> None:
    np.testing.assert_array_equal(a.X, b.X)
    np.testing.assert_array_equal(a.y, b.y)
    np.testing.assert_allclose(a.weight, b.weight, rtol=rtol, atol=0)


def as_dict(X, y, weight) -> dict[tuple, float]:
    """Weight of every distinct row, found the slow way."""
    out: dict[tuple, float] = {}
    for x, label, w in zip(X.tolist(), y.tolist(), weight.tolist(), strict=True):
        if w > 0:
            key = (*(v + 0.0 for v in x), label)
            out[key] = out.get(key, 0.0) + w
    return out


@st.composite
def rows(draw):
    """Few distinct values, so that equal rows, and equal rows with unequal labels, are common."""
    n, d = draw(st.integers(1, 25)), draw(st.integers(1, 3))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e300, -1e-300])
    X = np.array(draw(st.lists(st.lists(value, min_size=d, max_size=d), min_size=n, max_size=n)))
    y = np.array(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    weight = np.array(draw(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=n, max_size=n)), float)
    weight[draw(st.integers(0, n - 1))] = 1.0
    return X, y, weight


@given(rows(), st.randoms(use_true_random=False))
def test_order_does_not_matter(case, random):
    X, y, weight = case
    order = list(range(len(X)))
    random.shuffle(order)
    assert_same(canonical(X, y, weight), canonical(X[order], y[order], weight[order]))


@given(rows())
def test_a_weight_is_a_number_of_copies(case):
    X, y, weight = case
    copies = weight.astype(int)
    repeated = canonical(np.repeat(X, copies, 0), np.repeat(y, copies), None)
    assert_same(canonical(X, y, weight), repeated)


@given(rows())
def test_distinct_rows_with_their_total_weights(case):
    X, y, weight = case
    found = canonical(X, y, weight)
    assert as_dict(*found[:3]) == as_dict(X, y, weight)
    assert len(found.X) == len(as_dict(X, y, weight))
    assert (found.weight > 0).all() and found.y.dtype == np.int64


@given(rows())
def test_canonical_rows_are_canonical(case):
    once = canonical(*case)
    assert_same(canonical(*once[:3]), once)


def test_signs_of_zero_do_not_matter():
    X = np.array([[0.0, 1.0], [-0.0, 1.0], [0.0, -1.0]])
    found = canonical(X, np.zeros(3, int), None)
    assert len(found.X) == 2 and sorted(found.weight) == [1.0, 2.0]


def test_equal_inputs_with_unequal_labels_stay_apart():
    found = canonical(np.zeros((4, 2)), np.array([0, 1, 0, 1]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert dict(zip(found.y.tolist(), found.weight.tolist(), strict=True)) == {0: 4.0, 1: 6.0}


def test_rows_without_weight_leave_no_trace(rng):
    X, y = rng.standard_normal((30, 3)), rng.integers(0, 3, 30)
    weight = np.where(np.arange(30) % 3 == 0, 0.0, 1.5)
    kept = weight > 0
    assert_same(canonical(X, y, weight), canonical(X[kept], y[kept], weight[kept]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_first_rows_are_a_random_sample(rng, dtype):
    """Sorted input comes out shuffled: the mean of the first tenth is that of all."""
    X = np.sort(rng.standard_normal((5000, 2)), axis=0).astype(dtype)
    y = (X[:, 0] > 0).astype(int)
    found = canonical(X, y, None)
    assert found.X.dtype == dtype and len(found.X) == 5000
    z = found.X[:500].mean(0) * np.sqrt(500 / (1 - 0.1)) / X.std(0)
    z -= X.mean(0) * np.sqrt(500 / (1 - 0.1)) / X.std(0)
    assert (np.abs(z) < 4).all()
    # Neighbours in the order are unrelated too.
    assert abs(np.corrcoef(found.X[1:, 0], found.X[:-1, 0])[0, 1]) < 4 / np.sqrt(5000)


def test_integers_and_strided_input(rng):
    X = rng.integers(0, 3, (40, 6))[:, ::2]
    y = rng.integers(0, 2, 40)
    assert as_dict(*canonical(X, y, None)[:3]) == as_dict(X, y, np.ones(40))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_hash_of_a_row_is_its_own(monkeypatch, rng, dtype, width):
    """Whatever rows come with it, in blocks of any size: odd widths leave half a word empty."""
    X, y = rng.standard_normal((300, width)).astype(dtype), rng.integers(0, 3, 300)
    one = np.concatenate([row_hash(X[i : i + 1], y[i : i + 1]) for i in range(300)])
    assert len(np.unique(one)) == 300
    for size in (1, 7, 1 << 15):
        monkeypatch.setattr("conjugp._rows.canonical._HASHED", size)
        np.testing.assert_array_equal(row_hash(X, y), one)


def test_a_hash_that_collides_does_not_merge(monkeypatch, rng):
    monkeypatch.setattr("conjugp._rows.canonical.row_hash", lambda X: np.zeros(len(X), np.uint64))
    X, y = rng.standard_normal((10, 2)), np.zeros(10, int)
    assert len(canonical(X, y, None).X) == 10
    assert len(canonical(np.zeros((2, 2)), np.array([0, 1]), None).X) == 2
