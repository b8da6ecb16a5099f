"""The contents of a report, as the page's template takes them: text, numbers and pictures."""

from __future__ import annotations

import platform
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import numpy as np

import conjugp
from conjugp._inputs.frames import Cells
from conjugp.cli._cells import texts
from conjugp.cli._evaluate import confusion
from conjugp.cli._findings import CONJUGP, LOGISTIC, RELEVANCE_COLUMNS, Findings, Subject
from conjugp.cli._page import picture
from conjugp.cli._scores import SCORES, these_rows

MOST_MATRIX = 20  # classes in the confusion matrix
MOST_BARS = 20
MOST_COLUMNS = 200
MOST_ROWS = 400  # most surprising, and as many most uncertain
TOP = 8  # rows in the two short lists
CELLS = 6  # columns of the table beside each row, the most relevant ones
LONG = 40


def headline(subject: Subject, findings: Findings) -> str:
    """The report in a sentence."""
    right = 1 - findings.scores[CONJUGP]["error"]
    rows = these_rows(len(subject.rows.y), subject.seen, subject.scored)
    text = f"conjugp names the right class in {right:.1%} of {rows}"
    if LOGISTIC in findings.scores:
        text += f"; logistic regression in {1 - findings.scores[LOGISTIC]['error']:.1%}"
    return text + "."


def contents(subject: Subject, findings: Findings, notes: list[str]) -> dict[str, Any]:
    """Everything that the template names."""
    clf, rows = subject.model.clf, subject.rows
    target = subject.model.known_roles().target
    columns_ = clf.columns_ or subject.model.encoder.columns
    training, curve = _training(clf)
    names = [name for name in findings.relevance if name not in subject.keep][:CELLS]
    names = [*dict.fromkeys(subject.keep), *names]
    listed, columns = _rows(subject, findings, names)
    by_surprise, by_entropy = np.argsort(-findings.surprise), np.argsort(-findings.entropy)
    shown = list(dict.fromkeys([*by_surprise[:MOST_ROWS], *by_entropy[:MOST_ROWS]]))
    return {
        "title": f"{target} from {subject.source}",
        "headline": headline(subject, findings),
        "flattered": _flattered(subject),
        "scored_on": f"On {these_rows(len(rows.y), subject.seen, subject.scored, 'the model')}.",
        "scored": subject.scored,
        "facts": [
            ("rows", f"{subject.all.table.n_rows:,}"),
            ("scored", f"{len(rows.y):,}"),
            ("columns", f"{len(columns_):,}"),
            ("features", f"{len(subject.model.encoder.features):,}"),
            ("classes", f"{len(clf.classes_):,}"),
        ],
        "score_names": list(SCORES.values()),
        "scores": _scores(findings),
        "compared": LOGISTIC in findings.scores,
        "pictures": {"reliability": _reliability(subject, findings), "training": curve},
        "confusion": _matrix(subject, findings),
        "confusions": _confusions(subject, findings),
        "row_columns": columns,
        "row_lists": [
            {"title": "Most surprising", "rows": [listed(i) for i in by_surprise[:TOP]]},
            {"title": "Most uncertain", "rows": [listed(i) for i in by_entropy[:TOP]]},
        ],
        "rows": [listed(i) for i in shown],
        "n_shown": len(shown),
        "n_scored": len(rows.y),
        "relevance": _bars(list(findings.relevance.items()), lambda value: f"{value:+.3f}"),
        "relevance_more": _more(len(rows.frame.columns), MOST_BARS, "columns")
        + (
            f" Only the first {RELEVANCE_COLUMNS} were tried."
            * (len(rows.frame.columns) > RELEVANCE_COLUMNS)
        ),
        "training": training,
        "notes": notes,
        "target": target,
        "classes": _bars(
            sorted(Counter(map(str, subject.all.y.tolist())).items(), key=lambda c: -c[1]),
            lambda count: f"{count:,}",
        ),
        "classes_more": _more(len(clf.classes_), MOST_BARS, "classes"),
        "columns": [
            {"name": name, "becomes": words, **_summary(subject.all.frame.columns.get(name))}
            for name, words in list(columns_.items())[:MOST_COLUMNS]
        ],
        "columns_more": _more(len(columns_), MOST_COLUMNS, "columns"),
        "commands": subject.commands,
        "made": _made(subject),
    }


