"""A fitted model: what prediction needs, in working units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conjugp._gp.covariance import NONE, Covariance, Full, kl, quadratic
from conjugp._gp.features import basis, unexplained
from conjugp._gp.posterior import State, moments
from conjugp._gp.prediction import predict_proba
from conjugp._gp.predictor import EXACT, Integration, Predictive, Predictor, entropy
from conjugp._gp.temperature import PLAIN, Calibration, fit_calibration, variance_scales
from conjugp._numerics.linalg import root_of
from conjugp._persistence.codec import in_checkpoints
from conjugp._rows.dataset import Data
from conjugp.kernels import Kernel
from conjugp.likelihoods._base import Likelihood

if TYPE_CHECKING:
    from typing_extensions import Self

_CHUNK_ELEMENTS = 2**21  # kernel values at a time: few enough for a processor's cache
_SITE_ELEMENTS = 2**21  # rows times classes whose sites are computed at a time


@in_checkpoints
@dataclass(frozen=True)
class Model(Predictor):
    """q(f) at any input.

    The mean stands on all inducing points, the covariance on the first of them, as many as
    `L_inv` has rows; outside their span it is the prior's (docs/math.md, Q7). With no covariance
    q is a point, the mode of the posterior, and its "ELBO" the log posterior less a constant.
    """

    likelihood: Likelihood
    bound: str
    kernels: tuple[Kernel, ...]  # 1, or C
    Z: Tensor  # (M, D)
    w: Tensor  # (C, M), whitened weights
    alpha: Tensor  # (C, M), L⁻ᵀ w
    mean: Tensor  # (C,)
    L_inv: Tensor  # (K, M_v, M_v)
    S: Covariance
    calibration: Calibration = PLAIN
    shares: Tensor | None = None  # of the classes among the rows (C,)
    kept: float = 1.0  # the share of the conditional variance that rows were fitted with (Q9)

    @property
    def n_classes(self) -> int:
        """C."""
        return len(self.mean)

    def prior(self) -> tuple[tuple[Kernel, ...], Tensor]:
        return self.kernels, self.mean

    def is_finite(self) -> bool:
        """Whether all of its numbers are."""
        return all(bool(torch.isfinite(x).all()) for x in (self.alpha, self.mean, self.S.R))

    @torch.no_grad()
    def latent(self, X: Tensor, variance: bool = True) -> tuple[Tensor, Tensor]:
        """Mean and variance of q(f) at X (n, D), both (n, C), in chunks.

        Without `variance` it is not computed, and 0.
        """
        elements = _CHUNK_ELEMENTS if X.device.type == "cpu" else 8 * _CHUNK_ELEMENTS
        size = max(1, elements // max(len(self.Z) * len(self.kernels), self.n_classes))
        parts = [self._latent(X[i : i + size], variance) for i in range(0, max(len(X), 1), size)]
        m, v = zip(*parts, strict=True)
        # One variance for all classes is not copied for each of them.
        return torch.cat(m), torch.cat(v).expand(len(X), self.n_classes)

    def untempered(self, X: Tensor, how: Integration = EXACT) -> Tensor:
        scale = self.calibration.variance_scale
        m, v = self.latent(X, variance=scale > 0.0)
        return predict_proba(self.likelihood, m, v, *how, variance_scale=scale)

    def predictive(self, X: Tensor) -> Predictive:
        m, v = self.latent(X)
        if self.S.family == NONE:
            p = self.likelihood.prob(m.double()).cpu().numpy()
            return Predictive(p, entropy(p))
        expected = self.likelihood.expected_entropy(m, v).cpu().numpy()
        return Predictive(predict_proba(self.likelihood, m, v).cpu().numpy(), expected)

    def calibrated(self, data: Data) -> Self:
        """With the temperature, and the share of the variance, that labelled rows ask for (P6)."""
        m, v = self.latent(data.X)
        scales, y, weight = variance_scales(self.S.family, self.kept), data.y, data.weight
        found = fit_calibration(self.likelihood, m, v, y, weight, scales, self.shares)
        return self.with_calibration(found, self.shares)

    def _latent(self, X: Tensor, variance: bool) -> tuple[Tensor, Tensor]:
        K = torch.stack([k(X, self.Z) for k in self.kernels])  # (K, B, M)
        # In float64: thousands of terms that cancel would leave float32 four digits.
        wide, alpha = K.double(), self.alpha.double()
        m = wide[0] @ alpha.T if len(K) == 1 else torch.einsum("cbm,cm->bc", wide, alpha)
        m = (m + self.mean).to(K.dtype)
        if self.S.family == NONE or not variance:
            return m, m.new_zeros(len(X), 1)
        A = self._features(K)
        prior = torch.stack([k.diag(X) for k in self.kernels])
        v = (unexplained(prior, A.square().sum(1)) + quadratic(self.S, A)).T
        return m, v

    def _features(self, K: Tensor) -> Tensor:
        """A (K, M_v, B) from k(X, Z) (K, B, M)."""
        return self.L_inv @ K[:, :, : self.L_inv.shape[-1]].mT

    @torch.no_grad()
    def sample(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of the latent functions at X (n, D): (n_samples, n, C)."""
        if self.S.family == NONE:
            return self.latent(X)[0].expand(n_samples, len(X), self.n_classes)
        K = torch.stack([k(X, self.Z) for k in self.kernels])
        A = self._features(K)
        draws = []
        noise = torch.randn(
            self.n_classes, len(X), n_samples, generator=generator, dtype=torch.float64
        ).to(X)
        for c in range(self.n_classes):
            k = c % len(self.kernels)
            Ac, W = A[k], self.S.root(A, c)
            cov = self.kernels[k](X, X) - Ac.T @ Ac + W.T @ W
            draws.append(
                (K[k] @ self.alpha[c] + self.mean[c]).unsqueeze(1) + root_of(cov) @ noise[c]
            )
        return torch.stack(draws, -1).transpose(0, 1)

    @torch.no_grad()
    def elbo(self, data: Data, chunk: int = 4096) -> float:
        """Σ weight·bound - KL(q ‖ prior), with all constants (Q2)."""
        value = 0.0
        chunk = max(1, min(chunk, _SITE_ELEMENTS // self.n_classes))
        for i in range(0, len(data.y), chunk):
            part = data.rows(i, i + chunk)
            m, v = self.latent(part.X)
            site = self.likelihood.site(part.y, m, v, self.bound)
            value += float((site.bound.double() * part.weight.double()).sum())
        return value - self.kl()

    def kl(self) -> float:
        """KL(q(u) ‖ p(u))."""
        return float(0.5 * self.w.double().square().sum()) + float(kl(self.S, self.n_classes))


def coupled(state: State, likelihood: Likelihood, bound: str, jitter: float | None = None) -> Model:
    """The model of a variational fit: mean and full covariances on the same inducing points."""
    kernels = tuple(state.template.with_theta(t) for t in state.theta.detach())
    b = basis(kernels, state.Z.detach(), jitter)
    q = moments(state.q)
    alpha = (b.L_inv.mT @ q.w.unsqueeze(-1)).squeeze(-1)
    return Model(
        likelihood, bound, kernels, b.Z, q.w, alpha, state.mean.detach().clone(), b.L_inv, Full(q.R)
    )
