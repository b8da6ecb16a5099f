"""The benchmark data sets: where they are found, and how they are split."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sources import SENSIT_FILES, SOURCES, arranged, fetched, read_sensit

if TYPE_CHECKING:  # GPflow's environment has no pandas
    import pandas as pd

VARIABLE = "CONJUGP_DATA"
SPLIT = ("shuttle", "mnist", "fashion_mnist", "sensit")  # they come split
KEYS = ("X_train", "y_train", "X_test", "y_test")

# How many random 80/20 splits a set has; 1 is a fixed split.
SPLITS = {
    "shuttle": 1,
    "mnist": 1,
    "fashion_mnist": 1,
    "covtype": 1,
    "sensit": 1,
    "letter": 1,
    "satimage": 5,
    "dry_bean": 5,
    "glass": 5,
}


# Embeddings with a part of their own for choosing settings; and their files.
EMBEDDINGS = {
    "clinc150": "clinc150_wordllama256",
    "letter": "letter",
    "cifar10": "cifar10_effnetlite0_pca128",
}


class Split(NamedTuple):
    """Rows to train on and rows to test on, in the units of the source."""

    X_train: NDArray
    y_train: NDArray
    X_test: NDArray
    y_test: NDArray


class MissingDataError(FileNotFoundError):
    """A data set is not where it was looked for."""


def load(name: str, seed: int = 0) -> Split:
    """Split number `seed` of a data set.

    Shuttle, MNIST, Fashion-MNIST and SensIT come split. CovType is split 90/10 at random, Letter
    after 16,000 rows. The other sets are split 80/20 at random, all their rows together.
    """
    if name not in SPLITS:
        raise ValueError(f"unknown data set {name!r}; there are {', '.join(SPLITS)}")
    if not 0 <= seed < SPLITS[name]:
        raise ValueError(f"{name} has splits 0 to {SPLITS[name] - 1}; got {seed}")
    parts = _arrays(name)
    if name in SPLIT:
        X_train, y_train, X_test, y_test = (parts[key] for key in KEYS)
        return Split(_floats(X_train), y_train, _floats(X_test), y_test)
    if "X" in parts:
        X, y = parts["X"], parts["y"]
    else:
        X = np.concatenate([parts["X_train"], parts["X_test"]])
        y = np.concatenate([parts["y_train"], parts["y_test"]])
    n = len(y)
    if name == "letter":
        order, n_train = np.arange(n), 16_000
    else:
        order = np.random.default_rng(seed).permutation(n)
        n_train = round((0.9 if name == "covtype" else 0.8) * n)
    train, test = order[:n_train], order[n_train:]
    return Split(_floats(X[train]), y[train], _floats(X[test]), y[test])


class Embedded(NamedTuple):
    """A split, rows on which rivals choose their settings, and rows of no class at all."""

    split: Split
    X_val: NDArray
    y_val: NDArray
    X_outside: NDArray | None


def load_embeddings(name: str) -> Embedded:
    """One of the sets with many classes or of network features.

    CLINC150 comes with validation rows; of the other sets a tenth of the training rows is taken.
    """
    if name == "letter":
        whole, outside = load(name), None
    else:
        with np.load(path_of(EMBEDDINGS[name])) as file:
            parts = [file[key] for key in KEYS]
            whole = Split(_floats(parts[0]), parts[1], _floats(parts[2]), parts[3])
            outside = _floats(file["X_oos_test"]) if "X_oos_test" in file else None
            if "X_val" in file:
                return Embedded(whole, _floats(file["X_val"]), file["y_val"], outside)
    order = np.random.default_rng(0).permutation(len(whole.y_train))
    val = order[: len(order) // 10]
    return Embedded(whole, whole.X_train[val], whole.y_train[val], outside)


class Start(NamedTuple):
    """Where training starts: what all have in common."""

    Z: NDArray  # (M, D) inducing points
    lengths: NDArray  # (D,) lengthscales
    variance: float


def scaled(
    split: Split, start: Start, inputs: str, kernel: str
) -> tuple[NDArray, NDArray, NDArray, NDArray, float]:
    """Training, test and inducing inputs, standardised or bytes divided by 255; the first kernel.

    That is "same", the one of `start`, or "unit": the median distance and a variance of one.
    """
    if inputs == "raw":
        shift, scale = 0.0, 255.0
    else:
        shift, scale = split.X_train.mean(axis=0), split.X_train.std(axis=0)
        scale[scale == 0] = 1.0
    X, X_test, Z = (
        ((a - shift) / scale).astype("float32") for a in (split.X_train, split.X_test, start.Z)
    )
    if kernel == "same":
        return X, X_test, Z, start.lengths / scale, start.variance
    return X, X_test, Z, np.full(X.shape[1], median_distance(X)), 1.0


def median_distance(X: NDArray) -> float:
    """The median distance between distinct rows of a sample of 1,000."""
    from scipy.spatial.distance import pdist

    sample = X[np.random.default_rng(0).permutation(len(X))[:1000]]
    distances = pdist(np.asarray(sample, dtype=np.float64))
    return float(np.median(distances[distances > 0]))


def _arrays(name: str) -> dict[str, NDArray]:
    """All arrays of a set; SensIT also from LIBSVM's own two files in the user's folder."""
    folder = Path(os.environ.get(VARIABLE) or "")
    if name == "sensit" and all((folder / file).is_file() for file in SENSIT_FILES):
        return arranged(*read_sensit(folder), SOURCES[name])
    with np.load(path_of(name)) as file:
        return dict(file)


def path_of(name: str) -> Path:
    """The file of a data set: in the user's folder, or fetched; what is missing is said."""
    try:
        return _own(f"{name}.npz")
    except MissingDataError as missing:
        if name not in SOURCES:
            raise
        try:
            return fetched(name)
        except (OSError, ValueError, ImportError) as error:
            origin = SOURCES[name].origin
            raise MissingDataError(
                f"{missing}. Fetching {name} from {origin} did not work either: {error}"
            ) from error


