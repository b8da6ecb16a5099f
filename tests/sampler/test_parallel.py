"""Chains side by side: draws depend on the seed alone, and no interruption loses any."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from conjugp._persistence import checkpoint, files
from conjugp._persistence.files import FileFormatError
from conjugp._sampler import parallel as chains
from conjugp._sampler.chain import Draws, first_state, run
from conjugp._sampler.parallel import Interrupted, Schedule, n_workers, sample_chains
from conjugp.kernels import RBF, Matern52
from samplers import KINDS, Stop, target

SCHEDULE = Schedule(n_chains=2, n_samples=24, n_warmup=7, thin=2, seed=5)


def same(a: list[Draws], b: list[Draws]) -> bool:
    """To the last bit."""
    assert len(a) == len(b)
    return all(
        np.array_equal(getattr(x, f.name), getattr(y, f.name))
        for x, y in zip(a, b, strict=True)
        for f in fields(Draws)
    )


def part(draws: list[Draws], n: int) -> list[Draws]:
    return [d[:n] for d in draws]


def sweeps_in(path: Path) -> int:
    """How far the run in a checkpoint has come."""
    found = checkpoint.Checkpoint(path, checkpoint.CHAINS, files.read(path)[1]["mark"]).left_off()
    assert found is not None
    return found["sweeps"]


@pytest.fixture
def small_stretches(monkeypatch):
    monkeypatch.setattr(chains, "_STRETCH_SECONDS", 0.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ckpt"


# --- draws --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_the_sampler(kind):
    """Stretches of any length, joined, are one long run of every chain."""
    found = sample_chains(target(kind), SCHEDULE)
    seeds = np.random.SeedSequence(SCHEDULE.seed).spawn(2)
    expected = []
    with threadpool_limits(1):
        for seed in seeds:
            t = target(kind)
            expected.append(run(t, first_state(t, seed), SCHEDULE.n_sweeps, 7, 2)[1])
    assert len(found[0].g) == 24
    assert same(found, expected)


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_stretches_do_not_matter(kind, small_stretches):
    found = sample_chains(target(kind), SCHEDULE)
    chains._STRETCH_SECONDS = 60.0
    assert same(found, sample_chains(target(kind), SCHEDULE))


def test_the_number_of_draws_and_thinning_do_not_change_a_chain():
    every = sample_chains(target(), replace(SCHEDULE, thin=1, n_samples=48))
    assert same(sample_chains(target(), SCHEDULE), [d[1::2] for d in every])
    assert same(sample_chains(target(), replace(SCHEDULE, thin=1, n_samples=9)), part(every, 9))


def test_chains_and_seeds_differ():
    a = sample_chains(target(), SCHEDULE)
    b = sample_chains(target(), replace(SCHEDULE, seed=6))
    assert not np.isin(a[0].g, a[1].g).any()
    assert not np.isin(a[0].g, b[0].g).any()
    more = sample_chains(target(), replace(SCHEDULE, n_chains=3))
    assert same(more[:2], a)


def test_progress_is_told():
    seen: list[int] = []
    sample_chains(target(), SCHEDULE, on_progress=seen.append)
    assert seen == sorted(set(seen)) and seen[-1] == SCHEDULE.n_sweeps


def test_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with threadpool_limits(2):
            pools = [pool["num_threads"] for pool in threadpool_info()]
            sample_chains(target(), SCHEDULE)
            assert [pool["num_threads"] for pool in threadpool_info()] == pools
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- workers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_do_not_matter(monkeypatch):
    calls = []
    pool = chains._pool
    monkeypatch.setattr(chains, "_pool", lambda *args: calls.append(pool(*args)) or calls[-1])
    for kind in KINDS:
        alone = sample_chains(target(kind), SCHEDULE, n_jobs=1)
        assert all(p is None for p in calls)
        calls.clear()
        beside = sample_chains(target(kind), SCHEDULE, n_jobs=2)
        assert calls[-1] is not None and calls[-1].n_jobs == 2
        calls.clear()
        assert same(alone, beside)
    # A fixed kernel again, after another problem has been in the same workers.
    assert same(
        sample_chains(target("full"), SCHEDULE, n_jobs=2),
        sample_chains(target("full"), SCHEDULE, n_jobs=1),
    )


def test_number_of_workers(monkeypatch):
    monkeypatch.setattr(joblib, "effective_n_jobs", lambda n: 8 + 1 + n if n < 0 else n)
    assert n_workers(1, 4) == 1
    assert n_workers(3, 4) == 3
    assert n_workers(6, 4) == 4
    assert n_workers(-1, 4) == n_workers(None, 4) == 4
    assert n_workers(None, 100) == 8
    assert chains._pool(None, 4, seconds=1.0) is None
    assert chains._pool(None, 4, seconds=1e3) is not None
    assert chains._pool(2, 4, seconds=0.0) is not None
    assert chains._pool(1, 4, seconds=1e3) is None


@pytest.mark.parametrize("backend", ["threading", "sequential"])
def test_inside_another_parallel_loop(backend):
    def inner(seed):
        return n_workers(None, 4), sample_chains(target(), replace(SCHEDULE, seed=seed))

    with joblib.parallel_config(backend=backend):
        found = joblib.Parallel(n_jobs=2)(joblib.delayed(inner)(seed) for seed in (5, 6))
    for seed, (workers, draws) in zip((5, 6), found, strict=True):
        assert workers == 1 or backend == "sequential"
        assert same(draws, sample_chains(target(), replace(SCHEDULE, seed=seed)))


# --- interruptions ------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 15, 16, 31, 109])
def test_an_interrupted_run_has_its_draws_so_far(monkeypatch, small_stretches, after):
    """With two chains, sweep k of both is made by stretch calls 2k and 2k + 1."""
    whole = sample_chains(target(), SCHEDULE)
    Stop(monkeypatch, after)
    with pytest.raises(Interrupted) as caught:
        sample_chains(target(), SCHEDULE)
    made = max(0, after // 2 - 7) // 2
    assert len(caught.value.draws[0].g) == made
    assert same(caught.value.draws, part(whole, made))


@pytest.mark.slow
def test_ctrl_c_while_workers_are_busy(request):
    # Test runners that work side by side switch Ctrl-C off.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    schedule = replace(SCHEDULE, n_samples=10**5)
    timer: list[threading.Timer] = []

    def on_progress(sweeps):
        if sweeps > 100 and not timer:  # the workers have the chains by now
            timer.append(threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)))
            timer[0].start()

    with pytest.raises(Interrupted) as caught:
        sample_chains(target(), schedule, 2, on_progress)
    made = len(caught.value.draws[0].g)
    assert made > 40
    assert same(caught.value.draws, sample_chains(target(), replace(SCHEDULE, n_samples=made)))
    assert same(  # and the workers are there for the next run
        sample_chains(target(), SCHEDULE, n_jobs=2), sample_chains(target(), SCHEDULE)
    )


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(monkeypatch, path, kind):
    whole = sample_chains(target(kind), SCHEDULE)
    monkeypatch.setattr(chains, "_STRETCH_SECONDS", 0.0)
    for after in (0, 5, 12, 40, 3):
        with monkeypatch.context() as m:
            Stop(m, after)
            with pytest.raises(Interrupted):
                sample_chains(target(kind), SCHEDULE, checkpoint=path)
    seen: list[int] = []
    assert same(sample_chains(target(kind), SCHEDULE, None, seen.append, path), whole)
    assert seen[0] == sum(after // 2 for after in (0, 5, 12, 40, 3))


def test_a_run_that_fails_goes_on_too(monkeypatch, path, small_stretches):
    whole = sample_chains(target(), SCHEDULE)
    with monkeypatch.context() as m:
        Stop(m, 50, RuntimeError("a worker was killed"))
        with pytest.raises(RuntimeError, match="killed"):
            sample_chains(target(), SCHEDULE, checkpoint=path)
    Stop(monkeypatch, 2 * SCHEDULE.n_sweeps - 50)
    assert same(sample_chains(target(), SCHEDULE, checkpoint=path), whole)


def test_a_finished_run_can_be_made_longer(monkeypatch, path):
    first = sample_chains(target(), SCHEDULE, checkpoint=path)
    longer = replace(SCHEDULE, n_samples=50)
    more = sample_chains(target(), longer, checkpoint=path)
    assert same(part(more, 24), first)
    assert same(more, sample_chains(target(), longer))
    # Then nothing is left to do, and fewer are the first of them; the file keeps all.
    Stop(monkeypatch, 0)
    content = path.read_bytes()
    assert same(sample_chains(target(), longer, checkpoint=path), more)
    assert same(sample_chains(target(), SCHEDULE, checkpoint=path), first)
    assert path.read_bytes() == content


def test_a_checkpoint_is_written_as_the_run_goes(monkeypatch, path, small_stretches):
    monkeypatch.setattr(chains, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "_SHARE", 0.0)
    seen = []

    def on_progress(sweeps):
        if path.exists():
            seen.append((sweeps_in(path), sweeps))

    sample_chains(target(), SCHEDULE, None, on_progress, path)
    assert seen == [(k - 1, k) for k in range(2, SCHEDULE.n_sweeps + 1)]


def test_a_full_disk_stops_nothing(monkeypatch, path, small_stretches):
    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(files, "write", full)
    monkeypatch.setattr(chains, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "_SHARE", 0.0)
    with pytest.warns(UserWarning, match="checkpoint: no space left; the run goes on") as said:
        found = sample_chains(target(), SCHEDULE, checkpoint=path)
    assert same(found, sample_chains(target(), SCHEDULE)) and len(said) == 1


OTHER_TARGETS = {
    "X": lambda t: replace(t, X=t.X + 1e-15),
    "y": lambda t: replace(t, data=replace(t.data, y=t.data.y[::-1].copy())),
    "index": lambda t: replace(t, data=replace(t.data, index=t.data.index[::-1].copy())),
    "inducing": lambda t: replace(t, Z=t.X[:3]),
    "kernel": lambda t: replace(t, kernels=(Matern52((1.0, 2.0), 3.0),)),
    "lengthscale": lambda t: replace(t, kernels=(RBF((1.0, 2.0 + 1e-12), 3.0),)),
    "mean": lambda t: replace(t, mean=t.mean + 1e-12),
    "augmentation": lambda t: replace(t, augmentation="paper"),
    "sampled mean": lambda t: replace(t, mean_variance=1.0),
    "sampled kernel": lambda t: replace(t, kernel_scale=1.0),
}
OTHER_SCHEDULES = {"n_chains": 3, "n_warmup": 8, "thin": 1, "seed": 6}


@pytest.mark.parametrize("change", [*OTHER_TARGETS, *OTHER_SCHEDULES])
def test_a_checkpoint_of_something_else_is_refused(path, change):
    sample_chains(target(), SCHEDULE, checkpoint=path)
    t, schedule = target(), SCHEDULE
    if change in OTHER_TARGETS:
        t = OTHER_TARGETS[change](t)
    else:
        schedule = replace(schedule, **{change: OTHER_SCHEDULES[change]})
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"checkpoint: .*run\.ckpt belongs to other data"):
        sample_chains(t, schedule, checkpoint=path)
    assert path.read_bytes() == content


def test_files_that_are_no_checkpoints(path):
    for header, match in [
        ({"kind": "model"}, "not a checkpoint"),
        ([], "not a checkpoint"),
        ({"kind": "gibbs checkpoint", "format": 99}, "format 99"),
    ]:
        files.write(path, {}, header)
        with pytest.raises(FileFormatError, match=match):
            sample_chains(target(), SCHEDULE, checkpoint=path)
    path.write_bytes(b"something else")
    with pytest.raises(FileFormatError, match="damaged or not"):
        sample_chains(target(), SCHEDULE, checkpoint=path)
    assert path.read_bytes() == b"something else"


# --- a real crash -------------------------------------------------------------------------------

CRASH = replace(SCHEDULE, n_samples=1500)


def work_until_killed(path: Path, progress: Connection) -> None:
    """A process of the test below: it writes a checkpoint after every few sweeps."""
    chains._STRETCH_SECONDS, chains._CHECKPOINT_SECONDS, checkpoint._SHARE = 0.002, 0.0, 0
    sample_chains(target("sampled"), CRASH, 1, progress.send, path)


@pytest.mark.slow
def test_killed_at_any_moment(path):
    """SIGKILL leaves a whole file, and the run goes on with the draws it would have made."""
    rng = np.random.default_rng()
    fork = multiprocessing.get_context("fork")  # Torch is loaded already
    for _ in range(3):
        progress, end = fork.Pipe(duplex=False)
        process = fork.Process(target=work_until_killed, args=(path, end), daemon=True)
        process.start()
        for _ in range(4):
            assert progress.poll(60)
            progress.recv()
        time.sleep(rng.uniform(0.0, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    sweeps = sweeps_in(path)
    assert 9 <= sweeps < CRASH.n_sweeps
    n = CRASH.kept(sweeps) + 20
    found = sample_chains(target("sampled"), replace(CRASH, n_samples=n), checkpoint=path)
    assert same(found, sample_chains(target("sampled"), replace(CRASH, n_samples=n)))
