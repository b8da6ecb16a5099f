"""What every likelihood owes the rest, for every exported one and for one's own."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import brute
from conjugp import likelihoods
from conjugp._gp.posterior import kl, moments
from conjugp._inference import svi
from conjugp._inference.settings import Settings
from conjugp.kernels import RBF
from conjugp.likelihoods import LIKELIHOODS, Likelihood, LogisticSoftmax, get_likelihood
from conjugp.likelihoods._base import MC
from problems import blobs, start, sweep_of


@dataclass(frozen=True)
class Cauchit(Likelihood):
    """One's own likelihood, from log_prob alone: the largest of many odds with heavy tails."""

    name: ClassVar[str] = "cauchit"

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        log_p = torch.log_softmax(torch.log(0.5 + torch.atan(f) / math.pi + 1e-3), -1)
        return log_p.gather(-1, y[:, None].expand(*f.shape[:-1], 1)).squeeze(-1)


CASES = [
    *(cls() for cls in LIKELIHOODS.values()),
    likelihoods.RobustMax(0.1),
    likelihoods.Heaviside(0.3),
    likelihoods.Dirichlet(0.1),
    Cauchit(),
]
PAIRS = [(case, bound) for case in CASES for bound in (*case.bounds, MC)]
SMOOTH = [(case, bound) for case, bound in PAIRS if case.smooth or bound != MC]
# Bounds that are loose even where there is nothing to integrate.
LOOSE_AT_ZERO = {("logistic-softmax", "augmented")}

every_pair = pytest.mark.parametrize(("likelihood", "bound"), PAIRS, ids=str)
every_smooth_pair = pytest.mark.parametrize(("likelihood", "bound"), SMOOTH, ids=str)
every_case = pytest.mark.parametrize("likelihood", CASES, ids=str)


def random_batch(
    n: int, n_classes: int, seed: int = 0, most: float = 30.0
) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    m = rng.normal(0.0, 3.0, (n, n_classes))
    v = np.exp(rng.uniform(math.log(1e-2), math.log(most), (n, n_classes)))
    return torch.tensor(rng.integers(n_classes, size=n)), torch.tensor(m), torch.tensor(v)


def test_every_exported_likelihood_is_tested():
    exported = {
        cls
        for name in likelihoods.__all__
        if inspect.isclass(cls := getattr(likelihoods, name))
        and issubclass(cls, Likelihood)
        and not inspect.isabstract(cls)
    }
    assert exported == set(LIKELIHOODS.values()) == {type(case) for case in CASES} - {Cauchit}
    for name, cls in LIKELIHOODS.items():
        assert cls.name == name and isinstance(get_likelihood(name), cls)
        assert set(cls.conjugate) <= set(cls.bounds)


@every_case
def test_shapes_and_names(likelihood):
    y, m, v = random_batch(7, 3)
    default = likelihood.site(y, m, v)
    tightest = likelihood.site(y, m, v, (*likelihood.bounds, MC)[0])
    assert all(torch.equal(a, b) for a, b in zip(default[:3], tightest[:3], strict=True))
    for bound in (*likelihood.bounds, MC):
        s = likelihood.site(y, m, v, bound)
        assert s.potential.shape == s.precision.shape == (7, 3) and s.bound.shape == (7,)
        empty = likelihood.site(y[:0], m[:0], v[:0], bound)
        assert empty.potential.shape == (0, 3) and empty.bound.shape == (0,)
    assert likelihood.integral(m[:0], v[:0]).shape == (0, 3)
    many = m.expand(2, 4, -1, -1)
    assert likelihood.prob(many).shape == many.shape
    assert likelihood.log_prob(y, many).shape == (2, 4, 7)
    with pytest.raises(ValueError, match=rf"bound must be one of .*'mc' for '{likelihood.name}'"):
        likelihood.site(y, m, v, "tighter")
    with pytest.raises(AttributeError):
        likelihood.name = "other"


@every_case
def test_probabilities(likelihood):
    y, m, v = random_batch(40, 4)
    ones = torch.ones(40, dtype=torch.float64)
    p = likelihood.integral(m, v)
    assert p.dtype == torch.float64 and bool((p >= 0).all())
    torch.testing.assert_close(p.sum(-1), ones)
    torch.testing.assert_close(likelihood.prob(m).sum(-1), ones)
    # Dirichlet regression trains on another density than the one it predicts with.
    if likelihood.name != "dirichlet":
        expected = likelihood.prob(m).gather(1, y[:, None])[:, 0]
        torch.testing.assert_close(likelihood.log_prob(y, m).exp(), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        likelihood.integral(m, torch.zeros_like(v)), likelihood.prob(m), rtol=1e-5, atol=1e-6
    )
    # A row's answer does not depend on the others.
    torch.testing.assert_close(likelihood.integral(m[3:9], v[3:9]), p[3:9], rtol=1e-9, atol=1e-12)
    order = [2, 0, 3, 1]
    turned = likelihood.integral(m[:, order], v[:, order])
    tol = 5e-3 if _sampled(likelihood) else 1e-8
    torch.testing.assert_close(turned, p[:, order], rtol=0, atol=tol)


