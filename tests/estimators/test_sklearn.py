"""scikit-learn's own contract, every check of it."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from conjugp import FitOptions, GPClassifier

# A few passes show the contract as well as many.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@parametrize_with_checks(
    [
        GPClassifier(),
        GPClassifier(covariance="shared", max_epochs=5),
        GPClassifier.paper(
            n_inducing=20, max_epochs=20, options=FitOptions(prediction="qmc", n_samples=64)
        ),
        # Likelihoods share this face: one stands for those without a gradient at a point.
        GPClassifier(likelihood="robust-max", n_inducing=10, max_epochs=5, temperature=None),
        GPClassifier(inference="mc-vi", n_inducing=10, max_epochs=5, temperature=None),
    ]
)
def test_estimator(estimator, check):
    check(estimator)
