"""Probabilities for many classes: the tables, their error bound, and memory."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_expit
from test_prediction import brute_force

import many
from conjugp import GibbsGPClassifier
from conjugp._estimators import predicting as face
from conjugp._gp import model as model_module
from conjugp._gp import temperature as calibration
from conjugp._gp.prediction import predict_proba
from conjugp._gp.temperature import VARIANCE_SCALES, fit_calibration
from conjugp.likelihoods import LogisticSoftmax, Softmax
from conjugp.likelihoods import _many_classes as tables
from conjugp.likelihoods._lambda_integral import lambda_integral
from conjugp.likelihoods._many_classes import ERROR, many_class_integral, predictive
from faces import fixed, toy
from problems import gaussians

LIKELIHOOD = LogisticSoftmax()
DELTA, EPSILON = 5e-8, 1e-6  # of (P9): 2ε + 4δ is below ERROR


# --- The tables -----------------------------------------------------------------------------


def factors(m: np.ndarray, v: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log F and log(G/F) at arrays of m, v and log λ, on a fine grid of f."""
    sd = np.sqrt(v)
    low, high = m - 13 * sd, m + v + 13 * sd  # both the Gaussian and its tilt by e^f
    z = np.linspace(0, 1, 4001)
    f = low[:, None] + (high - low)[:, None] * z
    w = np.exp(-0.5 * ((f - m[:, None]) / sd[:, None]) ** 2)
    w *= ((high - low) * z[1] / sd / np.sqrt(2 * np.pi))[:, None]
    scaled = np.exp(np.minimum(log_expit(f) + t[:, None], 600))
    survive = np.exp(-scaled)
    F, rest, G = ((w * x).sum(1) for x in (survive, -np.expm1(-scaled), scaled * survive))
    log_f = np.where(rest < 0.5, np.log1p(-np.minimum(rest, 0.5)), np.log(np.maximum(F, 1e-300)))
    return log_f, np.log(np.maximum(G, 1e-300)) - log_f - t


def read(m: np.ndarray, v: np.ndarray, tile: int, step: np.ndarray) -> tuple[np.ndarray, ...]:
    """The same from the tables, every pair as a row with one class."""
    mt, vt = torch.tensor(m)[:, None], torch.tensor(v)[:, None]
    nodes = tables._Nodes(mt, vt, tables._lagrange(tables._u(vt) / tables._DU, 0), max(tile, 0))
    log_f, ratio = (x.T[step] for x in nodes._table(tables._slice, tile).flatten(1, 2))
    log_lam = tables._times(min(tile, tables._SOFT), mt.device)[step]
    shift = log_lam - tables._times(tile, mt.device)[step]
    x = torch.exp(log_lam) * (nodes.scale[:, 0] + (nodes.W * log_f).sum(1))
    b = nodes.ratio[:, 0] * (1 + nodes._read(ratio.view(nodes.n, nodes.V, -1))[:, 0])
    return -x.numpy(), (torch.log(b) + shift).numpy()


@pytest.mark.parametrize("tile", [-3, -1, 0, 1, 2, 3, 4, 9, 20])
def test_tables_between_nodes(tile):
    """What (P9) assumes: δ and ε wherever a factor is neither its limit nor 0."""
    rng = np.random.default_rng(tile + 3)
    n = 150
    for low, high in ((1e-6, 0.05), (0.05, 0.9), (0.9, 3), (3, 12), (12, 60), (60, 225)):
        v = rng.uniform(low, high, n)
        step = rng.integers(0, tables._TILE, n)
        t = (tile * tables._TILE + step) * tables._H
        m = -t + rng.uniform(-20, 6, n) + rng.uniform(-1, 5.5, n) * np.sqrt(v)
        m = np.minimum(m - rng.integers(0, 2, n) * rng.uniform(0, 1, n) * v, 25.0)
        log_f, log_ratio = factors(m, v, t)
        got_f, got_ratio = read(m, v, tile, torch.tensor(step))
        x = -log_f
        matters = x < 40
        delta = np.abs(got_f - log_f) / (x * np.exp(x / 2))
        with np.errstate(all="ignore"):
            epsilon = np.abs(np.expm1(got_ratio - log_ratio)) / np.exp(x / 2)
        assert delta[matters].max() < DELTA
        assert epsilon[matters].max() < EPSILON


