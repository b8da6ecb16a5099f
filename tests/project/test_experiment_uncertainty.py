"""The uncertainty experiment: its splits, and what is stored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts import importing

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def module():
    with importing() as script:
        yield script("uncertainty")


def test_coverage_counts_labels_in_sets(module, monkeypatch):
    """Of probabilities that labels are drawn from."""
    rng = np.random.default_rng(0)

    def splits(name):
        for _ in range(5):
            p = rng.dirichlet(np.full(4, 0.5), 1200)
            y = (p.cumsum(1) < rng.random((1200, 1))).sum(1).clip(max=3)
            yield module.Known(np.arange(4)), p[:600], y[:600], p[600:], y[600:]

    monkeypatch.setattr(module, "splits", splits)
    found = module.coverage("any")
    assert found["rows"] == {"calibrate": 600, "test": 600}
    for alpha in module.ALPHAS:
        for kind in module.KINDS:
            one = found[f"lac, {kind}, {alpha}"]
            assert one["coverage"] == pytest.approx(1 - alpha, abs=0.02)
            assert len(one["splits"]) == 5 and one["classes_without_limit"] == 0
            assert found[f"aps, {kind}, {alpha}"]["empty"] == 0


def test_what_is_stored_covers(module):
    """Every mean over twenty splits is at least what was promised, less its error."""
    kept = json.loads(module.RESULTS.read_text())["sets"]
    assert set(kept) == {"scope", *module.ONE_FIT, *module.REFITTED}
    for name in (*module.ONE_FIT, *module.REFITTED):
        for alpha in module.ALPHAS:
            for kind in module.KINDS:
                for method in ("aps", "lac"):
                    one = kept[name][f"{method}, {kind}, {alpha}"]
                    assert len(one["splits"]) == module.N_SPLITS
                    error = one["deviation"] / np.sqrt(module.N_SPLITS)
                    assert one["coverage"] > 1 - alpha - max(3 * error, 0.005), (name, method)


def test_what_is_stored_out_of_scope(module):
    kept = json.loads(module.RESULTS.read_text())["sets"]["scope"]
    own, rival = kept["conjugp"]["auroc"], kept["logistic_regression"]["chosen"]
    assert own["epistemic"] > own["max probability"]
    assert own["epistemic"] > max(rival["max probability"], rival["entropy"])
