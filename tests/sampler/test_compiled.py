"""The compiled draw of a full field against the readable one."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FunctionType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conjugp._sampler
from conjugp._sampler import compiled
from conjugp._sampler import sweep as gibbs
from conjugp._sampler.chain import Target, first_state, run
from conjugp._sampler.sweep import Observations
from samplers import target


def plain() -> Target:
    """Every row has its own input."""
    repeated = target("full", n=60)
    return replace(repeated, data=Observations(repeated.data.y[:60], 3))


TARGETS = {
    "plain": plain,
    "repeated inputs": lambda: target("full", n=40),
    "paper": lambda: target("paper", n=40),
    "a kernel for every class": lambda: target("classes", n=40),
    "sampled": lambda: target("sampled", n=20),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_chain_is_the_readable_one(name, monkeypatch):
    problem, found = TARGETS[name](), []
    for function in (compiled.correction, gibbs.correction):
        monkeypatch.setattr(gibbs, "fastest_correction", lambda function=function: function)
        state = first_state(problem, np.random.SeedSequence(3))
        found.append(run(problem, state, 50, n_warmup=0, thin=1))
    (last, draws), (same_last, same) = found
    np.testing.assert_allclose(draws.g, same.g, rtol=0, atol=1e-9)
    np.testing.assert_allclose(draws.log_likelihood, same.log_likelihood, rtol=0, atol=1e-9)
    np.testing.assert_allclose(draws.theta, same.theta, rtol=0, atol=1e-9)
    # Another count anywhere, and the generators would not stand at the same number.
    assert last.rng.bit_generator.state == same_last.rng.bit_generator.state


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 4), st.floats(0, 1))
def test_corrections_are_equal(seed, n_inputs, n_classes, share):
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((n_inputs, n_inputs))
    K = A @ A.T + 0.1 * np.eye(n_inputs)
    shape = (n_classes, n_inputs)
    omega = 10 ** rng.uniform(-4, 4, shape) * (rng.random(shape) < share)
    omega[rng.integers(n_classes)] *= rng.random() < 0.5  # a class without a site
    kappa = rng.standard_normal(shape) * (omega > 0)
    r, noise = rng.standard_normal((2, *shape))
    found = compiled.correction(K, kappa, omega, r, noise)
    expected = gibbs.correction(K, kappa, omega, r, noise)
    assert np.array_equal(found != 0, omega != 0)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def test_a_singular_kernel_is_the_same_error():
    K = np.array([[1.0, 2.0], [2.0, 1.0]])
    sites = np.ones((1, 2)), np.full((1, 2), 100.0), np.zeros((1, 2)), np.zeros((1, 2))
    messages = []
    for function in (compiled.correction, gibbs.correction):
        with pytest.raises(FloatingPointError) as error:
            function(K, *sites)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_the_compiled_one_is_taken_if_there_is_one(monkeypatch):
    choose = gibbs.fastest_correction.__wrapped__
    assert choose() is compiled.correction
    monkeypatch.delattr(conjugp._sampler, "compiled")
    monkeypatch.delitem(sys.modules, "conjugp._sampler.compiled")
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    assert choose() is gibbs.correction


def test_it_is_kept_on_disk_and_works_without():
    kept = compiled._run.stats
    assert sum(kept.cache_hits.values()) + sum(kept.cache_misses.values()) == 1
    code = compiled._correction.__code__.replace(co_filename="<nowhere>")  # has no directory
    again = compiled.compiled(FunctionType(code, vars(compiled)))
    K, ones = np.eye(3), np.ones((1, 3))
    x, definite = again(K, ones, ones, ones, ones, compiled._POTRF, compiled._TRSV)
    assert definite and np.allclose(x, 0.5)
