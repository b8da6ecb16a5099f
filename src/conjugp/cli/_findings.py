"""What a report is about, and the numbers in it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from conjugp import metrics
from conjugp._inputs.encoder import Encoder
from conjugp._inputs.frames import Frame
from conjugp.cli._scores import logistic_regression, scores_of
from conjugp.cli._settings import Labelled, TableRows
from conjugp.cli.models import Model

RELEVANCE_ROWS, RELEVANCE_COLUMNS, RELEVANCE_SHUFFLES = 1000, 60, 3
CONJUGP, LOGISTIC, FREQUENCIES = "conjugp", "logistic regression", "class frequencies"


@dataclass(kw_only=True)
class Subject(Labelled):
    """A model, and the rows of a report on it."""

    model: Model
    commands: list[str]
    source: str
    scored: str  # the table that the rows to score are of
    keep: list[str] = field(default_factory=list)  # columns to show beside rows

    @property
    def flattered(self) -> bool:
        """Whether all rows to score were learned from."""
        return self.seen == len(self.rows.y)


@dataclass(frozen=True)
class Findings:
    """Scores by classifier, probabilities, and what stands out."""

    scores: dict[str, dict[str, float]]
    proba: dict[str, NDArray[np.float64]]  # (n, C) by classifier
    surprise: NDArray[np.float64]  # -log p(true class), (n,)
    entropy: NDArray[np.float64]  # (n,)
    epistemic: NDArray[np.float64]  # (n,)
    relevance: dict[str, float]  # rise of the NLL by column, largest first


def find(subject: Subject) -> Findings:
    """Score a model beside logistic regression and the frequencies of the classes."""
    clf, rows = subject.model.clf, subject.rows
    classes = clf.classes_
    proba = {CONJUGP: clf.predict_proba(rows.frame)}
    if subject.train is not None and not subject.flattered:
        train = subject.train
        try:
            X_train, X = _features(subject.model, train, rows)
            fitted = logistic_regression(X_train, train.y, train.weight)
            proba[LOGISTIC] = np.zeros((len(rows.y), len(classes)))
            have = np.searchsorted(classes, fitted.classes_)
            proba[LOGISTIC][:, have] = fitted.predict_proba(X)
        except ValueError as error:
            warnings.warn(f"logistic regression failed ({error})", stacklevel=2)
        share = np.array([(train.y == label).mean() for label in classes])
        proba[FREQUENCIES] = np.tile(share, (len(rows.y), 1))
    scores = {name: scores_of(rows.y, p, classes, rows.weight) for name, p in proba.items()}
    truth = proba[CONJUGP][np.arange(len(rows.y)), np.searchsorted(classes, rows.y)]
    parts = clf.predict_uncertainty(rows.frame)
    return Findings(
        scores,
        proba,
        -np.log(np.maximum(truth, np.finfo(float).tiny)),
        parts.total,
        parts.epistemic,
        relevance(subject.model, rows),
    )


def _features(
    model: Model, train: TableRows, rows: TableRows
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What another classifier learns from and predicts.

    Of tables an encoder of its own, whose shares of classes leave the label of each row out.
    """
    if model.clf.columns_ is None:
        return model.encoder.encode(train.frame), model.encoder.encode(rows.frame)
    labels, codes = np.unique(train.y, return_inverse=True)
    weight = np.ones(len(codes)) if train.weight is None else train.weight
    texts = [str(label) for label in labels.tolist()]
    encoder, X = Encoder.fit(train.frame, codes, weight, texts)
    return X, encoder.encode(rows.frame)


def relevance(model: Model, rows: TableRows, seed: int = 0) -> dict[str, float]:
    """The rise of the NLL when a column is shuffled among the rows, largest first.

    Many rows are sampled, and of very many columns only the first are tried.
    """
    rng = np.random.default_rng(seed)
    clf = model.clf
    chosen = rng.permutation(len(rows.y))[:RELEVANCE_ROWS]
    frame, y = rows.frame.take(chosen), rows.y[chosen]
    weight = None if rows.weight is None else rows.weight[chosen]

    def nll(frame: Frame) -> float:
        proba = clf.predict_proba(frame)
        return float(metrics.nll(y, proba, labels=clf.classes_, sample_weight=weight))

    if weight is not None and not weight.any():
        weight = None
    before = nll(frame)
    rises = {}
    for name in [*frame.columns][:RELEVANCE_COLUMNS]:
        after = []
        for _ in range(RELEVANCE_SHUFFLES):
            cells = frame.columns[name].take(rng.permutation(len(y)))
            after.append(nll(replace(frame, columns={**frame.columns, name: cells})))
        rises[name] = float(np.mean(after)) - before
    return dict(sorted(rises.items(), key=lambda item: -item[1]))
