"""Public copies of the paper's five data sets: fetched on first use, checked, and kept.

Fetched rows are kept as one .npz for each set, in the folder that CONJUGP_CACHE names
(~/.cache/conjugp). A file is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VARIABLE = "CONJUGP_CACHE"
LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/vehicle"
SENSIT_FILES = ("combined.bz2", "combined.t.bz2")

Rows = tuple[NDArray, NDArray]


class WrongDataError(ValueError):
    """What was fetched is not the set that was asked for."""


class Source(NamedTuple):
    """Where a set comes from, and what its rows must be."""

    rows: Callable[[Path], Rows]  # all of them, in the order of the source
    origin: str
    shape: tuple[int, int]
    n_classes: int
    n_train: int | None  # the first rows are for training; None: the set has no split
    sha256: str | None  # of `digest`; None: nobody has published one


def openml(number: int) -> Callable[[Path], Rows]:
    """A set of openml.org, whose MD5 sums scikit-learn compares."""

    def rows(folder: Path) -> Rows:
        from sklearn.datasets import fetch_openml

        return fetch_openml(data_id=number, data_home=str(folder), as_frame=False, return_X_y=True)

    return rows


def covtype(folder: Path) -> Rows:
    """CovType in UCI's order, whose SHA-256 sum scikit-learn compares."""
    from sklearn.datasets import fetch_covtype

    return fetch_covtype(data_home=str(folder), return_X_y=True)


def sensit(folder: Path) -> Rows:
    """SensIT Vehicle Combined from LIBSVM's two files, training rows first."""
    from sklearn.datasets import fetch_file

    for name in SENSIT_FILES:
        fetch_file(f"{LIBSVM}/{name}", folder=folder, local_filename=name)
    return read_sensit(folder)


def read_sensit(folder: Path) -> Rows:
    """Rows of LIBSVM's own two files in a folder."""
    from sklearn.datasets import load_svmlight_files

    paths = [str(folder / name) for name in SENSIT_FILES]
    parts = load_svmlight_files(paths, dtype=np.float32, zero_based=False)
    X = np.concatenate([part.toarray() for part in parts[::2]])
    return X, np.concatenate(parts[1::2])


SOURCES = {
    "shuttle": Source(
        openml(40685),
        "OpenML 40685",
        (58_000, 9),
        7,
        43_500,
        "7228d7b18fee0f719e97e0185792147bbaa037749f65e5fb9a16d0d867cd5f9a",
    ),
    "mnist": Source(
        openml(554),
        "OpenML 554",
        (70_000, 784),
        10,
        60_000,
        "4e4d781483dea3db374c0534490e1b0a1d2f75db9d399971e8dd8a29972d0d3b",
    ),
    "fashion_mnist": Source(
        openml(40996),
        "OpenML 40996",
        (70_000, 784),
        10,
        60_000,
        "a440a8875ae90a944ea3d092f5637796f04629ae71e4c862bdf8726d5ea0e420",
    ),
    "covtype": Source(
        covtype,
        "scikit-learn's fetch_covtype",
        (581_012, 54),
        7,
        None,
        "b80c88de46e36ff2aa41038189e171834b91c8919553bf94eedcf18a398e118f",
    ),
    "sensit": Source(sensit, LIBSVM, (98_528, 100), 3, 78_823, None),
}


def cache_folder() -> Path:
    """Where fetched sets are kept."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/conjugp").expanduser()


def fetched(name: str) -> Path:
    """The file of a set in the cache, fetched if it is not there."""
    from conjugp._persistence.files import replaced

    path = cache_folder() / f"{name}.npz"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".fetching-", dir=path.parent) as folder:
            X, y = SOURCES[name].rows(Path(folder))
        parts = arranged(X, y, SOURCES[name])
        with replaced(path) as temporary:
            np.savez_compressed(temporary, **parts)
    return path


def arranged(X: NDArray, y: NDArray, source: Source) -> dict[str, NDArray]:
    """The rows of a set in the layout of the benchmarks, if they are its rows."""
    X, y = checked(X, y, source)
    n = source.n_train
    if n is None:
        return {"X": X, "y": y}
    return {"X_train": X[:n], "y_train": y[:n], "X_test": X[n:], "y_test": y[n:]}


def checked(X: NDArray, y: NDArray, source: Source) -> Rows:
    """Rows as they are stored, labels counted from 0; raises if they are not those of the set."""
    classes, labels = np.unique(y, return_inverse=True)
    found = (*X.shape, len(classes))
    wanted = (*source.shape, source.n_classes)
    if found != wanted:
        raise WrongDataError(
            f"{source.origin} gave rows, features and classes {found}; expected {wanted}"
        )
    labels = labels.astype(np.uint8)
    if source.sha256 is None:
        return X.astype(np.float32), labels
    whole = X.astype("<i2")
    found_sum = digest(whole, labels) if np.array_equal(whole, X) else "numbers that are not whole"
    if found_sum != source.sha256:
        raise WrongDataError(
            f"{source.origin} gave other rows, or rows in another order, than expected: SHA-256 "
            f"{found_sum}, not {source.sha256}. Nothing was kept; the file can be put into the "
            "folder that CONJUGP_DATA names instead (bench/README.md says what is in it)"
        )
    return whole, labels


def digest(X: NDArray, y: NDArray) -> str:
    """SHA-256 of inputs as 16-bit integers, row by row, and then the labels as bytes."""
    found = hashlib.sha256(np.ascontiguousarray(X, dtype="<i2").tobytes())
    found.update(np.asarray(y, dtype=np.uint8).tobytes())
    return found.hexdigest()
