"""predict_uncertainty against dense grids, large samples and the identities it must keep."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from brute import grid
from conjugp import FitOptions, GPClassifier
from conjugp._estimators import predicting as face
from conjugp._estimators.predicting import ProbabilisticClassifier, Uncertainty
from conjugp._gp.prediction import predict_proba
from conjugp._gp.predictor import Predictive, entropy
from conjugp._gp.temperature import Calibration
from conjugp.likelihoods import LIKELIHOODS, Likelihood, LogisticSoftmax, Softmax, get_likelihood
from faces import decoupled, fixed, toy

DETERMINISTIC = ["logistic-softmax", "softmax", "dirichlet", "robust-max"]


def entropies(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def row(*x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


# --- the expected entropy ------------------------------------------------------------------------

CASES = [
    ([0.0, 0.0], [1.0, 1.0]),
    ([3.0, -4.0], [0.01, 2.0]),
    ([-30.0, -32.0], [0.5, 1.0]),
    ([0.5, -1.0, 2.0], [0.3, 1.0, 0.7]),
    ([-5.0, -5.0, -9.0], [0.2, 1e-6, 1.0]),
    ([40.0, 1.0, -60.0], [1.0, 0.5, 0.2]),
]


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("m, v", CASES)
def test_expected_entropy_against_a_dense_grid(name, m, v):
    likelihood = get_likelihood(name)
    f, weight = grid(np.array(m), np.array(v))
    truth = float(weight @ entropies(likelihood.prob(f)))
    if name == "robust-max":  # but for points where two latents tie exactly
        f = f + torch.linspace(0, 1e-9, f.shape[1])
        truth = float(weight @ entropies(likelihood.prob(f)))
    assert float(likelihood.expected_entropy(row(*m), row(*v))) == pytest.approx(truth, abs=2e-6)


@pytest.mark.parametrize("likelihood", [LogisticSoftmax(), Softmax()], ids=lambda one: one.name)
@pytest.mark.parametrize("C", [5, 30, 150])
def test_expected_entropy_against_a_large_sample(likelihood, C):
    rng = np.random.default_rng(C)
    m = torch.tensor(3.0 * rng.standard_normal((3, C)) - 3.0)
    v = torch.tensor(rng.exponential([[0.05], [2.0], [30.0]], (3, C)))
    z = torch.tensor(rng.standard_normal((20_000, C)))
    for i, found in enumerate(likelihood.expected_entropy(m, v)):
        drawn = entropies(likelihood.prob(m[i] + v[i].sqrt() * z))
        error = float(drawn.std()) / math.sqrt(len(z))
        assert abs(float(found) - float(drawn.mean())) < 4.0 * error + 1e-6


class Plain(Likelihood):
    """The softmax from ``log_prob`` alone: everything sampled."""

    name = "plain"

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        log_p = torch.log_softmax(f, -1)
        return log_p.gather(-1, y[:, None].expand(*f.shape[:-1], 1)).squeeze(-1)


@pytest.mark.parametrize("m, v", CASES)
def test_sampled_expected_entropies(m, v):
    """A likelihood of one's own, and the probit with its few draws."""
    truth = float(Softmax().expected_entropy(row(*m), row(*v)))
    assert float(Plain().expected_entropy(row(*m), row(*v))) == pytest.approx(truth, abs=2e-3)
    probit = get_likelihood("heaviside")
    f, weight = grid(np.array(m), np.array(v))
    keep = weight > 1e-6
    truth = float(weight[keep] @ entropies(probit.prob(f[keep])))
    assert float(probit.expected_entropy(row(*m), row(*v))) == pytest.approx(truth, abs=0.02)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    C=st.integers(2, 12),
    level=st.sampled_from([-1e4, -50.0, 0.0, 50.0, 1e4]),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    variance=st.sampled_from([0.0, 1e-8, 0.2, 0.3, 5.0, 1e3]),
    name=st.sampled_from(["logistic-softmax", "softmax"]),
)
def test_expected_entropy_is_finite_and_never_above_the_total(
    seed, C, level, spread, variance, name
):
    likelihood, rng = get_likelihood(name), np.random.default_rng(seed)
    m = torch.tensor(level + spread * rng.standard_normal((2, C)))
    v = torch.tensor(variance * rng.uniform(0.5, 2.0, (2, C)))
    expected = likelihood.expected_entropy(m, v)
    total = entropies(predict_proba(likelihood, m, v))
    assert bool(torch.isfinite(expected).all())
    assert float(expected.min()) > -5e-6 and float((expected - total).max()) < 5e-6
    if variance == 0.0:
        assert_allclose(expected, total, atol=5e-6)
    alone = torch.cat([likelihood.expected_entropy(m[i : i + 1], v[i : i + 1]) for i in (0, 1)])
    assert_allclose(expected, alone, rtol=1e-9, atol=1e-10)


