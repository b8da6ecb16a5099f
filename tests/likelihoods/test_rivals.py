"""Every likelihood and every inference behind the one face: fits, streams, bad conditions."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from test_likelihoods import Cauchit

from conjugp import FitOptions, GPClassifier
from conjugp.kernels import RBF
from conjugp.likelihoods import LIKELIHOODS, Dirichlet, Heaviside, Likelihood, RobustMax, Softmax
from faces import decoupled, fixed, regret, toy

NAMES = list(LIKELIHOODS)
SMOOTH = [name for name, cls in LIKELIHOODS.items() if cls.smooth]
# Every likelihood with every inference it has.
WAYS = [(name, how) for name in NAMES for how in ("auto", "mc-vi")] + [("heaviside", "ep")]


def quick(**changes: Any) -> GPClassifier:
    """A kernel at rest and few sweeps."""
    return fixed(**{"kernel": RBF(1.5, 10.0), "prior_mean": "auto", "max_epochs": 15, **changes})


def fit(clf: GPClassifier, X: np.ndarray, y: np.ndarray, **more: Any) -> GPClassifier:
    """A fit that may stop early."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return clf.fit(X, y, **more)


def check(clf: GPClassifier, X: np.ndarray) -> np.ndarray:
    p = clf.predict_proba(X)
    assert np.all(np.isfinite(p)) and np.all(p >= 0)
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-9)
    assert math.isfinite(clf.elbo_)
    return p


@pytest.mark.parametrize(("name", "how"), WAYS)
@pytest.mark.parametrize("n_classes", [2, 4])
def test_it_learns(name, how, n_classes):
    X, y = toy(80, n_classes, gap=5.0)
    clf = fit(quick(likelihood=name, inference=how), X, y)
    check(clf, X)
    assert regret(clf, 80, n_classes, gap=5.0) < 0.06 * n_classes
    # Far from all data there is the prior, whose means are nearly equal.
    far = clf.predict_proba([[1e3, -1e3]])
    likelihood = LIKELIHOODS[name]()
    mean = torch.tensor(clf.prior_mean_)[None]
    prior = likelihood.integral(mean, torch.full_like(mean, 10.0))
    np.testing.assert_allclose(far, prior, rtol=0, atol=1e-9)
    np.testing.assert_allclose(far, 1 / n_classes, rtol=0, atol=0.05)


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_minibatches_and_everything_learned(name, how):
    X, y = toy(90, 3, gap=4.0)
    clf = GPClassifier(
        likelihood=name,
        inference=how,
        n_inducing=12,
        batch_size=30,
        max_epochs=10,
        random_state=0,
    )
    check(fit(clf, X, y), X)
    assert regret(clf, 90, gap=4.0) < 0.04


@pytest.mark.parametrize("name", [*SMOOTH, "own"])
@pytest.mark.parametrize("covariance", ["shared", "diagonal"])
def test_decoupled(name, covariance):
    X, y = toy(90, 3, gap=4.0)
    likelihood = Cauchit() if name == "own" else name
    clf = fit(decoupled(likelihood=likelihood, covariance=covariance, temperature="auto"), X, y)
    check(clf, X)
    assert regret(clf, 90, gap=4.0) < 0.1


