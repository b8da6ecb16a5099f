"""What `test_distributed.py` has two processes do: python ranks.py RANK SIZE FOLDER."""

from __future__ import annotations

import datetime
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from conjugp import FitOptions, GPClassifier

GRID = np.random.default_rng(9).normal(size=(40, 3))
Found = dict[str, Any]


def blobs(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return rng.normal(size=(n, 3)) + 2 * np.eye(3)[y], y


def own(n: int, rank: int, size: int) -> np.ndarray:
    """Which rows a rank has: a third on rank 0, the others on rank 1."""
    return np.ones(n, bool) if size == 1 else (np.arange(n) % 3 == 0) == (rank == 0)


def told(clf: GPClassifier) -> Found:
    found = {
        "Z": clf.inducing_points_,
        "mean": clf.prior_mean_,
        "proba": clf.predict_proba(GRID),
        "elbo": clf.elbo_,
        "temperature": clf.temperature_,
        "classes": clf.classes_,
    }
    kernels = clf.kernel_ if isinstance(clf.kernel_, list) else [clf.kernel_]
    return found | {"theta": np.concatenate([k.theta.numpy() for k in kernels])}


def fitted(n: int, rank: int, size: int, **settings: Any) -> Found:
    X, y = blobs(n)
    mine = own(n, rank, size)
    return told(GPClassifier(**{"random_state": 0, **settings}).fit(X[mine], y[mine]))


MINI = {"n_inducing": 20, "batch_size": 128, "max_epochs": 4, "dtype": "float64"}


def minibatch(rank: int, size: int, folder: Path) -> Found:
    return fitted(1100, rank, size, **MINI)


def full_batch(rank: int, size: int, folder: Path) -> Found:
    return fitted(120, rank, size, max_epochs=15, batch_size=None, shared_kernel=False)


def decoupled(rank: int, size: int, folder: Path) -> Found:
    return fitted(330, rank, size, covariance="shared")


def held_out(rank: int, size: int, folder: Path) -> Found:
    """More rows than folds are for: held-out rows give the temperature and are trained on last."""
    settings = {"n_inducing": 301, "max_epochs": 2, "dtype": "float64", "batch_size": 1000}
    options = FitOptions(cache_mb=0)
    fixed = {"learn_hyperparameters": False, "options": options}
    return fitted(5100, rank, size, **settings, **fixed)


def single_precision(rank: int, size: int, folder: Path) -> Found:
    return fitted(1100, rank, size, **{**MINI, "dtype": "float32"})


def uneven(rank: int, size: int, folder: Path) -> Found:
    """Text labels, weights, a class of one rank alone, and balanced classes."""
    X, y = blobs(150)
    mine = np.ones(150, bool) if size == 1 else (y == 2) == (rank == 1)
    names, weight = np.array(["a", "b", "cc"])[y], 0.5 + np.arange(150) % 3
    clf = GPClassifier(class_weight="balanced", max_epochs=10, random_state=0)
    return told(clf.fit(X[mine], names[mine], weight[mine]))


def empty(rank: int, size: int, folder: Path) -> Found:
    X, y = blobs(150)
    mine = slice(None) if size == 1 or rank == 1 else slice(0)
    return told(GPClassifier(max_epochs=10, random_state=0).fit(X[mine], y[mine]))


def tables(rank: int, size: int, folder: Path) -> Found:
    """Gaps, a level that one rank alone has, and one of many that tell the classes."""
    X, y = blobs(150)
    frame = pd.DataFrame(
        {"a": X[:, 0], "b": "south", "c": [f"c{3 * (i % 9) + k}" for i, k in enumerate(y)]}
    )
    frame.loc[::7, "a"] = np.nan
    frame.loc[::6, "b"] = "north"
    mine = own(150, rank, size)
    return told(GPClassifier(max_epochs=10, random_state=0).fit(frame[mine], y[mine]))


LONGER = {**MINI, "max_epochs": 16}


def local_steps(rank: int, size: int, folder: Path) -> Found:
    return fitted(1100, rank, size, **LONGER, options=FitOptions(local_steps=4))


def resumed(rank: int, size: int, folder: Path) -> Found:
    """Interrupted twice, once in the middle of a loop, and gone on with from the file."""
    path = folder / "fit.checkpoint"

    def stop(progress: Any) -> None:
        if progress.stage == "all rows" or progress.epoch > 3:
            raise RuntimeError("stop here")

    X, y = blobs(1100)
    mine = own(len(X), rank, size)
    rows = X[mine], y[mine]
    if size > 1:
        for _ in range(2):
            options = FitOptions(callback=stop, checkpoint_every=0.0)
            try:
                GPClassifier(random_state=0, options=options, **MINI).fit(*rows, checkpoint=path)
            except RuntimeError as error:
                assert "stop here" in str(error)
        assert path.exists() and not list(folder.glob(".fit*"))
    return told(GPClassifier(random_state=0, **MINI).fit(*rows, checkpoint=path))


def alone(rank: int, size: int, folder: Path) -> Found:
    """In a group, but not of it."""
    X, y = blobs(100, seed=rank)
    clf = GPClassifier(max_epochs=5, random_state=0, options=FitOptions(distributed=False))
    return told(clf.fit(X, y))


def weights_of_another_scale(rank: int, size: int, folder: Path) -> Found:
    """On one rank they would do: it is the mean over all rows that is said, and by rank 0."""
    X, y = blobs(60)
    mine, weight = own(60, rank, size), np.where(own(60, 0, 2), 0.5, 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GPClassifier(max_epochs=2, random_state=0).fit(X[mine], y[mine], weight[mine])
    texts = [str(w.message) for w in caught]
    return {"said": [text for text in texts if "sample_weight" in text]}


def _error(work: Callable[[], Any]) -> Found:
    try:
        work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def bad_shard(rank: int, size: int, folder: Path) -> Found:
    X, y = blobs(60)
    if rank == 1:
        X[17, 1] = np.nan
    return _error(lambda: GPClassifier().fit(X, y))


def other_parameters(rank: int, size: int, folder: Path) -> Found:
    return _error(lambda: GPClassifier(max_epochs=10 + rank).fit(*blobs(60)))


def other_labels(rank: int, size: int, folder: Path) -> Found:
    X, y = blobs(60)
    return _error(lambda: GPClassifier().fit(X, y if rank else y.astype(str)))


def other_width(rank: int, size: int, folder: Path) -> Found:
    X, y = blobs(60)
    return _error(lambda: GPClassifier().fit(X[:, : 3 - rank], y))


def refused(rank: int, size: int, folder: Path) -> Found:
    return _error(lambda: GPClassifier(class_batch=2).fit(*blobs(60)))


def other_checkpoint(rank: int, size: int, folder: Path) -> Found:
    path = folder / "fit.checkpoint"
    return _error(lambda: GPClassifier(random_state=1, **MINI).fit(*blobs(60), checkpoint=path))


def lost(rank: int, size: int, folder: Path) -> Found:
    """Rank 1 is gone in the middle of a fit. Comes last: there is no group after it."""

    def stop(progress: Any) -> None:
        if rank == 1:
            os._exit(9)

    options = FitOptions(callback=stop)
    return _error(lambda: GPClassifier(options=options, **MINI).fit(*blobs(1100, seed=rank)))


SAME = [
    minibatch,
    full_batch,
    decoupled,
    held_out,
    single_precision,
    uneven,
    empty,
    tables,
    resumed,
]
ERRORS = [bad_shard, other_parameters, other_labels, other_width, refused, other_checkpoint]


def main(rank: int, size: int, folder: Path) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    for work in [*SAME, local_steps, alone, weights_of_another_scale, *ERRORS, lost]:
        found = work(rank, size, folder)
        (folder / f"{work.__name__}.{rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