def test_no_rows():
    assert LogisticSoftmax().expected_entropy(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0,)


def test_every_likelihood_has_one():
    for name in LIKELIHOODS:
        found = get_likelihood(name).expected_entropy(row(1.0, -1.0, 0.0), row(0.5, 1.0, 2.0))
        assert found.shape == (1,) and found.dtype == torch.float64


# --- the classifiers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    return toy(90, 3, gap=2.5)


@pytest.fixture(scope="module")
def clf(data) -> GPClassifier:
    return fixed().fit(*data)


def adds_up(found: Uncertainty) -> None:
    assert_allclose(found.total, found.aleatoric + found.epistemic, rtol=1e-12)
    for part in found:
        assert part.dtype == np.float64 and np.isfinite(part).all() and (part >= 0).all()


def test_without_a_temperature_it_is_the_mutual_information(clf, data):
    X = np.vstack([data[0][:8], [[60.0, -60.0]]])
    found = clf.predict_uncertainty(X)
    adds_up(found)
    assert_allclose(found.total, entropy(clf.predict_proba(X)), rtol=1e-12)
    mean, variance = clf.predict_latent(X)
    for i, (m, v) in enumerate(zip(mean, variance, strict=True)):
        f, weight = grid(m, v)
        truth = float(weight @ entropies(LogisticSoftmax().prob(f)))
        assert found.aleatoric[i] == pytest.approx(truth, abs=3e-5)  # the grid's, at v = 4
    raw = clf.predict_uncertainty(X, calibrated=False)
    for one, other in zip(found, raw, strict=True):
        assert_allclose(one, other)


def test_far_from_the_data_the_epistemic_part_is_that_of_the_prior(clf, data):
    near, far = clf.predict_uncertainty(data[0]), clf.predict_uncertainty([[500.0, 500.0]])
    assert far.epistemic[0] > near.epistemic.max()
    m, v = torch.full((1, 3), -0.7, dtype=torch.float64), torch.full((1, 3), 4.0)
    expected = math.log(3) - float(LogisticSoftmax().expected_entropy(m, v.double()))
    assert far.epistemic[0] == pytest.approx(expected, abs=1e-5)


