"""What is checked before any work: arguments, rows, labels, weights."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, column_or_1d, validate_data

from conjugp._fit.options import FitOptions, number, one_of, whole
from conjugp._gp.covariance import FAMILIES, NONE
from conjugp._gp.inducing import STRATEGIES
from conjugp._rows.canonical import Ordered, ordered
from conjugp._rows.group import ALONE, Group, own_gpu
from conjugp.kernels import Kernel
from conjugp.likelihoods import Heaviside, Likelihood, get_likelihood
from conjugp.likelihoods._base import MC

MOST_SCALE = 3.0  # weights that average more than this, or less than its inverse, are no counts
SMALL_ROWS = 1000  # up to here float64 costs nothing that matters, and a GPU gains nothing


def check_parameters(clf: Any) -> tuple[Likelihood, str, FitOptions]:
    """Every argument of the constructor, before any work."""
    if clf.kernel is not None and not isinstance(clf.kernel, Kernel):
        raise ValueError(f"kernel must be a conjugp.kernels.Kernel or None; got {clf.kernel!r}")
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
    if isinstance(clf.inducing, str):
        one_of("inducing", clf.inducing, STRATEGIES)
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
    if isinstance(clf.prior_mean, str) and clf.prior_mean != "auto":
        raise ValueError(f"prior_mean must be 'auto' or numbers; got {clf.prior_mean!r}")
    if clf.temperature is not None and clf.temperature != "auto":
        number("temperature", clf.temperature, 0, exclusive=True)
    number("max_epochs", clf.max_epochs, 0, exclusive=True)
    number("tol", clf.tol, 0)
    number("learning_rate", clf.learning_rate, 0, exclusive=True)
    one_of("dtype", clf.dtype, ("float32", "float64"))
    if not isinstance(clf.verbose, bool):
        whole("verbose", clf.verbose, 0)
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
    try:
        check_random_state(clf.random_state)
    except ValueError as error:
        raise ValueError(f"random_state: {error}") from error
    return likelihood, bound, options


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


def check_rows(clf: Any, X: Any, y: Any, reset: bool) -> tuple[NDArray[np.floating], Any]:
    """Checked X as float32 or float64, and y."""
    if isinstance(X, np.ndarray) and X.dtype.kind in "iub" and X.dtype.itemsize <= 2:
        X = X.astype(np.float32)  # exact, and half the memory of scikit-learn's float64
    try:
        labels: Any = {} if y is None and not reset else {"y": y}
        rows: Any = X
        out: Any = validate_data(clf, rows, reset=reset, dtype=(np.float64, np.float32), **labels)
    except ValueError as error:
        if "could not convert" in str(error):
            raise ValueError(f"X must be numeric; encode text columns first ({error})") from error
        if re.search(r"\b[Xy]\b", str(error)):
            raise
        name = "X and y" if "inconsistent" in str(error) else "X"
        raise ValueError(f"{name}: {error}") from error
    return out if isinstance(out, tuple) else (out, None)


def check_labels(y: Any) -> NDArray[Any]:
    """Labels of one kind, (n,)."""
    try:
        check_classification_targets(y)
    except ValueError as error:
        raise ValueError(f"y: {error}") from error
    except TypeError as error:
        raise ValueError(f"y must hold labels of one kind, and none missing ({error})") from error
    return column_or_1d(y, warn=True)


def check_classes(found: NDArray[Any]) -> None:
    """Raise unless there are at least two."""
    if len(found) < 2:
        raise ValueError(
            f"y must hold at least 2 classes with positive weight, got one class: {found.tolist()}"
        )


def check_weight(sample_weight: ArrayLike | None, X: NDArray[Any]) -> NDArray[np.float64]:
    """Non-negative, finite weights of the rows, (n,)."""
    try:
        return _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    except ValueError as error:
        if "sample_weight" in str(error):
            raise
        raise ValueError(f"sample_weight: {error}") from error


class WeightScale(NamedTuple):
    """How large weights are: the sum of those above 0, their number, whether all are whole."""

    total: float = 0.0
    n: int = 0
    whole: bool = True

    @classmethod
    def of(cls, weight: NDArray[np.float64]) -> WeightScale:
        """That of checked weights."""
        some = weight[weight > 0]
        # Beyond 2^53 floats have no fractions left to tell by.
        whole = (some == np.rint(some)) & (some <= 2.0**53)
        with np.errstate(over="ignore"):
            return cls(float(some.sum()), len(some), bool(whole.all()))

    def plus(self, other: WeightScale) -> WeightScale:
        """That of both."""
        return WeightScale(self.total + other.total, self.n + other.n, self.whole and other.whole)

    def warn(self) -> None:
        """Say what a weight means where it is unlikely that these were meant to count rows."""
        if self.whole or 1 / MOST_SCALE <= self.total / self.n <= MOST_SCALE:
            return
        level, frame = 2, sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("conjugp."):
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"sample_weight averages {self.total / self.n:.4g}, and a row of weight 2 counts like "
            f"two rows: these {self.n} count like {self.total:.4g}, and the posterior is as wide "
            "as with so many. If the weights only compare rows with one another, multiply them by "
            f"{self.n / self.total:.4g}, so that they average 1",
            UserWarning,
            stacklevel=level,
        )


def check_training_data(
    clf: Any,
    X: ArrayLike,
    y: ArrayLike,
    sample_weight: ArrayLike | None,
    classes: NDArray[Any] | None = None,
    reset: bool = True,
) -> tuple[Ordered, NDArray[Any]]:
    """Checked, weighted, merged rows, and the classes."""
    X_, y_ = check_rows(clf, X, y, reset)
    y_ = check_labels(y_)
    weight = check_weight(sample_weight, X_)
    positive = weight > 0
    if not positive.any():
        raise ValueError("sample_weight is zero for every row: there is nothing to fit")
    WeightScale.of(weight).warn()
    found = np.unique(y_[positive])
    if classes is None:
        classes = found
        check_classes(classes)
    unseen = np.setdiff1d(found, classes)
    if len(unseen):
        raise ValueError(f"y holds labels that are not in classes: {unseen.tolist()}")
    if not positive.all():
        X_, y_, weight = X_[positive], y_[positive], weight[positive]
    labels = np.searchsorted(classes, y_)
    mass = np.bincount(labels, weights=weight, minlength=len(classes))
    weight = weight * class_factors(getattr(clf, "class_weight", None), classes, mass)[labels]
    rows = ordered(X_, labels, weight)
    if not rows.n:
        raise ValueError("class_weight and sample_weight leave no row with any weight")
    return rows, classes


def class_factors(
    class_weight: Any, classes: NDArray[Any], mass: NDArray[Any]
) -> NDArray[np.float64]:
    """What multiplies the weights of every class, (C,), which come to `mass` (C,) without it."""
    if class_weight is None:
        return np.ones(len(classes))
    if isinstance(class_weight, str) and class_weight == "balanced":
        factor = mass.sum() / (len(classes) * np.maximum(mass, np.finfo(float).tiny))
    else:
        try:
            factor = compute_class_weight(class_weight, classes=classes, y=classes)
        except (TypeError, ValueError) as error:
            raise ValueError(f"class_weight: {error}") from error
    if not np.all(np.isfinite(factor)) or np.any(factor < 0):
        raise ValueError("class_weight must be non-negative and finite")
    return np.asarray(factor, dtype=np.float64)
