"""Columns with long tails: what becomes of them, and the way back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm, rankdata

import conjugp
from conjugp import GPClassifier
from conjugp._inputs.inputs import Inputs
from conjugp._inputs.taming import BEND, FEW_VALUES, Taming, bent, tamed
from conjugp._rows.canonical import Rows
from conjugp.export import to_onnx
from conjugp.kernels import RBF

LIKE = torch.empty(0, dtype=torch.float64)


def fitted(X: NDArray, kernel: RBF | None = None, weight: NDArray | None = None) -> Inputs:
    weight = np.ones(len(X)) if weight is None else weight
    return Inputs.fit(Rows(X, np.zeros(len(X), int), weight), [kernel], None)


def skewed(n: int = 400, seed: int = 0) -> tuple[NDArray, NDArray]:
    """What matters is the logarithm of one column; the other two are a normal and a mixed one."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, 3))
    X = z.copy()
    X[:, 1] = np.exp(2.5 * z[:, 1])
    X[:, 2] = np.where(rng.random(n) < 0.6, 0.0, np.exp(z[:, 2]))
    y = (z[:, 1] + 0.5 * z[:, 0] + 0.2 * rng.standard_normal(n) > 0).astype(int)
    return X, y


def test_a_column_is_half_its_bent_values_and_half_its_normal_scores() -> None:
    X, _ = skewed()
    inputs = fitted(X)
    taming = inputs.scaling.taming
    assert taming is not None
    assert taming.columns.tolist() == [1, 2]
    for j in (1, 2):
        x = X[:, j]
        scores = norm.ppf((rankdata(x, "average") - 0.5) / len(x))
        z = (x - x.mean()) / x.std()
        w = 0.5 * z / np.sqrt(1 + (z / BEND) ** 2) + 0.5 * scores
        w = (w - w.mean()) / w.std()
        # The knots are 256 of the values: between them scores are linear.
        assert np.abs(inputs.apply(X, LIKE)[:, j].numpy() - w).max() < 0.02
    assert np.allclose(inputs.apply(X, LIKE)[:, 0], (X[:, 0] - X[:, 0].mean()) / X[:, 0].std())


@pytest.mark.parametrize("shape", ["normal", "uniform", "levels", "constant"])
def test_other_columns_stay_as_they_are(shape: str) -> None:
    rng = np.random.default_rng(1)
    x = {
        "normal": rng.standard_normal(300),
        "uniform": rng.random(300),
        "levels": np.exp(rng.integers(0, FEW_VALUES, 300)),
        "constant": np.full(300, 3.0),
    }[shape]
    assert fitted(x[:, None]).scaling.taming is None


def test_a_kernel_of_the_users_sees_the_columns_as_they_are() -> None:
    assert fitted(skewed()[0], RBF()).scaling.taming is None


@given(
    st.integers(0, 10_000),
    st.sampled_from([1e-12, 1e-3, 1.0, 1e6, 1e12]),
    st.sampled_from([0.0, 1.0, 1e6]),
)
@settings(max_examples=40, deadline=None)
def test_order_is_kept_and_the_way_back_is_found(seed: int, size: float, offset: float) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(20, 400))
    x = size * (offset + np.exp(rng.uniform(0.5, 4) * rng.standard_normal(n)))
    inputs = fitted(x[:, None])
    if inputs.scaling.taming is None:
        return
    w = inputs.apply(x[:, None], LIKE)
    order = np.argsort(x, kind="stable")
    assert (np.diff(w[order, 0].numpy()) >= 0).all()
    assert abs(float(w.mean())) < 0.1
    assert 0.8 < float(w.std()) < 1.2
    back = inputs.invert(w)[:, 0]
    again = inputs.apply(back[:, None], LIKE)
    assert torch.allclose(again, w, atol=1e-6)


def test_values_beyond_those_of_the_fit_are_finite_and_in_order() -> None:
    X, _ = skewed()
    inputs = fitted(X)
    far = np.array([-1e300, -1e9, 0.0, X[:, 1].max() * 2, 1e12, 1e300])
    rows = np.repeat(X[:1], len(far), axis=0)
    rows[:, 1] = far
    w = inputs.apply(rows, LIKE)[:, 1].numpy()
    assert np.isfinite(w).all()
    assert (np.diff(w) >= 0).all()
    inside = inputs.invert(inputs.apply(rows, LIKE))[3, 1]
    assert inside == pytest.approx(far[3], rel=1e-6)