def test_more_rows_leave_less_to_learn():
    """Twice, four times the rows: the epistemic part falls, the aleatoric one stays."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (320, 1))
    y = (rng.random(320) < 0.7).astype(int)  # noise that no data removes
    at = np.linspace(-0.5, 0.5, 5)[:, None]
    found = [fixed().fit(X[:n], y[:n]).predict_uncertainty(at) for n in (20, 80, 320)]
    epistemic = [one.epistemic.mean() for one in found]
    assert epistemic[0] > 2 * epistemic[1] > 4 * epistemic[2]
    frequencies = np.array([[1 - y.mean(), y.mean()]])
    assert found[-1].aleatoric.mean() == pytest.approx(entropy(frequencies)[0], abs=0.08)


@pytest.mark.parametrize("temperature", [0.4, 3.0])
def test_a_temperature_keeps_the_proportion(data, temperature):
    X, y = data
    clf = fixed(temperature=temperature).fit(X, y)
    found = clf.predict_uncertainty(X)
    adds_up(found)
    assert_allclose(found.total, entropy(clf.predict_proba(X)), rtol=1e-12)
    raw = clf.predict_uncertainty(X, calibrated=False)
    untouched = fixed().fit(X, y).predict_uncertainty(X)
    for one, other in zip(raw, untouched, strict=True):
        assert_allclose(one, other)
    assert_allclose(found.epistemic / found.total, raw.epistemic / raw.total, rtol=1e-9)


def test_predictions_at_the_mean_still_know_what_they_do_not_know(data):
    X, y = data
    clf = decoupled().fit(X, y)
    whole = clf.predict_uncertainty(X)
    clf.variance_scale_ = 0.0
    found = clf.predict_uncertainty(X)
    adds_up(found)
    assert_allclose(found.total, entropy(clf.predict_proba(X)), rtol=1e-12)
    assert_allclose(found.epistemic / found.total, whole.epistemic / whole.total, rtol=1e-9)
    assert (found.epistemic > 0).all()


def test_a_point_posterior_has_no_epistemic_part(data):
    X, y = data
    found = decoupled(covariance="none").fit(X, y).predict_uncertainty(X)
    adds_up(found)
    assert (found.epistemic == 0).all() and (found.total > 0).all()


def test_entropies_too_small_to_divide():
    """Where the posterior is all but certain and a high temperature is not."""

    class Certain(ProbabilisticClassifier):
        classes_ = np.arange(2)

        def _rows(self, X):
            return torch.as_tensor(X)

        @property
        def _predictor(self):
            p = np.array([[1.0, 0.0], [1 - 1e-9, 1e-9]])
            return SimpleNamespace(
                proba=lambda X, how: np.tile([0.9, 0.1], (len(X), 1)),
                predictive=lambda X: Predictive(p, entropy(p) * 0.5),
                calibration=Calibration(2.0),
            )

    found = Certain().predict_uncertainty(np.zeros((2, 1)))
    adds_up(found)
    assert_allclose(found.total, entropy(np.array([[0.9, 0.1]]))[0])
    assert (found.epistemic < 2e-3).all()


def test_chunks_do_not_matter(clf, data, monkeypatch):
    whole = clf.predict_uncertainty(data[0])
    monkeypatch.setattr(face, "CHUNK_ELEMENTS", 30)
    for one, other in zip(whole, clf.predict_uncertainty(data[0]), strict=True):
        assert_allclose(one, other, atol=1e-12)
    assert clf.predict_uncertainty(data[0][:1]).total.shape == (1,)


def test_monte_carlo_predictions_agree(data):
    X, y = data
    options = FitOptions(prediction="qmc", n_samples=4096)
    sampled = fixed(options=options).fit(X, y).predict_uncertainty(X)
    adds_up(sampled)
    exact = fixed().fit(X, y).predict_uncertainty(X)
    assert_allclose(sampled.epistemic, exact.epistemic, atol=2e-3)


def test_the_sampler_has_it_from_its_draws():
    from conjugp import GibbsGPClassifier

    X, y = toy(30, 3)
    clf = GibbsGPClassifier(
        fixed().kernel,
        hyperparameters="fixed",
        prior_mean=-0.7,
        n_samples=300,
        n_warmup=50,
        n_chains=2,
        random_state=0,
    )
    with pytest.warns(UserWarning):
        clf.fit(X, y)
    at = np.vstack([X[:6], [[60.0, 60.0]]])
    found = clf.predict_uncertainty(at)
    adds_up(found)
    assert_allclose(found.total, entropy(clf.predict_proba(at)), rtol=1e-10)
    f = torch.tensor(clf.sample_latent(at, 4000, random_state=0))
    p = LogisticSoftmax().prob(f)
    assert_allclose(found.aleatoric, entropies(p).mean(0), atol=0.02)
    close = fixed().fit(X, y).predict_uncertainty(at)
    assert_allclose(found.epistemic, close.epistemic, atol=0.1)
