"""A fit that outlives its process: what it has done so far, in a file.

A fit is the same sequence of stages whenever it is run on the same data with the same seed. The
journal keeps the result of every stage that has ended and, of the one that is running, where its
loop stands. A fit that starts with such a file goes the same way again: stages that have ended
give their results at once, the loop goes on, and the end is the same to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from conjugp._inference import journal
from conjugp._persistence import files
from conjugp._persistence.codec import Decoder, Encoder
from conjugp._rows.group import Group

T = TypeVar("T")

_FORMAT = 1
_KIND = "fit checkpoint"
_SHARE = 20  # a checkpoint may take this part of the time, at most
_DATA = ("the number of features", "the number of distinct rows", "the classes", "X", "y")
_DATA += ("sample_weight or class_weight",)
_KEYS = {"kind", "format", "mark", "seed", "seconds", "done", "loop"}


class Record(NamedTuple):
    """What a stage has left, encoded: later steps may change the objects themselves."""

    name: str
    plain: Any
    arrays: dict[str, np.ndarray]


class Journal(journal.Journal):
    """The stages of a fit; without a path it keeps nothing and costs nothing."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        mark: dict[str, Any] | None = None,
        seed: int = 0,
        every: float = 10.0,
        classes: Iterable[type] = (),
    ) -> None:
        self.path, self.mark, self.seed = path, mark, seed
        self._file = None if path is None else files.Kept(path, "fit")
        self.seconds = 0.0  # that earlier runs have taken
        self._every, self._classes = every, list(classes)
        self._began = time.monotonic()
        self._next = math.inf if path is None else self._began + every
        self._done: list[Record] = []
        self._at = 0  # stages that this run has been through
        self._loop: Record | None = None
        self._generator, self._history = torch.Generator(), []
        self._first = 0  # reports before the stage that is running
        self._saved = True
        self._on = path is not None  # stages are kept, or at least gone through again
        self._device: torch.device | None = None
        if path is not None:
            files.remove_leftovers(path)
            if Path(path).exists():
                self._read()

    def follow(self, generator: torch.Generator, history: list[Any]) -> None:
        """The random numbers and reports of the fit, which belong to its state."""
        self._generator, self._history = generator, history

    def share(self, group: Group, device: torch.device) -> None:
        """Go through rank 0's stages on every rank; rank 0 alone writes its file."""
        found = (self._done, self._loop, self.seed, self.seconds)
        self._done, self._loop, self.seed, self.seconds = group.same(found)
        self._on, self._device = True, device

    def stage(self, name: str, work: Callable[[], T]) -> T:
        """The result of work(), or what it was the last time.

        Stages may contain others of other names; when one has ended, those in it are forgotten.
        """
        if not self._on:
            return work()
        at, before = self._at, len(self._history)
        if at < len(self._done) and self._done[at].name == name:
            result, reports, state = self._decoded(self._done[at])
            self._at += 1
            self._history.extend(reports)
            self._generator.set_state(state)
            return result
        outer, self._first = self._first, before
        try:
            result = work()
        finally:
            self._first = outer
        left = (result, self._history[before:], self._generator.get_state())
        self._done[at:] = [self._encoded(name, left)]
        self._at, self._loop, self._saved = at + 1, None, False
        if self.due():
            self.save()
        return result

    def due(self) -> bool:
        """Whether it is time to keep where a loop stands."""
        return time.monotonic() > self._next

    def keep(self, loop: dict[str, Any]) -> None:
        """Write where the running loop stands, between two of its steps."""
        self._loop = self._encoded("loop", (loop, self._history[self._first :]))
        self.save()
        self._loop = None

    def left_off(self) -> dict[str, Any] | None:
        """Where the loop that starts now stood when an earlier run ended; None: at its start."""
        if self._loop is None or self._at < len(self._done):
            return None
        loop, reports = self._decoded(self._loop)
        self._loop = None
        self._history.extend(reports)
        return loop

    def close(self) -> None:
        """Write what has not been written yet."""
        if not self._saved:
            self.save()

    def save(self) -> None:
        """Write everything; a fit is not to be lost because a disk is full."""
        if self._file is None:
            return
        began = time.monotonic()
        records = {str(i): record for i, record in enumerate(self._done)}
        records |= {"loop": self._loop} if self._loop else {}
        arrays = {
            f"{i}.{name}": x for i, record in records.items() for name, x in record.arrays.items()
        }
        header = {
            "kind": _KIND,
            "format": _FORMAT,
            "mark": self.mark,
            "seed": self.seed,
            "seconds": self.seconds + began - self._began,
            "done": [[record.name, record.plain] for record in self._done],
            "loop": self._loop.plain if self._loop else None,
        }
        self._saved = self._file.write(arrays, header)
        ended = time.monotonic()
        self._next = ended + max(self._every, _SHARE * (ended - began))

    def _read(self) -> None:
        path = self.path
        assert path is not None
        arrays, header = files.read(path, self._check_kind)
        try:
            if set(header) != _KEYS:
                raise ValueError("its header is not that of a checkpoint")
            different = _differences(header["mark"], self.mark or {})
            done = [
                Record(name, plain, _of(str(i), arrays))
                for i, (name, plain) in enumerate(header["done"])
            ]
            loop = header["loop"]
            self._loop = None if loop is None else Record("loop", loop, _of("loop", arrays))
            self.seed, self.seconds = int(header["seed"]), float(header["seconds"])
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise files.FileFormatError(f"{path} is damaged ({error})") from error
        if different:
            raise ValueError(
                f"checkpoint: {path} belongs to another fit: {', '.join(different)}; give another "
                "path, or remove the file to start again"
            )
        self._done = done

    def _check_kind(self, header: Any) -> None:
        if not isinstance(header, dict) or header.get("kind") != _KIND:
            raise files.FileFormatError(f"{self.path} is not a checkpoint of a fit")
        if header.get("format") != _FORMAT:
            raise files.FileFormatError(
                f"{self.path} has format {header.get('format')}, this version of conjugp reads "
                f"{_FORMAT}"
            )

    def _encoded(self, name: str, value: Any) -> Record:
        encode = Encoder(devices=True)
        plain = encode(value)
        return Record(name, plain, {key: x.copy() for key, x in encode.arrays.items()})

    def _decoded(self, record: Record) -> Any:
        arrays = {key: x.copy() for key, x in record.arrays.items()}
        try:
            devices = self._device or True
            return Decoder(arrays, self._classes, devices=devices)(record.plain)
        except (ValueError, TypeError, LookupError) as error:
            raise files.FileFormatError(f"{self.path} is damaged ({error})") from error


def _of(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{prefix}."
    return {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}


# --- which fit a file belongs to ------------------------------------------------------------------


def fingerprint(values: dict[str, Any]) -> dict[str, Any]:
    """Of every named value a digest and, where it is short, the value itself."""
    return {name: [_digest(value), _short(value)] for name, value in values.items()}


def data_fingerprint(
    size: tuple[int, int], digests: dict[str, str], classes: np.ndarray
) -> dict[str, Any]:
    """Of what a fit is made to: features and rows, their digests, and the classes."""
    values = (*size, classes, *([digest] for digest in digests.values()))
    return fingerprint(dict(zip(_DATA, values, strict=True)))


def _differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
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
