"""E[log Σσ(f_c)] and its derivatives: every rule against brute force, and against each other."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad, quad
from scipy.special import expit, log_expit
from torch import Tensor

from conjugp._inference import svi
from conjugp.likelihoods import LogisticSoftmax, Softmax
from conjugp.likelihoods import _log_sum as log_sum
from conjugp.likelihoods._log_sum import FINE, QUICK, LogSum, Rule, expected_log_sum, tangent_sums

LIKELIHOOD = LogisticSoftmax()
RULES = pytest.mark.parametrize("rule", [FINE, QUICK], ids=["fine", "quick"])
# What the rules promise: the value, relative to max(1, |value|), and its derivatives.
PROMISED = {FINE: (1e-8, 1e-8), QUICK: (1e-5, 1e-4)}


def inner(m: float, v: float, t: np.ndarray) -> np.ndarray:
    """1 − F, F, ∂F/∂m, ∂F/∂v at λ = e^t, (4, T): sums over a grid in f that resolves all of it."""
    sd = math.sqrt(v)
    h = min(0.25, 0.5 * sd)
    n = math.ceil(9.0 * sd / h)
    x = h * np.arange(-n, n + 1)
    w = np.exp(-0.5 * (x / sd) ** 2)
    w /= w.sum()
    log_s, rest = log_expit(m + x), expit(-m - x)
    found = np.empty((4, len(t)))
    for k in range(0, len(t), 256):
        part = slice(k, k + 256)
        scaled = np.exp(np.minimum(log_s + t[part, None], 50.0))
        found[0, part] = -np.expm1(-scaled) @ w
        bump = np.exp(-scaled) * w
        found[1, part] = bump.sum(1)
        bump *= scaled
        found[2, part] = -(bump @ rest)
        found[3, part] = 0.5 * ((bump * scaled) @ rest**2 - bump @ (rest * (2.0 * rest - 1.0)))
    return found


def brute(m: np.ndarray, v: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The value and its derivatives by Frullani's integral, on a grid that resolves all of it."""
    step = 0.25
    last = 6.0 - min(0.0, float((m - 9.0 * np.sqrt(v)).max()))
    t = step * np.arange(math.floor((-40.0 - math.log(len(m))) / step), math.ceil(last / step) + 1)
    pairs = list(zip(m.tolist(), v.tolist(), strict=True))
    known = {pair: inner(*pair, t) for pair in set(pairs)}
    _, F, dm, dv = np.stack([known[pair] for pair in pairs], 1)
    F = np.maximum(F, 1e-300)
    product = np.exp(np.log(F).sum(0))
    log_tau = -t[min(int((product > 0.5).sum()), len(t) - 1)]
    rest = np.exp(-np.exp(np.minimum(t + log_tau, 50.0)))
    value = float(log_tau + step * (rest - product).sum())
    return value, -step * (dm * product / F).sum(1), -step * (dv * product / F).sum(1)


def on_a_grid(m: np.ndarray, v: np.ndarray) -> float:
    """E[log S] on a grid in all f, for a few classes: nothing is integrated over λ."""
    axes, weights = [], []
    for mean, sd in zip(m, np.sqrt(v), strict=True):
        h = min(0.5, sd / 1.5)
        x = h * np.arange(-math.ceil(8.0 * sd / h), math.ceil(8.0 * sd / h) + 1)
        w = np.exp(-0.5 * (x / sd) ** 2)
        axes.append(log_expit(mean + x))
        weights.append(w / w.sum())
    total = np.logaddexp.reduce(np.stack(np.meshgrid(*axes, indexing="ij")))
    for w in reversed(weights):
        total = total @ w
    return float(total)


def rows(seed: int, n: int, n_classes: int, widest: float = 1e4) -> tuple[Tensor, Tensor]:
    """Rows of all kinds: m to ±50, v from 1e-8, alike in a row or of every width in one."""
    rng = np.random.default_rng(seed)
    shape, low, high = (n, n_classes), math.log10(1e-8), math.log10(widest)
    size = 10.0 ** rng.uniform(-1.0, math.log10(50.0), (n, 1))
    m = size * rng.uniform(-1.0, 1.0, shape) - rng.choice([0.0, 10.0, 30.0], (n, 1))
    alike = 10.0 ** rng.uniform(low, high, (n, 1)) * rng.uniform(0.3, 1.0, shape)
    v = np.where(rng.random((n, 1)) < 0.5, alike, 10.0 ** rng.uniform(low, high, shape))
    return torch.tensor(m).clamp_(-50.0, 50.0), torch.tensor(v)