def test_the_bound_is_that_of_the_formula():
    assert 2 * EPSILON + 4 * DELTA < ERROR


# --- Probabilities --------------------------------------------------------------------------


def cases(n_classes: int, seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Kinds of rows, two of each: m and v (2, C)."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((2, n_classes))
    m = 2 * z - np.log(n_classes)
    one = np.where(np.arange(n_classes) == 1, 4.0, -6.0) + 0.1 * z
    pairs = {
        "usual": (m, np.full_like(m, 1.7)),
        "each its own variance": (m, rng.uniform(0.01, 5.0, m.shape)),
        "one dominant": (one, np.full_like(m, 0.5)),
        "one uncertain": (m, np.where(np.arange(n_classes) == 0, 80.0, 0.2) + 0 * m),
        "all equal": (np.zeros_like(m), np.full_like(m, 3.0)),
        "all up": (m + 60.0, np.full_like(m, 2.0)),
        "tiny variances": (m, np.full_like(m, 1e-8)),
        "no variance": (m, np.zeros_like(m)),
        "large variances": (m, np.full_like(m, 150.0)),
        "far down": (m - 1e3, np.full_like(m, 4.0)),
        "far down, wide": (m - 500.0, np.full_like(m, 60.0)),
        "far apart": (40 * z, rng.uniform(0.0, 10.0, m.shape)),
    }
    return {k: (torch.tensor(a), torch.tensor(b)) for k, (a, b) in pairs.items()}


@pytest.mark.parametrize("kind", cases(3))
@pytest.mark.parametrize("n_classes", [3, 30, 200])
def test_against_the_exact_integral(n_classes, kind):
    m, v = cases(n_classes)[kind]
    p, error = many_class_integral(m, v)
    truth = lambda_integral(m, v)
    off = (p - truth).abs().sum(1)
    assert torch.all(off < 2e-7)
    assert torch.all(off < error) and torch.all(error < 2 * ERROR)
    torch.testing.assert_close(p.sum(1), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-12)
    likely = truth > 1e-3
    torch.testing.assert_close(p[likely], truth[likely], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["usual", "each its own variance", "one uncertain", "far down"])
def test_a_thousand_classes(kind):
    m, v = (x[:1] for x in cases(1000)[kind])
    assert float((many_class_integral(m, v).p - lambda_integral(m, v)).abs().sum()) < 2e-7


@pytest.mark.parametrize("variance", [0.05, 2.0, 40.0])
def test_against_brute_force(variance):
    rng = np.random.default_rng(5)
    m, v = rng.normal(-2.0, 2.0, 30), np.full(30, variance)
    p = many_class_integral(torch.tensor(m)[None], torch.tensor(v)[None]).p[0].numpy()
    np.testing.assert_allclose(p, brute_force(m, v), rtol=1e-6, atol=1e-9)


def test_against_sampling():
    rng = np.random.default_rng(0)
    m, v = rng.normal(-7.0, 2.0, 1000), rng.uniform(0.1, 6.0, 1000)
    p = many_class_integral(torch.tensor(m)[None], torch.tensor(v)[None]).p[0].numpy()
    total, square, n = np.zeros(1000), np.zeros(1000), 20
    for _ in range(n):
        f = torch.tensor(m + np.sqrt(v) * rng.standard_normal((1000, 1000)))
        draws = LIKELIHOOD.prob(f).numpy()
        total += draws.sum(0)
        square += (draws**2).sum(0)
    mean = total / (1000 * n)
    error = np.sqrt((square / (1000 * n) - mean**2) / (1000 * n))
    assert np.abs((mean - p) / error).max() < 4.5


@pytest.mark.parametrize(("shift", "variance"), [(0.0, 1.1), (0.0, 9.0), (-14.0, 3.0)])
def test_small_probabilities_keep_their_digits(shift, variance):
    """Log loss knows them: 1e-14 and less beside classes that share all."""
    m = np.array([-0.5, 0.3, -0.3, -7.0, -14.0, -21.0, -31.0, -60.0]) + shift
    n = 700
    t = np.linspace(-30, 60, n)
    parts = [factors(np.full(n, c), np.full(n, variance), t) for c in m]
    log_f, log_ratio = np.array(parts).swapaxes(0, 1)
    truth = np.exp(log_ratio + t + log_f.sum(0)).sum(1) * (t[1] - t[0])
    v = torch.full((1, 8), variance, dtype=torch.float64)
    p = many_class_integral(torch.tensor(m)[None], v).p[0].numpy()
    assert truth[-1] < 1e-20
    np.testing.assert_allclose(p, truth, rtol=2e-8 if variance < 5 else 1e-7)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_classes=st.integers(2, 40),
    centre=st.floats(-60, 30),
    spread=st.floats(0, 30),
    log_variance=st.floats(-12, 5.4),
    unequal=st.booleans(),
)
def test_the_bound_holds(seed, n_classes, centre, spread, log_variance, unequal):
    rng = np.random.default_rng(seed)
    m = torch.tensor(centre + spread * rng.standard_normal((2, n_classes)))
    v = torch.full_like(m, np.exp(log_variance))
    v = v * torch.tensor(rng.uniform(0, 1, m.shape)) if unequal else v
    p, error = many_class_integral(m, v)
    assert torch.all((p - lambda_integral(m, v)).abs().sum(1) < error)
    assert torch.all(p > 0) and torch.all(error < 2 * ERROR)


