"""Expectations by sampling: against closed forms, and as functions that repeat."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from conjugp._numerics.expectations import sobol_normals
from conjugp.likelihoods import Dirichlet, Heaviside, LogisticSoftmax, RobustMax, Softmax
from conjugp.likelihoods import _monte_carlo as mc


def normals(n: int, n_classes: int, variance: float, seed: int = 0):
    rng = np.random.default_rng(seed)
    m, v = rng.normal(0, 2, (n, n_classes)), variance * rng.uniform(0.5, 1.5, (n, n_classes))
    return torch.tensor(rng.integers(n_classes, size=n)), torch.tensor(m), torch.tensor(v)


def cubic(y: Tensor, f: Tensor) -> Tensor:
    """Its expectation and derivatives are known: Σ f³ + 2f² − f."""
    return (f**3 + 2 * f**2 - f).sum(-1)


@pytest.mark.parametrize("smooth", [True, False])
def test_a_polynomial(smooth):
    y, m, v = normals(800, 3, 1.0)
    e = mc.expectation(cubic, smooth, y, m, v)
    value = (m**3 + 3 * m * v + 2 * (m**2 + v) - m).sum(-1)
    dm, dv = 3 * m**2 + 3 * v + 4 * m - 1, 3 * m + 2
    # Over many rows the errors of the sets of draws cancel.
    for found, exact, tol in ((e.value, value, 0.1), (e.dm, dm, 0.5), (e.dv, dv, 0.5)):
        error = (found - exact).abs().mean() / exact.abs().mean()
        assert float(error) < (tol if not smooth else 0.06)
        assert abs(float((found - exact).mean())) < 0.05 * float(exact.abs().mean())


def test_linear_functions_are_exact():
    """A draw and its mirror image cancel."""
    y, m, v = normals(20, 4, 5.0)
    e = mc.expectation(lambda y, f: f.sum(-1), True, y, m, v)
    torch.testing.assert_close(e.value, m.sum(-1))
    torch.testing.assert_close(e.dm, torch.ones_like(m))
    torch.testing.assert_close(e.dv, torch.zeros_like(m), rtol=0, atol=1e-12)


def test_the_same_draws_every_time_and_others_for_other_rows():
    y, m, v = normals(20, 3, 2.0)
    site = Softmax().site(y, m, v, "mc")
    again = Softmax().site(y, m, v, "mc")
    assert all(torch.equal(a, b) for a, b in zip(site[:3], again[:3], strict=True))
    alike = Softmax().site(y[:1].expand(17), m[:1].expand(17, 3), v[:1].expand(17, 3), "mc").bound
    assert len(set(alike[:16].tolist())) == 16 and alike[16] == alike[0]


def test_chunks_change_nothing(monkeypatch):
    y, m, v = normals(50, 3, 2.0)
    whole = Heaviside().site(y, m, v, "mc")
    monkeypatch.setattr(mc, "_ELEMENTS", 2000)
    parts = Heaviside().site(y, m, v, "mc")
    for a, b in zip(whole[:3], parts[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("likelihood", [LogisticSoftmax(), Softmax(), Dirichlet()], ids=str)
@pytest.mark.parametrize("n_classes", [3, 10])
def test_sites_against_many_draws(likelihood, n_classes):
    """The average error of a row's site, and of all rows' together, which is much smaller."""
    y, m, v = normals(64, n_classes, 1.0)
    z = sobol_normals(2**12, n_classes, 7)
    f = (m + v.sqrt() * torch.cat([z, -z])[:, None]).requires_grad_()
    log_p = likelihood.log_prob(y, f)
    (slope,) = torch.autograd.grad(log_p.sum(), f)
    exact = likelihood.site(y, m, v, "mc")
    value, dm = log_p.detach().mean(0), slope.mean(0)
    found = exact.potential - exact.precision * m
    size = float(dm.abs().mean())
    assert float((exact.bound - value).abs().mean()) < 0.05 * (1 + float(value.abs().mean()))
    assert float((found - dm).abs().mean()) < 0.05 * size
    assert float((found - dm).mean(0).abs().max()) < 0.02 * size


@pytest.mark.parametrize("variance", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("n_classes", [3, 10])
def test_sampled_integral(variance, n_classes):
    """4096 draws against one-dimensional integrals: the error that one's own likelihood has."""
    _, m, v = normals(40, n_classes, variance)
    for likelihood, tol in ((Softmax(), 4e-3), (LogisticSoftmax(), 4e-3), (RobustMax(), 1e-2)):
        p = mc.integral(likelihood.prob, m, v)
        torch.testing.assert_close(p, likelihood.integral(m, v), rtol=0, atol=tol)


def test_score_gradients_of_robust_max():
    """Unbiased: over many rows alike they are the derivatives of the exact expectation."""
    robust = RobustMax(0.05)
    m = torch.tensor([[0.5, 0.0, -0.5]], dtype=torch.float64).expand(16, 3)
    v = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64).expand(16, 3)
    y = torch.ones(16, dtype=torch.long)
    sampled, exact = robust.site(y, m, v, "mc"), robust.site(y, m, v)
    for a, b in zip(sampled[1:3], exact[1:3], strict=True):
        torch.testing.assert_close(a.mean(0), b.mean(0), rtol=0, atol=0.15)
    # Where no draw changes the winner there is nothing to learn, not noise.
    far = robust.site(y, 50.0 * m, 1e-3 * v, "mc")
    assert float(far.precision.abs().max()) < 1e-10 and math.isfinite(float(far.bound.sum()))
