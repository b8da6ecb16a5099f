"""What users may set: the rarer settings of a fit, and what is checked of all, before any work."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state

from conjugp._gp.covariance import FAMILIES, NONE
from conjugp._gp.inducing import STRATEGIES
from conjugp._inference.settings import Knobs
from conjugp._rows.group import ALONE, Group, own_gpu
from conjugp.kernels import Kernel, get_kernel
from conjugp.likelihoods import Heaviside, Likelihood, get_likelihood
from conjugp.likelihoods._base import MC

SMALL_ROWS = 1000  # up to here float64 costs nothing that matters, and a GPU gains nothing


@dataclass(kw_only=True, eq=False, repr=False)
class FitOptions(Knobs, BaseEstimator):
    """Settings of `GPClassifier` that few people need.

    It has ``get_params`` and ``set_params``, so a grid search reaches it: with
    ``GPClassifier(options=FitOptions())`` the parameter ``options__min_step`` can be searched.

    Parameters
    ----------
    prediction : {"integral", "mc", "qmc"}, default="integral"
        How latent moments become probabilities: the deterministic integral, plain Monte Carlo,
        or quasi-Monte-Carlo with scrambled Sobol points.
    n_samples : int, default=1024
        Draws for ``"mc"`` and ``"qmc"``.
    initial_variance : float or None, default=None
        Kernel variance at the start of a coupled fit, where the kernel leaves it open;
        lengthscales then start at the median distance, and k-means looks at all classes
        together. ``None`` is 3 and a quarter of that distance, in units that a few rows choose,
        or 10 and half of it with the full batch.
    conditional_variance : float or "auto", default="auto"
        Share of the variance given the inducing points with which a coupled fit sees its rows, in
        (0, 1] (docs/math.md, Q9). Below 1 the bound is looser by a constant; what it learns
        mostly predicts better, and with few rows and noisy labels a little worse. ``"auto"`` is
        three times the number of inducing points over that of rows, and at least 0.05, where
        minibatches learn a kernel, ``initial_variance`` is not given, held-out rows set the
        temperature and the likelihood is smooth; else 1. ``partial_fit`` goes on with the share
        of the fit before it, or has 1. Expectation propagation knows 1 only, and decoupled fits
        do not ask.
    mean_training : {"map", "elbo"}, default="map"
        How a decoupled posterior is trained: ``"map"`` finds the mean at zero latent variance, the
        posterior's mode, with a kernel chosen by held-out rows; ``"elbo"`` raises the ELBO of
        kernel, mean and covariance together, from that kernel on, and then fits the mean under
        the latent variances of the covariance. docs/defaults.md compares them.
    mean_variance : float, default=30.0
        Kernel variance of a decoupled posterior when the kernel is chosen from the data, and the
        least that is learned for one that leaves its variance open.
    mean_learning_rate : float, default=0.05
        Adam's first step size for the mean of a decoupled posterior; up to twice that for batches
        of more than 1,024 rows.
    n_covariance : int or "auto", default="auto"
        Inducing points of the covariance of a decoupled posterior.
    search : bool, default=True
        Whether a decoupled fit tries several input scales and lengthscales on held-out points.
    step_exponent : float, default=0.6
        Natural-gradient steps shrink as ``t ** -step_exponent`` ...
    min_step : float, default=0.05
        ... until they reach this size.
    kernel_prior : float, default=1.0
        Strength, in nats, of a Gaussian prior on the log kernel parameters, and on prior means
        that are learned, around their start. Many lengthscales move together as easily as one
        number, and each is held near their mean.
    hold_out : float, default=0.1
        Share of the training rows that choose kernel and temperature before they are trained on.
    jitter : float or None, default=None
        First addition to the diagonal of a kernel matrix, relative to its mean. ``None`` is
        1e-4 in float32 and 1e-6 in float64.
    chunk_size : int, default=4096
        Rows worked on at a time in full passes.
    cache_mb : int or "auto", default="auto"
        Megabytes that kernel values may take between epochs; ``"auto"`` is 40 % of what is free.
    spool : path or None, default=None
        Folder for the temporary file of rows that do not fit in memory; ``None`` is the system's
        folder for such files.
    callback : callable or None, default=None
        Called with a `Progress` after every epoch or round of steps.
    checkpoint_every : float, default=10.0
        Seconds between two states that ``fit(..., checkpoint=path)`` writes; more where writing
        one takes more than a twentieth of that.
    on_interrupt : {"raise", "return"}, default="raise"
        What Ctrl-C does once the estimator has its last good state: raise KeyboardInterrupt
        again, or return from ``fit``.
    distributed : "auto" or False, default="auto"
        Whether ``fit`` inside a torch.distributed process group fits one model with all ranks;
        docs/scaling.md has the rest.
    local_steps : int, default=1
        Minibatch steps of a coupled fit that ranks take on their own rows between two sums over
        all, for slow networks.
    """

    prediction: str = "integral"
    n_samples: int = 1024
    initial_variance: float | None = None
    conditional_variance: float | str = "auto"
    mean_training: str = "map"
    mean_variance: float = 30.0
    mean_learning_rate: float = 0.05
    n_covariance: int | str = "auto"
    search: bool = True
    hold_out: float = 0.1
    spool: str | os.PathLike[str] | None = None
    callback: Callable[[Any], None] | None = None
    checkpoint_every: float = 10.0
    on_interrupt: str = "raise"
    distributed: str | bool = "auto"

    def validate(self) -> None:
        """Raise ValueError for the first setting that is out of range, naming it."""
        one_of("options.prediction", self.prediction, ("integral", "mc", "qmc"))
        one_of("options.mean_training", self.mean_training, ("map", "elbo"))
        one_of("options.on_interrupt", self.on_interrupt, ("raise", "return"))
        one_of("options.search", self.search, (True, False))
        whole("options.n_samples", self.n_samples, 1)
        whole("options.chunk_size", self.chunk_size, 1)
        whole("options.local_steps", self.local_steps, 1)
        if self.distributed is not False:
            one_of("options.distributed", self.distributed, ("auto", False))
        if self.n_covariance != "auto":
            whole("options.n_covariance", self.n_covariance, 1)
        if self.cache_mb != "auto":
            whole("options.cache_mb", self.cache_mb, 0)
        path = isinstance(self.spool, str | os.PathLike)
        if self.spool is not None and not (path and os.path.isdir(self.spool)):
            raise ValueError(f"options.spool must be a folder that exists; got {self.spool!r}")
        if self.initial_variance is not None:
            number("options.initial_variance", self.initial_variance, 0, exclusive=True)
        if self.conditional_variance != "auto":
            number("options.conditional_variance", self.conditional_variance, 0, 1, exclusive=True)
        number("options.mean_variance", self.mean_variance, 0, exclusive=True)
        number("options.mean_learning_rate", self.mean_learning_rate, 0, exclusive=True)
        number("options.step_exponent", self.step_exponent, 0, 1)
        number("options.min_step", self.min_step, 0, 1, exclusive=True)
        number("options.kernel_prior", self.kernel_prior, 0)
        number("options.checkpoint_every", self.checkpoint_every, 0)
        number("options.hold_out", self.hold_out, 0, 0.5, exclusive=True)
        if self.jitter is not None:
            number("options.jitter", self.jitter, 0, 0.01)
        if self.callback is not None and not callable(self.callback):
            raise ValueError(f"options.callback must be callable or None, got {self.callback!r}")


def knobs_of(options: FitOptions) -> dict[str, Any]:
    """Those that loops read, by name."""
    return {knob.name: getattr(options, knob.name) for knob in fields(Knobs)}


class Checked(NamedTuple):
    """Arguments that stand for something else: what they stand for."""

    kernel: Kernel | None  # in the user's units
    likelihood: Likelihood
    bound: str
    options: FitOptions


def check_parameters(clf: Any) -> Checked:
    """Every argument of the constructor of `GPClassifier`."""
    kernel = None if clf.kernel is None else get_kernel(clf.kernel)
    likelihood = get_likelihood(clf.likelihood)
    bound = likelihood.check_bound(clf.bound)
    one_of("inference", clf.inference, ("auto", "mc-vi", "ep"))
    if clf.inference == "mc-vi":
        if clf.bound not in (None, MC):
            raise ValueError(f"bound must be None with inference='mc-vi'; got {clf.bound!r}")
        bound = MC
    if clf.inference == "ep" and not isinstance(likelihood, Heaviside):
        raise ValueError(f"inference='ep' needs likelihood='heaviside'; got {clf.likelihood!r}")
    if clf.n_inducing is not None and clf.n_inducing != "auto":
        whole("n_inducing", clf.n_inducing, 1)
    if clf.learn_inducing != "auto":
        one_of("learn_inducing", clf.learn_inducing, (True, False))
    if clf.batch_size is not None and clf.batch_size != "auto":
        whole("batch_size", clf.batch_size, 1)
    if clf.class_batch is not None and clf.class_batch != "auto":
        whole("class_batch", clf.class_batch, 1)
        if not likelihood.class_parts or bound == MC or clf.inference == "ep":
            raise ValueError(
                f"class_batch={clf.class_batch} needs a bound of likelihood='logistic-softmax'; "
                "use 'auto' or None"
            )
        if not clf.shared_kernel:
            raise ValueError(f"class_batch={clf.class_batch} needs shared_kernel=True")
    for name in ("learn_hyperparameters", "shared_kernel", "warm_start"):
        one_of(name, getattr(clf, name), (True, False))
    one_of("covariance", clf.covariance, ("auto", *FAMILIES, NONE))
    if not clf.shared_kernel and clf.covariance in ("shared", "diagonal", NONE):
        raise ValueError(
            f"covariance={clf.covariance!r} needs one kernel for all classes; "
            "with shared_kernel=False use 'full' or 'auto'"
        )
    if clf.covariance in ("shared", "diagonal", NONE):
        if clf.inference != "auto":
            raise ValueError(
                f"covariance={clf.covariance!r} needs inference='auto'; got {clf.inference!r}"
            )
        if not likelihood.smooth:
            raise ValueError(
                f"covariance={clf.covariance!r} trains the mean by the gradient of log p(y | f), "
                f"which {likelihood.name!r} does not have; use 'full' or 'auto'"
            )
    if clf.temperature is not None and clf.temperature != "auto":
        number("temperature", clf.temperature, 0, exclusive=True)
    number("max_epochs", clf.max_epochs, 0, exclusive=True)
    number("tol", clf.tol, 0)
    number("learning_rate", clf.learning_rate, 0, exclusive=True)
    one_of("dtype", clf.dtype, ("float32", "float64"))
    options = FitOptions() if clf.options is None else clf.options
    if not isinstance(options, FitOptions):
        raise ValueError(f"options must be a FitOptions or None; got {options!r}")
    options.validate()
    if clf.inference == "ep" and options.conditional_variance not in ("auto", 1.0):
        raise ValueError(
            "options.conditional_variance must be 'auto' or 1 with inference='ep'; "
            f"got {options.conditional_variance!r}"
        )
    check_device(clf.device, 0)
    check_common(clf)
    return Checked(kernel, likelihood, bound, options)


def check_common(clf: Any) -> None:
    """The arguments that the sampler has as well."""
    if isinstance(clf.inducing, str):
        one_of("inducing", clf.inducing, STRATEGIES)
    if isinstance(clf.prior_mean, str) and clf.prior_mean != "auto":
        raise ValueError(f"prior_mean must be 'auto' or numbers; got {clf.prior_mean!r}")
    check_columns("categorical", clf.categorical)
    check_columns("ignore", clf.ignore)
    if not isinstance(clf.verbose, bool):
        whole("verbose", clf.verbose, 0)
    try:
        check_random_state(clf.random_state)
    except ValueError as error:
        raise ValueError(f"random_state: {error}") from error


def check_columns(argument: str, given: Any) -> None:
    """Raise unless an argument lists columns, or is ``"auto"`` where that is allowed."""
    if argument == "categorical" and isinstance(given, str) and given == "auto":
        return
    good = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str | bytes)
    if not good or not all(
        isinstance(one, str | Integral) and not isinstance(one, bool) for one in given
    ):
        also = "'auto' or " if argument == "categorical" else ""
        raise ValueError(
            f"{argument} must be {also}a list of names or positions of columns; got {given!r}"
        )


def check_device(name: str, n_rows: int, group: Group = ALONE) -> torch.device:
    """The torch device called `name`; "auto" takes a GPU for large data where there is one.

    Of several ranks each takes its own GPU, by itself only where the back end is for GPUs.
    """
    if group.size > 1 and (name == "cuda" or (name == "auto" and group.on_gpus)):
        return own_gpu() if n_rows > SMALL_ROWS or name == "cuda" else torch.device("cpu")
    if name == "auto" and group.size > 1:
        return torch.device("cpu")
    if name == "auto":
        gpu = torch.cuda.is_available() and n_rows > SMALL_ROWS
        return torch.device("cuda" if gpu else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be 'auto' or a torch device; got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', a CPU or a CUDA device; got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch finds no CUDA device")
    return device


def seed_of(random_state: int | np.random.RandomState | None) -> int:
    """A seed for torch from scikit-learn's kind of random state."""
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if isinstance(value, type(allowed[0])) and value in allowed:
        return
    raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def whole(name: str, value: Any, least: int) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")


def number(
    name: str, value: Any, low: float, high: float = float("inf"), exclusive: bool = False
) -> None:
    """Raise unless `value` is a finite number in [low, high], or (low, high] if `exclusive`."""
    if isinstance(value, Real) and not isinstance(value, bool):
        x = float(value)
        if math.isfinite(x) and (x > low if exclusive else x >= low) and x <= high:
            return
    bounds = f"{'above' if exclusive else 'at least'} {low:g}"
    bounds += "" if high == float("inf") else f" and at most {high:g}"
    raise ValueError(f"{name} must be a number {bounds}; got {value!r}")