def _flattered(subject: Subject) -> str:
    """A warning where rows to score were learned from."""
    if not subject.seen:
        return ""
    which = (
        "These are" if subject.flattered else f"{subject.seen} of these {len(subject.rows.y)} are"
    )
    return f"{which} rows that the model was trained on. Scores on them flatter it."


def _scores(findings: Findings) -> list[dict[str, Any]]:
    """Lines of the table of scores; the smallest of each column is marked."""
    best = {key: min(scores[key] for scores in findings.scores.values()) for key in SCORES}
    lines = []
    for name, scores in findings.scores.items():
        cells = [
            {
                "text": f"{scores[key]:.1%}" if key == "error" else f"{scores[key]:.3f}",
                "best": len(findings.scores) > 1 and scores[key] == best[key],
            }
            for key in SCORES
        ]
        lines.append({"name": name, "cells": cells})
    return lines


def _matrix(subject: Subject, findings: Findings) -> dict[str, Any] | None:
    """The confusion matrix, shaded by the share of the true class."""
    classes = subject.model.clf.classes_
    if len(classes) > MOST_MATRIX:
        return None
    counts = confusion(subject.rows.y, findings.proba[CONJUGP], classes)
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    lines = []
    for i, label in enumerate(classes):
        cells = []
        for j, count in enumerate(counts[i]):
            kind = "none" if count == 0 else "right" if i == j else "miss"
            cells.append({"count": int(count), "kind": kind, "share": f"{share[i, j]:.2f}"})
        lines.append({"label": str(label), "cells": cells})
    return {"labels": [str(label) for label in classes], "rows": lines}


def _confusions(subject: Subject, findings: Findings) -> list[dict[str, Any]]:
    """The commonest mistakes."""
    classes, y = subject.model.clf.classes_, subject.rows.y
    predicted = classes[findings.proba[CONJUGP].argmax(axis=1)]
    pairs = Counter((str(a), str(b)) for a, b in zip(y, predicted, strict=True) if a != b)
    return [{"true": a, "predicted": b, "count": n} for (a, b), n in pairs.most_common(8)]


def _rows(subject: Subject, findings: Findings, names: list[str]) -> tuple[Any, list[dict]]:
    """A function that gives a row of the tables of rows by its place, and their headings."""
    rows, classes = subject.rows, subject.model.clf.classes_
    proba = findings.proba[CONJUGP]
    best = proba.argmax(axis=1)
    cells = {name: texts(rows.table.columns[name]) for name in names}
    kinds = {name: column.kind for name, column in rows.frame.columns.items()}
    headings = [
        ("row", True),
        ("true", False),
        ("predicted", False),
        ("p(true)", True),
        ("confidence", True),
        ("entropy", True),
        ("epistemic", True),
        *((name, kinds.get(name) == "number") for name in names),
    ]

    def one(i: int) -> dict[str, Any]:
        named, true = classes[best[i]], rows.y[i]
        measured = (np.exp(-findings.surprise[i]), proba[i, best[i]])
        measured = (*measured, findings.entropy[i], findings.epistemic[i])
        line = [_cell(str(rows.place[i] + 1), True), _cell(str(true)), _cell(str(named))]
        line += [{"text": f"{v:.3f}", "value": f"{v:.9g}", "number": True} for v in measured]
        for name in names:
            line.append(_cell(cells[name][i] or "", kinds.get(name) == "number"))
        return {"wrong": bool(named != true), "cells": line}

    return one, [{"name": name, "number": number} for name, number in headings]


def _cell(text: str, number: bool = False) -> dict[str, Any]:
    """A cell of the user's; long text is cut, and whole when pointed at."""
    cut = text if len(text) <= LONG else text[: LONG - 1] + "…"
    whole = text[:1000] if cut != text else None
    return {"text": cut, "value": None, "number": number, "whole": whole}


def _bars(items: list[tuple[str, Any]], shown: Any) -> list[dict[str, Any]]:
    """Bars as wide as their values, the first ones."""
    most = max((abs(value) for _, value in items), default=0) or 1
    return [
        {"name": name, "text": shown(value), "width": f"{max(value, 0) / most * 100:.1f}"}
        for name, value in items[:MOST_BARS]
    ]


