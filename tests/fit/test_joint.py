"""Kernel, mean and covariance of a decoupled posterior by one ELBO (docs/math.md, Q8)."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from conjugp import FitOptions, GPClassifier
from conjugp._fit.joint import Joint, learn_kernel
from conjugp._fit.weights import assemble
from conjugp._gp.covariance import family as covariance_family
from conjugp._gp.features import basis
from conjugp._gp.model import Model
from conjugp._inference.mean import Mean
from conjugp._inference.settings import Settings
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF
from problems import BOUNDS, LIKELIHOOD, blobs, generator

KERNEL = RBF((1.0, 1.5), 3.0)
N, M, M_V, C = 40, 12, 5, 4
FAMILIES = ("shared", "diagonal")


@pytest.fixture
def data() -> Data:
    return blobs(N, C)._replace(weight=torch.linspace(0.3, 2.0, N).double())


def model(data: Data, family: str, bound: str, kernel: RBF = KERNEL) -> Model:
    w = torch.randn(C, M, dtype=torch.float64, generator=generator(7))
    mean = Mean(w, torch.linspace(-1.0, 0.5, C).double())
    b = basis([kernel], data.X[:M] + 0.05)
    return assemble(kernel, b, mean, data, family, M_V, LIKELIHOOD, bound)


def settings(bound: str, **changes) -> Settings:
    usual = {"batch_size": N, "learning_rate": 0.02, "max_steps": 60, "kernel_prior": 0.0}
    return Settings(LIKELIHOOD, bound, **{**usual, **changes})


def at(q: Model, theta: torch.Tensor, data: Data) -> float:
    """The ELBO with another kernel and the same whitened mean and covariance."""
    kernel = KERNEL.with_theta(theta)
    L_inv = basis([kernel], q.Z).L_inv
    moved = replace(
        q, kernels=(kernel,), alpha=q.w @ L_inv[0], L_inv=L_inv[:, :M_V, :M_V].contiguous()
    )
    return moved.elbo(data)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_value_and_gradient_are_those_of_the_elbo(data, family, bound):
    q = model(data, family, bound)
    joint = Joint(q, data, settings(bound), generator())
    with torch.enable_grad():
        A, v = joint._features(data.X)
        found = joint._take.move(slice(0, N), A.detach().T, v.detach(), 0.0, 1.0, slopes=True)
        (g,) = torch.autograd.grad(joint._surrogate(A, v, found), joint.theta)
    assert joint.step(slice(0, N), 0.0, 0.0) == pytest.approx(q.elbo(data), rel=1e-10)
    theta, h = KERNEL.theta.double(), 1e-4
    expected = [
        (at(q, theta + h * e, data) - at(q, theta - h * e, data)) / (2 * h)
        for e in torch.eye(len(theta)).double()
    ]
    np.testing.assert_allclose(-data.total * g.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_gradient_of_sampled_classes_is_that_of_their_bound(data, family, bound):
    """The same classes drawn at three kernels: the gradient is the slope of what is estimated."""
    few = data.rows(0, 6)._replace(y=torch.tensor([0, 1, 0, 1, 1, 0]))
    q = model(data, family, bound)
    theta, h = KERNEL.theta.double(), 1e-4

    def joint(t: torch.Tensor) -> Joint:
        start = Joint(q, few, settings(bound, class_batch=1), generator(3))
        start.theta.data.copy_(t)
        return start

    def estimate(t: torch.Tensor) -> float:
        return joint(t).step(slice(0, 6), 0.0, 0.0)

    here = joint(theta)
    with torch.enable_grad():
        A, v = here._features(few.X)
        found = here._take.move(slice(0, 6), A.detach().T, v.detach(), 0.0, 0.0, slopes=True)
        (g,) = torch.autograd.grad(here._surrogate(A, v, found), here.theta)
    assert found.index is not None and len(found.index) == 3
    expected = [
        (estimate(theta + h * e) - estimate(theta - h * e)) / (2 * h)
        for e in torch.eye(len(theta)).double()
    ]
    np.testing.assert_allclose(-few.total * g.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_covariance_stays_at_its_optimum(data, family):
    """Sites at rest: repeated steps bring P to I + Σ θ a aᵀ of the batch."""
    q = model(data, family, "tight")
    joint = Joint(q, data, settings("tight", learning_rate=0.0, learn_mean=False), generator())
    for _ in range(400):
        joint.step(slice(0, N), 1.0, 0.0)
    again = assemble(
        KERNEL,
        basis([KERNEL], q.Z),
        Mean(q.w, q.mean),
        data,
        family,
        M_V,
        LIKELIHOOD,
        "tight",
    )
    # assemble takes two rounds of the fixed point that steps follow to its end.
    torch.testing.assert_close(joint.P, again.S.to_precision(), rtol=0.05, atol=0.05)
    m = replace(q, S=joint.S).elbo(data)
    assert m >= q.elbo(data)


@pytest.mark.parametrize("family", FAMILIES)
def test_precisions_and_covariances(data, family):
    S = model(data, family, "tight").S
    back = covariance_family(family).from_precision(S.to_precision())
    torch.testing.assert_close(back.R, S.R, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("bound", "family"), [*((bound, "shared") for bound in BOUNDS), ("tight", "diagonal")]
)
def test_learning_raises_the_elbo(bound, family, monkeypatch):
    monkeypatch.setattr("conjugp._fit.weights.JOINT_STEPS", 100)
    X = np.random.default_rng(1).standard_normal((400, 3))
    y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)

    def elbo(**changes) -> float:
        usual = {"kernel": RBF(4.0, 30.0), "n_inducing": 48, "covariance": family}
        usual["prior_mean"] = -math.log(2)  # at rest it would fit the shares of the classes
        options = FitOptions(mean_training="elbo", search=False, n_covariance=16)
        clf = GPClassifier(
            bound=bound, random_state=0, temperature=None, options=options, **usual, **changes
        )
        return clf.fit(X, y).elbo_

    at_rest = elbo(learn_hyperparameters=False)
    assert elbo() > at_rest + 20
    assert elbo(class_batch=1, batch_size=64) > at_rest + 15


def test_a_bad_step_is_taken_back(data, monkeypatch):
    q = model(data, "shared", "tight")
    step, calls = Joint.step, []

    def sometimes(self, *args):
        calls.append(len(calls))
        value = step(self, *args)
        if len(calls) == 3:
            self.theta.data.fill_(float("nan"))
            raise FloatingPointError
        return value

    monkeypatch.setattr(Joint, "step", sometimes)
    learned = learn_kernel(q, data, settings("tight"), 0.05, generator())
    assert torch.isfinite(learned.theta).all()
    monkeypatch.setattr(Joint, "step", lambda *_: (_ for _ in ()).throw(FloatingPointError("no")))
    with pytest.raises(FloatingPointError):
        learn_kernel(q, data, settings("tight"), 0.05, generator())
