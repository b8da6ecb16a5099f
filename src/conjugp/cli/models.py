"""Models with their columns: what `conjugp fit` writes and the other commands read."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import conjugp
from conjugp._inputs.table import Table
from conjugp._persistence import files
from conjugp._persistence import model_file as saving
from conjugp._persistence.files import FileFormatError
from conjugp._rows.group import ALONE, Group
from conjugp.cli._encoding import Encoding
from conjugp.cli._scores import count_common, row_digests
from conjugp.cli._tables import FORMATS, read_table

KEY = "table"
ROWS = "rows"  # in the origin, digests of the training rows; older files are without
MOST_DIGESTS = 200_000
ORIGIN: dict[str, tuple[type, ...]] = {
    "source": (str,),
    "fingerprint": (str,),
    "n_rows": (int,),
    "n_train": (int,),
    "n_test": (int,),
    "test_size": (int, float),
    "seed": (int,),
    "command": (str,),
    "scores": (dict, type(None)),
}


@dataclass(frozen=True)
class Model:
    """A fitted classifier, the columns it needs, and where it came from."""

    clf: Any
    encoding: Encoding
    origin: dict[str, Any]  # of the training rows, with the keys of ORIGIN

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        extra = {KEY: {"encoding": self.encoding.to_json(), "origin": self.origin}}
        saving.save(self.named(), path, extra=extra)

    def named(self) -> Any:
        """The classifier with the names of its features."""
        clf = copy(self.clf)
        clf._inputs = replace(clf._inputs, names=tuple(self.encoding.features))
        return clf

    def count_seen(self, X: NDArray[np.float64], y: NDArray[Any]) -> int | None:
        """How many of these rows the model has learned from; None where the file cannot tell."""
        kept = self.origin.get(ROWS)
        return None if kept is None else count_common(row_digests(X, y), _unpacked(kept))

    def predict_proba(
        self, table: str | os.PathLike[str] | Mapping[str, ArrayLike], unseen: str = "refuse"
    ) -> NDArray[np.float64]:
        """Probabilities of the classes, ``clf.classes_``, for the rows of a table.

        Parameters
        ----------
        table : path or mapping of names to columns
            A file as for ``conjugp predict``, or the columns themselves. They are found by name;
            more columns than the model needs do no harm.
        unseen : {"refuse", "ignore"}, default="refuse"
            What to do with categories of one-hot columns that training did not have.

        Returns
        -------
        proba : ndarray of shape (n_rows, n_classes)
        """
        path = isinstance(table, str | os.PathLike)
        rows = read_table(Path(table), skip=self.encoding.ignored) if path else Table.of(table)
        return self.clf.predict_proba(self.encoding.encode(rows, unseen))


def load_model(
    path: str | os.PathLike[str], device: str | None = None, table: Path | None = None
) -> Model:
    """The model in a file that ``conjugp fit`` wrote.

    Parameters
    ----------
    path : path
        The file.
    device : str or None, default=None
        As in ``conjugp.load``.
    table : path or None, default=None
        The table that it is to be used on, for an error that says if the two were swapped.

    Returns
    -------
    model : Model
        With the classifier as ``clf``, and ``predict_proba`` for tables.
    """
    path = Path(path)
    header = read_header(path, table)
    clf = conjugp.load(path, device=device)
    encoding, origin = table_part(header)
    if len(encoding.features) != clf.n_features_in_:
        raise FileFormatError(f"{path}: its columns do not fit its model")
    # Features are found by name and put in order before; scikit-learn would ask for names again.
    vars(clf).pop("feature_names_in_", None)
    return Model(clf, encoding, origin)


def read_header(path: Path, table: Path | None = None) -> dict[str, Any]:
    """The header of a model file; an error in plain words if it is no such file at all."""
    try:
        return saving.read_info(path)
    except FileFormatError as error:
        if files.is_ours(path):
            raise
        hint = ""
        if table is not None and path.suffix.lower() in FORMATS:
            hint = "; give the model first, then the table"
        raise FileFormatError(f"{path} is not a conjugp model file{hint}") from error


def packed_digests(X: NDArray[np.float64], y: NDArray[Any], group: Group = ALONE) -> str | None:
    """The digests of all ranks' rows as text, in order of size; None of very many rows."""
    if sum(group.gather(len(y))) > MOST_DIGESTS:
        return None
    digests = np.concatenate(group.gather(row_digests(X, y)))
    return base64.b64encode(np.sort(digests).tobytes()).decode()


def _unpacked(text: str) -> NDArray[np.uint64]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<u8")


def table_part(info: dict[str, Any]) -> tuple[Encoding, dict[str, Any]]:
    """The encoding and the origin in the header of a model file."""
    part = info["extra"].get(KEY)
    part = part if isinstance(part, dict) else {}
    encoding = Encoding.from_json(part.get("encoding"))
    origin: Any = part.get("origin")
    try:
        typed = all(type(origin.get(name)) in kinds for name, kinds in ORIGIN.items())
        if not typed or not 0 <= origin["test_size"] <= 0.9 or not 0 <= origin["seed"] < 2**31:
            raise ValueError("a value is not what it should be")
        if origin.get(ROWS) is not None:
            _unpacked(origin[ROWS])
    except (AttributeError, TypeError, ValueError) as error:
        raise FileFormatError("the model's description of its training rows is damaged") from error
    return encoding, origin
