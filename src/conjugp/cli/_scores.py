"""Held-out rows, scores on them, and the logistic regression that they are compared with."""

from __future__ import annotations

import hashlib
from collections import Counter
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from conjugp import metrics
from conjugp._inputs.table import TableError, listed

FEW = 30  # rows whose scores say little
# What is printed, by the name it has in JSON. Lower is better.
SCORES = {"error": "error", "nll": "NLL", "brier": "Brier", "ece": "ECE"}


def scores_of(
    y: NDArray[Any],
    proba: NDArray[np.float64],
    classes: NDArray[Any],
    weight: NDArray[np.float64] | None = None,
) -> dict[str, float]:
    """Error, negative log-likelihood, Brier score and calibration error."""
    wrong = classes[proba.argmax(axis=1)] != y
    settings: dict[str, Any] = {"labels": classes, "sample_weight": weight}
    return {
        "error": float(np.average(wrong, weights=weight)),
        "nll": float(metrics.nll(y, proba, **settings)),
        "brier": float(metrics.brier(y, proba, **settings)),
        "ece": float(metrics.expected_calibration_error(y, proba, **settings)),
    }


def shown_scores(scores: dict[str, float]) -> tuple[str, ...]:
    """Scores as text, in the order of `SCORES`."""
    return (f"{scores['error']:.2%}", *(f"{scores[name]:.4f}" for name in ("nll", "brier", "ece")))


def check_known(y: NDArray[Any], classes: NDArray[Any], target: str) -> None:
    """Raise if there are labels that the model has not learned."""
    new = sorted(set(y.tolist()) - set(classes.tolist()))
    if new:
        named = listed("class", new, plural="classes")
        raise TableError(f"the target {target!r} has {named}, which the model was not trained on")


def split(y: NDArray[Any], share: float, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows to train on and rows to hold out, each class in the same share.

    A class of a single row is trained on; there is nothing to test it with.
    """
    _, code, count = np.unique(y, return_inverse=True, return_counts=True)
    single = count[code] == 1
    several = np.flatnonzero(~single)
    n_test = max(round(share * len(y)), int((count > 1).sum()))
    try:
        train, test = train_test_split(
            several, test_size=n_test, stratify=code[several], random_state=seed
        )
    except ValueError as error:
        raise TableError(
            f"{len(y)} rows of {len(count)} classes are too few to hold some out; "
            "--test-size 0 trains on all of them"
        ) from error
    return np.sort(np.concatenate([train, np.flatnonzero(single)])), np.sort(test)


def table_digest(X: NDArray[np.float64], y: NDArray[Any]) -> str:
    """A digest of features and labels, the same for the same table in any format."""
    digest = hashlib.sha256(np.ascontiguousarray(X, dtype=float).tobytes())
    digest.update("\0".join(map(str, y.tolist())).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def row_digests(X: NDArray[np.float64], y: NDArray[Any]) -> NDArray[np.uint64]:
    """A digest of 64 bits for the features and the label of every row."""
    rows = np.ascontiguousarray(X, dtype="<f8") + 0.0  # -0 is 0
    digests = [
        blake2b(row.tobytes() + str(label).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for row, label in zip(rows, y.tolist(), strict=True)
    ]
    return np.frombuffer(b"".join(digests), dtype="<u8")


def count_common(some: NDArray[np.uint64], others: NDArray[np.uint64]) -> int:
    """How many of some digests are among others, each of these counted once."""
    return sum((Counter(some.tolist()) & Counter(others.tolist())).values())


def these_rows(n: int, seen: int | None, source: str, who: str = "it") -> str:
    """The rows that scores are of, and how many of them the model has learned from."""
    if seen is None:
        return f"{n} rows of {source}"
    if seen == 0:
        return f"{n} rows {'it' if who == 'it' else 'that ' + who} has not seen"
    if seen == n:
        return f"{n} rows that {who} was fitted to"
    return f"{n} rows, {seen} of which {who} was trained on"


def few_rows(n: int) -> list[str]:
    """A note where scores are of few rows."""
    counted = "1 row is" if n == 1 else f"{n} rows are"
    return [f"only {counted} scored, so that the scores are rough"] if n < FEW else []


def logistic_regression(
    X: NDArray[np.float64], y: NDArray[Any], weight: NDArray[np.float64] | None
) -> Any:
    """scikit-learn's, on standardised features, fitted."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return model.fit(X, y, logisticregression__sample_weight=weight)
