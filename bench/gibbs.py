"""The Gibbs sampler: how well its two augmentations mix, and what a sweep costs.

python bench/gibbs.py                # wine, glass (needs CONJUGP_DATA) and 1,000 points
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from data import load
from record import add_output, context, keep
from scipy.linalg import lapack
from threadpoolctl import threadpool_limits

from conjugp._sampler.chain import State, Target, distinct, first_state, run
from conjugp._sampler.diagnostics import diagnose
from conjugp._sampler.prediction import SampledModel
from conjugp._sampler.sweep import AUGMENTATIONS, FullField, Observations
from conjugp.kernels import RBF, Kernel
from conjugp.likelihoods import LogisticSoftmax

REPEATS = 3
N_CHAINS = 4
N_SAMPLES = 1500  # of every chain
N_WARMUP = 300
SPEED_REPEATS = 9
SPEED_SECONDS = 1.0  # of sweeps in one timing, about
STRETCHES = 12  # of one timing: sweeps, then their floors, in turn, so that noise meets both alike
ESS = ("slowest_latent", "median_latent", "log_likelihood")


def target(X: np.ndarray, y: np.ndarray, kernel: Kernel) -> Target:
    """The full Gaussian process with zero prior means and everything but the latents at rest."""
    inputs, index = distinct(np.asarray(X, dtype=np.float64))
    n_classes = int(y.max()) + 1
    data = Observations(y.astype(np.int64), n_classes, index)
    return Target(data, inputs, None, (kernel,), np.zeros(n_classes))


def standardised(X: np.ndarray, y: np.ndarray, variance: float) -> Target:
    """All rows of a table; the lengthscale is the median distance."""
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    gap = np.linalg.norm(X[:, None] - X[None], axis=-1)
    return target(X, y, RBF(float(np.median(gap[np.triu_indices(len(X), 1)])), variance))


def wine() -> Target:
    """Classes that are easily told apart, with the kernel of experiments/wine.py."""
    from sklearn.datasets import load_wine

    return standardised(*load_wine(return_X_y=True), 1.0)


def glass() -> Target:
    """Six classes of unequal size that overlap, and latents that range more widely."""
    d = load("glass")
    X, y = np.concatenate([d.X_train, d.X_test]), np.concatenate([d.y_train, d.y_test])
    return standardised(X.astype(np.float64), y, 4.0)


def thousand() -> Target:
    """Three clouds of two features that overlap; only its size matters."""
    rng = np.random.default_rng(0)
    y = np.arange(1000) % 3
    X = rng.standard_normal((1000, 2)) + 1.5 * np.eye(3)[y, :2]
    return target(X, y, RBF(1.0, 1.0))


SETS = {"wine": wine, "glass": glass, "thousand": thousand}
MIXING = ("wine", "glass")


# --- mixing -------------------------------------------------------------------------------------


def sample(posterior: Target, seed: int) -> dict[str, float]:
    """Effective draws per second of all chains, one after the other; warm-up is not counted."""
    draws, seconds = [], 0.0
    for chain in np.random.SeedSequence(seed).spawn(N_CHAINS):
        state, _ = run(posterior, first_state(posterior, chain), N_WARMUP, N_WARMUP, 1)
        began = time.perf_counter()
        draws.append(run(posterior, state, N_SAMPLES, N_WARMUP, 1)[1])
        seconds += time.perf_counter() - began
    found = diagnose(SampledModel(posterior, draws, LogisticSoftmax()))
    latents = found.each["f"]["ess_bulk"]
    total = found.groups["log_likelihood_total"]["ess_bulk"]
    ess = dict(zip(ESS, (float(latents.min()), float(np.median(latents)), total), strict=True))
    rate = {f"{name}_per_second": value / seconds for name, value in ess.items()}
    return {"seconds": seconds, "rhat": found.rhat, **ess, **rate}


def mixing(posterior: Target, repeats: int) -> dict[str, Any]:
    """Both augmentations in turn, so that whatever else the machine does meets both alike."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in AUGMENTATIONS}
    for seed in range(repeats):
        for name in AUGMENTATIONS:
            runs[name].append(sample(replace(posterior, augmentation=name), seed))
    median = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]}
        for name, found in runs.items()
    }
    ratio = {
        name: median["collapsed"][f"{name}_per_second"] / median["paper"][f"{name}_per_second"]
        for name in ESS
    }
    return {
        "n_chains": N_CHAINS,
        "n_samples": N_SAMPLES,
        "n_warmup": N_WARMUP,
        "runs": runs,
        "median": median,
        "ratio": ratio,
        "passed": min(ratio.values()) >= 1,
    }


