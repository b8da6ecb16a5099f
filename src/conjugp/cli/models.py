"""Models with their columns: what `conjugp fit` writes and the other commands read."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import conjugp
from conjugp._inputs.encoder import Encoder
from conjugp._inputs.frames import Frame
from conjugp._inputs.kinds import OTHER, Number
from conjugp._inputs.table import TableError, all_of, shown
from conjugp._persistence import files
from conjugp._persistence import model_file as saving
from conjugp._persistence.files import FileFormatError
from conjugp._rows.group import ALONE, Group
from conjugp.cli import _format_1 as format_1
from conjugp.cli._cells import Table, other_decimal, say_decimal
from conjugp.cli._roles import Roles
from conjugp.cli._scores import count_common, row_digests
from conjugp.cli._settings import TableRows
from conjugp.cli._tables import FORMATS, read_table

FORMAT = 2
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
    """A fitted classifier, the roles of columns that it knows by name, and where it came from.

    One that was fitted in Python has neither roles nor an origin.
    """

    clf: Any
    roles: Roles | None = None
    origin: dict[str, Any] = field(default_factory=dict)  # of the rows, with the keys of ORIGIN

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        part = None if self.roles is None else {"format": FORMAT, **asdict(self.roles)}
        saving.save(self.clf, path, extra=part and {KEY: {**part, "origin": self.origin}})

    @property
    def encoder(self) -> Encoder:
        """What the columns become; of a model of plain numbers they are numbers."""
        inputs = self.clf._inputs
        if inputs.encoder is not None:
            return inputs.encoder
        names = inputs.names or tuple(f"x{i}" for i in range(inputs.n_features))
        means = zip(names, inputs.scaling.shift.tolist(), strict=True)
        parts = tuple(Number(name, mean, gaps=False) for name, mean in means)
        return Encoder(names, inputs.names is not None, parts, {})

    @property
    def ignored(self) -> tuple[str, ...]:
        """Columns that need not be read."""
        return tuple(name for name, why in self.encoder.left_out.items() if why == "ignored")

    def known_roles(self) -> Roles:
        """The roles; an error for a model that has none."""
        if self.roles is None:
            raise FileFormatError(
                "the model was not made by `conjugp fit`: its file does not say which column is "
                "the target"
            )
        return self.roles

    def frame(self, table: Table | Frame, unseen: str = "ignore") -> Frame:
        """The columns that it looks at, as they were in the fit; one error for all that are not.

        With ``unseen="refuse"`` that is so for levels that the training table did not have.
        """
        encoder, hint = self.encoder, ""
        if isinstance(table, Frame):
            frame = table
        else:
            sign = table.decimal or (self.roles.decimal if self.roles else ".")
            frame = table.frame(encoder.kinds if encoder.named else table.names, sign)
            wanted = {name for name, kind in encoder.kinds.items() if kind == "number"}
            texts = [c.values for n, c in frame.columns.items() if c.kind == "text" and n in wanted]
            signs = {other_decimal(t, sign) for t in texts if not table.typed}
            hint = "".join(f"; {say_decimal(other)}" for other in signs if other)
        try:
            found = encoder.of_fit(frame)
        except TableError as error:
            raise TableError(f"{error}{hint}") from error
        if unseen == "refuse" and (new := self.unseen(found)):
            raise TableError(all_of(new))
        return found

    def unseen(self, frame: Frame) -> list[str]:
        """Sentences on levels that the training table did not have, by column."""
        found = []
        for name, known in self.encoder.levels.items():
            cells = frame.columns[name]
            levels, codes = cells.coded
            new = np.array([v is not None and v not in known for v in levels], dtype=bool)[codes]
            if OTHER not in known and new.any():
                row = int(new.argmax())
                more = f", and the like in {new.sum() - 1} more rows" if new.sum() > 1 else ""
                found.append(
                    f"the column {name!r} has a category that the training table did not have: "
                    f"{shown(cells.values[row])} in row {row + 1}{more}"
                )
        return found

    def rows(self, table: Table, unseen: str = "ignore") -> TableRows:
        """All rows of a table that has the target."""
        return TableRows.of(table, self.frame(table, unseen), self.known_roles())

    def count_seen(self, rows: TableRows) -> int | None:
        """How many of these rows the model has learned from; None where the file cannot tell."""
        kept = self.origin.get(ROWS)
        if kept is None:
            return None
        return count_common(row_digests(self.encoder.encode(rows.frame), rows.y), _unpacked(kept))

    def predict_proba(
        self, table: str | os.PathLike[str] | Mapping[str, ArrayLike] | Any, unseen: str = "ignore"
    ) -> NDArray[np.float64]:
        """Probabilities of the classes, ``clf.classes_``, for the rows of a table.

        Parameters
        ----------
        table : path, frame or mapping of names to columns
            A file as for ``conjugp predict``, or the columns themselves. They are found by name;
            more columns than the model needs do no harm.
        unseen : {"refuse", "ignore"}, default="ignore"
            What to do with categories that training did not have.

        Returns
        -------
        proba : ndarray of shape (n_rows, n_classes)
        """
        path = isinstance(table, str | os.PathLike)
        rows = read_table(Path(table), skip=self.ignored) if path else self.encoder.read(table)
        return self.clf.predict_proba(self.frame(rows, unseen))


def load_model(
    path: str | os.PathLike[str], device: str | None = None, table: Path | None = None
) -> Model:
    """The model in a file that ``conjugp fit`` wrote, or that was saved in Python.

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
    if KEY not in header["extra"]:
        return Model(clf)
    roles, origin = table_part(header)
    if "encoding" in header["extra"][KEY]:
        format_1.translate(clf, header["extra"][KEY]["encoding"])
    return Model(clf, roles, origin)


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


def table_part(info: dict[str, Any]) -> tuple[Roles, dict[str, Any]]:
    """The roles and the origin in the header of a model file."""
    part = info["extra"].get(KEY)
    part = dict(part) if isinstance(part, dict) else {}
    origin: Any = part.pop("origin", None)
    if "encoding" not in part and part.pop("format", None) != FORMAT:
        raise FileFormatError(
            f"the model's columns are not described in format {FORMAT}, which this version reads"
        )
    try:
        roles = Roles(**(format_1.roles(part["encoding"]) if "encoding" in part else part))
    except (AttributeError, TypeError, ValueError) as error:
        raise FileFormatError("the model's description of its columns is damaged") from error
    try:
        typed = all(type(origin.get(name)) in kinds for name, kinds in ORIGIN.items())
        if not typed or not 0 <= origin["test_size"] <= 0.9 or not 0 <= origin["seed"] < 2**31:
            raise ValueError("a value is not what it should be")
        if origin.get(ROWS) is not None:
            _unpacked(origin[ROWS])
    except (AttributeError, TypeError, ValueError) as error:
        raise FileFormatError("the model's description of its training rows is damaged") from error
    return roles, origin
