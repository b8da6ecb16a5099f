"""What a sampler is to sample: its arguments checked, the user's rows in working units."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from conjugp._estimators.classifier import GPClassifier
from conjugp._estimators.rows import check_labelled, merged, names_of
from conjugp._fit.options import check_common, number, one_of, whole
from conjugp._fit.plan import given_inducing, start_mean
from conjugp._fit.starts import median_distance
from conjugp._gp import inducing
from conjugp._inputs.inputs import Inputs
from conjugp._numerics.threads import one_thread
from conjugp._rows.canonical import Rows
from conjugp._rows.dataset import Data
from conjugp._sampler.chain import Target, distinct
from conjugp._sampler.sweep import AUGMENTATIONS, Observations
from conjugp.kernels import RBF, Kernel, get_kernel

HYPERPARAMETERS = ("fit", "fixed", "sample")
FIT_INDUCING = 300  # inducing points of the variational fit that hyperparameters are taken from
MEAN_VARIANCE = 4.0  # prior variance of a sampled prior mean
START_VARIANCE = 10.0  # of a kernel that leaves it open


class Problem(NamedTuple):
    """What is to be sampled, in working units, and the way back to the user's."""

    target: Target
    classes: NDArray[Any]
    inputs: Inputs
    observations: NDArray[np.int64]  # (n,) observation of the target that each row is


def check_sampler(clf: Any) -> None:
    """Every argument of the sampler's constructor, before any work."""
    given = _kernels(clf)
    if isinstance(clf.kernel, list | tuple) and (not given or None in given):
        raise ValueError(f"kernel must be a kernel, a list of them or None; got {clf.kernel!r}")
    one_of("hyperparameters", clf.hyperparameters, HYPERPARAMETERS)
    if clf.hyperparameters == "fit" and len(given) > 1:
        raise ValueError(
            "hyperparameters='fit' takes one kernel; with one per class use 'fixed' or 'sample'"
        )
    one_of("augmentation", clf.augmentation, AUGMENTATIONS)
    one_of("on_interrupt", clf.on_interrupt, ("raise", "return"))
    if clf.n_inducing is not None:
        whole("n_inducing", clf.n_inducing, 1)
    for name, least in (("n_samples", 1), ("n_warmup", 0), ("n_chains", 1), ("thin", 1)):
        whole(name, getattr(clf, name), least)
    number("prior_scale", clf.prior_scale, 0, exclusive=True)
    number("max_memory", clf.max_memory, 0, exclusive=True)
    n_jobs = clf.n_jobs
    if n_jobs is not None and (
        isinstance(n_jobs, bool) or not isinstance(n_jobs, Integral) or not n_jobs
    ):
        raise ValueError(f"n_jobs must be a whole number other than 0, or None; got {n_jobs!r}")
    check_common(clf)


def _kernels(clf: Any) -> list[Kernel | None]:
    """The kernels given: one, which may be None, or one for each class."""
    given = clf.kernel if isinstance(clf.kernel, list | tuple) else [clf.kernel]
    return [get_kernel(kernel) for kernel in given]