# --- speed --------------------------------------------------------------------------------------


class Recorded(FullField):
    """Notes the sizes of the matrices it factorises: inputs with a pseudo-observation."""

    def __init__(self, field: FullField) -> None:
        super().__init__(field.K, field.L)
        self.sizes: list[int] = []

    def draw(self, kappa: Any, omega: Any, rng: Any) -> Any:
        self.sizes += [int(n) for n in np.count_nonzero(omega, axis=1)]
        return super().draw(kappa, omega, rng)


def sizes(posterior: Target, state: State, n_sweeps: int) -> list[int]:
    """The orders of the matrices that these sweeps factorise."""
    whole = posterior.fields[0]
    recorded = Recorded(whole.field)
    watched = replace(posterior)
    vars(watched)["fields"] = [replace(whole, field=recorded)]
    run(watched, state, n_sweeps, 0, 1)
    return recorded.sizes


def floor(posterior: Target, orders: list[int]) -> float:
    """Seconds of Cholesky factorisations of these orders and of nothing else."""
    K = posterior.fields[0].field.K
    shifted, seconds = K + np.eye(len(K)), 0.0
    for n in orders:
        work = np.array(shifted[:n, :n], order="F")
        began = time.thread_time()
        lapack.dpotrf(work, lower=1, clean=0, overwrite_a=1)
        seconds += time.thread_time() - began
    return seconds


def speed(posterior: Target) -> dict[str, Any]:
    """Processor seconds per 1,000 sweeps beside the floor, in turn; one thread does it all.

    The floor is one factorisation of a matrix of all points for every class and sweep. The
    sampler leaves out the points at which a class has no pseudo-observation, so there is a
    second one: the matrices it did factorise.
    """
    state, _ = run(posterior, first_state(posterior, np.random.SeedSequence(0)), 20, 20, 1)
    began = time.thread_time()
    state, _ = run(posterior, state, 10, 0, 1)
    n_sweeps = max(10, round(10 * SPEED_SECONDS / (time.thread_time() - began)))
    stretch = -(-n_sweeps // STRETCHES)
    own = sizes(posterior, state, n_sweeps)
    times: dict[str, list[float]] = {"sampler": [], "cholesky": [], "own_cholesky": []}
    n_classes = posterior.data.n_classes
    for _ in range(SPEED_REPEATS):
        at, spent = state, dict.fromkeys(times, 0.0)
        for first in range(0, n_sweeps, stretch):
            n = min(stretch, n_sweeps - first)
            began = time.thread_time()
            at, _ = run(posterior, at, n, 0, 1)
            spent["sampler"] += time.thread_time() - began
            spent["cholesky"] += floor(posterior, [len(posterior.X)] * n_classes * n)
            these = own[first * n_classes : (first + n) * n_classes]
            spent["own_cholesky"] += floor(posterior, these)
        for name, x in spent.items():
            times[name].append(x * 1000 / n_sweeps)
    median = {name: statistics.median(found) for name, found in times.items()}
    ratio = {name: median["sampler"] / median[name] for name in ("cholesky", "own_cholesky")}
    return {
        "sweeps_timed": n_sweeps,
        "mean_order": statistics.mean(own),
        "seconds_per_1000_sweeps": times,
        "median": median,
        "ratio": ratio,
        "passed": {name: value <= 2 for name, value in ratio.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", metavar="set", help=", ".join(SETS) + " (all)")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    add_output(parser, "gibbs.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with threadpool_limits(1):
        for name in arguments.sets or SETS:
            posterior = SETS[name]()
            size = {"n_points": len(posterior.X), "n_classes": posterior.data.n_classes}
            result: dict[str, Any] = {**context(), **size}
            result["speed"] = s = speed(posterior)
            row = f"| {name} | {size['n_points']} × {size['n_classes']} "
            row += "| {sampler:.2f} | {cholesky:.2f} | {own_cholesky:.2f} |".format(**s["median"])
            row += " {cholesky:.2f}, {own_cholesky:.2f} |".format(**s["ratio"])
            if name in MIXING:
                result["mixing"] = m = mixing(posterior, arguments.repeats)
                for what, ratio in m["ratio"].items():
                    each = (m["median"][a][f"{what}_per_second"] for a in AUGMENTATIONS)
                    row += " {:.3g} / {:.3g} = {:.1f} |".format(*each, ratio)
            else:
                row += " |" * len(ESS)
            keep(arguments.output, name, result)
            rows.append(row)
    print(
        "| set | points × classes | s per 1,000 sweeps | Cholesky, all points | its own sizes "
        "| ratios | ESS/s collapsed / paper: slowest latent | median latent | log-likelihood |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
