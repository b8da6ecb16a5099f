"""The search for scales and a lengthscale: which candidates it looks at, and which it takes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from conjugp._fit.search import TIE, Candidate, held_out_loss, rescaled, search
from conjugp._fit.starts import class_centres
from conjugp._gp.inducing import by_class
from conjugp._inference.settings import Settings
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF, Normalised
from problems import LIKELIHOOD, blobs, generator

FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)


def valley(best: float, floor: float = 1.0):
    """A loss with its minimum at one lengthscale of the first feature."""
    return lambda kernel: floor + math.log(kernel.lengthscale[0] / best) ** 2


def run(starts, loss, first=(1, 3), **more):
    seen: list[Candidate] = []
    found = search(starts, FACTORS, first, loss, 2, seen.append, **more)
    return found, seen


def test_it_walks_to_the_bottom():
    for best in (0.125, 0.5, 2.0):
        found, seen = run([("a", RBF([1.0, 3.0], 5.0))], valley(best))
        np.testing.assert_allclose(found.kernel.lengthscale, [best, 3 * best])
        assert found.kernel.variance == 5.0
        tried = [c.kernel.lengthscale[0] for c in seen]
        assert len(tried) == len(set(tried))  # nothing twice


def test_the_better_start_wins():
    starts = [("a", RBF([1.0, 1.0], 1.0)), ("b", RBF([7.0, 1.0], 1.0))]
    found, _ = run(starts, valley(7.0))
    np.testing.assert_allclose(found.kernel.lengthscale, [7.0, 1.0])


def test_a_glance_leaves_two_starts():
    starts = [(name, RBF([float(10**i), 1.0], 1.0)) for i, name in enumerate("abcd")]
    glances: list[float] = []

    def glance(kernel: RBF) -> float:
        glances.append(kernel.lengthscale[0])
        return valley(100.0)(kernel)

    found, seen = run(starts, valley(100.0), glance=glance)
    assert len(glances) == 8
    assert {round(math.log10(c.kernel.lengthscale[0] / 0.25)) for c in seen[:2]} <= {1, 2, 3}
    np.testing.assert_allclose(found.kernel.lengthscale, [100.0, 1.0])


def test_of_equals_the_shortest_is_taken():
    loss = {0.125: 3.0, 0.25: 1.0 + 0.9 * TIE, 0.5: 1.0, 1.0: 1.0 + 2 * TIE, 2.0: 2.0}
    found, _ = run([("a", RBF([1.0, 1.0], 1.0))], lambda k: loss[float(k.lengthscale[0])])
    assert found.kernel.lengthscale[0] == 0.25
    loss[0.25] = 1.0 + 1.1 * TIE
    found, _ = run([("a", RBF([1.0, 1.0], 1.0))], lambda k: loss[float(k.lengthscale[0])])
    assert found.kernel.lengthscale[0] == 0.5


def test_lengths_on_the_sphere_are_rescaled_too():
    kernel = Normalised(RBF(0.8, 2.0), units=(1.0, 4.0))
    assert rescaled(kernel, 0.5, 2) == Normalised(RBF(0.4, 2.0), units=(1.0, 4.0))


def test_centres_are_found_in_the_metric_of_the_kernel():
    rng = np.random.default_rng(0)
    X = torch.tensor(rng.standard_normal((60, 2)) * [1.0, 100.0])
    data = Data(X, torch.arange(60) % 3, torch.ones(60).double(), 3)
    length = torch.tensor([1.0, 100.0]).double()
    expected = by_class(data._replace(X=X / length), 9, generator()) * length
    found = class_centres(RBF([1.0, 100.0], 1.0), data, 9, generator())
    torch.testing.assert_close(found, expected)
    # On the sphere rows of different length in one direction are one point.
    doubled = data._replace(X=torch.cat([X[:30], 7 * X[:30]]), y=torch.arange(60) % 30 % 3)
    sphere = Normalised(RBF(0.5, 1.0), units=(1.0, 0.01))
    Z = class_centres(sphere, doubled, 30, generator())
    U = sphere.directions(doubled.X)
    gaps = torch.cdist(sphere.directions(Z), U).amin(1)
    assert len(Z) <= 30 and float(gaps.max()) < 1e-6


class Wrong(RBF):
    """No kernel at all."""

    def __call__(self, X, Z):
        return -super().__call__(X, Z)


class Overflowing(RBF):
    """One whose values leave the range."""

    def __call__(self, X, Z):
        return super().__call__(X, Z) * (torch.inf if X is not Z else 1.0)


@pytest.mark.parametrize("kind", [Wrong, Overflowing])
def test_a_kernel_that_fails_loses(kind):
    data = blobs(60, 3)
    settings = Settings(LIKELIHOOD, "tight", max_epochs=2, batch_size=20, learning_rate=0.1)

    def loss(kernel: RBF) -> float:
        rows = data.rows(0, 40), data.rows(40, None)
        return held_out_loss(kernel, *rows, torch.zeros(3).double(), 10, settings, 0)

    starts = [("wrong", kind([1.0, 1.0], 1.0)), ("right", RBF([1.0, 1.0], 1.0))]
    found, seen = run(starts, loss)
    assert type(found.kernel) is RBF and math.isfinite(found.loss)
    assert {c.loss for c in seen if type(c.kernel) is kind} == {math.inf}