def _sampled(likelihood: Likelihood) -> bool:
    return type(likelihood).integral is Likelihood.integral


@pytest.mark.parametrize("likelihood", [c for c in CASES if c.smooth], ids=str)
@pytest.mark.parametrize("n_classes", [2, 3])
def test_integral_against_a_dense_grid(likelihood, n_classes):
    tol = 2e-3 if _sampled(likelihood) else 1e-6
    for seed, variance in enumerate((0.1, 1.0, 6.0)):
        rng = np.random.default_rng(seed)
        m, v = rng.normal(0, 2, n_classes), variance * rng.uniform(0.3, 1, n_classes)
        p = likelihood.integral(torch.tensor(m)[None], torch.tensor(v)[None])[0].numpy()
        np.testing.assert_allclose(p, brute.expected_prob(likelihood, m, v), rtol=0, atol=tol)


@pytest.mark.parametrize("likelihood", [c for c in CASES if c.smooth], ids=str)
@pytest.mark.parametrize("n_classes", [2, 3])
def test_bounds_against_a_dense_grid(likelihood, n_classes):
    """Bounds lie below E[log p], the tightest last, and expectations on it."""
    for seed, variance in enumerate((0.1, 1.0, 6.0)):
        rng = np.random.default_rng(seed)
        m, v = rng.normal(0, 2, n_classes), variance * rng.uniform(0.3, 1, n_classes)
        y = seed % n_classes
        rows = torch.tensor([y]), torch.tensor(m)[None], torch.tensor(v)[None]
        exact = brute.expected_log_prob(likelihood, y, m, v)
        assert float(likelihood.site(*rows, MC).bound) == pytest.approx(exact, rel=0.1, abs=0.03)
        values = [float(likelihood.site(*rows, bound).bound) for bound in likelihood.bounds]
        if likelihood.bounds == ("exact",):
            assert values[0] == pytest.approx(exact, rel=1e-9)
        else:
            ascending = [*values[::-1], exact]
            assert min(np.diff(ascending), default=0.0) > -1e-6 * (1 + abs(exact))


@every_smooth_pair
@pytest.mark.parametrize("n_classes", [2, 5])
def test_site_identities(likelihood, bound, n_classes):
    """precision = −2 ∂bound/∂v and potential = ∂bound/∂m + precision·m, by differences."""
    y, m, v = random_batch(40, n_classes)
    s = likelihood.site(y, m, v, bound)
    for c in range(n_classes):
        unit = torch.eye(n_classes, dtype=torch.float64)[c]
        for of_v in (False, True):
            h = 1e-3 * (v[:, c] if of_v else v[:, c].sqrt().clamp_min(0.1))
            step = h[:, None] * unit
            two, one, mone, mtwo = (
                likelihood.site(y, m, v + k * step, bound).bound
                if of_v
                else likelihood.site(y, m + k * step, v, bound).bound
                for k in (2, 1, -1, -2)
            )
            difference = (8 * (one - mone) - (two - mtwo)) / (12 * h)
            if of_v:
                expected, scale = -0.5 * s.precision[:, c], 1.0 / v[:, c]
            else:
                expected, scale = (s.potential - s.precision * m)[:, c], 1.0 + v[:, c].rsqrt()
            size = 1.0 + s.bound.abs()
            assert bool(((difference - expected).abs() < 2e-7 * scale * size).all())


@every_pair
def test_autograd_is_the_site(likelihood, bound):
    y, m, v = random_batch(20, 4, seed=1)
    m.requires_grad_()
    v.requires_grad_()
    s = likelihood.site(y, m, v, bound)
    s.bound.sum().backward()
    torch.testing.assert_close(v.grad, -0.5 * s.precision)
    torch.testing.assert_close(m.grad, s.potential - s.precision * m.detach(), rtol=1e-9, atol=1e-9)
    assert not s.potential.requires_grad and not s.precision.requires_grad


@every_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_variance_recovers_log_prob(likelihood, bound, dtype):
    m = torch.tensor([[1.0, -2.0, 0.3], [5.0, 4.0, 4.5], [-3.0, -2.5, -6.0]], dtype=dtype)
    for k in range(3):
        y = torch.full((3,), k)
        leaf = m.clone().requires_grad_()
        s = likelihood.site(y, leaf, torch.zeros_like(m), bound)
        assert all(bool(torch.isfinite(x).all()) for x in s[:3])
        if (likelihood.name, bound) in LOOSE_AT_ZERO:
            continue
        f = m.double().clone().requires_grad_()
        exact = likelihood.log_prob(y, f)
        torch.testing.assert_close(s.bound.detach().double(), exact.detach(), rtol=1e-5, atol=1e-5)
        if likelihood.smooth:
            s.bound.sum().backward()
            exact.sum().backward()
            torch.testing.assert_close(leaf.grad.double(), f.grad, rtol=1e-4, atol=1e-5)


