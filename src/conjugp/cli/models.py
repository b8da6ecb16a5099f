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


@dataclass(frozen=True)
class Model:
    """A fitted classifier, the columns it needs, and where it came from."""

    clf: Any
    encoding: Encoding
    origin: dict[str, Any]  # of the training rows: source, fingerprint, split, scores

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
    part = (info.get("extra") or {}).get(KEY)
    part = part if isinstance(part, dict) else {}
    encoding = Encoding.from_json(part.get("encoding"))
    origin = part.get("origin")
    return encoding, origin if isinstance(origin, dict) else {}
