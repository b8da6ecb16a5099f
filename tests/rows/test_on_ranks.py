"""Rows dealt to ranks are the rows of one process, in the same order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conjugp._rows.canonical import Rows, canonical, row_hash
from conjugp._rows.dataset import Data
from conjugp._rows.group import ALONE, Group
from conjugp._rows.on_ranks import OnRanks, order_keys


class Threads(Group):
    """A group whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self.table, self.barrier = table, barrier

    def gather(self, value):
        self.table[self.rank] = value
        self.barrier.wait(10)
        found = list(self.table)
        self.barrier.wait(10)
        return found

    def sum(self, tensors):
        found = self.gather([t.clone() for t in tensors])
        for t, parts in zip(tensors, zip(*found, strict=True), strict=True):
            t.copy_(sum(parts))

    def same(self, value):
        return self.gather(value)[0]


def on_ranks(size: int, work):
    """work(group) on as many threads; the results in the order of ranks."""
    table, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        groups = [Threads(rank, size, table, barrier) for rank in range(size)]
        return list(pool.map(work, groups))


def dataset(rows: Rows, n_classes: int) -> Data:
    X, y, weight = (torch.as_tensor(column) for column in rows[:3])
    return Data(X, y, weight, n_classes)


def dealt(X, y, weight, which, n_classes):
    """The shard of a group's rank, as a data set."""

    def shard(group: Group) -> OnRanks:
        mine = which == group.rank
        rows = canonical(X[mine], y[mine], weight[mine])
        return OnRanks(dataset(rows, n_classes), order_keys(row_hash(rows.X)), group)

    return shard


def in_order(parts: list[Data]) -> list[tuple[float, ...]]:
    """Rows of several ranks as a sorted list."""
    found = []
    for part in parts:
        found += [(*x, y, w) for x, y, w in zip(*(c.tolist() for c in part[:3]), strict=True)]
    return sorted(found)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 120), st.integers(1, 40))
def test_stretches_are_those_of_one_process(seed, size, n, batch):
    rng = np.random.default_rng(seed)
    X, y, weight = rng.normal(size=(n, 2)), rng.integers(0, 3, n), rng.uniform(0.5, 2, n)
    which = rng.integers(0, size, n)  # some ranks may have nothing
    whole = dataset(canonical(X, y, weight), 3)
    shard = dealt(X, y, weight, which, 3)

    def work(group: Group):
        data = shard(group)
        assert (data.n, data.n_classes, data.total) == (n, 3, pytest.approx(whole.total))
        torch.testing.assert_close(data.mass, whole.mass)
        assert torch.equal(data.counts, whole.counts)
        head = data.head(batch)
        for found, expected in zip(head[:3], whole.head(batch)[:3], strict=True):
            assert torch.equal(found, expected)
        starts = range(0, n, batch)
        for i in starts:
            assert torch.equal(data.labels(i, i + batch)[0], data.rows(i, i + batch).y)
        return [data.rows(i, i + batch) for i in starts]

    ranks = on_ranks(size, work)
    for i, parts in zip(range(0, n, batch), zip(*ranks, strict=True), strict=True):
        assert in_order(list(parts)) == in_order([whole.rows(i, i + batch)])


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(20, 300))
def test_hold_outs_and_samples_are_those_of_one_process(seed, size, n):
    rng = np.random.default_rng(seed)
    X, y, weight = rng.normal(size=(n, 2)), rng.integers(0, 6, n) // 2, rng.uniform(0.5, 2, n)
    which = rng.integers(0, size, n)
    whole = dataset(canonical(X, y, weight), 4)
    shard = dealt(X, y, weight, which, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conjugp._rows.dataset.SAMPLE_ROWS", 16)
        train, held, everything = whole.hold_out(0.3)
        sample = train.sample()

        def work(group: Group):
            ours = shard(group).hold_out(0.3)
            for found, expected in [(ours[1], held), (ours[0].sample(), sample)]:
                for a, b in zip(found[:3], expected[:3], strict=True):
                    assert torch.equal(a, b)
            moved = ours[2].shifted(torch.ones(2))
            assert torch.equal(moved.head(n).X, everything.X + 1)
            return [ours[0].rows(0, 7), ours[2].rows(train.n - 3, None)]

        ranks = on_ranks(size, work)
    expected = [train.rows(0, 7), everything.rows(train.n - 3, None)]
    for parts, one in zip(zip(*ranks, strict=True), expected, strict=True):
        assert in_order(list(parts)) == in_order([one])


@pytest.mark.parametrize("size", [1, 3])
def test_equal_rows_are_in_the_order_of_ranks(size):
    """A position among rows of one hash is still one place."""
    X, y, weight = np.ones((9, 1)), np.arange(9) % 3, np.arange(1.0, 10)
    shard = dealt(X, y, weight, np.arange(9) // (9 // size), 3)

    def work(group: Group):
        data = shard(group)
        parts = [data.rows(i, i + 2) for i in range(0, data.n, 2)]
        assert data.head(data.n).n == data.n
        return parts

    ranks = on_ranks(size, work)
    sizes = [sum(part.n for part in parts) for parts in zip(*ranks, strict=True)]
    assert sum(sizes) == (3 if size == 1 else 9) and max(sizes) == 2
    assert sizes[:-1] == [2] * (len(sizes) - 1)


def test_an_error_on_one_rank_is_an_error_on_all():
    def bad(group: Group):
        def work():
            if group.rank == 1:
                raise TypeError("no good")
            return 5

        with pytest.raises(TypeError, match="rank 1: no good"):
            group.all(work)
        with pytest.raises(ValueError, match=r"^the same$"):
            group.all(lambda: _raise(ValueError("the same")))
        assert group.all(lambda: group.rank) == group.rank

    on_ranks(3, bad)
    assert ALONE.all(lambda: 3) == 3


def _raise(error: Exception):
    raise error
