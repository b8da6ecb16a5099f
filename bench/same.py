"""Whether two versions of the library give the same fits: probabilities of fits of every kind.

    python bench/same.py before.npz                  # in one commit
    python bench/same.py after.npz                   # in the other, the same machine and threads
    python bench/same.py --compare before.npz after.npz

Only public names are used, and rows are made here. Model files that the first run wrote, beside
its .npz, are loaded by the second one and have to predict the same bits: --models before.models.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp import FitOptions, GPClassifier, load
from conjugp.kernels import RBF, Linear, Matern32, Normalised

GRID = np.random.default_rng(9).normal(size=(60, 4))
Rows = tuple[NDArray[np.float64], NDArray[np.int64]]


def blobs(n: int, n_classes: int = 3, seed: int = 0, spread: float = 1.0) -> Rows:
    """Clouds of classes, in features of different size."""
    rng = np.random.default_rng(seed)
    y = rng.integers(n_classes, size=n)
    centre = 1.5 * np.random.default_rng(5).normal(size=(n_classes, 4))
    return centre[y] + spread * rng.normal(size=(n, 4)), y


def fitted(n: int, n_classes: int = 3, **settings: Any) -> GPClassifier:
    return GPClassifier(**{"random_state": 0, **settings}).fit(*blobs(n, n_classes))


MINI = {"n_inducing": 30, "batch_size": 128, "max_epochs": 4}


def resumed() -> GPClassifier:
    """A fit that is stopped in its middle and goes on from its checkpoint."""
    calls = 0

    def stop(progress: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("stopped")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit"
        rows, settings = blobs(1200), {**MINI, "max_epochs": 20, "random_state": 0}
        options = {"checkpoint_every": 1e-6}
        try:
            GPClassifier(**settings, options=FitOptions(callback=stop, **options)).fit(
                *rows, checkpoint=path
            )
        except RuntimeError:
            pass
        return GPClassifier(**settings, options=FitOptions(**options)).fit(*rows, checkpoint=path)


def stream() -> GPClassifier:
    X, y = blobs(1500)
    parts = [(X[i : i + 200], y[i : i + 200]) for i in range(0, len(y), 200)]
    return GPClassifier(random_state=0).fit_stream(parts, classes=[0, 1, 2])


def spooled() -> GPClassifier:
    """More rows than are kept in memory: 300,000 of 120 features, most of them 0."""
    parts = []
    for seed in range(100):
        X, y = blobs(3000, seed=seed)
        parts.append((np.hstack([X, np.zeros((3000, 116))]), y))
    clf = GPClassifier(random_state=0, n_inducing=30, batch_size=1024, max_epochs=0.3)
    return clf.fit_stream(parts, classes=[0, 1, 2])


def proba(clf: Any) -> NDArray[np.float64]:
    """Of the grid, in as many features as the fit has."""
    return clf.predict_proba(np.pad(GRID, ((0, 0), (0, clf.n_features_in_ - GRID.shape[1]))))


def partial(**settings: Any) -> GPClassifier:
    X, y = blobs(900)
    clf = GPClassifier(random_state=0, **settings)
    for i in range(0, 900, 150):
        clf.partial_fit(X[i : i + 150], y[i : i + 150], classes=[0, 1, 2])
    return clf


def goes_on() -> GPClassifier:
    clf = fitted(200)
    return clf.partial_fit(*blobs(100, seed=3))


def gibbs(**settings: Any) -> Any:
    from conjugp import GibbsGPClassifier

    clf = GibbsGPClassifier(n_samples=40, n_warmup=20, n_chains=2, random_state=0, **settings)
    return clf.fit(*blobs(60))


def weighted() -> GPClassifier:
    X, y = blobs(700)
    w = np.random.default_rng(1).integers(1, 4, size=700).astype(float)
    return GPClassifier(random_state=0, class_weight="balanced").fit(X, y, w)


def one_rank(n: int, settings: dict[str, Any]) -> None:
    """What each of two processes does."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    X, y = blobs(n)
    mine = np.arange(n) % 2 == rank
    clf = GPClassifier(random_state=0, **settings).fit(X[mine], y[mine])
    if rank == 0:
        np.save(os.environ["FOUND"], clf.predict_proba(GRID))
    torch.distributed.destroy_process_group()


def two_ranks(name: str) -> NDArray[np.float64]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        found = f"{folder}/found.npy"
        base = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FOUND": found}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", name],
                env={**os.environ, **base, "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        if any(rank.wait() for rank in ranks):
            raise RuntimeError(f"{name}: a rank failed")
        return np.load(found)


ON_RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks, coupled": (1100, {**MINI, "dtype": "float64"}),
    "two ranks, decoupled": (330, {}),
}

