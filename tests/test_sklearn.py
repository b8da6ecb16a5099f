"""scikit-learn's own contract, every check of it."""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks

from conjugp import FitOptions, GPClassifier
from conjugp.likelihoods import LIKELIHOODS


@parametrize_with_checks(
    [
        GPClassifier(),
        GPClassifier(covariance="shared", max_epochs=5),
        GPClassifier.paper(
            n_inducing=20, max_epochs=20, options=FitOptions(prediction="qmc", n_samples=64)
        ),
        *(
            GPClassifier(likelihood=name, n_inducing=10, max_epochs=5, temperature=None)
            for name in LIKELIHOODS
            if name != "logistic-softmax"
        ),
        GPClassifier(inference="mc-vi", n_inducing=10, max_epochs=5, temperature=None),
    ]
)
def test_estimator(estimator, check):
    check(estimator)