def the(m: np.ndarray, v: np.ndarray, rule: Rule = FINE) -> LogSum:
    """For one row."""
    return expected_log_sum(torch.tensor(m)[None], torch.tensor(v)[None], rule)


def assert_close(found: LogSum, expected: LogSum, of_value: float, of_slopes: float) -> None:
    size = expected.value.abs().clamp_min(1.0)
    assert float(((found.value - expected.value).abs() / size).max()) < of_value
    assert float((found.dm - expected.dm).abs().max()) < of_slopes
    assert float((found.dv - expected.dv).abs().max()) < of_slopes


# --- Against brute force ---------------------------------------------------------------------


@RULES
@pytest.mark.parametrize("n_classes", [1, 2, 3, 10, 100])
def test_against_brute_force(n_classes, rule):
    rng = np.random.default_rng(n_classes)
    of_value, of_slopes = PROMISED[rule]
    for k in range(16):
        few = min(n_classes, 4)  # different ones
        m = rng.uniform(-50.0, 50.0, few)
        if k % 2:
            m = -np.abs(m)
        v = 10.0 ** rng.uniform(-8.0, 4.0 if k == 0 else 2.5, few)
        if k % 4 > 1:
            v = v.max() * rng.uniform(0.3, 1.0, few)
        which = np.arange(n_classes) % few
        value, dm, dv = brute(m[which], v[which])
        found = the(m[which], v[which], rule)
        assert float(found.value[0]) == pytest.approx(value, rel=of_value, abs=of_value)
        np.testing.assert_allclose(found.dm[0], dm, rtol=0, atol=of_slopes)
        np.testing.assert_allclose(found.dv[0], dv, rtol=0, atol=of_slopes)


@pytest.mark.parametrize("m", [[0.0, 0.0], [-40.0, -45.0], [-3.0, 20.0], [50.0, -50.0]], ids=str)
@pytest.mark.parametrize("v", [1e-8, 1e-3, 0.1, 1.0, 30.0, 1e3, 1e4])
def test_alike_and_of_two_widths(m, v):
    for other in (1.0, 1e-4):
        row = np.array(m), np.array([v, v * other])
        value, dm, dv = brute(*row)
        found = the(*row)
        assert float(found.value[0]) == pytest.approx(value, rel=1e-8, abs=1e-8)
        np.testing.assert_allclose(found.dm[0], dm, rtol=0, atol=1e-8)
        np.testing.assert_allclose(found.dv[0], dv, rtol=0, atol=1e-8)


