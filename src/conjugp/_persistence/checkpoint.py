"""Work that outlives its process: what a fit or a sampler has done so far, in a file.

The journal keeps the result of every stage that has ended and, of the one that is running, where
its loop stands. Work that starts with such a file goes the same way again: stages that have ended
give their results at once, the loop goes on, and the end is the same to the last bit.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from conjugp._persistence import files
from conjugp._persistence.codec import IN_CHECKPOINTS, Decoder, Encoder
from conjugp._persistence.fingerprint import differences
from conjugp._persistence.journal import Journal
from conjugp._rows.group import Group

T = TypeVar("T")

_SHARE = 20  # a checkpoint may take this part of the time, at most
_KEYS = {"kind", "format", "mark", "seed", "seconds", "done", "loop"}


class Kind(NamedTuple):
    """What a checkpoint is of."""

    name: str  # in the file
    format: int
    of: str  # whom it is a checkpoint of ...
    whose: str  # ... and whose work goes on where a disk is full
    other: str  # what one of something else belongs to, with a place for the differences


FIT = Kind("fit checkpoint", 1, "a fit", "fit", "another fit: {}")
CHAINS = Kind(
    "gibbs checkpoint",
    2,
    "the Gibbs sampler",
    "run",
    "other data, settings or another random_state",
)


class Record(NamedTuple):
    """What a stage has left, or where a loop stands, encoded."""

    name: str
    plain: Any
    arrays: dict[str, np.ndarray]


class Checkpoint(Journal):
    """The stages of a fit, in a file; without a path only another rank's are gone through."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        kind: Kind,
        mark: dict[str, Any],
        *,
        seed: int = 0,
        every: float = 10.0,
        classes: Iterable[type] = (),
    ) -> None:
        """`classes`: those that may stand in the file besides the registered ones."""
        super().__init__(seed)
        self.path, self.kind, self.mark = path, kind, mark
        self._every, self._classes = every, list(classes)
        self._began = time.monotonic()
        self._next = math.inf if path is None else self._began + every
        self._done: list[Record] = []
        self._at = 0  # stages that this run has been through
        self._loop: Record | None = None
        self._generator, self._history = torch.Generator(), []
        self._first = 0  # reports before the stage that is running
        self._saved, self._failed = True, False
        self._device: torch.device | None = None
        if path is not None:
            files.remove_leftovers(path)
            if Path(path).exists():
                self._read(path)

    def follow(self, generator: torch.Generator, history: list[Any]) -> None:
        self._generator, self._history = generator, history

    def share(self, group: Group, device: torch.device) -> None:
        """Go through rank 0's stages on every rank; rank 0 alone writes its file."""
        found = (self._done, self._loop, self.seed, self.seconds)
        self._done, self._loop, self.seed, self.seconds = group.same(found)
        self._device = device

    def stage(self, name: str, work: Callable[[], T]) -> T:
        at, before = self._at, len(self._history)
        if at < len(self._done) and self._done[at].name == name:
            result, reports, state = self._decoded(_copied(self._done[at]))
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
        self._done[at:] = [_copied(_encoded(name, left))]
        self._at, self._loop, self._saved = at + 1, None, False
        if self.due():
            self.save()
        return result

    def due(self) -> bool:
        return time.monotonic() > self._next

    def keep(self, loop: dict[str, Any]) -> None:
        self._loop = _encoded("loop", (loop, self._history[self._first :]))
        self.save()
        self._loop = None

    def left_off(self) -> dict[str, Any] | None:
        if self._loop is None or self._at < len(self._done):
            return None
        loop, reports = self._decoded(self._loop)
        self._loop = None
        self._history.extend(reports)
        return loop

    def close(self) -> None:
        if not self._saved:
            self.save()

    def save(self) -> None:
        """Write everything; a fit is not to be lost because a disk is full.

        Of failures one after the other the first brings a warning.
        """
        if self.path is None:
            return
        began = time.monotonic()
        records = {str(i): record for i, record in enumerate(self._done)}
        records |= {"loop": self._loop} if self._loop else {}
        arrays = {
            f"{i}.{name}": x for i, record in records.items() for name, x in record.arrays.items()
        }
        header = {
            "kind": self.kind.name,
            "format": self.kind.format,
            "mark": self.mark,
            "seed": self.seed,
            "seconds": self.seconds + began - self._began,
            "done": [[record.name, record.plain] for record in self._done],
            "loop": self._loop.plain if self._loop else None,
        }
        try:
            files.write(self.path, arrays, header)
        except OSError as error:
            if not self._failed:
                text = f"checkpoint: {error}; the {self.kind.whose} goes on without"
                warnings.warn(text, UserWarning, stacklevel=3)
            self._failed = True
        else:
            self._failed = False
        self._saved = not self._failed
        ended = time.monotonic()
        self._next = ended + max(self._every, _SHARE * (ended - began))

    def _read(self, path: str | os.PathLike[str]) -> None:
        arrays, header = read(path, self.kind)
        try:
            different = differences(header["mark"], self.mark)
            done = [
                Record(name, plain, _of(str(i), arrays))
                for i, (name, plain) in enumerate(header["done"])
            ]
            loop = header["loop"]
            self._loop = None if loop is None else Record("loop", loop, _of("loop", arrays))
            self.seed, self.seconds = header["seed"], float(header["seconds"])
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise files.FileFormatError(f"{path} is damaged ({error})") from error
        if different:
            raise ValueError(
                f"checkpoint: {path} belongs to {self.kind.other.format(', '.join(different))}; "
                "give another path, or remove the file to start again"
            )
        self._done = done

    def _decoded(self, record: Record) -> Any:
        classes = [*IN_CHECKPOINTS, *self._classes]
        try:
            return Decoder(record.arrays, classes, devices=self._device or True)(record.plain)
        except (ValueError, TypeError, LookupError) as error:
            raise files.FileFormatError(f"{self.path} is damaged ({error})") from error


def read(path: str | os.PathLike[str], kind: Kind) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the header of a checkpoint of that kind, with all its keys."""

    def check(header: Any) -> None:
        if not isinstance(header, dict) or header.get("kind") != kind.name:
            raise files.FileFormatError(f"{path} is not a checkpoint of {kind.of}")
        if header.get("format") != kind.format:
            raise files.FileFormatError(
                f"{path} has format {header.get('format')}, this version of conjugp reads "
                f"{kind.format}"
            )

    arrays, header = files.read(path, check)
    if set(header) != _KEYS:
        raise files.FileFormatError(f"{path} is damaged (its header is not that of a checkpoint)")
    seed = header["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise files.FileFormatError(f"{path} does not have the seed of its run")
    return arrays, header


def _encoded(name: str, value: Any) -> Record:
    encode = Encoder(devices=True)
    return Record(name, encode(value), encode.arrays)


def _copied(record: Record) -> Record:
    """With arrays of its own: later steps may change the objects themselves."""
    return record._replace(arrays={key: x.copy() for key, x in record.arrays.items()})


def _of(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{prefix}."
    return {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}