@settings(max_examples=100, deadline=None)
@given(gaussians((-9, 2.9), most=12))
def test_always_a_distribution(drawn):
    m, v = drawn
    p = many_class_integral(torch.tensor([m]), torch.tensor(v)[None]).p
    assert torch.all(torch.isfinite(p)) and float(p.sum()) == pytest.approx(1.0, abs=1e-12)


def test_beyond_the_tables_is_the_exact_integral():
    m, v = cases(10)["usual"]
    wide = torch.full_like(v, 1e4)
    assert torch.equal(many_class_integral(m, wide).p, lambda_integral(m, wide))
    m[0, 3] = torch.nan
    p, _ = many_class_integral(m, v)
    assert p[0].isnan().all() and p[1].isfinite().all()
    assert many_class_integral(m[:0], v[:0]).p.shape == (0, 10)


@pytest.mark.parametrize("kind", ["usual", "each its own variance", "far down", "one uncertain"])
def test_the_softmax(kind):
    m, v = cases(70)[kind]
    p = many_class_integral(m, v, softmax=True).p
    torch.testing.assert_close(p, lambda_integral(m, v, softmax=True), rtol=0, atol=1e-8)
    torch.testing.assert_close(
        p, many_class_integral(m + 7.0, v, softmax=True).p, rtol=1e-6, atol=0
    )
    assert torch.equal(Softmax().integral(m, v), p)


def test_rows_do_not_depend_on_each_other(monkeypatch):
    rng = np.random.default_rng(1)
    m = torch.tensor(rng.normal(0, 4, (300, 70)) - rng.choice([0, 30, 300], (300, 1)))
    v = torch.tensor(np.exp(rng.uniform(-6, 5, (300, 1)))).expand(300, 70).clone()
    v[::3] *= torch.tensor(rng.uniform(0, 1, (100, 70)))
    together = predictive(m, v)
    for i in (0, 1, 17, 150, 299):
        torch.testing.assert_close(
            predictive(m[i : i + 1], v[i : i + 1])[0], together[i], rtol=0, atol=1e-11
        )
    monkeypatch.setattr(tables, "_PAIRS", 1000)
    torch.testing.assert_close(
        predictive(m.flip(0), v.flip(0)).flip(0), together, rtol=0, atol=1e-11
    )


