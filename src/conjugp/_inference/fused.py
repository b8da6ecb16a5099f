"""The step of `svi` and its hyperparameter gradients in closed form, for one shared kernel.

The same numbers as the readable step to rounding, without autograd, without waiting for a device,
and with large temporaries that are kept. Rows come first here: features are Aᵀ (B, M), so that
sums over inducing points run along memory. With S = P⁻¹ the product U = Aᵀ S serves twice, for
v = diag(U A) and for ∂v/∂A = 2U, which saves one of the three products of C·M²·B.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from conjugp._gp.features import LEAST_RESIDUAL, unexplained
from conjugp._gp.posterior import Posterior
from conjugp._inference import svi
from conjugp._inference.elementwise import STATIONARY, site_sums, squared_distances
from conjugp._inference.moving import Learned, Leaves, Moving, finite
from conjugp._inference.steps import Batch, MinibatchStep, ReadableStep, Sizes
from conjugp._numerics.linalg import FIRST_JITTER, inverse_factors
from conjugp._rows.group import ALONE
from conjugp.kernels import Kernel
from conjugp.kernels._parameters import LOG_BOUND
from conjugp.kernels._stationary import MOST_SQUARE
from conjugp.likelihoods._base import Likelihood
from conjugp.likelihoods._logistic_softmax import LogisticSoftmax


class Sums(NamedTuple):
    """What a batch says. All but `kl` and `failed` are sums over its rows: machines add theirs."""

    h: Tensor  # (C, M), the sums of Q3
    P: Tensor  # (M, C, M), likewise, without the prior's identity
    bound: Tensor  # scalar
    gradients: list[Tensor | None]  # of minus the bound over the total weight, leaf by leaf
    kl: Tensor  # scalar
    failed: Tensor  # scalar, 0 where both matrices could be factorised


def applies(kernel: Kernel, likelihood: Likelihood, bound: str) -> bool:
    """Whether there is a closed form for a kernel shared by all classes, and this bound."""
    known = type(kernel) in STATIONARY and type(likelihood) is LogisticSoftmax
    return known and bound in likelihood.bounds


class _Solved(NamedTuple):
    """A posterior solved for its marginals."""

    w: Tensor  # (C, M)
    S: Tensor  # (C, M, M)
    kl: Tensor  # scalar


class _Features(NamedTuple):
    """Aᵀ (B, M) and what rows keep of the residual (B,) (Q9), with what their gradients need."""

    A: Tensor
    residual: Tensor
    at_floor: Tensor  # (B,), where rounding had the residual below
    weight: Tensor  # (D,), 1/ℓ²
    variance: Tensor  # ()
    L_inv: Tensor  # (M, M), of the kernel of variance 1
    root: Tensor  # (M, M), the same times the root of the variance: A = k rootᵀ
    Z: Tensor  # (M, D) ...
    X: Tensor  # ... and (B, D), shifted alike
    rows: tuple[Tensor, Tensor]  # r² and k of rows and Z, (B, M)
    inducing: tuple[Tensor, Tensor]  # of Z alone, (M, M)


class ClosedForm:
    """One step in two halves: `evaluate` a batch, then `update` q by what it says."""

    def __init__(
        self,
        kernel: Kernel,
        likelihood: Likelihood,
        bound: str,
        leaves: Leaves,
        *,
        batch: int,
        total: float,
        learned: Learned,
        jitter: float | None = None,
        kept: float = 1.0,
    ) -> None:
        """`batch`: rows of the largest one; `total`: the weight of all rows."""
        self.likelihood, self.bound, self.kind = likelihood, bound, STATIONARY[type(kernel)]
        self.farthest = type(kernel).farthest  # type: ignore[attr-defined]
        self.total, self.learned, self.kept = total, learned, kept
        Z, C, (M, D) = leaves.Z, len(leaves.mean), leaves.Z.shape
        self.jitter = FIRST_JITTER[Z.dtype] if jitter is None else jitter
        self.eye = torch.eye(M, dtype=Z.dtype, device=Z.device)
        self.half_lower = torch.ones_like(self.eye).tril_() - 0.5 * self.eye
        self.shift = _shift(leaves)
        self._side = torch.cuda.Stream(Z.device) if Z.is_cuda else None
        # One of size (B, C, M), which two products use in turn.
        self._U, self._X, self._X2 = (Z.new_empty(batch, n) for n in (C * M, D, D))
        self._A, self._r2, self._k, self._dA, self._dK = (Z.new_empty(batch, M) for _ in range(5))
        self._R, self._S, self._P = (Z.new_empty(C, M, M) for _ in range(3))
        self._L_inv = Z.new_empty(1, M, M)
        if Z.is_cuda:
            self._L_inv = self._L_inv.mT  # as cuBLAS has it
        self._info = torch.empty(C + 1, dtype=torch.int32, device=Z.device)  # of all P, and of K_ZZ
        self._scaled, self._EX, self._EZ, self._dZ = (Z.new_empty(M, D) for _ in range(4))
        self._r2_ZZ, self._k_ZZ, self._E_ZZ = (Z.new_empty(M, M) for _ in range(3))

    @torch.no_grad()
    def evaluate(
        self, leaves: Leaves, q: Posterior, X: Tensor, y: Tensor, weight: Tensor, gradients: bool
    ) -> Sums:
        """Rows X (B, D) and y (B,), of weights (B,) that carry the scale N/B (Q1-Q3).

        The sums stand in buffers that the next call writes over.
        """
        theta, Z, mean = leaves
        B, C, M = len(y), len(mean), len(Z)
        if self._side is None:
            solved, f = self._solve(q), self._features(theta, Z, X)
        else:
            # Two chains of small factorisations, which a GPU can do side by side.
            here = torch.cuda.current_stream(Z.device)
            self._side.wait_stream(here)
            with torch.cuda.stream(self._side):
                solved = self._solve(q)
            f = self._features(theta, Z, X)
            here.wait_stream(self._side)
        A, S, w = f.A, solved.S, solved.w
        U = torch.mm(A, S.view(C * M, M).T, out=self._U[:B]).view(B, C, M)
        v = torch.bmm(A.unsqueeze(1), U.mT).squeeze(1).clamp_min_(0).add_(f.residual.unsqueeze(1))
        # Adam minimises, and per unit of weight the steps do not depend on N.
        share = -1.0 / self.total if gradients else None
        sites = site_sums(self.likelihood, self.bound, y, A @ w.T, mean, v, weight, share)
        slopes: list[Tensor | None] = [None, None, None]
        if sites.dm is not None and sites.dv is not None:
            if self.learned.theta or self.learned.Z:
                slopes[:2] = self._gradients(f, theta, U, w, sites.dm, sites.dv)
            if self.learned.mean:
                slopes[2] = sites.dm.sum(0)
        # No one needs U any more: its place is taken by A∘precision.
        scaled = torch.mul(A.unsqueeze(1), sites.theta.unsqueeze(-1), out=U)
        P = torch.mm(A.T, scaled.view(B, C * M), out=self._P.view(M, C * M)).view(M, C, M)
        failed = self._info.ne(0).sum()
        return Sums(sites.r.T @ A, P, sites.bound, slopes, solved.kl, failed)

    @torch.no_grad()
    def far(self, leaves: Leaves) -> Tensor:
        """Whether an inducing point is so far out that distances to it lose their digits, ()."""
        theta, Z, _ = leaves
        Z = Z if self.shift is None else Z - self.shift
        z2 = Z.square() @ _weight(theta).expand(Z.shape[1])
        return ~(z2.amax() <= MOST_SQUARE[Z.dtype])

    @torch.no_grad()
    def update(self, q: Posterior, sums: Sums, rho: float | Tensor) -> None:
        """Natural-gradient step q <- (1 - rho) q + rho q*, in place (Q4)."""
        svi.update_in_place(q, sums.h, sums.P.transpose(0, 1), rho)

    def _solve(self, q: Posterior) -> _Solved:
        """Factorise P: w = P⁻¹h, S = P⁻¹ and the KL (Q1, Q2)."""
        (C, M), R = q.h.shape, self._R
        inverse_factors(q.P, R, self._info[:C], self.eye)
        S = torch.bmm(R.mT, R, out=self._S)
        # Not S h: where q is sure h is large, S tiny, and its rounding errors are not.
        w = torch.bmm(torch.bmm(q.h.unsqueeze(1), R.mT), R).squeeze(1)
        trace = torch.diagonal(S, dim1=1, dim2=2).sum()
        log_det = torch.diagonal(R, dim1=1, dim2=2).log().sum()
        kl = 0.5 * (w.square().sum() + trace - C * M) - log_det
        return _Solved(w, S, kl)

    def _features(self, theta: Tensor, Z: Tensor, X: Tensor) -> _Features:
        """Whitened features of X (Q1)."""
        B, D = X.shape
        parameters = theta[0].clamp(-LOG_BOUND, LOG_BOUND).exp()
        weight, variance = parameters[:-1].square().reciprocal().expand(D), parameters[-1]
        if self.shift is not None:
            Z, X = Z - self.shift, torch.sub(X, self.shift, out=self._X[:B])
        scaled = torch.mul(Z, weight, out=self._scaled)
        r2_ZZ, r2 = torch.mm(Z, scaled.T, out=self._r2_ZZ), self._r2[:B]
        z2, x2 = torch.diagonal(r2_ZZ).clone(), torch.mul(X, X, out=self._X2[:B]) @ weight
        r2 = squared_distances(torch.mm(X, scaled.T, out=r2), x2, z2, self.farthest)
        k = self.kind.value(r2, self._k[:B])
        # On the diagonal z² - 2z² + z², which is zero without rounding.
        r2_ZZ = squared_distances(r2_ZZ, z2, z2, self.farthest)
        k_ZZ = self.kind.value(r2_ZZ, self._k_ZZ)
        # Jitter is relative to the variance, so the factor of variance 1 does for all of them.
        L_inv = self._L_inv[0]
        K = torch.add(k_ZZ, self.eye, alpha=self.jitter).unsqueeze(0)
        inverse_factors(K, self._L_inv, self._info[-1:], self.eye)
        root = L_inv * variance.sqrt()
        A = torch.mm(k, root.T, out=self._A[:B])
        residual = unexplained(variance, torch.linalg.vector_norm(A, dim=1).square_())
        at_floor = residual <= LEAST_RESIDUAL * variance
        return _Features(
            *(A, residual.mul_(self.kept), at_floor, weight, variance, L_inv, root, Z, X),
            *((r2, k), (r2_ZZ, k_ZZ)),
        )

    def _gradients(
        self, f: _Features, theta: Tensor, U: Tensor, w: Tensor, dm: Tensor, dv: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Derivatives of Σ dm·m + dv·v in the kernel's log parameters and Z."""
        B, M = f.A.shape
        d_residual = dv.sum(1).mul_(self.kept).masked_fill_(f.at_floor, 0.0)
        dA = torch.bmm((2.0 * dv).unsqueeze(1), U, out=self._dA[:B].unsqueeze(1)).view(B, M)
        dA.addmm_(dm, w).addcmul_(f.A, d_residual.unsqueeze(1), value=-2.0)
        # Through A = k rootᵀ to r² between rows and Z ...
        E = torch.mm(dA, f.root, out=self._dK[:B]).mul_(self.kind.slope(*f.rows))
        # ... and through the Cholesky factor: K̄ = -L⁻ᵀ Φ(Ā Aᵀ) L⁻¹, Φ the lower triangle with
        # half its diagonal, and the symmetric part of that.
        G = (dA.T @ f.A).mul_(self.half_lower)
        K = f.L_inv.T @ G @ f.L_inv
        # Without its factor of -1/2.
        E_ZZ = torch.add(K, K.T, out=self._E_ZZ).fill_diagonal_(0.0)
        E_ZZ.mul_(self.kind.slope(*f.inducing))
        columns = E.sum(0).sub_(E_ZZ.sum(0))
        # Minus ∂r²/∂z: Σ_b E_bi (x_b - z_i), and both sides of k(Z, Z).
        EX, EZ = torch.mm(E.T, f.X, out=self._EX), torch.mm(E_ZZ, f.Z, out=self._EZ)
        push = torch.sub(EX, EZ, out=self._dZ).addcmul_(columns.unsqueeze(1), f.Z, value=-1.0)
        d_theta = None
        if self.learned.theta:
            # A longer lengthscale moves all points towards the origin, Z and rows alike.
            moved = EX.add_(push).mul_(f.Z).sum(0).sub_(E.sum(1) @ self._X2[:B])
            d_length = 2.0 * f.weight * moved
            if theta.shape[1] == 2:
                d_length = d_length.sum(0, keepdim=True)
            # A grows like the root of the variance, and the residual like the variance.
            d_variance = torch.diagonal(G).sum() + f.variance * d_residual.sum()
            inside = theta.abs() <= LOG_BOUND
            d_theta = torch.cat([d_length, d_variance.view(1)]).unsqueeze(0) * inside
        return d_theta, push.mul_(-2.0 * f.weight) if self.learned.Z else None


