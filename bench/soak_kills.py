"""`kill -9` at random moments: fits end as if nothing had been, and files stay whole.

Every run is a process of its own, forked so that it need not import everything again.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from soak_models import base_models, rows_of

from conjugp import FitOptions, GibbsGPClassifier, GPClassifier, load
from conjugp._estimators import reading
from conjugp._persistence import files
from conjugp._sampler import parallel as chains
from conjugp.kernels import RBF

EVERY = 0.03  # seconds between checkpoints here, so that kills fall between, before and into them
_fork = multiprocessing.get_context("fork")


class Fit(NamedTuple):
    """A classifier and its data."""

    make: Callable[[], Any]
    n_rows: int
    n_classes: int
    stream: bool = False  # whether its rows come in batches and go to disk


def fits(size: float = 1.0) -> dict[str, Fit]:
    """One of every kind; with size 1 each takes a few seconds."""

    def gp(**settings: Any) -> Callable[[], GPClassifier]:
        more = settings.pop("options", {})
        options = FitOptions(checkpoint_every=EVERY, **more)
        return lambda: GPClassifier(random_state=0, options=options, **settings)

    def sampler() -> GibbsGPClassifier:
        n = max(20, round(1000 * size))
        settings = {"n_samples": n, "n_warmup": n // 4, "n_chains": 2, "n_jobs": 1}
        return GibbsGPClassifier(RBF(1.5, 4.0), hyperparameters="fixed", random_state=0, **settings)

    epochs = max(2, round(15 * size))
    few = {"n_inducing": 12, "max_epochs": epochs}
    many, passes = {"n_inducing": 400}, max(2, round(10 * size))
    fewer = {"n_inducing": 310, "temperature": None}
    ep = {"likelihood": "heaviside", "inference": "ep"}
    return {
        "full batch": Fit(gp(n_inducing=40, max_epochs=10 * epochs, tol=0.0), 200, 3),
        "minibatch": Fit(gp(batch_size=20, **few), 300, 3),
        "class batch": Fit(gp(batch_size=20, class_batch=4, temperature=None, **few), 300, 20),
        "ep": Fit(gp(n_inducing=30, max_epochs=10 * epochs, tol=0.0, **ep), 200, 3),
        "ep, minibatch": Fit(gp(batch_size=20, **few, **ep), 300, 3),
        "mc-vi": Fit(gp(batch_size=20, inference="mc-vi", **few), 200, 3),
        "decoupled": Fit(gp(max_epochs=passes, **many), 420, 3),
        "decoupled, by elbo": Fit(
            gp(max_epochs=2, options={"mean_training": "elbo", "search": False}, **fewer), 320, 3
        ),
        "decoupled, class batch": Fit(
            gp(batch_size=64, class_batch=5, max_epochs=passes, **many), 420, 20
        ),
        "stream": Fit(gp(batch_size=20, **few), 300, 3, True),
        "stream, decoupled": Fit(gp(max_epochs=passes, **many), 420, 3, True),
        "sampler": Fit(sampler, 60, 3),
    }


def _run(fit: Fit, checkpoint: Path | None, out: Path, ready: Any = None) -> None:
    """A whole fit; what it gives goes to a file, which appears when it is complete."""
    warnings.simplefilter("ignore")
    chains._CHECKPOINT_SECONDS, chains._STRETCH_SECONDS = EVERY, EVERY
    X, y = rows_of(fit.n_rows, fit.n_classes)
    grid = np.random.default_rng(1).normal(size=(50, 2)) * 4
    if ready is not None:
        ready.set()
    if fit.stream:
        reading.MEMORY_BYTES = 0
        rows = [(X[i : i + 50], y[i : i + 50]) for i in range(0, len(y), 50)]
        clf = fit.make().fit_stream(rows, checkpoint=checkpoint)
    else:
        clf = fit.make().fit(X, y, checkpoint=checkpoint)
    numbers = [clf.n_iter_, float(clf.converged_)]
    if isinstance(clf, GPClassifier):
        numbers += [clf.elbo_, clf.temperature_, clf.variance_scale_, clf.class_gap_]
        numbers += [float(report["value"]) for report in clf.history_]
    else:
        numbers += [clf.rhat_, clf.ess_bulk_]
    found = {"proba": clf.predict_proba(grid), "numbers": np.array(numbers)}
    files.write(out, found, {})


def _finished(fit: Fit, checkpoint: Path | None, out: Path) -> dict[str, np.ndarray]:
    process = _fork.Process(target=_run, args=(fit, checkpoint, out))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"a run ended with {process.exitcode}")
    return files.read(out)[0]


def _killed(fit: Fit, checkpoint: Path, out: Path, after: float) -> bool:
    """Start a run and kill it so many seconds after it has begun; False if it was faster."""
    ready = _fork.Event()
    process = _fork.Process(target=_run, args=(fit, checkpoint, out, ready))
    process.start()
    ready.wait()
    process.join(after)
    if process.exitcode is None:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a run ended with {process.exitcode}")
    return process.exitcode == -signal.SIGKILL


def _same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[name], b[name], equal_nan=True) for name in a)


def kill_fits(
    n: int, seed: int, size: float = 1.0, names: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """`n` kills, spread over all kinds of fits, of which each may be killed several times."""
    rng = random.Random(f"kills {seed}")
    chosen = {name: fit for name, fit in fits(size).items() if names is None or name in names}
    truth: dict[str, tuple[dict[str, np.ndarray], float]] = {}
    each = {name: {"runs": 0, "kills": 0, "resumed_from_a_file": 0} for name in chosen}
    failures: list[str] = []
    done = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        out, checkpoint = Path(folder) / "out", Path(folder) / "checkpoint"
        while done < n and tried < 20 * n:
            name = list(chosen)[tried % len(chosen)]
            fit, tried = chosen[name], tried + 1
            for path in (out, checkpoint):
                path.unlink(missing_ok=True)
            if name not in truth:
                whole = _finished(fit, None, out)
                began = time.monotonic()
                with_file = _finished(fit, checkpoint, out)
                truth[name] = whole, time.monotonic() - began
                if not _same(whole, with_file):
                    failures.append(f"{name}: a checkpoint changes the result")
            for path in (out, checkpoint):
                path.unlink(missing_ok=True)
            whole, seconds = truth[name]
            each[name]["runs"] += 1
            again = True
            while again and done < n and not out.exists():
                killed = _killed(fit, checkpoint, out, rng.uniform(0, 0.9 * seconds))
                done += killed
                each[name]["kills"] += killed
                again = rng.random() < 0.5
                if checkpoint.exists():
                    each[name]["resumed_from_a_file"] += killed
                    try:
                        files.read(checkpoint)
                    except ValueError as error:
                        failures.append(f"{name}: unreadable checkpoint: {error}")
            if not _same(whole, _finished(fit, checkpoint, out)):
                failures.append(f"{name}: another result after {each[name]['kills']} kills")
        left = [p.name for p in Path(folder).iterdir() if p not in (out, checkpoint)]
    durations = {name: round(seconds, 2) for name, (_, seconds) in truth.items()}
    return {
        "kills": done,
        "fits": each,
        "seconds_uninterrupted": durations,
        "files_left": left,
        "failures": failures,
        "passed": done == n and not failures and not left,
    }


# --- saving ---------------------------------------------------------------------------------------


def _save_for_ever(paths: list[Path], target: Path, ready: Any) -> None:
    models = [load(path) for path in paths]
    ready.set()
    while True:
        for clf in models:
            clf.save(target)


def kill_saves(n: int, seed: int) -> dict[str, Any]:
    """`n` processes killed while they write one model over another: the file is one of the two."""
    rng = random.Random(f"saves {seed}")
    models = base_models(("coupled", "gibbs"))
    failures, seen = [], dict.fromkeys(models, 0)
    with tempfile.TemporaryDirectory() as folder:
        paths, target = [Path(folder) / name for name in models], Path(folder) / "target"
        for path, base in zip(paths, models.values(), strict=True):
            path.write_bytes(base.data)
        target.write_bytes(models["coupled"].data)
        for i in range(n):
            ready = _fork.Event()
            process = _fork.Process(target=_save_for_ever, args=(paths, target, ready))
            process.start()
            ready.wait()
            time.sleep(rng.uniform(0, 0.05))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            name = _which(target, models)
            if name is None:
                failures.append(f"number {i}: the file is neither model")
            else:
                seen[name] += 1
        files.remove_leftovers(target)
        left = [p.name for p in Path(folder).iterdir() if p not in (*paths, target)]
    return {
        "kills": n,
        "found": seen,
        "files_left": left,
        "failures": failures,
        "passed": not failures and not left,
    }


def _which(path: Path, models: dict[str, Any]) -> str | None:
    """The model that a file holds."""
    try:
        clf = load(path)
    except ValueError:
        return None
    for name, base in models.items():
        if np.array_equal(clf.predict_proba(base.rows), base.proba):
            return name
    return None