def load_table(name: str) -> pd.DataFrame:
    """A table of numbers and categories; the labels are its column `target`."""
    import pandas

    return pandas.read_parquet(_own(f"tables/{name}.parquet"))


def tables_at_hand() -> list[str]:
    """The names of all tables in the user's folder."""
    folder = Path(os.environ.get(VARIABLE) or "/nowhere") / "tables"
    return sorted(path.stem for path in folder.glob("*.parquet"))


def parts_of(table: pd.DataFrame) -> tuple[pd.DataFrame, NDArray, NDArray | None]:
    """Features, labels, and which rows are to be tested on, if that is given."""
    test = table.pop("is_test").to_numpy(bool) if "is_test" in table else None
    return table, table.pop("target").to_numpy(), test


class Frames(NamedTuple):
    """A split of a table as it is: text, gaps and all."""

    X_train: pd.DataFrame
    y_train: NDArray
    X_test: pd.DataFrame
    y_test: NDArray


def load_frames(name: str, seed: int = 0, most: int = 3000) -> Frames:
    """Split number `seed` of a table, with at most so many rows to train on.

    The first split is the table's own, if it has one. Else half of the rows of every class are to
    train on, and 70 % where there are more than 2,000.
    """
    from sklearn.model_selection import train_test_split

    table, y, is_test = parts_of(load_table(name))
    y = np.unique(y, return_inverse=True)[1]
    rows = np.arange(len(y))
    if is_test is not None and seed == 0:
        order = np.random.default_rng(seed).permutation(rows)
        train, test = order[~is_test[order]], order[is_test[order]]
    else:
        share, counts = 0.5 if len(y) <= 2000 else 0.7, np.bincount(y)
        same = y if counts.min() > 1 else None
        train, test = train_test_split(rows, train_size=share, stratify=same, random_state=seed)
    train = train[:most]
    test = test[np.isin(y[test], y[train])]
    return Frames(table.iloc[train], y[train], table.iloc[test], y[test])


def frames_at_hand(names: list[str], seed: int = 0) -> Iterator[tuple[str, Frames]]:
    """Split number `seed` of the tables named, or of all at hand; what is missing is said."""
    names = names or tables_at_hand()
    if not names:
        raise SystemExit(f"no tables: {VARIABLE} must name a folder with tables/*.parquet")
    for name in names:
        try:
            yield name, load_frames(name, seed)
        except MissingDataError as error:
            print(f"{name} is left out: {error}")


def one_hot(table: pd.DataFrame, train: NDArray, test: NDArray) -> list[NDArray]:
    """Numbers with medians and an indicator where they are missing, text one-hot."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OneHotEncoder

    numbers = table.select_dtypes(["number", "bool"]).columns
    table = table.astype(dict.fromkeys(numbers, float))
    text = table.columns.difference(numbers)
    table[text] = table[text].astype(object).where(table[text].notna(), "missing")
    columns = make_column_transformer(
        (SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True), numbers),
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), text),
    ).fit(table.iloc[train])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # levels that no training row has
        return [columns.transform(table.iloc[rows]) for rows in (train, test)]


def _own(file: str) -> Path:
    """A file in the user's folder."""
    folder = os.environ.get(VARIABLE)
    if folder:
        path = Path(folder) / file
        if path.is_file():
            return path
        said = f"{path} is missing: {VARIABLE} names the directory that must hold {file}"
    else:
        said = f"set the environment variable {VARIABLE} to the directory that holds {file}"
    raise MissingDataError(f"{said} (bench/README.md says what is in it)")


def _floats(X: NDArray) -> NDArray:
    # float32 holds every value of these sets exactly.
    return np.ascontiguousarray(X, dtype=np.float32)
