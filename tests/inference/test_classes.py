"""Class subsampling: inclusion probabilities, parts of bounds, balanced statistics."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import digamma, gammaln

from conjugp._gp.features import Features, basis, features, own_features
from conjugp._gp.posterior import Posterior, marginals, moments
from conjugp._inference import classes as cl
from conjugp._inference import svi
from conjugp.kernels import RBF
from conjugp.likelihoods._class_parts import Classes, Part, derivatives, tangent
from problems import LIKELIHOOD, generator, random_posterior

# Sums over classes; E[log p] is none, and has tests of its own below.
BOUNDS = LIKELIHOOD.bounds[1:]
CASES = [(bound, True) for bound in BOUNDS] + [("tight", False)]


def batch(n: int, n_classes: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    m = torch.tensor(rng.normal(-1.0, 2.0, (n, n_classes)))
    v = torch.tensor(np.exp(rng.uniform(-3.0, 3.0, (n, n_classes))))
    # Of the last class the batch has no point, of the first one.
    y = torch.tensor([0, *rng.integers(1, n_classes - 1, n - 1)])
    return y, m, v


def expected(y, m, v, bound):
    """The plain bound of all classes; without a variance, log p."""
    if v is not None:
        return LIKELIHOOD.expectation(y, m, v, bound)
    m = m.clone().requires_grad_()
    value = LIKELIHOOD.log_prob(y, m)
    (dm,) = torch.autograd.grad(value.sum(), m)
    return Part(value.detach(), dm, torch.zeros_like(dm), None, None)


# --- the draw -----------------------------------------------------------------------------------


@given(
    st.integers(2, 40), st.integers(1, 30), st.integers(1, 60), st.integers(0, 10**6), st.booleans()
)
def test_what_is_drawn(n_classes, size, n_others, seed, near):
    y = torch.randint(n_classes, (size,), generator=generator(seed))
    alike = torch.randint(n_classes, (n_classes, 3), generator=generator(seed)) if near else None
    found = cl.draw_classes(y, n_classes, n_others, generator(seed), alike)
    labels, n = set(y.tolist()), len(found.index)
    assert torch.equal(found.index[found.y], y)
    assert len(set(found.index.tolist())) == n == min(len(labels) + n_others, n_classes)
    assert set(found.index[: len(labels)].tolist()) == labels
    assert (found.index >= 0).all() and (found.index < n_classes).all()
    assert (found.weight[: len(labels)] == 1).all()
    # Weights of one over the probability: the number of classes is estimated without error.
    assert float(found.weight.sum()) == pytest.approx(n_classes, rel=1e-14)


@pytest.mark.parametrize(("n_classes", "labels"), [(7, [2, 5]), (9, [0, 1, 8]), (6, [3])])
def test_other_classes_are_equally_likely(n_classes, labels):
    """A chi-square over all subsets, and 1/weight is the share of draws with a class."""
    g, n, k = generator(1), 6000, 2
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(n):
        found = cl.draw_classes(torch.tensor(labels), n_classes, k, g)
        key = tuple(sorted(found.index[len(labels) :].tolist()))
        counts[key] = counts.get(key, 0) + 1
    others = [c for c in range(n_classes) if c not in labels]
    subsets = list(itertools.combinations(others, k))
    assert set(counts) == set(subsets)
    e = n / len(subsets)
    chi2 = sum((x - e) ** 2 / e for x in counts.values())
    assert chi2 < len(subsets) - 1 + 4 * math.sqrt(2 * (len(subsets) - 1))
    share = sum(x for s, x in counts.items() if others[0] in s) / n
    assert share == pytest.approx(1 / float(found.weight[-1]), abs=4 * math.sqrt(0.25 / n))


@pytest.mark.parametrize("n_others", [1, 2, 3, 5, 6])
def test_every_class_counts_once_on_average(n_others):
    """Weights are one over the share of draws with a class, near the labels or not."""
    C, n, g = 8, 3000, generator(2)
    near = torch.tensor([[1, 2, 3], [0, 2, 4], *[[0, 1, 2]] * 6])
    y, total, square = torch.tensor([0, 1, 0]), torch.zeros(C).double(), torch.zeros(C).double()
    alike = 0
    for _ in range(n):
        found = cl.draw_classes(y, C, n_others, g, near)
        total[found.index] += found.weight
        square[found.index] += found.weight**2
        alike += int(torch.isin(found.index, torch.tensor([2, 3, 4])).sum())
    error = ((square / n - (total / n) ** 2) / n).sqrt()
    assert ((total / n - 1).abs() <= 4.5 * error + 1e-12).all()
    if n_others > 1:  # half are near; more once the others are used up
        assert alike == n * max(n_others // 2, n_others - 3)


def test_near_classes(monkeypatch):
    monkeypatch.setattr(cl, "_CHUNK", 4)
    X = torch.randn(60, 3, dtype=torch.float64, generator=generator())
    y = torch.arange(60) % 9
    y[y == 7] = 0  # a class without rows
    kernel = RBF((1.0, 2.0, 0.5), 3.0)
    centre = torch.stack([X[y == c].mean(0) if (y == c).any() else X[0] * 0 for c in range(9)])
    K = kernel(centre, centre).fill_diagonal_(-1.0)
    expected = K.argsort(descending=True)[:, :3]
    assert torch.equal(cl.near_classes(kernel, X, y, 9), expected)
    assert cl.near_classes(kernel, X, y % 2, 2).tolist() == [[1], [0]]


def test_rows_of_a_class():
    y = torch.tensor([3, 0, 3, 1, 3])
    rows = cl.RowsByClass(y, 5)
    drawn = rows.draw(torch.tensor([3, 1, 0]), 3000, generator())
    assert torch.equal(y[drawn], torch.tensor([3, 1, 0]).expand(3000, 3))
    share = torch.bincount(drawn[:, 0], minlength=5) / 3000
    assert (share[[0, 2, 4]] - 1 / 3).abs().max() < 4 * math.sqrt(2 / 9 / 3000)
    # A class without rows gets any, which then count for nothing.
    assert rows.draw(torch.tensor([2, 4]), 2, generator()).max() < 5


# --- parts of a bound ---------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "variance"), CASES)
@pytest.mark.parametrize("kept", [0.3, 1.0, 4.0])
def test_parts_are_unbiased_given_what_rows_keep(bound, variance, kept):
    """The mean over all samples is the tangent with all classes, class by class, exactly."""
    C, k = 7, 2
    y, m, v = batch(4, C)
    v = v if variance else None
    T = LIKELIHOOD.terms(y, m, v, bound).t.sum(-1)
    tau = (kept * T).clamp(max=0.99 * C)
    labels = torch.unique(y)
    others = [c for c in range(C) if c not in labels.tolist()]
    subsets = list(itertools.combinations(others, k))
    assert len(subsets) >= 3
    total, value = torch.zeros(4).double(), torch.zeros(4).double()
    dm, dv = torch.zeros(4, C).double(), torch.zeros(4, C).double()
    for subset in subsets:
        index = torch.cat([labels, torch.tensor(subset)])
        weight = torch.ones(len(index)).double()
        weight[len(labels) :] = len(others) / k
        local = torch.searchsorted(labels, y)
        here = None if v is None else v[:, index]
        found = LIKELIHOOD.part(local, m[:, index], here, bound, Classes(weight, tau, C))
        value += found.value / len(subsets)
        total += found.total / len(subsets)
        dm[:, index] += found.dm / len(subsets)
        dv[:, index] += found.dv / len(subsets)
    torch.testing.assert_close(total, T, rtol=1e-12, atol=1e-12)
    full = expected(y, m, v, bound)
    gap = LIKELIHOOD.shortfall(tau, T, bound if variance else "tight", C)
    torch.testing.assert_close(value, full.value - gap, rtol=1e-11, atol=1e-11)
    assert (gap >= 0).all() and (gap.max() < 1e-12 if kept == 1.0 else gap.min() > 1e-3)
    if kept == 1.0:
        torch.testing.assert_close(dm, full.dm, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(dv, full.dv, rtol=1e-11, atol=1e-12)
    # What is kept scales the normaliser's share and leaves the label's alone.
    e = LIKELIHOOD.terms(y, m, v, bound)
    slope = dm.clone()
    slope[torch.arange(4), y] -= e.label_dm
    ratio = slope / e.t_dm
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("bound", "variance"), CASES)
def test_with_all_classes_a_part_is_the_bound(bound, variance):
    C = 9
    y, m, v = batch(30, C, seed=3)
    v = v if variance else None
    kept = torch.rand(30, generator=generator()).double()  # not read
    order = torch.randperm(C, generator=generator(2))
    weight, place = torch.ones(C).double(), torch.argsort(order)
    here = None if v is None else v[:, order]
    found = LIKELIHOOD.part(place[y], m[:, order], here, bound, Classes(weight, kept, C))
    full = expected(y, m, v, bound)
    for a, b in ((found.value, full.value), (found.dm, full.dm), (found.dv, full.dv)):
        a = a if a.ndim == 1 else a[:, place]
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def assert_slopes(found: Part, at: tuple, **tolerance: float) -> None:
    """The derivatives of a part in m and v are central differences of its value."""
    y, m, v, *rest = at
    for c in range(m.shape[1]):
        h = torch.zeros(m.shape[1]).double()
        h[c] = 1e-5
        for of_v, d in ((False, found.dm), (True, found.dv)):
            up, down = (
                LIKELIHOOD.part(
                    y, m + (0 if of_v else s * h), v + (s * h if of_v else 0), *rest
                ).value
                for s in (1, -1)
            )
            torch.testing.assert_close((up - down) / 2e-5, d[:, c], **tolerance)


@pytest.mark.parametrize("gain", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("bound", BOUNDS)
def test_derivatives_of_a_part(bound, gain):
    """By central differences at fixed τ."""
    y, m, v = batch(5, 6)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 3.5]).double()
    kept = torch.linspace(0.5, 3.0, 5).double()
    seen = Classes(weight, kept, 12, gain)
    found = LIKELIHOOD.part(y, m, v, bound, seen)
    fixed = Classes(weight, torch.lerp(kept, found.total, gain), 12)
    assert_slopes(found, (y, m, v, bound, fixed), rtol=1e-6, atol=1e-8)


def test_augmented_keeps_the_papers_alpha():
    """At α = 1 + G of the kept sum the tangent is the paper's bound at that α (B5)."""
    C = 8
    y, m, v = batch(6, C)
    e = LIKELIHOOD.terms(y, m, v, "augmented")
    kept = torch.linspace(0.2, 6.0, 6).double()
    weight = torch.tensor([1.0] * 7 + [2.0]).double()
    found = LIKELIHOOD.part(y, m, v, "augmented", Classes(weight, kept, C + 1))
    r = 1 - kept.numpy() / (C + 1)
    alpha = np.ones(6)
    for _ in range(20000):  # the paper's inner loop
        alpha = 1 + r * np.exp(digamma(alpha))
    s = 1 - e.t.numpy()
    gamma = np.exp(digamma(alpha))[:, None] * s / (C + 1)
    known = gammaln(alpha) + (1 - alpha) * digamma(alpha) - math.log(C + 1)
    value = e.label.numpy() + (gamma * weight.numpy()).sum(1) + known
    np.testing.assert_allclose(found.value.numpy(), value, rtol=1e-9)
    # dm of a class that is no label is that of -γ/2 (1 + mτ), τ = tanh(c/2)/c.
    c = np.sqrt(m.numpy() ** 2 + v.numpy())
    dm = -0.5 * weight.numpy() * gamma * (1 + m.numpy() * np.tanh(c / 2) / c)
    other = np.arange(C)[None] != y.numpy()[:, None]
    np.testing.assert_allclose(found.dm.numpy()[other], dm[other], rtol=1e-8)


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12), st.sampled_from(BOUNDS))
def test_a_tangent_is_never_above(kept, total, bound):
    C = 1000
    a, b = (torch.tensor([min(x, 0.999999 * C)]).double() for x in (kept, total))
    gap = float(LIKELIHOOD.shortfall(a, b, bound, C))
    assert math.isfinite(gap) and gap >= -1e-9


