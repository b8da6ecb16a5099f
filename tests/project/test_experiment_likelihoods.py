"""The comparison of likelihoods: its data and scores are right, and its stored results whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conjugp.metrics import expected_calibration_error, nll
from scripts import importing

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    with importing() as script:
        yield script("likelihoods")


@pytest.fixture(scope="module")
def stored(script):
    return json.loads(script.RESULTS.read_text(encoding="utf-8"))


def test_centres_are_at_distance_one(script):
    gap = np.linalg.norm(script.centers()[:, None] - script.centers(), axis=-1)
    np.testing.assert_allclose(gap, 1 - np.eye(3), atol=1e-12)
    np.testing.assert_allclose(script.centers().sum(axis=0), 0, atol=1e-12)


@pytest.mark.parametrize("variance", [0.0, 1 / 6, 1.0])
def test_samples_follow_the_mixture(script, variance):
    X, y = script.sample(40_000, variance, (3,))
    for c, center in enumerate(script.centers()):
        np.testing.assert_allclose(X[y == c].mean(axis=0), center, atol=0.04)
        np.testing.assert_allclose(np.cov(X[y == c].T), variance * np.eye(2), atol=0.04)
    again = script.sample(40_000, variance, (3,))
    np.testing.assert_array_equal(X, again[0])
    assert not np.array_equal(y, script.sample(40_000, variance, (4,))[1])


@pytest.mark.parametrize("variance", [0.05, 0.5])
def test_truth_is_bayes_rule(script, variance):
    from scipy.stats import multivariate_normal

    X = np.random.default_rng(0).normal(size=(50, 2))
    density = [multivariate_normal(c, variance * np.eye(2)).pdf(X) for c in script.centers()]
    expected = np.stack(density, axis=1)
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(script.truth(X, variance), expected, rtol=1e-9, atol=1e-12)


def test_truth_without_variance_is_the_label(script):
    X, y = script.sample(100, 0.0, (1,))
    np.testing.assert_array_equal(script.truth(X, 0.0), np.eye(3)[y])


def test_scores_are_expectations_over_labels(script):
    rng = np.random.default_rng(0)
    n = 100_000
    X, _ = script.sample(n, 0.5, (2,))
    true = script.truth(X, 0.5)
    p = true**2 + 0.05
    p /= p.sum(axis=1, keepdims=True)
    y = (rng.random((n, 1)) > true.cumsum(axis=1)).sum(axis=1)
    found, labels = script.scores(p, true), np.arange(3)
    assert found["error"] == pytest.approx(np.mean(p.argmax(axis=1) != y), abs=0.005)
    assert found["nll"] == pytest.approx(nll(y, p, labels=labels), abs=0.01)
    drawn = expected_calibration_error(y, p, n_bins=script.N_BINS, labels=labels)
    assert found["ece"] == pytest.approx(drawn, abs=0.005)
    assert found["sure"] == np.mean(p.max(axis=1) > 0.95)


def test_true_probabilities_are_calibrated(script):
    found = script.ideal(0.5, 0, True)
    assert found["ece"] < 1e-12
    curve = found["reliability"]
    np.testing.assert_allclose(curve["confidence"], curve["accuracy"], atol=1e-12)
    assert sum(curve["histogram"]) == pytest.approx(1)


def test_few_labels_look_uncalibrated(script):
    few, many = script.chance(50, 20), script.chance(5000, 20)
    assert few == pytest.approx(10 * many, rel=0.5)  # like 1/√n
    assert many < 0.02


def test_colours_are_probabilities(script):
    p = np.random.default_rng(0).dirichlet(np.ones(3), script.N_GRID**2)
    rgb = np.frombuffer(bytes.fromhex("".join(script.colors(p))), np.uint8).reshape(-1, 3)
    np.testing.assert_allclose(rgb / 255, p, atol=0.5 / 255 + 1e-12)
    first, last = script.grid()[[0, -1]]
    np.testing.assert_allclose((first, last), [[script.BOX[0]] * 2, [script.BOX[1]] * 2])


def test_quick_must_not_replace_the_results(script, capsys):
    with pytest.raises(SystemExit):
        script.main(["--quick"])
    assert "--output" in capsys.readouterr().err


@pytest.mark.slow
def test_quick(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "N_TRAIN", 60)
    monkeypatch.setattr(script, "N_TEST", 200)
    monkeypatch.setattr(script, "N_GRID", 8)
    monkeypatch.setattr(script, "SETTINGS", {**script.SETTINGS, "n_inducing": 10, "max_epochs": 20})
    monkeypatch.setattr(script, "stricter", lambda method: {"max_epochs": 25})
    file = tmp_path / "quick.json"
    arguments = ["--output", str(file), "--images", str(tmp_path), "--jobs", "1"]
    script.main(["--quick", *arguments])
    shown = capsys.readouterr().out
    result = json.loads(file.read_text(encoding="utf-8"))
    assert set(result["runs"]) == {"truth", *script.METHODS}
    for name in script.METHODS:
        for score in (*script.SCORES, "elbo"):
            assert np.isfinite(script.summary(result, name, score)[1]).all(), (name, score)
    images = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.png")}
    assert set(images) == {f"likelihood{x}.png" for x in ("s", "_reliability", "_maps")}
    script.main(["--figures", *arguments])  # from the file alone
    assert capsys.readouterr().out == "\n".join(shown.splitlines()[1:]) + "\n"
    assert all((tmp_path / name).stat().st_mtime_ns > then for name, then in images.items())


def test_stored_results_are_whole(script, stored):
    assert set(stored) >= {"date", "machine", "versions", "setting", "levels", "stricter"}
    np.testing.assert_allclose(stored["levels"], script.LEVELS, rtol=1e-4)
    assert set(stored["runs"]) == {"truth", *script.METHODS}
    for name in script.METHODS:
        runs = stored["runs"][name]
        for score in (*script.SCORES, "sure", "elbo", "seconds", "converged"):
            assert set(runs[score]) == {str(s2) for s2 in script.levels_of(name, script.LEVELS)}
            assert all(len(found) >= 10 for found in runs[score].values())
            assert np.isfinite(list(runs[score].values())).all()
        assert np.mean(list(runs["converged"].values())) > 0.9
        assert len(stored["pictures"][name]["map"]) == script.N_GRID


def test_the_paper_on_robust_max(script, stored):
    """Most answers are sure, and its calibration error is more than twice that of any other."""
    ratios = script.ratios(stored, script.MIDDLE)
    assert min(ratios.values()) > 2
    for name in ("logistic-softmax tight", "logistic-softmax mc-vi", "softmax", "heaviside"):
        assert ratios[name] > 10
    sure = {name: np.mean(runs["sure"]["0.5"]) for name, runs in stored["runs"].items()}
    assert sure.pop("robust-max") > 0.8
    assert max(sure.values()) < 0.3


def test_page_has_the_stored_numbers(script, stored):
    page = (ROOT / "docs" / "likelihoods.md").read_text(encoding="utf-8")
    for text in (script.table(stored, script.MIDDLE), script.by_level(stored, "ece")):
        for line in text.splitlines()[2:]:
            assert line in page
