"""Experiments whose numbers stand in the documentation: their data, their files, their tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts import importing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script():
    with importing() as script:
        yield script


def stored(script) -> dict:
    return json.loads(script.RESULTS.read_text(encoding="utf-8"))


# --- bad conditions -----------------------------------------------------------------------------


def test_the_table_of_bad_conditions_is_that_of_the_file(script):
    conditions = script("conditions")
    page = (ROOT / "docs" / "likelihoods.md").read_text(encoding="utf-8")
    assert conditions.table(stored(conditions)) in page


def test_bad_conditions_are_what_they_say(script):
    conditions = script("conditions")
    X, y = conditions.training_rows("two of a class", 0)
    assert np.bincount(y)[2] == 2 and len(X) == len(y)
    _, clean = conditions.sample(500, 0.05, (0, 0))
    _, y = conditions.training_rows("wrong labels", 0)
    assert 0.15 < np.mean(y != clean) < 0.25
    X = np.random.default_rng(0).standard_normal((50, 2))
    for name in conditions.CONDITIONS:
        p = conditions.probabilities(X, name)
        np.testing.assert_allclose(p.sum(axis=1), 1.0)
    # A fifth of the labels are wrong, half of these each of the others.
    far = conditions.probabilities(10 * np.eye(2)[:1], "wrong labels")
    np.testing.assert_allclose(np.sort(far[0]), [0.1, 0.1, 0.8], atol=1e-9)


# --- embeddings ---------------------------------------------------------------------------------


def test_embeddings_meet_their_targets(script):
    found = stored(script("embeddings"))["sets"]
    assert set(found) == {"clinc150", "letter", "cifar10"}
    for result in found.values():
        assert all(result["passed"].values())
    page = (ROOT / "docs" / "examples" / "embeddings.md").read_text(encoding="utf-8")
    own = found["clinc150"]["conjugp"]
    assert f"**{own['nll']:.3f}**".replace("0.", ".") in page
    assert f"**{max(own['outside_auroc'].values()):.3f}**".replace("0.", ".") in page


def test_rivals_get_temperatures_and_scales(script):
    embeddings = script("embeddings")
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), 2000)
    y = np.array([rng.choice(4, p=row) for row in p])
    sharp = embeddings.tempered(p, 0.5)
    np.testing.assert_allclose(sharp, p**2 / (p**2).sum(axis=1, keepdims=True), rtol=1e-10)
    assert embeddings.best_temperature(sharp, y) == pytest.approx(2.0, rel=0.1)
    X = rng.standard_normal((30, 3)) * 5 + 1
    np.testing.assert_allclose(
        np.linalg.norm(embeddings.prepared(X, X, "unit length"), axis=1), 1.0
    )
    np.testing.assert_allclose(embeddings.prepared(X, X, "standardised").std(axis=0), 1.0)


# --- many classes -------------------------------------------------------------------------------


def test_synthetic_classes(script):
    classes = script("classes")
    for kind in classes.KINDS:
        X, y = classes.problem(kind, 500, 100)
        assert X.shape == (500, classes.N_FEATURES) and y.max() < 100
        again, _ = classes.problem(kind, 500, 100)
        np.testing.assert_array_equal(X, again)


def test_sampling_classes_loses_nothing(script):
    found = stored(script("classes"))["sets"]
    assert all(one["passed"] for one in found["quality"]["fits"].values())
    assert found["steps"]["passed"]
    assert all(one["passed"] for one in found["memory"]["fits"].values())
    # Rare classes: no more are never predicted than with the sum, draws of the data aside.
    lost = [one["lost_by_sampling"] for one in found["rare"]["fits"].values()]
    assert len(lost) == 3 and sum(lost) <= 0


def test_class_errors_are_those_of_the_columns(script):
    from conjugp.metrics import classwise_calibration_error

    classes = script("classes")
    rng = np.random.default_rng(0)
    p, y, weight = rng.dirichlet([1, 2, 0.5], 200), rng.integers(0, 3, 200), rng.uniform(1, 2, 200)
    found = classes.class_errors(p, y, weight)
    whole = classwise_calibration_error(y, p, labels=[0, 1, 2], sample_weight=weight)
    assert found.mean() == pytest.approx(whole, rel=1e-12)
    _, y, _, y_test, counts = classes.rare_problem(40, 0)
    np.testing.assert_array_equal(np.bincount(y), counts)
    assert (counts <= 2).sum() == 20 and len(y_test) == 400
