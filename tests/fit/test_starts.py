"""Where kernels start."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from conjugp._fit.starts import (
    LEAST,
    LENGTH,
    POINTS,
    ROWS,
    SWEEPS,
    best_lengthscales,
    evidence,
    lengthscales,
    median_distance,
)
from conjugp._gp.posterior import initial_state
from conjugp._inference.fused import ClosedFormStep
from conjugp._inference.settings import Settings
from conjugp._inference.train import train
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF, Matern52
from conjugp.likelihoods import LogisticSoftmax


def rows(X: np.ndarray, y: np.ndarray) -> tuple[Data, torch.Tensor]:
    """Data in working units, and how large these are."""
    scale = X.std(axis=0)
    working = torch.tensor((X - X.mean(axis=0)) / scale)
    y = np.unique(y, return_inverse=True)[1]
    data = Data(working, torch.tensor(y), torch.ones(len(y)).double(), int(y.max()) + 1)
    return data, torch.tensor(scale)


def table(small: float, n: int = 900) -> np.ndarray:
    """Two features of deviation 1, eight of deviation `small`."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, 10)) * np.array([1.0, 1.0] + [small] * 8)


def test_median_distance():
    points = torch.tensor([[0.0], [0.0], [1.0], [4.0]])
    assert median_distance(points) == 3.0  # of 1, 1, 3, 4, 4; coinciding points do not count
    assert median_distance(points[:2]) == 1.0 and median_distance(points[:1]) == 1.0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_lengthscales_are_the_median_distance_in_units_between_the_users_and_working_ones(share):
    X = table(0.05)
    data, scale = rows(X, X[:, 0] > 0)
    lengths = lengthscales(data.X, scale, share)
    assert lengths.dtype == torch.float64
    between = lengths * scale**share  # the same for all features
    torch.testing.assert_close(between, between[:1].expand(10), rtol=1e-12, atol=0)
    # Divided by their lengthscales the rows have a median distance of one.
    assert median_distance(data.X / lengths) == pytest.approx(1.0, rel=1e-12)


def test_features_that_vary_much_count_for_more_where_they_say_more():
    X = table(0.05)
    data, scale = rows(X, np.digitize(X[:, 0] + X[:, 1], [-1, 0, 1]))
    found = best_lengthscales(RBF(), data, scale, 3.0)
    torch.testing.assert_close(found, lengthscales(data.X[:ROWS], scale, 1.0), rtol=0, atol=0)


def test_all_features_count_alike_where_those_that_vary_little_say_more():
    X = table(1e-6)
    data, scale = rows(X, np.digitize(X[:, 2] / 1e-6 + X[:, 3] / 1e-6, [-1, 0, 1]))
    found = best_lengthscales(Matern52(), data, scale, 3.0)
    torch.testing.assert_close(found, lengthscales(data.X[:ROWS], scale, 0.0), rtol=0, atol=0)


@pytest.mark.parametrize(("kernel", "small"), [(RBF(2.0), 0.05), (RBF(), 0.95)])
def test_nothing_is_tried_where_the_units_do_not_matter(kernel, small, monkeypatch):
    X = table(small)
    data, scale = rows(X, X[:, 0] > 0)
    monkeypatch.delattr("conjugp._fit.starts.evidence")
    found = best_lengthscales(kernel, data, scale, 3.0)
    torch.testing.assert_close(found, lengthscales(data.X[:ROWS], scale, 0.0), rtol=0, atol=0)


def test_with_few_rows_features_count_alike():
    X = table(0.05, LEAST - 1)
    data, scale = rows(X, np.digitize(X[:, 0] + X[:, 1], [-1, 0, 1]))
    found = best_lengthscales(RBF(), data, scale, 3.0)
    torch.testing.assert_close(found, lengthscales(data.X, scale, 0.0), rtol=0, atol=0)


def test_the_evidence_is_the_elbo_of_a_fit_of_q_alone(monkeypatch):
    X = table(1.0, 300)
    data, _ = rows(X, np.digitize(X[:, 0], [-0.5, 0.5]))
    kernel = RBF(2.0, 3.0)
    part = data.rows(POINTS, None)
    state = initial_state([kernel], data.X[:POINTS], part.X.new_full((3,), -math.log(2)))
    settings = Settings(
        *(LogisticSoftmax(), "tight", False, False, False),
        batch_size=part.n - 1,  # steps of a fixed size, and as the remainder is short: of all rows
        max_steps=SWEEPS,
        tol=0.0,
    )
    elbos, take = [], ClosedFormStep.take
    monkeypatch.setattr(ClosedFormStep, "take", lambda *a: elbos.append(take(*a)) or elbos[-1])
    train(state, part, settings, torch.Generator().manual_seed(0))
    assert evidence(kernel, data) == pytest.approx(elbos[-1], rel=1e-9)
    assert evidence(kernel, data) > evidence(RBF(LENGTH * 0.01, 3.0), data)


def test_a_kernel_without_a_factor_has_no_evidence():
    class Wrong(RBF):
        def __call__(self, X, Z):
            return -super().__call__(X, Z)

    X = table(1.0, 40)
    data, _ = rows(X, X[:, 0] > 0)
    assert evidence(Wrong(1.0, 1.0), data) == -math.inf