def _more(n: int, most: int, noun: str) -> str:
    return f"{n - most} more {noun} are not shown." if n > most else ""


def _number(value: float) -> str:
    """A number as people write it, to four digits or to the unit."""
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _summary(cells: Cells | None) -> dict[str, Any]:
    """What a line of the table of columns says of its cells; nothing of those left out."""
    if cells is None:
        return dict.fromkeys(("missing", "distinct", "text"), "")
    there = cells.values[~cells.gaps]
    counts = Counter(there.tolist())
    if cells.kind == "text":
        common = [f"{name} ({n})" for name, n in counts.most_common(3)]
        text = ", ".join(common) + (", …" if len(counts) > 3 else "")
    elif not len(there):
        text = "no values"
    else:
        ends = [there.min(), np.median(there), there.max()]
        if cells.kind == "date":
            shown = [str(np.datetime64(int(day), "D")) for day in ends]
        else:
            shown = [_number(value) for value in ends]
        text = f"{shown[0]} to {shown[2]}, median {shown[1]}"
    missing = len(cells.values) - len(there)
    return {"missing": missing, "distinct": len(counts), "text": text}


def _reliability(subject: Subject, findings: Findings) -> Any:
    """The reliability diagram of the model, and of logistic regression where there is one."""
    from matplotlib.figure import Figure

    from conjugp.plotting import ReliabilityDisplay

    figure = Figure(figsize=(4.6, 5.0), layout="constrained")
    ax = figure.subplots()
    n = len(subject.rows.y)
    bins = 15 if n >= 1000 else 10 if n >= 250 else 6  # a bin of few rows is mostly noise
    for name, color in ((CONJUGP, "C0"), (LOGISTIC, "C1")):
        if name in findings.proba:
            ReliabilityDisplay.from_predictions(
                subject.rows.y,
                findings.proba[name],
                labels=subject.model.clf.classes_,
                sample_weight=subject.rows.weight,
                n_bins=bins,
                name=name,
                ax=ax,
                color=color,
            )
    handles = ax.get_legend_handles_labels()[0]
    ax.legend(handles, [n for n in (CONJUGP, LOGISTIC) if n in findings.proba], frameon=False)
    error = findings.scores[CONJUGP]["ece"]
    text = f"Accuracy against confidence; the expected calibration error of conjugp is {error:.3f}"
    return picture(figure, "reliability", text)


def _training(clf: Any) -> tuple[str, Any]:
    """A sentence on the fit, and its curve where the model remembers it."""
    settled = "became flat" if clf.converged_ else "was still rising"
    text = (
        f"The objective {settled} after {clf.n_iter_} passes over the rows. "
        f"Temperature {clf.temperature_:.3g}, ELBO {clf.elbo_:,.1f} nats. Kernel: {clf.kernel_}."
    )
    # The last fit by epochs: its seconds come after those that the choice of a kernel took.
    history = [
        {**entry, "seconds": entry["epoch"]}
        for entry in getattr(clf, "history_", ())
        if entry["stage"] == "fit"
    ]
    if len(history) < 2:
        return text, None
    from matplotlib.figure import Figure

    from conjugp.plotting import TrainingCurveDisplay

    figure = Figure(figsize=(4.6, 3.0), layout="constrained")
    for ax in TrainingCurveDisplay(history).plot(figure.subplots()).axes_:
        ax.set_xlabel("epoch")
        if (legend := ax.get_legend()) is not None:
            legend.remove()
    return text, picture(figure, "training", "The objective during the fit")


def _made(subject: Subject) -> dict[str, Any]:
    """Versions, seed and digests."""
    packages = ("torch", "numpy", "scikit-learn")
    versions = {"conjugp": conjugp.__version__, **{name: version(name) for name in packages}}
    origin = subject.model.origin
    lines = [
        ("versions", ", ".join(f"{name} {number}" for name, number in versions.items())),
        ("Python", f"{platform.python_version()} on {platform.system()}"),
        ("seed", str(origin["seed"])),
        ("trained on", f"{origin['n_train']} rows of {origin['source']}"),
        ("training table", f"sha256 {origin['fingerprint']} of features and labels"),
    ]
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {"versions": versions, "lines": lines, "date": date}
