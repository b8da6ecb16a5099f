"""Kernels of some of the columns; what every kernel keeps, they keep in test_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from conjugp import GPClassifier, load
from conjugp.export import to_onnx
from conjugp.kernels import RBF, Linear, Matern32, Normalised
from conjugp.kernels._columns import Columns
from faces import fixed, toy

KERNEL = Columns(RBF((0.7, 2.0), 1.5), (2, 0)) + Columns(Linear(1.3, 0.3), (1,))


def test_it_is_the_kernel_of_those_columns(X, Z):
    expected = RBF((0.7, 2.0), 1.5)(X[:, [2, 0]], Z[:, [2, 0]]) + Linear(1.3, 0.3)(
        X[:, [1]], Z[:, [1]]
    )
    assert torch.equal(KERNEL(X, Z), expected)
    assert KERNEL.n_theta == 3 + 2
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(Columns(RBF(1.0, 1.0), (1,))(x, Z).sum(), x)
    assert not gradient[:, [0, 2]].any() and gradient[:, 1].any()


def test_each_column_has_its_own_unit():
    there = KERNEL.to_units(np.array([10.0, 5.0, 2.0])).frozen()
    first, second = there.parts
    assert_allclose(first.kernel.lengthscale, (0.7 * 2.0, 2.0 * 10.0))
    assert second.kernel.lengthscale == 1.3 * 5.0


def test_what_is_open_comes_from_those_columns():
    lengths = torch.tensor([1.0, 2.0, 3.0]).double()
    filled = Columns(RBF(), (2, 0)).filled(lengths, 4.0).frozen()
    assert filled == Columns(RBF((3.0, 1.0), 4.0), (2, 0))
    common = Columns(RBF(), (2, 0)).filled(torch.tensor(5.0).double(), 4.0).frozen()
    assert common == Columns(RBF(5.0, 4.0), (2, 0))
    inner = Normalised(Columns(RBF(), (0,))).filled(lengths, 4.0).frozen()
    assert inner == Normalised(Columns(RBF(1.0, 4.0), (0,)))


def test_parts_of_a_sum_know_their_own_units(X, Z):
    """Directions are those of the units of before, whatever they are added to."""
    kernel = Normalised(RBF(0.6, 2.0)) + Matern32(1.0, 0.5)
    scale = torch.tensor([0.1, 2.0, 30.0]).double()
    assert_allclose(kernel.to_units(scale)(X * scale, Z * scale), kernel(X, Z), rtol=1e-10)


@pytest.mark.parametrize("columns", [(), [0], (0, 0), (-1,), (0.5,), 1])
def test_columns_that_are_none(columns):
    with pytest.raises(ValueError, match="columns must be a tuple of different positions"):
        Columns(RBF(), columns)


def test_what_cannot_be():
    with pytest.raises(TypeError, match="kernel must be a kernel"):
        Columns(3.0, (0,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no column 3 in 2"):
        Columns(RBF(1.0, 1.0), (3,)).diag(torch.zeros(1, 2))


def test_a_fit_a_file_and_a_graph(tmp_path):
    X, y = toy(60, 3, 3)
    X = X * [1.0, 100.0, 0.01]
    given = Columns(RBF(), (0, 2)) + Columns(Matern32(), (1,))
    clf = GPClassifier(given, tol=0.1, random_state=0).fit(X, y)
    assert [part.columns for part in clf.kernel_.parts] == [(0, 2), (1,)]  # type: ignore
    assert clf.score(X, y) > 0.7
    p = clf.predict_proba(X)
    clf.save(tmp_path / "model.conjugp")
    again = load(tmp_path / "model.conjugp")
    np.testing.assert_array_equal(again.predict_proba(X), p)
    assert again.kernel_ == clf.kernel_
    runtime = pytest.importorskip("onnxruntime")
    to_onnx(clf, tmp_path / "model.onnx")
    found = runtime.InferenceSession(tmp_path / "model.onnx").run(None, {"X": X})[1]
    assert_allclose(found, p, atol=1e-5)


def test_columns_that_a_kernel_does_not_see_say_nothing():
    X, y = toy(60, 3, 3)
    clf = fixed(kernel=Columns(RBF(1.5, 4.0), (0, 1))).fit(X, y)
    other = X.copy()
    other[:, 2] = 7.0
    assert_allclose(clf.predict_proba(other), clf.predict_proba(X), rtol=1e-12)