@every_pair
def test_permuting_classes(likelihood, bound):
    y, m, v = random_batch(60, 5, seed=2)
    if bound == MC:  # the draws of the classes are not the same
        v = v.clamp_max(1e-2)
        m = m + 3.0 * torch.nn.functional.one_hot(m.argmax(1), 5)
    s = likelihood.site(y, m, v, bound)
    order = torch.tensor([3, 0, 4, 1, 2])
    t = likelihood.site(torch.argsort(order)[y], m[:, order], v[:, order], bound)
    tol = 2e-2 if bound == MC else 1e-9
    torch.testing.assert_close(t.bound, s.bound, rtol=tol, atol=tol)
    if bound != MC:
        torch.testing.assert_close(t.potential, s.potential[:, order], rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(t.precision, s.precision[:, order], rtol=1e-7, atol=1e-8)


@every_pair
def test_float32(likelihood, bound):
    """Within 1e-5 of float64, relative to the largest term; E[log p] has a rougher rule there."""
    y, m, v = random_batch(200, 4, seed=3)
    of_slopes = 1e-4 if bound == "exact" else 1e-5
    m, v = m.float(), v.float()
    low, high = (likelihood.site(y, m.to(d), v.to(d), bound) for d in (m.dtype, torch.float64))
    assert low.bound.dtype == low.potential.dtype == low.precision.dtype == torch.float32
    of_potential = of_slopes * (1 + m.abs().double()) if bound == "exact" else of_slopes
    for a, b, tol in zip(low[:3], high[:3], (of_potential, of_slopes, 1e-5), strict=True):
        assert bool(((a - b).abs() <= tol * (1 + b.abs())).all())


@every_pair
@settings(max_examples=15)
@given(data=st.data())
def test_finite_everywhere(likelihood, bound, data):
    """|m| to 1e4 and v from 1e-8 to 1e6, in both precisions."""
    n = data.draw(st.integers(2, 4))
    m = [data.draw(st.lists(st.floats(-1e4, 1e4), min_size=n, max_size=n))]
    v = 10.0 ** np.array([data.draw(st.lists(st.floats(-8, 6), min_size=n, max_size=n))])
    y = torch.tensor([data.draw(st.integers(0, n - 1))])
    for dtype in (torch.float64, torch.float32):
        m_, v_ = (torch.as_tensor(x, dtype=dtype) for x in (m, v))
        s = likelihood.site(y, m_, v_, bound)
        assert all(bool(torch.isfinite(x).all()) for x in s[:3])
        if s.curvature is not None:
            assert bool(torch.isfinite(s.curvature).all() and (s.curvature >= -1e-6).all())


@every_case
@settings(max_examples=10)
@given(data=st.data())
def test_integral_finite_everywhere(likelihood, data):
    n = data.draw(st.integers(2, 4))
    m = torch.tensor([data.draw(st.lists(st.floats(-1e4, 1e4), min_size=n, max_size=n))])
    v = data.draw(st.lists(st.floats(-8, 4), min_size=n, max_size=n))
    p = likelihood.integral(m.double(), 10.0 ** torch.tensor([v], dtype=torch.float64))
    assert bool(torch.isfinite(p).all()) and float(p.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("likelihood", "bound"), [(c, b) for c in CASES for b in c.conjugate], ids=str
)
@pytest.mark.parametrize("variance", [1.0, 100.0])
def test_whole_steps_of_conjugate_bounds_never_lower_the_elbo(likelihood, bound, variance):
    data = blobs(45, 3, gap=1.0)
    state = start(data, RBF(1.0, variance))
    sweep = sweep_of(state, data, Settings(likelihood, bound, False, False))
    elbos = []
    for _ in range(25):
        q = moments(state.q)
        stats = sweep(q, False)
        elbos.append(float(stats.bound) - float(kl(q)))
        state.q = svi.update(state.q, stats, 1.0, 1.0)
    assert min(np.diff(elbos)) > -1e-8 * abs(elbos[-1])


def test_one_s_own_likelihood_must_write_the_bounds_it_names():
    @dataclass(frozen=True)
    class Unfinished(Cauchit):
        bounds: ClassVar[tuple[str, ...]] = ("closed",)

    y, m, v = random_batch(3, 3)
    with pytest.raises(NotImplementedError, match="Unfinished names the bound 'closed'"):
        Unfinished().site(y, m, v)


def test_slopes_in_closed_form():
    f = 30 * torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(50) % 4
    found, expected = LogisticSoftmax().slope(y, f), Likelihood.slope(LogisticSoftmax(), y, f)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
