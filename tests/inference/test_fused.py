"""The closed-form step and rounds of it, against the readable step and finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conjugp._gp.posterior import Posterior, initial_state, kl, moments
from conjugp._inference import minibatch
from conjugp._inference.fused import ClosedForm, ClosedFormStep, applies
from conjugp._inference.moving import Learned, Leaves, Loop, Moving
from conjugp._inference.rounds import Rounds, RoundsOfSteps
from conjugp._inference.settings import Result, Settings
from conjugp._inference.steps import Batches, MinibatchStep, ReadableStep, Sizes
from conjugp._inference.train import train
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF, Kernel, Linear, Matern12, Matern32, Matern52, RationalQuadratic
from conjugp.likelihoods import Softmax
from problems import BOUNDS, LIKELIHOOD, blobs, generator, random_posterior, take

KERNELS = [
    RBF((0.9, 1.4), 3.0),
    RBF(1.1, 2.0),
    Matern12((0.9, 1.4), 3.0),
    Matern32(0.8, 3.0),
    Matern52((0.9, 1.4), 3.0),
]
NAMES = ["rbf-ard", "rbf", "matern12-ard", "matern32", "matern52-ard"]
SIZES = Sizes(left=1.0, rho=0.1, least=0.05, rate=0.05)
MEAN = torch.tensor([-1.0, 0.2, 0.5], dtype=torch.float64)


def weighted(n: int) -> Data:
    return blobs(n, 3)._replace(weight=torch.linspace(0.2, 3, n).double())


def make(data: Data, kernel: Kernel, *, Z: Any = None, **settings: Any) -> Moving:
    Z = data.X[:12] + 0.2 if Z is None else Z
    state = initial_state([kernel], Z, MEAN.to(data.X, copy=True))
    usual = {"bound": "tight", "learn_inducing": True, "kernel_prior": 1.0, "batch_size": 40}
    usual |= {"momentum": 0.8, "inducing_rate": 0.5, "kernel_rate": 0.7}
    return Moving(state, data.total, Settings(LIKELIHOOD, **{**usual, **settings}))


def step_of(moving: Moving, data: Data, how: str) -> MinibatchStep:
    """One of the three ways to take steps on batches of up to 60 rows."""
    if how == "readable":
        return ReadableStep(moving, data.group)
    one = ClosedFormStep(moving, 60)
    return RoundsOfSteps(one, data, minibatch.ROUND) if how == "rounds" else one


def fit(moving: Moving, data: Data, how: str) -> Result:
    g = generator()
    batches = Batches(data, 40, g)
    result = minibatch.fit(Loop(moving, data, g), step_of(moving, data, how), batches)
    moving.rest()
    return result


def assert_same(a: Moving | Result, b: Moving | Result, tol: float = 1e-9) -> None:
    s, t = a.state, b.state
    for x, y in ((s.theta, t.theta), (s.Z, t.Z), (s.mean, t.mean), (s.q.h, t.q.h), (s.q.P, t.q.P)):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=tol, atol=tol)
    assert s.step == t.step


@pytest.mark.parametrize("kept", [1.0, 0.2])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_steps_are_the_readable_ones(kernel, bound, kept):
    data = weighted(160)
    slow, fast = (make(data, kernel, bound=bound, kept=kept) for _ in range(2))
    steps = step_of(slow, data, "readable"), step_of(fast, data, "closed form")
    for i in range(12):
        part = data.rows(i % 4 * 40, i % 4 * 40 + 30 + 5 * (i % 3))
        elbos = [take(step, part, 4.0, 0.3, 0.05) for step in steps]
        assert elbos[1] == pytest.approx(elbos[0], rel=1e-11)
    assert_same(slow, fast)


@pytest.mark.parametrize(
    "learned", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_what_is_not_learned_stays(learned):
    names = ("learn_kernel", "learn_inducing", "learn_mean")
    data = weighted(120)
    for how in ("closed form", "rounds"):
        t = make(data, KERNELS[0], max_epochs=8, **dict(zip(names, learned, strict=True)))
        start = [x.clone() for x in t.values]
        end = fit(t, data, how).state
        moved = [
            not torch.equal(a, b) for a, b in zip(start, (end.theta, end.Z, end.mean), strict=True)
        ]
        assert moved == list(learned)


def closed_form(kernel: Kernel, bound: str, leaves: Leaves, **changes: Any) -> ClosedForm:
    usual = {"batch": 20, "total": 7.0, "learned": Learned(True, True, True)}
    return ClosedForm(kernel, LIKELIHOOD, bound, leaves, **{**usual, **changes})


@pytest.mark.parametrize("kept", [1.0, 0.2])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=NAMES)
def test_gradients_are_finite_differences(kernel, bound, kept):
    data, q = weighted(15), random_posterior(3, 6)
    leaves = Leaves(kernel.theta.double()[None], data.X[:6] + 0.2, MEAN.clone())
    step = closed_form(kernel, bound, leaves, kept=kept)

    def value() -> float:
        found = step.evaluate(leaves, q, data.X, data.y, data.weight, False)
        assert float(found.kl) == pytest.approx(float(kl(moments(q))), rel=1e-12)
        return float(found.bound)

    found = step.evaluate(leaves, q, data.X, data.y, data.weight, True)
    for leaf, gradient in zip(leaves, found.gradients, strict=True):
        x, numeric, h = leaf.view(-1), torch.zeros(leaf.numel(), dtype=torch.float64), 1e-4
        for i in range(len(x)):
            at, old = {}, float(x[i])
            for k in (-2, -1, 1, 2):
                x[i] = old + k * h
                at[k] = value()
            x[i] = old
            numeric[i] = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h)
        assert gradient is not None and numeric.abs().min() > 1e-4
        torch.testing.assert_close(-7.0 * gradient.view(-1), numeric, rtol=1e-6, atol=1e-7)


def test_sums_of_parts_are_those_of_the_whole():
    """Machines that see some rows each can add what they find."""
    data, q = weighted(20), random_posterior(3, 6)
    leaves = Leaves(KERNELS[0].theta.double()[None], data.X[:6] + 0.2, MEAN)
    step = closed_form(KERNELS[0], "tight", leaves)
    found = []
    for rows in (slice(0, 20), slice(0, 7), slice(7, 20)):
        f = step.evaluate(leaves, q, data.X[rows], data.y[rows], data.weight[rows], True)
        found.append([x.clone() for x in (f.h, f.P, f.bound, *f.gradients) if x is not None])
    for whole, first, second in zip(*found, strict=True):
        torch.testing.assert_close(first + second, whole, rtol=1e-11, atol=1e-13)


def test_rows_far_from_the_origin_keep_their_digits():
    data = weighted(40)
    far = data._replace(X=(data.X + 3000.0).float(), weight=data.weight.float())
    there = ClosedFormStep(make(far, RBF(1.0, 3.0), Z=far.X[:12].clone()), 40)
    assert there.form.shift is not None
    near = make(data, RBF(1.0, 3.0), Z=far.X[:12].double() - 3000.0, jitter=1e-4)
    here = ClosedFormStep(near, 40)
    assert here.form.shift is None
    exact = data._replace(X=far.X.double() - 3000.0)
    for _ in range(3):
        a, b = take(there, far, 1.0, 0.5, 0.0), take(here, exact, 1.0, 0.5, 0.0)
        assert a == pytest.approx(b, rel=1e-4)


def test_parameters_at_their_bounds_have_no_gradient():
    data, q = weighted(15), random_posterior(3, 6)
    theta = torch.tensor([[31.0, 0.3, -30.5]]).double()
    leaves = Leaves(theta, data.X[:6] + 0.2, MEAN)
    step = closed_form(RBF((1.0, 1.0), 1.0), "tight", leaves)
    gradient = step.evaluate(leaves, q, data.X, data.y, data.weight, True).gradients[0]
    assert gradient is not None and gradient.isfinite().all()
    assert float(gradient[0, 0]) == 0 == float(gradient[0, 2]) != float(gradient[0, 1])


# --- failures -----------------------------------------------------------------------------------


def test_a_matrix_that_needs_more_jitter_is_left_to_the_readable_step():
    data = weighted(80)
    Z = data.X[:6].repeat(2, 1)  # twice the same: not positive definite without jitter
    still = {"learn_kernel": False, "learn_inducing": False, "jitter": 0.0}
    slow, fast = (make(data, RBF(1.0, 3.0), Z=Z, **still) for _ in range(2))
    steps = step_of(slow, data, "readable"), step_of(fast, data, "closed form")
    for _ in range(8):
        elbos = [take(step, data.rows(0, 40), 2.0, 0.3, 0.02) for step in steps]
        assert elbos[0] == elbos[1]
    assert_same(slow, fast, 0.0)


@pytest.mark.parametrize("kernel", [RBF(1.0, 3.0), Matern52((1.0, 1.0), 3.0)])
def test_points_far_out_are_left_to_the_readable_step(kernel):
    """Two points there, close to each other: r² of float32 would be anything from 0 to 100."""
    data = weighted(80)
    data.X[::4, 0] += 1e4
    data = Data(data.X.float(), data.y, data.weight.float(), 3)
    slow, fast = (make(data, kernel, Z=data.X[:12], learning_rate=0.02) for _ in range(2))
    readable, one = ReadableStep(slow, data.group), ClosedFormStep(fast, 40)
    assert bool(one.form.far(fast.values))
    for _ in range(8):
        elbos = [take(step, data.rows(0, 40), 2.0, 0.3, 0.02) for step in (readable, one)]
        assert elbos[0] == elbos[1]
    assert_same(slow, fast, 0.0)
    fast.state.step = 5
    rounds = RoundsOfSteps(one, data, minibatch.ROUND)
    assert rounds.round(Batches(data, 40, generator()), [SIZES] * 2) is None


def test_rates_so_wild_that_rounds_fail(monkeypatch):
    """Then every step is taken by itself, and the end is the same to the last bit."""
    data, ends, failed = weighted(120), [], []
    real = Rounds.run

    def run(self: Any, *args: Any) -> Any:
        elbos = real(self, *args)
        failed.append(elbos is None)
        return elbos

    monkeypatch.setattr(Rounds, "run", run)
    for how in ("closed form", "rounds"):
        t = make(
            *(data, RBF(1.0, 1.0)),
            Z=data.X[:24],
            max_epochs=12,
            learning_rate=3.0,
            jitter=0.0,
            momentum=0.9,
            inducing_rate=1.0,
            kernel_rate=1.0,
        )
        ends.append(fit(t, data, how))
    assert failed == [True, True]
    assert ends[0].elbo == ends[1].elbo
    assert_same(ends[0], ends[1], 0.0)


@pytest.mark.parametrize("bad", ["elbo", "kernel", "posterior"])
def test_a_round_with_a_bad_step_changes_nothing(bad):
    data = weighted(80)
    Z = data.X[:6].repeat(2, 1) if bad == "kernel" else data.X[:12] + 0.2
    t = make(data, RBF(1.0, 3.0), Z=Z, jitter=0.0 if bad == "kernel" else None)
    rounds = RoundsOfSteps(ClosedFormStep(t, 40), data, minibatch.ROUND)
    t.state.step = 5
    if bad == "elbo":
        data.weight[50] = torch.inf
    if bad == "posterior":
        t.state.q.P[1, 3, 3] = -1.0
    before = t.snapshot()
    batches = Batches(data, 40, generator())
    assert rounds.round(batches, [SIZES] * 6) is None
    assert_same(t, Result(before, 0.0, 0.0, True), 0.0)
    assert t.adam.count == 0 and all(float(x.abs().max()) == 0 for x in t.adam.first)
    assert batches.at == len(batches.starts)  # as if it had not begun
    assert torch.equal(batches.generator.get_state(), generator().get_state())


def test_after_a_bad_round_steps_are_taken_one_by_one(monkeypatch):
    data, ends = weighted(120), []
    real, calls = Rounds.run, []

    def fails_once(self: Any, *args: Any) -> Any:
        calls.append(len(args[0]))
        return None if len(calls) == 2 else real(self, *args)

    monkeypatch.setattr(Rounds, "run", fails_once)
    for how in ("closed form", "rounds"):
        ends.append(fit(make(data, KERNELS[0], max_epochs=40), data, how))
    assert calls == [45, 22, 28, 20]
    assert ends[0].history == pytest.approx(ends[1].history, rel=1e-10)
    assert_same(*ends)


# --- whole fits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "learn"), [("tight", True), ("collapsed", True), ("augmented", False)]
)
def test_fits_are_the_readable_ones(bound, learn):
    """Uneven batches, annealing, early rest: one by one and in rounds."""
    data, ends = weighted(330), []
    flags = dict.fromkeys(("learn_kernel", "learn_inducing", "learn_mean"), learn)
    for how in ("closed form", "rounds", "readable"):
        t = make(data, KERNELS[0], bound=bound, max_epochs=15, learning_rate=0.02, **flags)
        given = t.state.q
        ends.append(fit(t, data, how))
        assert float(given.h.abs().max()) == 0  # the q given is not ours to change
    for end in ends[:2]:
        assert_same(end, ends[2])
        assert end.history == pytest.approx(ends[2].history, rel=1e-10)
        assert end.epochs == ends[2].epochs and end.converged == ends[2].converged


def test_float32_stays_close_to_float64():
    data = weighted(200)
    narrow = Data(data.X.float(), data.y, data.weight.float(), 3)
    ends = [
        fit(make(d, KERNELS[0], max_epochs=10, jitter=1e-4), d, "closed form")
        for d in (data, narrow)
    ]
    assert ends[1].elbo == pytest.approx(ends[0].elbo, rel=1e-4)
    torch.testing.assert_close(ends[1].state.theta.double(), ends[0].state.theta, rtol=0, atol=1e-3)


def test_a_posterior_too_sure_for_float32_is_left_to_the_readable_step():
    data = weighted(40)
    narrow = Data(data.X.float(), data.y, data.weight.float(), 3)
    t = make(narrow, RBF(1.0, 1.0), Z=narrow.X[:8].clone())
    B = torch.randn(3, 8, 3, generator=generator())
    t.state.q = Posterior(torch.randn(3, 8, generator=generator()), 1e8 * B @ B.mT)
    elbo = take(ClosedFormStep(t, 40), narrow, 1.0, 0.1, 0.0)
    assert torch.isfinite(torch.tensor(elbo)) and torch.isfinite(t.state.q.P).all()


def test_only_known_fits_are_in_closed_form(monkeypatch):
    for kernel in KERNELS:
        assert all(applies(kernel, LIKELIHOOD, bound) for bound in BOUNDS)
        assert not applies(kernel, LIKELIHOOD, "mc")
        assert not applies(kernel, Softmax(), "mc")
    for kernel in (RBF(1.0, 1.0) + Linear(1.0, 1.0), RationalQuadratic(1.0, 1.0)):
        assert not applies(kernel, LIKELIHOOD, "tight")
    data = weighted(40)
    settings = Settings(LIKELIHOOD, "tight", batch_size=20, max_epochs=1)
    used = []
    monkeypatch.setattr(ClosedFormStep, "take", lambda *_: used.append(1) or 0.0)
    for n, closed in ((3, False), (1, True)):
        state = initial_state([RBF(1.0, 1.0)] * n, data.X[:5], MEAN.clone())
        train(state, data, settings, generator())
        assert bool(used) == closed


# --- both rules for every number ----------------------------------------------------------------
