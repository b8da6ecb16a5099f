"""The variational fit with one set of inducing points: batches, step sizes, hyperparameters, stop.

Natural-gradient steps on q and Adam steps on kernels, prior means and inducing points come from
the same pass over a batch. Full batch, the ELBO itself decides on every step. With many classes
a minibatch step may look at some of them only (docs/math.md, C1-C4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conjugp._gp.features import Features, basis, features, own_features
from conjugp._gp.posterior import Moments, Posterior, class_kl, kl, marginals, moments
from conjugp._gp.state import State
from conjugp._inference import classes, svi
from conjugp._inference.adam import Adam, move
from conjugp._inference.fused import FusedStep, Learned, Leaves, applies
from conjugp._inference.passes import fast
from conjugp._inference.rounds import Planned, Rounds
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._persistence.codec import in_checkpoints
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data, Dataset
from conjugp.likelihoods._base import Likelihood
from conjugp.likelihoods._logistic_softmax import LogisticSoftmax

ROUND = 50  # steps between two looks at a noisy ELBO
_MAX_FAILURES = 8
# Sites of a fit from which the gain of compiled passes exceeds the second that loading them takes.
_WORTH_COMPILING = 2**23
# In a step on some of the classes each brings so many rows of its own, beside those in the batch.
_OWN_ROWS = 4
_GAP_ROWS = 512  # rows that stand for all when the price of subsampling classes is computed
_CLASS_CHUNK = 128  # classes at a time where all are needed


@dataclass(frozen=True)
class Settings:
    """What a variational fit is told; the state is elsewhere."""

    likelihood: Likelihood
    bound: str
    learn_kernel: bool = True
    learn_mean: bool = True
    learn_inducing: bool = False
    learning_rate: float = 0.05
    batch_size: int | None = None
    # Classes a minibatch step samples beside the labels of its batch; None: it sums over all.
    # Full-batch sweeps always sum over all.
    class_batch: int | None = None
    max_epochs: float = 100
    max_steps: int | None = None
    tol: float = 1e-3
    step_exponent: float = 0.6
    first_step: int = 1  # the first natural-gradient step has size first_step ** -step_exponent
    min_step: float = 0.05
    chunk_size: int = 4096
    # Strength of a Gaussian prior on log kernel parameters and prior means around their start, in
    # nats.
    kernel_prior: float = 0.0
    jitter: float | None = None
    # Minibatch steps that ranks take on their own rows between two sums over all.
    local_steps: int = 1
    momentum: float = 0.9  # Adam's
    # What its rate is multiplied by, for kernels and for inducing points.
    kernel_rate: float = 1.0
    inducing_rate: float = 1.0
    settled: int = 5  # steps of q alone, before it says anything about hyperparameters
    kept: float = 1.0  # the share of the variance given the inducing points that rows keep (Q9)
    inference: str = "vi"  # or "ep", which has no bound
    rough: bool = False  # whether five digits of E[log p] do for all of the fit


class Progress(NamedTuple):
    """What a fit reports after every epoch or round."""

    stage: str
    epoch: float
    n_epochs: float
    value: float
    measure: str = "ELBO"


@in_checkpoints
@dataclass
class Result:
    """A fitted state and how it came about."""

    state: State
    elbo: float
    epochs: float
    converged: bool
    history: list[float] = field(default_factory=list)
    # What subsampling classes costs at the end, in nats of ELBO per row (C3).
    class_gap: float = 0.0


@dataclass
class OwnSteps:
    """Steps that a rank has taken by itself since the last average."""

    n: int = 0
    weight: float = 0.0
    elbo: float = 0.0  # times the weight
    failed: bool = False


class Batches:
    """Batches of rows, epoch after epoch: the same ones in another order, or always others."""

    def __init__(
        self, data: Dataset, size: int, generator: torch.Generator, shuffled: bool
    ) -> None:
        self.n, self.size, self.generator, self.shuffled = data.n, size, generator, shuffled
        # The last batch takes a short remainder with it.
        self.starts = list(range(0, self.n - size // 2, size))
        self.device = data.like.device if shuffled else torch.device("cpu")
        self.order = torch.empty(0, dtype=torch.int64)  # of rows or, if they stay, of batches
        self.at = len(self.starts)  # batches taken of this epoch

    def next(self) -> slice | Tensor:
        """The rows of the next batch."""
        if self.at == len(self.starts):
            n = self.n if self.shuffled else len(self.starts)
            self.order, self.at = torch.randperm(n, generator=self.generator), 0
            self.order = self.order.to(self.device)
        rows = self._rows(self.at)
        self.at += 1
        return self.order[rows] if self.shuffled else rows

    def then(self) -> slice | None:
        """The stretch of rows that comes after, where that is known."""
        if self.shuffled or self.at == len(self.starts):
            return None
        return self._rows(self.at)

    def _rows(self, at: int) -> slice:
        i = self.starts[at if self.shuffled else int(self.order[at])]
        return slice(i, self.n if i + self.size + self.size // 2 >= self.n else i + self.size)


class Trainer:
    """Runs one fit: holds the state, the optimiser and the data."""

    def __init__(
        self,
        state: State,
        data: Dataset,
        settings: Settings,
        generator: torch.Generator,
        on_progress: Callable[[Progress], None] | None = None,
        stage: str = "fit",
    ) -> None:
        self.state, self.data, self.settings = state, data, settings
        self.generator, self.on_progress, self.stage = generator, on_progress, stage
        self.total = data.total
        self.learning = settings.learn_kernel or settings.learn_mean or settings.learn_inducing
        self._cache: list[Features] | None = None
        self._start_theta, self._start_mean = state.theta.clone(), state.mean.clone()
        self._factors = (settings.kernel_rate, settings.inducing_rate, 1.0)  # of the rate, by leaf
        self._failures = 0
        self._rate = settings.learning_rate
        self._n_others = self._check_class_batch()
        self.journal = Journal()
        self._rough = settings.rough  # ... and for the steps at hand
        self._fused: FusedStep | None = None
        self._adam_move = move
        self._rounds: Rounds | None = None
        # Whether fused steps are taken a round at a time.
        self._on_device = isinstance(data, Data) and data.X.is_cuda
        self._make_optimiser()

    def _make_optimiser(self) -> None:
        s = self.state
        self._leaves = [s.theta.requires_grad_(self.settings.learn_kernel)]
        self._leaves.append(s.Z.requires_grad_(self.settings.learn_inducing))
        self._leaves.append(s.mean.requires_grad_(self.settings.learn_mean))
        # Short second-moment memory: a fit takes hundreds of steps, not tens of thousands.
        leaves = [leaf.detach() for leaf in self._leaves]
        self._adam = Adam(leaves, self.settings.momentum, beta2=0.99, move=self._adam_move)

    def _check_class_batch(self) -> int | None:
        """How many classes a step samples beside its labels; None if it sums over all."""
        cfg, n = self.settings, self.settings.class_batch
        if n is None:
            return None
        if n < 1:
            raise ValueError(f"class_batch must be at least 1, got {n}")
        if not cfg.likelihood.class_parts or cfg.bound not in cfg.likelihood.bounds:
            raise ValueError(
                f"class_batch={n} needs a bound that is a sum over classes; {cfg.bound!r} of "
                f"{cfg.likelihood.name!r} is not"
            )
        if len(self.state.theta) > 1:
            raise ValueError(f"class_batch={n} needs one kernel shared by all classes")
        return n if n < self.data.n_classes - 1 else None

    def fit(self, journal: Journal | None = None) -> Result:
        """Full-batch sweeps or minibatch steps, as the settings say."""
        self.journal = journal or self.journal
        n = self.data.n
        batch = self.settings.batch_size
        try:
            if batch is None or batch >= n:
                return self._fit_full()
            return self._fit_batches(batch)
        finally:
            for leaf in self._leaves:
                leaf.requires_grad_(False).grad = None

    def absorb(self, share: float, n_steps: int) -> float:
        """Add the data's sites to q, for streams; those it holds stay as they are.

        Statistics are sums over points (Q3). The data are this share of all rows so far.
        """
        held, elbo = self.state.q, math.nan
        good, part = self._snapshot(), self.data.rows(0, None)
        for _ in range(n_steps):
            try:
                q = moments(self.state.q)
                gradients = self.learning and self.state.step >= self.settings.settled
                stats = self._pass(part, q, 1.0, gradients)
                elbo = float(stats.bound) / share - float(kl(q))
                if not math.isfinite(elbo):
                    raise FloatingPointError("the ELBO is not finite")
            except (NotPositiveDefiniteError, FloatingPointError):
                self._restore(good)
                continue
            # Not all the way: sites of the tight bound could overshoot.
            self.state.q = Posterior(
                torch.lerp(self.state.q.h, held.h + stats.h, 0.7),
                torch.lerp(self.state.q.P, held.P + stats.P, 0.7),
            )
            self.state.step += 1
            if gradients:
                self._move(self._rate)
        self._report(self.state.step, 0, elbo)
        for leaf in self._leaves:
            leaf.requires_grad_(False).grad = None
        return elbo

    def _statistics(self, part: Data, f: Features, q: Moments) -> svi.Statistics:
        if not part.n:
            return self._nothing()
        cfg, mean = self.settings, self.state.mean.detach()
        args = q, cfg.likelihood, cfg.bound, f, part.y, mean, part.weight, False, self._rough
        return svi.evaluate(*args)[0]

    # --- one pass -----------------------------------------------------------------------------

    def _pass(
        self, part: Data, q: Moments, scale: float, gradients: bool, batch: bool = True
    ) -> svi.Statistics:
        """Statistics of some rows; adds their share of the gradients to the leaves."""
        s, cfg = self.state, self.settings
        if not part.n:
            return self._nothing()
        with torch.set_grad_enabled(gradients and (cfg.learn_kernel or cfg.learn_inducing)):
            b = basis(s.kernels, s.Z, cfg.jitter, cfg.kept)
            f = features(b, part.X)
        stats, grads = svi.evaluate(
            q,
            cfg.likelihood,
            cfg.bound,
            Features(f.A.detach(), f.residual.detach()),
            part.y,
            s.mean.detach(),
            part.weight,
            gradients,
            self._rough,
            batch,
        )
        if grads is not None:
            self._collect(f, grads, scale)
        return stats

    def _collect(self, f: Features, grads: svi.Gradients, scale: float) -> None:
        """Add a batch's share of the gradients to the leaves, through the graph of its features."""
        # Adam minimises, and per unit of weight the steps do not depend on N.
        c, mean = -scale / self.total, self.state.mean
        if f.A.requires_grad:
            # As one number: handing gradients to autograd makes torch import its compiler.
            g = grads.features
            with torch.enable_grad():
                surrogate = c * ((f.A * g.A).sum() + (f.residual * g.residual).sum())
            surrogate.backward()
        if mean.requires_grad:
            g = c * grads.mean
            mean.grad = g if mean.grad is None else mean.grad + g

    def _nothing(self) -> svi.Statistics:
        """The statistics of no rows."""
        q = self.state.q
        return svi.Statistics(torch.zeros_like(q.h), torch.zeros_like(q.P), q.h.new_zeros(()))

    def _everywhere(self, work: Callable[[], svi.Statistics], gradients: bool) -> svi.Statistics:
        """The statistics, and gradients in the leaves, of the rows of all ranks, from those here.

        What fails on one rank fails on all, so that they stay together.
        """
        group = self.data.group
        if group.size == 1:
            return work()
        failed = self.state.q.h.new_zeros(1)
        try:
            stats = work()
        except (NotPositiveDefiniteError, FloatingPointError):
            stats = self._nothing()
            failed += 1
        stats = svi.pooled(stats, [*self._gradients(gradients), failed], group)
        if failed:
            raise FloatingPointError("the rows of a rank left the range of floating-point numbers")
        return stats

    def _gradients(self, wanted: bool) -> list[Tensor]:
        """Those of the leaves that are learned, to be changed in place; zero where none came."""
        leaves = [leaf for leaf in self._leaves if leaf.requires_grad] if wanted else []
        for leaf in leaves:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    def _full_pass(self, q: Moments, gradients: bool) -> svi.Statistics:
        """The statistics of all rows, chunk after chunk."""

        def work() -> svi.Statistics:
            if not gradients:
                return self._cached_pass(q)
            self._cache = None
            return svi.add(self._pass(part, q, 1.0, True, batch=False) for part in self._chunks())

        return self._everywhere(work, gradients)

    def _chunks(self) -> Iterator[Data]:
        """All rows that are here, a chunk at a time."""
        n, size = self.data.n, self.settings.chunk_size * self.data.group.size
        for i in range(0, n, size):
            self.data.expect(i + size, min(i + 2 * size, n))
            yield self.data.rows(i, min(i + size, n))

    def _cached_pass(self, q: Moments) -> svi.Statistics:
        """With the kernel at rest the features are computed once, where they fit in memory."""
        cfg, s = self.settings, self.state
        kernels = [k.with_theta(k.theta.detach()) for k in s.kernels]
        if self._cache is None:
            b = basis(kernels, s.Z.detach(), cfg.jitter, cfg.kept)
            size = self.data.n // self.data.group.size * len(s.Z) * len(kernels)
            self._features = lambda part: features(b, part.X)
            self._cache = [self._features(p) for p in self._chunks()] if size < 2**27 else []
        return svi.add(
            self._statistics(part, self._cache[i] if self._cache else self._features(part), q)
            for i, part in enumerate(self._chunks())
        )

    def _move(self, rate: float) -> None:
        """One Adam step on the hyperparameters from the gradients collected so far."""
        if self.settings.kernel_prior:
            leaves = Leaves(*(leaf.detach() for leaf in self._leaves))
            slopes = self._prior_slopes(leaves, [leaf.grad for leaf in self._leaves])
            for leaf, slope in zip(self._leaves, slopes, strict=True):
                if slope is not None and leaf.grad is not None:
                    leaf.grad += slope
        rates = [rate * factor for factor in self._factors]
        self._adam.descend([leaf.grad for leaf in self._leaves], rates)
        for leaf in self._leaves:
            leaf.grad = None

    def _prior_slopes(
        self, leaves: Leaves, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """What the prior on kernel parameters and prior means adds to the gradient of each leaf."""
        strength = self.settings.kernel_prior / self.total
        if not strength:
            return (None, None, None)
        of_mean, of_theta = strength * (leaves.mean - self._start_mean.detach()), None
        if gradients[0] is not None:
            moved = leaves.theta - self._start_theta.detach()
            of_theta = strength * self.state.template.prior_slope(moved, gradients[0])
        return (of_theta, None, of_mean)

    def _snapshot(self) -> State:
        s = self.state
        # Other steps than the fused make a new q.
        q = s.q if self._fused is None else Posterior(s.q.h.clone(), s.q.P.clone())
        theta, Z, mean = (x.detach().clone() for x in (s.theta, s.Z, s.mean))
        return replace(s, theta=theta, Z=Z, mean=mean, q=q)

    def _is_finite(self) -> bool:
        """Whether the last step has left numbers."""
        s = self.state
        changed = (s.theta, s.Z, s.mean, s.q.h, s.q.P)
        return all(bool(torch.isfinite(x.detach()).all()) for x in changed)

    def _restore(self, good: State) -> None:
        """Go back to the last good state and take smaller steps from there."""
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            # Hyperparameters that lead nowhere stay where they are, and q goes on alone.
            self.learning, self._rounds = False, None
        if self._failures > 2 * _MAX_FAILURES:
            raise FloatingPointError(
                "the fit kept leaving the range of floating-point numbers; try dtype='float64', "
                "a smaller learning_rate, or learn_hyperparameters=False"
            )
        self.state = good
        self.state = self._snapshot()
        self._rate *= 0.5
        self._make_optimiser()

    def _keep(self, **loop: Any) -> None:
        """Write where the fit stands: what every loop has, and what this one has."""
        adam = [self._adam.first, self._adam.second, self._adam.count]
        own = {"state": self.state, "adam": adam, "rate": self._rate, "failures": self._failures}
        self.journal.keep({**own, "generator": self.generator.get_state(), **loop})

    def _left_off(self) -> dict[str, Any] | None:
        """Go back to where an earlier run stood, if there was one; what its loop has kept."""
        loop = self.journal.left_off()
        if loop is not None:
            self.state, self._rate, self._failures = (
                loop[name] for name in ("state", "rate", "failures")
            )
            self.learning = self.learning and self._failures <= _MAX_FAILURES
            self._make_optimiser()
            self._adam.first, self._adam.second, self._adam.count = loop["adam"]
            self.generator.set_state(loop["generator"])
        return loop

    def _report(self, epoch: float, n_epochs: float, elbo: float) -> None:
        if self.on_progress is not None:
            # Fitted with less variance, what rises is another bound, less a constant (Q9).
            measure = "ELBO" if self.settings.kept == 1.0 else "relaxed ELBO"
            self.on_progress(Progress(self.stage, epoch, n_epochs, elbo, measure))

    # --- minibatches --------------------------------------------------------------------------

    def _fit_batches(self, batch: int) -> Result:
        cfg, n = self.settings, self.data.n
        per_epoch = max(1, round(n / batch))
        budget = cfg.max_steps or math.ceil(cfg.max_epochs * per_epoch)
        # In fixed batches some rows of a class would always count for more than others (C4).
        batches = Batches(self.data, batch, self.generator, shuffled=self._n_others is not None)
        if self._n_others is not None:
            self._start_classes()
        self._start_fused(max(batch, n - batches.starts[-1]), budget)
        rounds: list[float] = []
        means: list[float] = []
        good, anneal, t = self._snapshot(), None, 0
        alone = cfg.local_steps == 1 or self.data.group.size == 1
        own = OwnSteps()
        wait = 0  # up to here steps are taken one by one
        loop = self._left_off()
        if loop is not None:
            rounds, means, good, anneal, t = (
                loop[name] for name in ("rounds", "means", "good", "anneal", "t")
            )
            batches.order, batches.at = loop["batches"]
            if self._n_others is not None:
                self._kl, self._touched, self._multipliers.total = loop["classes"]
        while t < budget:
            if self.journal.due() and not own.n:
                sampled = self._n_others is not None
                self._keep(
                    rounds=rounds,
                    means=means,
                    good=good,
                    anneal=anneal,
                    t=t,
                    batches=[batches.order, batches.at],
                    classes=[self._kl, self._touched, self._multipliers.total] if sampled else None,
                )
            if anneal is None and t >= 0.6 * budget:
                anneal = (t, budget)
            if anneal is not None and t >= anneal[1]:
                break
            ahead = min(ROUND - t % ROUND, (anneal[1] if anneal else budget) - t)
            ahead = min(ahead, math.ceil(0.6 * budget) - t) if anneal is None else ahead
            if t >= wait and self._ready():
                elbos = self._round(batches, range(t, t + ahead), anneal)
                if elbos is None:
                    wait = t + ahead
                    continue
                rounds += elbos
                t += ahead
            else:
                rows = batches.next()
                part = self.data.take(rows)
                # Not the rows that are here: some of a batch may be elsewhere.
                scale = n / (rows.stop - rows.start if isinstance(rows, slice) else len(rows))
                after = batches.then()
                if after is not None:
                    self.data.expect(after.start, after.stop)
                left = self._left(t, anneal)
                try:
                    if self._n_others is not None:
                        found = [self._class_step(part, rows, scale, left)]
                    elif alone:
                        found = [self._step(part, scale, *self._rates(t, left))]
                    else:
                        found = self._local_step(part, *self._rates(t, left), own, ahead == 1)
                except (NotPositiveDefiniteError, FloatingPointError):
                    self._restore(good)
                    continue
                rounds += found
                t += 1
            if t % ROUND == 0 or t == budget:
                if self._is_finite():
                    good = self._snapshot()
                else:
                    self._restore(good)
                means.append(sum(rounds[-ROUND:]) / len(rounds[-ROUND:]))
                self._report(t / per_epoch, budget / per_epoch, means[-1])
                if anneal is None and self._flat(rounds):
                    anneal = (t, min(budget, t + max(2 * ROUND, t // 2)))
        converged = anneal is not None and (anneal[1] < budget or self._flat(rounds))
        self.state = self._snapshot() if self._is_finite() else good
        elbo = sum(rounds[-ROUND:]) / max(1, len(rounds[-ROUND:]))
        gap = 0.0 if self._n_others is None else self._class_gap()
        return Result(self.state, elbo, t / per_epoch, converged, means, gap)

    def _least_step(self, left: float) -> float:
        return self.settings.min_step * max(left, 0.1)

    def _left(self, t: int, anneal: tuple[int, int] | None) -> float:
        """1 until the fit comes to rest, then falling to 0."""
        return 1.0 if anneal is None else 1 - (t - anneal[0]) / (anneal[1] - anneal[0])

    def _rates(self, t: int, left: float) -> tuple[float, float]:
        """The step sizes of q and of Adam."""
        cfg = self.settings
        rho = max((cfg.first_step + t) ** -cfg.step_exponent, self._least_step(left))
        return rho, self._rate * max(left, 0.02)

    def _step(self, part: Data, scale: float, rho: float, rate: float) -> float:
        """One natural-gradient step and, once q has settled a little, one Adam step."""
        if self._fused is not None:
            elbo = self._fused_step(self._fused, part, scale, rho, rate)
            if elbo is not None:
                return elbo
        q = moments(self.state.q)
        gradients = self.learning and self.state.step >= self.settings.settled
        stats = self._everywhere(lambda: self._pass(part, q, scale, gradients), gradients)
        elbo = scale * float(stats.bound) - float(kl(q))
        if not math.isfinite(elbo):
            raise FloatingPointError("the ELBO is not finite")
        self.state.q = svi.update(self.state.q, stats, scale, rho)
        self.state.step += 1
        if gradients:
            self._move(rate)
        return elbo

    def _local_step(
        self, part: Data, rho: float, rate: float, own: OwnSteps, last: bool
    ) -> list[float]:
        """A step on the rows here alone, as if they stood for all; after some, the ranks' average.

        The ELBO of every step since the last average, the same on all ranks; none between two.
        """
        s = self.state
        gradients = self.learning and s.step >= self.settings.settled
        own.n += 1
        weight = float(part.weight.sum())
        if weight and not own.failed:
            try:
                q = moments(s.q)
                # Ranks, and steps of a rank, count as much as their rows.
                stats = self._pass(part, q, self.total, gradients)
                elbo = self.total / weight * float(stats.bound) - float(kl(q))
                own.failed = not math.isfinite(elbo)
                s.q = svi.update(s.q, stats, self.total / weight, rho)
                own.weight += weight
                own.elbo += weight * elbo
            except (NotPositiveDefiniteError, FloatingPointError):
                own.failed = True
        s.step += 1
        if own.n < self.settings.local_steps and not last:
            return []
        n, elbo = own.n, self._average(own, gradients)
        if gradients:
            self._move(rate)
        return [elbo] * n

    def _average(self, own: OwnSteps, gradients: bool) -> float:
        """Put q, and the gradients, at the average over ranks, each by its weight; the ELBO's."""
        s, grads = self.state, self._gradients(gradients)
        sums = s.q.h.new_tensor([own.weight, own.elbo, float(own.failed)])
        here = svi.Statistics(own.weight * s.q.h, own.weight * s.q.P, sums[0])
        there = svi.pooled(here, [*grads, sums], self.data.group)
        own.n, own.weight, own.elbo, own.failed = 0, 0.0, 0.0, False
        weight, elbo, failed = sums.tolist()
        if failed or not math.isfinite(elbo):
            raise FloatingPointError("the rows of a rank left the range of floating-point numbers")
        s.q = Posterior(there.h / weight, there.P / weight)
        for g in grads:
            g /= weight
        return elbo / weight

    def _start_fused(self, batch: int, n_steps: int = 0) -> None:
        """Take fused steps if there are such for this fit; they change q in place.

        So many of them that it is worth to load, and once to compile, the passes between products.
        """
        s, cfg = self.state, self.settings
        known = len(s.theta) == 1 and applies(s.template, cfg.likelihood, cfg.bound)
        if not known or self._n_others is not None or self.data.group.size > 1:
            return
        learned = Learned(cfg.learn_kernel, cfg.learn_inducing, cfg.learn_mean)
        passes = None
        if s.Z.device.type == "cpu" and n_steps * batch * len(s.mean) >= _WORTH_COMPILING:
            passes = fast(s.template, cfg.likelihood, cfg.bound, s.Z.dtype)
            self._adam_move = self._adam.move = passes.adam
        self._fused = FusedStep(
            s.template,
            cfg.likelihood,
            cfg.bound,
            Leaves(s.theta, s.Z, s.mean),
            batch,
            self.total,
            learned,
            cfg.jitter,
            passes,
            cfg.kept,
        )
        # The q given belongs to whoever gave it.
        s.q = Posterior(s.q.h.clone(), s.q.P.clone())

    def _ready(self) -> bool:
        """Whether a whole round can be taken on the device."""
        settled = self.state.step >= self.settings.settled or not self.learning
        return self._fused is not None and self._on_device and settled

    def _round(
        self, batches: Batches, steps: range, anneal: tuple[int, int] | None
    ) -> list[float] | None:
        """Steps that the device is told of at once; None, and nothing done, if one failed."""
        s, data, fused = self.state, self.data, self._fused
        assert fused is not None and isinstance(data, Data)
        leaves = Leaves(*(leaf.detach() for leaf in self._leaves))
        if self._rounds is None:
            self._rounds = Rounds(
                fused,
                leaves,
                s.q,
                (data.X, data.y, data.weight),
                ROUND,
                self.learning,
                self._prior_slopes,
                self._factors,
            )
        before = batches.order, batches.at, self.generator.get_state()
        plan = []
        for t in steps:
            rows = batches.next()
            assert isinstance(rows, slice)
            size = rows.stop - rows.start
            rates = self._rates(t, self._left(t, anneal))
            plan.append(Planned(rows.start, size, data.n / size, *rates))
        elbos = self._rounds.run(plan, leaves, s.q, self._adam)
        if elbos is None:
            batches.order, batches.at = before[:2]
            self.generator.set_state(before[2])
            return None
        s.step += len(plan)
        return elbos

    def _fused_step(
        self, fused: FusedStep, part: Data, scale: float, rho: float, rate: float
    ) -> float | None:
        """The same in closed form; None, and nothing done, where that has not enough digits."""
        s = self.state
        gradients = self.learning and s.step >= self.settings.settled
        leaves = Leaves(*(leaf.detach() for leaf in self._leaves))
        if bool(fused.far(leaves)):
            return None
        found = fused.evaluate(leaves, s.q, part.X, part.y, scale * part.weight, gradients)
        if bool(found.failed):
            return None
        elbo = float(found.bound - found.kl)
        if not math.isfinite(elbo):
            raise FloatingPointError("the ELBO is not finite")
        fused.update(s.q, found, rho)
        s.step += 1
        if gradients:
            for leaf, gradient in zip(self._leaves, found.gradients, strict=True):
                leaf.grad = gradient
            self._move(rate)
        return elbo

    # --- some of the classes ------------------------------------------------------------------

    def _start_classes(self) -> None:
        """What steps on some of the classes keep: of every row its T, of every class its KL."""
        s, data, cfg = self.state, self.data, self.settings
        # Steps change q itself, and the q given belongs to whoever gave it.
        s.q = Posterior(s.q.h.clone(), s.q.P.clone())
        self._kl = torch.cat([class_kl(q) for q in self._all_moments()])
        self._touched = torch.zeros(data.n_classes, device=s.Z.device)
        y, weight = data.labels(0, data.n)
        self._by_class = classes.RowsByClass(y, data.n_classes)
        sample = data.sample()
        self._near = classes.near_classes(s.kernels[0], sample.X, sample.y, data.n_classes)
        with torch.no_grad():
            variance = float(s.kernels[0].diag(data.head(_GAP_ROWS).X).mean())
        assert isinstance(cfg.likelihood, LogisticSoftmax)
        total = cfg.likelihood.start_total(cfg.bound, s.mean.detach(), variance)
        self._multipliers = classes.Multipliers(torch.full_like(weight, total))

    def _all_moments(self) -> Iterator[Moments]:
        """q solved for its marginals, a few classes at a time."""
        q = self.state.q
        for h, P in zip(q.h.split(_CLASS_CHUNK), q.P.split(_CLASS_CHUNK), strict=True):
            yield moments(Posterior(h, P))

    def _class_step(self, part: Data, rows: slice | Tensor, scale: float, left: float) -> float:
        """`_step` for the labels of a batch and a sample of the other classes (C1-C4).

        `left` falls from 1 to 0 as the fit comes to rest. While it is 1 a step believes its own
        sample about T: what rows kept is an epoch old, and would hold the hyperparameters back.
        """
        s, cfg, data, like = self.state, self.settings, self.data, self.settings.likelihood
        assert isinstance(like, LogisticSoftmax) and self._n_others is not None
        drawn = classes.draw_classes(
            part.y, data.n_classes, self._n_others, self.generator, self._near
        )
        own_rows = self._by_class.draw(drawn.index, _OWN_ROWS, self.generator)
        stands = classes.balance(drawn, self._by_class, _OWN_ROWS)
        new = Posterior(s.q.h[drawn.index], s.q.P[drawn.index])
        q = moments(new)
        gradients = self.learning and s.step >= self.settings.settled
        with torch.set_grad_enabled(gradients and (cfg.learn_kernel or cfg.learn_inducing)):
            b = basis(s.kernels, s.Z, cfg.jitter, cfg.kept)
            f = features(b, part.X)
        batch = classes.Rows(
            Features(f.A.detach(), f.residual.detach()),
            stands.batch * part.weight.unsqueeze(1),
            self._multipliers.total[rows],
        )
        theirs = data.take(own_rows.flatten())
        own = classes.Rows(
            own_features(b, theirs.X.view(*own_rows.shape, -1)),
            stands.own * theirs.weight.view(own_rows.shape),
            self._multipliers.total[own_rows],
        )
        found = classes.evaluate(
            q,
            like,
            cfg.bound,
            drawn,
            data.n_classes,
            s.mean.detach()[drawn.index],
            batch,
            part.weight,
            own,
            left,
            gradients,
        )
        self._kl[drawn.index] = class_kl(q)
        elbo = scale * float(found.statistics.bound) - float(self._kl.sum())
        # A class that has been in few steps takes larger ones.
        rho = (cfg.first_step + self._touched[drawn.index]) ** -cfg.step_exponent
        rho = rho.clamp(min=self._least_step(left)).to(new.h)
        classes.update(new, found.statistics, rho * stands.known)
        if not math.isfinite(elbo + float(new.h.sum() + new.P.sum())):
            raise FloatingPointError("the ELBO is not finite")
        # In place. A fit that goes back to an earlier state takes back its hyperparameters only: in
        # whitened coordinates q goes with any.
        s.q.h[drawn.index], s.q.P[drawn.index] = new
        self._touched[drawn.index] += 1
        exact = len(drawn.index) == data.n_classes
        share = 1.0 if exact else max(left, classes.AVERAGE)
        self._multipliers.update(rows, found.part.total, share)
        s.step += 1
        if found.gradients is not None:
            mean = torch.zeros_like(self._kl)
            mean[drawn.index] = found.gradients.mean
            self._collect(f, found.gradients._replace(mean=mean), scale)
            self._move(self._rate * max(left, 0.02))
        return elbo

    @torch.no_grad()
    def _class_gap(self) -> float:
        """How far the bound of a row lies below what the sum over all classes gives (C3)."""
        s, cfg, part = self.state, self.settings, self.data.head(_GAP_ROWS)
        assert isinstance(cfg.likelihood, LogisticSoftmax)
        f = features(basis(s.kernels, s.Z, cfg.jitter, cfg.kept), part.X)
        total = torch.zeros_like(part.weight)
        for q, mean in zip(self._all_moments(), s.mean.split(_CLASS_CHUNK), strict=True):
            m, v, _ = marginals(q, f)
            total += cfg.likelihood.total(m + mean, v, cfg.bound)
        kept = self._multipliers.total[: len(total)]
        return float(cfg.likelihood.shortfall(kept, total, cfg.bound, len(s.mean)).mean())

    def _flat(self, elbos: list[float]) -> bool:
        """Whether the last rounds gained less than the tolerance or their own noise."""
        w = 3 * ROUND
        if len(elbos) < 2 * w:
            return False
        new, old = torch.tensor(elbos[-w:]), torch.tensor(elbos[-2 * w : -w])
        noise = math.sqrt(float(new.var() + old.var()) / w)
        return float(new.mean() - old.mean()) < max(self.settings.tol * self.total, 2 * noise)

    # --- full batch ---------------------------------------------------------------------------

    def _fit_full(self) -> Result:
        """Hyperparameters and q together, then q alone by steps that may only raise the ELBO."""
        loop = self._left_off()
        history: list[float] = [] if loop is None else loop["history"]
        n = math.ceil(self.settings.max_epochs)
        if self.learning and (loop is None or "best" in loop):
            self._rough = True  # hyperparameters need not know better where to go
            self._learn(history, max(1, int(0.8 * n)), loop)
            self._rough, loop = self.settings.rough, None
        for leaf in self._leaves:
            leaf.requires_grad_(False)
        converged = self._ascend(history, max(n - len(history), 2), loop)
        self.state = self._snapshot()
        return Result(self.state, history[-1], len(history), converged, history)

    def _learn(self, history: list[float], n_epochs: int, loop: dict[str, Any] | None) -> None:
        cfg = self.settings
        rho = 1.0 if cfg.bound in cfg.likelihood.conjugate else 0.7
        best, best_elbo, recent, first = self._snapshot(), -math.inf, 0, 0
        if loop is not None:
            rho, best, best_elbo, recent, first = (
                loop[name] for name in ("rho", "best", "best_elbo", "recent", "epoch")
            )
        for epoch in range(first, n_epochs):
            if self.journal.due():
                self._keep(
                    history=history,
                    rho=rho,
                    best=best,
                    best_elbo=best_elbo,
                    recent=recent,
                    epoch=epoch,
                )
            try:
                q = moments(self.state.q)
                gradients = self.learning and epoch >= 3
                stats = self._full_pass(q, gradients)
                elbo = float(stats.bound) - float(kl(q))
                if not math.isfinite(elbo):
                    raise FloatingPointError("the ELBO is not finite")
            except (NotPositiveDefiniteError, FloatingPointError):
                self._restore(best)
                continue
            history.append(elbo)
            self._report(epoch + 1, self.settings.max_epochs, elbo)
            if elbo > best_elbo + self.settings.tol * self.total:
                recent = 0
            elif gradients:
                recent += 1
            if elbo > best_elbo:
                best, best_elbo = self._snapshot(), elbo
            elif elbo < best_elbo - 0.05 * abs(best_elbo):
                self._rate, rho = 0.7 * self._rate, max(0.7 * rho, 0.2)
            if recent >= 5:
                break
            self.state.q = svi.update(self.state.q, stats, 1.0, rho)
            if gradients:
                self._move(self._rate)
        self.state = best

    def _ascend(self, history: list[float], n_epochs: int, loop: dict[str, Any] | None) -> bool:
        """Sweeps with the hyperparameters at rest; a step that lowers the ELBO is halved."""
        self._cache = None
        q = moments(self.state.q)
        stats = self._full_pass(q, False)
        elbo = float(stats.bound) - float(kl(q))
        slack = 1e-9 if self.state.Z.dtype == torch.float64 else 1e-6
        # Below what rough values can tell apart there is nothing to gain.
        slack, digits = (1e-6, 1e-4) if self._rough else (slack, -math.inf)
        rho, first = 1.0, 0
        if loop is None:
            history.append(elbo)
        else:
            rho, first, n_epochs = loop["rho"], loop["epoch"], loop["n_epochs"]
        for epoch in range(first, n_epochs):
            if self.journal.due():
                self._keep(history=history, rho=rho, epoch=epoch, n_epochs=n_epochs)
            while True:
                candidate = svi.update(self.state.q, stats, 1.0, rho)
                try:
                    q = moments(candidate)
                    new_stats = self._full_pass(q, False)
                    new = float(new_stats.bound) - float(kl(q))
                except FloatingPointError:
                    new, new_stats = -math.inf, stats
                if new >= elbo - slack * abs(elbo):
                    break
                rho *= 0.5
                if rho < 1e-3:
                    return True  # no step along the natural gradient rises: q is at its optimum
            gain, elbo, stats, self.state.q = new - elbo, new, new_stats, candidate
            history.append(elbo)
            self._report(len(history), self.settings.max_epochs, elbo)
            if gain < max(self.settings.tol * 1e-2 * self.total, digits * abs(elbo)):
                return True
            rho = min(1.0, 1.5 * rho)
        return False
