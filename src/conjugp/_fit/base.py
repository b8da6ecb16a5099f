"""What all fits share: their plan, their random numbers, and what they leave behind."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conjugp._fit.plan import Plan
from conjugp._fit.search import class_centres
from conjugp._fit.starts import median_distance
from conjugp._gp import inducing
from conjugp._gp.model import Model
from conjugp._gp.predictor import Predictor
from conjugp._gp.state import State, initial_state
from conjugp._gp.temperature import PLAIN, Calibration, fit_calibration
from conjugp._inference.settings import Progress, Settings
from conjugp._inputs.scales import Scaling
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._persistence.codec import in_checkpoints
from conjugp._persistence.journal import Journal
from conjugp._rows.dataset import Data, Dataset, class_shares
from conjugp._rows.hold_out import folds
from conjugp.kernels import RBF, Kernel
from conjugp.likelihoods import LogisticSoftmax

KERNEL_CLASSES = 10  # classes of the fits that learn or choose a kernel
ELBO_ROWS, ELBO_PAIRS = 2048, 2**20  # rows, times classes, that stand for all in the ELBO
SATURATED, SATURATED_ROWS = 4.0, 512  # σ is above .98 there; rows that are asked


@in_checkpoints
@dataclass
class Fitted:
    """What a fit leaves behind."""

    model: Predictor
    elbo: float
    epochs: float
    converged: bool
    state: State | None  # for going on
    history: list[dict[str, float | str]] = field(default_factory=list)
    total: float = 0.0  # weight of the rows
    class_gap: float = 0.0  # what sampling classes cost, in nats per row (docs/math.md, C3)
    saturated: bool = False  # whether all classes are alike to it (docs/math.md, The corner)


class Fitter(ABC):
    """Runs a plan on data; after Ctrl-C `salvage` gives the last good state."""

    def __init__(
        self,
        plan: Plan,
        kernel: Kernel | None,
        data: Dataset,
        mean: Tensor,
        scaling: Scaling,
        on_progress: Callable[[Progress], None] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.plan, self.kernel, self.data, self.mean = plan, kernel, data, mean
        self.scaling = scaling  # how the rows came to be; a fit may choose another origin
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.history: list[dict[str, float | str]] = []
        self.journal = journal or Journal()
        self.journal.follow(self.generator, self.history)
        self.began = time.perf_counter() - self.journal.seconds
        self._on_progress = on_progress
        self.kept = 1.0
        # A temperature that the user gives does what its definition says, whatever the classes are.
        self.shares = class_shares(data) if plan.temperature is None else None
        self._partial: Callable[[], tuple[Model, State]] | None = None

    def run(self, warm: State | None = None) -> tuple[Fitted, Scaling]:
        """The whole fit, from an earlier one's state if there is one; and its units.

        Raises FloatingPointError or NotPositiveDefiniteError where numbers leave their range.
        """
        with torch.no_grad():
            fitted, scaling = self.journal.stage("whole", lambda: (self._run(warm), self.scaling))
        if not fitted.model.is_finite():
            raise FloatingPointError("the fit left the range of floating-point numbers")
        return fitted, scaling

    @abstractmethod
    def _run(self, warm: State | None) -> Fitted: ...

    def salvage(self) -> Fitted | None:
        """The last good state as a model, uncalibrated; None if there is none yet."""
        if self._partial is None:
            return None
        model, state = self._partial()
        data, plain = self.data, Calibration(self.plan.temperature or 1.0)
        model = replace(model, calibration=plain, shares=self.shares, kept=self.kept)
        elbo = estimated_elbo(model, data)
        return Fitted(model, elbo, 0, False, state, self.history, data.total)

    def _progress(self, p: Progress) -> None:
        seconds = time.perf_counter() - self.began
        self.history.append({**p._asdict(), "seconds": seconds})
        if self._on_progress is not None:
            self._on_progress(p)

    def _settings(self, **changes: object) -> Settings:
        p = self.plan
        settings = Settings(
            p.likelihood,
            p.bound,
            p.learn_kernel,
            p.learn_mean,
            p.learn_inducing,
            p.learning_rate,
            p.batch_size,
            class_batch=p.class_batch,
            max_epochs=p.max_epochs,
            tol=p.tol,
            step_exponent=p.options.step_exponent,
            min_step=p.options.min_step,
            chunk_size=p.options.chunk_size,
            kernel_prior=p.options.kernel_prior,
            jitter=p.options.jitter,
            local_steps=p.options.local_steps,
            kept=self.kept,
            inference="ep" if p.inference == "ep" else "vi",
        )
        return replace(settings, **changes)  # type: ignore[arg-type]

    def _start(
        self,
        data: Dataset,
        kernel: Kernel,
        n_inducing: int,
        mean: Tensor,
        by_class: bool = False,
    ) -> State:
        p = self.plan
        if isinstance(p.inducing, Tensor):
            few = torch.randperm(len(p.inducing), generator=self.generator)[:n_inducing]
            few = few.to(data.like.device)
            Z = p.inducing if n_inducing >= len(p.inducing) else p.inducing[few]
        else:
            if by_class and p.inducing == "kmeans":
                Z = class_centres(kernel, data.sample(), n_inducing, self.generator)
            else:
                X, _, weight, _ = data.sample()
                Z = inducing.choose(p.inducing, X, weight, n_inducing, kernel, self.generator)
            Z = data.group.same_tensor(Z)
        kernels = [kernel] * (1 if p.shared_kernel else data.n_classes)
        return initial_state(kernels, Z, mean.clone())

    def _filled(self, variance: float, factor: float = 1.0) -> Kernel:
        """The kernel with what the user left open: a share of the median distance, a variance."""
        kernel = self.kernel if self.kernel is not None else RBF()
        X = self.data.head(1000).X
        d = factor * median_distance(X)
        return kernel.filled(torch.full((X.shape[1],), d, dtype=torch.float64), variance)

    def _folded(
        self,
        data: Data,
        predict: Callable[[Tensor], tuple[Tensor, Tensor]],
        scales: tuple[float, ...],
    ) -> Calibration:
        """The calibration of every fold's latent moments, predicted without its rows."""
        masks, moments = list[Tensor](), list[tuple[Tensor, Tensor]]()
        for mask in folds(data):
            try:
                m, v = predict(mask)
            except (NotPositiveDefiniteError, FloatingPointError):
                continue  # the others will do
            if bool(torch.isfinite(m).all() & torch.isfinite(v).all()):
                masks.append(mask)
                moments.append((m, v))
        if not masks:
            return PLAIN
        m, v = (torch.cat(part) for part in zip(*moments, strict=True))
        i = torch.cat([mask.nonzero()[:, 0] for mask in masks])
        y, weight, like = data.y[i], data.weight[i], self.plan.likelihood
        found = fit_calibration(like, m, v, y, weight, scales, self.shares)
        # Without rows of some class nothing says that it can be excluded.
        if found.temperature < 1.0 and len(torch.unique(y)) < len(torch.unique(data.y)):
            return found._replace(temperature=1.0)
        return found


