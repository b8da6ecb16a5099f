"""Where the inducing points go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conjugp._gp.inducing import STRATEGIES, by_class, choose, greedy, kmeans
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF
from problems import blobs, generator

KERNEL = RBF(1.0, 2.0)


def unit(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.float64)


def cost(X: torch.Tensor, weight: torch.Tensor, Z: torch.Tensor) -> float:
    """The weighted sum of squared distances to the nearest centre."""
    return float(torch.cdist(X, Z).amin(1).square() @ weight)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_number_shape_and_determinism(strategy):
    X = blobs(300, 3).X
    first, second = (choose(strategy, X, unit(300), 20, KERNEL, generator(1)) for _ in range(2))
    assert first.shape == (20, 2) and first.dtype == X.dtype
    assert torch.equal(first, second)
    assert len(torch.unique(first, dim=0)) == 20
    # Inside the box of the data.
    assert (first >= X.amin(0)).all() and (first <= X.amax(0)).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_distinct_rows_if_asked_for_as_many(strategy):
    X = blobs(30, 3).X.repeat(3, 1)
    Z = choose(strategy, X, unit(90), 30, KERNEL, generator())
    assert torch.equal(torch.unique(Z, dim=0), torch.unique(X, dim=0)) and len(Z) == 30
    assert torch.equal(choose(strategy, X, unit(90), 500, KERNEL, generator()), Z)
    assert not torch.equal(Z, torch.unique(X, dim=0))  # the first few are a sample of all


@pytest.mark.parametrize("strategy", ["random", "greedy"])
def test_points_of_the_data(strategy):
    X = blobs(200, 3).X
    Z = choose(strategy, X, unit(200), 15, KERNEL, generator())
    assert (Z[:, None] == X[None]).all(-1).any(1).all()


def test_random_follows_the_weights():
    X = torch.arange(1000, dtype=torch.float64).unsqueeze(1)
    weight = torch.where(X[:, 0] < 900, 0.0, 1.0)
    Z = choose("random", X, weight, 50, KERNEL, generator())
    assert (Z >= 900).all() and len(torch.unique(Z)) == 50


def test_kmeans_is_lloyd_from_a_good_start(rng):
    """Well separated clouds: a centre in each, at its weighted mean."""
    centres = 50.0 * torch.tensor(rng.standard_normal((8, 2)))
    which = torch.arange(400) % 8
    X = centres[which] + 0.1 * torch.tensor(rng.standard_normal((400, 2)))
    weight = torch.tensor(rng.uniform(0.1, 5, 400))
    Z = kmeans(X, weight, 8, generator(2))
    expected = torch.stack([weight[which == k] @ X[which == k] for k in range(8)])
    expected /= torch.stack([weight[which == k].sum() for k in range(8)]).unsqueeze(1)
    distance = torch.cdist(expected, Z)
    assert distance.amin(1).max() < 1e-10
    assert torch.equal(distance.argmin(1).sort().values, torch.arange(8))


def test_kmeans_beats_random_rows():
    X = blobs(500, 3, gap=3.0).X
    random = [
        cost(X, unit(500), X[torch.randperm(500, generator=generator(s))[:10]]) for s in range(9)
    ]
    found = [cost(X, unit(500), kmeans(X, unit(500), 10, generator(s))) for s in range(9)]
    assert max(found) < min(random)


def test_kmeans_iterations_lower_the_cost():
    X, w = blobs(500, 3, gap=3.0).X, torch.linspace(0.1, 3, 500).double()
    costs = [cost(X, w, kmeans(X, w, 12, generator(), n_iter=n)) for n in range(6)]
    assert (np.diff(costs) <= 1e-9).all() and costs[-1] < 0.95 * costs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kmeans_of_wide_rows(dtype, monkeypatch):
    """Distances in few directions do as well as all; centres are means in all features."""
    g = generator()
    ten = torch.randn(10, 300, generator=g)
    X = (torch.randn(1500, 10, generator=g) @ ten + torch.randn(1500, 300, generator=g)).to(dtype)
    w = torch.linspace(0.1, 3, 1500).to(dtype)
    Z = kmeans(X, w, 12, generator(1), lengths=torch.linspace(0.5, 2, 300).to(dtype))
    assert Z.shape == (12, 300) and Z.dtype == dtype
    few = [cost(X, w, kmeans(X, w, 12, generator(s))) for s in range(4)]
    monkeypatch.setattr("conjugp._gp.inducing._DIRECTIONS", 151)
    full = [cost(X, w, kmeans(X, w, 12, generator(s))) for s in range(4)]
    assert sum(few) < 1.01 * sum(full)
    # With as many centres as rows every centre is a row, all digits of it.
    monkeypatch.undo()
    Z = kmeans(X[:40], w[:40], 40, generator())
    torch.testing.assert_close(torch.unique(Z, dim=0), torch.unique(X[:40], dim=0))


@pytest.mark.parametrize("k", [5, 400])
@pytest.mark.parametrize("unit", [0.0, 1e-18, 1.0, 1e17])
def test_kmeans_of_wide_rows_that_are_few_or_alike(k, unit):
    X = unit * torch.tensor([[0.0, 1.0], [2.0, 3.0], [5.0, 5.0]]).repeat(200, 100)
    Z = kmeans(X, torch.ones(600), k, generator())
    assert Z.shape == (k, 200)
    assert (Z[:, None] - X[None, :3]).abs().amax(2).amin(1).max() <= 1e-5 * unit


@pytest.mark.parametrize("k", [5, 400])
def test_kmeans_with_many_equal_rows(k):
    """Fewer distinct rows than centres: no NaN, no centre elsewhere."""
    X = torch.tensor([[0.0, 1.0], [2.0, 3.0], [5.0, 5.0]]).double().repeat(200, 1)
    Z = kmeans(X, unit(600), k, generator())
    assert Z.shape == (k, 2)
    assert torch.cdist(Z, X).amin(1).max() < 1e-12


def test_greedy_is_pivoted_cholesky():
    """Every point has the greatest conditional variance given those before, by brute force."""
    X = blobs(60, 3).X
    Z = greedy(X, 12, KERNEL)
    for i in range(12):
        before = Z[:i]
        explained = torch.zeros(60).double()
        if i:
            explained = (
                KERNEL(X, before) @ torch.linalg.solve(KERNEL(before, before), KERNEL(before, X))
            ).diagonal()
        variance = KERNEL.diag(X) - explained
        mine = variance[torch.cdist(Z[i : i + 1], X)[0].argmin()]
        assert mine >= variance.max() - 1e-8


def test_greedy_stops_when_nothing_is_left():
    X = torch.tensor([[0.0], [1.0], [2.0]]).double().repeat(10, 1)
    Z = greedy(X, 9, KERNEL)
    assert torch.equal(Z.sort(0).values, X[:3])


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=2, max_size=5).filter(lambda s: sum(s) > 0),
    n=st.integers(1, 80),
    seed=st.integers(0, 100),
)
def test_by_class_gives_every_class_its_share(sizes, n, seed):
    rng = np.random.default_rng(seed)
    y = torch.tensor(rng.permutation(np.repeat(np.arange(len(sizes)), sizes)))
    X = torch.tensor(rng.standard_normal((len(y), 2))) + 1000.0 * y.unsqueeze(1)
    Z = by_class(Data(X, y, unit(len(y)), len(sizes)), n, generator(seed))
    assert len(Z) <= n and torch.isfinite(Z).all()
    of_class = (Z[:, 0] / 1000).round().long()  # classes are far apart, so centres tell theirs
    counts = torch.bincount(of_class, minlength=len(sizes))
    assert (counts <= torch.tensor(sizes)).all()
    present = sum(s > 0 for s in sizes)
    # Rounding up may cost each class a point, never more.
    assert len(Z) >= min(n, len(y)) - present
    if n >= len(y):
        assert len(Z) == len(y)
    if n >= 4 * present:
        assert (counts[torch.tensor(sizes) > 3] > 0).all()


def test_by_class_shares_go_with_the_root_of_size():
    sizes = torch.tensor([100, 400, 1600])
    y = torch.arange(3).repeat_interleave(sizes)
    g = generator()
    X = torch.randn(2100, 2, dtype=torch.float64, generator=g) + 1000.0 * y.unsqueeze(1)
    order = torch.randperm(2100, generator=g)
    Z = by_class(Data(X[order], y[order], unit(2100), 3), 70, g)
    counts = torch.bincount((Z[:, 0] / 1000).round().long())
    assert counts.tolist() == [10, 20, 40]
    # In random order: the first few are a sample of all.
    first = torch.bincount((Z[:35, 0] / 1000).round().long(), minlength=3)
    assert ((first - counts / 2).abs() <= 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_that_are_nearly_equal_are_one(dtype):
    """Copies that differ by rounding; far from the origin, and in a column of short lengths."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(50, 3, generator=g, dtype=torch.float64) * torch.tensor([1.0, 10.0, 1e-3])
    X = X.to(dtype)
    copies = X[None] * (1 + 1e-7 * torch.randn(4, 50, 1, generator=g).to(dtype))
    rows = copies.reshape(-1, 3)
    kernel = RBF(np.array([1.0, 10.0, 1e-3]))
    Z = choose("kmeans", rows, torch.ones(200), 200, kernel, g)
    # At most those on the edge of a cell have a second point.
    assert 50 <= len(Z) <= 52
    assert float(torch.cdist(X.double(), Z.double()).amin(1).max()) < 1e-5
    # In lengths as short as what they differ by they are not.
    short = RBF(np.array([1e-7, 1e-6, 1e-10]))
    assert len(choose("kmeans", rows, torch.ones(200), 200, short, g)) == len(
        torch.unique(rows, dim=0)
    )
