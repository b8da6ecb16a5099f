"""Gibbs sampling of the exact posterior: one sweep on one page (docs/math.md, G1-G6).

Everything here is NumPy in float64. Latent values f (C, U) stand at the U distinct inputs; row i
of the data has label y_i and input index_i. With r = f - mean and whitened coordinates g,

    r = Lg             the full Gaussian process, g (C, U),
    r = Aᵀg + e        the sparse one, g (C, M), e ~ N(0, residual) independent at every input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polyagamma import random_polyagamma
from scipy.linalg import get_blas_funcs, get_lapack_funcs, solve_triangular
from scipy.special import expit, log_expit, logsumexp

AUGMENTATIONS = ("collapsed", "paper")

_TINY = 1e-300
# An exact draw of PG(b, ·) takes time proportional to b: this much, in all, takes seconds.
_MOST_SHAPE = 1e8
# No row of a start expects more counts, which would keep its latents where they are for long.
_START_COUNTS = 100.0

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

(_potrf,) = get_lapack_funcs(("potrf",), dtype=np.float64)
_syrk, _trsv = get_blas_funcs(("syrk", "trsv"), dtype=np.float64)
_polya_gamma: Callable[..., Any] = random_polyagamma  # its own types leave arrays out


def correction(K: Array, kappa: Array, omega: Array, r: Array, noise: Array) -> Array:
    """x of (G5): what a draw r of the prior misses of the pseudo-observations, weighed.

    Everything is (C, U), the noise standard normal; x is 0 where there is no site.
    """
    x = np.zeros(kappa.shape)
    for c in range(len(kappa)):
        at = omega[c].nonzero()[0]
        if not len(at):
            continue
        precision = omega[c].take(at)
        missed = (kappa[c].take(at) + np.sqrt(precision) * noise[c].take(at)) / precision
        missed -= r[c].take(at)
        S = K.take(at, axis=0).take(at, axis=1)
        S.ravel()[:: len(at) + 1] += 1 / precision
        R, info = _potrf(S.T, lower=1, clean=0, overwrite_a=1)
        if info:
            raise FloatingPointError("the kernel matrix is not positive definite")
        x[c, at] = _trsv(R, _trsv(R, missed, lower=1), lower=1, trans=1)
    return x


@lru_cache(maxsize=1)
def fastest_correction() -> Callable[..., Array]:
    """`correction` compiled, where Numba is at hand; elsewhere the one above."""
    try:
        from conjugp._sampler import compiled
    except (ImportError, OSError, ValueError):  # not there, or without a library of its own
        return correction
    return compiled.correction


class FullField:
    """r = L g: every input its own inducing point.

    A draw costs a³/3 for every class, a being the inputs it has a pseudo-observation at (G5).
    """

    def __init__(self, K: Array, L: Array) -> None:
        self.K, self.L = np.ascontiguousarray(K), L  # (U, U), K = L Lᵀ
        self.n_inputs = len(L)

    def draw(self, kappa: Array, omega: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        """g and r (C, U) given sites exp(kappa·r - ½ omega·r²), both (C, U) (G5, G6).

        Where omega is 0 there is no site, and kappa must be 0 too.
        """
        # A draw of the prior, corrected by what it misses of the pseudo-observations kappa/omega.
        g, noise = rng.standard_normal(kappa.shape), rng.standard_normal(kappa.shape)
        x = fastest_correction()(self.K, kappa, omega, g @ self.L.T, noise)
        g += x @ self.L
        return g, g @ self.L.T

    def prior(self, n_classes: int, rng: np.random.Generator) -> tuple[Array, Array]:
        g = rng.standard_normal((n_classes, self.n_inputs))
        return g, g @ self.L.T

    def noise(self, g: Array, r: Array) -> Array:
        """Nothing: r comes from g alone."""
        return r[:, :0]

    def place(self, g: Array, noise: Array) -> Array:
        return g @ self.L.T

    def log_prior(self, r: Array) -> tuple[float, Array]:
        """log N(r | 0, K) of all classes, less a constant, and g."""
        g = solve_triangular(self.L, r.T, lower=True, check_finite=False).T
        log_det = 2 * len(r) * np.log(np.diag(self.L)).sum()
        return -0.5 * float(np.square(g).sum() + log_det), g


class SparseField:
    """r = Aᵀg + e: independent given M inducing values. A draw costs C·U·M² (G6)."""

    def __init__(self, A: Array, residual: Array) -> None:
        self.A, self.residual = np.asfortranarray(A), residual  # (M, U), (U,)
        self.n_inputs = len(residual)

    def draw(self, kappa: Array, omega: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        A, shrink = self.A, 1 / (1 + omega * self.residual)
        weight = np.sqrt(omega * shrink)
        rhs = (kappa * shrink) @ A.T
        g = rng.standard_normal(rhs.shape)
        for c in range(len(kappa)):
            at = omega[c].nonzero()[0]
            if not len(at):
                continue
            P = _syrk(1.0, (A.T.take(at, axis=0) * weight[c, at, None]).T, lower=1)
            P.ravel(order="K")[:: len(A) + 1] += 1
            R, info = _potrf(P, lower=1, clean=0, overwrite_a=1)
            if info:
                raise FloatingPointError("the posterior precision is not positive definite")
            g[c] = _trsv(R, _trsv(R, rhs[c], lower=1) + g[c], lower=1, trans=1)
        a = g @ A
        open_ = self.residual * shrink
        e = open_ * (kappa - omega * a) + np.sqrt(open_) * rng.standard_normal(a.shape)
        return g, a + e

    def prior(self, n_classes: int, rng: np.random.Generator) -> tuple[Array, Array]:
        g = rng.standard_normal((n_classes, len(self.A)))
        return g, self.place(g, rng.standard_normal((n_classes, self.n_inputs)))

    def noise(self, g: Array, r: Array) -> Array:
        """e in units of its deviation; 0 where there is none."""
        deviation = np.sqrt(self.residual)
        return np.divide(r - g @ self.A, deviation, out=np.zeros_like(r), where=deviation > 0)

    def place(self, g: Array, noise: Array) -> Array:
        return g @ self.A + np.sqrt(self.residual) * noise


class ClassFields:
    """A field of its own for every class."""

    def __init__(self, fields: Sequence[FullField | SparseField]) -> None:
        self.fields, self.n_inputs = tuple(fields), fields[0].n_inputs

    def draw(self, kappa: Array, omega: Array, rng: np.random.Generator) -> tuple[Array, Array]:
        each = [
            one.draw(kappa[c : c + 1], omega[c : c + 1], rng) for c, one in enumerate(self.fields)
        ]
        g, r = zip(*each, strict=True)
        return np.concatenate(g), np.concatenate(r)

    def prior(self, n_classes: int, rng: np.random.Generator) -> tuple[Array, Array]:
        g, r = zip(*(one.prior(1, rng) for one in self.fields), strict=True)
        return np.concatenate(g), np.concatenate(r)


Field = FullField | SparseField | ClassFields  # the Gaussian prior of the latent functions


@dataclass(frozen=True)
class Observations:
    """Labels and where they were seen."""

    y: Counts  # (N,)
    n_classes: int
    index: Counts | None = None  # (N,) input of every row; None: one row each

    @cached_property
    def one_hot(self) -> Array:
        return (np.arange(self.n_classes)[:, None] == self.y).astype(np.float64)

    @cached_property
    def rows(self) -> Counts:
        return np.arange(len(self.y))

    def at_rows(self, values: Array) -> Array:
        """(..., C, U) -> (..., C, N)."""
        return values if self.index is None else np.take(values, self.index, axis=-1)

    def at_inputs(self, values: Array, n_inputs: int) -> Array:
        """Sums over the rows of every input, (C, N) -> (C, U)."""
        if self.index is None:
            return values
        out = [np.bincount(self.index, weights=row, minlength=n_inputs) for row in values]
        return np.array(out, dtype=np.float64)


def log_likelihood(data: Observations, f: Array) -> Array:
    """Σ_i log p(y_i | f) of the logistic-softmax, f (..., C, U) -> (...) (M2)."""
    f = data.at_rows(f)
    s = expit(f)
    own, total = s[..., data.y, data.rows], s.sum(axis=-2)
    if own.min() > _TINY:  # nothing has underflowed
        return np.log(own / total).sum(axis=-1)
    own, total = log_expit(f[..., data.y, data.rows]), logsumexp(log_expit(f), axis=-2)
    return (own - total).sum(axis=-1)


def draw_lambda(s: Array, rng: np.random.Generator) -> Array:
    """λ given s = σ(f) alone, the counts integrated out: Exponential(Σ_c s_c) (G1)."""
    lam = rng.standard_exponential(s.shape[1])
    lam /= np.add.reduce(s, axis=0, initial=_TINY)
    return lam


def draw_lambda_given_counts(n: Counts, rng: np.random.Generator) -> Array:
    """λ given the counts, the paper's order: Gamma(1 + Σ_c n_c, rate C) (G2)."""
    return rng.standard_gamma(1.0 + n.sum(axis=0)) / len(n)


