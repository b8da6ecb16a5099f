"""GPClassifier: scikit-learn's face. Checks, labels, dtype, device; the maths is elsewhere."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor

from conjugp.calibration import VARIANCE_SCALES, Calibration, fit_calibration
from conjugp.covariance import FAMILIES
from conjugp.fitting import COUPLED_INDUCING, MEAN_INDUCING, SMALL, Fitted, Fitter, Plan
from conjugp.inducing import STRATEGIES
from conjugp.kernels import Kernel
from conjugp.likelihoods import Likelihood, get_likelihood
from conjugp.options import FitOptions, number, one_of, whole
from conjugp.prediction import apply_temperature, predict_proba
from conjugp.progress import ProgressBar
from conjugp.rows import Rows, canonical
from conjugp.scaling import Scaling, fit_scaling
from conjugp.stream import Stream
from conjugp.training import Data

_SMALL_ROWS = 1000  # up to here float64 costs nothing that matters


class GPClassifier(ClassifierMixin, BaseEstimator):
    """Multi-class Gaussian process classification with calibrated probabilities.

    One latent function per class under a logistic-softmax likelihood, inferred by closed-form
    variational updates. Inputs need no scaling, and nothing needs tuning.

    Parameters
    ----------
    kernel : Kernel or None, default=None
        Covariance function, in the units of X. Its parameters that are ``None`` come from the
        data. ``None`` chooses kernel, input scales and lengthscales.
    likelihood : str or Likelihood, default="logistic-softmax"
        Likelihood of the labels given the latent functions.
    bound : {"tight", "collapsed", "augmented"} or None, default=None
        Lower bound on the expected log-likelihood; ``None`` is the likelihood's tightest,
        ``"augmented"`` the paper's.
    n_inducing : int, "auto" or None, default="auto"
        Number of inducing points. ``None`` makes every training point one: no sparse
        approximation.
    inducing : {"kmeans", "greedy", "random"} or array of shape (m, n_features), default="kmeans"
        Where the inducing points are: k-means++ centres, greatest conditional variance, random
        training points, or as given.
    learn_inducing : bool or "auto", default="auto"
        Whether inducing points move with the hyperparameters; ``"auto"`` does so where mean and
        covariance share fewer points than there are rows.
    batch_size : int, "auto" or None, default="auto"
        Rows per step; ``None`` is the full batch, with which ``"collapsed"`` and ``"augmented"``
        are exact coordinate ascent.
    learn_hyperparameters : bool, default=True
        Whether kernel parameters are learned.
    shared_kernel : bool, default=True
        One kernel for all classes, or one for each.
    covariance : {"auto", "full", "shared", "diagonal"}, default="auto"
        Posterior covariance: one matrix per class on the same inducing points as the mean, or one
        for all classes, or a diagonal per class, on the first of the mean's inducing points.
    prior_mean : "auto", float or array of shape (n_classes,), default="auto"
        Prior mean of the latent functions; ``"auto"`` learns one per class.
    temperature : "auto", None or float, default="auto"
        Exponent 1/T on the probabilities. ``"auto"`` finds T on rows the fit has not seen,
        ``None`` leaves the posterior predictive as it is.
    max_epochs : int, default=100
        Most passes over the data.
    tol : float, default=1e-3
        Gain in nats per unit of sample weight below which the ELBO counts as flat.
    learning_rate : float, default=0.05
        Adam's step size for hyperparameters.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes; they multiply sample weights.
    warm_start : bool, default=False
        Whether ``fit`` goes on from the previous fit's kernel and inducing points.
    device : str, default="auto"
        ``"auto"`` takes a GPU for large data where there is one; else any torch device.
    dtype : {"float32", "float64"}, default="float32"
        Working precision. Up to 1,000 distinct rows it is float64 in any case.
    random_state : int, RandomState instance or None, default=None
        Seed; the same seed gives the same bits on one machine.
    verbose : int, default=0
        1 shows a progress bar.
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
        estimated from 10,000 rows where there are more.
    history_ : list of dict
        Stage, epoch, objective and seconds of every report during the fit.
    n_iter_ : int
        Passes over the training data in the final fit, rounded up.
    converged_ : bool
        Whether the objective became flat.
    temperature_ : float
        Temperature of the probabilities.
    variance_scale_ : float
        Share of the latent variance that ``predict_proba`` integrates over: 1, except where a
        decoupled posterior's held-out rows preferred less.
    n_features_in_ : int
        Number of features.
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
        kernel: Kernel | None = None,
        *,
        likelihood: str | Likelihood = "logistic-softmax",
        bound: str | None = None,
        n_inducing: int | str | None = "auto",
        inducing: str | ArrayLike = "kmeans",
        learn_inducing: bool | str = "auto",
        batch_size: int | str | None = "auto",
        learn_hyperparameters: bool = True,
        shared_kernel: bool = True,
        covariance: str = "auto",
        prior_mean: str | float | ArrayLike = "auto",
        temperature: str | float | None = "auto",
        max_epochs: int = 100,
        tol: float = 1e-3,
        learning_rate: float = 0.05,
        class_weight: dict[Any, float] | str | None = None,
        warm_start: bool = False,
        device: str = "auto",
        dtype: str = "float32",
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
        options: FitOptions | None = None,
    ) -> None:
        self.kernel = kernel
        self.likelihood = likelihood
        self.bound = bound
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.learn_inducing = learn_inducing
        self.batch_size = batch_size
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
            "bound": "augmented",
            "prior_mean": 0.0,
            "temperature": None,
            "covariance": "full",
            "n_inducing": 200,
            "inducing": "kmeans",
            "learn_inducing": False,
            "batch_size": 200,
            "learning_rate": 0.02,
            "options": FitOptions(prediction="mc", kernel_prior=0.0),
        }
        return cls(**{**settings, **changes})

    # --- fitting ------------------------------------------------------------------------------

    def fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> GPClassifier:
        """Fit the model.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data, in any units.
        y : array-like of shape (n_samples,)
            Class labels.
        sample_weight : array-like of shape (n_samples,) or None, default=None
            Weights of the rows; a weight of two is the same as the row given twice.

        Returns
        -------
        self : GPClassifier
            The fitted classifier.
        """
        likelihood, bound, options = self._check_parameters()
        rows, classes = self._check_training_data(X, y, sample_weight)
        device = self._device(len(rows.X))
        double = self.dtype == "float64" or len(rows.X) <= _SMALL_ROWS
        dtype = torch.float64 if double else torch.float32

        warm = getattr(self, "_fitted", None) if self.warm_start else None
        if warm is not None:
            same = np.array_equal(classes, self.classes_) and warm.state is not None
            warm = warm if same and self.n_features_in_ == self._scaling.shift.size else None
        center = self.kernel is None or self.kernel.stationary
        scaling = self._scaling if warm else fit_scaling(rows.X, rows.weight, center)
        data = Data(
            scaling.apply(rows.X, dtype, device),
            torch.as_tensor(rows.y, device=device),
            torch.as_tensor(rows.weight, dtype=dtype, device=device),
            len(classes),
        )
        kernel = None if self.kernel is None else self.kernel.to_units(1 / scaling.scale)
        plan = self._plan(data, scaling, likelihood, bound, options)
        mean = self._start_mean(data)
        raw_scale = torch.as_tensor(scaling.scale.mean() / scaling.scale)
        bar = ProgressBar(options.callback, self.verbose)
        fitter = Fitter(plan, kernel, data, mean, raw_scale, bar)
        try:
            with torch.no_grad():
                fitted = fitter.run(warm.state if warm else None)
        except KeyboardInterrupt:
            saved = fitter.salvage()
            if saved is None:
                raise
            self._keep(saved, scaling, classes)
            if options.on_interrupt == "raise":
                raise
            return self
        finally:
            bar.close()
        self._keep(fitted, scaling, classes)
        self.__dict__.pop("_stream", None)
        if not fitted.converged:
            warnings.warn(
                f"the fit stopped after max_epochs={self.max_epochs} passes before its objective "
                "became flat; raise max_epochs or tol",
                ConvergenceWarning,
                stacklevel=2,
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
        temperature stays 1 until ``calibrate``. After ``fit`` it goes on from that posterior where
        mean and covariance share their inducing points.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            A batch of rows.
        y : array-like of shape (n_samples,)
            Their labels.
        classes : array-like of shape (n_classes,) or None, default=None
            All labels that will ever come; needed in the first call.
        sample_weight : array-like of shape (n_samples,) or None, default=None
            Weights of the rows.

        Returns
        -------
        self : GPClassifier
            The classifier, updated.
        """
        likelihood, bound, options = self._check_parameters()
        fitted = hasattr(self, "_fitted")
        if not fitted and classes is None:
            raise ValueError("classes must be given in the first call of partial_fit")
        known = np.unique(column_or_1d(classes)) if classes is not None else self.classes_
        if fitted and not np.array_equal(known, self.classes_):
            raise ValueError(f"classes changed from {self.classes_} to {known}")
        if len(known) < 2:
            raise ValueError("classes must hold at least 2 classes, got one class")
        rows, _ = self._check_training_data(X, y, sample_weight, known, reset=not fitted)
        if fitted:
            scaling = self._scaling
        else:
            center = self.kernel is None or self.kernel.stationary
            scaling = fit_scaling(rows.X, rows.weight, center)
        stream = getattr(self, "_stream", None)
        if stream is None:
            limit = COUPLED_INDUCING if self.n_inducing in ("auto", None) else self.n_inducing
            kernel = None if self.kernel is None else self.kernel.to_units(1 / scaling.scale)
            stream = Stream(kernel, int(limit), likelihood, bound, self._seed())  # type: ignore[arg-type]
            if fitted and not stream.resume(self._fitted):
                warnings.warn(
                    "the fitted posterior is decoupled, and a stream needs one set of inducing "
                    "points: partial_fit keeps its kernel and starts again from the prior",
                    UserWarning,
                    stacklevel=2,
                )
        double = self.dtype == "float64" or len(rows.X) <= _SMALL_ROWS
        dtype = stream.dtype or (torch.float64 if double else torch.float32)
        device = stream.device or self._device(len(rows.X))
        data = Data(
            scaling.apply(rows.X, dtype, device),
            torch.as_tensor(rows.y, device=device),
            torch.as_tensor(rows.weight, dtype=dtype, device=device),
            len(known),
        )
        updated = stream.learn(
            data,
            self._start_mean(data),
            learn_kernel=self.learn_hyperparameters,
            learn_mean=isinstance(self.prior_mean, str),
            learning_rate=self.learning_rate,
            batch_size=512 if self.batch_size == "auto" else self.batch_size,  # type: ignore[arg-type]
            options=options,
        )
        kept = (self.temperature_, self.variance_scale_) if hasattr(self, "_stream") else (1.0, 1.0)
        self._keep(updated, scaling, known)
        self.temperature_, self.variance_scale_ = kept
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
        m, v = self._fitted.model.latent(data.X)
        coupled = self._fitted.model.L_inv.shape[-1] == len(self._fitted.model.Z)
        scales = (1.0,) if coupled else VARIANCE_SCALES
        found = fit_calibration(self._fitted.model.likelihood, m, v, data.y, data.weight, scales)
        self.temperature_, self.variance_scale_ = found.temperature, found.variance_scale
        return self

    # --- predicting ---------------------------------------------------------------------------

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Class probabilities.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        proba : ndarray of shape (n_samples, n_classes)
            float64; the rows sum to 1.
        """
        Xt = self._inputs(X)
        options = self.options or FitOptions()
        model = self._fitted.model
        size = 2**14
        parts = []
        for x in Xt.split(size):
            m, v = model.latent(x)
            if self.variance_scale_ == 0.0:
                p = model.likelihood.prob(m.double())
            else:
                p = predict_proba(
                    model.likelihood,
                    m,
                    self.variance_scale_ * v,
                    options.prediction,
                    options.n_samples,
                    self._prediction_seed,
                )
            parts.append(apply_temperature(p, self.temperature_).cpu())
        p = torch.cat(parts).numpy()
        return p / p.sum(axis=1, keepdims=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class of every row.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        labels : ndarray of shape (n_samples,)
            Labels out of ``classes_``.
        """
        p = self.predict_proba(X)
        return self.classes_[p.argmax(axis=1)]

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Logarithms of ``predict_proba``, finite.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        log_proba : ndarray of shape (n_samples, n_classes)
        """
        return np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny))

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """Log-probabilities, or with two classes the log-odds of the second.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        scores : ndarray of shape (n_samples, n_classes) or (n_samples,)
        """
        log_p = self.predict_log_proba(X)
        return log_p[:, 1] - log_p[:, 0] if log_p.shape[1] == 2 else log_p

    def predict_latent(self, X: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and variance of the latent functions under the posterior.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Rows to predict.

        Returns
        -------
        mean, variance : ndarray of shape (n_samples, n_classes)
        """
        m, v = self._fitted_model().latent(self._inputs(X))
        return m.cpu().double().numpy(), v.cpu().double().numpy().copy()

    def sample_latent(
        self,
        X: ArrayLike,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = None,
    ) -> NDArray[np.float64]:
        """Joint draws of the latent functions at the rows of X, at a cost of n_samples³.

        Parameters
        ----------
        X : array-like of shape (n_rows, n_features)
            Where to draw.
        n_samples : int, default=1
            Number of draws.
        random_state : int, RandomState instance or None, default=None
            Seed of the draws.

        Returns
        -------
        draws : ndarray of shape (n_samples, n_rows, n_classes)
        """
        whole("n_samples", n_samples, 1)
        model = self._fitted_model()
        generator = torch.Generator().manual_seed(_seed_of(random_state))
        return model.sample(self._inputs(X), n_samples, generator).cpu().double().numpy()

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
        return self._fitted_model().elbo(self._labelled(X, y, sample_weight))

    # --- checks -------------------------------------------------------------------------------

    def _check_parameters(self) -> tuple[Likelihood, str, FitOptions]:
        """Every argument of the constructor, before any work."""
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise ValueError(
                f"kernel must be a conjugp.kernels.Kernel or None; got {self.kernel!r}"
            )
        likelihood = get_likelihood(self.likelihood)
        bound = likelihood.check_bound(self.bound)
        if self.n_inducing is not None and self.n_inducing != "auto":
            whole("n_inducing", self.n_inducing, 1)
        if isinstance(self.inducing, str):
            one_of("inducing", self.inducing, STRATEGIES)
        if self.learn_inducing != "auto":
            one_of("learn_inducing", self.learn_inducing, (True, False))
        if self.batch_size is not None and self.batch_size != "auto":
            whole("batch_size", self.batch_size, 1)
        for name in ("learn_hyperparameters", "shared_kernel", "warm_start"):
            one_of(name, getattr(self, name), (True, False))
        one_of("covariance", self.covariance, ("auto", *FAMILIES))
        if not self.shared_kernel and self.covariance in ("shared", "diagonal"):
            raise ValueError(
                f"covariance={self.covariance!r} needs one kernel for all classes; "
                "with shared_kernel=False use 'full' or 'auto'"
            )
        if isinstance(self.prior_mean, str) and self.prior_mean != "auto":
            raise ValueError(f"prior_mean must be 'auto' or numbers; got {self.prior_mean!r}")
        if self.temperature is not None and self.temperature != "auto":
            number("temperature", self.temperature, 0, exclusive=True)
        whole("max_epochs", self.max_epochs, 1)
        number("tol", self.tol, 0)
        number("learning_rate", self.learning_rate, 0, exclusive=True)
        one_of("dtype", self.dtype, ("float32", "float64"))
        whole("verbose", self.verbose, 0)
        options = FitOptions() if self.options is None else self.options
        if not isinstance(options, FitOptions):
            raise ValueError(f"options must be a FitOptions or None; got {options!r}")
        options.validate()
        self._device(0)
        return likelihood, bound, options

    def _device(self, n_rows: int) -> torch.device:
        if self.device == "auto":
            gpu = torch.cuda.is_available() and n_rows > _SMALL_ROWS
            return torch.device("cuda" if gpu else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"device must be 'auto' or a torch device; got {self.device!r}"
            ) from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={self.device!r}, but torch finds no CUDA device")
        return device

    def _check_training_data(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None,
        classes: NDArray[Any] | None = None,
        reset: bool = True,
    ) -> tuple[Rows, NDArray[Any]]:
        """Checked, weighted, merged rows, and the classes."""
        X_, y_ = _numeric(self, X, y, reset)
        check_classification_targets(y_)
        y_ = column_or_1d(y_, warn=True)
        weight = _check_sample_weight(sample_weight, X_, dtype=np.float64, ensure_non_negative=True)
        positive = weight > 0
        if not positive.any():
            raise ValueError("sample_weight is zero for every row: there is nothing to fit")
        found = np.unique(y_[positive])
        if classes is None:
            classes = found
            if len(classes) < 2:
                raise ValueError(
                    "y must hold at least 2 classes with positive weight, got one class: "
                    f"{classes.tolist()}"
                )
        unseen = np.setdiff1d(found, classes)
        if len(unseen):
            raise ValueError(f"y holds labels that are not in classes: {unseen.tolist()}")
        X_, y_, weight = X_[positive], y_[positive], weight[positive]
        labels = np.searchsorted(classes, y_)
        weight = weight * self._class_weights(classes, y_, labels, weight)
        rows = canonical(X_, labels, weight)
        if not len(rows.X):
            raise ValueError("class_weight and sample_weight leave no row with any weight")
        return rows, classes

    def _class_weights(
        self, classes: NDArray[Any], y: NDArray[Any], labels: NDArray[Any], weight: NDArray[Any]
    ) -> NDArray[np.float64]:
        """The factor of every row."""
        if self.class_weight is None:
            return np.ones(len(y))
        if self.class_weight == "balanced":
            mass = np.bincount(labels, weights=weight, minlength=len(classes))
            factor = mass.sum() / (len(classes) * np.maximum(mass, np.finfo(float).tiny))
        else:
            factor = compute_class_weight(self.class_weight, classes=classes, y=y)
        if not np.all(np.isfinite(factor)) or np.any(factor < 0):
            raise ValueError("class_weight must be non-negative and finite")
        return np.asarray(factor, dtype=np.float64)[labels]

    def _plan(
        self,
        data: Data,
        scaling: Scaling,
        likelihood: Likelihood,
        bound: str,
        options: FitOptions,
    ) -> Plan:
        """Settle every "auto" from N, C and D."""
        n = len(data.y)
        given: str | Tensor = self.inducing if isinstance(self.inducing, str) else ""
        if not isinstance(self.inducing, str):
            Z = np.asarray(self.inducing, dtype=np.float64)
            if Z.ndim != 2 or Z.shape[1] != data.X.shape[1] or not len(Z):
                raise ValueError(f"inducing must have shape (m, {data.X.shape[1]}); got {Z.shape}")
            if not np.isfinite(Z).all():
                raise ValueError("inducing contains NaN or infinity")
            given = scaling.apply(Z, data.X.dtype, data.X.device)
        M = self.n_inducing
        if isinstance(given, Tensor):
            M = len(given)
        auto = self.covariance == "auto"
        few = n <= SMALL if M == "auto" else M is None or int(M) <= SMALL
        coupled = self.covariance == "full" or not self.shared_kernel or (auto and few)
        if M is None:
            M = n
        elif M == "auto":
            many = max(1000, min(MEAN_INDUCING, n // 5))
            M = min(n, (SMALL if few else COUPLED_INDUCING) if coupled else many)
        batch = self.batch_size
        if batch == "auto":
            batch = (None if n <= 1000 else 512) if coupled else 0
        elif batch is None and not coupled:
            batch = n
        learn_inducing = self.learn_inducing
        if learn_inducing == "auto":
            learn_inducing = coupled and int(M) < n and not isinstance(given, Tensor)
        temperature = self.temperature
        return Plan(
            likelihood,
            bound,
            "coupled" if coupled else ("shared" if auto else self.covariance),
            min(int(M), n) if not isinstance(given, Tensor) else int(M),
            given,
            bool(learn_inducing),
            self.learn_hyperparameters,
            isinstance(self.prior_mean, str),
            self.shared_kernel,
            batch,  # type: ignore[arg-type]
            self.max_epochs,
            self.tol,
            self.learning_rate,
            1.0 if temperature is None else None if temperature == "auto" else float(temperature),
            options,
            self._seed(),
        )

    def _start_mean(self, data: Data) -> Tensor:
        C = data.n_classes
        if isinstance(self.prior_mean, str):
            # Where all classes are alike, the sum of σ(f) is then about one.
            return data.X.new_full((C,), -math.log(max(C - 1, 1)))
        try:
            mean = np.broadcast_to(np.asarray(self.prior_mean, dtype=np.float64), (C,))
        except ValueError as error:
            raise ValueError(f"prior_mean must be a number or {C} numbers") from error
        if not np.isfinite(mean).all():
            raise ValueError("prior_mean contains NaN or infinity")
        return torch.tensor(mean).to(data.X)

    def _seed(self) -> int:
        return _seed_of(self.random_state)

    # --- fitted state -------------------------------------------------------------------------

    def _keep(self, fitted: Fitted, scaling: Scaling, classes: NDArray[Any]) -> None:
        """Set all fitted attributes at once."""
        model = fitted.model
        kernels = [k.to_units(scaling.scale).frozen() for k in model.kernels]
        self.classes_ = classes
        self.kernel_ = kernels[0] if len(kernels) == 1 else kernels
        self.inducing_points_ = scaling.invert(model.Z)
        self.prior_mean_ = model.mean.cpu().double().numpy()
        self.elbo_ = fitted.elbo
        self.history_ = fitted.history
        self.n_iter_ = max(1, math.ceil(fitted.epochs))
        self.converged_ = fitted.converged
        calibration: Calibration = fitted.calibration
        self.temperature_ = calibration.temperature
        self.variance_scale_ = calibration.variance_scale
        self._fitted, self._scaling = fitted, scaling
        self._prediction_seed = self._seed() if isinstance(self.random_state, int) else 0

    def _fitted_model(self):
        check_is_fitted(self)
        return self._fitted.model

    def _inputs(self, X: ArrayLike) -> Tensor:
        """Checked rows in working units."""
        model = self._fitted_model()
        X_, _ = _numeric(self, X, None, False)
        return self._scaling.apply(X_, model.Z.dtype, model.Z.device)

    def _labelled(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None) -> Data:
        """Checked rows with labels out of ``classes_``."""
        model = self._fitted_model()
        X_, y_ = _numeric(self, X, y, False)
        y_ = column_or_1d(y_, warn=True)
        unseen = np.setdiff1d(y_, self.classes_)
        if len(unseen):
            raise ValueError(f"y holds labels that were not in the fit: {unseen.tolist()}")
        weight = _check_sample_weight(sample_weight, X_, dtype=np.float64, ensure_non_negative=True)
        return Data(
            self._scaling.apply(X_, model.Z.dtype, model.Z.device),
            torch.as_tensor(np.searchsorted(self.classes_, y_), device=model.Z.device),
            torch.as_tensor(weight).to(model.Z),
            len(self.classes_),
        )


def _seed_of(random_state: int | np.random.RandomState | None) -> int:
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def _numeric(
    estimator: GPClassifier, X: Any, y: Any, reset: bool
) -> tuple[NDArray[np.floating], Any]:
    """Checked X as float32 or float64, and y."""
    if isinstance(X, np.ndarray) and X.dtype.kind in "iub" and X.dtype.itemsize <= 2:
        X = X.astype(np.float32)  # exact, and half the memory of scikit-learn's float64
    try:
        out = validate_data(
            estimator,
            X,
            **({} if y is None and not reset else {"y": y}),
            reset=reset,
            dtype=(np.float64, np.float32),
        )
    except ValueError as error:
        if "could not convert" in str(error):
            raise ValueError(f"X must be numeric; encode text columns first ({error})") from error
        raise
    return out if isinstance(out, tuple) else (out, None)
