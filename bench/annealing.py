"""The exact posterior and its evidence, by populations of chains that come from the prior.

Where kernels are large the posterior has a trap: latents far above zero at all rows, where σ is
flat, labels say little, and the prior has much room. A chain that starts there stays for long,
though next to nothing of the mass is there. So a population of draws from the prior,
which is exact, is taken to the posterior in steps, likelihood^β with β from 0 to 1: after each,
chains are drawn anew in proportion to likelihood^(β' - β), which leaves as many in every place as
belong there, and then moved by Hamiltonian Monte Carlo. All is in float64.
"""

from __future__ import annotations

import math

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from conjugp._sampler.chain import Target
from conjugp.likelihoods import LogisticSoftmax

N_CHAINS = 128  # of a population
EVEN = 0.8  # least effective share of the chains when they are drawn anew
MOVES = 2  # trajectories after that
N_WARMUP, N_DRAWS = 10, 40  # trajectories at the end, for steps and scales to settle and to keep
LENGTH = 1.6  # of a trajectory: a quarter of the way around where the posterior is Gaussian
ACCEPTED = 0.8  # share of the trajectories, aimed at
SETTINGS = (N_CHAINS, EVEN, MOVES, N_WARMUP, N_DRAWS, LENGTH, ACCEPTED)


class Energy:
    """-log p(g) - β log p(y | g) for whitened latents g (C, S, U), S chains at U inputs.

    In coordinates z = Rᵀg in which it is about as wide in all directions: R Rᵀ is the precision
    that g would have if log p(y | f) had the mean curvature of all chains everywhere.
    """

    def __init__(self, target: Target) -> None:
        self.likelihood, data = LogisticSoftmax(), target.data
        self.L = torch.tensor(target.fields[0].field.L)  # type: ignore[union-attr]
        self.y, self.mean = torch.tensor(data.y), torch.tensor(target.mean)[:, None, None]
        self.index = torch.arange(len(data.y)) if data.index is None else torch.tensor(data.index)
        self.beta, self.size = 0.0, 0.5  # and of a step
        self._scale(torch.zeros(data.n_classes, len(self.L), dtype=torch.float64))

    def anneal(self, beta: float, g: Tensor) -> None:
        """Another β, and coordinates for it."""
        self.beta = beta
        self._scale(beta * self._curvature(g))

    def log_likelihood(self, g: Tensor) -> Tensor:
        """log p(y | g) of every chain, (S,)."""
        f = self._at_rows(g @ self.L.T)
        return self.likelihood.slope(self.y.expand(f.shape[:2]), f)[0].sum(1)

    def move(self, g: Tensor, adapt: bool, generator: torch.Generator) -> Tensor:
        """Every chain after a trajectory, or where it was."""

        def uniform(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=generator))

        size = self.size * uniform(0.8, 1.2)
        n_steps = max(1, round(LENGTH * uniform(0.5, 1.5) / size))
        z = g @ self.R
        p = torch.randn(z.shape, generator=generator, dtype=torch.float64)
        value, gradient = self(z)
        before = value + 0.5 * p.square().sum((0, 2))
        for _ in range(n_steps):
            p = p - 0.5 * size * gradient
            z = z + size * p
            value, gradient = self(z)
            p = p - 0.5 * size * gradient
        after = value + 0.5 * p.square().sum((0, 2))
        chance = torch.exp((before - after).clamp(max=0.0)).nan_to_num(0.0)
        if adapt:
            self.size *= math.exp(0.3 * (float(chance.mean()) - ACCEPTED))
        moved = torch.rand(chance.shape, generator=generator, dtype=torch.float64) < chance
        return torch.where(moved[:, None], z @ self.to_g, g)

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The energy, (S,), and its gradient, (C, S, U)."""
        g, f = z @ self.to_g, self._at_rows(z @ self.to_f)
        value, slope = self.likelihood.slope(self.y.expand(f.shape[:2]), f)
        at_inputs = torch.zeros_like(g).index_add_(2, self.index, slope.permute(2, 0, 1))
        gradient = g @ self.to_g.mT - self.beta * (at_inputs @ self.to_f.mT)
        return 0.5 * g.square().sum((0, 2)) - self.beta * value.sum(1), gradient

    def _scale(self, curvature: Tensor) -> None:
        eye = torch.eye(len(self.L), dtype=torch.float64)
        self.R = torch.linalg.cholesky(eye + (self.L.T * curvature[:, None]) @ self.L)
        # For rows of z, from the right.
        self.to_g = torch.linalg.solve_triangular(self.R, eye.expand_as(self.R), upper=False)
        self.to_f = self.to_g @ self.L.T

    def _curvature(self, g: Tensor) -> Tensor:
        """The mean over chains of -∂²log p(y | f), (C, U), where it is positive."""
        f = self._at_rows(g @ self.L.T)
        s = torch.sigmoid(f)
        d, total = s * (1 - s), s.sum(-1, keepdim=True)
        found = one_hot(self.y, len(g)) * d + d * (1 - 2 * s) / total - (d / total).square()
        at_inputs = torch.zeros_like(g[:, 0])
        return at_inputs.index_add_(1, self.index, found.mean(0).T).clamp(min=0.0)

    def _at_rows(self, r: Tensor) -> Tensor:
        """Latents at the inputs (C, S, U), less their mean, to latents at the rows (S, N, C)."""
        return (self.mean + r)[..., self.index].permute(1, 2, 0)


def population(target: Target, seed: int) -> tuple[NDArray, float]:
    """Whitened latents of a population's chains, (draws, C, U), and its log p(y)."""
    generator, energy = torch.Generator().manual_seed(seed), Energy(target)
    shape = (target.data.n_classes, N_CHAINS, len(energy.L))
    g, log_evidence = torch.randn(shape, generator=generator, dtype=torch.float64), 0.0
    while energy.beta < 1:
        value = energy.log_likelihood(g)
        rise = furthest(value, 1 - energy.beta)
        log_evidence += float(torch.logsumexp(rise * value, 0)) - math.log(N_CHAINS)
        g = g[:, drawn_anew(torch.softmax(rise * value, 0), generator)]
        energy.anneal(min(1.0, energy.beta + rise), g)
        for _ in range(MOVES):
            g = energy.move(g, True, generator)
    for i in range(N_WARMUP):
        if i % 5 == 0:
            energy.anneal(1.0, g)
        g = energy.move(g, True, generator)
    kept = []
    for _ in range(N_DRAWS):
        g = energy.move(g, False, generator)
        kept.append(g.transpose(0, 1))
    return torch.cat(kept).numpy(), log_evidence


def furthest(value: Tensor, left: float) -> float:
    """By how much β may rise: at most by what is left, and so that weights stay even."""

    def share(rise: float) -> float:
        weight = torch.softmax(rise * value, 0)
        return 1.0 / (len(weight) * float(weight.square().sum()))

    if share(left) >= EVEN:
        return left
    low, high = 0.0, left
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share(middle) >= EVEN else (low, middle)
    return low


def drawn_anew(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Indices (S,), each about as often as its weight (S,) times S says."""
    u = torch.arange(len(weight)) + torch.rand((), generator=generator, dtype=torch.float64)
    found = torch.searchsorted(weight.cumsum(0), u / len(weight))
    return found.clamp(max=len(weight) - 1)
