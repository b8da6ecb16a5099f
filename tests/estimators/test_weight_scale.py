"""Weights that are no counts of rows are said to be none, by every fit; others are not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_sample_weight

from commands import conjugp, write_csv
from conjugp import GibbsGPClassifier
from conjugp._estimators.rows import WeightScale
from faces import fixed, toy

N = 60
X, Y = toy(N)
rng = np.random.default_rng(0)
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

OFF = {
    "small": np.full(N, 0.01),
    "sum one": (w := rng.uniform(0.5, 2, N)) / w.sum(),
    "survey": 1234.5 * rng.uniform(0.5, 2, N),
    "whole survey": np.rint(1e5 * rng.uniform(0.5, 2, N)),
    "small where there are any": np.where(np.arange(N) % 2, 0.1, 0.0),
    "smallest": np.full(N, 5e-324),
    "largest": np.full(N, 1.7e308),
}
WELL = {
    "none": None,
    "one": np.ones(N),
    "counts": 1.0 + rng.poisson(20, N),
    "mild": rng.uniform(0.5, 3, N),
    "some zeros": np.where(np.arange(N) % 10, 1.3, 0.0),
    "mostly zeros": np.where(np.arange(N) % 10, 0.0, 1.0),
    "balanced": compute_sample_weight("balanced", np.arange(N) % 17 == 0),
}
FITS = {
    "fit": lambda clf, w: clf.fit(X, Y, w),
    "partial_fit": lambda clf, w: clf.partial_fit(X, Y, [0, 1, 2], w),
    "fit_stream": lambda clf, w: clf.fit_stream(
        [(X[i], Y[i]) if w is None else (X[i], Y[i], w[i]) for i in (np.arange(9), np.arange(9, N))]
    ),
}


def said(work) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [w for w in caught if "sample_weight" in str(w.message)]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", ["small", "sum one", "survey", "whole survey"])
def test_weights_of_another_scale(fit, name):
    weight = OFF[name]
    (warning,) = said(lambda: FITS[fit](fixed(n_inducing=5, max_epochs=2), weight))
    assert warning.category is UserWarning and warning.filename == __file__
    text = str(warning.message)
    assert "a row of weight 2 counts like two rows" in text
    assert f"multiply them by {1 / weight.mean():.4g}, so that they average 1" in text


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", WELL)
def test_weights_that_may_count_rows(fit, name):
    assert not said(lambda: FITS[fit](fixed(n_inducing=5, max_epochs=2), WELL[name]))


@pytest.mark.parametrize("name", OFF)
def test_the_factor_that_is_named_makes_them_average_one(name):
    weight = OFF[name]
    (warning,) = said(lambda: WeightScale.of(weight).warn())
    factor = float(str(warning.message).split("multiply them by ")[1].split(",")[0])
    if name not in ("smallest", "largest"):  # where no finite number above 0 would do
        again = factor * weight[weight > 0]
        assert again.mean() == pytest.approx(1, abs=1e-3)
        assert not said(lambda: WeightScale.of(again).warn())


@pytest.mark.parametrize("balanced", ["balanced", {0: 0.01, 1: 1.0, 2: 5.0}])
def test_weights_of_classes_are_not_those_of_rows(balanced):
    assert not said(lambda: fixed(class_weight=balanced, max_epochs=2).fit(X, Y, WELL["mild"]))


def test_batches_are_judged_together():
    """Whole numbers in one batch and large ones in another; their mean decides."""
    parts = [np.full(30, 1.0), np.full(30, 0.5), np.full(10, 12.5)]
    scale = WeightScale()
    for part in parts:
        scale = scale.plus(WeightScale.of(part))
    assert scale == WeightScale.of(np.concatenate(parts)) == (170.0, 70, False)
    assert not said(scale.warn) and said(WeightScale.of(parts[2]).warn)


def test_rows_that_were_merged_are_counts():
    sampler = GibbsGPClassifier(hyperparameters="fit", n_samples=2, n_warmup=1, n_chains=2)
    assert not said(lambda: sampler.fit(np.repeat(X[:12], 9, axis=0), np.repeat(Y[:12], 9)))


def test_the_command_line_says_it_in_a_note(tmp_path):
    rows = [[*x, "abc"[y], 0.01] for x, y in zip(X, Y, strict=True)]
    write_csv(tmp_path / "t.csv", ["u", "v", "kind", "w"], rows)
    call = ("fit", "t.csv", "--target", "kind", "--weight", "w", "--max-epochs", 1)
    found = conjugp(tmp_path, *call, "-o", "t.conjugp")
    assert found.code == 0 and found.err.count("a row of weight 2 counts like two rows") == 1
