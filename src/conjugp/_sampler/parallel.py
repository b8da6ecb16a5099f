"""Several chains side by side, in stretches: progress, Ctrl-C and checkpoints lie between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from joblib.parallel import get_active_backend

from conjugp._numerics.threads import one_thread
from conjugp._persistence.checkpoint import CHAINS, Checkpoint, read
from conjugp._persistence.fingerprint import fingerprint
from conjugp._persistence.journal import Journal
from conjugp._sampler.chain import Draws, State, Target, first_state, run

_STRETCH_SECONDS = 1.0
_PARALLEL_SECONDS = 20.0  # runs shorter than this are not worth starting processes for
_CHECKPOINT_SECONDS = 20.0

_ARRAYS = tuple(f.name for f in fields(State) if f.name not in ("rng", "sweeps"))


@dataclass(frozen=True)
class Schedule:
    """How many chains, and how long."""

    n_chains: int
    n_samples: int
    n_warmup: int
    thin: int
    seed: int

    @property
    def n_sweeps(self) -> int:
        """Sweeps of one chain."""
        return self.n_warmup + self.n_samples * self.thin

    def kept(self, sweeps: int) -> int:
        """Draws kept of a chain after so many sweeps."""
        return max(0, sweeps - self.n_warmup) // self.thin


@dataclass(frozen=True)
class Run:
    """Where all chains stand."""

    states: list[State]
    room: list[Draws]  # as long as it may become
    n_kept: int

    @property
    def sweeps(self) -> int:
        """Sweeps that every chain has made."""
        return self.states[0].sweeps

    @property
    def draws(self) -> list[Draws]:
        return [draws[: self.n_kept] for draws in self.room]

    def after(self, done: list[tuple[State, Draws]]) -> Run:
        """The chains after one more stretch; the draws go into the room there is."""
        n = len(done[0][1].g)
        for room, (_, new) in zip(self.room, done, strict=True):
            for name, values in vars(new).items():
                getattr(room, name)[self.n_kept : self.n_kept + n] = values
        return Run([state for state, _ in done], self.room, self.n_kept + n)

    def plain(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        states = [
            {name: getattr(state, name) for name in _ARRAYS}
            | {"rng": state.rng.bit_generator.state}
            for state in self.states
        ]
        return {"sweeps": self.sweeps, "states": states, "draws": list(map(vars, self.draws))}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the draws up to the last stretch."""

    def __init__(self, draws: list[Draws]) -> None:
        super().__init__()
        self.draws = draws


def sample_chains(
    target: Target,
    schedule: Schedule,
    n_jobs: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> list[Draws]:
    """The draws of every chain. They depend on the seed alone, not on workers or stretches."""
    mark = marked(target, schedule)
    journal = Journal()
    if checkpoint is not None:
        every = _CHECKPOINT_SECONDS
        journal = Checkpoint(checkpoint, CHAINS, mark, seed=schedule.seed, every=every)
    before = journal.left_off()
    now = _start(target, schedule) if before is None else _resumed(before, target, schedule)
    total, n_sweeps, pool = schedule.n_sweeps, 1, None
    if on_progress is not None and now.sweeps:
        on_progress(now.sweeps)
    try:
        while now.sweeps < total:
            n_sweeps = min(n_sweeps, total - now.sweeps)
            began = time.monotonic()
            done: list[tuple[State, Draws]]
            how = (n_sweeps, schedule.n_warmup, schedule.thin)
            if pool is None:
                done = [_stretch(target, state, *how) for state in now.states]
            else:
                tasks = (joblib.delayed(_at_work)(str(mark), target, s, *how) for s in now.states)
                done = list(pool(tasks))  # type: ignore[arg-type]
            now = now.after(done)
            per_sweep = (time.monotonic() - began) / n_sweeps
            if on_progress is not None:
                on_progress(now.sweeps)
            if pool is None:
                pool = _pool(n_jobs, schedule.n_chains, per_sweep * (total - now.sweeps))
            n_sweeps = max(1, min(2 * n_sweeps, int(_STRETCH_SECONDS / max(per_sweep, 1e-9))))
            if now.sweeps >= total or journal.due():
                journal.keep(now.plain())
    except BaseException as error:
        journal.keep(now.plain())
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(now.draws) from None
        raise
    return [draws[: schedule.n_samples] for draws in now.draws]


def _start(target: Target, schedule: Schedule) -> Run:
    seeds = np.random.SeedSequence(schedule.seed).spawn(schedule.n_chains)
    with one_thread():
        states = [first_state(target, seed) for seed in seeds]
    return Run(states, [Draws.room(target, schedule.n_samples) for _ in seeds], 0)


# --- workers --------------------------------------------------------------------------------------


def n_workers(n_jobs: int | None, n_chains: int) -> int:
    """Processes for the chains; inside another parallel loop one, unless a number is given."""
    backend: Any = get_active_backend()[0]
    if n_jobs is None and backend.nesting_level:
        return 1
    with joblib.parallel_config(backend="loky"):
        return min(joblib.effective_n_jobs(-1 if n_jobs is None else n_jobs), n_chains)


def _pool(n_jobs: int | None, n_chains: int, seconds: float) -> joblib.Parallel | None:
    """Workers for a run with so many seconds of work left, if it needs any."""
    if n_jobs is None and seconds < _PARALLEL_SECONDS:
        return None
    workers = n_workers(n_jobs, n_chains)
    if workers == 1:
        return None
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
        return joblib.Parallel(n_jobs=workers)


_known: dict[str, Target] = {}


def _at_work(mark: str, target: Target, *rest: Any) -> tuple[State, Draws]:
    """A stretch in a worker, which keeps what can be computed once for all stretches."""
    if mark not in _known:
        _known.clear()
        _known[mark] = target
    return _stretch(_known[mark], *rest)


_stretch = one_thread()(run)


# --- checkpoints ----------------------------------------------------------------------------------


def marked(target: Target, schedule: Schedule) -> dict[str, Any]:
    """Of everything the draws depend on; how many there are to be is not part of it."""
    t, s = target, schedule
    return fingerprint(
        {
            "inputs": (t.X, t.Z, t.data.y, t.data.index, t.data.n_classes),
            "prior": (t.mean, t.theta, [repr(k) for k in t.kernels]),
            "sampler": (t.augmentation, t.mean_variance, t.kernel_scale, t.jitter),
            "schedule": (s.n_chains, s.n_warmup, s.thin, s.seed),
        }
    )


def kept_seed(path: str | os.PathLike[str], drawn: int) -> int:
    """The seed of the run that a file belongs to, or one newly drawn if there is none yet."""
    return read(path, CHAINS)[1]["seed"] if Path(path).exists() else drawn


def _resumed(found: dict[str, Any], target: Target, schedule: Schedule) -> Run:
    """Where an earlier run has left off."""
    n_kept = schedule.kept(found["sweeps"])
    states, room, done = [], [], []
    for state, drawn in zip(found["states"], found["draws"], strict=True):
        rng = np.random.default_rng()
        rng.bit_generator.state = state["rng"]
        states.append(State(**{**state, "rng": rng}, sweeps=found["sweeps"]))
        done.append((states[-1], Draws(**drawn)))
        room.append(Draws.room(target, max(n_kept, schedule.n_samples)))
    return Run(states, room, 0).after(done)
