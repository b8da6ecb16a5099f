"""A model with many classes, built by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from conjugp import GPClassifier
from conjugp._gp.covariance import family as family_of
from conjugp._gp.features import basis
from conjugp._gp.model import Model
from conjugp._gp.temperature import Calibration
from conjugp._inputs.inputs import Inputs, Scaling
from conjugp.kernels import RBF
from conjugp.likelihoods import LogisticSoftmax


def model(n_classes: int, n_inducing: int = 20, family: str = "shared") -> Model:
    """Random weights on random points in two dimensions."""
    g = torch.Generator().manual_seed(0)
    Z = torch.randn(n_inducing, 2, generator=g, dtype=torch.float64)
    b = basis((RBF(1.0, 4.0),), Z)
    w = torch.randn(n_classes, n_inducing, generator=g, dtype=torch.float64)
    R = 0.5 * torch.eye(n_inducing, dtype=torch.float64)[None]
    if family == "diagonal":
        R = torch.rand(n_classes, n_inducing, generator=g, dtype=torch.float64)
    alpha = (b.L_inv[0].T @ w.T).T
    mean = torch.full((n_classes,), -float(np.log(n_classes)), dtype=torch.float64)
    parts = (LogisticSoftmax(), "tight", b.kernels, Z, w, alpha, mean, b.L_inv)
    return Model(*parts, family_of(family)(R))


def classifier(n_classes: int, variance_scale: float = 1.0, family: str = "shared") -> GPClassifier:
    """A fitted classifier around it."""
    clf = GPClassifier()
    clf.classes_ = np.arange(n_classes)
    clf.n_features_in_ = 2
    calibration = Calibration(1.3, variance_scale)
    predictor = model(n_classes, family=family).with_calibration(calibration, None)
    clf._fitted = SimpleNamespace(model=predictor)  # type: ignore[assignment]
    clf._inputs = Inputs(Scaling(np.zeros(2), np.ones(2)))
    clf._prediction_seed = 0
    return clf