def test_a_weight_of_two_is_a_row_given_twice() -> None:
    X, _ = skewed(200)
    weight = np.random.default_rng(2).integers(1, 4, len(X)).astype(float)
    a = fitted(X, weight=weight).scaling.taming
    b = fitted(np.repeat(X, weight.astype(int), axis=0)).scaling.taming
    assert a is not None
    assert b is not None
    for one, other in zip(a, b, strict=True):
        assert np.allclose(one, other, rtol=1e-9, atol=1e-9)


def test_the_way_there_changes_nothing_that_was_given() -> None:
    X, _ = skewed()
    inputs, before = fitted(X), X.copy()
    w = inputs.apply(X, LIKE)
    kept = w.clone()
    inputs.invert(w)
    assert np.array_equal(X, before)
    assert torch.equal(w, kept)


def test_tails_of_rows_whose_lengths_differ_are_left_to_directions() -> None:
    rng = np.random.default_rng(3)
    unit = rng.standard_normal((300, 20))
    X = unit * np.exp(1.5 * rng.standard_normal((300, 1)))
    for rows, seen in ((X, True), (np.exp(2 * unit), False), (unit, False)):
        inputs = fitted(rows)
        assert inputs.embedding == seen
        assert (inputs.scaling.taming is None) == (seen or rows is unit)


def test_it_pays_where_one_column_has_a_long_tail() -> None:
    X, y = skewed(600)
    train, test = slice(0, 250), slice(250, None)
    losses = []
    for kernel in (None, RBF()):
        clf = GPClassifier(kernel, random_state=0).fit(X[train], y[train])
        losses.append(conjugp.metrics.nll(y[test], clf.predict_proba(X[test])))
    assert losses[0] < 0.8 * losses[1]


def test_tables_tell_which_columns_are_tamed() -> None:
    X, y = skewed()
    frame = pd.DataFrame(X, columns=["normal", "long", "mixed"])
    frame["text"] = np.where(y, "yes", "no")
    clf = GPClassifier(random_state=0, max_epochs=200).fit(frame[:200], y[:200])
    assert clf.columns_ is not None
    told = [name for name, words in clf.columns_.items() if words.endswith("long tails tamed")]
    assert told == ["long", "mixed"]


def test_files_and_onnx_have_the_same_columns(tmp_path: Path) -> None:
    X, y = skewed()
    clf = GPClassifier(random_state=0).fit(X[:300], y[:300])
    p = clf.predict_proba(X[300:])
    clf.save(tmp_path / "m.conjugp")
    assert np.array_equal(conjugp.load(tmp_path / "m.conjugp").predict_proba(X[300:]), p)
    to_onnx(clf, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (found,) = session.run(["probabilities"], {"X": X[300:]})
    assert np.abs(found - p).max() < 1e-6
    far = X[300:306].copy()
    far[:, 1] = [-1e300, -1e9, 0.0, 1e9, 1e160, 1e300]
    (found,) = session.run(["probabilities"], {"X": far})
    assert np.abs(found - clf.predict_proba(far)).max() < 1e-6


def test_damaged_descriptions_are_refused() -> None:
    good = tamed(skewed()[0], np.ones(400), np.zeros(3), np.ones(3), np.ones(3, bool))
    assert good is not None
    good.check(3)
    for bad in (
        good._replace(columns=good.columns + 2),
        good._replace(columns=good.columns[:1]),
        good._replace(knots=good.knots[:, ::-1]),
        good._replace(scores=good.scores * np.nan),
        good._replace(slopes=-good.slopes),
        good._replace(knots=good.knots[:, :0], scores=good.scores[:, :0]),
        Taming(*(None,) * 4),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="long tails"):
            bad.check(3)


def test_bent_is_the_identity_near_zero_and_bounded() -> None:
    assert np.allclose(bent(np.array([1e-3, -0.01])), [1e-3, -0.01], rtol=1e-4)
    assert np.abs(bent(np.array([np.inf, -np.inf, 1e300]))).max() <= BEND
