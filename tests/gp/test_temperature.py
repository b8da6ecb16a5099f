"""The temperature and the leave-one-out moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.utils.estimator_checks import estimator_checks_generator

from conjugp._gp.prediction import apply_temperature, predict_proba
from conjugp._gp.temperature import (
    LOG_LEAST,
    LOG_MOST,
    LUCK,
    MORE,
    PRIOR_SD,
    VARIANCE_SCALES,
    fit_calibration,
    fit_temperature,
)
from conjugp.calibration import TemperatureScaled
from conjugp.likelihoods import Softmax
from conjugp.metrics import nll
from faces import fixed, toy
from problems import LIKELIHOOD


def labelled(n: int, temperature: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities p, and labels drawn from p^(1/T)."""
    rng = np.random.default_rng(seed)
    p = torch.tensor(rng.dirichlet([0.7] * 4, n))
    true = apply_temperature(p, temperature).numpy()
    y = (true.cumsum(1) < rng.random((n, 1))).sum(1).clip(max=3)
    return p, torch.tensor(y)


def ones(y: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(y), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1.0, 1.5, 3.0])
def test_a_known_temperature_is_found(temperature):
    p, y = labelled(40_000, temperature)
    found, _ = fit_temperature(p, y, ones(y))
    assert found == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize("temperature", [0.2, 5.0])
def test_few_points_hardly_move_it(temperature):
    """With none it is 1; it leaves 1 as evidence gathers, without overshooting the truth."""
    found = []
    for n in (1, 10, 100, 10_000):
        each = [
            fit_temperature(p, y, ones(y))[0]
            for p, y in (labelled(n, temperature, s) for s in range(8))
        ]
        found.append(abs(np.log(each).mean()))
    assert np.all(np.diff(found) > 0)
    assert found[0] < 0.2 and found[-1] == pytest.approx(abs(math.log(temperature)), rel=0.05)
    assert fit_temperature(torch.ones(0, 4), torch.zeros(0, dtype=torch.long), torch.ones(0))[
        0
    ] == (pytest.approx(1.0, abs=1e-3))


def test_it_minimises_the_loss_it_says():
    p, y = labelled(200, 2.0)
    weight = torch.linspace(0.1, 3, 200).double()
    t, loss = fit_temperature(p, y, weight)

    def direct(t: float) -> float:
        q = apply_temperature(p, t)[torch.arange(200), y]
        return float(-(weight @ q.log())) + 0.5 * (math.log(t) / PRIOR_SD) ** 2

    assert loss == pytest.approx(direct(t), rel=1e-10)
    grid = [direct(math.exp(x)) for x in np.linspace(LOG_LEAST, LOG_MOST, 600)]
    assert loss <= min(grid) + 1e-8


def test_heat_leads_to_the_shares_of_the_classes():
    """π (p/π)^{1/T} where T is above 1, as before below; noise is told the shares."""
    p, y = labelled(400, 1.0)
    shares = torch.tensor([0.7, 0.2, 0.1]).double()
    hot = apply_temperature(p[:, :3] / p[:, :3].sum(1, keepdim=True), 1e9, shares)
    torch.testing.assert_close(hot, shares.expand_as(hot), rtol=1e-6, atol=1e-6)
    q = p[:, :3] / p[:, :3].sum(1, keepdim=True)
    direct = shares * (q / shares) ** 0.25
    torch.testing.assert_close(
        apply_temperature(q, 4.0, shares), direct / direct.sum(1, keepdim=True)
    )
    assert torch.equal(apply_temperature(q, 0.5, shares), apply_temperature(q, 0.5))
    noise = torch.multinomial(shares.expand(400, 3), 1, generator=torch.Generator().manual_seed(0))
    t, _ = fit_temperature(q, noise[:, 0], ones(y), shares)
    found = apply_temperature(q, t, shares).gather(1, noise).log().mean()
    best = shares[noise].log().mean()
    assert t > 3.0 and -found < -1.05 * best + 0.02


def chosen(p: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, shares: torch.Tensor) -> float:
    """The temperature of latents whose softmax is p."""
    m = torch.log(p)
    return fit_calibration(Softmax(), m, torch.zeros_like(m), y, weight, (0.0,), shares).temperature


def nll_at(p: torch.Tensor, y: torch.Tensor, t: float, shares: torch.Tensor) -> torch.Tensor:
    return -apply_temperature(p, t, shares)[torch.arange(len(y)), y].log()


