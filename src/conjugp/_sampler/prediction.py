"""Predictions from posterior draws (docs/math.md, G9).

Given one draw the latent functions at a new input are Gaussian, with mean k(x, Z) L⁻ᵀ g and the
variance the draw leaves open. Averages over draws of what follows from that converge faster than
averages over draws of the latents themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from conjugp._gp.predictor import EXACT, Integration, Predictive, Predictor
from conjugp._gp.temperature import PLAIN
from conjugp._numerics.linalg import cholesky, root_of
from conjugp._sampler.chain import Draws, Target
from conjugp._sampler.sweep import Array
from conjugp.kernels import Kernel
from conjugp.likelihoods import Likelihood

_CHUNK_ELEMENTS = 2**22
_NOISE = 2048  # pairs of latent values that a probability is averaged over, at least


class Group(NamedTuple):
    """Draws with the same kernel parameters."""

    theta: Tensor  # (K, T)
    parts: list[tuple[int, Tensor]]  # number of the first, and g (S', C, M)


class SampledModel(Predictor):
    """All draws of all chains, as a predictive distribution in working units."""

    calibration, shares = PLAIN, None

    def __init__(
        self, target: Target, draws: list[Draws], likelihood: Likelihood, seed: int = 0
    ) -> None:
        self.target, self.draws, self.likelihood, self.seed = target, draws, likelihood, seed
        self.Z = torch.tensor(target.points)
        self.mean = torch.tensor(target.mean)

    @property
    def n_classes(self) -> int:
        return self.target.data.n_classes

    @property
    def n_draws(self) -> int:
        """Draws of all chains together, S."""
        return sum(len(d.g) for d in self.draws)

    def stacked(self, name: str) -> Array:
        """What all draws hold by that name, (chain, draw, ...)."""
        return np.stack([getattr(d, name) for d in self.draws])

    @cached_property
    def groups(self) -> list[Group]:
        """The draws chain after chain, in stretches with the same kernel parameters."""
        firsts = np.cumsum([0, *(len(d.g) for d in self.draws)])
        found: list[Group] = []
        for first, d in zip(firsts[:-1].tolist(), self.draws, strict=True):
            changed = (d.theta[1:] != d.theta[:-1]).any(axis=(1, 2))
            edges = [0, *(np.flatnonzero(changed) + 1).tolist(), len(d.theta)]
            for i, j in pairwise(edges):
                theta = torch.from_numpy(d.theta[i])
                if not found or not torch.equal(found[-1].theta, theta):
                    found.append(Group(theta, []))
                found[-1].parts.append((first + i, torch.from_numpy(d.g[i:j])))
        return found

    def kernels(self, theta: Tensor) -> list[Kernel]:
        """One kernel, or one for each class, with parameters exp(theta), (K, T)."""
        return [self.target.kernel(k, row.numpy()) for k, row in enumerate(theta)]

    def factor(self, theta: Tensor) -> Tensor:
        """L of every kernel, (K, M, M), as the sampler had it."""
        t = self.target
        K = (k(self.Z, self.Z) + t.mean_variance for k in self.kernels(theta))
        return torch.stack([cholesky(k, t.jitter)[0] for k in K])

    @cached_property
    def _first(self) -> tuple[Tensor, Tensor]:
        """L⁻¹ for the first kernel parameters, which in most runs are the only ones."""
        theta = self.groups[0].theta
        return theta, _inverse(self.factor(theta))

    def _inverse_factor(self, theta: Tensor) -> Tensor:
        first, L_inv = self._first
        return L_inv if torch.equal(theta, first) else _inverse(self.factor(theta))

    def __getstate__(self) -> dict[str, object]:
        """Without what can be computed again."""
        return {k: v for k, v in self.__dict__.items() if k not in ("groups", "_first")}

    def given_draws(
        self, X: Tensor, n_copies: int = 1
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Rows and draws, and there the conditional m (n', S', C) and v (n', C or 1).

        In chunks, so that memory is bounded with `n_copies` of m.
        """
        for theta, parts in self.groups:
            L_inv, kernels = self._inverse_factor(theta), self.kernels(theta)
            widest = max(len(g) for _, g in parts) * self.n_classes * n_copies
            size = max(1, _CHUNK_ELEMENTS // (widest + 2 * len(kernels) * len(self.Z)))
            for i in range(0, len(X), size):
                x = X[i : i + size]
                A, _, left = self._conditional(x, kernels, L_inv)
                for first, g in parts:
                    if len(A) == 1:
                        m = (A[0] @ g.reshape(-1, g.shape[2]).T).reshape(len(x), *g.shape[:2])
                    else:
                        m = torch.einsum("cnm,scm->nsc", A, g)
                    yield slice(i, i + len(x)), slice(first, first + len(g)), m + self.mean, left.T

    def prior(self) -> tuple[tuple[Kernel, ...], Tensor]:
        theta = torch.from_numpy(np.concatenate([d.theta for d in self.draws]).mean(0))
        mean = torch.from_numpy(np.concatenate([d.mean for d in self.draws]).mean(0))
        return tuple(self.kernels(theta)), mean

    def untempered(self, X: Tensor, how: Integration = EXACT) -> Tensor:
        """E[p(y | f)] at X, (n, C), however else it might be integrated."""
        return self._averages(X, entropies=False)[0]

    def predictive(self, X: Tensor) -> Predictive:
        """Both from the same latent values (U2)."""
        p, expected = self._averages(X, entropies=True)
        return Predictive(p.numpy(), expected.numpy())

    @torch.no_grad()
    def _averages(self, X: Tensor, entropies: bool) -> tuple[Tensor, Tensor]:
        """Pairs of opposite latent values for every draw of the chains, the same for all rows.

        So a row's answer does not depend on which others are asked for.
        """
        generator = torch.Generator().manual_seed(self.seed)
        S, C = self.n_draws, self.n_classes
        noise = torch.randn(math.ceil(_NOISE / S), S, C, generator=generator, dtype=torch.float64)
        p, H = X.new_zeros(len(X), C), X.new_zeros(len(X))
        for rows, draws, m, v in self.given_draws(X, n_copies=4 if entropies else 3):
            sd = v.sqrt().unsqueeze(1)
            for z in noise[:, draws]:
                for f in (m + sd * z, m - sd * z):
                    each = self.likelihood.prob(f)
                    p[rows] += each.sum(1)
                    if entropies:
                        H[rows] += torch.special.entr(each).sum((1, 2))
        total = p.sum(1, keepdim=True)
        return p / total, H / total[:, 0]

    @torch.no_grad()
    def latent(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of the latent functions at X, both (n, C)."""
        first = X.new_zeros(len(X), self.n_classes)
        second, inner = torch.zeros_like(first), torch.zeros_like(first)
        for rows, draws, m, v in self.given_draws(X, n_copies=3):
            d = m - self.mean
            first[rows] += d.sum(1)
            second[rows] += d.square().sum(1)
            inner[rows] += (draws.stop - draws.start) * v
        S = self.n_draws
        first /= S
        return first + self.mean, inner / S + (second / S - first.square()).clamp(min=0.0)

    @torch.no_grad()
    def sample(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of the latent functions at X, (n_samples, n, C).

        Each comes from one of the chains' draws, spread evenly over them.
        """
        X, index = torch.unique(X, dim=0, return_inverse=True)  # equal inputs have equal latents
        S, C = self.n_draws, self.n_classes
        u = torch.rand((), generator=generator, dtype=torch.float64)
        picks = ((torch.arange(n_samples) + u) * S / n_samples).long().clamp(max=S - 1)
        noise = torch.randn(n_samples, C, len(X), generator=generator, dtype=torch.float64)
        out = torch.empty(n_samples, len(X), C, dtype=torch.float64)
        for theta, parts in self.groups:
            ends = [(first, first + len(g)) for first, g in parts]
            among = torch.searchsorted(picks, torch.tensor(ends)).tolist()
            if among[0][0] == among[-1][1]:
                continue
            A, root = self._joint(X, theta)
            for (first, g), (i, j) in zip(parts, among, strict=True):
                for c in range(C):
                    k, chosen = c % len(A), g[picks[i:j] - first, c]
                    out[i:j, :, c] = self.mean[c] + chosen @ A[k].T + noise[i:j, c] @ root[k].T
        order = torch.randperm(n_samples, generator=generator)
        return out[order][:, index]

    def _conditional(
        self, X: Tensor, kernels: list[Kernel], L_inv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A (K, n, M), the prior variance and what of it a draw leaves open, (K, n)."""
        more = self.target.mean_variance
        A = torch.stack([k(X, self.Z) + more for k in kernels]) @ L_inv.mT
        prior = torch.stack([k.diag(X) + more for k in kernels])
        return A, prior, torch.maximum(prior - A.square().sum(2), 1e-6 * prior)

    def _joint(self, X: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """A (K, n, M), and a root of the covariance that a draw leaves open, (K, n, n)."""
        t, kernels = self.target, self.kernels(theta)
        A, prior, left = self._conditional(X, kernels, self._inverse_factor(theta))
        if t.Z is not None:  # the sparse model's latents are independent given the inducing values
            return A, torch.diag_embed(left.sqrt())
        left = torch.stack([k(X, X) + t.mean_variance for k in kernels]) - A @ A.mT
        left += torch.diag_embed(1e-9 * prior)  # rounding of the difference
        return A, torch.stack([root_of(one) for one in left])


def _inverse(L: Tensor) -> Tensor:
    eye = torch.eye(L.shape[-1], dtype=L.dtype)
    return torch.linalg.solve_triangular(L, eye.expand_as(L), upper=False)