FITS: dict[str, Callable[[], Any]] = {
    "coupled, full batch": lambda: fitted(150),
    "coupled, full batch, two classes": lambda: fitted(150, 2),
    "coupled, a kernel for each class": lambda: fitted(150, shared_kernel=False),
    "coupled, all rows inducing": lambda: fitted(120, n_inducing=None, temperature=None),
    "coupled, minibatches, float32": lambda: fitted(2000, **MINI),
    "coupled, minibatches, float64": lambda: fitted(2000, **MINI, dtype="float64"),
    "coupled, minibatches, sum of kernels": lambda: fitted(
        1500, kernel=Linear() + Matern32(), **MINI
    ),
    "coupled, some of the classes": lambda: fitted(1500, 40, class_batch=8, **MINI),
    "decoupled": lambda: fitted(800),
    "decoupled, many rows": lambda: fitted(6000),
    "decoupled, float64": lambda: fitted(1200, dtype="float64"),
    "decoupled, diagonal": lambda: fitted(700, covariance="diagonal"),
    "decoupled, no covariance": lambda: fitted(700, covariance="none"),
    "decoupled, some of the classes": lambda: fitted(
        1500, 40, class_batch=8, batch_size=64, covariance="none"
    ),
    "decoupled, under the ELBO": lambda: fitted(700, options=FitOptions(mean_training="elbo")),
    "decoupled, directions": lambda: fitted(500, kernel=Normalised(RBF())),
    "weighted": weighted,
    "bound tight": lambda: fitted(200, bound="tight"),
    "bound collapsed": lambda: fitted(200, bound="collapsed"),
    "bound augmented": lambda: fitted(200, bound="augmented"),
    "paper": lambda: GPClassifier.paper(random_state=0, max_epochs=5).fit(*blobs(600)),
    "softmax": lambda: fitted(1200, likelihood="softmax", **MINI),
    "softmax, decoupled": lambda: fitted(700, likelihood="softmax"),
    "robust-max": lambda: fitted(600, likelihood="robust-max"),
    "heaviside": lambda: fitted(200, likelihood="heaviside"),
    "dirichlet": lambda: fitted(400, likelihood="dirichlet"),
    "expectation propagation": lambda: fitted(200, likelihood="heaviside", inference="ep"),
    "mc-vi": lambda: fitted(150, inference="mc-vi"),
    "stream in memory": stream,
    "stream on disk": spooled,
    "partial_fit": partial,
    "partial_fit, EP": lambda: partial(likelihood="heaviside", inference="ep"),
    "partial_fit after fit": goes_on,
    "checkpoint resumed": resumed,
    "Gibbs": gibbs,
    "Gibbs, sparse": lambda: gibbs(n_inducing=20),
}


def run(path: Path, only: list[str]) -> None:
    """All fits, their probabilities in one file and the models beside it."""
    warnings.simplefilter("ignore")
    found: dict[str, NDArray[Any]] = {}
    models = path.with_suffix(".models")
    models.mkdir(parents=True, exist_ok=True)
    for name, fit in FITS.items():
        if only and name not in only:
            continue
        clf = fit()
        found[name] = proba(clf)
        clf.save(models / f"{name}.conjugp")
        print(name, flush=True)
    for name in ON_RANKS:
        if not only or name in only:
            found[name] = two_ranks(name)
            print(name, flush=True)
    np.savez(path, **found)  # type: ignore[arg-type]


def compare(before: Path, after: Path, models: Path | None) -> int:
    """A line for each kind; 0 if all are within 1e-6, or 1e-4 in float32."""
    worst = 0
    with np.load(before) as a, np.load(after) as b:
        for name in a.files:
            gap = float(np.abs(a[name] - b[name]).max())
            line = "the same bits" if np.array_equal(a[name], b[name]) else f"{gap:.1e}"
            worst |= not gap <= (1e-6 if "float64" in name else 1e-4)
            if models is not None and (models / f"{name}.conjugp").is_file():
                loaded = proba(load(models / f"{name}.conjugp"))
                same = np.array_equal(loaded, a[name])
                worst |= not same
                line += ", its old file too" if same else ", ITS OLD FILE PREDICTS OTHERWISE"
            print(f"{name}: {line}")
    return worst


def main() -> int:
    """Run or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, help="where probabilities are written")
    parser.add_argument("--only", nargs="*", default=[], help="names of fits")
    parser.add_argument("--compare", nargs=2, type=Path)
    parser.add_argument("--models", type=Path, help="model files of the first run")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        one_rank(*ON_RANKS[arguments.rank])
        return 0
    if arguments.compare:
        return compare(*arguments.compare, arguments.models)
    if arguments.path is None:
        parser.error("name a file, or --compare two")
    run(arguments.path, arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