@pytest.mark.parametrize("mean_training", ["map", "elbo"])
def test_decoupled_from_start_to_end(mean_training, monkeypatch):
    """The search for a kernel, the mean on its own points, the temperature, with the softmax."""
    monkeypatch.setattr("conjugp._fit.weights.JOINT_STEPS", 20)
    X, y = toy(400, 3, gap=3.0)
    options = FitOptions(mean_training=mean_training)
    clf = GPClassifier(
        likelihood="softmax", covariance="shared", options=options, random_state=0
    ).fit(X, y)
    assert clf._fitted.model.S.family == "shared" and len(clf.inducing_points_) > 300
    check(clf, X)
    assert regret(clf, 400, gap=3.0) < 0.05


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_weights_are_repetitions_and_labels_are_names(name, how):
    X, y = toy(40, 3, gap=3.0)
    weight = np.arange(40) % 3
    clf = fit(quick(likelihood=name, inference=how), X, y, sample_weight=weight)
    again = fit(quick(likelihood=name, inference=how), X.repeat(weight, 0), y.repeat(weight))
    np.testing.assert_allclose(clf.predict_proba(X), again.predict_proba(X), atol=1e-9)
    turned = fit(quick(likelihood=name, inference=how), X, (y + 1) % 3, sample_weight=weight)
    p, q = clf.predict_proba(X), turned.predict_proba(X)[:, [1, 2, 0]]
    if how == "mc-vi":  # draws of one class are not those of another
        assert np.abs(p - q).mean() < 0.03
    else:
        np.testing.assert_allclose(p, q, atol=1e-5)


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_streams(name, how):
    X, y = toy(120, 3, gap=4.0)
    clf = quick(likelihood=name, inference=how, n_inducing=20)
    for i in range(0, 120, 40):
        clf.partial_fit(X[i : i + 40], y[i : i + 40], classes=[0, 1, 2])
    check(clf, X)
    assert regret(clf, 120, gap=4.0) < 0.1
    clf.calibrate(X, y)
    assert 1 / 8 <= clf.temperature_ <= 8


@pytest.mark.parametrize("name", NAMES)
def test_float32_and_float64_agree(name):
    X, y = toy(1100, 3, gap=3.0)
    settings = {"likelihood": name, "n_inducing": 10, "batch_size": 1100, "max_epochs": 5}
    low, high = (fit(quick(dtype=d, **settings), X, y) for d in ("float32", "float64"))
    np.testing.assert_allclose(low.predict_proba(X), high.predict_proba(X), atol=2e-2)
    assert np.abs(low.predict_proba(X) - high.predict_proba(X)).mean() < 5e-4


# --- bad conditions ------------------------------------------------------------------------------


def overlapping() -> tuple[np.ndarray, np.ndarray]:
    return toy(42, 3, gap=0.0)


def two_of_a_class() -> tuple[np.ndarray, np.ndarray]:
    X, y = toy(42, 3, gap=2.0)
    keep = (y != 2) | (np.cumsum(y == 2) <= 2)
    return X[keep], y[keep]


def separable() -> tuple[np.ndarray, np.ndarray]:
    return toy(42, 3, gap=40.0)


def noisy() -> tuple[np.ndarray, np.ndarray]:
    X, y = toy(42, 3, gap=4.0)
    return X, np.where(np.random.default_rng(1).random(42) < 0.2, (y + 1) % 3, y)


@pytest.mark.parametrize("make", [overlapping, two_of_a_class, separable, noisy])
@pytest.mark.parametrize(("name", "how"), WAYS)
def test_bad_conditions(name, how, make):
    """Full batch and minibatches, hyperparameters learned, a temperature: always an answer."""
    X, y = make()
    # Robust-max is as sure of labels that mean nothing as of others: worse than chance.
    most = math.log(3) * (1.3 if name == "robust-max" else 1.02)
    for more in ({"max_epochs": 8}, {"max_epochs": 2, "batch_size": 20, "n_inducing": 10}):
        clf = fit(GPClassifier(likelihood=name, inference=how, random_state=0, **more), X, y)
        p = check(clf, X)
        assert -np.log(p[np.arange(len(y)), y]).mean() < most


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variance", [1e-3, 1e5])
def test_kernel_variances_far_from_one(name, variance):
    X, y = toy(50, 3, gap=3.0)
    for batch in (None, 20):
        check(fit(quick(kernel=RBF(1.5, variance), likelihood=name, batch_size=batch), X, y), X)


# --- what goes with what --------------------------------------------------------------------------


