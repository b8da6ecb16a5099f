"""Which fit a file belongs to: digests of named values, and in words what two do not share."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from conjugp._persistence.codec import Encoder

_DATA = ("the number of features", "the number of distinct rows", "the classes", "X", "y")
_DATA += ("sample_weight or class_weight",)


def fingerprint(values: dict[str, Any]) -> dict[str, Any]:
    """Of every named value a digest and, where it is short, the value itself."""
    return {name: [_digest(value), _short(value)] for name, value in values.items()}


def data_fingerprint(
    size: tuple[int, int], digests: dict[str, str], classes: np.ndarray
) -> dict[str, Any]:
    """Of what a fit is made to: features and rows, their digests, and the classes."""
    values = (*size, classes, *([digest] for digest in digests.values()))
    return fingerprint(dict(zip(_DATA, values, strict=True)))


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words, what two fingerprints do not share."""
    found, of_data = [], False
    for name in dict.fromkeys([*was, *now]):
        (old, shown_old), (new, shown_new) = (x.get(name, [None, None]) for x in (was, now))
        # Other rows have other labels: of what belongs to the data only the first is said.
        if old == new or (name in _DATA and of_data):
            continue
        of_data = of_data or name in _DATA
        known = shown_old is not None and shown_new is not None
        found.append(f"{name} was {shown_old} and is {shown_new}" if known else f"{name} differs")
    return found


def _digest(value: Any) -> str:
    encode = Encoder()
    digest = hashlib.sha256(json.dumps(encode(value)).encode())
    for name, x in encode.arrays.items():
        digest.update(f"{name} {x.dtype} {x.shape}".encode())
        digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()


def _short(value: Any) -> str | None:
    return repr(value) if isinstance(value, str | int | float | None) else None
