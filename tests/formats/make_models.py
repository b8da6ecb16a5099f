"""Writes the model files of this folder, one for each kind and format, with what they predict.

They stay as they are: files of an older format have to load for ever. A new format gets new ones.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np

from conjugp import FitOptions, GibbsGPClassifier, GPClassifier
from conjugp._persistence.model_file import FORMAT, save
from conjugp.kernels import RBF, Linear, Matern52, Normalised

FOLDER = Path(__file__).parent


def main() -> None:
    """Fit, save, and note probabilities."""
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    y = np.arange(30) % 3
    X = rng.normal(size=(30, 2)) + 2 * rng.normal(size=(3, 2))[y]
    rows = np.concatenate([X[:4], 3 * rng.normal(size=(4, 2))])
    classifiers = {
        "coupled": GPClassifier(n_inducing=5, max_epochs=10, random_state=0),
        "decoupled": GPClassifier(
            Normalised(Matern52(0.8, 5.0)) + RBF((1.0, 2.0), 4.0) * Linear(2.0, 1.0),
            learn_hyperparameters=False,
            covariance="shared",
            n_inducing=6,
            random_state=0,
            class_weight={"a": 1.0, "bb": 2.0, "ccc": 1.0},
            options=FitOptions(n_covariance=4),
        ),
        "gibbs": GibbsGPClassifier(
            RBF(1.5, 4.0),
            hyperparameters="fixed",
            n_inducing=5,
            random_state=0,
            **{"n_samples": 8, "n_warmup": 20, "n_chains": 2, "n_jobs": 1},
        ),
    }
    expected = {}
    for name, clf in classifiers.items():
        clf.fit(X, np.array(["a", "bb", "ccc"])[y])
        save(clf, FOLDER / f"format-{FORMAT}-{name}.conjugp", extra={"made by": "make_models.py"})
        expected[name] = clf.predict_proba(rows).tolist()
    text = json.dumps({"rows": rows.tolist(), "proba": expected}, indent=1)
    (FOLDER / f"format-{FORMAT}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
