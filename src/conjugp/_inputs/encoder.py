"""What the columns of a table become for a Gaussian process.

Chosen once, from the rows of a fit, then applied cell by cell. Distances between rows are what
counts: two different levels of a category are equally far apart whichever they are, and all
features of a column share one lengthscale. Columns of many levels have, beside their frequent
ones, the shares of the classes among the rows of each level; a row of the fit sees those of other
rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.frames import Cells, Frame, frame_of
from conjugp._inputs.kinds import (
    FOLDS,
    OTHER,
    PARTS,
    Array,
    Date,
    Levels,
    Number,
    Ordered,
    Part,
    Shares,
    codes_of,
    different,
)
from conjugp._rows.canonical import row_hash

# Rows that a level needs, and a share of all rows: in columns of few levels, and of many.
RARE, FREQUENT = (3, 1 / 200), (5, 1 / 50)
FEW_LEVELS = 12  # of a category that is nothing but levels
IDENTIFIER = 0.9  # of the cells are different: a name or a number of the row
LEAST_ROWS = 20  # to tell an identifier by


@dataclass(frozen=True)
class Encoder:
    """The columns that a model looks at, in their order, and what is left out, and why."""

    names: tuple[str, ...]  # of all columns of the table
    named: bool
    parts: tuple[Part, ...]
    left_out: dict[str, str]

    @classmethod
    def fit(
        cls,
        frame: Frame,
        y: NDArray[np.intp],
        weight: Array,
        labels: Sequence[str],
        ignore: Sequence[str] = (),
    ) -> tuple[Encoder, Array]:
        """What the columns become, and the features of these rows (n, D)."""
        left_out = dict.fromkeys(ignore, "ignored")
        used: list[tuple[Part, Array]] = []
        fold: NDArray[np.intp] | None = None
        for name, cells in frame.columns.items():
            if name in left_out:
                continue
            if cells.gaps.all():
                left_out[name] = "no values"
                continue
            if cells.kind == "number":
                used.append(_with(Number.fit(name, cells), cells))
            elif cells.kind == "date":
                used.append(_with(Date.fit(name, cells), cells))
            elif cells.order:
                used.append(_with(Ordered.fit(name, cells), cells))
            else:
                found = set(cells.coded[0]) - {None}
                n = int((~cells.gaps).sum())
                if n >= LEAST_ROWS and len(found) > IDENTIFIER * n:
                    left_out[name] = "an identifier"
                    continue
                if len(found) <= FEW_LEVELS:
                    used.append(_with(Levels.fit(name, cells, RARE), cells))
                    continue
                used.append(_with(Levels.fit(name, cells, FREQUENT), cells))
                fold = _folds(frame, ignore) if fold is None else fold
                used.append(Shares.fit(name, cells, y, weight, labels, fold))
        if not used:
            raise ValueError("X has no column to learn from: " + said(left_out))
        parts, features = zip(*used, strict=True)
        made = cls(tuple(frame.columns), frame.named, parts, left_out)
        return made, np.concatenate(features, axis=1)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of all features."""
        return tuple(name for part in self.parts for name in part.features)

    @property
    def owners(self) -> tuple[str, ...]:
        """The columns that the features are of (D,)."""
        return tuple(part.name for part in self.parts for _ in part.features)

    @property
    def columns(self) -> dict[str, str]:
        """What became of each column of the table, in words."""
        found: dict[str, str] = {}
        for part in self.parts:
            found[part.name] = ", ".join(filter(None, (found.get(part.name), part.words)))
        left_out = {name: f"left out: {why}" for name, why in self.left_out.items()}
        return {name: {**found, **left_out}[name] for name in self.names}

    @property
    def own_units(self) -> NDArray[np.bool_]:
        """Which of them are not scaled (D,)."""
        return np.array([unit for part in self.parts for unit in part.units])

    @property
    def groups(self) -> tuple[int, ...]:
        """Numbers of the groups that share a lengthscale (D,)."""
        found, first = [], 0
        for part in self.parts:
            found += [first + group for group in part.groups]
            first += max(part.groups) + 1
        return tuple(found)

    def check(self) -> None:
        """Raise ValueError unless it is one that a fit could have made; files hold any."""
        good = (
            different(self.names)
            and isinstance(self.named, bool)
            and isinstance(self.left_out, dict)
        )
        good &= isinstance(self.parts, tuple) and len(self.parts) > 0
        good &= all(isinstance(part, PARTS) and part.name in self.names for part in self.parts)
        if not good or not all(part.valid() for part in self.parts):
            raise ValueError("the columns of the table are not described as they should be")

    def rows(self, X: Any) -> Array:
        """The features (n, D) of a table of any kind."""
        return self.encode(self.read(X))

    def read(self, X: Any) -> Frame:
        """The columns of a table of any kind; those that are not used hold anything."""
        return frame_of(X, unread=self._unread)

    def _unread(self, names: list[str], named: bool) -> list[str]:
        used = {part.name for part in self.parts}
        own = names if self.named and named else self.names
        return [name for name, at in zip(names, own, strict=False) if at not in used]

    @property
    def kinds(self) -> dict[str, str]:
        """The columns that it looks at: "number", "date" or "text"."""
        words: dict[type[Part], str] = {Number: "number", Date: "date"}
        return {part.name: words.get(type(part), "text") for part in self.parts}

    @property
    def levels(self) -> dict[str, set[str]]:
        """The levels that the columns of text had, `MISSING` and `OTHER` too."""
        found: dict[str, set[str]] = {}
        for part in self.parts:
            if isinstance(part, Ordered | Levels | Shares):
                found.setdefault(part.name, set()).update(map(str, part.levels))
        return found

    def encode(self, frame: Frame) -> Array:
        """The features (n, D) of rows."""
        columns = self.of_fit(frame).columns
        return np.concatenate([part.encode(columns[part.name]) for part in self.parts], axis=1)

    def of_fit(self, frame: Frame) -> Frame:
        """The columns that it looks at, as they were in the fit: of the same kinds and orders.

        They are found by their names where they have any.
        """
        if self.named and frame.named:
            frame = frame.only(self.kinds)
        elif len(frame.columns) != len(self.names):
            raise ValueError(
                f"X has {len(frame.columns)} features, but the model was fitted with "
                f"{len(self.names)}"
            )
        else:
            columns = dict(zip(self.names, frame.columns.values(), strict=True))
            frame = replace(frame, columns=columns)
        orders = {part.name: part.levels for part in self.parts if isinstance(part, Ordered)}
        used = frame.of_kinds(self.kinds, self.levels).columns
        columns = {
            n: c if c.order == (order := orders.get(n, ())) else replace(c, order=order)
            for n, c in used.items()
        }
        return replace(frame, columns={**frame.columns, **columns})

    def decode(self, features: Array) -> dict[str, NDArray[Any]]:
        """Columns whose rows have these features (n, D), nearly."""
        found: dict[str, NDArray[Any]] = {}
        first = 0
        for part in self.parts:
            last = first + len(part.features)
            values = part.decode(features[:, first:last])
            before = found.get(part.name)
            # Of many levels some have features of their own; the others are told by the shares.
            found[part.name] = (
                values if before is None else np.where(before == OTHER, values, before)
            )
            first = last
        return found


def said(left_out: dict[str, str]) -> str:
    """Which columns are left out, and why, as the end of a sentence."""
    return ", ".join(f"{name!r} ({why})" for name, why in left_out.items())


def _with(part: Part, cells: Cells) -> tuple[Part, Array]:
    return part, part.encode(cells)


def _folds(frame: Frame, ignore: Sequence[str]) -> NDArray[np.intp]:
    """A fold for every row, by its content: equal rows are in one, and order does not matter."""
    columns = [
        codes_of(c)[1].astype(float) if c.kind == "text" else np.nan_to_num(c.values, nan=-1.5)
        for name, c in frame.columns.items()
        if name not in ignore
    ]
    return (row_hash(np.column_stack(columns)) >> np.uint64(33)).astype(np.intp) % FOLDS
