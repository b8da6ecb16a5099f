"""Likelihoods by name. A new one is a file here and a line in ``LIKELIHOODS``."""

from __future__ import annotations

from conjugp.likelihoods.base import Likelihood, Site
from conjugp.likelihoods.logistic_softmax import LogisticSoftmax

__all__ = ["LIKELIHOODS", "Likelihood", "LogisticSoftmax", "Site", "get_likelihood"]

LIKELIHOODS: dict[str, type[Likelihood]] = {LogisticSoftmax.name: LogisticSoftmax}


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
