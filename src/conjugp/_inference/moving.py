"""What loops share: a state, and what moves its hyperparameters and takes them back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjugp._gp.features import Basis, Features, basis, features
from conjugp._gp.posterior import Moments, Posterior, State
from conjugp._inference import svi
from conjugp._inference.adam import Adam
from conjugp._inference.settings import Progress, Settings
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data, Dataset
from conjugp._rows.group import Group

_MAX_FAILURES = 8
AT_REST = 0.01  # all values of a column that is at rest are nearer to 0


def at_rest(X: Tensor) -> Tensor:
    """Which columns of rows in working units (n, D) say nothing, or next to nothing (D,)."""
    return X.abs().amax(0) < AT_REST


class Leaves(NamedTuple):
    """The hyperparameters of a fit."""

    theta: Tensor  # (K, T), log kernel parameters
    Z: Tensor  # (M, D)
    mean: Tensor  # (C,)


class Learned(NamedTuple):
    """Which of them move."""

    theta: bool
    Z: bool
    mean: bool


class Moving:
    """A state, of which loops and steps move q, and its hyperparameters, which move here.

    Hyperparameters are changed in place, q is replaced, where `q_in_place` does not say otherwise.
    """

    def __init__(self, state: State, total: float, settings: Settings) -> None:
        """`total`: the weight of all rows."""
        self.state, self.total, self.settings = state, total, settings
        self.learned = Learned(settings.learn_kernel, settings.learn_inducing, settings.learn_mean)
        self.learning = any(self.learned)
        self.rate = settings.learning_rate
        self.factors = (settings.kernel_rate, settings.inducing_rate, 1.0)  # of the rate, by leaf
        self.q_in_place = False
        self.still: Tensor | None = None  # (D,) columns in which inducing points stay: 0, else 1
        self._failures = 0
        groups = settings.groups
        shared = None if groups is None else state.template.shared(groups)
        self._shared = None if shared is None else shared.to(state.Z.device)
        self._start = Leaves(*(x.detach().clone() for x in (state.theta, state.Z, state.mean)))
        self._begin()

    def _begin(self) -> None:
        """An Adam that remembers nothing, for the state at hand."""
        s = self.state
        self.leaves = Leaves(s.theta, s.Z, s.mean)
        for leaf, moves in zip(self.leaves, self.learned, strict=True):
            leaf.requires_grad_(moves)
        self.__dict__.pop("adam", None)

    def keep_still(self, X: Tensor) -> None:
        """Leave inducing points where they are in columns of these rows that are at rest.

        Adam moves them by its rate in each, however little a gradient says.
        """
        if self.learned.Z:
            self.still = (~at_rest(X)).to(self.state.Z)

    @cached_property
    def adam(self) -> Adam:
        """The optimiser of the hyperparameters."""
        # Short second-moment memory: a fit takes hundreds of steps, not tens of thousands.
        return Adam(list(self.values), self.settings.momentum, beta2=0.99)

    @property
    def values(self) -> Leaves:
        """The hyperparameters without their gradients."""
        return Leaves(*(leaf.detach() for leaf in self.leaves))

    @property
    def settled(self) -> bool:
        """Whether hyperparameters are learned and q is far enough for it."""
        return self.learning and self.state.step >= self.settings.settled

    # --- gradients --------------------------------------------------------------------------------

    def features(self, X: Tensor, gradients: bool) -> tuple[Basis, Features]:
        """Of rows X (B, D), with the graph that leads to the hyperparameters if that is wanted."""
        s, cfg = self.state, self.settings
        with torch.set_grad_enabled(gradients and (cfg.learn_kernel or cfg.learn_inducing)):
            b = basis(s.kernels, s.Z, cfg.jitter, cfg.kept)
            return b, features(b, X)

    def collect(self, f: Features, grads: svi.Gradients, scale: float) -> None:
        """Add a batch's share of the gradients to the leaves, through the graph of its features."""
        # Adam minimises, and per unit of weight the steps do not depend on N.
        c, mean = -scale / self.total, self.leaves.mean
        if f.A.requires_grad:
            # As one number: handing gradients to autograd makes torch import its compiler.
            g = grads.features
            with torch.enable_grad():
                surrogate = c * ((f.A * g.A).sum() + (f.residual * g.residual).sum())
            surrogate.backward()
        if mean.requires_grad:
            g = c * grads.mean
            mean.grad = g if mean.grad is None else mean.grad + g

    def gradients(self, wanted: bool) -> list[Tensor]:
        """Those of the leaves that are learned, to be changed in place; zero where none came."""
        leaves = [leaf for leaf in self.leaves if leaf.requires_grad] if wanted else []
        for leaf in leaves:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def whole(self, leaves: Leaves, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the leaves with what the priors on kernel and means add to them.

        Lengthscales of features that have one together have its gradient, each of them.
        """
        d_theta, d_Z, d_mean = gradients
        strength = self.settings.kernel_prior / self.total
        if strength and d_theta is not None:
            moved = leaves.theta - self._start.theta
            d_theta = d_theta + strength * self.state.template.prior_slope(moved, d_theta)
        if strength and d_mean is not None:
            d_mean = d_mean + strength * (leaves.mean - self._start.mean)
        if d_Z is not None and self.still is not None:
            d_Z = d_Z * self.still
        if d_theta is not None and self._shared is not None:
            sums = torch.zeros_like(d_theta).index_add_(1, self._shared, d_theta)
            d_theta = sums.index_select(1, self._shared)
        return [d_theta, d_Z, d_mean]

    def move(self, rate: float) -> None:
        """One Adam step on the hyperparameters from the gradients collected so far."""
        gradients = self.whole(self.values, [leaf.grad for leaf in self.leaves])
        self.adam.descend(gradients, [rate * factor for factor in self.factors])
        for leaf in self.leaves:
            leaf.grad = None

    def rest(self) -> None:
        """Hyperparameters are plain tensors again."""
        for leaf in self.leaves:
            leaf.requires_grad_(False).grad = None

    # --- ways back --------------------------------------------------------------------------------

    def snapshot(self) -> State:
        """The state as it stands, which later steps do not change."""
        s = self.state
        q = Posterior(s.q.h.clone(), s.q.P.clone()) if self.q_in_place else s.q
        theta, Z, mean = (x.detach().clone() for x in (s.theta, s.Z, s.mean))
        return replace(s, theta=theta, Z=Z, mean=mean, q=q)

    def own_q(self) -> None:
        """Before steps that change q in place: the q given belongs to whoever gave it."""
        q = self.state.q
        self.state.q = Posterior(q.h.clone(), q.P.clone())

    def is_finite(self) -> bool:
        """Whether the last step has left numbers."""
        s = self.state
        changed = (s.theta, s.Z, s.mean, s.q.h, s.q.P)
        return all(bool(torch.isfinite(x.detach()).all()) for x in changed)

    def go_back(self, good: State, error: Exception | None = None) -> None:
        """Go back to the last good state and take smaller steps from there, if the `error` lets."""
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            # Hyperparameters that lead nowhere stay where they are, and q goes on alone.
            self.learning = False
        if self._failures > 2 * _MAX_FAILURES:
            if isinstance(error, NotPositiveDefiniteError):
                raise error
            raise FloatingPointError(
                "the fit kept leaving the range of floating-point numbers; try dtype='float64', "
                "a smaller learning_rate, or learn_hyperparameters=False"
            )
        self.state = good
        self.state = self.snapshot()
        self.rate *= 0.5
        self._begin()

    def checkpoint(self) -> list[Any]:
        """Where it stands, for a checkpoint."""
        adam = [self.adam.first, self.adam.second, self.adam.count]
        return [self.state, adam, self.rate, self._failures]

    def restore(self, checkpoint: list[Any]) -> None:
        """Go back there."""
        self.state, adam, self.rate, self._failures = checkpoint
        self.learning = self.learning and self._failures <= _MAX_FAILURES
        self._begin()
        self.adam.first, self.adam.second, self.adam.count = adam


OF_A_RANK = "the rows of a rank left the range of floating-point numbers"


def evaluated(
    moving: Moving,
    part: Data,
    q: Moments,
    scale: float,
    gradients: bool,
    rough: bool | None = None,
    batch: bool = True,
    known: Features | None = None,
) -> svi.Statistics:
    """Statistics of some rows; adds their share of the gradients to the leaves.

    Their features are computed where they are not `known`.

    `rough`: whether five digits of E[log p] do; the settings say so where it is None. `batch`:
    whether the step to come is one that nobody takes back (S2).
    """
    if not part.n:
        return nothing(moving.state.q)
    cfg, mean = moving.settings, moving.state.mean.detach()
    rough = cfg.rough if rough is None else rough
    f = moving.features(part.X, gradients)[1] if known is None else known
    args = q, cfg.likelihood, cfg.bound, bare(f), part.y, mean, part.weight, gradients
    stats, grads = svi.evaluate(*args, rough=rough, batch=batch)
    if grads is not None:
        moving.collect(f, grads, scale)
    return stats


def over_ranks(
    moving: Moving, group: Group, work: Callable[[], svi.Statistics], gradients: bool
) -> svi.Statistics:
    """The statistics, and gradients in the leaves, of the rows of all ranks, from those here.

    What fails on one rank fails on all, so that they stay together.
    """
    if group.size == 1:
        return work()
    q = moving.state.q
    failed = q.h.new_zeros(1)
    try:
        stats = work()
    except (NotPositiveDefiniteError, FloatingPointError):
        stats = nothing(q)
        failed += 1
    stats = svi.pooled(stats, [*moving.gradients(gradients), failed], group)
    if failed:
        raise FloatingPointError(OF_A_RANK)
    return stats


def nothing(q: Posterior) -> svi.Statistics:
    """The statistics of no rows."""
    return svi.Statistics(torch.zeros_like(q.h), torch.zeros_like(q.P), q.h.new_zeros(()))


def bare(f: Features) -> Features:
    """Features without their graph."""
    return Features(f.A.detach(), f.residual.detach())


def finite(value: float | Tensor, what: str = "the ELBO") -> float:
    """The number, if it is one."""
    if not math.isfinite(value):
        raise FloatingPointError(f"{what} is not finite")
    return float(value)


@dataclass(frozen=True)
class Loop:
    """A fit that is under way."""

    moving: Moving
    data: Dataset
    generator: torch.Generator
    stage: str = "fit"
    on_progress: Callable[[Progress], None] | None = None
    journal: Journal = field(default_factory=Journal)

    def report(self, epoch: float, n_epochs: float, value: float) -> None:
        """Tell who listens about an epoch or a round."""
        if self.on_progress is None:
            return
        cfg = self.moving.settings
        # Fitted with less variance, what rises is another bound, less a constant (Q9).
        measure = "ELBO" if cfg.kept == 1.0 else "relaxed ELBO"
        measure = "log evidence" if cfg.inference == "ep" else measure
        self.on_progress(Progress(self.stage, epoch, n_epochs, value, measure))

    def keep(self, **own: Any) -> None:
        """Write where the fit stands: what every loop has, and what this one has."""
        generator = self.generator.get_state()
        self.journal.keep({"moving": self.moving.checkpoint(), "generator": generator, **own})

    def left_off(self) -> dict[str, Any] | None:
        """Go back to where an earlier run stood, if there was one; what its loop has kept."""
        loop = self.journal.left_off()
        if loop is not None:
            self.moving.restore(loop["moving"])
            self.generator.set_state(loop["generator"])
        return loop
