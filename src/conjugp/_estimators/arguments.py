"""What is checked of arguments, before any work."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.utils import check_random_state

from conjugp._estimators.tables import check_columns
from conjugp._fit.options import FitOptions, number, one_of, whole
from conjugp._gp.covariance import FAMILIES, NONE
from conjugp._gp.inducing import STRATEGIES
from conjugp._rows.group import ALONE, Group, own_gpu
from conjugp.kernels import get_kernel
from conjugp.likelihoods import Heaviside, Likelihood, get_likelihood
from conjugp.likelihoods._base import MC

SMALL_ROWS = 1000  # up to here float64 costs nothing that matters, and a GPU gains nothing


def check_parameters(clf: Any) -> tuple[Likelihood, str, FitOptions]:
    """Every argument of the constructor, before any work."""
    get_kernel(clf.kernel)
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
    return likelihood, bound, options


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