@pytest.mark.parametrize("seed", range(6))
def test_luck_is_given_up(seed):
    """By its definition: less is gained over the classes' shares than its error, or than a nat."""
    p, y = labelled(12, 2.5, seed)
    shares = torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
    first = fit_temperature(p, y, ones(y), shares)[0]
    t = chosen(p, y, ones(y), shares)
    gains = -shares.log()[y] - nll_at(p, y, first, shares)
    error = max(LUCK, float((gains - gains.mean()).square().sum().sqrt()))
    gain = float(gains.sum())
    if gain >= error:
        assert t == pytest.approx(first, rel=1e-6)
        return
    assert first < t <= MORE * first * (1 + 1e-9)
    if t < 0.999 * MORE * first:
        lost = float((nll_at(p, y, t, shares) - nll_at(p, y, first, shares)).sum())
        assert lost == pytest.approx(error - gain, rel=1e-6)


def test_luck_is_found_and_signal_is_not_taken_for_it():
    shares = torch.full((4,), 0.25).double()
    rises = []
    for n in (12, 400):
        each = [labelled(n, 1.0, s) for s in range(8)]
        noise = [
            torch.randint(4, (n,), generator=torch.Generator().manual_seed(s)) for s in range(8)
        ]
        for labels in ([y for _, y in each], noise):
            ratio = []
            for (p, _), y in zip(each, labels, strict=True):
                first = fit_temperature(p, y, ones(y), shares)[0]
                ratio.append(chosen(p, y, ones(y), shares) / first)
            rises.append(float(np.median(ratio)))
    few, few_noise, many, _ = rises
    assert few_noise > 3.0 and many == pytest.approx(1.0, rel=1e-9) and few < few_noise


def test_a_few_rows_of_large_weights_do_not_sharpen():
    """What they weigh is not how many they are."""
    p, y = labelled(40, 0.3, 3)
    shares = torch.full((4,), 0.25).double()
    one = fit_temperature(p, y, ones(y), shares)[0]
    assert one < 0.9
    assert fit_temperature(p, y, 1e6 * ones(y), shares)[0] == pytest.approx(one, rel=1e-3)
    # Without shares weights are copies, as for any classifier.
    assert fit_temperature(p, y, 1e6 * ones(y))[0] < 0.7 * one
    # Heat is believed.
    p, y = labelled(40, 4.0, 3)
    assert fit_temperature(p, y, 1e6 * ones(y), shares)[0] > 1.9


def test_rows_of_little_weight_are_rows_too():
    """Where few rows have nearly all the weight the temperature suits the others as well."""
    p, y = labelled(300, 3.0, 1)
    shares = torch.full((4,), 0.25).double()
    sure = p.argmax(1) == y
    for heavy, cold in ((1e6, 1.0), (2.0, None)):
        weight = torch.where(sure & (torch.arange(300) < 30), heavy, 1.0).double()
        t = chosen(p, y, weight, shares)
        alone = fit_temperature(p, y, weight, shares)[0]
        if cold is None:
            assert t == pytest.approx(alone, rel=1e-6)
        else:
            assert alone < cold
            assert t == pytest.approx(fit_temperature(p, y, ones(y), shares)[0], rel=1e-6)


def test_weights_are_copies():
    p, y = labelled(50, 2.0)
    copies = torch.arange(50) % 4
    repeated = fit_temperature(
        p.repeat_interleave(copies, 0), y.repeat_interleave(copies), torch.ones(int(copies.sum()))
    )
    assert fit_temperature(p, y, copies.double()) == pytest.approx(repeated, rel=1e-4)


@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 30),
    sharpness=st.sampled_from([0.01, 1.0, 1e6]),
    weight=st.sampled_from([1e-6, 1.0, 1e9]),
)
def test_bounded_and_order_preserving(seed, n, sharpness, weight):
    """Whatever the labels say: all right, all wrong, impossible."""
    rng = np.random.default_rng(seed)
    p = torch.softmax(sharpness * torch.tensor(rng.standard_normal((n, 3))), 1)
    y = torch.tensor(rng.integers(0, 3, n))
    t, loss = fit_temperature(p, y, torch.full((n,), weight, dtype=torch.float64))
    assert 1 / 8 <= t <= 1000 and math.isfinite(loss)
    hot = apply_temperature(p, t)
    clear = p.topk(2).values.diff().abs()[:, 0] > 1e-12
    assert torch.equal(hot.argmax(1)[clear], p.argmax(1)[clear])


