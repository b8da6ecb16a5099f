"""The columns of X, and everything that has units, to working units and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conjugp import GPClassifier
from conjugp._inputs import inputs as module
from conjugp._inputs.inputs import Inputs, Scaling
from conjugp._persistence.parts import Parts
from conjugp._rows.canonical import Rows
from conjugp.kernels import RBF, Linear
from faces import fixed, toy

A = np.random.default_rng(0).normal(size=(40, 3)) * [1.0, 50.0, 1e-3] + [0.0, 1000.0, 0.5]
ROWS = Rows(A, np.zeros(40, np.int64), np.ones(40))
INPUTS = Inputs.fit(ROWS, [None], ("a", "b", "c"))


def test_rows_and_points_go_to_working_units_and_back(monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 7)
    work = INPUTS.apply(A, torch.empty(0, dtype=torch.float64))
    np.testing.assert_allclose(work.numpy(), (A - A.mean(0)) / A.std(0), atol=1e-12)
    np.testing.assert_allclose(INPUTS.invert(work), A, rtol=1e-12)
    assert INPUTS.apply(A, torch.empty(0)).dtype == torch.float32


def test_kernels_say_the_same_in_both_units():
    kernel = RBF((2.0, 30.0, 1e-3), 1.5)
    X, work = torch.tensor(A), INPUTS.apply(A, torch.empty(0, dtype=torch.float64))
    inner = INPUTS.inward(kernel)
    torch.testing.assert_close(inner(work, work), kernel(X, X))
    back = INPUTS.outward(inner)
    np.testing.assert_allclose(back.lengthscale, kernel.lengthscale)
    assert INPUTS.inward(None) is None


@pytest.mark.parametrize("kernels, centred", [([None], True), ([RBF()], True), ([Linear()], False)])
def test_the_origin_stays_where_a_kernel_minds_it(kernels, centred):
    shift = Inputs.fit(ROWS, [*kernels, RBF()], None).scaling.shift
    assert bool(shift.any()) == centred


def test_described_and_read_again():
    again = Inputs.read(Parts(INPUTS.describe()))
    assert again.names == INPUTS.names and again.n_features == 3
    for one, other in zip(again.scaling, INPUTS.scaling, strict=True):
        np.testing.assert_array_equal(one, other)
    unnamed = Inputs(Scaling(np.zeros(2), np.ones(2)))
    assert Inputs.read(Parts(unnamed.describe())).names is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n_features", 4, "shift has shape"),
        ("feature_names", ["a", "b"], "one text for each feature"),
        ("feature_names", ["a", "b", 3], "one text for each feature"),
        ("scale", np.array([1.0, 0.0, 1.0]), "scale must be positive"),
        ("shift", np.array([1.0, np.nan, 1.0]), "not finite"),
    ],
)
def test_what_describes_no_inputs(name, value, message):
    found = INPUTS.describe() | {"feature_names": None} | {name: value}
    with pytest.raises(ValueError, match=message):
        Inputs.read(Parts(found))


def test_a_classifier_keeps_the_names_of_its_last_fit():
    pandas = pytest.importorskip("pandas")
    X, y = toy(40, 2)
    clf = fixed(warm_start=True).fit(pandas.DataFrame(X, columns=["u", "v"]), y)
    assert clf._inputs.names == ("u", "v") == tuple(clf.feature_names_in_)
    clf.fit(X, y)
    assert clf._inputs.names is None and not hasattr(clf, "feature_names_in_")
    batch = pandas.DataFrame(X, columns=["v", "w"])
    assert GPClassifier().partial_fit(batch, y, [0, 1])._inputs.names == ("v", "w")