class ClosedFormStep(MinibatchStep):
    """Steps in closed form; readable ones where that has not enough digits."""

    def __init__(self, moving: Moving, batch: int) -> None:
        """`batch`: rows of the largest one."""
        s, cfg = moving.state, moving.settings
        self.moving, self.readable = moving, ReadableStep(moving, ALONE)
        self.form = ClosedForm(
            s.template,
            cfg.likelihood,
            cfg.bound,
            moving.leaves,
            batch=batch,
            total=moving.total,
            learned=moving.learned,
            jitter=cfg.jitter,
            kept=cfg.kept,
        )
        moving.own_q()
        moving.q_in_place = True

    def take(self, batch: Batch, sizes: Sizes) -> float:
        """One natural-gradient step and, once q has settled a little, one Adam step."""
        elbo = self._closed(batch, sizes)
        return self.readable.take(batch, sizes) if elbo is None else elbo

    def _closed(self, batch: Batch, sizes: Sizes) -> float | None:
        """The same; None, and nothing done, where a matrix or a distance lacks digits."""
        moving, s, rows = self.moving, self.moving.state, batch.data
        gradients, leaves = moving.settled, moving.values
        if bool(self.form.far(leaves)):
            return None
        sums = self.form.evaluate(leaves, s.q, rows.X, rows.y, batch.scale * rows.weight, gradients)
        if bool(sums.failed):
            return None
        elbo = finite(sums.bound - sums.kl)
        self.form.update(s.q, sums, sizes.rho)
        s.step += 1
        if gradients:
            for leaf, gradient in zip(moving.leaves, sums.gradients, strict=True):
                leaf.grad = gradient
            moving.move(sizes.rate)
        return elbo


def _weight(theta: Tensor) -> Tensor:
    """1/ℓ², (D,) or (1,)."""
    return torch.exp(-2.0 * theta[0, :-1].clamp(-LOG_BOUND, LOG_BOUND))


def _shift(leaves: Leaves) -> Tensor | None:
    """What to subtract from all rows: x² - 2xz + z² loses digits if they are far from zero."""
    theta, Z = leaves.theta.detach(), leaves.Z.detach()
    shift, spread = Z.mean(0), Z.var(0, correction=0)
    excess = shift.square() - 4.0 * spread
    weight = _weight(theta)
    # Working units have a spread of one.
    return None if bool(((excess <= 1.0).all()) & ((weight * excess).sum() <= 1.0)) else shift
