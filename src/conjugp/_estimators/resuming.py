"""Which fit a checkpoint belongs to."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conjugp._fit.fit import Fitted
from conjugp._fit.options import FitOptions
from conjugp._persistence.checkpoint import FIT, Checkpoint
from conjugp._persistence.codec import classes_of
from conjugp._persistence.fingerprint import data_fingerprint, fingerprint
from conjugp._persistence.journal import Journal
from conjugp._rows.canonical import Rows
from conjugp._rows.dataset import Dataset
from conjugp._rows.on_disk import Store
from conjugp.kernels import KERNELS, get_kernel
from conjugp.likelihoods import LIKELIHOODS, get_likelihood

# Parameters that do not change the result, and those whose effect is marked by itself.
_UNMARKED = {"verbose", "device", "dtype", "options", "warm_start", "class_weight"}
_UNMARKED_OPTIONS = {"callback", "on_interrupt", "checkpoint_every", "cache_mb", "spool"}
_UNMARKED_OPTIONS |= {"distributed"}


def open_journal(
    clf: Any,
    path: str | os.PathLike[str],
    rows: Rows | Store,
    classes: NDArray[Any],
    data: Dataset,
    warm: Fitted | None,
    seed: int,
) -> Journal:
    """What keeps the state of a fit in a file, as an earlier run of the same fit has left it.

    Of several ranks the first reads and writes the file.
    """
    group = data.group
    import conjugp

    options = clf.options or FitOptions()
    values = {k: v for k, v in clf.get_params(deep=False).items() if k not in _UNMARKED}
    if not isinstance(clf.random_state, Integral):
        values["random_state"] = None  # the seed that was drawn is in the file
    for name in ("inducing", "prior_mean"):
        if not isinstance(values[name], str):
            values[name] = np.asarray(values[name])
    kept = options.get_params(deep=False).items()
    values |= {f"options.{k}": v for k, v in kept if k not in _UNMARKED_OPTIONS}
    values |= {
        "the working precision": str(data.like.dtype).removeprefix("torch."),
        "the device": data.like.device.type,
        "the fit to go on from": None if warm is None else warm.state,
        "the version of conjugp": conjugp.__version__,
        "the version of torch": torch.__version__,
    }
    own = classes_of([get_kernel(clf.kernel), get_likelihood(clf.likelihood)])
    known = {*KERNELS, *LIKELIHOODS.values(), *own}
    size = (rows.n_features, data.n)
    mark = data_fingerprint(size, rows.digests, classes) | fingerprint(values)
    where = path if group.rank == 0 else None
    every = options.checkpoint_every
    journal = group.all(lambda: Checkpoint(where, FIT, mark, seed=seed, every=every, classes=known))
    if group.size > 1:
        journal.share(group, data.like.device)
    return journal
