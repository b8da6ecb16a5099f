"""Chains of the Gibbs sampler: what they sample, stretches of sweeps, the draws they leave.

Torch evaluates kernels, NumPy does the sweeps. A chain holds its own random numbers, so its draws
do not depend on how its sweeps are cut into stretches or on which process makes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from conjugp._numerics.linalg import NotPositiveDefiniteError, cholesky
from conjugp._sampler.slice import slice_step
from conjugp._sampler.sweep import (
    Array,
    Chain,
    ClassFields,
    Field,
    FullField,
    Observations,
    SparseField,
    draw_lambda,
    log_likelihood,
    start,
    sweep,
)
from conjugp.kernels import Kernel

_SLICE_WIDTH = 1.0  # in logs of kernel parameters


@dataclass(frozen=True)
class Target:
    """The posterior to sample, in working units.

    The prior mean of class c is mean_c, or N(mean_c, mean_variance) integrated out: a constant
    added to the kernel (G7). Kernel parameters rest, or have independent normal priors on their
    logs, around those given (G8).
    """

    data: Observations
    X: Array  # (U, D) distinct inputs
    Z: Array | None  # (M, D) inducing points; None: the full Gaussian process
    kernels: tuple[Kernel, ...]  # 1, or C
    mean: Array  # (C,)
    augmentation: str = "collapsed"
    mean_variance: float = 0.0
    kernel_scale: float = 0.0  # deviation of the prior on log parameters; 0: parameters rest
    jitter: float | None = None

    @property
    def points(self) -> Array:
        """Where draws stand, (M, D)."""
        return self.X if self.Z is None else self.Z

    @cached_property
    def theta(self) -> Array:
        """Logs of the kernel parameters given, (K, T); a shorter row ends in zeros."""
        rows = [k.theta.double().numpy() for k in self.kernels]
        longest = max(map(len, rows))
        return np.stack([np.pad(row, (0, longest - len(row))) for row in rows])

    def kernel(self, k: int, theta: Array) -> Kernel:
        """Kernel k with log parameters theta (T,)."""
        kernel = self.kernels[k]
        return kernel.with_theta(torch.tensor(theta[: kernel.n_theta]))

    @cached_property
    def fields(self) -> list[Whitened]:
        """The fields at the kernel parameters given, one per kernel."""
        return list(map(self.whitened, count(), self.theta))

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        X = torch.tensor(self.X)
        return X, X if self.Z is None else torch.tensor(self.Z)

    def whitened(self, k: int, theta: Array) -> Whitened:
        """The field of kernel k with log parameters theta (T,), and 1 in its coordinates."""
        kernel = self.kernel(k, theta)
        X, Z = self._tensors
        with torch.no_grad():
            K = kernel(Z, Z) + self.mean_variance
            L, jitter = cholesky(K, self.jitter)
            ones = torch.linalg.solve_triangular(L, torch.ones_like(L[:, :1]), upper=False)
            if self.Z is None:
                K.diagonal().add_(jitter * K.diagonal().mean())
                found = FullField(K.numpy(), L.numpy())
            else:
                cross = kernel(Z, X) + self.mean_variance
                A = torch.linalg.solve_triangular(L, cross, upper=False)
                prior = kernel.diag(X) + self.mean_variance
                residual = torch.maximum(prior - A.square().sum(0), 1e-6 * prior)
                found = SparseField(A.numpy(), residual.numpy())
        return Whitened(found, ones[:, 0].numpy())

    def __getstate__(self) -> dict[str, object]:
        """Without what can be computed again."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Whitened:
    """A field, and L⁻¹1, with which prior means are drawn."""

    field: FullField | SparseField
    ones: Array


@dataclass(frozen=True)
class State:
    """A chain between two stretches."""

    f: Array
    g: Array
    lam: Array
    theta: Array  # (K, T)
    rng: np.random.Generator
    sweeps: int = 0


@dataclass(frozen=True)
class Draws:
    """Kept draws of one chain, oldest first."""

    g: Array  # (S, C, M) whitened latents
    log_likelihood: Array  # (S,)
    theta: Array  # (S, K, T)
    mean: Array  # (S, C)

    def __add__(self, other: Draws) -> Draws:
        names = self.__dataclass_fields__
        return Draws(*(np.concatenate([getattr(self, n), getattr(other, n)]) for n in names))

    def __getitem__(self, part: slice) -> Draws:
        return Draws(*(getattr(self, n)[part] for n in self.__dataclass_fields__))

    @staticmethod
    def room(target: Target, n: int) -> Draws:
        """For n draws, which are still to be made."""
        C = target.data.n_classes
        shapes = ((C, len(target.points)), (), target.theta.shape, (C,))
        return Draws(*(np.empty((n, *shape)) for shape in shapes))


def first_state(target: Target, seed: np.random.SeedSequence) -> State:
    """A chain that has not swept yet; sampled kernel parameters start near those given."""
    rng = np.random.default_rng(seed)
    theta = target.theta.copy()
    if target.kernel_scale:
        for row, kernel in zip(theta, target.kernels, strict=True):
            row[: kernel.n_theta] += target.kernel_scale * rng.uniform(-1, 1, kernel.n_theta)
    walk = Walk(target, theta)
    chain = start(walk.prior, target.mean, target.data, rng)
    return State(chain.f, chain.g, chain.lam, theta, rng)