@pytest.mark.parametrize("bound", BOUNDS)
def test_start_total(bound):
    mean = torch.linspace(-4, 1, 20)
    v = torch.full((1, 20), 3.0).double()
    found = LIKELIHOOD.start_total(bound, mean, 3.0)
    assert found == pytest.approx(float(LIKELIHOOD.total(mean[None].double(), v, bound)), rel=1e-12)
    still = LIKELIHOOD.start_total(bound, mean)
    assert still == pytest.approx(float(torch.sigmoid(mean.double()).sum()), rel=1e-9)


def test_what_rows_keep():
    kept = cl.Multipliers(torch.ones(5))
    kept.update(slice(1, 3), torch.tensor([3.0, 0.0]).double(), 0.5)
    torch.testing.assert_close(kept.total, torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0]))
    kept.update(torch.tensor([4, 0]), torch.tensor([2.0, 5.0]).double(), 1.0)
    torch.testing.assert_close(kept.total, torch.tensor([5.0, 2.0, 0.5, 1.0, 2.0]))


@pytest.mark.parametrize("variance", [0.5, 5.0, 50.0])
def test_tangents_of_the_exact_value(variance):
    """By sampling: never above E[log p], above the tangents of `tight`, unbiased in the classes."""
    C, k = 7, 3
    y, m, _ = batch(6, C, seed=1)
    v = torch.full_like(m, variance)
    exact = LIKELIHOOD.expectation(y, m, v, "exact")
    tau = LIKELIHOOD.total(m, v, "tight")
    for factor in (0.8, 1.0, 1.5):
        seen = Classes(torch.ones(C).double(), factor * tau, C + 1)  # as if there were more
        e = LIKELIHOOD.terms(y, m, v, "exact", seen)
        value = e.label + 1.0 - torch.log(factor * tau) - e.t.sum(1) / (factor * tau)
        part = LIKELIHOOD.part(y, m, v, "exact", seen)
        torch.testing.assert_close(part.value, value)
        assert bool((value <= exact.value + 1e-9).all())
        tight = LIKELIHOOD.part(y, m, v, "tight", seen).value
        assert bool((value >= tight - 1e-9).all())
        # A sample of the classes, each for C/k of them: the mean over all samples is the whole.
        mean, subsets = torch.zeros_like(value), list(itertools.combinations(range(C), k))
        for subset in subsets:
            some = list(subset)
            few = Classes(torch.full((k,), C / k).double(), factor * tau, C + 1)
            t = LIKELIHOOD.terms(y * 0, m[:, some], v[:, some], "exact", few).t
            mean += (t.sum(1) * C / k) / len(subsets)
        torch.testing.assert_close(mean, e.t.sum(1), rtol=1e-9, atol=1e-9)
    # At the best τ the tangent has lost little, and `best` leads there.
    best = tau
    for _ in range(30):
        best = LIKELIHOOD.part(y, m, v, "exact", Classes(torch.ones(C).double(), best, C + 1)).total
    at = LIKELIHOOD.part(y, m, v, "exact", Classes(torch.ones(C).double(), best, C + 1)).value
    for factor in (0.97, 1.03):
        near = Classes(torch.ones(C).double(), factor * best, C + 1)
        assert bool((LIKELIHOOD.part(y, m, v, "exact", near).value <= at + 1e-9).all())
    assert bool((at >= LIKELIHOOD.expectation(y, m, v, "tight").value - 1e-9).all())


