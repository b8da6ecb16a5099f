"""What a column of a table becomes, by its kind: the features that a Gaussian process sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjugp._inputs.frames import Cells

Array = NDArray[np.float64]

MISSING, OTHER = "(missing)", "(other)"  # levels of their own
LONG_TAIL = 5.0  # standard deviations from the mean; beyond numbers are tamed
BEND = 3.0  # ... towards this many
_FAR = 1e100  # standard deviations; their square is finite
_EDGE = 1 - 1e-9  # of what numbers are tamed to
FOLDS = 5
LONG_TEXT = 200  # characters; arrays of text give every level as many as the longest has
STRENGTHS = (0.5, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # rows that a level's prior is worth
CYCLES = {"year": 365.2425, "week": 7.0, "day": 1.0}  # days
TURNS = {"year": 0.5, "week": 2.0}  # of a cycle that dates must span


@dataclass(frozen=True)
class Number:
    """A column of numbers; a gap is the median, and a feature says that it was one."""

    name: str
    fill: float
    gaps: bool
    middle: float = 0.0
    spread: float = 0.0  # above 0 where long tails are tamed

    def valid(self) -> bool:
        """Whether its values are such as `fit` gives."""
        numbers = (self.fill, self.middle, self.spread)
        finite = all(isinstance(x, float) and np.isfinite(x) for x in numbers)
        return finite and isinstance(self.gaps, bool) and self.spread >= 0

    @classmethod
    def fit(cls, name: str, cells: Cells) -> Number:
        there = cells.values[~cells.gaps]
        fill = 2 * float(np.median(there / 2))  # the mean of two is finite
        filled = np.where(cells.gaps, fill, cells.values)
        with np.errstate(over="ignore", invalid="ignore"):
            middle, spread = float(filled.mean()), float(filled.std())
            far = float(np.abs(filled - middle).max())
        if not np.isfinite([middle, spread, far]).all():
            raise ValueError(f"X: the column {name!r} holds numbers too far apart: rescale it")
        tamed = spread > 0 and far > LONG_TAIL * spread
        gaps = bool(cells.gaps.any())
        return cls(name, fill, gaps, *((middle, spread) if tamed else (0.0, 0.0)))

    @property
    def words(self) -> str:
        gaps = (
            f", {self.fill:.6g} and a feature of its own where it is missing" if self.gaps else ""
        )
        return "a number" + ", its long tails tamed" * bool(self.spread) + gaps

    @property
    def features(self) -> list[str]:
        return [self.name, f"{self.name} {MISSING}"] if self.gaps else [self.name]

    @property
    def units(self) -> list[bool]:
        """Which features are in units of their own, and are not scaled."""
        return [False, True] if self.gaps else [False]

    @property
    def groups(self) -> list[int]:
        """Which features share a lengthscale."""
        return list(range(len(self.features)))

    def encode(self, cells: Cells) -> Array:
        missing = cells.gaps
        x = np.where(missing, self.fill, cells.values)
        if self.spread:
            with np.errstate(over="ignore"):
                a = np.clip((x - self.middle) / self.spread, -_FAR, _FAR)
            x = self.middle + self.spread * a / np.sqrt(1 + (a / BEND) ** 2)
        return np.column_stack([x, missing.astype(np.float64)]) if self.gaps else x[:, None]

    def decode(self, features: Array) -> Array:
        """Numbers that have these features, nearly; NaN where it is rather a gap."""
        x = features[:, 0]
        if self.spread:
            a = np.clip((x - self.middle) / (self.spread * BEND), -_EDGE, _EDGE)
            x = self.middle + self.spread * BEND * a / np.sqrt(1 - a * a)
        return np.where(features[:, 1] > 0.5, np.nan, x) if self.gaps else x


@dataclass(frozen=True)
class Ordered:
    """Levels in an order: their ranks."""

    name: str
    levels: tuple[str, ...]
    ranks: Number

    def valid(self) -> bool:
        return different(self.levels) and isinstance(self.ranks, Number) and self.ranks.valid()

    @property
    def words(self) -> str:
        return f"the rank among {len(self.levels)} levels"

    @property
    def features(self) -> list[str]:
        return self.ranks.features

    @property
    def units(self) -> list[bool]:
        return self.ranks.units

    @property
    def groups(self) -> list[int]:
        return self.ranks.groups

    @classmethod
    def fit(cls, name: str, cells: Cells) -> Ordered:
        return cls(name, cells.order, Number.fit(name, _ranks(cells, cells.order)))

    def encode(self, cells: Cells) -> Array:
        return self.ranks.encode(_ranks(cells, self.levels))

    def decode(self, features: Array) -> NDArray[Any]:
        """The levels of the nearest ranks; None where it is rather a gap."""
        ranks = self.ranks.decode(features)
        place = np.nan_to_num(ranks, nan=len(self.levels)).round().astype(np.intp)
        place = np.where(np.isnan(ranks), place, place.clip(0, len(self.levels) - 1))
        return np.array([*self.levels, None], dtype=object)[place]


@dataclass(frozen=True)
class Levels:
    """A category: 0 or 1 for each of its levels, of which rare ones are one."""

    name: str
    levels: tuple[str, ...]  # may end in `MISSING`, and then in `OTHER`

    def valid(self) -> bool:
        return different(self.levels) and len(self.levels) > 0

    @classmethod
    def fit(cls, name: str, cells: Cells, least: tuple[int, float]) -> Levels:
        n = len(cells.values)
        found, counts = counted(cells)
        enough = counts >= max(least[0], least[1] * n)
        if not enough.any() and len(found):
            enough[counts.argmax()] = True
        missing = int(cells.gaps.sum())
        kept = [*compress(found, enough)]
        if missing >= max(least[0], least[1] * n):
            kept, missing = [*kept, MISSING], 0
        if missing or not enough.all():
            kept.append(OTHER)
        return cls(name, tuple(dict.fromkeys(kept)))  # the user's own may be called like ours

    @property
    def words(self) -> str:
        n = len(set(self.levels) - {MISSING, OTHER})
        also = [level for level in (MISSING, OTHER) if level in self.levels]
        return f"a category of {n} levels" + "".join(f", {level}" for level in also)

    @property
    def features(self) -> list[str]:
        return [f"{self.name}={level}" for level in self.levels]

    @property
    def units(self) -> list[bool]:
        return [True] * len(self.levels)

    @property
    def groups(self) -> list[int]:
        return [0] * len(self.levels)

    def encode(self, cells: Cells) -> Array:
        """Levels that the fit has not seen are the rare ones; where there are none, none at all."""
        place = {level: i for i, level in enumerate(self.levels)}
        other = place.get(OTHER, len(place))
        missing = place.get(MISSING, other)
        levels, codes = cells.coded
        found = [missing if v is None else place.get(v, other) for v in levels]
        return np.eye(len(place) + 1)[np.array(found, dtype=np.intp), : len(place)][codes]

    def decode(self, features: Array) -> NDArray[Any]:
        """The nearest levels; None for a gap."""
        levels = [None if level == MISSING else level for level in self.levels]
        return np.array(levels, dtype=object)[features.argmax(axis=1)]


@dataclass(frozen=True)
class Shares:
    """A category of many levels: the shares of the classes among the rows of each."""

    name: str
    levels: NDArray[Any]  # of two rows or more, sorted
    shares: Array  # (levels, classes); with two classes, of the second one alone
    prior: Array  # (classes,), where the level is another
    labels: tuple[str, ...]

    def valid(self) -> bool:
        C = len(self.labels) if different(self.labels) else 0
        arrays = all(isinstance(a, np.ndarray) for a in (self.levels, self.shares, self.prior))
        if not C or not arrays or self.levels.ndim != 1 or not different((*self.levels.tolist(),)):
            return False
        fit = self.shares.shape == (len(self.levels), C) and self.prior.shape == (C,)
        floats = {self.shares.dtype, self.prior.dtype} == {np.dtype(np.float64)}
        finite = floats and np.isfinite(self.shares).all() and np.isfinite(self.prior).all()
        return bool(fit and finite and (self.levels[1:] > self.levels[:-1]).all())

    @property
    def words(self) -> str:
        return f"the classes' shares in {len(self.levels)} levels"

    @property
    def features(self) -> list[str]:
        return [f"{self.name}: share of {label}" for label in self.labels]

    @property
    def units(self) -> list[bool]:
        return [False] * len(self.labels)

    @property
    def groups(self) -> list[int]:
        return [0] * len(self.labels)

    @classmethod
    def fit(
        cls,
        name: str,
        cells: Cells,
        y: NDArray[np.intp],
        weight: Array,
        labels: Sequence[str],
        fold: NDArray[np.intp],
    ) -> tuple[Shares, Array]:
        """The column, and its features of the rows of the fit, each without its own fold."""
        levels, codes = codes_of(cells)
        mass = np.zeros((len(levels), len(labels)))
        np.add.at(mass, (codes, y), weight)
        total = mass.sum(axis=0)
        strength = _strength(mass, total, codes, y, weight)
        few = slice(1, None) if len(labels) == 2 else slice(None)
        found = np.empty((len(y), len(labels)))
        for k in range(FOLDS):
            inside = fold == k
            part = np.zeros_like(mass)
            np.add.at(part, (codes[inside], y[inside]), weight[inside])
            left, codes_ = mass - part, codes[inside]
            found[inside] = _shares(left[codes_], total - part.sum(axis=0), strength)
        some = np.bincount(codes, minlength=len(levels)) > 1
        kept = [*compress(levels, some)]
        made = cls(
            name,
            np.array(kept, dtype=str if max(map(len, kept), default=0) < LONG_TEXT else object),
            _shares(mass[some], total, strength)[:, few],
            _smoothed(total)[few],
            tuple(labels)[few],
        )
        return made, found[:, few]

    def encode(self, cells: Cells) -> Array:
        place = {level: i for i, level in enumerate(self.levels.tolist())}
        levels, codes = cells.coded
        found = [place.get(MISSING if v is None else v, len(place)) for v in levels]
        return np.vstack([self.shares, self.prior])[np.array(found, dtype=np.intp)][codes]

    def decode(self, features: Array) -> NDArray[Any]:
        """The levels of the nearest shares; None for a gap."""
        levels = [None if v == MISSING else v for v in (*self.levels.tolist(), OTHER)]
        shares = np.vstack([self.shares, self.prior])
        near = [int(np.square(shares - f).sum(axis=1).argmin()) for f in features]
        return np.array(levels, dtype=object)[near]


@dataclass(frozen=True)
class Date:
    """Dates or times: a number of days, and where in the year, week and day they are."""

    name: str
    days: Number
    cycles: tuple[str, ...]

    def valid(self) -> bool:
        known = different(self.cycles) and set(self.cycles) <= set(CYCLES)
        return known and isinstance(self.days, Number) and self.days.valid()

    @classmethod
    def fit(cls, name: str, cells: Cells) -> Date:
        there = cells.values[~cells.gaps]
        span = float(np.ptp(there))
        cycles = [c for c, turns in TURNS.items() if span >= turns * CYCLES[c]]
        hours = bool((there != np.floor(there)).any())
        return cls(name, Number.fit(name, cells), (*cycles, *(["day"] * hours)))

    @property
    def words(self) -> str:
        return "a date" + "".join(f", its place in the {c}" for c in self.cycles)

    @property
    def features(self) -> list[str]:
        turns = [f"{self.name}: {part} of {c}" for c in self.cycles for part in ("sine", "cosine")]
        return [*self.days.features, *turns]

    @property
    def units(self) -> list[bool]:
        return [*self.days.units, *[True] * (2 * len(self.cycles))]

    @property
    def groups(self) -> list[int]:
        first = len(self.days.features)
        turns = [first + i // 2 for i in range(2 * len(self.cycles))]
        return [*self.days.groups, *turns]

    def encode(self, cells: Cells) -> Array:
        parts, filled = (
            [self.days.encode(cells)],
            np.where(cells.gaps, self.days.fill, cells.values),
        )
        for c in self.cycles:
            angle = 2 * np.pi * filled / CYCLES[c]
            parts += [np.sin(angle)[:, None], np.cos(angle)[:, None]]
        return np.concatenate(parts, axis=1)

    def decode(self, features: Array) -> NDArray[np.datetime64]:
        """Dates by their number of days, to the second; NaT where it is rather a gap."""
        days = self.days.decode(features)
        seconds = np.nan_to_num(days * 86_400.0).round().astype("M8[s]")
        return np.where(np.isnan(days), np.datetime64("NaT"), seconds)


Part = Number | Ordered | Levels | Shares | Date
PARTS = (Number, Ordered, Levels, Shares, Date)


def different(values: Any) -> bool:
    """Whether values are a tuple of different texts."""
    known = isinstance(values, tuple) and all(isinstance(v, str) for v in values)
    return known and len(set(values)) == len(values)


def _ranks(cells: Cells, order: tuple[str, ...]) -> Cells:
    place: dict[str | None, float] = {level: float(i) for i, level in enumerate(order)}
    levels, codes = cells.coded
    return Cells("number", np.array([place.get(v, np.nan) for v in levels], dtype=float)[codes])


def codes_of(cells: Cells) -> tuple[list[str], NDArray[np.intp]]:
    """All levels, sorted, and which each cell is; a gap is a level too."""
    levels, codes = cells.coded
    named = [MISSING if v is None else v for v in levels]
    found = sorted(set(named))
    place = {level: i for i, level in enumerate(found)}
    return found, np.array([place[v] for v in named], dtype=np.intp)[codes]


def counted(cells: Cells) -> tuple[list[str], NDArray[np.intp]]:
    """The levels that there are, sorted, and how many cells have each."""
    levels, codes = cells.coded
    count = dict(zip(levels, np.bincount(codes, minlength=len(levels)).tolist(), strict=True))
    found = sorted(v for v in levels if v is not None)
    return found, np.array([count[v] for v in found], dtype=np.intp)


def _smoothed(total: Array) -> Array:
    """Shares of the classes, each with one more row."""
    return (total + 1) / (total + 1).sum()


def _shares(mass: Array, total: Array, strength: float) -> Array:
    """Shares of the classes in every level, drawn to those among all rows: (levels, C)."""
    prior = _smoothed(total)
    return (mass + strength * prior) / (mass.sum(axis=1, keepdims=True) + strength)


def _strength(
    mass: Array, total: Array, codes: NDArray[np.intp], y: NDArray[np.intp], weight: Array
) -> float:
    """How many rows a level's prior is worth: what tells each label best by the other rows."""
    prior = _smoothed(total)[y]
    label, level = mass[codes, y] - weight, mass.sum(axis=1)[codes] - weight
    label, level = np.maximum(label, 0.0), np.maximum(level, 0.0)

    def told(strength: float) -> float:
        return float(weight @ np.log((label + strength * prior) / (level + strength)))

    return max(STRENGTHS, key=told)