def run(
    target: Target, state: State, n_sweeps: int, n_warmup: int, thin: int
) -> tuple[State, Draws]:
    """The next sweeps of a chain, and the draws among them that are kept."""
    walk = Walk(target, state.theta)
    # A copy: what was handed in stays as it was, should this stretch be cut short.
    rng = np.random.Generator(type(state.rng.bit_generator)())
    rng.bit_generator.state = state.rng.bit_generator.state
    chain = Chain(state.f, state.g, state.lam)
    f, g, theta, mean = [], [], [], []
    for done in range(state.sweeps + 1, state.sweeps + n_sweeps + 1):
        sweep(chain, walk.prior, target.mean, target.data, target.augmentation, rng)
        if target.kernel_scale:
            walk.move(chain, rng, centred=done % 2 == 0)
        if done > n_warmup and (done - n_warmup) % thin == 0:
            f.append(chain.f)
            g.append(chain.g)
            theta.append(walk.theta.copy())
            mean.append(walk.draw_mean(chain.g, rng))
    state = State(chain.f, chain.g, chain.lam, walk.theta, rng, state.sweeps + n_sweeps)
    if not g:
        return state, Draws.room(target, 0)
    loglik = log_likelihood(target.data, np.array(f))
    return state, Draws(np.array(g), loglik, np.array(theta), np.array(mean))


class Walk:
    """The fields at the kernel parameters where a chain stands."""

    def __init__(self, target: Target, theta: Array) -> None:
        self.target, self.theta = target, theta.copy()
        at_start = np.array_equal(theta, target.theta)
        self.fields = list(target.fields if at_start else map(target.whitened, count(), theta))
        self._join()

    def _join(self) -> None:
        fields = [w.field for w in self.fields]
        self.prior: Field = fields[0] if len(fields) == 1 else ClassFields(fields)

    def draw_mean(self, g: Array, rng: np.random.Generator) -> Array:
        """Prior means given the latents (G7), (C,)."""
        s2 = self.target.mean_variance
        if not s2:
            return self.target.mean
        ones = np.stack([w.ones for w in self.fields])  # (K, M)
        variance = np.maximum(s2 - s2**2 * np.square(ones).sum(1), 0.0)
        noise = np.sqrt(variance) * rng.standard_normal(len(g))
        return self.target.mean + s2 * (g * ones).sum(1) + noise

    def move(self, chain: Chain, rng: np.random.Generator, centred: bool) -> None:
        """One slice step on the log parameters of every kernel (G8)."""
        for k, kernel in enumerate(self.target.kernels):
            if kernel.n_theta:
                self._move_one(k, chain, rng, centred)
        self._join()
        if self.target.augmentation == "paper":  # the steps have integrated λ out
            chain.lam = draw_lambda(expit(self.target.data.at_rows(chain.f)), rng)

    def _move_one(self, k: int, chain: Chain, rng: np.random.Generator, centred: bool) -> None:
        """A slice step of kernel k along a random line.

        Either the whitened latents stay and the labels judge, or the latents themselves stay and
        their prior judges: each is quick where the other is slow. The sparse field has the first
        alone.
        """
        target, field = self.target, self.fields[k].field
        rows = slice(None) if len(self.fields) == 1 else slice(k, k + 1)
        mean = target.mean[rows, None]
        g, r = chain.g[rows], chain.f[rows] - mean
        noise = field.noise(g, r)
        centred = centred and isinstance(field, FullField)
        here, given = self.theta[k], target.theta[k]
        direction = rng.standard_normal(target.kernels[k].n_theta)
        direction = np.pad(direction / np.linalg.norm(direction), (0, len(here) - len(direction)))

        def judge(at: Whitened, theta: Array) -> tuple[float, Array]:
            """The log density, and what of g and r has moved."""
            gap = (theta - given) / target.kernel_scale
            if centred and isinstance(at.field, FullField):
                value, moved = at.field.log_prior(r)
            else:
                moved = at.field.place(g, noise)
                value = float(log_likelihood(target.data, _put(chain.f, rows, mean + moved)))
            return value - 0.5 * float(gap @ gap), moved

        last = (here, self.fields[k], r)

        def along(t: float) -> float:
            nonlocal last
            theta = here + t * direction
            try:
                at = target.whitened(k, theta)
            except NotPositiveDefiniteError:
                return -math.inf
            value, moved = judge(at, theta)
            last = (theta, at, moved)
            return value

        t = slice_step(along, _SLICE_WIDTH, rng, judge(self.fields[k], here)[0])
        if not t:
            return
        self.theta[k], self.fields[k], moved = last
        if centred:
            chain.g = _put(chain.g, rows, moved)
        else:
            chain.f = _put(chain.f, rows, mean + moved)


def _put(values: Array, rows: slice, new: Array) -> Array:
    out = values.copy()
    out[rows] = new
    return out


def distinct(X: Array) -> tuple[Array, NDArray[np.int64] | None]:
    """The distinct rows of X, and which of them every row is; None if all are distinct."""
    inputs, index = np.unique(X, axis=0, return_inverse=True)
    if len(inputs) == len(X):
        return X, None
    return inputs, index.reshape(-1)