def draw_counts(lam: Array, s: Array, rng: np.random.Generator) -> Counts:
    """n given λ and s = σ(f): Poisson(λ σ(-f)) (G3)."""
    rate = 1 - s
    rate *= lam
    if not np.add.reduce(rate, axis=None) < _MOST_SHAPE:
        raise FloatingPointError(
            "at some rows the logistic functions of all classes vanish, and the augmentation "
            "needs counts beyond any bound: use a larger prior_mean or a smaller kernel variance"
        )
    return rng.poisson(rate)


def draw_omega(shape: Array, f: Array, rng: np.random.Generator) -> Array:
    """ω given counts and f: PG(shape, f), 0 where the shape is 0; exact at whole shapes (G4)."""
    # A sum of exact PG(1, f) draws. The package's other methods are approximations: "alternate"
    # has 5 % too much variance at f = 0. Unchecked, a shape of 0 gives NaN, which fmax passes over.
    omega = _polya_gamma(shape, f, method="devroye", disable_checks=True, random_state=rng)
    return np.fmax(omega, 0.0, out=omega)


@dataclass
class Chain:
    """The state of one Markov chain. Its arrays are replaced, never written into."""

    f: Array  # (C, U)
    g: Array  # (C, U) or (C, M)
    lam: Array  # (N,)


