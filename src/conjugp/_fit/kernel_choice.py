"""The kernel of a decoupled fit: a small coupled one learns it, held-out rows settle its scales."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conjugp._fit.base import KERNEL_CLASSES, Fitter, largest_classes, only_classes
from conjugp._fit.plan import start_mean
from conjugp._fit.search import Candidate, held_out_loss, rescaled, search
from conjugp._fit.starts import lengthscales, median_distance
from conjugp._fit.weights import MeanSettings
from conjugp._inference.settings import Progress
from conjugp._inference.train import train
from conjugp._rows.dataset import Data, Dataset
from conjugp.kernels import RBF, Kernel, Matern52, Normalised

KERNEL_INDUCING, KERNEL_STEPS = 128, 200  # of the fit that learns the kernel
RELEVANCE_CLASSES = 50  # beyond so many classes, what tells ten of them apart is not tried
SEARCH_ROWS, SEARCH_INDUCING, SEARCH_CLASSES = 8000, 800, 250
SEARCH_EPOCHS, GLANCE_EPOCHS = 10, 4
REFINE_ROWS, REFINE_INDUCING = 24_000, 2400  # for a last look at the lengthscale
SPHERE_FEATURES = 16  # from here on the rows may be an embedding, of which directions matter
FACTORS = (0.12, 0.17, 0.25, 0.36, 0.5, 0.72, 1.0, 1.4, 2.0)
FIRST_FACTORS = (3, 5)  # a third, and twice that: with many classes kernels are smooth


class KernelChoice(Fitter):
    """The part of a decoupled fit that comes first."""

    def _choose_kernel(self, train: Data, held: Data) -> Kernel:
        """Learn feature scales by a small ELBO, then try scales and lengthscales on held-out."""
        p = self.plan
        searched = p.options.search and held.n > 0
        if searched and self.kernel is None and train.n_classes > RELEVANCE_CLASSES:
            return self._search(self._starts(train, None), train, held)
        learned = self._learned_kernel(train)
        if not searched:
            return learned
        starts = [("learned", learned)]
        if self.kernel is None:
            starts = self._starts(train, torch.tensor(learned.lengthscale))  # type: ignore[attr-defined]
        return self._search(starts, train, held)

    def _learned_kernel(self, rows: Data) -> Kernel:
        """The kernel that a small coupled fit to the largest classes learns."""
        p = self.plan
        few = only_classes(rows, largest_classes(rows, KERNEL_CLASSES))
        start = self._filled(10.0)
        state = self._start(few, start, KERNEL_INDUCING, self._mean_of(few))
        settings = self._settings(
            learn_inducing=False,
            batch_size=512,
            max_steps=KERNEL_STEPS,
            tol=0.0,
            learning_rate=0.5 * p.learning_rate,
        )
        how = {"on_progress": self._progress, "stage": "kernel", "journal": self.journal}
        try:
            result = self.journal.stage(
                "kernel", lambda: train(state, few, settings, self.generator, **how)
            )
        except FloatingPointError:
            return start.frozen()
        learned = result.state.template.with_theta(result.state.theta[0]).frozen()
        return self._supple(learned, few.rows(0, 1000).X)

    def _supple(self, kernel: Kernel, X: Tensor) -> Kernel:
        """The kernel with at least `mean_variance`, if the user left a variance open.

        What few inducing points learn is small where they explain little, and the mean wants more.
        """
        given = self.kernel if self.kernel is not None else RBF()
        ones = torch.ones(X.shape[1], dtype=torch.float64)
        step = given.filled(ones, math.e).theta - given.filled(ones, 1.0).theta

        def scaled(power: float) -> Kernel:
            return kernel.with_theta(kernel.theta + power * step.to(kernel.theta)).frozen()

        # What was given stays as it is, and the rest grows with the power of e.
        now, more = (float(scaled(power).diag(X).double().mean()) for power in (0.0, 1.0))
        open_, wanted = (more - now) / math.expm1(1.0), self.plan.options.mean_variance
        if not (now < wanted and open_ > 1e-6 * now):
            return kernel
        return scaled(math.log1p((wanted - now) / open_))

    def _mean_of(self, data: Data) -> Tensor:
        """The prior mean at the start of a fit to some of the classes."""
        if data.n_classes == self.data.n_classes:
            return self.mean
        return start_mean("learn", data, self.plan.likelihood)

    def _starts(self, train: Data, ard: Tensor | None) -> list[tuple[str, Kernel]]:
        """Which features are worth what: learned, all alike, as the user gave them, directions."""
        variance, D = self.plan.options.mean_variance, train.X.shape[1]
        scale = torch.as_tensor(self.scaling.scale)
        std, raw = (lengthscales(train.X, scale, share) for share in (0.0, 1.0))
        lengths = {"ard": ard, "std": std, "raw": raw}
        starts: list[tuple[str, Kernel]] = [
            (name, RBF(s, variance)) for name, s in lengths.items() if s is not None
        ]
        # Few features are not an embedding, and rows of unit length are directions already.
        if D >= SPHERE_FEATURES:
            sphere = Normalised(RBF(1.0, variance), self.scaling.scale)
            X = self._uncentred(train.rows(0, 1000)).X
            length = (X * scale.to(X)).norm(dim=1)
            if float(length.std()) > 1e-3 * float(length.mean()):
                gap = median_distance(sphere.directions(X))
                starts.append(("sphere", replace(sphere, kernel=RBF(gap, variance))))
        return starts

    def _uncentred(self, data: Data) -> Data:
        """The rows in working units with the user's origin."""
        return data.shifted(self._origin(data.like))

    def _origin(self, X: Tensor) -> Tensor:
        """What centring took from rows like X, (D,)."""
        return torch.as_tensor(self.scaling.shift / self.scaling.scale).to(X)

    def _search(self, starts: list[tuple[str, Kernel]], train: Data, held: Data) -> Kernel:
        """The kernel that predicts held-out rows best."""
        p, D = self.plan, train.X.shape[1]
        kept = largest_classes(train, SEARCH_CLASSES)
        train, held = only_classes(train, kept), only_classes(held, kept)
        mean = self._mean_of(train)

        def loss_at(kernel: Kernel, n: int, M: int, batch: int, n_epochs: int) -> float:
            a, b = train.rows(0, n), held.rows(0, n // 4)
            if self.kernel is None and isinstance(kernel, Normalised):
                a, b = self._uncentred(a), self._uncentred(b)
            M = min(M, a.n // 2 + 1)
            how = self._mean_settings(a.n, batch_size=batch, n_epochs=n_epochs)
            return self.journal.stage(
                "candidate",
                lambda: held_out_loss(kernel, a, b, mean, M, how, p.seed, self.journal),
            )

        def loss(kernel: Kernel, n_epochs: int = SEARCH_EPOCHS) -> float:
            return loss_at(kernel, SEARCH_ROWS, SEARCH_INDUCING, 256, n_epochs)

        def glance(kernel: Kernel) -> float:
            return loss(kernel, GLANCE_EPOCHS)

        def report(c: Candidate) -> None:
            value = -c.loss * held.total
            self._progress(Progress("search", 0, 0, value, "held-out log-likelihood"))

        best = search(starts, FACTORS, FIRST_FACTORS, loss, D, report, glance)
        if not math.isfinite(best.loss):
            return self._filled(p.options.mean_variance)
        if self.kernel is None:
            other = search([("rough", rough(best.kernel))], (1.0, 1.4), (0,), loss, D, report)
            best = min(best, other, key=lambda c: c.loss)
        return self._refined(best.kernel, train, held, loss_at, report)

    def _refined(
        self,
        kernel: Kernel,
        train: Data,
        held: Data,
        loss_at: Callable[[Kernel, int, int, int, int], float],
        report: Callable[[Candidate], None],
    ) -> Kernel:
        """The kernel, or the same a little longer or shorter: what many more rows say, if any."""
        if train.n < REFINE_ROWS or held.n < SEARCH_ROWS // 4:
            return kernel
        D = train.X.shape[1]

        def look(factor: float) -> Candidate:
            scaled = rescaled(kernel, factor, D)
            value = loss_at(scaled, REFINE_ROWS, REFINE_INDUCING, 512, SEARCH_EPOCHS)
            found = Candidate(scaled, value)
            report(found)
            return found

        best = look(1.0)
        for step in (1.4, 1 / 1.4):
            factor, other = step, look(step)
            if other.loss >= best.loss:
                continue
            while other.loss < best.loss:
                best, factor = other, factor * step
                other = look(factor)
            break
        return best.kernel

    def _mean_epochs(self, n: int) -> int:
        """Passes over n rows in which the mean is fitted."""
        n_epochs = 10 if n < 100_000 else 6
        # Classes of few rows would otherwise be in few steps.
        n_epochs = max(n_epochs, min(20, 160 * self.data.n_classes // n))
        # A few hundred steps, however large the batch.
        return max(n_epochs, 300 * (self.plan.batch_size or 0) // n)

    def _mean_settings(self, n: int, **changes: object) -> MeanSettings:
        p = self.plan
        n_epochs = math.ceil(min(p.max_epochs, self._mean_epochs(n)))
        batch = p.batch_size or max(256, min(8192, 2 ** round(math.log2(n_epochs * n / 500))))
        settings = MeanSettings(
            p.likelihood,
            p.bound,
            n_epochs=n_epochs,
            batch_size=batch,
            # Larger batches have less noise, and can afford larger steps.
            learning_rate=p.options.mean_learning_rate * min(2.0, max(1.0, batch / 1024) ** 0.5),
            learn_mean=p.learn_mean,
            class_batch=p.class_batch,
            cache_bytes=cache_bytes(p.options.cache_mb, self.data),
            jitter=p.options.jitter,
        )
        return replace(settings, **changes)  # type: ignore[arg-type]


def rough(kernel: Kernel) -> Kernel:
    """A Matérn 5/2 kernel with the parameters of an RBF, on the same inputs."""
    if isinstance(kernel, Normalised):
        return replace(kernel, kernel=rough(kernel.kernel))
    return Matern52(kernel.lengthscale, kernel.variance)  # type: ignore[attr-defined]


def cache_bytes(cache_mb: int | str, data: Dataset) -> int:
    """Bytes that cached kernel values may take."""
    if cache_mb != "auto":
        return int(cache_mb) * 2**20
    if data.like.device.type == "cuda":
        return int(0.4 * torch.cuda.mem_get_info(data.like.device)[0])
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**31
    return int(0.4 * free)
