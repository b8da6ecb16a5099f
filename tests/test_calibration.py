"""The temperature and the leave-one-out moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conjugp.calibration import (
    LOG_BOUND,
    PRIOR_SD,
    VARIANCE_SCALES,
    fit_calibration,
    fit_temperature,
)
from conjugp.prediction import apply_temperature, predict_proba
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
    grid = [direct(math.exp(x)) for x in np.linspace(-LOG_BOUND, LOG_BOUND, 400)]
    assert loss <= min(grid) + 1e-8


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
    assert 1 / 8 <= t <= 8 and math.isfinite(loss)
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