def start(prior: Field, mean: Array, data: Observations, rng: np.random.Generator) -> Chain:
    """A draw from the prior, pulled towards its mean if it would need huge counts.

    Where all latents of an input are far below zero a sweep hardly moves them.
    """
    g, r = prior.prior(data.n_classes, rng)
    most = max(_START_COUNTS, 2 * _expected_counts(mean[:, None]))
    while _expected_counts(mean[:, None] + r) > most:
        g, r = 0.5 * g, 0.5 * r
    f = mean[:, None] + r
    return Chain(f, g, draw_lambda(expit(data.at_rows(f)), rng))


def _expected_counts(f: Array) -> float:
    """The largest E[λ] of any input."""
    least = float(expit(f).sum(axis=0).min())
    return 1 / least if least > 0 else np.inf


def sweep(
    chain: Chain,
    prior: Field,
    mean: Array,
    data: Observations,
    augmentation: str,
    rng: np.random.Generator,
) -> None:
    """Draw λ, n, ω and f once each, every one given what it depends on (G1-G6)."""
    f = data.at_rows(chain.f)
    s = expit(f)
    if augmentation == "collapsed":
        chain.lam = draw_lambda(s, rng)
    n = draw_counts(chain.lam, s, rng)
    if augmentation == "paper":
        chain.lam = draw_lambda_given_counts(n, rng)
    shape = data.one_hot + n
    omega = data.at_inputs(draw_omega(shape, f, rng), prior.n_inputs)
    shape *= -0.5
    shape += data.one_hot  # ½(y - n)
    kappa = data.at_inputs(shape, prior.n_inputs)
    column = mean[:, None]
    chain.g, r = prior.draw(kappa - omega * column, omega, rng)
    chain.f = column + r