# One latent unlike many others: far tails that add up, and classes below the first node in x.
HARD = {
    "wide tails": ([4.0] + 99 * [-50.0], [1e-8] + 99 * [144.0]),
    "wide tails of ten": ([-20.0] + 9 * [-50.0], [1e-8] + 9 * [625.0]),
    "many far below one": ([20.0] + 99 * [-15.0], [1.0] + 99 * [0.3]),
    "a thousand far below one": ([20.0] + 999 * [-15.0], [1.0] + 999 * [0.3]),
    "all deep": (10 * [-50.0], [1e-8] + 9 * [900.0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HARD)
def test_hard_rows(name, dtype):
    m, v = (np.array(x, dtype=np.float32).astype(float) for x in HARD[name])
    if dtype == torch.float32 and len(m) > 100:
        m, v = m[:100], v[:100]  # 1 − F of so many small ones has not the digits
    value, dm, dv = brute(m, v)
    found = expected_log_sum(torch.tensor(m, dtype=dtype)[None], torch.tensor(v, dtype=dtype)[None])
    of_value, of_slopes = PROMISED[FINE if dtype == torch.float64 else QUICK]
    assert float(found.value[0]) == pytest.approx(value, rel=of_value, abs=of_value)
    np.testing.assert_allclose(found.dm[0], dm, rtol=0, atol=of_slopes)
    np.testing.assert_allclose(found.dv[0], dv, rtol=0, atol=of_slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_far_below_zero_as_numbers_go(dtype):
    m = torch.tensor([[-1e30, -1e30], [-1e6, -1e6 - 3.0], [0.0, -1.0]], dtype=dtype)
    found = expected_log_sum(m, torch.full_like(m, 0.5))
    assert all(bool(torch.isfinite(x).all()) for x in found)
    assert float(found.value[0]) == pytest.approx(-1e30, rel=1e-6)
    near = expected_log_sum(m[1:2] + 1e6 - 100.0, torch.full_like(m[1:2], 0.5))
    assert float(found.value[1]) == pytest.approx(float(near.value) - 1e6 + 100.0, rel=1e-12)
    torch.testing.assert_close(found.dm[1:2], near.dm, rtol=1e-4, atol=1e-6)


def test_on_a_grid_in_two_dimensions():
    rng = np.random.default_rng(0)
    for _ in range(30):
        m, v = rng.uniform(-50.0, 20.0, 2), 10.0 ** rng.uniform(-8.0, 3.0, 2)
        exact = on_a_grid(m, v)
        assert float(the(m, v).value[0]) == pytest.approx(exact, rel=1e-8, abs=1e-8)
        assert brute(m, v)[0] == pytest.approx(exact, rel=1e-8, abs=1e-8)


def test_on_a_grid_in_three_dimensions():
    rng = np.random.default_rng(1)
    for _ in range(5):
        m, v = rng.uniform(-12.0, 4.0, 3), 10.0 ** rng.uniform(-3.0, 1.0, 3)
        assert float(the(m, v).value[0]) == pytest.approx(on_a_grid(m, v), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("m, v", [(0.0, 1.0), (-5.0, 9.0), (3.0, 400.0), (-30.0, 0.01)])
def test_by_scipy(m, v):
    """One class and two, by adaptive quadrature."""
    sd = math.sqrt(v)

    def density(z):
        return math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)

    def of_one(z):
        return density(z) * log_expit(m + sd * z)

    def of_two(a, b):
        return density(a) * density(b) * np.logaddexp(log_expit(m + sd * a), log_expit(b))

    exact = quad(of_one, -9, 9, points=[-m / sd], epsabs=1e-11)[0]
    assert float(the(np.array([m]), np.array([v])).value[0]) == pytest.approx(exact, abs=1e-8)
    if v < 10.0:  # otherwise too long for it
        exact = dblquad(of_two, -9, 9, -9, 9, epsabs=1e-10)[0]
        found = the(np.array([m, 0.0]), np.array([v, 1.0])).value[0]
        assert float(found) == pytest.approx(exact, abs=1e-8)


# --- Derivatives -----------------------------------------------------------------------------


@pytest.mark.parametrize("low, high", [(1e-3, 0.04), (0.06, 0.17), (0.25, 100.0)])
def test_derivatives_by_finite_differences(low, high):
    """Five points: the error is h⁴, that of the value 1e-11 at the most."""
    rng = np.random.default_rng(2)
    n, n_classes = 60, 3
    m = torch.tensor(rng.uniform(-8.0, 3.0, (n, n_classes)))
    v = torch.tensor(np.exp(rng.uniform(math.log(low), math.log(high), (n, n_classes))))
    found = expected_log_sum(m, v, FINE)
    for c in range(n_classes):
        unit = torch.eye(n_classes, dtype=torch.float64)[c]
        for of_v in (False, True):
            h = 0.03 * v[:, c] if of_v else 0.02 * v[:, c].sqrt().clamp_min(0.5)
            total = torch.zeros(n, dtype=torch.float64)
            for k, weight in ((-2, 1.0), (-1, -8.0), (1, 8.0), (2, -1.0)):
                moved = k * h[:, None] * unit
                m_k, v_k = (m, v + moved) if of_v else (m + moved, v)
                total += weight * expected_log_sum(m_k, v_k, FINE).value
            slope = (found.dv if of_v else found.dm)[:, c]
            assert bool(((total / (12.0 * h) - slope).abs() < 1e-6 + 1e-11 / h).all())


# --- The rules -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_classes, n", [(2, 600), (3, 600), (10, 150), (100, 8)])
def test_the_quick_rule(n_classes, n):
    m, v = rows(3, n, n_classes)
    assert_close(expected_log_sum(m, v, QUICK), expected_log_sum(m, v, FINE), 1e-5, 1e-4)


@pytest.mark.parametrize("n_classes, n", [(2, 600), (3, 600), (10, 150), (100, 8)])
def test_float32(n_classes, n):
    m, v = (x.float() for x in rows(4, n, n_classes))
    assert_close(expected_log_sum(m, v), expected_log_sum(m.double(), v.double()), 1e-5, 1e-4)


def test_float32_far_below_zero():
    """At −1e4 float32 has steps of a thousandth; the latents' differences count nevertheless."""
    rng = np.random.default_rng(5)
    shape = (200, 4)
    m = torch.tensor(-1e4 + rng.uniform(-20.0, 20.0, shape), dtype=torch.float32)
    v = torch.tensor(10.0 ** rng.uniform(-8.0, 0.5, shape), dtype=torch.float32)
    found = expected_log_sum(m, v)
    # σ is e^f there, and −60 is far enough below zero.
    near = expected_log_sum(m.double() + 9940.0, v.double())
    assert float((found.value + 9940.0 - near.value).abs().max()) < 1e-4
    assert_close(found, near._replace(value=near.value - 9940.0), 1e-5, 1e-4)


def test_float32_sites():
    """The sites that steps use, from |m| = 1e-3 to 1e4 and v from 1e-8 to 1e4."""
    rng = np.random.default_rng(6)
    n, n_classes = 400, 4
    m = rng.choice([-1.0, 1.0], (n, n_classes)) * 10.0 ** rng.uniform(-3, 4, (n, n_classes))
    m[::4] = -np.abs(m[::4])
    m[1::8] = -1e4 + rng.uniform(0, 5, m[1::8].shape)
    m, v = (torch.tensor(x).float() for x in (m, 10.0 ** rng.uniform(-8, 4, (n, n_classes))))
    y = torch.tensor(rng.integers(n_classes, size=n))
    low = LIKELIHOOD.expectation(y, m, v, "exact")
    high = LIKELIHOOD.expectation(y, m.double(), v.double(), "exact")
    # Relative to the largest of the terms, of which the value is the difference.
    size = high.value.abs().maximum(m.double().abs().amax(1)).clamp_min(1.0)
    assert float(((low.value - high.value).abs() / size).max()) < 1e-5
    assert float((low.dm - high.dm).abs().max()) < 1e-4
    assert float((low.dv - high.dv).abs().max()) < 1e-4


@pytest.mark.parametrize("n_classes, n", [(2, 40), (3, 25), (10, 4)])
def test_nodes_around_every_t(n_classes, n):
    m, v = rows(7, n, n_classes)
    assert_close(log_sum._windows(m, v, FINE), expected_log_sum(m, v, FINE), 1e-7, 1e-7)


def test_nodes_around_every_t_by_the_quick_rule():
    """As a GPU has them, 96: enough for any widths in a row up to a variance of a thousand."""
    m, v = rows(8, 60, 3, widest=1e3)
    assert_close(log_sum._windows(m, v, QUICK), expected_log_sum(m, v, FINE), 1e-5, 1e-4)
    # And further, where all in a row are wide.
    rng = np.random.default_rng(8)
    m = torch.tensor(rng.uniform(-60.0, -10.0, (20, 2)))
    v = torch.tensor(rng.uniform(1e3, 2e3, (20, 2)))
    assert_close(log_sum._windows(m, v, QUICK), expected_log_sum(m, v, FINE), 1e-5, 1e-4)


# --- Rows by themselves, and thresholds ------------------------------------------------------


@RULES
def test_rows_do_not_depend_on_each_other(rule):
    m, v = rows(9, 60, 3)
    v[::7] *= 1e-6
    together = expected_log_sum(m, v, rule)
    apart = [expected_log_sum(m[i : i + 1], v[i : i + 1], rule) for i in range(len(m))]
    alone = LogSum(*(torch.cat(parts) for parts in zip(*apart, strict=True)))
    assert_close(together, alone, 1e-2 * PROMISED[rule][0], 1e-2 * PROMISED[rule][1])


def test_float32_rows_do_not_depend_on_each_other():
    """Nor does a narrow one on a row that is a thousand times as long in t."""
    rng = np.random.default_rng(12)
    m = torch.tensor(rng.uniform(-2.0, 1.0, (40, 1)), dtype=torch.float32)
    v = torch.tensor(rng.uniform(0.055, 0.1, (40, 1)), dtype=torch.float32)
    m[::2], v[::2] = -50.0, 1e4
    together = expected_log_sum(m, v)
    exact = expected_log_sum(m.double(), v.double())
    assert_close(together, exact, 1e-5, 5e-5)
    apart = [expected_log_sum(m[i : i + 1], v[i : i + 1]) for i in range(len(m))]
    alone = LogSum(*(torch.cat(parts) for parts in zip(*apart, strict=True)))
    assert_close(together, alone, 1e-6, 5e-6)


@RULES
def test_no_steps_at_thresholds(rule):
    """What changes there is less than the rule's error."""
    m = rows(10, 100, 3)[0]
    rng = np.random.default_rng(10)
    share = torch.tensor(rng.uniform(0.3, 1.0, (100, 3)))
    share[:, 0] = 1.0
    for at in (log_sum._NARROW, *(bound for bound, _ in rule.x_steps)):
        below, above = (expected_log_sum(m, share * (at * s), rule) for s in (1 - 1e-12, 1 + 1e-12))
        assert_close(below, above, *PROMISED[rule])


@RULES
def test_no_step_where_the_integral_is_left_out(rule):
    """Two variances that differ by nothing, the gap just below and just above what is skipped."""
    rng = np.random.default_rng(11)
    m = torch.tensor(rng.uniform(-20.0, 5.0, (100, 3)))
    unit = torch.tensor(rng.uniform(0.1, 1.0, (100, 3)))
    threshold = 1e-4 if rule is FINE else 1.0
    low, high = torch.full((100, 1), -12.0), torch.full((100, 1), math.log10(0.0199))
    low, high = low.double(), high.double()
    for _ in range(40):
        middle = 0.5 * (low + high)
        flat = log_sum._nearly_sure(m, unit * 10.0**middle, threshold)[1].unsqueeze(1)
        low, high = torch.where(flat, middle, low), torch.where(flat, high, middle)
    reached = (high < math.log10(0.0198)).squeeze(1)
    assert int(reached.sum()) > 50
    m, unit, low, high = (x[reached] for x in (m, unit, low, high))
    skipped = expected_log_sum(m, unit * 10.0**low, rule)
    integrated = expected_log_sum(m, unit * 10.0**high, rule)
    assert_close(skipped, integrated, *PROMISED[rule])


# --- Order, extremes -------------------------------------------------------------------------


def test_order_on_a_wide_grid():
    """augmented ≤ collapsed ≤ tight ≤ exact ≤ 0."""
    means = [(a, b, c) for a in (-40.0, -5.0, 0.0, 3.0) for b in (-20.0, 0.0, 8.0) for c in (-3, 1)]
    widths = [(a, b, c) for a in (1e-6, 0.1, 5.0, 300.0) for b in (1e-3, 1.0, 50.0) for c in (2, 9)]
    m = torch.tensor(means, dtype=torch.float64).repeat(len(widths), 1)
    v = torch.tensor(widths, dtype=torch.float64).repeat_interleave(len(means), 0)
    for y in range(3):
        label = torch.full((len(m),), y)
        exact, tight, collapsed, augmented = (
            LIKELIHOOD.expectation(label, m, v, bound).value
            for bound in ("exact", "tight", "collapsed", "augmented")
        )
        assert bool((augmented <= collapsed + 1e-12 * (1.0 + collapsed.abs())).all())
        assert bool((collapsed <= tight + 1e-9 * (1.0 + tight.abs())).all())
        assert bool((tight <= exact + 1e-9 * (1.0 + exact.abs())).all())
        assert bool((exact <= 1e-9).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_variance(dtype):
    """log p, its gradient, and half its curvature, for those above and far below zero."""
    m = [[0.0, 0.0, 0.0], [1.0, -2.0, 0.3], [-1e4, -9999.0, -1e4], [1e4, 1e4, -1e4], [-50, 60, 0]]
    f = torch.tensor(m, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(5, 3, dtype=dtype)
    for y in range(3):
        label = torch.full((5,), y)
        log_p = LIKELIHOOD.log_prob(label, f)
        (slope,) = torch.autograd.grad(log_p.sum(), f, create_graph=True)
        hessian = (torch.autograd.grad(slope[:, c].sum(), f, retain_graph=True) for c in range(3))
        curvature = torch.stack([row[:, c] for c, (row,) in enumerate(hessian)], 1)
        found = LIKELIHOOD.expectation(label, f.detach().to(dtype), zero, "exact")
        tol = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(found.value, log_p.detach(), rtol=tol, atol=tol)
        torch.testing.assert_close(found.dm, slope.detach(), rtol=0, atol=tol)
        torch.testing.assert_close(found.dv, 0.5 * curvature, rtol=0, atol=tol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_always_finite(dtype):
    rng = np.random.default_rng(12)
    n, n_classes = 200, 3
    m = rng.choice([-1.0, 1.0], (n, n_classes)) * 10.0 ** rng.uniform(-3.0, 4.0, (n, n_classes))
    v = 10.0 ** rng.uniform(-12.0, 6.0, (n, n_classes))
    v[rng.random(v.shape) < 0.2] = 0.0
    m, v = (torch.tensor(x, dtype=dtype) for x in (m, v))
    found = expected_log_sum(m, v)
    assert all(bool(torch.isfinite(x).all()) for x in found)
    # Between the least and the most that Σσ could be, and slopes that are probabilities.
    assert bool((found.value <= math.log(n_classes) + 1e-5).all())
    assert float(found.dm.min()) >= -1e-5 and float(found.dm.sum(1).max()) <= 1.0 + 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [-1e4, 1e4, None])
def test_extremes_cost_little(m, dtype):
    rng = np.random.default_rng(13)
    mean = rng.choice([-1e4, 1e4], (64, 3)) if m is None else np.full((64, 3), m)
    mean = torch.tensor(mean, dtype=dtype)
    before = time.process_time()
    found = expected_log_sum(mean, torch.full_like(mean, 1e6))
    assert time.process_time() - before < 5.0
    assert all(bool(torch.isfinite(x).all()) for x in found)


def test_what_is_in_memory_at_once(monkeypatch):
    """However wide the rows are: a table for a group of rows, and no more nodes than _LONG has."""
    seen = []
    table = log_sum._fall

    def watched(x: Tensor, t: Tensor, h: float) -> Tensor:
        found = table(x, t, h)
        seen.append(found.numel())
        return found

    monkeypatch.setattr(log_sum, "_fall", watched)
    for m, v in ((-1e4, 1e6), (0.0, 1e6), (-100.0, 1e4)):
        row = torch.full((16, 3), m, dtype=torch.float64)
        expected_log_sum(row, torch.full_like(row, v))
    assert 8 * max(seen) < 200e6  # bytes


# --- Tangents --------------------------------------------------------------------------------


@RULES
def test_tangent_sums(rule):
    """τ ∫ e^{−λτ} (−log F) dλ/λ and the rest, a class at a time, by brute force."""
    rng = np.random.default_rng(14)
    dtype = torch.float64 if rule is FINE else torch.float32
    # Zeros of F at complex λ are nearer than anything else; u matters least.
    tols = (1e-7, 1e-7, 1e-7, 1e-6) if rule is FINE else (2e-5, 1e-4, 1e-4, 2e-4)
    n, n_classes, step = 12, 3, 0.25
    m = rng.uniform(-30.0, 10.0, (n, n_classes)).astype(np.float32)
    v = (10.0 ** rng.uniform(-6.0, 2.5, (n, n_classes))).astype(np.float32)
    given_m, given_v = (torch.tensor(x, dtype=dtype) for x in (m, v))
    sigma = LIKELIHOOD.terms(torch.zeros(n, dtype=torch.int64), given_m, given_v, "tight").t
    tau = sigma.double().amax(1) * torch.tensor(rng.uniform(1.0, 4.0, n))
    found = tangent_sums(given_m, given_v, tau, sigma)
    for i in range(n):
        log_tau = math.log(float(tau[i]))
        t = np.arange(-40.0 - log_tau, 4.0 - log_tau, step)
        scaled = np.exp(t + log_tau)
        weight = step * np.exp(-scaled)
        for c in range(n_classes):
            fall, F, dm, dv = inner(float(m[i, c]), float(v[i, c]), t)
            a = np.where(fall < 0.5, -np.log1p(-np.minimum(fall, 0.5)), -np.log(F))
            exact = weight @ a, -weight @ (dm / F), -weight @ (dv / F), (weight * scaled) @ a
            for part, by_hand, tol in zip(found, exact, tols, strict=True):
                assert float(part[i, c] / tau[i]) == pytest.approx(by_hand, abs=tol)


def test_tangents_are_below_the_value():
    """−E log S ≥ 1 − log τ − Σt/τ, above the tangent of −log ΣE[σ] at the same τ."""
    m, v = rows(15, 100, 3, widest=300.0)
    label = torch.zeros(100, dtype=torch.int64)
    sigma = LIKELIHOOD.terms(label, m, v, "tight").t
    exact = -expected_log_sum(m, v, FINE).value
    for factor in (0.5, 1.0, 3.0):
        tau = (factor * sigma.sum(1)).maximum(sigma.amax(1))
        t, _, _, _ = tangent_sums(m, v, tau, sigma)
        tangent = 1.0 - torch.log(tau) - t.sum(1) / tau
        of_tight = 1.0 - torch.log(tau) - sigma.sum(1) / tau
        slack = 1e-8 * (1.0 + exact.abs())
        assert bool((tangent <= exact + slack).all())
        assert bool((tangent >= of_tight - slack).all())


def test_tangents_of_rows_with_many_totals():
    """τ of very different sizes in a group: no row has 0/0, nor depends on the others."""
    rng = np.random.default_rng(16)
    m = torch.tensor(rng.uniform(-12.0, 5.0, (60, 3)))
    v = torch.tensor(10.0 ** rng.uniform(-6.0, 1.0, (60, 3)))
    for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        m_d, v_d = m.to(dtype), v.to(dtype)
        sigma = LIKELIHOOD.terms(torch.zeros(60, dtype=torch.int64), m_d, v_d, "tight").t
        tau = sigma.double().amax(1) * torch.tensor(10.0 ** rng.uniform(0.0, 3.0, 60))
        together = tangent_sums(m_d, v_d, tau, sigma)
        for i in range(0, 60, 5):
            part = slice(i, i + 1)
            alone = tangent_sums(m_d[part], v_d[part], tau[part], sigma[part])
            for a, b in zip(together, alone, strict=True):
                torch.testing.assert_close(a[part] / tau[i], b / tau[i], rtol=tol, atol=tol)


@pytest.mark.parametrize("likelihood", [LogisticSoftmax(), Softmax()], ids=lambda k: k.name)
def test_rough_sites_have_five_digits(likelihood):
    """Fits in float64 learn their hyperparameters by these."""
    generator = torch.Generator().manual_seed(0)
    m = 10.0 * torch.randn(500, 4, generator=generator, dtype=torch.float64)
    v = torch.exp(3.0 * torch.randn(500, 4, generator=generator, dtype=torch.float64))
    y = torch.randint(4, (500,), generator=generator)
    fine, rough = (likelihood.site(y, m, v, "exact", some) for some in (False, True))
    assert rough.bound.dtype == torch.float64 and not torch.equal(fine.bound, rough.bound)
    torch.testing.assert_close(rough.bound, fine.bound, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rough.precision, fine.precision, rtol=1e-4, atol=1e-4)
    slopes = [site.potential - site.precision * m for site in (rough, fine)]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("n_classes", "level"), [(2, 0.0), (3, 2.0), (7, -1.0)])
def test_classes_that_pull_against_each_other(n_classes, level):
    """Against the curvature of all classes together a step on a batch goes no further than twice.

    More than that and it comes back on the other side, farther out than it was.
    """
    generator = torch.Generator().manual_seed(n_classes)
    n, h = 400, 1e-3
    m = level + 3.0 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    v = torch.exp(1.0 + torch.randn(n, n_classes, generator=generator, dtype=torch.float64))
    y = torch.randint(n_classes, (n,), generator=generator)
    like, hessian = LogisticSoftmax(), torch.empty(n, n_classes, n_classes, dtype=torch.float64)
    for c in range(n_classes):
        step = h * torch.eye(n_classes, dtype=torch.float64)[c]
        up, down = (like.expectation(y, m + s, v, "exact").dm for s in (step, -step))
        hessian[:, :, c] = (down - up) / (2 * h)
    hessian = 0.5 * (hessian + hessian.mT)
    site, most = like.site(y, m, v, "exact"), {}
    diagonal = torch.diagonal(hessian, dim1=1, dim2=2)
    torch.testing.assert_close(diagonal, site.precision, rtol=1e-4, atol=1e-5)
    for batch in (False, True):
        safe = svi.clamp(site, m, batch)
        # With a little of the prior, as every step has it.
        root = (safe.precision + 1e-3).rsqrt()
        relative = root.unsqueeze(2) * hessian * root.unsqueeze(1)
        most[batch] = float(torch.linalg.eigvalsh(relative)[:, -1].max())
        slope = safe.potential - safe.precision * m
        torch.testing.assert_close(slope, site.potential - site.precision * m)
    assert most[True] < 2.3 and most[False] > 2.0 * most[True]