def test_which_integral():
    """Decided by the number of classes and the row alone."""
    for n_classes, shared, exact in (
        (7, True, True),
        (8, True, False),
        (8, False, True),
        (64, False, False),
    ):
        m, v = cases(n_classes)["usual" if shared else "each its own variance"]
        chosen = lambda_integral(m, v) if exact else many_class_integral(m, v).p
        assert torch.equal(predictive(m, v), chosen)
        assert torch.equal(predict_proba(LIKELIHOOD, m, v), chosen / chosen.sum(-1, keepdim=True))
    (m, v), (_, other) = cases(8)["usual"], cases(8)["each its own variance"]
    mixed = predictive(torch.cat([m, m]), torch.cat([v, other]))
    torch.testing.assert_close(mixed[:2], many_class_integral(m, v).p, rtol=0, atol=1e-12)
    torch.testing.assert_close(mixed[2:], lambda_integral(m, other), rtol=0, atol=1e-12)


@pytest.mark.parametrize("likelihood", [LIKELIHOOD, Softmax()], ids=lambda one: one.name)
@pytest.mark.parametrize("n_classes", [2, 10])
def test_a_rough_integral_has_four_digits(likelihood, n_classes):
    rng = np.random.default_rng(n_classes)
    m = torch.tensor(rng.normal(0, 1, (200, n_classes)) * rng.choice([1, 5, 20], (200, 1)) - 3.0)
    v = torch.tensor(np.exp(rng.uniform(-8, 4, (200, n_classes))))
    p, rough = likelihood.integral(m, v), likelihood.rough_integral(m, v)
    torch.testing.assert_close(rough, p, rtol=0, atol=1e-5)
    seen = p > 1e-9
    torch.testing.assert_close(rough[seen], p[seen], rtol=2e-4, atol=0)
    same = predict_proba(likelihood, m, v, rough=True)
    assert torch.equal(same, rough / rough.sum(-1, keepdim=True))


def test_an_expanded_variance_is_the_same():
    m, v = cases(50)["usual"]
    same = v[:, :1].float().expand(2, 50)
    p = predict_proba(LIKELIHOOD, m, same, variance_scale=0.3)
    torch.testing.assert_close(p, predictive(m, 0.3 * same.double()), rtol=0, atol=1e-12)
    assert torch.equal(predict_proba(LIKELIHOOD, m, v, variance_scale=0.0), LIKELIHOOD.prob(m))


# --- Calibration ----------------------------------------------------------------------------


def test_calibration_looks_at_so_many_pairs(monkeypatch):
    rng = np.random.default_rng(0)
    m, v = torch.tensor(rng.normal(-3, 2, (400, 20))), torch.rand(400, 1).double().expand(400, 20)
    y = torch.tensor(rng.integers(0, 20, 400))
    weight = torch.ones(400, dtype=torch.float64)
    first = fit_calibration(LIKELIHOOD, m[:100], v[:100], y[:100], weight[:100], VARIANCE_SCALES)
    assert first != fit_calibration(LIKELIHOOD, m, v, y, weight, VARIANCE_SCALES)
    monkeypatch.setattr(calibration, "MAX_PAIRS", 2000)
    assert first == fit_calibration(LIKELIHOOD, m, v, y, weight, VARIANCE_SCALES)


# --- The face -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 5])
def test_topk_is_sorted_proba(k):
    X, y = toy(60, 5)
    clf = fixed().fit(X, np.array(list("edcba"))[y])
    labels, p = clf.predict_topk(X, k)
    every = clf.predict_proba(X)
    order = np.argsort(-every, axis=1)[:, :k]
    assert labels.shape == p.shape == (60, k)
    np.testing.assert_array_equal(labels, clf.classes_[order])
    np.testing.assert_array_equal(p, np.take_along_axis(every, order, axis=1))
    np.testing.assert_array_equal(labels[:, 0], clf.predict(X))