def estimated_elbo(model: Model, data: Dataset) -> float:
    """The ELBO, its sum over points taken from a sample where there are many."""
    part = data.head(min(ELBO_ROWS, max(1, ELBO_PAIRS // data.n_classes)))
    kl = model.kl()
    return (model.elbo(part) + kl) * (data.total / part.total) - kl


def unseen(data: Data, fold: Tensor) -> Tensor:
    """The rows of a fold as they are to a fit without them.

    A column that varies in these rows alone, such as the dummy of a level that only one row has,
    would take them far from all others. It says nothing of new rows, whose levels have no column.
    """
    rest, rows = data.X[~fold & (data.weight > 0)], data.X[fold]
    return torch.where((rest == rest[:1]).all(0), rest[:1], rows) if len(rest) else rows


def saturated(model: Model, data: Dataset) -> bool:
    """Whether most rows have all their latents so far above zero that no class stands out."""
    if model.likelihood.name != LogisticSoftmax.name:
        return False
    m, _ = model.latent(data.head(SATURATED_ROWS).X, variance=False)
    return len(m) > 0 and float(m.amin(1).median()) > SATURATED


def largest_classes(data: Data, most: int) -> Tensor | None:
    """The `most` largest classes; None if there are no more than that."""
    if data.n_classes <= most:
        return None
    counts = torch.bincount(data.y, minlength=data.n_classes)
    return counts.argsort(descending=True, stable=True)[:most]


def only_classes(data: Data, kept: Tensor | None) -> Data:
    """The rows of some classes, relabelled by their place among these."""
    if kept is None:
        return data
    label = torch.full((data.n_classes,), -1, device=data.y.device)
    label[kept] = torch.arange(len(kept), device=label.device)
    rows = label[data.y] >= 0
    return Data(data.X[rows], label[data.y][rows], data.weight[rows], len(kept))
