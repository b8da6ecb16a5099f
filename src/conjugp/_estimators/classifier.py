"""GPClassifier: scikit-learn's face. Checks, labels, dtype, device; the maths is elsewhere."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import check_is_fitted, column_or_1d

from conjugp._estimators.agreement import (
    check_distributed,
    check_parameters_agree,
    check_shards,
    open_journal,
)
from conjugp._estimators.model_file import Saveable
from conjugp._estimators.predicting import ProbabilisticClassifier, without_interrupts
from conjugp._estimators.progress import ProgressBar
from conjugp._estimators.reading import MEMORY_BYTES, read
from conjugp._estimators.rows import check_training_data, check_weight, names_of, unchanged_on_error
from conjugp._fit.fit import Fitted, fit, salvage
from conjugp._fit.options import (
    SMALL_ROWS,
    Checked,
    FitOptions,
    check_device,
    check_parameters,
    seed_of,
)
from conjugp._fit.partial import Stream
from conjugp._fit.plan import STREAM_INDUCING, Run, make_plan, start_mean
from conjugp._gp.predictor import Integration, Predictor
from conjugp._gp.temperature import Calibration
from conjugp._inference.settings import Progress
from conjugp._inputs.inputs import Inputs
from conjugp._numerics.linalg import NotPositiveDefiniteError
from conjugp._numerics.threads import for_rows
from conjugp._persistence.files import check_path
from conjugp._persistence.journal import Journal
from conjugp._rows.canonical import Rows
from conjugp._rows.dataset import Dataset
from conjugp._rows.group import ALONE, Group, current
from conjugp._rows.on_disk import Store
from conjugp._rows.sources import Batch, array_batches, batches
from conjugp.kernels import RBF, Kernel
from conjugp.likelihoods import Likelihood

_STREAM_CACHE_MB = 512  # kernel values kept in fits of streams


class GPClassifier(Saveable, ProbabilisticClassifier):
    """Multi-class Gaussian process classification with calibrated probabilities.

    One latent function per class under a logistic-softmax likelihood, inferred by closed-form
    variational updates. Inputs need no scaling, and nothing needs tuning.

    Parameters
    ----------
    kernel : Kernel, str or None, default=None
        Covariance function, in the units of X. Its parameters that are ``None`` come from the
        data. A name such as ``"rbf"``, ``"matern32"`` or ``"rbf + linear"`` leaves all of them to
        the data. ``None`` or ``"auto"`` chooses kernel, input scales and lengthscales.
    likelihood : {"logistic-softmax", "softmax", "robust-max", "heaviside", "dirichlet"} or \
            Likelihood, default="logistic-softmax"
        Likelihood of the labels given the latent functions.
    bound : str or None, default=None
        The expected log-likelihood or a lower bound on it; ``None`` is the likelihood's tightest.
        The logistic-softmax has ``"exact"``, which is the value itself, and the bounds
        ``"tight"``, ``"collapsed"`` and ``"augmented"``, the paper's.
    inference : {"auto", "mc-vi", "ep"}, default="auto"
        ``"auto"`` raises the bound, ``"mc-vi"`` the expected log-likelihood itself, sampled;
        ``"ep"`` is expectation propagation, for ``likelihood="heaviside"``.
    n_inducing : int, "auto" or None, default="auto"
        Number of inducing points. ``None`` makes every training point one: no sparse
        approximation.
    inducing : {"kmeans", "greedy", "random"} or array of shape (m, n_features), default="kmeans"
        Where the inducing points are: k-means++ centres (of each class, where there are many
        rows), greatest conditional variance, random training points, or as given.
    learn_inducing : bool or "auto", default="auto"
        Whether inducing points move with the hyperparameters; ``"auto"`` does so where mean and
        covariance share fewer points than there are rows.
    batch_size : int, "auto" or None, default="auto"
        Rows per step; ``None`` is the full batch, with which ``"collapsed"`` and ``"augmented"``
        are exact coordinate ascent where mean and covariance share their inducing points.
    class_batch : int, "auto" or None, default="auto"
        Classes that a minibatch step samples beside the labels of its rows, for thousands of
        classes: its cost then does not grow with their number. ``None`` sums over all classes,
        ``"auto"`` does so up to 2,000 classes.
    learn_hyperparameters : bool, default=True
        Whether kernel parameters are learned.
    shared_kernel : bool, default=True
        One kernel for all classes, or one for each.
    covariance : {"auto", "full", "shared", "diagonal", "none"}, default="auto"
        Posterior covariance: one matrix per class on the same inducing points as the mean, or one
        for all classes, or a diagonal per class, on the first of the mean's inducing points; or
        ``"none"``: the mode of the posterior, a point with no uncertainty of its own, whose
        probabilities owe their calibration to the temperature alone.
    prior_mean : "auto", float or array of shape (n_classes,), default="auto"
        Prior mean of the latent functions; ``"auto"`` learns one per class.
    temperature : "auto", None or float, default="auto"
        Exponent 1/T on the probabilities. ``"auto"`` finds T on rows the fit has not seen,
        ``None`` leaves the posterior predictive as it is.
    max_epochs : float, default=100
        Most passes over the data, at least a few with the full batch and at most 20 where the mean
        has its own inducing points; minibatch fits may stop within one.
    tol : float, default=1e-3
        Gain in nats per unit of sample weight below which the ELBO counts as flat.
    learning_rate : float, default=0.1
        Adam's step size for hyperparameters; twice that with the full batch.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes; they multiply sample weights.
    warm_start : bool, default=False
        Whether ``fit`` goes on from the previous fit: from all of it where mean and covariance
        share their inducing points, from its kernel otherwise.
    device : str, default="auto"
        ``"auto"`` takes a GPU for large data where there is one; else a CPU or CUDA device.
    dtype : {"float32", "float64"}, default="float32"
        Working precision. Up to 1,000 distinct rows it is float64 in any case.
    random_state : int, RandomState instance or None, default=None
        Seed; the same seed gives the same bits on one machine.
    verbose : int, default=0
        1 shows a progress bar.
    categorical : "auto" or list of str or int, default="auto"
        Columns of X, by name or position, whose numbers are codes of categories. Text is a
        category in any case.
    ignore : list of str or int, default=()
        Columns of X, by name or position, that are left out.
    options : FitOptions or None, default=None
        Rarer settings.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    kernel_ : Kernel or list of Kernel
        Fitted kernel in the units of X; a list with one per class if ``shared_kernel=False``.
    inducing_points_ : ndarray of shape (m, n_features)
        Inducing points in the units of X.
    prior_mean_ : ndarray of shape (n_classes,)
        Prior mean of each class.
    elbo_ : float
        Evidence lower bound of the fitted model on the training data, all constants included;
        estimated from 2,048 rows, fewer with many classes, where there are more.
    history_ : list of dict
        Reports during the fit: stage, epoch, n_epochs, value, measure (what the value is: the
        ELBO, the log posterior of the mean, a held-out log-likelihood) and seconds.
    n_iter_ : int
        Passes over the training data in the final fit, or until Ctrl-C, rounded up.
    converged_ : bool
        Whether the objective became flat, or the steps of a decoupled fit shrank to nothing as
        planned.
    temperature_ : float
        Temperature of the probabilities.
    variance_scale_ : float
        Share of the latent variance that ``predict_proba`` integrates over: 1, except where the
        held-out rows of a decoupled fit, or of one by minibatches, preferred less.
    class_gap_ : float
        What sampling classes cost at the end of the fit: nats per row by which the bound that was
        raised lies below the one of all classes; 0 where ``class_batch`` did not matter.
    columns_ : dict of str to str, or None
        What became of each column of a table with text, categories, dates or gaps: `kernel_` and
        `inducing_points_` speak of the features that they became. None for plain numbers.
    features_ : list of str, or None
        Names of the features that columns of a table became; of plain numbers their own names.
    inducing_columns_ : dict of str to ndarray, or None
        Inducing points in the columns of a table: numbers, dates, the nearest level. None for
        plain numbers.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of shape (n_features,)
        Names of the features, if X had string column names.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from conjugp import GPClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = GPClassifier(random_state=0).fit(X, y)
    >>> clf.predict_proba(X[:1]).shape
    (1, 3)
    """

    def __init__(
        self,
        kernel: Kernel | str | None = None,
        *,
        likelihood: str | Likelihood = "logistic-softmax",
        bound: str | None = None,
        inference: str = "auto",
        n_inducing: int | str | None = "auto",
        inducing: str | ArrayLike = "kmeans",
        learn_inducing: bool | str = "auto",
        batch_size: int | str | None = "auto",
        class_batch: int | str | None = "auto",
        learn_hyperparameters: bool = True,
        shared_kernel: bool = True,
        covariance: str = "auto",
        prior_mean: str | float | ArrayLike = "auto",
        temperature: str | float | None = "auto",
        max_epochs: float = 100,
        tol: float = 1e-3,
        learning_rate: float = 0.1,
        class_weight: dict[Any, float] | str | None = None,
        warm_start: bool = False,
        device: str = "auto",
        dtype: str = "float32",
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
        categorical: str | Sequence[str | int] = "auto",
        ignore: Sequence[str | int] = (),
        options: FitOptions | None = None,
    ) -> None:
        self.kernel = kernel
        self.likelihood = likelihood
        self.bound = bound
        self.inference = inference
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.learn_inducing = learn_inducing
        self.batch_size = batch_size
        self.class_batch = class_batch
        self.learn_hyperparameters = learn_hyperparameters
        self.shared_kernel = shared_kernel
        self.covariance = covariance
        self.prior_mean = prior_mean
        self.temperature = temperature
        self.max_epochs = max_epochs
        self.tol = tol
        self.learning_rate = learning_rate
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.device = device
        self.dtype = dtype
        self.random_state = random_state
        self.verbose = verbose
        self.categorical = categorical
        self.ignore = ignore
        self.options = options

    @classmethod
    def paper(cls, **changes: Any) -> GPClassifier:
        """The method exactly as in the paper, errata apart, for reproduction and comparison.

        Augmented bound, zero prior mean, no temperature, 200 fixed k-means++ inducing points,
        batches of 200, an ARD RBF started at variance 1 and the median distance, Adam on the
        kernel, Monte Carlo prediction.

        Parameters
        ----------
        **changes
            Constructor arguments that replace those of the preset.
        """
        settings: dict[str, Any] = {
            "kernel": RBF(),
            "bound": "augmented",
            "prior_mean": 0.0,
            "temperature": None,
            "covariance": "full",
            "n_inducing": 200,
            "inducing": "kmeans",
            "learn_inducing": False,
            "batch_size": 200,
            "learning_rate": 0.02,
            "options": FitOptions(prediction="mc", kernel_prior=0.0, initial_variance=1.0),
        }
        return cls(**{**settings, **changes})

    # --- fitting ------------------------------------------------------------------------------

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> GPClassifier:
        """Fit the model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data, in any units. A large NumPy memmap stays on disk.
        y : array-like of shape (n_samples,)
            Class labels.
        sample_weight : array-like of shape (n_samples,) or None, default=None
            Weights of the rows; a weight of two is the same as the row given twice. So their scale
            matters: the more rows there are, the narrower is the posterior. Weights that only
            compare rows with one another should average 1.
        checkpoint : path or None, default=None
            File in which the state of the fit is kept as it goes. If it exists, the fit goes on
            from there and ends as it would have without the interruption; it must belong to the
            same data, parameters and versions. When the fit has ended the file holds its result,
            and the same call gives that at once.

        Returns
        -------
        self : GPClassifier
            The fitted classifier.
        """
        group = self._group()
        if group.size > 1:
            return self._fit(
                checkpoint, lambda _: check_shards(self, X, y, sample_weight, group), group
            )
        if isinstance(X, np.memmap) and X.nbytes > MEMORY_BYTES and X.ndim == 2:
            y_, weight = column_or_1d(y, warn=True), sample_weight
            weight = None if weight is None else check_weight(weight, np.empty((len(X), 0)))
            check_consistent_length(X, y_, weight)
            found = array_batches(X, y_, weight)
            return self._fit(checkpoint, lambda bar: self._read(found, bar), stream=True)
        return self._fit(checkpoint, lambda _: check_training_data(self, X, y, sample_weight))

    def fit_stream(
        self,
        source: Any,
        classes: ArrayLike | None = None,
        *,
        target: str | None = None,
        sample_weight: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> GPClassifier:
        """Fit the model to rows that need not fit in memory.

        The source is read once. Rows that take more than 256 MB go to a temporary file, put in
        random order on the way, so that sorted sources do no harm; memory does not grow with
        their number. The result is that of ``fit`` on the same rows, whatever their order.

        Parameters
        ----------
        source : path, torch Dataset or DataLoader, or iterable
            A Parquet file or a folder of them, with the label in column `target`; or batches
            ``(X, y)`` or ``(X, y, sample_weight)``, or DataFrames if `target` is given.
        classes : array-like of shape (n_classes,) or None, default=None
            All labels, if there are some that the source may not have; ``None`` takes those that
            it has.
        target : str or None, default=None
            Name of the column of labels.
        sample_weight : str or None, default=None
            Name of the column of weights, if there is one; what they mean is said in `fit`.
        checkpoint : path or None, default=None
            As in `fit`. The source is read again when the fit goes on.

        Returns
        -------
        self : GPClassifier
            The fitted classifier.
        """
        if self._group().size > 1:
            raise ValueError(
                "fit_stream reads one source in one process; in a process group read each rank's "
                "share into memory and call fit, or set options=FitOptions(distributed=False)"
            )
        known = None if classes is None else np.unique(column_or_1d(classes))
        if known is not None and len(known) < 2:
            raise ValueError("classes must hold at least 2 classes, got one class")
        found = batches(source, target, sample_weight)
        return self._fit(checkpoint, lambda bar: self._read(found, bar, known), stream=True)

    def _read(
        self, found: Iterator[Batch], bar: ProgressBar | None, classes: NDArray[Any] | None = None
    ) -> tuple[Rows | Store, NDArray[Any]]:
        """Rows in batches, in memory or on disk."""

        def report(n: int) -> None:
            if bar is not None:
                bar(Progress("reading", 0, 0, n, "rows"))

        return read(self, found, classes, (self.options or FitOptions()).spool, report)

    def _fit(
        self,
        checkpoint: str | os.PathLike[str] | None,
        load: Callable[[ProgressBar | None], tuple[Rows | Store, NDArray[Any]]],
        group: Group = ALONE,
        stream: bool = False,
    ) -> GPClassifier:
        """Fit to checked rows, wherever they are; those of a stream are not to fill memory."""

        def check() -> Checked:
            if checkpoint is not None and group.rank == 0:
                check_path("checkpoint", checkpoint)
            if group.size > 1:
                check_distributed(self)
            return check_parameters(self)

        checked = group.all(check)
        if stream and checked.options.cache_mb == "auto":
            options = replace(checked.options, cache_mb=_STREAM_CACHE_MB)
            checked = checked._replace(options=options)
        kernel, options = checked.kernel, checked.options
        if group.size > 1:
            check_parameters_agree(self, group, checkpoint is not None)
        stopped: KeyboardInterrupt | None = None
        bar, shown = None, self.verbose if group.rank == 0 else 0
        with ExitStack() as guard, unchanged_on_error(self):
            if shown or options.callback is not None:
                bar = guard.enter_context(ProgressBar(options.callback, shown))
            rows, classes = load(bar)
            n = sum(group.gather(rows.n))
            device = check_device(self.device, n, group)
            double = self.dtype == "float64" or n <= SMALL_ROWS
            dtype = torch.float64 if double else torch.float32

            warm = getattr(self, "_fitted", None) if self.warm_start else None
            if warm is not None:
                plain = self._encoder is None and self._inputs.encoder is None
                same = plain and np.array_equal(classes, self.classes_) and warm.state is not None
                warm = warm if same and rows.n_features == self._inputs.n_features else None
            names = names_of(self)
            inputs = (
                self._inputs
                if warm
                else Inputs.fit(rows, [kernel], names, group, encoder=self._encoder)
            )
            scaling = inputs.scaling
            start = warm.state if warm else None

            def prepared(dtype: torch.dtype, journal: Journal | None = None) -> tuple[Run, Dataset]:
                data = rows.working(scaling, len(classes), dtype, device)
                if journal is None:
                    seed = group.same(self._seed())
                    journal = Journal(seed)
                    if checkpoint is not None:
                        journal = open_journal(self, checkpoint, rows, classes, data, warm, seed)
                plan = make_plan(self, data, inputs, checked, journal.seed)
                return Run(plan, bar, journal), data

            run, data = prepared(dtype)
            try:
                with for_rows(n):
                    try:
                        fitted, found = fit(run, data, scaling, start)
                    except (NotPositiveDefiniteError, FloatingPointError):
                        if dtype == torch.float64 or group.size > 1:
                            raise
                        # All over again with twice the digits. Killed, it would come to this again.
                        run, data = prepared(torch.float64, Journal(seed=run.journal.seed))
                        fitted, found = fit(run, data, scaling, start)
                run.journal.close()
            except KeyboardInterrupt as interrupt:
                # Ranks that stop at different places cannot put a model together.
                stopped = interrupt
                guard.enter_context(without_interrupts())
                saved = salvage(run, data, scaling) if group.size == 1 else None
                if saved is None:
                    raise
                fitted, found = saved
            if warm and names != inputs.names:
                inputs = replace(inputs, names=names)
            self._keep(fitted, replace(inputs, scaling=found), classes)
            self.__dict__.pop("_stream", None)
        if stopped is not None:
            if options.on_interrupt == "raise":
                raise stopped
            return self
        if fitted.saturated:
            other = "" if checked.bound == "exact" else "bound='exact', or "
            warnings.warn(
                f"the fit with bound={checked.bound!r} says next to nothing: all latent "
                "functions are far above zero, where every class is as likely as any other, and "
                f"that is the optimum with so large a kernel variance; use {other}a smaller "
                "variance",
                UserWarning,
                stacklevel=3,
            )
        if not fitted.converged:
            warnings.warn(
                f"the fit stopped after max_epochs={self.max_epochs} passes before its objective "
                "became flat; raise max_epochs or tol",
                ConvergenceWarning,
                stacklevel=3,
            )
        return self

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> GPClassifier:
        """Learn from one more batch of rows.

        N is the weight seen so far. Input scales come from the first call, inducing points too,
        and more are added from later batches while there are fewer than ``n_inducing``. The
        temperature stays 1 until ``calibrate``. After ``fit`` it goes on from that posterior, and
        keeps its temperature, where mean and covariance share their inducing points.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            A batch of rows.
        y : array-like of shape (n_samples,)
            Their labels.
        classes : array-like of shape (n_classes,) or None, default=None
            All labels that will ever come; needed in the first call.
        sample_weight : array-like of shape (n_samples,) or None, default=None
            Weights of the rows, as in `fit`.

        Returns
        -------
        self : GPClassifier
            The classifier, updated.
        """
        kernel, likelihood, bound, options = check_parameters(self)
        if not self.shared_kernel:
            raise ValueError("partial_fit needs shared_kernel=True: one kernel for all classes")
        fitted = hasattr(self, "_fitted")
        if not fitted and classes is None:
            raise ValueError("classes must be given in the first call of partial_fit")
        known = np.unique(column_or_1d(classes)) if classes is not None else self.classes_
        if fitted and not np.array_equal(known, self.classes_):
            raise ValueError(f"classes changed from {self.classes_} to {known}")
        if len(known) < 2:
            raise ValueError("classes must hold at least 2 classes, got one class")
        with unchanged_on_error(self):
            rows, _ = check_training_data(self, X, y, sample_weight, known, reset=not fitted)
            inputs = (
                self._inputs
                if fitted
                else Inputs.fit(
                    rows, [kernel], names_of(self), complete=False, encoder=self._encoder
                )
            )
            stream, goes_on = getattr(self, "_stream", None), True
            if stream is None:
                limit = STREAM_INDUCING if self.n_inducing in ("auto", None) else self.n_inducing
                inference = "ep" if self.inference == "ep" else "vi"
                seed = self._seed()
                share = options.conditional_variance
                kept = 1.0 if share == "auto" else float(share)
                kernel = inputs.inward(kernel)
                stream = Stream(kernel, int(limit), likelihood, bound, seed, inference, kept)  # type: ignore[arg-type]
                goes_on = fitted and stream.resume(self._fitted)
                if fitted and not goes_on:
                    warnings.warn(
                        "the fitted posterior is decoupled, and a stream needs one set of inducing "
                        "points: partial_fit keeps its kernel and starts again from the prior",
                        UserWarning,
                        stacklevel=2,
                    )
            double = self.dtype == "float64" or rows.n <= SMALL_ROWS
            dtype = torch.float64 if double else torch.float32
            device = check_device(self.device, rows.n)
            if stream.state is not None:  # the first batch has settled both
                dtype, device = stream.state.Z.dtype, stream.state.Z.device
            data = rows.in_memory(inputs.scaling, len(known), dtype, device)
            updated = stream.learn(
                data,
                start_mean(self.prior_mean, data, likelihood),
                learn_kernel=self.learn_hyperparameters,
                learn_mean=isinstance(self.prior_mean, str),
                learning_rate=self.learning_rate,
                batch_size=512 if self.batch_size == "auto" else self.batch_size,  # type: ignore[arg-type]
                options=options,
            )
        model = updated.model
        if fitted and goes_on:
            old = self._fitted.model
            model = model.with_calibration(old.calibration, old.shares)
        elif self.temperature not in (None, "auto"):
            given = Calibration(float(self.temperature))  # type: ignore[arg-type]
            model = model.with_calibration(given, None)
        self._keep(replace(updated, model=model), inputs, known)
        self._stream = stream
        return self

    def calibrate(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> GPClassifier:
        """Set the temperature from labelled rows that the fit has not seen.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows held back from the fit.
        y : array-like of shape (n_samples,)
            Their labels.
        sample_weight : array-like of shape (n_samples,) or None, default=None
            Weights of the rows.

        Returns
        -------
        self : GPClassifier
            The classifier, with a new ``temperature_``.
        """
        data = self._labelled(X, y, sample_weight)
        self._fitted = replace(self._fitted, model=self._predictor.calibrated(data))
        return self

    def elbo(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The evidence lower bound with these rows as the data, all constants included.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows.
        y : array-like of shape (n_samples,)
            Their labels.
        sample_weight : array-like of shape (n_samples,) or None, default=None
            Weights of the rows.

        Returns
        -------
        elbo : float
            Higher is better.
        """
        return self._predictor.elbo(self._labelled(X, y, sample_weight))

    @property
    def temperature_(self) -> float:
        """Temperature of the probabilities."""
        return self._fitted.model.calibration.temperature

    @temperature_.setter
    def temperature_(self, value: float) -> None:
        self._recalibrate(temperature=value)

    @property
    def variance_scale_(self) -> float:
        """Share of the latent variance that probabilities integrate over."""
        return self._fitted.model.calibration.variance_scale

    @variance_scale_.setter
    def variance_scale_(self, value: float) -> None:
        self._recalibrate(variance_scale=value)

    def _recalibrate(self, **changes: float) -> None:
        model = self._fitted.model
        model = model.with_calibration(model.calibration._replace(**changes), model.shares)
        self._fitted = replace(self._fitted, model=model)

    def _group(self) -> Group:
        """The ranks that fit together; this process alone where there is no group, or not to be."""
        alone = isinstance(self.options, FitOptions) and self.options.distributed != "auto"
        return ALONE if alone else current()

    def _seed(self) -> int:
        return seed_of(self.random_state)

    # --- fitted state -------------------------------------------------------------------------

    def _keep(self, fitted: Fitted, inputs: Inputs, classes: NDArray[Any]) -> None:
        """Set all fitted attributes at once."""
        self._keep_face(fitted.model, inputs, classes)
        self.elbo_ = fitted.elbo
        self.history_ = fitted.history
        self.n_iter_ = max(1, math.ceil(fitted.epochs))
        self.converged_ = fitted.converged
        self.class_gap_ = fitted.class_gap
        self._fitted = fitted
        self._prediction_seed = self._seed() if isinstance(self.random_state, int) else 0

    @property
    def _predictor(self) -> Predictor:
        check_is_fitted(self)
        return self._fitted.model

    def _integration(self) -> Integration:
        options = self.options or FitOptions()
        return Integration(options.prediction, options.n_samples, self._prediction_seed)
