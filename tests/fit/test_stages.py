"""Fits as sequences of stages: what they share stays as it is, and the way to a step is short."""

from __future__ import annotations

import pickle
import sys
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import conjugp
from conjugp import FitOptions, GPClassifier
from conjugp._estimators import classifier
from conjugp._fit import search
from conjugp._fit.plan import Run
from conjugp._inference import svi
from conjugp._inference.settings import Knobs
from faces import decoupled, fixed, minibatch, toy

ROOT = Path(conjugp.__file__).parent
# Of the project, that a small fit enters before it looks at its first rows.
MOST_FILES = 28

quiet = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


class Calls:
    """The project's functions that are called, file by file, until one of them is."""

    def __init__(self, last: Any = None) -> None:
        self.files: list[str] = []
        self._last = last

    def __enter__(self) -> Calls:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT):
            return
        self.files.append(str(path.relative_to(ROOT)))
        if self._last is not None and frame.f_code is self._last.__code__:
            sys.setprofile(None)


@quiet
def test_few_files_lie_between_fit_and_the_first_step():
    X, y = toy(150)
    clf = GPClassifier(random_state=0, max_epochs=3).fit(X, y)  # imports are done
    with Calls(svi.evaluate) as calls:
        clf.fit(X, y)
    assert calls.files[-1] == "_inference/svi.py"
    assert len(set(calls.files)) <= MOST_FILES, set(calls.files)


@quiet
def test_candidates_are_judged_without_going_back_to_the_choice_of_a_kernel(monkeypatch):
    X, y = toy(400)
    losses = []
    judge = search.held_out_loss
    monkeypatch.setattr(search, "held_out_loss", lambda *a: losses.append(1) or judge(*a))
    with Calls() as calls:
        GPClassifier(covariance="shared", random_state=0, max_epochs=2).fit(X, y)
    stages = [file for file in calls.files if file in ("_fit/kernel.py", "_fit/search.py")]
    first, last = stages.index("_fit/search.py"), len(stages) - stages[::-1].index("_fit/search.py")
    assert len(losses) > 3 and set(stages[first:last]) == {"_fit/search.py"}


def directions(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of many lengths, whose directions tell the classes: another origin is chosen."""
    X, y = toy(n, n_features=16, seed=3)
    length = np.random.default_rng(0).uniform(0.1, 2.0, (n, 1))
    return length * X / np.linalg.norm(X, axis=1, keepdims=True) + 0.05, y


CASES = {
    "full batch": (fixed(temperature="auto"), toy(60)),
    "minibatches": (minibatch(), toy(200)),
    "a likelihood that learns": (minibatch(likelihood="robust-max"), toy(200)),
    "decoupled": (decoupled(), toy(60)),
    "another origin": (
        GPClassifier(covariance="shared", max_epochs=2, random_state=0),
        directions(400),
    ),
}


@quiet
@pytest.mark.parametrize("name", CASES)
def test_no_stage_changes_the_plan_and_plans_travel(name, monkeypatch):
    clf, rows = CASES[name]
    seen, fit = [], classifier.fit

    def spy(run: Run, data: Any, scaling: Any, warm: Any) -> Any:
        before, given = pickle.dumps(run.plan), pickle.dumps(data)
        found = fit(run, data, scaling, warm)
        seen.append((before, pickle.dumps(run.plan), given, scaling, found))
        return found

    monkeypatch.setattr(classifier, "fit", spy)
    clf.set_params(options=FitOptions(callback=lambda _: None)).fit(*rows)
    [(before, after, given, scaling, (fitted, units))] = seen
    assert before == after
    assert (name == "another origin") == (units is not scaling)
    there, same = fit(Run(pickle.loads(before)), pickle.loads(given), scaling)
    assert torch.equal(there.model.w, fitted.model.w)
    assert there.model.calibration == fitted.model.calibration
    assert np.array_equal(same.shift, units.shift)


@quiet
def test_loops_are_told_what_the_user_has_set(monkeypatch):
    plans, fit = [], classifier.fit
    monkeypatch.setattr(classifier, "fit", lambda run, *a: plans.append(run.plan) or fit(run, *a))
    given = {"step_exponent": 0.5, "min_step": 0.1, "kernel_prior": 2.0, "jitter": 1e-5}
    given |= {"chunk_size": 7, "cache_mb": 3, "local_steps": 2}
    assert set(given) == {knob.name for knob in fields(Knobs)}
    fixed(options=FitOptions(**given)).fit(*toy(24))
    assert {name: getattr(plans[0].settings, name) for name in given} == given