def problem_of(clf: Any, X: ArrayLike, y: ArrayLike, seed: int) -> Problem:
    """The posterior to sample, and how it belongs to the rows and units of the user."""
    checked = check_labelled(clf, X, y, None, True)
    rows, classes = merged(clf, *checked)
    rows = rows.gathered()
    C, given = len(classes), _kernels(clf)
    if len(given) not in (1, C):
        raise ValueError(f"kernel must be one kernel or {C}, one per class; got {len(given)}")
    inputs = Inputs.fit(rows, given, names_of(clf), complete=False, encoder=clf._encoder)
    work = inputs.apply(rows.X, torch.empty(0, dtype=torch.float64))
    data = Data(work, torch.as_tensor(rows.y), torch.as_tensor(rows.weight), C)
    mean = start_mean(clf.prior_mean, data).numpy()
    own = None  # the inducing points given, (M, D)
    if not isinstance(clf.inducing, str):
        own = given_inducing(clf.inducing, work, inputs.scaling).numpy()
    kernels = _in_working_units(given, inputs, work)
    with one_thread():
        if clf.hyperparameters == "fit":
            fitted, mean = _fitted_hyperparameters(clf, X, y, rows, given[0], seed)
            kernels = _in_working_units([fitted], inputs, work)
        Z = _inducing(clf, data, kernels[0], seed) if own is None else own
    sampled = clf.hyperparameters == "sample"
    points, index = distinct(work.numpy())
    times = rows.weight.astype(np.int64)
    index = np.repeat(np.arange(len(points)) if index is None else index, times)
    plain = len(index) == len(points) and np.array_equal(index, np.arange(len(points)))
    target = Target(
        Observations(np.repeat(rows.y, times), C, None if plain else index),
        points,
        Z,
        tuple(kernels),
        mean.astype(np.float64),
        clf.augmentation,
        MEAN_VARIANCE if sampled and isinstance(clf.prior_mean, str) else 0.0,
        float(clf.prior_scale) if sampled else 0.0,
    )
    return Problem(target, classes, inputs, _observations(checked[0], checked[1], rows, classes))


def _fitted_hyperparameters(
    clf: Any, X: Any, y: Any, rows: Rows, kernel: Kernel | None, seed: int
) -> tuple[Kernel, NDArray[np.float64]]:
    """The kernel in the units of X and prior means from a variational fit."""
    found = GPClassifier(
        RBF() if kernel is None else kernel,
        n_inducing=min(len(rows.X), FIT_INDUCING),
        covariance="full",
        prior_mean=clf.prior_mean,
        temperature=None,
        device="cpu",
        dtype="float64",
        random_state=seed,
        verbose=clf.verbose,
        categorical=clf.categorical,
        ignore=clf.ignore,
    )
    with warnings.catch_warnings():
        # Good enough to sample with, even where the ELBO could still rise a little.
        warnings.simplefilter("ignore", ConvergenceWarning)
        if clf._encoder is None:
            found.fit(rows.X, rows.y, rows.weight)
        else:  # which chooses the same features, and knows which share a lengthscale
            warnings.simplefilter("ignore", UserWarning)
            found.fit(X, y)
    return found.kernel_, found.prior_mean_  # type: ignore[return-value]


def _inducing(clf: Any, data: Data, kernel: Kernel, seed: int) -> NDArray[np.float64] | None:
    """Inducing points chosen from the rows, (M, D); None for the full Gaussian process."""
    if clf.n_inducing is None or clf.n_inducing >= len(data.y):
        return None
    assert isinstance(clf.inducing, str)
    generator = torch.Generator().manual_seed(seed)
    return inducing.choose(
        clf.inducing, data.X, data.weight, clf.n_inducing, kernel, generator
    ).numpy()


def _observations(
    X_: NDArray[Any], y_: NDArray[Any], rows: Rows, classes: NDArray[Any]
) -> NDArray[np.int64]:
    """Which observation of the target every row of the user is; equal rows are alike."""
    labels = np.searchsorted(classes, y_)
    both = np.concatenate(
        [np.column_stack([rows.X, rows.y]), np.column_stack([X_, labels])], dtype=np.float64
    )
    _, same = np.unique(both, axis=0, return_inverse=True)
    same = same.reshape(-1)
    n = len(rows.y)
    first = np.empty(n, dtype=np.int64)
    first[same[:n]] = np.cumsum(rows.weight.astype(np.int64)) - rows.weight.astype(np.int64)
    return first[same[n:]]


def _in_working_units(kernels: Sequence[Kernel | None], inputs: Inputs, X: Tensor) -> list[Kernel]:
    """Kernels with all their parameters, for rows X in working units."""
    lengthscale = torch.full((X.shape[1],), 0.5 * median_distance(X), dtype=torch.float64)
    found = [
        inputs.inward(k or RBF()).filled(lengthscale, START_VARIANCE).frozen() for k in kernels
    ]
    for k in found:
        k(X[:1], X[:1])  # raises where lengthscales and features do not go together
    return found
