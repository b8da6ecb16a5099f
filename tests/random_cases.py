"""Random small tables such as people have them, whose labels come from a known process.

`case(seed)` draws one: its rows, columns, labels and weights are ugly in a few ways at a time,
which its description names. Rows of test and training come from the same process.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

N_TEST = 1000
MOST_COLUMNS = 300

# Rows of a training set, and how often. Fits change at 200, 300, 350, 1,000 and 5,000 rows.
SIZES: tuple[tuple[float, tuple[int, ...]], ...] = (
    (0.15, (10, 8, 12, 20, 30)),
    (0.25, (50, 80, 99, 101, 150, 199, 201, 250)),
    (0.20, (299, 300, 301, 349, 350, 351)),
    (0.24, (400, 500, 700, 999, 1000)),
    (0.13, (1001, 1200, 1500, 2000)),
    (0.03, (4999, 5001)),
)

Rng = np.random.Generator
Array = NDArray[np.float64]


class Case(NamedTuple):
    """A training set, rows of the same process to test on, and what is odd about them."""

    X_train: Array
    y_train: NDArray[Any]
    X_test: Array
    y_test: NDArray[Any]
    weight: Array | None
    description: str


def n_rows(seed: int) -> int:
    """How many training rows case `seed` has."""
    return _size(np.random.default_rng(seed))


def case(seed: int) -> Case:
    """Case number `seed`, always the same one."""
    rng = np.random.default_rng(seed)
    n = _size(rng)
    said: list[str] = []
    latents = _latents(rng, n, said)
    columns = _columns(rng, n, latents.n, said)
    labels = _labels(rng, n, latents, said)
    for tries in count(1):
        if tries % 20 == 0:  # labels that are nearly always the same
            labels = _labels(rng, n, latents, said)
        # Weights first: a class all of whose rows weigh nothing is none.
        G = latents.draw(n)
        y, weight = labels(G), _weights(rng, n)
        seen = np.unique(y if weight is None else y[weight > 0])
        if len(seen) > 1:
            break
    X = columns(G)
    parts: list[tuple[Array, NDArray[Any]]] = []
    while sum(len(part[1]) for part in parts) < N_TEST:
        more = latents.draw(N_TEST)
        y_more = labels(more)
        kept = np.isin(y_more, seen)
        parts.append((columns(more)[kept], y_more[kept]))
    X_test, y_test = (np.concatenate(p)[:N_TEST] for p in zip(*parts, strict=True))
    if weight is not None:
        said.append(f"weights {weight.min():.0e} to {weight.max():.0e}")
    if rng.random() < 0.2:
        with np.errstate(over="ignore", under="ignore"):
            X, X_test = X.astype(np.float32), X_test.astype(np.float32)
        said.append("float32")
    shape = f"{n} x {X.shape[1]}, {len(seen)} classes"
    return Case(X, y, X_test, y_test, weight, "; ".join([shape, *said]))


def base_nll(case: Case) -> float:
    """The NLL of the test rows by the classes' frequencies, each with one more row.

    Where rows weigh little, one more row of each is more than all of them. Frequencies with one
    that weighs as they do may then be better or worse; the worse are meant.
    """
    weight = np.ones(len(case.y_train)) if case.weight is None else case.weight
    classes, y = np.unique(case.y_train[weight > 0], return_inverse=True)
    mass = np.bincount(y, weights=weight[weight > 0])
    found = []
    for more in (1.0, min(1.0, weight[weight > 0].mean())):
        p = (mass + more) / (mass + more).sum()
        found.append(float(-np.log(p[np.searchsorted(classes, case.y_test)]).mean()))
    return max(found)


def nll(case: Case, p: Array, classes: NDArray[Any]) -> float:
    """The NLL of the test rows by probabilities p (n, C)."""
    of_label = p[np.arange(len(p)), np.searchsorted(classes, case.y_test)]
    return float(-np.log(np.maximum(of_label, 1e-300)).mean())


def allowed(base: float) -> float:
    """The largest NLL of a fit that is no worse than the frequencies."""
    return 1.05 * base + 0.02


def faults(p: Array) -> list[str]:
    """What is wrong with probabilities, whatever the labels."""
    if not np.isfinite(p).all():
        return ["NaN or infinite probabilities"]
    found = []
    if p.min() < 0:
        found.append(f"a probability of {p.min():.1e}")
    if np.abs(p.sum(axis=1) - 1).max() > 1e-6:
        found.append("rows that do not sum to one")
    return found


# --- rows -------------------------------------------------------------------------------------


class _Latents(NamedTuple):
    """Standard normal numbers that columns and labels are made of."""

    n: int
    draw: Callable[[int], Array]
    repeated: bool


def _size(rng: Rng) -> int:
    share, sizes = zip(*SIZES, strict=True)
    return int(rng.choice(sizes[rng.choice(len(sizes), p=share)]))


def _latents(rng: Rng, n: int, said: list[str]) -> _Latents:
    """Rows all different, or many times the same few."""
    d = int(rng.choice([1, 2, 4, 8]))
    if rng.random() < 0.85:
        return _Latents(d, lambda k: rng.standard_normal((k, d)), False)
    few = rng.standard_normal((int(rng.choice([1, 3, 10, max(2, n // 2)])), d))
    said.append(f"{len(few)} distinct rows")
    return _Latents(d, lambda k: few[rng.integers(len(few), size=k)], True)


# --- columns ----------------------------------------------------------------------------------

# What becomes of a standard normal number.
Column = Callable[[Array], Array]


def _plain(rng: Rng) -> Column:
    return lambda g: g


def _scaled(rng: Rng) -> Column:
    scale = 10.0 ** rng.uniform(-12, 12)
    return lambda g: scale * g


def _long_tail(rng: Rng) -> Column:
    power, scale = rng.choice([1.0, 2.0, 4.0]), 10.0 ** rng.uniform(-12, 12)
    return lambda g: scale * np.exp(power * g)


def _two_long_tails(rng: Rng) -> Column:
    scale = 10.0 ** rng.uniform(-8, 8)
    return lambda g: scale * np.sinh(3 * g)


def _mostly_zero(rng: Rng) -> Column:
    edge, size = rng.uniform(1.2, 2.6), rng.choice([0.0, 8.0, -20.0, 20.0])
    return lambda g: np.where(g > edge, np.exp(size + 3 * (g - edge)), 0.0)


def _far_away(rng: Rng) -> Column:
    place = rng.choice([1e9, -1e6, 1e12])
    return lambda g: place + g


def _whole(rng: Rng) -> Column:
    size = rng.choice([0.7, 3.0, 1000.0])
    return lambda g: np.round(size * g)


def _capped(rng: Rng) -> Column:
    top = float(rng.choice([999.0, 99_999.0]))
    return lambda g: np.where(g > 2.0, top, np.round(np.exp(g)))


COLUMNS: dict[str, Callable[[Rng], Column]] = {
    "plain": _plain,
    "scaled": _scaled,
    "long tail": _long_tail,
    "two long tails": _two_long_tails,
    "mostly zero": _mostly_zero,
    "far away": _far_away,
    "whole": _whole,
    "capped": _capped,
}


def _columns(rng: Rng, n: int, d: int, said: list[str]) -> Callable[[Array], Array]:
    """How latents (k, d) become columns (k, D)."""
    names = list(COLUMNS)
    if rng.random() < 0.4:  # one odd column among plain ones
        kinds = ["plain"] * (d + int(rng.integers(4)))
        kinds[rng.integers(len(kinds))] = str(rng.choice(names))
    else:
        kinds = [str(k) for k in rng.choice(names, size=d + int(rng.integers(4)))]
    if rng.random() < 0.1:  # more columns than rows
        kinds += [str(rng.choice(names[:3]))] * min(MOST_COLUMNS, 2 * n)
    made = [COLUMNS[kind](rng) for kind in kinds]
    # The first columns are of one latent each; the others have noise, as much as signal.
    mix = rng.standard_normal((d, len(made))) / np.sqrt(2 * d)
    mix[:, :d] = np.eye(d)
    noise = np.where(np.arange(len(made)) < d, 0.0, np.sqrt(0.5))
    constant = [float(rng.choice([0.0, 1.0, -1e9, 1e-12]))] * int(rng.random() < 0.2)
    copies = rng.integers(len(made), size=int(rng.choice([0, 1, 5], p=[0.8, 0.15, 0.05])))
    levels = int(rng.choice([0, 3, 30, 100], p=[0.75, 0.1, 0.1, 0.05]))
    edges = np.quantile(rng.standard_normal(4000), np.linspace(0, 1, levels + 1)[1:-1])
    which = rng.integers(d)
    odd = sorted(set(kinds))
    said.append(", ".join(odd))
    said += ["constant column"] * len(constant)
    said += ["equal columns"] * (len(copies) > 0) + [f"{levels} levels"] * (levels > 0)

    def columns(G: Array) -> Array:
        mixed = G @ mix + noise * rng.standard_normal((len(G), len(made)))
        parts = [np.column_stack([make(g) for make, g in zip(made, mixed.T, strict=True)])]
        parts.append(parts[0][:, copies])
        parts += [np.full((len(G), 1), value) for value in constant]
        if levels:
            parts.append(np.eye(levels)[np.searchsorted(edges, G[:, which])])
        return np.concatenate(parts, axis=1)

    return columns


# --- labels -----------------------------------------------------------------------------------


def _labels(
    rng: Rng, n: int, latents: _Latents, said: list[str]
) -> Callable[[Array], NDArray[Any]]:
    """How latents (k, d) get labels (k,). Those of equal rows contradict each other."""
    d = latents.n
    C = int(rng.choice([2, 3, 5, 10, 30], p=[0.4, 0.25, 0.15, 0.12, 0.08]))
    C = max(2, min(C, n // 3))
    kind = str(rng.choice(["linear", "curved", "noise", "rare"], p=[0.35, 0.3, 0.2, 0.15]))
    noise = max(float(rng.choice([0.0, 0.3, 1.0])), float(latents.repeated))
    names = np.array([f"c{i:02d}" for i in range(C)]) if rng.random() < 0.2 else np.arange(C)
    directions, offsets = rng.standard_normal((d, C)), rng.standard_normal(C)
    waves, phases = rng.standard_normal((d, 20)), rng.uniform(0, 2 * np.pi, 20)
    heights = rng.standard_normal((20, C)) / np.sqrt(10)
    # A share of the labels is of a class of its own, with a row or two.
    lonely = int(rng.choice([0, 1, 2], p=[0.8, 0.1, 0.1]))
    few = max(float(rng.choice([0.001, 0.01])), 2 / n)
    said.append(f"{kind} labels" + f", noise {noise}" * (kind in ("linear", "curved")))
    if kind == "rare":
        said[-1] = f"{1 - few:.1%} in one class"
    if lonely:
        said.append(f"about {lonely} rows in a class")

    def labels(G: Array) -> NDArray[Any]:
        k = len(G)
        if kind == "noise":
            y = rng.choice(C, size=k, p=np.exp(offsets) / np.exp(offsets).sum())
        elif kind == "rare":
            # Where the first latent is largest, more often than not.
            share = few * np.where(G[:, 0] > 1.15, 4.5, 0.5)
            y = np.where(rng.random(k) < share, 1 + rng.integers(C - 1, size=k), 0)
        else:
            f = G @ directions / np.sqrt(d) + 0.5 * offsets
            if kind == "curved":
                f = np.cos(G @ waves + phases) @ heights
            f *= 2
            y = (f + noise * rng.gumbel(size=f.shape)).argmax(axis=1)
        if lonely:
            y = np.where(rng.random(k) < lonely / n, C - 1, np.where(y == C - 1, 0, y))
        return names[y]

    return labels


def _weights(rng: Rng, n: int) -> Array | None:
    """Weights of training rows; most have none."""
    kind = rng.choice(
        ["none", "zeros", "spread", "counts", "small"], p=[0.75, 0.1, 0.05, 0.05, 0.05]
    )
    if kind == "none":
        return None
    if kind == "zeros":
        return (rng.random(n) < 0.6) * rng.uniform(0.5, 2.0, n)
    if kind == "counts":
        return rng.poisson(1.5, n).astype(float)
    return 10.0 ** (rng.uniform(-6, 6, n) if kind == "spread" else np.full(n, rng.uniform(-6, 6)))
