"""The compiled passes of the fused step against torch, and whole fits with and without them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config, njit
from scipy.special import erfcx

import conjugp._inference
from conjugp._gp.state import initial_state
from conjugp._inference import compiled_passes, compiled_sites, passes, training
from conjugp._inference.adam import Adam, move
from conjugp._inference.passes import Passes, fast, plain
from conjugp._inference.training import Result, Settings, Trainer
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF, Kernel, Matern32
from conjugp.likelihoods import LogisticSoftmax
from problems import BOUNDS, LIKELIHOOD, blobs, generator

DTYPES = [torch.float32, torch.float64]
KERNEL = RBF((0.9, 1.4), 3.0)


def both(kernel: Kernel, dtype: torch.dtype, bound: str = "tight") -> tuple[Passes, Passes]:
    """Compiled and by torch."""
    return fast(kernel, LIKELIHOOD, bound, dtype), plain(kernel, LIKELIHOOD, bound)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# --- functions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "truth", "points", "tol"),
    [
        (compiled_sites._exp, np.exp, np.linspace(-699, 699, 20_001), 5e-16),
        (compiled_sites._log, np.log, 1 + np.logspace(-17, 300, 20_001), 4e-16),
        (compiled_sites._erfcx, erfcx, np.r_[0.0, np.logspace(-9, 20, 20_001)], 5e-14),
        (compiled_passes._exp, np.exp, np.linspace(-80, 0, 20_001, dtype=np.float32), 1.5e-7),
    ],
)
def test_functions_are_those_of_libm(function, truth, points, tol):
    @njit
    def of_all(x: Any, out: Any) -> None:
        for i in range(len(x)):
            out[i] = function(x[i])

    found = np.empty_like(points)
    of_all(points, found)
    exact = truth(points.astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=tol, atol=1e-15 if truth is np.log else 0)


def test_an_exponential_far_below_zero_is_a_number():
    for x in (-701.0, -1e300, -np.inf):
        assert 0 < compiled_sites._exp(x) < 1e-303


# --- sites ------------------------------------------------------------------------------------


def exact_sites(y: Any, m: Any, mean: Any, v: Any, weight: Any, share: float) -> list[torch.Tensor]:
    """bound, r, precision, dm and dv by torch with the nodes of float64."""
    m = m.double()
    e = LogisticSoftmax().expectation(y, m + mean.double(), v.double(), "tight")
    w = weight.double()[:, None]
    precision = (-2 * e.dv).clamp_min(1e-6)
    r = (e.dm + precision * m) * w
    return [(e.value * w[:, 0]).sum(), r, precision * w, e.dm * w * share, e.dv * w * share]


moderate = st.floats(-30, 30)
extreme = st.one_of(moderate, st.sampled_from([-1e4, -700.0, -1e-30, 0.0, 1e-3, 80.0, 1e4]))
variance = st.one_of(
    st.floats(0, 3),
    st.sampled_from([0.0, 1e-12, 1e-5, np.nextafter(1.0, 0.0), 1.0, 40.0, 900.0, 1e6]),
    st.floats(-12, 6).map(lambda x: 10.0**x),
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 6), st.integers(2, 40)),
    means=st.lists(extreme, min_size=1, max_size=9),
    variances=st.lists(variance, min_size=1, max_size=9),
    dtype=st.sampled_from(DTYPES),
)
def test_sites_are_those_of_the_bound(seed, shape, means, variances, dtype):
    g = torch.Generator().manual_seed(seed)
    B, C = shape

    def some(values: list[float]) -> torch.Tensor:
        index = torch.randint(len(values), shape, generator=g)
        return torch.tensor(values, dtype=torch.float64)[index].to(dtype)

    m, v = some(means), some(variances)
    y = torch.randint(C, (B,), generator=g)
    weight = torch.rand(B, generator=g).to(dtype)
    mean = torch.zeros(C, dtype=dtype)
    found = compiled_sites.load(dtype)(y, m, mean, v, weight, -0.25)
    found = [found.bound, found.r, found.theta, found.dm, found.dv]
    exact = exact_sites(y, m, mean, v, weight, -0.25)
    # float32 rounds what it returns, and its rule has fewer nodes.
    tol = 1e-11 if dtype == torch.float64 else 3e-7
    size = 1 + m.double().abs()
    units = ((size + v.double().sqrt()).sum(), size, 1.0, 1.0, 1.0)
    for x, truth, unit in zip(found, exact, units, strict=True):
        assert x is not None and bool(x.isfinite().all())
        error = (x.double() - truth).abs() / unit
        assert float(error.max()) < tol


@pytest.mark.parametrize("dtype", DTYPES)
def test_sites_of_a_batch(dtype):
    """As in a fit: a prior's mean, both rules in one call, more than one block of elements."""
    m, y = 3 * normal(0, 300, 7, dtype=dtype), torch.arange(300) % 7
    v = normal(1, 300, 7, dtype=dtype).square() + 1e-3
    mean, weight = normal(2, 7, dtype=dtype) - 1, 1 + torch.arange(300).to(dtype) / 100
    a, b = (p.sites(y, m, mean, v, weight, -0.1) for p in both(KERNEL, dtype))
    assert a.dm is not None and a.r.dtype == dtype == a.bound.dtype
    rtol, atol = (1e-11, 1e-12) if dtype == torch.float64 else (1e-6, 5e-7)
    for x, truth in zip(a, b, strict=True):
        torch.testing.assert_close(x, truth, rtol=rtol, atol=atol)
    without = both(KERNEL, dtype)[0].sites(y, m, mean, v, weight, None)
    assert without.dm is None and without.dv is None and torch.equal(without.r, a.r)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["m", "v", "weight", "mean"])
