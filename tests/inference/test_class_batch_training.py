"""Fits whose steps look at some of the classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from conjugp._gp.model import coupled
from conjugp._gp.posterior import initial_state
from conjugp._inference.class_step import SampledClassesStep
from conjugp._inference.moving import Moving
from conjugp._inference.settings import Result, Settings
from conjugp._inference.steps import Batch, ReadableStep, Sizes
from conjugp._inference.train import train
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF
from conjugp.likelihoods import get_likelihood
from problems import BOUNDS, LIKELIHOOD, blobs, fixed, generator


def many(n: int, n_classes: int, *, seed: int = 0, gap: float = 2.2, dtype=torch.float32) -> Data:
    data = blobs(n, n_classes, gap=gap, n_features=5, seed=seed)
    return Data(data.X.to(dtype), data.y, data.weight.to(dtype), n_classes)


def fit(data: Data, class_batch: int | None, n_inducing: int = 40, **changes) -> Result:
    changes = {"bound": "tight", "batch_size": 64, "tol": 0.0, "kernel_prior": 0.0, **changes}
    settings = Settings(LIKELIHOOD, class_batch=class_batch, **changes)
    mean = data.X.new_full((data.n_classes,), -math.log(data.n_classes - 1))
    state = initial_state([RBF(4.0, 5.0)], data.X[:n_inducing], mean)
    return train(state, data, settings, generator())


def nll(t: Result, X: torch.Tensor, y: torch.Tensor, bound: str = "tight") -> float:
    """Test NLL by sampling, the same normals for every model."""
    m, v = coupled(t.state, LIKELIHOOD, bound).latent(X)
    z = torch.randn(300, 1, m.shape[1], dtype=m.dtype, generator=generator(9))
    p = sum(LIKELIHOOD.prob(m + v.sqrt() * x) for x in z) / len(z)
    return -float(torch.log(p[torch.arange(len(y)), y]).mean())


@pytest.mark.parametrize("class_batch", [11, 12, 500])
def test_as_many_as_there_are_is_the_same_fit(class_batch):
    """One label is always there, so C - 1 others are all."""
    data = many(300, 12)
    a, b = (fit(data, n, max_epochs=3) for n in (None, class_batch))
    for x, y in zip(a.state.q, b.state.q, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(a.state.theta, b.state.theta) and torch.equal(a.state.mean, b.state.mean)
    assert a.history == b.history and b.class_gap == 0.0


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_step_on_all_classes_has_the_plain_bound(bound):
    """A batch whose labels and sample are all classes: the same ELBO, the same gradients."""
    data = many(200, 6, dtype=torch.float64)
    ends = []
    for n in (None, 4):
        settings = Settings(LIKELIHOOD, bound, batch_size=100, class_batch=n)
        mean = torch.linspace(-2, 0, 6).double()
        state = initial_state([RBF(2.0, 3.0)], data.X[:9], mean)
        state.step = 10
        moving = Moving(state, data.total, settings)
        moving.move = lambda rate: None  # type: ignore[method-assign]
        batch = Batch(slice(0, 100), data.rows(0, 100), 2.0)
        if n is None:
            elbo = ReadableStep(moving, data.group).take(batch, Sizes(1.0, 0.5, 0.05, 0.1))
        else:
            step = SampledClassesStep(moving, data, n, generator())
            elbo = step.take(batch, Sizes(1.0, 0.5, 0.05, 0.1))
            total = LIKELIHOOD.total(
                mean.expand(1, 6), torch.full((1, 6), 3.0).double(), bound
            )  # the prior's
            torch.testing.assert_close(
                step.multipliers.total[:100], total.expand(100), rtol=1e-9, atol=0
            )
        ends.append([elbo, state.theta.grad, state.mean.grad])
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-10)
    for a, b in zip(ends[0][1:], ends[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_what_a_step_does_not_touch_keeps_its_bits():
    data = many(400, 50)
    state = initial_state([RBF(4.0, 5.0)], data.X[:20], torch.zeros(50))
    settings = Settings(LIKELIHOOD, "tight", batch_size=10, class_batch=5)
    t = SampledClassesStep(Moving(state, data.total, settings), data, 5, generator())
    for i in range(12):
        h, P, touched = (x.clone() for x in (state.q.h, state.q.P, t.touched))
        where = state.q.P.data_ptr()
        rows = torch.arange(10 * i, 10 * i + 10)
        t.take(Batch(rows, data.take(rows), 40.0), Sizes(1.0, 0.5, 0.05, 0.05))
        moved = t.touched != touched
        assert 5 < int(moved.sum()) <= 15 and moved[data.y[rows]].all()
        assert torch.equal(state.q.h[~moved], h[~moved])
        assert torch.equal(state.q.P[~moved], P[~moved])
        assert not (state.q.P[moved] == P[moved]).flatten(1).all(1).any()
        assert state.q.P.data_ptr() == where
        assert torch.linalg.eigvalsh(state.q.P.double()).min() > 1 - 1e-5


def test_the_given_state_is_left_alone():
    data = many(300, 20)
    state = initial_state([RBF(4.0, 5.0)], data.X[:10], torch.zeros(20))
    q = state.q
    settings = Settings(LIKELIHOOD, "tight", batch_size=30, class_batch=3, max_epochs=1)
    train(state, data, settings, generator())
    assert not q.h.any() and torch.equal(q.P, torch.eye(10).expand(20, 10, 10))


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_fit_of_q_is_that_of_all_classes(bound):
    """Fixed hyperparameters, about 24 of 30 classes a step: ELBO and test NLL of the full sum."""
    data = many(3000, 30)
    train, X, y = data.rows(0, 600), data.X[1200:], data.y[1200:]
    still = {"learn_kernel": False, "learn_mean": False, "max_epochs": 12, "bound": bound}
    plain, part = (fit(train, n, 25, batch_size=32, **still) for n in (None, 4))
    elbos = [coupled(t.state, LIKELIHOOD, bound).elbo(train) / 600 for t in (plain, part)]
    assert elbos[1] == pytest.approx(elbos[0], abs=0.01)
    if bound == "exact":
        # Its tangents do not touch: no worse than `tight` with all classes is what there is.
        full = fit(train, None, 25, batch_size=32, **{**still, "bound": "tight"})
        assert nll(plain, X, y, bound) < nll(full, X, y)
        assert nll(part, X, y, bound) < 1.02 * nll(full, X, y)
        return
    assert nll(part, X, y, bound) == pytest.approx(nll(plain, X, y, bound), rel=0.02)
    assert 0 < part.class_gap < 0.01


@pytest.mark.slow
def test_learning_with_some_classes():
    data = many(3000, 30)
    train, X, y = data.rows(0, 1200), data.X[1200:], data.y[1200:]
    plain, part = (fit(train, n, 25, batch_size=32, max_epochs=25) for n in (None, 4))
    elbos = [coupled(t.state, LIKELIHOOD, "tight").elbo(train) / 1200 for t in (plain, part)]
    assert elbos[1] > elbos[0] - 0.01
    assert nll(part, X, y) < 1.03 * nll(plain, X, y)
    assert 0 < part.class_gap < 0.01


def test_classes_of_one_row_are_found():
    """Half of the classes have one row, which a batch meets once in 30 steps."""
    rng = np.random.default_rng(0)
    centres = 12.0 * rng.standard_normal((40, 5))
    y = np.concatenate([np.arange(40), rng.integers(20, 40, 900)])
    X = centres[y] + rng.standard_normal((len(y), 5))
    order = rng.permutation(len(y))
    X, y = torch.tensor(X[order], dtype=torch.float32), torch.tensor(y[order])
    data = Data(X, y, torch.ones(len(y)), 40)
    Z = torch.cat([X[y < 20], X[y >= 20][:40]])
    state = initial_state([RBF(3.0, 50.0)], Z, torch.full((40,), -math.log(39)))
    settings = fixed("tight", batch_size=30, class_batch=6, max_epochs=8)
    state = train(state, data, settings, generator()).state
    m, _ = coupled(state, LIKELIHOOD, "tight").latent(X)
    assert torch.equal(m.argmax(1)[y < 20], y[y < 20])


def test_a_class_without_rows_and_batches_of_one_class():
    data = many(60, 12)
    data = data._replace(y=(data.y < 8).long() * 3)  # classes 0 and 3 of 12
    data = data._replace(y=torch.where(torch.arange(60) < 2, 5, data.y))
    t = fit(data, 2, batch_size=4, max_epochs=5)
    assert torch.isfinite(t.state.q.P).all() and math.isfinite(t.elbo)
    assert torch.linalg.eigvalsh(t.state.q.P.double()).min() > 1 - 1e-4


def test_the_same_seed_is_the_same_fit():
    data = many(300, 30)
    a, b = (fit(data, 4, max_epochs=2) for _ in range(2))
    assert torch.equal(a.state.q.P, b.state.q.P) and torch.equal(a.state.theta, b.state.theta)


def test_a_full_batch_sums_over_all_classes():
    data = many(60, 8)
    a, b = (fit(data, n, batch_size=None, max_epochs=4) for n in (None, 2))
    assert torch.equal(a.state.q.P, b.state.q.P)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"likelihood": get_likelihood("softmax"), "bound": "tight"},
            "class_batch=3 needs a bound",
        ),
        ({"bound": "mc"}, "class_batch=3 needs a bound"),
        ({"class_batch": 0}, "class_batch must be at least 1"),
    ],
)
def test_what_cannot_be_subsampled(changes, message):
    data = many(30, 6)
    settings = Settings(**{**fixed("tight", class_batch=3).__dict__, **changes})
    state = initial_state([RBF(1.0, 1.0)], data.X[:5], torch.zeros(6))
    with pytest.raises(ValueError, match=message):
        train(state, data, settings, generator())
    state = initial_state([RBF(1.0, 1.0)] * 6, data.X[:5], torch.zeros(6))
    with pytest.raises(ValueError, match="one kernel shared"):
        train(state, data, fixed("tight", class_batch=3), generator())
