"""GibbsGPClassifier: the exact posterior by sampling, with the face of GPClassifier."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from conjugp._estimators.classifier import GPClassifier
from conjugp._estimators.model_file import Saveable
from conjugp._estimators.predicting import ProbabilisticClassifier, without_interrupts
from conjugp._estimators.problem import Problem, check_sampler, problem_of
from conjugp._estimators.progress import ChainBars
from conjugp._estimators.rows import unchanged_on_error
from conjugp._fit.options import seed_of, whole
from conjugp._persistence.files import check_path
from conjugp._sampler.chain import Draws, Target
from conjugp._sampler.costs import LONG_SECONDS, duration, gigabytes, long_run, seconds
from conjugp._sampler.diagnostics import (
    Diagnostics,
    diagnose,
    require_arviz,
    to_arviz,
    worst_traces,
)
from conjugp._sampler.parallel import Interrupted, Schedule, kept_seed, n_workers, sample_chains
from conjugp._sampler.prediction import SampledModel
from conjugp.kernels import Kernel
from conjugp.likelihoods import get_likelihood


class GibbsGPClassifier(Saveable, ProbabilisticClassifier):
    """Multi-class Gaussian process classification with the exact posterior, by Gibbs sampling.

    The model of `GPClassifier` with the logistic-softmax likelihood, without a variational
    approximation: draws of the latent functions, and predictions averaged over them. For hundreds
    of rows; a sweep costs n_classes · n_rows³ / 3 operations, or with inducing points
    n_classes · n_rows · n_inducing². Needs ``pip install "conjugp[gibbs]"``.

    Parameters
    ----------
    kernel : Kernel, str, list of Kernel or None, default=None
        Covariance function in the units of X, or one for each class. Its parameters that are
        ``None`` come from the data; ``None`` is an RBF with one lengthscale per feature.
    hyperparameters : {"fit", "fixed", "sample"}, default="fit"
        Where kernel parameters and prior means come from: a variational fit to the same rows, as
        given, or sampled with the rest. Sampled ones have normal priors on their logs around the
        values given, with deviation ``prior_scale``, and prior means N(start, 4).
    prior_mean : "auto", float or array of shape (n_classes,), default="auto"
        Prior mean of the latent functions.
    augmentation : {"collapsed", "paper"}, default="collapsed"
        Whether λ is drawn given the latent functions alone, or given the counts, as in the paper.
        Both sample the same posterior; the first mixes faster.
    n_inducing : int or None, default=None
        Number of inducing points. ``None`` is the full Gaussian process; a number samples, exactly,
        the sparse model whose latent values are independent given those at the inducing points.
    inducing : {"kmeans", "greedy", "random"} or array of shape (m, n_features), default="kmeans"
        Where the inducing points are.
    n_samples : int, default=1000
        Draws kept of every chain.
    n_warmup : int, default=500
        Sweeps of every chain before the first draw that counts.
    n_chains : int, default=4
        Independent chains.
    thin : int, default=1
        Sweeps per draw that is kept.
    prior_scale : float, default=1.0
        Prior deviation of the logs of sampled kernel parameters.
    n_jobs : int or None, default=None
        Processes for the chains; ``None`` takes the cores there are when a run is long enough.
        The draws do not depend on it.
    max_memory : float, default=4.0
        Gigabytes that draws and kernel matrices may take; a fit that would need more is refused.
    on_interrupt : {"raise", "return"}, default="raise"
        What Ctrl-C does once the draws made so far are kept.
    random_state : int, RandomState instance or None, default=None
        Seed.
    verbose : int, default=0
        1 says what is to come and shows a progress bar for every chain.
    categorical, ignore
        Columns of X that are codes of categories or are left out, as in `GPClassifier`.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        Class labels.
    kernel_ : Kernel or list of Kernel
        Kernel in the units of X; with ``hyperparameters="sample"`` at the mean of the draws' log
        parameters.
    prior_mean_ : ndarray of shape (n_classes,)
        Prior mean of each class; the mean over draws if sampled.
    inducing_points_ : ndarray of shape (m, n_features)
        Inputs where the draws stand: inducing points, or the distinct training rows.
    rhat_ : float
        Largest R-hat of the log-likelihood, the latent values and what else was sampled.
    ess_bulk_, ess_tail_ : float
        Smallest effective sample sizes of those.
    diagnostics_ : dict
        The three for each group of quantities.
    converged_ : bool
        Whether R-hat is below 1.01 and both sample sizes are at least 100 per chain.
    n_iter_ : int
        Sweeps of every chain.
    columns_ : dict of str to str, or None
        What became of the columns of a table, as in `GPClassifier`.
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
    >>> from conjugp import GibbsGPClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> clf = GibbsGPClassifier(n_samples=200, n_warmup=100, random_state=0)
    >>> clf.fit(X[::5], y[::5]).predict_proba(X[:1]).shape
    (1, 3)
    """

    def __init__(
        self,
        kernel: Kernel | str | list[Kernel] | None = None,
        *,
        hyperparameters: str = "fit",
        prior_mean: str | float | ArrayLike = "auto",
        augmentation: str = "collapsed",
        n_inducing: int | None = None,
        inducing: str | ArrayLike = "kmeans",
        n_samples: int = 1000,
        n_warmup: int = 500,
        n_chains: int = 4,
        thin: int = 1,
        prior_scale: float = 1.0,
        n_jobs: int | None = None,
        max_memory: float = 4.0,
        on_interrupt: str = "raise",
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
        categorical: str | Sequence[str | int] = "auto",
        ignore: Sequence[str | int] = (),
    ) -> None:
        self.kernel = kernel
        self.hyperparameters = hyperparameters
        self.prior_mean = prior_mean
        self.augmentation = augmentation
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.n_samples = n_samples
        self.n_warmup = n_warmup
        self.n_chains = n_chains
        self.thin = thin
        self.prior_scale = prior_scale
        self.n_jobs = n_jobs
        self.max_memory = max_memory
        self.on_interrupt = on_interrupt
        self.random_state = random_state
        self.verbose = verbose
        self.categorical = categorical
        self.ignore = ignore

    @classmethod
    def from_classifier(cls, clf: GPClassifier, **changes: Any) -> GibbsGPClassifier:
        """A sampler with the kernel and prior means of a fitted `GPClassifier`, unfitted.

        Parameters
        ----------
        clf : GPClassifier
            A fitted classifier.
        **changes
            Further constructor arguments.
        """
        check_is_fitted(clf)
        if get_likelihood(clf.likelihood).name != "logistic-softmax":
            raise ValueError(
                f"clf has the likelihood {clf.likelihood!r}; the sampler has 'logistic-softmax'"
            )
        settings = {
            "kernel": clf.kernel_,
            "prior_mean": clf.prior_mean_,
            "hyperparameters": "fixed",
            "random_state": clf.random_state,
            "categorical": clf.categorical,
            "ignore": clf.ignore,
        }
        return cls(**{**settings, **changes})

    # --- fitting ------------------------------------------------------------------------------

    def fit(
        self, X: ArrayLike, y: ArrayLike, checkpoint: str | os.PathLike[str] | None = None
    ) -> GibbsGPClassifier:
        """Sample the posterior.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data, in any units.
        y : array-like of shape (n_samples,)
            Class labels.
        checkpoint : path or None, default=None
            File in which the state of all chains is kept as they go. If it exists, the run goes on
            from there with the draws it would have made, to the ``n_samples`` asked for now; it
            must belong to the same data and settings. A seed that was drawn is kept in it.

        Returns
        -------
        self : GibbsGPClassifier
            The fitted classifier.
        """
        check_sampler(self)
        if checkpoint is not None:
            check_path("checkpoint", checkpoint)
        require_arviz()
        stopped = False
        seed = seed_of(self.random_state)
        if checkpoint is not None and not isinstance(self.random_state, Integral):
            seed = kept_seed(checkpoint, seed)
        schedule = Schedule(self.n_chains, self.n_samples, self.n_warmup, self.thin, seed)
        with unchanged_on_error(self):
            problem = problem_of(self, X, y, seed)
            self._announce(problem.target, schedule)
            bars = ChainBars(self.n_chains, schedule.n_sweeps, self.verbose)
            try:
                draws = sample_chains(problem.target, schedule, self.n_jobs, bars, checkpoint)
            except Interrupted as interrupt:
                stopped, draws = True, interrupt.draws
                if not len(draws[0].g):
                    raise KeyboardInterrupt from None
            finally:
                bars.close()
        with without_interrupts() if stopped else nullcontext():
            self._keep(problem, draws, seed)
        if stopped:
            if self.on_interrupt == "raise":
                raise KeyboardInterrupt
        elif not self.converged_:
            warnings.warn(self._diagnostics.advice(), ConvergenceWarning, stacklevel=2)
        return self

    def _announce(self, target: Target, schedule: Schedule) -> None:
        """Say what the run will take, and refuse what would not fit in memory."""
        workers = n_workers(self.n_jobs, schedule.n_chains)
        size = gigabytes(target, schedule, workers)
        C, M = target.data.n_classes, len(target.X if target.Z is None else target.Z)
        if size > self.max_memory:
            raise ValueError(
                f"this needs {size:.1f} GB ({schedule.n_chains} chains of {schedule.n_samples} "
                f"draws of {C} classes at {M} points, and {workers} chains at a time), more than "
                f"max_memory={self.max_memory:g}: raise it, keep fewer draws (n_samples, thin), "
                "or take fewer inducing points"
            )
        expected = seconds(target, schedule, workers)
        if self.verbose:
            print(
                f"{schedule.n_chains} chains of {schedule.n_sweeps} sweeps, {C} classes at "
                f"{M} points: about {duration(expected)} and {size:.2g} GB"
            )
        if expected > LONG_SECONDS:
            text = long_run(target, schedule, workers, expected)
            warnings.warn(text, UserWarning, stacklevel=3)

    def _keep(
        self, problem: Problem, draws: list[Draws], seed: int, found: Diagnostics | None = None
    ) -> None:
        """Set all fitted attributes at once."""
        target, classes, inputs, observations = problem
        likelihood = get_likelihood("logistic-softmax")
        # A copy of the target is without its kernel matrices.
        model = SampledModel(replace(target), draws, likelihood, seed)
        found = diagnose(model) if found is None else found
        self._keep_face(model, inputs, classes)
        self.diagnostics_ = found.groups
        self.rhat_ = found.rhat
        self.ess_bulk_ = found.ess_bulk
        self.ess_tail_ = found.ess_tail
        self.converged_ = found.converged
        self.n_iter_ = self.n_warmup + self.thin * len(draws[0].g)
        self._model, self._diagnostics, self._observation = model, found, observations

    # --- what was drawn -----------------------------------------------------------------------

    def to_arviz(self, log_likelihood: bool = True) -> Any:
        """All draws in ArviZ's container.

        Parameters
        ----------
        log_likelihood : bool, default=True
            Whether to compute the log-likelihood of every training row under every draw, which
            ``arviz.loo`` needs. In the sparse model a row's own latent value is integrated out,
            which takes half a minute or more for a million pairs of row and draw.

        Returns
        -------
        data : arviz.InferenceData, or xarray.DataTree from ArviZ 1 on
            ``posterior`` has ``f``, the latent functions at ``inducing_points_`` (chain, draw,
            class, point), and kernel parameters in the units of X and prior means where they were
            sampled. ``log_likelihood`` has ``y`` for every training row, in the order they came.
            ``sample_stats``, ``observed_data`` and ``constant_data`` have the log-likelihood of
            all rows together, the labels, and the inputs of ``f``.
        """
        model = self._predictor
        n_features = self.inducing_points_.shape[1]
        features = getattr(self, "feature_names_in_", np.arange(n_features))
        return to_arviz(
            model,
            self.classes_,
            self._inputs.scaling.scale,
            features,
            self.inducing_points_,
            self._observation,
            log_likelihood,
        )

    def traces(self, n_traces: int = 6) -> dict[str, NDArray[np.float64]]:
        """The log-likelihood and the quantities that have mixed worst, draw by draw.

        Parameters
        ----------
        n_traces : int, default=6
            How many, at most.

        Returns
        -------
        traces : dict of ndarray of shape (n_chains, n_samples)
            Latent values are called ``f[class, point]``, kernel parameters are in the units of X.
        """
        model = self._predictor
        whole("n_traces", n_traces, 1)
        scale = self._inputs.scaling.scale
        return worst_traces(model, self._diagnostics, n_traces, self.classes_, scale)

    @property
    def _predictor(self) -> SampledModel:
        check_is_fitted(self)
        return self._model