@pytest.mark.parametrize("gain", [0.0, 0.4])
def test_derivatives_of_an_exact_part(gain):
    """By central differences at fixed τ; with all classes it is E[log p] itself."""
    y, m, v = batch(5, 6)
    weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 3.5]).double()
    kept = torch.linspace(1.0, 3.0, 5).double()
    found = LIKELIHOOD.part(y, m, v, "exact", Classes(weight, kept, 12, gain))
    fresh = LIKELIHOOD.terms(y, m, v, "tight").t @ weight
    fixed = Classes(weight, torch.lerp(kept, fresh, gain), 12)
    assert_slopes(found, (y, m, v, "exact", fixed), rtol=1e-5, atol=1e-7)
    whole = LIKELIHOOD.part(y, m, v, "exact", Classes(torch.ones(6).double(), kept, 6))
    full = LIKELIHOOD.expectation(y, m, v, "exact")
    for a, b in ((whole.value, full.value), (whole.dm, full.dm), (whole.dv, full.dv)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# --- steps --------------------------------------------------------------------------------------

N, C, M, B, K = 6, 5, 3, 2, 1
Y = torch.tensor([0, 1, 2, 0, 1, 2])  # classes 3 and 4 have no rows; all batches are small


def problem(bound):
    g = generator(4)
    X = torch.randn(N, 2, dtype=torch.float64, generator=g)
    weight = torch.linspace(0.5, 2.0, N).double()
    mean = torch.linspace(-2.0, 0.5, C).double()
    b = basis([RBF(1.0, 3.0)], X[:M] + 0.1)
    f = features(b, X)
    tau = torch.linspace(0.4, 2.5, N).double()
    return X, weight, mean, b, f, tau, random_posterior(C, M)


def full_statistics(bound):
    """All rows, all classes, at the τ that rows keep."""
    _, weight, mean, _, f, tau, q = problem(bound)
    m, v, _ = marginals(moments(q), f)
    m = m + mean
    e = LIKELIHOOD.terms(Y, m, v, bound)
    _, slope = tangent(tau, bound, C)
    dm, dv = derivatives(Y, e, slope.unsqueeze(1))
    site = svi.clamp(svi.Site(dm - 2 * dv * m, -2 * dv, torch.zeros(N).double()), m)
    return svi.statistics(f, site, mean, weight)


@pytest.mark.parametrize("bound", BOUNDS)
def test_statistics_of_a_touched_class_are_unbiased(bound):
    """Over all batches, class samples and own rows; however a class came into the step (C4).

    As a label: whatever else is in the batch. As one of the sample: weighted by C - U, as batches
    of many labels leave fewer classes to sample from.
    """
    X, weight, mean, b, f, tau, q = problem(bound)
    whole = full_statistics(bound)
    by_class, n_own = cl.RowsByClass(Y, C), 1
    sums = {way: [torch.zeros(C, M).double(), torch.zeros(C, M, M).double()] for way in "lo"}
    mass = {way: torch.zeros(C).double() for way in "lo"}
    for rows in itertools.combinations(range(N), B):
        rows = torch.tensor(rows)
        labels, local = torch.unique(Y[rows], return_inverse=True)
        others = [c for c in range(C) if c not in labels.tolist()]
        for other in others:
            index = torch.cat([labels, torch.tensor([other])])
            w = torch.tensor([1.0] * len(labels) + [float(len(others))]).double()
            drawn = cl.ClassBatch(index, w, local)
            stands = cl.balance(drawn, by_class, n_own)
            own_sets = [torch.nonzero(Y == c).flatten().tolist() or [0] for c in index.tolist()]
            combinations = list(itertools.product(*own_sets))
            for own in combinations:
                own_rows = torch.tensor(own).unsqueeze(0)
                found = cl.evaluate(
                    moments(Posterior(q.h[index], q.P[index])),
                    LIKELIHOOD,
                    bound,
                    drawn,
                    C,
                    mean[index],
                    cl.ClassRows(
                        Features(f.A[..., rows], f.residual[:, rows]),
                        stands.batch * weight[rows].unsqueeze(1),
                        tau[rows],
                    ),
                    weight[rows],
                    cl.ClassRows(
                        own_features(b, X[own_rows]),
                        stands.own * weight[own_rows],
                        tau[own_rows],
                    ),
                    0.0,
                    False,
                ).statistics
                for i, c in enumerate(index.tolist()):
                    if not stands.known[i]:
                        continue
                    way = "l" if i < len(labels) else "o"
                    p = 1 / len(others) / len(combinations) * float(w[i])
                    sums[way][0][c] += p * found.h[i]
                    sums[way][1][c] += p * found.P[i]
                    mass[way][c] += p
    for way, seen in (("l", [0, 1, 2]), ("o", [0, 1, 2, 3, 4])):
        for total, full in zip(sums[way], whole[:2], strict=True):
            mean_of = total[seen] / mass[way][seen].reshape(-1, *[1] * (total.ndim - 1))
            torch.testing.assert_close(mean_of, full[seen], rtol=1e-10, atol=1e-11)


def test_update_is_a_step_for_each_class():
    q, s = random_posterior(3, 4, seed=1), random_posterior(3, 4, seed=2)
    new = Posterior(q.h.clone(), q.P.clone())
    rho = torch.tensor([0.0, 0.3, 1.0]).double()
    svi.update_in_place(new, s.h, s.P, rho)
    for c in range(3):
        r, eye = rho[c], torch.eye(4).double()
        torch.testing.assert_close(new.h[c], (1 - r) * q.h[c] + r * s.h[c])
        torch.testing.assert_close(new.P[c], (1 - r) * q.P[c] + r * (eye + s.P[c]))
        assert torch.linalg.eigvalsh(new.P[c]).min() > 1 - 1e-9
    assert torch.equal(new.P[0], q.P[0])
    for rho in (0.3, torch.tensor(0.3).double()):  # one for all: the step of the page
        new = Posterior(q.h.clone(), q.P.clone())
        svi.update_in_place(new, s.h, s.P, rho)
        stats = svi.Statistics(s.h, s.P, torch.zeros(()))
        torch.testing.assert_close(new, svi.update(q, stats, 1.0, 0.3))
