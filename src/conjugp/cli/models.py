"""Models with their columns: what `conjugp fit` writes and the other commands read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conjugp
from conjugp import saving
from conjugp.cli.encoding import Encoding
from conjugp.files import FileFormatError

KEY = "table"
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
        saving.save(self.clf, path, extra=extra)


def load_model(path: Path, device: str | None = None) -> Model:
    """The model in a file."""
    clf = conjugp.load(path, device=device)
    encoding, origin = table_part(saving.read_info(path))
    if len(encoding.features) != clf.n_features_in_:
        raise FileFormatError(f"{path}: its columns do not fit its model")
    return Model(clf, encoding, origin)


def table_part(info: dict[str, Any]) -> tuple[Encoding, dict[str, Any]]:
    """The encoding and the origin in the header of a model file."""
    part = info["extra"].get(KEY)
    part = part if isinstance(part, dict) else {}
    encoding = Encoding.from_json(part.get("encoding"))
    origin = part.get("origin")
    if not isinstance(origin, dict) or not all(
        type(origin.get(name)) in kinds for name, kinds in ORIGIN.items()
    ):
        raise FileFormatError("the model's description of its training rows is damaged")
    if not 0 <= origin["test_size"] <= 0.9 or not 0 <= origin["seed"] < 2**31:
        raise FileFormatError("the model's description of its training rows is damaged")
    return encoding, origin
