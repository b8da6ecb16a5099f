"""Whatever is a predictor answers everything that predictions are asked of."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.exceptions import NotFittedError
from torch import Tensor

from conjugp import GPClassifier
from conjugp._gp.prediction import apply_temperature
from conjugp._gp.predictor import EXACT, Integration, Predictive, Predictor
from conjugp._gp.temperature import PLAIN, Calibration, fit_temperature
from conjugp.conformal import ConformalClassifier
from conjugp.export import to_onnx
from conjugp.kernels import RBF, Matern12
from faces import fixed, toy


@dataclass(frozen=True)
class Average(Predictor):
    """Of several posteriors in the same units, any of them as likely."""

    parts: tuple[Predictor, ...]
    calibration: Calibration = PLAIN
    shares: Tensor | None = None

    @property
    def Z(self) -> Tensor:  # type: ignore[override]
        return self.parts[0].Z

    def prior(self):
        return self.parts[0].prior()

    def latent(self, X):
        m, v = (torch.stack(x) for x in zip(*(p.latent(X) for p in self.parts), strict=True))
        return m.mean(0), v.mean(0) + m.var(0, correction=0)

    def sample(self, X, n_samples, generator):
        each = [p.sample(X, n_samples, generator) for p in self.parts]
        pick = torch.arange(n_samples) % len(each)
        return torch.stack(each)[pick, torch.arange(n_samples)]

    def untempered(self, X: Tensor, how: Integration = EXACT) -> Tensor:
        return torch.stack([p.untempered(X, how) for p in self.parts]).mean(0)

    def predictive(self, X):
        each = [p.predictive(X) for p in self.parts]
        return Predictive(*(np.mean(x, axis=0) for x in zip(*each, strict=True)))


X, y = toy(90, 3)
A, b = X[::2], y[::2]


@pytest.fixture
def averaged() -> tuple[GPClassifier, list[GPClassifier]]:
    """A classifier that answers by two others."""
    parts = [fixed(kernel=kernel).fit(A, b) for kernel in (RBF(1.5, 4.0), Matern12(0.7, 9.0))]
    clf = copy(parts[0])
    model = Average(tuple(p._predictor for p in parts))
    clf._fitted = replace(clf._fitted, model=model)
    return clf, parts


def test_another_predictor_needs_no_other_estimator(averaged):
    clf, parts = averaged
    p = np.mean([part.predict_proba(X) for part in parts], axis=0)
    assert_allclose(clf.predict_proba(X), p, rtol=1e-12)
    np.testing.assert_array_equal(clf.predict(X), clf.classes_[p.argmax(1)])
    mean, variance = clf.predict_latent(X)
    assert_allclose(mean, np.mean([part.predict_latent(X)[0] for part in parts], axis=0))
    assert mean.shape == variance.shape == p.shape
    assert clf.sample_latent(X[:4], 5, random_state=0).shape == (5, 4, 3)
    found, each = clf.predict_uncertainty(X), [part.predict_uncertainty(X) for part in parts]
    # What the two do not agree on is uncertain too.
    assert (found.epistemic >= np.mean([u.epistemic for u in each], axis=0) - 1e-9).all()
    sets = ConformalClassifier(clf).fit(X[1::2], y[1::2]).predict_set(X, alpha=0.2)
    assert sets[np.arange(len(y)), np.searchsorted(clf.classes_, y)].mean() > 0.7


def test_another_predictor_is_calibrated(averaged):
    clf, _ = averaged
    p = clf.predict_proba(X)
    t, _ = fit_temperature(torch.tensor(p[1::2]), torch.tensor(y[1::2]), torch.ones(45).double())
    assert clf.calibrate(X[1::2], y[1::2]).temperature_ == pytest.approx(t, rel=1e-9)
    assert clf.variance_scale_ == 1.0 and t != 1.0
    assert_allclose(clf.predict_proba(X), apply_temperature(torch.tensor(p), t), rtol=1e-9)


def test_what_only_some_predictors_have(averaged, tmp_path):
    clf, _ = averaged
    with pytest.raises(TypeError, match="Average cannot be written"):
        clf.save(tmp_path / "model.conjugp")
    pytest.importorskip("onnx")
    with pytest.raises(TypeError, match="predictions of Average are not exported"):
        to_onnx(clf, tmp_path / "model.onnx")
    with pytest.raises(NotImplementedError, match="Average has no evidence lower bound"):
        clf.elbo(X, y)


def test_a_calibration_that_is_set():
    clf = fixed().fit(A, b)
    p, other = clf.predict_proba(X), copy(clf)
    clf.temperature_, clf.variance_scale_ = 2.0, 0.0
    assert (clf.temperature_, clf.variance_scale_) == (2.0, 0.0)
    mean = clf._predictor.likelihood.prob(torch.tensor(clf.predict_latent(X)[0]))  # type: ignore
    assert_allclose(clf.predict_proba(X), apply_temperature(mean, 2.0), rtol=1e-9)
    # That of a copy is its own.
    assert other.temperature_ == other.variance_scale_ == 1.0
    np.testing.assert_array_equal(other.predict_proba(X), p)
    clf.temperature_ = 0.0
    with pytest.raises(ValueError, match="temperature must be positive"):
        clf.predict_proba(X)


def test_before_there_is_a_fit():
    clf = GPClassifier()
    assert not hasattr(clf, "temperature_") and not hasattr(clf, "variance_scale_")
    with pytest.raises(NotFittedError):
        clf.predict_latent(X)