def test_the_best_share_of_the_variance_is_taken():
    """Latents whose variance is nonsense: labels follow the mean alone."""
    rng = np.random.default_rng(0)
    m = torch.tensor(3 * rng.standard_normal((3000, 3)) - 4)
    v = torch.tensor(rng.exponential(20.0, (3000, 3)))
    true = LIKELIHOOD.prob(m).numpy()
    y = torch.tensor((true.cumsum(1) < rng.random((3000, 1))).sum(1).clip(max=2))
    found = fit_calibration(LIKELIHOOD, m, v, y, ones(y), VARIANCE_SCALES)
    assert found.variance_scale == 0.0
    assert found.temperature == pytest.approx(1.0, abs=0.06)
    honest = predict_proba(LIKELIHOOD, m, v).numpy()
    y = torch.tensor((honest.cumsum(1) < rng.random((3000, 1))).sum(1).clip(max=2))
    found = fit_calibration(LIKELIHOOD, m, v, y, ones(y), VARIANCE_SCALES)
    assert found.variance_scale == 1.0
    assert found.temperature == pytest.approx(1.0, abs=0.1)
    alone = fit_calibration(LIKELIHOOD, m, v, y, ones(y))
    assert alone.variance_scale == 1.0 and alone.loss == pytest.approx(found.loss, rel=1e-12)


# --- around any classifier -----------------------------------------------------------------------


def test_a_temperature_around_a_fitted_classifier():
    X, y = load_digits(return_X_y=True)
    names = np.array(list("abcdefghij"))[y]
    model = GaussianNB().fit(X[::3], names[::3])
    clf = TemperatureScaled(model).fit(X[1::3], names[1::3])
    p, q = model.predict_proba(X[2::3]), clf.predict_proba(X[2::3])
    expected, _ = fit_temperature(
        torch.tensor(model.predict_proba(X[1::3])), torch.tensor(y[1::3]), ones(y[1::3])
    )
    assert clf.estimator_ is model and clf.temperature_ == expected > 1.5
    assert_allclose(q, apply_temperature(torch.tensor(p).clamp(min=1e-300), expected))
    assert (q > 0).all()
    assert_array_equal(clf.predict(X[2::3]), model.predict(X[2::3]))
    assert nll(names[2::3], q, labels=clf.classes_) < 0.7 * nll(names[2::3], p, labels=clf.classes_)
    assert clf.score(X[2::3], names[2::3]) == model.score(X[2::3], names[2::3])


def test_it_is_what_calibrate_finds():
    """Of a coupled posterior, whose variance is always whole."""
    X, y = toy(200, 3)
    clf = fixed().fit(X[:60], y[:60])
    around = TemperatureScaled(clf).fit(X[60:], y[60:])
    proba = around.predict_proba(X)
    clf.calibrate(X[60:], y[60:])
    assert around.temperature_ == pytest.approx(clf.temperature_, rel=1e-6)
    assert_allclose(clf.predict_proba(X), proba, atol=1e-6)


def test_weights_and_clones():
    X, y = load_digits(return_X_y=True)
    model = GaussianNB().fit(X[::3], y[::3])
    X, y, w = X[1::3], y[1::3], np.arange(599) % 3
    weighted = TemperatureScaled(model).fit(X, y, w).temperature_
    repeated = TemperatureScaled(model).fit(np.repeat(X, w, 0), np.repeat(y, w)).temperature_
    assert weighted == pytest.approx(repeated, rel=1e-4)
    frozen = clone(TemperatureScaled(FrozenEstimator(model))).fit(X, y)
    assert frozen.temperature_ == TemperatureScaled(model).fit(X, y).temperature_
    fresh = TemperatureScaled(GaussianNB(), random_state=0).fit(X, y, w)
    assert fresh.estimator_.class_count_.sum() < w.sum()
    with pytest.raises(ValueError, match="not fitted to"):
        TemperatureScaled(model).fit(X, y + 1)
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        TemperatureScaled(model).fit(X, y, w - 1)


# A weight is not a repeated row where the rows held out are drawn at random.
CHECKS = [
    one
    for one in estimator_checks_generator(TemperatureScaled(LogisticRegression(), random_state=0))
    if "sample_weight_equivalence" not in one[1].func.__name__
]


# One of the checks casts NaN to labels.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(
    "estimator, check", CHECKS, ids=[check.func.__name__ for _, check in CHECKS]
)
def test_scikit_learns_contract(estimator, check):
    check(estimator)