def test_what_is_not_finite_shows_in_the_bound(bad, where):
    given = {
        "y": torch.arange(5) % 3,
        "m": normal(0, 5, 3, dtype=torch.float32),
        "mean": torch.zeros(3),
        "v": torch.ones(5, 3),
        "weight": torch.ones(5),
    }
    given[where].view(-1)[1] = bad
    found = compiled_sites.load(torch.float32)(*given.values(), -1.0)
    assert not bool(found.bound.isfinite())


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_is_an_error(label):
    x = torch.ones(2, 3)
    with pytest.raises(IndexError, match="label"):
        compiled_sites.load(torch.float32)(
            torch.tensor([0, label]), x, x[0], x, torch.ones(2), None
        )


# --- other passes -----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(*[st.integers(1, 40)] * 3),
    dtype=st.sampled_from(DTYPES),
    kernel=st.sampled_from([KERNEL, Matern32(0.8, 3.0)]),
)
def test_passes_are_those_of_torch(seed, shape, dtype, kernel):
    B, M, D = shape
    X, Z, E, EX, EZ, A = (
        normal(seed + i, *s, dtype=dtype)
        for i, s in enumerate([(B, D), (M, D), (B, M), (M, D), (M, D), (B, M)])
    )
    w, e, sums = (normal(seed + 9 + i, n, dtype=dtype) for i, n in enumerate((D, B, M)))
    w, x2, variance = w.abs(), e.square(), torch.tensor(3.0, dtype=dtype)
    r2 = 60 * EZ[:1, :1] + 5 * E
    found = []
    for p in both(kernel, dtype):
        buffer, k, mine = torch.empty_like(X), torch.empty_like(E), E.clone()
        norms, distances = p.norms(X, buffer, w), r2.clone()
        squares = p.squares(e, X, buffer)
        value = p.values(distances, x2, sums, 80.0, k).clone()
        slopes = p.slopes(mine, distances.clone(), value.clone())
        push = p.push(EX.clone(), EZ.clone(), sums, Z, w, torch.empty_like(Z))
        residual = p.residual(A / M**0.5 * 2, variance)
        found.append([norms, squares, distances, value, mine, *slopes, *push, *residual])
    tol = 1e-12 if dtype == torch.float64 else 2e-5
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def test_distances_that_are_not_numbers_stay_so():
    r2, k = torch.tensor([[1.0, torch.nan]]), torch.empty(1, 2)
    both(KERNEL, torch.float32)[0].values(r2, torch.zeros(1), torch.ones(2), 80.0, k)
    assert r2.isnan().tolist() == k.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adam_is_the_same_in_one_pass(dtype):
    ends = []
    for step in (move, compiled_passes.load(dtype).adam):
        adam = Adam([normal(0, 30, 7, dtype=dtype), normal(1, 3, dtype=dtype)], move=step)
        for i in range(20):
            # A gradient may be a view that is not contiguous, or there may be none.
            gradients = [normal(2 + i, 7, 30, dtype=dtype).T, None if i % 2 else adam.tensors[1]]
            adam.descend(gradients, [0.1, 0.2])
        ends.append([*adam.tensors, *adam.first, *adam.second])
    tol = 1e-13 if dtype == torch.float64 else 1e-5
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


