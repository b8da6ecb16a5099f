"""The contestants of compare.py. Each run is a process of its own, with all cores to itself."""

from __future__ import annotations

import json
import subprocess
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from data import KEYS, Start, load, scaled
from numpy.typing import NDArray
from record import scores

Run = dict[str, Any]

FIRST_ROWS, MORE_ROWS = 200, 1.5  # rows of scikit-learn's first fit; how many times more each time
CUBE = MORE_ROWS**3  # what a fit costs more than the one before
SHARE = 1 / 4  # of the budget for the longest of these fits: they are many, and so are predictions


def alone(contestant: Callable[..., Any], *arguments: Any) -> Any:
    """Call a contestant in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(contestant, *arguments).result()


# --- conjugp --------------------------------------------------------------------------------------


def first_state(name: str, settings: dict[str, Any]) -> Start:
    """Where conjugp with these settings starts, in the units of the data."""
    from conjugp import FitOptions, GPClassifier

    split = load(name)

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    options = FitOptions(callback=stop, on_interrupt="return")
    settings = {**settings, "learn_inducing": False, "learn_hyperparameters": False}
    model = GPClassifier(**settings, random_state=0, options=options)
    model.fit(split.X_train, split.y_train)
    kernel = model.kernel_
    lengths = np.broadcast_to(kernel.lengthscale, split.X_train.shape[1:])
    return Start(model.inducing_points_, np.array(lengths), float(kernel.variance))


def conjugp_fit(name: str, settings: dict[str, Any]) -> Run:
    """One complete fit; its seconds are all of `fit`, k-means and temperature included."""
    began = time.perf_counter()
    from conjugp import GPClassifier

    imported = time.perf_counter() - began
    split = load(name)
    model = GPClassifier(**settings, random_state=0)
    with warnings.catch_warnings():
        # Fits cut short on purpose warn that they are not converged.
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        model.fit(split.X_train, split.y_train)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    proba = model.predict_proba(split.X_test)
    return {
        "settings": settings,
        "seconds": seconds,
        **scores(split.y_test, proba, model.classes_),
        "temperature": model.temperature_,
        "predict_seconds": time.perf_counter() - began,
        "import_seconds": imported,
    }


# --- GPyTorch -------------------------------------------------------------------------------------


def gpytorch_fit(name: str, start: Start, settings: dict[str, Any], budget: float) -> Run:
    """One training run; its seconds are those of training steps alone, inducing points given."""
    began = time.perf_counter()
    import svgp

    imported = time.perf_counter() - began
    run = svgp.train(load(name), start, **settings, budget=budget)
    return {"settings": settings, "import_seconds": imported, **run}


# --- GPflow ---------------------------------------------------------------------------------------


def has_gpflow(python: str) -> bool:
    """Whether an interpreter is there and finds GPflow."""
    test = "import sys, importlib.util as u; sys.exit(u.find_spec('gpflow') is None)"
    try:
        return subprocess.run([python, "-c", test], check=False).returncode == 0
    except OSError:
        return False


def gpflow_fit(
    name: str, start: Start, settings: dict[str, Any], budget: float, python: str
) -> Run:
    """One training run; its seconds are those of training steps alone, inducing points given."""
    split = load(name)
    with TemporaryDirectory() as folder:
        rows, options, output = (Path(folder) / f for f in ("rows.npz", "settings.json", "run.npz"))
        np.savez(rows, **start._asdict(), **dict(zip(KEYS, split, strict=True)))
        given = {**settings, "budget": budget, "called_at": time.time()}
        options.write_text(json.dumps(given))
        script = Path(__file__).with_name("gpflow_svgp.py")
        command = [python, str(script), str(rows), str(options), str(output)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            return {"settings": settings, "curve": [], "failure": f"its process ended: {last}"}
        with np.load(output) as file:
            run, looks = json.loads(str(file["result"])), file["proba"]
    for point, proba in zip(run["curve"], looks, strict=True):
        point.update(scores(split.y_test, proba, np.arange(proba.shape[1])))
    return {"settings": settings, **run}


# --- scikit-learn ---------------------------------------------------------------------------------


def sklearn_fit(name: str, start: Start, settings: dict[str, Any], budget: float) -> Run:
    """GaussianProcessClassifier on more and more rows, as long as a fit should not take too long.

    A point of its curve is one complete fit: with inputs scaled and rows drawn, its seconds alone.
    """
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF

    began = time.perf_counter()
    split = load(name)
    X, X_test, _, lengths, variance = scaled(split, start, settings["inputs"], settings["kernel"])
    kernel = variance * RBF(float(lengths[0]))
    order = every_class_first(split.y_train)
    run: Run = {"settings": settings, "curve": []}
    run["setup_seconds"] = time.perf_counter() - began
    n = FIRST_ROWS
    while n <= len(order):
        rows = order[:n]
        model = GaussianProcessClassifier(kernel, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            model.fit(X[rows], split.y_train[rows])
            seconds = time.perf_counter() - began
        proba = np.concatenate([model.predict_proba(part) for part in chunks(X_test)])
        found = scores(split.y_test, proba, model.classes_)
        run["curve"].append({"seconds": seconds, "rows": n, **found})
        if CUBE * seconds > SHARE * budget:
            break
        n = int(MORE_ROWS * n)
    return run


def every_class_first(y: NDArray) -> NDArray:
    """Rows in random order, but the first of them one of each class."""
    order = np.random.default_rng(0).permutation(len(y))
    first = np.sort(np.unique(y[order], return_index=True)[1])
    return np.concatenate([order[first], np.delete(order, first)])


def chunks(X: NDArray, size: int = 2000) -> list[NDArray]:
    """Rows in parts: a prediction's memory grows with them."""
    return [X[i : i + size] for i in range(0, len(X), size)]