def test_topk_of_the_sampler():
    X, y = toy(20, 3)
    chain = {"n_samples": 5, "n_warmup": 5, "n_chains": 1, "random_state": 0}
    with pytest.warns(Warning, match="mixed"):
        clf = GibbsGPClassifier(hyperparameters="fixed", prior_mean=-0.7, **chain).fit(X, y)
    labels, p = clf.predict_topk(X, 3)
    every = clf.predict_proba(X)
    np.testing.assert_array_equal(p, -np.sort(-every, axis=1))
    np.testing.assert_array_equal(labels, clf.classes_[np.argsort(-every, axis=1)])


@given(seed=st.integers(0, 999), k=st.integers(1, 12), levels=st.integers(1, 5))
def test_the_first_of_equal_ones_comes_first(seed, k, levels):
    p = np.random.default_rng(seed).integers(0, levels, (4, 12)) / 4
    expected = np.argsort(-p, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(face._largest(p, k), expected)


@pytest.mark.parametrize("k", [0, -1, 4, 1.0, True, "2", None])
def test_bad_k(k):
    X, y = toy(30, 3)
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 3"):
        fixed().fit(X, y).predict_topk(X, k)


@pytest.mark.parametrize("family", ["shared", "diagonal"])
def test_chunks_are_bounded_and_do_not_matter(monkeypatch, family):
    clf = many.classifier(200, family=family)
    X = np.random.default_rng(0).standard_normal((50, 2))
    whole, best = clf.predict_proba(X), clf.predict_topk(X, 3)
    seen: list[int] = []
    proba = type(clf._predictor).proba
    monkeypatch.setattr(
        type(clf._predictor), "proba", lambda s, x, how: (seen.append(len(x)), proba(s, x, how))[1]
    )
    monkeypatch.setattr(face, "CHUNK_ELEMENTS", 7 * 200)
    np.testing.assert_allclose(clf.predict_proba(X), whole, rtol=0, atol=1e-11)
    np.testing.assert_array_equal(clf.predict_topk(X, 3)[0], best[0])
    np.testing.assert_array_equal(clf.predict(X), best[0][:, 0])
    assert max(seen) == 7 and sum(seen) == 150


def test_latents_come_in_chunks_of_classes_too(monkeypatch):
    model = many.model(300)
    X = torch.randn(40, 2, dtype=torch.float64)
    m, v = model.latent(X)
    assert v.stride(1) == 0  # one variance for all classes is stored once
    seen: list[int] = []
    latent = type(model)._latent
    monkeypatch.setattr(
        type(model), "_latent", lambda s, x, v: (seen.append(len(x)), latent(s, x, v))[1]
    )
    monkeypatch.setattr(model_module, "_CHUNK_ELEMENTS", 3000)
    for a, b in zip(model.latent(X), (m, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert max(seen) == 10


MEMORY = """
import resource
import numpy as np
import many

clf = many.classifier(10_000, variance_scale={scale})
rng = np.random.default_rng(0)
clf.predict_topk(rng.standard_normal((200, 2)), 5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
clf.predict_topk(rng.standard_normal(({n}, 2)), 5)
clf.predict(rng.standard_normal(({n}, 2)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "n"), [(0.0, 1500), (0.5, 1000)])
def test_memory_does_not_grow_with_rows_times_classes(scale, n):
    """All probabilities of 1,500 rows would take 120 MB, and 1,000 rows 80 MB in each step."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(scale=scale, n=n)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    grown = int(done.stdout) // (1024 if sys.platform == "darwin" else 1)  # there it is in bytes
    assert grown < 60_000  # kilobytes