# --- fits -------------------------------------------------------------------------------------


def fitted(data: Data, kernel: Kernel = KERNEL, **changes: Any) -> Result:
    state = initial_state([kernel], data.X[:12] + 0.2, torch.zeros(3).to(data.X))
    usual = {"bound": "tight", "learn_inducing": True, "batch_size": 40, "max_epochs": 12}
    return Trainer(state, data, Settings(LIKELIHOOD, **{**usual, **changes}), generator()).fit()


def weighted(dtype: torch.dtype) -> Data:
    data = blobs(250, 3)
    return Data(data.X.to(dtype), data.y, torch.linspace(0.2, 3, 250).to(dtype), 3)


@pytest.mark.parametrize("kernel", [KERNEL, Matern32(0.8, 3.0)], ids=["rbf", "matern"])
@pytest.mark.parametrize("bound", BOUNDS)
def test_whole_fits_are_the_same(bound, kernel, monkeypatch):
    data, used = weighted(torch.float64), []
    monkeypatch.setattr(training, "_WORTH_COMPILING", 0)
    real = passes.fast
    monkeypatch.setattr(training, "fast", lambda *args: used.append(real(*args)) or used[-1])
    a = fitted(data, kernel, bound=bound)
    assert used[0].adam is not move
    monkeypatch.setattr(training, "_WORTH_COMPILING", np.inf)
    b = fitted(data, kernel, bound=bound)
    assert len(used) == 1
    assert a.history == pytest.approx(b.history, rel=1e-9)
    s, t = a.state, b.state
    for x, y in ((s.theta, t.theta), (s.Z, t.Z), (s.mean, t.mean), (s.q.h, t.q.h), (s.q.P, t.q.P)):
        torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-7)


def test_fits_in_float32_stay_close(monkeypatch):
    ends = []
    for limit in (0, np.inf):
        monkeypatch.setattr(training, "_WORTH_COMPILING", limit)
        ends.append(fitted(weighted(torch.float32)))
    assert ends[0].elbo == pytest.approx(ends[1].elbo, rel=1e-4)
    torch.testing.assert_close(ends[0].state.theta, ends[1].state.theta, rtol=0, atol=2e-3)
    monkeypatch.setattr(training, "_WORTH_COMPILING", 0)
    again = fitted(weighted(torch.float32))
    assert again.history == ends[0].history  # to the last bit


def test_small_fits_do_without(monkeypatch):
    monkeypatch.setattr(training, "fast", lambda *_: pytest.fail("loaded"))
    fitted(weighted(torch.float32), max_epochs=3)


@pytest.mark.parametrize("why", ["not installed", "told not to compile"])
def test_without_numba_torch_does_it(why, monkeypatch):
    data = weighted(torch.float64)
    expected = fitted(data, max_epochs=4)
    for name in ("compiled_passes", "compiled_sites"):
        monkeypatch.delattr(conjugp._inference, name)
        monkeypatch.delitem(sys.modules, f"conjugp._inference.{name}")
    monkeypatch.delitem(sys.modules, "conjugp._numerics.jit")
    if why == "not installed":
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        monkeypatch.setattr(config, "DISABLE_JIT", 1)
    monkeypatch.setattr(training, "_WORTH_COMPILING", 0)
    assert fast(KERNEL, LIKELIHOOD, "tight", torch.float64).adam is move
    assert fitted(data, max_epochs=4).history == expected.history
