"""What a run of the sampler will take, before it starts."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from conjugp._numerics.threads import one_thread
from conjugp._sampler.chain import Target, first_state, run
from conjugp._sampler.parallel import Schedule
from conjugp._sampler.sweep import Observations

LONG_SECONDS = 180.0
SPARSE_INDUCING = 300  # inducing points of the sparse model that is offered instead
_PROBE_INPUTS = 400
_PROBE_INDUCING = 200
_PROBE_SWEEPS = 3
_MATRICES = 5  # of M × M numbers, that a chain holds at a time


def gigabytes(target: Target, schedule: Schedule, workers: int) -> float:
    """Memory of all draws, and of the kernel matrices of the chains that run side by side."""
    U, M = len(target.X), len(target.points)
    draws = schedule.n_chains * schedule.n_samples * target.data.n_classes * M
    wide = 0 if target.Z is None else 3 * M * U
    return 8e-9 * (draws + workers * len(target.kernels) * (_MATRICES * M * M + wide))


def seconds(target: Target, schedule: Schedule, workers: int) -> float:
    """Time of the run, from a few sweeps on some of the inputs."""
    rounds = math.ceil(schedule.n_chains / workers)
    return rounds * schedule.n_sweeps * _seconds_per_sweep(target, schedule.seed)


def _seconds_per_sweep(target: Target, seed: int) -> float:
    """Of one chain: measured at two sizes where the whole is larger than they are.

    An input costs something, and something that grows with the square of the inputs U, or of the
    M inducing points where there are such.
    """
    U = len(target.X)
    part = _part(target, min(U, _PROBE_INPUTS))
    whole = len(target.points)
    size = len(part.X) if target.Z is None else min(whole, _PROBE_INDUCING)

    def rate(n: int) -> float:
        """Seconds for an input."""
        some = _part(target, n) if target.Z is None else replace(part, Z=target.Z[:n])
        return _measured(some, seed) / len(some.X)

    high = rate(size)
    if size == whole:
        return U * high
    square = max(0.0, (high - rate(size // 2)) / (size**2 - (size // 2) ** 2))
    return U * (max(0.0, high - square * size**2) + square * whole**2)


def _measured(target: Target, seed: int) -> float:
    with one_thread():
        state = first_state(target, np.random.SeedSequence(seed))
        state, _ = run(target, state, 1, 0, 1)
        began = time.perf_counter()
        run(target, state, _PROBE_SWEEPS, 0, 1)
        return (time.perf_counter() - began) / _PROBE_SWEEPS


def long_run(target: Target, schedule: Schedule, workers: int, expected: float) -> str:
    """What to say before a run that takes long: how long, why, and what would be quicker."""
    C, U = target.data.n_classes, len(target.X)
    text = f"this will take about {duration(expected)}: "
    if target.Z is not None:
        M = len(target.Z)
        return text + (
            f"a sweep costs n_classes · n_rows · n_inducing² operations, here {C} · {U} · {M}². "
            "Fewer inducing points or a smaller n_samples are quicker"
        )
    text += f"a sweep costs n_classes · n_rows³ / 3 operations, here {C} · {U}³ / 3"
    if U < 2 * SPARSE_INDUCING:
        return text + ". A smaller n_samples is quicker"
    sparse = replace(target, Z=target.X[:SPARSE_INDUCING])
    return text + (
        f". n_inducing={SPARSE_INDUCING} samples a sparse model instead, in about "
        f"{duration(seconds(sparse, schedule, workers))}"
    )


def _part(target: Target, n_inputs: int) -> Target:
    """The same posterior with some of the inputs alone."""
    U, data = len(target.X), target.data
    if n_inputs == U:
        return replace(target)
    chosen = np.linspace(0, U - 1, n_inputs).astype(int)
    place = np.full(U, -1)
    place[chosen] = np.arange(n_inputs)
    index = place[np.arange(U) if data.index is None else data.index]
    rows = index >= 0
    return replace(
        target, X=target.X[chosen], data=Observations(data.y[rows], data.n_classes, index[rows])
    )


def duration(seconds: float) -> str:
    if seconds < 90:
        n = max(1, math.ceil(seconds))
        return f"{n} second{'s' * (n > 1)}"
    if seconds < 5400:
        return f"{round(seconds / 60)} minutes"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86400:.1f} days"
