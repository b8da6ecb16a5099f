"""Likelihoods by name. A new one is a file here and a line in ``LIKELIHOODS``."""

from __future__ import annotations

from conjugp.likelihoods._base import Expectation, Likelihood, Site
from conjugp.likelihoods._dirichlet import Dirichlet
from conjugp.likelihoods._heaviside import Heaviside
from conjugp.likelihoods._logistic_softmax import LogisticSoftmax
from conjugp.likelihoods._robust_max import RobustMax
from conjugp.likelihoods._softmax import Softmax

__all__ = [
    "LIKELIHOODS",
    "Dirichlet",
    "Expectation",
    "Heaviside",
    "Likelihood",
    "LogisticSoftmax",
    "RobustMax",
    "Site",
    "Softmax",
    "get_likelihood",
]

LIKELIHOODS: dict[str, type[Likelihood]] = {
    likelihood.name: likelihood
    for likelihood in (LogisticSoftmax, Softmax, RobustMax, Heaviside, Dirichlet)
}


def get_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """The likelihood of that name, or the instance itself."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in LIKELIHOODS:
        return LIKELIHOODS[likelihood]()
    known = ", ".join(repr(name) for name in LIKELIHOODS)
    raise ValueError(
        f"likelihood must be one of {known} or a Likelihood instance, got {likelihood!r}"
    )