def test_instances_and_names_are_the_same():
    X, y = toy(40)
    for name, instance in [("softmax", Softmax()), ("dirichlet", Dirichlet())]:
        p = fit(quick(likelihood=name), X, y).predict_proba(X)
        np.testing.assert_array_equal(fit(quick(likelihood=instance), X, y).predict_proba(X), p)


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (Heaviside(0.1), Heaviside(10.0)),
        (RobustMax(1e-3), RobustMax(0.3)),
        (Dirichlet(0.01), Dirichlet(2.0)),
    ],
)
def test_parameters_of_a_likelihood_matter(few, many):
    """More noise, less certain predictions."""
    X, y = toy(60, gap=3.0)
    sure, unsure = (
        fit(quick(likelihood=likelihood), X, y).predict_proba(X).max(1).mean()
        for likelihood in (few, many)
    )
    assert sure > unsure + 0.05


def test_mc_vi_is_the_bound_mc():
    X, y = toy(40)
    p = fit(quick(likelihood="softmax", inference="mc-vi"), X, y).predict_proba(X)
    same = fit(quick(likelihood="softmax", bound="mc"), X, y).predict_proba(X)
    np.testing.assert_array_equal(same, p)


def test_mc_vi_finds_a_higher_elbo_than_any_bound():
    X, y = toy(60, gap=2.0)
    for likelihood in ("logistic-softmax", "softmax", "heaviside"):
        cls = LIKELIHOODS[likelihood]
        elbos = [fit(quick(likelihood=likelihood, bound=b), X, y).elbo_ for b in cls.bounds]
        sampled = fit(quick(likelihood=likelihood, inference="mc-vi"), X, y).elbo_
        assert sampled > max(elbos) - 0.5 and elbos[0] == max(elbos)


def test_mc_vi_of_a_gaussian_is_exact():
    """Mirrored draws integrate quadratics, up to how well they fill the plane."""
    X, y = toy(40)
    exact, sampled = (
        fit(quick(likelihood="dirichlet", inference=how), X, y) for how in ("auto", "mc-vi")
    )
    np.testing.assert_allclose(
        sampled.predict_latent(X)[0], exact.predict_latent(X)[0], rtol=0, atol=0.15
    )


def test_only_smooth_likelihoods_are_decoupled():
    X, y = toy(500, 3, gap=3.0)
    clf = fit(GPClassifier(likelihood="robust-max", max_epochs=1, random_state=0), X, y)
    assert clf._fitted.model.S.family == "full" and len(clf.inducing_points_) == 150
    with pytest.raises(ValueError, match=r"covariance='shared'.*'robust-max'.*'full' or 'auto'"):
        decoupled(likelihood="robust-max").fit(X, y)


def test_pairs_that_do_not_go_together():
    X, y = toy(30)
    for settings, message in [
        ({"inference": "ep"}, "inference='ep' needs likelihood='heaviside'"),
        ({"inference": "ep", "likelihood": "softmax"}, "inference='ep' needs"),
        ({"inference": "mc-vi", "bound": "tight"}, "bound must be None with inference='mc-vi'"),
        ({"inference": "mc-vi", "covariance": "shared"}, "covariance='shared' needs inference"),
        (
            {"likelihood": "softmax", "bound": "collapsed"},
            "bound must be one of 'exact', 'tight', 'jensen'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            fixed(**settings).fit(X, y)


def test_one_s_own_likelihood():
    """One class with log_prob: fits, predictions, streams; its answers are those of its density."""
    X, y = toy(60, gap=4.0)
    for settings in ({}, {"batch_size": 20}, {"temperature": "auto"}):
        clf = fit(quick(likelihood=Cauchit(), **settings), X, y)
        assert isinstance(clf.likelihood, Likelihood)
        check(clf, X)
        assert regret(clf, 60, gap=4.0) < 0.3
    clf = quick(likelihood=Cauchit()).partial_fit(X, y, classes=[0, 1, 2])
    m, v = (torch.tensor(x) for x in clf.predict_latent(X[:3]))
    generator = torch.Generator().manual_seed(0)
    f = m + v.sqrt() * torch.randn(100_000, 3, 3, generator=generator, dtype=torch.float64)
    expected = Cauchit().prob(f).mean(0).numpy()
    np.testing.assert_allclose(clf.predict_proba(X[:3]), expected, atol=5e-3)
