"""The exact posterior of a small Wine problem by Gibbs sampling, in NumPy alone.

    python tests/reference/wine_gibbs.py 300

runs four chains for 300 seconds and writes `wine_gibbs.json` beside this file: predictive
probabilities, latent means and latent variances of the test points with their Monte Carlo
standard errors. Nothing here uses conjugp. The sampler alternates

    λ_i | f ~ Exponential(rate Σ_c σ(f_ic)),    n_ic | λ, f ~ Poisson(λ_i σ(−f_ic)),
    ω_ic | n, f ~ PG(y_ic + n_ic, f_ic),        f_c | ω, n ~ N(½ A (y_c − n_c), A),

A = (K⁻¹ + diag ω_c)⁻¹, whose stationary distribution is p(f | y) for the logistic-softmax
likelihood. Latents at test points are integrated out given ω and n where that is closed form.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from polyagamma import random_polyagamma
from scipy.linalg import solve_triangular
from scipy.special import expit
from sklearn.datasets import load_wine

FILE = Path(__file__).with_suffix(".json")
SPLIT_SEED = 0
N_TRAIN = 118
N_CHAINS = 4
BURN_IN = 300
BATCH = 500  # sweeps; far longer than the chain's memory, so batch means are independent


class Wine(NamedTuple):
    """Standardised with the training rows' mean and deviation."""

    X: np.ndarray  # (118, 13)
    y: np.ndarray  # (118,)
    X_test: np.ndarray  # (60, 13)
    lengthscale: float  # the median distance between training rows


class Batch(NamedTuple):
    """Averages over a stretch of one chain, each (n_test, C)."""

    p: np.ndarray  # E[p(y | f)]
    m: np.ndarray  # E[f]
    m2: np.ndarray  # E[f²]


def wine() -> Wine:
    """One fixed random split."""
    X, y = load_wine(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(X))
    train, test = order[:N_TRAIN], order[N_TRAIN:]
    X = (X - X[train].mean(0)) / X[train].std(0)
    gap = np.linalg.norm(X[train][:, None] - X[train][None], axis=-1)
    return Wine(X[train], y[train], X[test], float(np.median(gap[np.triu_indices(N_TRAIN, 1)])))


def rbf(X: np.ndarray, Z: np.ndarray, lengthscale: float) -> np.ndarray:
    """Unit variance."""
    return np.exp(-0.5 * np.square((X[:, None] - Z[None]) / lengthscale).sum(-1))


