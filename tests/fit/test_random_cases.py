"""Default fits to random tables: nothing is raised, and the classes' frequencies are no better."""

from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest

from conjugp import GPClassifier
from random_cases import N_TEST, allowed, base_nll, case, faults, n_rows, nll

# Fits of many rows take long; bench/robust.py runs them too.
SMALL, MANY = 350, 1001
FEW = [*islice((s for s in count() if n_rows(s) <= SMALL), 38)]
FEW += [*islice((s for s in count() if SMALL < n_rows(s) <= MANY), 2)]
FEW += [662, 877]  # few rows have nearly all the weight, and luck


@pytest.mark.filterwarnings("ignore:sample_weight averages:UserWarning")  # they are odd
@pytest.mark.parametrize("seed", FEW)
def test_a_default_fit_is_no_worse_than_the_frequencies(seed):
    one = case(seed)
    clf = GPClassifier(random_state=seed).fit(one.X_train, one.y_train, one.weight)
    p = clf.predict_proba(one.X_test)
    assert not faults(p), one.description
    assert nll(one, p, clf.classes_) <= allowed(base_nll(one)), one.description


def test_cases_are_the_same_ones_every_time():
    for seed in range(30):
        a, b = case(seed), case(seed)
        assert a.description == b.description and len(a.y_train) == n_rows(seed)
        for x, y in zip(a[:5], b[:5], strict=True):
            np.testing.assert_array_equal(x, y)


def test_cases_can_be_scored():
    for seed in range(60):
        one = case(seed)
        weight = np.ones(len(one.y_train)) if one.weight is None else one.weight
        assert np.isfinite(one.X_train).all() and np.isfinite(one.X_test).all()
        assert len(one.y_test) == N_TEST
        assert set(one.y_test) <= set(one.y_train[weight > 0])
        assert 0 < base_nll(one) < np.inf


def test_what_is_wrong_with_probabilities_is_seen():
    assert not faults(np.array([[0.25, 0.75]]))
    assert faults(np.array([[np.nan, 1.0]])) and faults(np.array([[0.5, 0.6]]))
    assert faults(np.array([[-0.1, 1.1]]))
