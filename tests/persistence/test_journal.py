"""Fits that were interrupted go on and end as they would have, to the last bit."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conjugp import FitOptions, GPClassifier
from conjugp import kernels as k
from conjugp._fit.search import PROPER
from conjugp._persistence import checkpoint, files
from conjugp._persistence.checkpoint import FIT, Checkpoint
from conjugp._persistence.files import FileFormatError
from conjugp._persistence.journal import Journal
from conjugp.likelihoods import RobustMax
from customs import Cauchy, Noisy
from faces import fixed, minibatch, toy
from samplers import quick

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from soak_kills import kill_fits

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
X, Y = toy()
NEW = np.random.default_rng(1).normal(size=(20, 2)) * 3


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fit.ckpt"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("conjugp._fit.kernel.KERNEL_STEPS", 20)
    monkeypatch.setattr("conjugp._fit.weights.JOINT_STEPS", 20)
    monkeypatch.setattr("conjugp._fit.search.PROPER", PROPER._replace(n_epochs=2))


class Killed(BaseException):
    """In place of a signal: nothing in between may catch it."""


@pytest.fixture
def kill(monkeypatch):
    """Every step is kept; the run ends after so many files were written."""
    monkeypatch.setattr(checkpoint, "_SHARE", 0)
    save = Checkpoint.save

    def after(n: int | None) -> dict[str, int]:
        count = {"saves": 0}

        def counting(journal: Checkpoint) -> None:
            save(journal)
            count["saves"] += 1
            if count["saves"] == n:
                raise Killed

        monkeypatch.setattr(Checkpoint, "save", counting)
        return count

    return after


def options(**more: Any) -> FitOptions:
    return FitOptions(checkpoint_every=0.0, **more)


def fit(**settings: Any) -> GPClassifier:
    given = {"n_inducing": 6, "random_state": 0, "options": options(), "max_epochs": 4}
    return GPClassifier(**{**given, **settings})


ep = {"likelihood": "heaviside", "inference": "ep"}
own = Cauchy(1.5, 2.0) + k.RBF()
FITS: dict[str, tuple[GPClassifier, tuple[np.ndarray, np.ndarray]]] = {
    "full batch": (fit(max_epochs=12), (X, Y)),
    "kernels of the classes": (fit(shared_kernel=False, max_epochs=6), (X, Y)),
    "minibatch": (fit(batch_size=20), (X, Y)),
    "class batch": (fit(batch_size=20, class_batch=3, temperature=None), toy(60, 10)),
    "ep": (fit(max_epochs=10, **ep), (X, Y)),
    "ep, minibatch": (fit(batch_size=20, **ep), (X, Y)),
    "mc-vi": (fit(inference="mc-vi", batch_size=20), (X, Y)),
    "robust-max": (fit(likelihood=RobustMax(learn_epsilon=True)), toy(gap=0.8)),
    "own": (fit(kernel=own, likelihood=Noisy(), batch_size=20, max_epochs=1), (X, Y)),
    "decoupled": (fit(covariance="shared", n_inducing=20, max_epochs=2), toy(100)),
    "float32": (fit(batch_size=300, temperature=None, max_epochs=2), toy(1100)),
    "by elbo": (
        fit(
            kernel=k.RBF(1.0, 9.0),
            covariance="diagonal",
            temperature=None,
            options=options(mean_training="elbo", n_covariance=4, search=False),
        ),
        (X, Y),
    ),
    "means of some classes": (
        fit(
            kernel=k.RBF(1.0, 9.0),
            covariance="shared",
            learn_hyperparameters=False,
            class_batch=4,
            batch_size=20,
            max_epochs=2,
        ),
        toy(60, 10),
    ),
}


def numbers(clf: GPClassifier) -> list[Any]:
    """All that a fit leaves, but the time it took."""
    reports = [{**report, "seconds": 0} for report in clf.history_]
    found = [clf.kernel_, clf.elbo_, clf.temperature_, clf.variance_scale_, clf.n_iter_]
    return [*found, clf.converged_, clf.class_gap_, reports, clf.predict_proba(NEW).tobytes()]


def copy(clf: GPClassifier) -> GPClassifier:
    return GPClassifier(**clf.get_params(deep=False))


@pytest.mark.parametrize("name", FITS)
def test_resumed_is_uninterrupted(name, path, kill):
    clf, (rows, labels) = FITS[name]
    expected = numbers(copy(clf).fit(rows, labels))
    count = kill(None)
    assert numbers(copy(clf).fit(rows, labels, checkpoint=path)) == expected
    n = count["saves"]
    assert n > 4
    rng = np.random.default_rng(len(name))
    for stop in (1, int(rng.integers(2, n - 1)), n - 1):
        path.unlink()
        kill(stop)
        with pytest.raises(Killed):
            copy(clf).fit(rows, labels, checkpoint=path)
        # Killed again on the way to the end, if it is not near.
        kill(max(1, (n - stop) // 2))
        try:
            found = copy(clf).fit(rows, labels, checkpoint=path)
        except Killed:
            kill(None)
            found = copy(clf).fit(rows, labels, checkpoint=path)
        assert numbers(found) == expected


def test_a_complete_file_is_the_fitted_model(path, monkeypatch):
    first = minibatch(max_epochs=2).fit(X, Y, checkpoint=path)
    whole = path.read_bytes()
    for stages in ("coupled_fit", "decoupled_fit"):
        monkeypatch.setattr(f"conjugp._fit.fit.{stages}", lambda *a: pytest.fail("it began"))
    again = minibatch(max_epochs=2).fit(X, Y, checkpoint=path)
    assert numbers(again) == numbers(first) and path.read_bytes() == whole
    assert again.history_ == first.history_  # the seconds too
    order = np.random.default_rng(0).permutation(len(Y))
    again = minibatch(max_epochs=2, verbose=0).fit(X[order], Y[order], checkpoint=path)
    assert numbers(again) == numbers(first)


def test_killed_processes():
    """A share of bench/soak.py, through the same functions."""
    found = kill_fits(2, 0, 0.1, ("stream", "ep"))
    assert found["passed"], found


@pytest.mark.parametrize("state", [None, np.random.RandomState(5)])
def test_a_seed_that_was_drawn_is_kept(path, kill, state):
    def clf() -> GPClassifier:
        return fit(batch_size=20, max_epochs=2, random_state=state)

    kill(3)
    with pytest.raises(Killed):
        clf().fit(X, Y, checkpoint=path)
    seed = files.read(path)[1]["seed"]
    kill(None)
    found = clf().fit(X, Y, checkpoint=path)
    assert files.read(path)[1]["seed"] == seed
    assert numbers(clf().fit(X, Y, checkpoint=path)) == numbers(found)


def test_another_fit_is_refused_and_what_differs_is_named(path):
    minibatch(max_epochs=2).fit(X, Y, checkpoint=path)
    whole = path.read_bytes()

    def refused(match: str, rows=X, labels=Y, weight=None, **changes: Any) -> None:
        clf = minibatch(**{"max_epochs": 2, **changes})
        with pytest.raises(
            ValueError, match=rf"^checkpoint: .* another fit: {match}; give another"
        ):
            clf.fit(rows, labels, weight, checkpoint=path)
        assert path.read_bytes() == whole and not hasattr(clf, "classes_")

    refused("max_epochs was 2 and is 3, tol was 0.001 and is 0.1", max_epochs=3, tol=0.1)
    refused("kernel differs", kernel=k.RBF(1.0, 1.0))
    refused("likelihood was 'logistic-softmax' and is 'softmax'", likelihood="softmax")
    refused("random_state was 0 and is 1", random_state=1)
    refused("inducing differs", inducing=X[:8])
    refused("options.min_step was 0.05 and is 0.1", options=FitOptions(min_step=0.1))
    refused("X differs", rows=np.where(np.arange(len(X))[:, None] == 3, X + 1e-9, X))
    refused("y differs", labels=np.roll(Y, 1))
    refused("the classes differs", labels=Y + 1)
    refused("sample_weight or class_weight differs", weight=np.linspace(1, 2, len(Y)))
    refused("sample_weight or class_weight differs", class_weight={0: 2.0, 1: 1.0, 2: 1.0})
    refused("the number of distinct rows was 60 and is 59", rows=X[1:], labels=Y[1:])
    # What does not change the result does not matter.
    quiet = FitOptions(cache_mb=3, checkpoint_every=5.0, on_interrupt="return", callback=print)
    minibatch(max_epochs=2, options=quiet).fit(X, Y, checkpoint=path)


def test_another_version_is_refused(path, monkeypatch):
    fixed(n_inducing=3).fit(X, Y, checkpoint=path)
    monkeypatch.setattr("conjugp.__version__", "9.9")
    with pytest.raises(ValueError, match=r"the version of conjugp was '.*' and is '9\.9'"):
        fixed(n_inducing=3).fit(X, Y, checkpoint=path)


def test_a_warm_start_belongs_to_the_fit(path):
    clf = fixed(n_inducing=3, warm_start=True).fit(X[:30], Y[:30])
    with pytest.raises(AssertionError):
        assert numbers(clf) == numbers(copy(clf).fit(X, Y))
    clf.fit(X, Y, checkpoint=path)
    with pytest.raises(ValueError, match="the fit to go on from differs"):
        fixed(n_inducing=3, warm_start=True).fit(X, Y, checkpoint=path)


def test_other_files_are_refused(path):
    for content in (b"", b"not a checkpoint"):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="damaged or not a conjugp file"):
            fixed().fit(X, Y, checkpoint=path)
        assert path.read_bytes() == content
    fixed(n_inducing=3).fit(X, Y).save(path)
    with pytest.raises(FileFormatError, match="is not a checkpoint of a fit"):
        fixed(n_inducing=3).fit(X, Y, checkpoint=path)
    path.unlink()
    quick(n_samples=2, n_warmup=1).fit(X[:9], Y[:9], checkpoint=path)
    with pytest.raises(FileFormatError, match="is not a checkpoint of a fit"):
        fixed(n_inducing=3).fit(X, Y, checkpoint=path)
    with pytest.raises(ValueError, match=r"checkpoint.*is a folder"):
        fixed().fit(X, Y, checkpoint=path.parent)
    with pytest.raises(TypeError, match="checkpoint must be a path"):
        fixed().fit(X, Y, checkpoint=3)  # type: ignore[arg-type]


def test_every_part_of_a_file_is_needed(path, kill):
    clf = FITS["minibatch"][0]
    kill(5)
    with pytest.raises(Killed):
        copy(clf).fit(X, Y, checkpoint=path)
    kill(None)
    arrays, header = files.read(path)
    files.write(path, arrays, {**header, "format": 2})
    with pytest.raises(FileFormatError, match="has format 2"):
        copy(clf).fit(X, Y, checkpoint=path)
    for name in header:
        files.write(path, arrays, {key: x for key, x in header.items() if key != name})
        with pytest.raises(FileFormatError):
            copy(clf).fit(X, Y, checkpoint=path)
    for name in arrays:
        files.write(path, {key: x for key, x in arrays.items() if key != name}, header)
        with pytest.raises(FileFormatError, match="is damaged"):
            copy(clf).fit(X, Y, checkpoint=path)


def test_a_full_disk_does_not_stop_the_fit(path, monkeypatch, kill):
    expected = numbers(FITS["minibatch"][0].fit(X, Y))

    def full(*args: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as m:
        m.setattr(files.Path, "write_bytes", full)
        with pytest.warns(UserWarning, match="checkpoint: no space left; the fit goes on without"):
            found = copy(FITS["minibatch"][0]).fit(X, Y, checkpoint=path)
    assert numbers(found) == expected and not list(path.parent.iterdir())


def test_a_full_disk_is_said_once(path, monkeypatch):
    """However often the fit has tried, and however the words differ."""
    tries = []

    def full(*args: Any) -> None:
        tries.append(args)
        raise OSError(f"no space left for try {len(tries)}")

    monkeypatch.setattr(files, "write", full)
    clf = copy(FITS["minibatch"][0]).set_params(options=FitOptions(checkpoint_every=1e-9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monkeypatch.setattr("conjugp._persistence.checkpoint._SHARE", 0)
        clf.fit(X, Y, checkpoint=path)
    assert len(tries) > 5
    assert [str(w.message) for w in caught if "checkpoint" in str(w.message)] == [
        "checkpoint: no space left for try 1; the fit goes on without"
    ]


def test_what_a_killed_writer_left_is_removed(path):
    leftover = path.with_name(f".{path.name}.{'0' * 31}a")
    others = [path.with_name(name) for name in (f".{path.name}.notes", ".other." + "0" * 32)]
    for file in (leftover, *others):
        file.touch()
    fixed(n_inducing=3).fit(X, Y, checkpoint=path)
    assert not leftover.exists() and all(file.exists() for file in others)


def test_ctrl_c_leaves_a_file_to_go_on_from(path, kill):
    kill(None)
    stops = iter(range(100))

    def stop(p: Any) -> None:
        if next(stops) == 1:
            raise KeyboardInterrupt

    how = options(callback=stop, on_interrupt="return")
    stopped = minibatch(options=how).fit(X, Y, checkpoint=path)
    assert stopped.predict_proba(NEW).shape == (20, 3)
    found = minibatch(options=options()).fit(X, Y, checkpoint=path)
    assert numbers(found) == numbers(minibatch(options=options()).fit(X, Y))


def test_without_a_path_nothing_is_kept():
    journal = Journal()
    assert journal.stage("x", lambda: 3) == 3 and not journal.due() and journal.left_off() is None
    journal.keep({"step": 3})
    journal.close()
    assert journal.left_off() is None and journal.stage("x", lambda: 4) == 4


def test_stages_within_stages(path, monkeypatch):
    """A stage that has ended stands for those in it; one that has not is entered again."""
    monkeypatch.setattr(checkpoint, "_SHARE", 0)
    ran: list[str] = []

    def run(stop: str | None) -> float:
        generator, history = torch.Generator().manual_seed(0), []
        journal = Checkpoint(path, FIT, {}, every=0.0)
        journal.follow(generator, history)

        def inner(name: str) -> float:
            if name == stop:
                raise Killed
            ran.append(name)
            history.append(name)
            return float(torch.rand((), generator=generator))

        def outer(name: str) -> float:
            return sum(journal.stage("inner", lambda i=i: inner(f"{name}{i}")) for i in range(3))

        found = sum(journal.stage("outer", lambda n=n: outer(n)) for n in "ab")
        journal.close()
        assert history == ["a0", "a1", "a2", "b0", "b1", "b2"]
        return found

    for stop in ("a1", "b2"):
        with pytest.raises(Killed):
            run(stop)
    found = run(None)
    assert ran == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert len(files.read(path)[1]["done"]) == 2
    path.unlink()
    assert run(None) == found