class Chain:
    """One Markov chain over f (C, N) and what it says about the test points."""

    def __init__(self, data: Wine, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.Y = np.eye(3)[data.y].T  # (C, N)
        self.L = np.linalg.cholesky(rbf(data.X, data.X, data.lengthscale))
        self.a = solve_triangular(
            self.L, rbf(data.X, data.X_test, data.lengthscale), lower=True
        )  # (N, n_test): f* = aᵀg + independent noise where f = L g, g ~ N(0, I)
        self.noise = 1 - np.square(self.a).sum(0)
        self.f = self.rng.standard_normal(self.Y.shape) @ self.L.T

    def sweep(self, test: bool) -> tuple[np.ndarray, np.ndarray] | None:
        """One update of everything; conditional mean and variance of f* if asked, (C, n_test)."""
        rng, f, Y, L = self.rng, self.f, self.Y, self.L
        lam = rng.standard_exponential(f.shape[1]) / expit(f).sum(0)
        n = rng.poisson(lam * expit(-f))
        shape = Y + n
        omega = np.zeros_like(f)
        drawn = shape > 0
        omega[drawn] = random_polyagamma(shape[drawn], f[drawn], method="devroye", random_state=rng)
        moments = []
        for c in range(len(Y)):
            B = (L.T * omega[c]) @ L
            B[np.diag_indices_from(B)] += 1
            R = np.linalg.cholesky(B)
            # One solve for the right-hand side of the mean and, if asked, the test points.
            rhs = (0.5 * (Y[c] - n[c])) @ L
            half = solve_triangular(
                R,
                np.column_stack([rhs, self.a]) if test else rhs[:, None],
                lower=True,
                check_finite=False,
            )
            g = solve_triangular(
                R,
                half[:, 0] + rng.standard_normal(len(L)),
                lower=True,
                trans=1,
                check_finite=False,
            )
            self.f[c] = L @ g
            if test:
                moments.append(
                    (half[:, 1:].T @ half[:, 0], self.noise + np.square(half[:, 1:]).sum(0))
                )
        if not test:
            return None
        return np.array([m for m, _ in moments]), np.array([v for _, v in moments])

    def batch(self, n_sweeps: int, every: int = 2) -> Batch:
        """Averages over the next sweeps, looking at the test points every second one."""
        total = [0.0, 0.0, 0.0]
        for i in range(n_sweeps):
            found = self.sweep(test=i % every == 0)
            if found is None:
                continue
            m, v = found
            z = self.rng.standard_normal((2, *m.shape)) * np.sqrt(v)
            s = expit(np.concatenate([m + z, m - z]))
            total[0] += (s / s.sum(1, keepdims=True)).mean(0)
            total[1] += m
            total[2] += v + m * m
        looks = len(range(0, n_sweeps, every))
        return Batch(*(x.T / looks for x in total))


def run(seconds: float, seeds: list[int]) -> dict[str, object]:
    """All chains in turn, and the reference they give."""
    data = wine()
    batches: list[list[Batch]] = []
    sweeps = 0
    for seed in seeds:
        chain, mine = Chain(data, seed), []
        for _ in range(BURN_IN):
            chain.sweep(test=False)
        end = time.monotonic() + seconds / len(seeds)
        while time.monotonic() < end or len(mine) < 2:
            mine.append(chain.batch(BATCH))
            sweeps += BATCH
        batches.append(mine)
    return {
        "split_seed": SPLIT_SEED,
        "n_train": N_TRAIN,
        "lengthscale": data.lengthscale,
        "variance": 1.0,
        "prior_mean": 0.0,
        "seeds": seeds,
        "sweeps": sweeps,
        **summary(batches),
    }


def summary(chains: list[list[Batch]]) -> dict[str, object]:
    """Estimates and standard errors from batch means, and the potential scale reduction of p."""
    flat = [b for chain in chains for b in chain]
    p, m, m2 = (np.array([getattr(b, name) for b in flat]) for name in Batch._fields)
    mean = m.mean(0)
    variance = m2.mean(0) - mean**2
    # The delta method: the variance is linear in its batch averages to first order.
    influence = m2 - 2 * mean * m
    error = {
        name: x.std(0, ddof=1) / np.sqrt(len(flat))
        for name, x in (("p", p), ("mean", m), ("variance", influence))
    }
    chain_p = [np.array([b.p for b in chain]) for chain in chains]
    # Between chains against what the batches within them lead one to expect: 1 if they agree.
    between = np.var([x.mean(0) for x in chain_p], axis=0, ddof=1).mean()
    within = np.mean([x.var(0, ddof=1) / len(x) for x in chain_p])
    return {
        "between_over_within": between / within,
        "p": p.mean(0),
        "mean": mean,
        "variance": variance,
        **{f"{name}_se": value for name, value in error.items()},
    }


def main() -> None:
    result = run(float(sys.argv[1]) if len(sys.argv) > 1 else 300.0, list(range(1, N_CHAINS + 1)))
    rounded = {
        k: np.round(v, 6).tolist() if isinstance(v, np.ndarray) else v for k, v in result.items()
    }
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in rounded.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name in ("p_se", "mean_se", "variance_se"):
        print(f"{name}: mean {np.mean(result[name]):.1e}, largest {np.max(result[name]):.1e}")
    print(f"{result['sweeps']} sweeps, between/within {result['between_over_within']:.2f}")


if __name__ == "__main__":
    main()
