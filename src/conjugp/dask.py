"""`GPClassifier` on Dask collections: rows stay on the workers that hold them.

The workers that hold partitions become the ranks of one process group and fit one model together,
as they would under torchrun. Dask and torch do the rest: this module starts them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from conjugp._estimators.classifier import GPClassifier
from conjugp._estimators.rows import WeightScale, check_weight

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["fit", "predict_proba"]

_one_fit = threading.Lock()  # a process is in one process group at a time
_POLL = 0.5  # seconds between two looks at the workers
_GRACE = 10.0  # seconds in which a lost worker is noticed after the others have failed


class LostWorkerError(RuntimeError):
    """A worker went away in the middle of a fit."""


def fit(
    client: Client,
    X: Any,
    y: Any = None,
    *,
    target: str | None = None,
    sample_weight: Any = None,
    classifier: GPClassifier | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    retries: int = 0,
    timeout: float = 300.0,
) -> GPClassifier:
    """Fit one model to the rows of a Dask collection, on the workers that hold them.

    Parameters
    ----------
    client : distributed.Client
        A client of a cluster whose workers are processes.
    X : Dask DataFrame or Array of shape (n_samples, n_features)
        Training data, divided by rows. It is computed once and stays where it is.
    y : Dask Series or Array of shape (n_samples,) or None, default=None
        Labels, divided as X is; or give `target`.
    target : str or None, default=None
        The column of X that holds the labels.
    sample_weight : Dask Series, Array, str or None, default=None
        Weights of the rows, or the column of X that holds them; what they mean is said in
        `GPClassifier.fit`.
    classifier : GPClassifier or None, default=None
        What to fit; it stays as it is. ``None`` is ``GPClassifier()``.
    checkpoint : path or None, default=None
        As in `GPClassifier.fit`; the first worker that holds rows writes it. On several machines
        it has to be in a folder that they share.
    retries : int, default=0
        How many lost workers to outlive: the fit starts again on those that are left, from the
        checkpoint if there is one.
    timeout : float, default=300.0
        Seconds after which a worker that does not answer counts as lost.

    Returns
    -------
    classifier : GPClassifier
        An ordinary fitted classifier.
    """
    _need_dask()
    if classifier is not None and not isinstance(classifier, GPClassifier):
        raise TypeError(f"classifier must be a GPClassifier or None; got {classifier!r}")
    if (y is None) == (target is None):
        raise ValueError("give the labels as y, or the name of their column as target")
    template: Any = GPClassifier() if classifier is None else clone(classifier)
    parts = _parts(X, y, target, sample_weight)
    while True:
        try:
            return _fit(client, parts, template, checkpoint, timeout)
        except LostWorkerError:
            if retries <= 0:
                raise
            retries -= 1


def predict_proba(client: Client, classifier: GPClassifier, X: Any) -> Any:
    """Probabilities of the rows of a Dask collection, as a lazy one.

    Parameters
    ----------
    client : distributed.Client
        The client whose workers get the classifier.
    classifier : GPClassifier
        A fitted classifier.
    X : Dask DataFrame or Array of shape (n_samples, n_features)
        Rows to predict, divided by rows.

    Returns
    -------
    proba : Dask DataFrame or Array of shape (n_samples, n_classes)
        A DataFrame with the classes as columns for a DataFrame, an Array for an Array.
    """
    _need_dask()
    classes = classifier.classes_
    model = client.scatter(classifier, broadcast=True, hash=False)
    if _is_frame(X):
        import pandas

        meta = pandas.DataFrame(np.empty((0, len(classes))), columns=list(classes.tolist()))
        return X.map_partitions(_proba_frame, model, meta=meta)
    X = X.rechunk({1: -1})
    chunks = (X.chunks[0], (len(classes),))
    return X.map_blocks(_proba, model, dtype=np.float64, chunks=chunks, meta=np.empty((0, 0)))


def _need_dask() -> None:
    try:
        import dask.dataframe  # noqa: F401
        import distributed  # noqa: F401
    except ImportError as error:
        raise ImportError('conjugp.dask needs Dask: pip install "conjugp[dask]"') from error


def _is_frame(X: Any) -> bool:
    return hasattr(X, "map_partitions") and hasattr(X, "columns")


# --- rows -----------------------------------------------------------------------------------------


def _parts(X: Any, y: Any, target: str | None, sample_weight: Any) -> list[Any]:
    """The rows as (X, y, weight) partition by partition, not computed yet."""
    from dask.delayed import delayed

    if not (_is_frame(X) or hasattr(X, "to_delayed")):
        raise TypeError(f"X must be a Dask DataFrame or Array; got {type(X).__name__}")
    for name, column in (("target", target), ("sample_weight", sample_weight)):
        if isinstance(column, str) and column not in getattr(X, "columns", ()):
            raise ValueError(f"{name}={column!r} is not a column of X")
    roles = {"y": target if y is None else y, "weight": sample_weight}
    named = {role: column for role, column in roles.items() if isinstance(column, str)}
    given = {role: _delayed(c) for role, c in roles.items() if c is not None and role not in named}
    columns = [_delayed(X), *given.values()]
    if len({len(column) for column in columns}) > 1:
        raise ValueError("X, y and sample_weight must have the same partitions")
    cut = delayed(_columns, pure=False)
    return [cut(named, list(given), *blocks) for blocks in zip(*columns, strict=True)]


def _delayed(collection: Any) -> list[Any]:
    if hasattr(collection, "rechunk") and collection.ndim == 2:
        collection = collection.rechunk({1: -1})
    return list(np.ravel(np.array(collection.to_delayed(), dtype=object)))


def _columns(named: dict[str, str], given: list[str], X: Any, *others: Any) -> tuple[Any, Any, Any]:
    """Features, labels and weights of a partition: columns of X by their names, or others."""
    found = dict(zip(given, others, strict=True)) | {role: X[c] for role, c in named.items()}
    X = X.drop(columns=list(named.values())) if named else X
    return X, np.asarray(found["y"]), found.get("weight")


def _scale(part: tuple[Any, Any, Any]) -> WeightScale:
    """How large the weights of a partition are."""
    X, _, weight = part
    given = weight is not None and len(weight) > 0
    return WeightScale.of(check_weight(weight, X)) if given else WeightScale()


# --- the process group ----------------------------------------------------------------------------


def _fit(
    client: Any, parts: list[Any], template: GPClassifier, checkpoint: Any, timeout: float
) -> GPClassifier:
    """One attempt."""
    from distributed import wait
    from distributed.comm.addressing import get_address_host

    futures: list[Any] = client.compute(parts)  # type: ignore[assignment]
    wait(futures)
    for future in futures:
        if future.status == "error":
            future.result()
    # What a worker warns of is seen in its log alone.
    scales: list[Any] = client.gather(client.map(_scale, futures, pure=False))  # type: ignore[assignment]
    reduce(WeightScale.plus, scales).warn()
    held = client.who_has(futures)
    mine: dict[str, list[Any]] = {}
    for future in futures:
        holders = sorted(held.get(future.key, ()))
        if not holders:
            raise LostWorkerError("a worker was lost before the fit began")
        mine.setdefault(holders[0], []).append(future)
    workers = sorted(mine)
    processes = client.run(lambda: (socket.gethostname(), os.getpid()), workers=workers)
    if len(set(processes.values())) < len(workers):
        raise ValueError("conjugp.dask needs workers that are processes: processes=True")
    host = get_address_host(workers[0])
    (port,) = client.run(_free_port, workers=workers[:1]).values()
    job = (len(workers), (host, port), template, checkpoint, timeout)
    how = {"allow_other_workers": False, "pure": False, "retries": 0}
    tasks = {
        address: client.submit(_fit_rank, mine[address], rank, *job, workers=[address], **how)
        for rank, address in enumerate(workers)
    }
    try:
        _watch(client, tasks)
        return tasks[workers[0]].result()
    finally:
        client.cancel(list(tasks.values()), force=True)


def _watch(client: Client, tasks: dict[str, Any]) -> None:
    """Wait until all tasks have ended well; raise for the first that has not, or is lost."""
    failed_at = None
    while True:
        alive = client.scheduler_info(n_workers=-1)["workers"]
        lost = [address for address in tasks if address not in alive]
        if lost:
            raise LostWorkerError(f"the Dask worker {', '.join(lost)} was lost during the fit")
        states = {address: task.status for address, task in tasks.items()}
        failed = [address for address, state in states.items() if state in ("error", "lost")]
        if not failed and all(state == "finished" for state in states.values()):
            return
        if failed:
            errors = {address: tasks[address].exception() for address in failed}
            own = [e for e in errors.values() if "has lost the others" not in str(e)]
            failed_at = failed_at or time.monotonic()
            # Ranks that lost another fail at once; which one it was the scheduler knows soon.
            if own:
                raise own[0]
            if time.monotonic() - failed_at > _GRACE:
                raise LostWorkerError(
                    f"the Dask worker {failed[0]} lost the others: {errors[failed[0]]}"
                )
        time.sleep(_POLL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _fit_rank(
    parts: list[tuple[Any, Any, Any]],
    rank: int,
    size: int,
    address: tuple[str, int],
    template: GPClassifier,
    checkpoint: Any,
    timeout: float,
) -> GPClassifier | None:
    """What a worker does: its rows, as one rank. Rank 0 gives the model back."""
    from torch import distributed
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    X, y, weight = _together(parts)
    if not _one_fit.acquire(timeout=timeout):
        raise RuntimeError("this Dask worker is busy with another fit")
    try:
        if size > 1:
            limit = timedelta(seconds=timeout)
            store = TCPStore(*address, size, is_master=rank == 0, timeout=limit)
            distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=limit
            )
        template.fit(X, y, weight, checkpoint=checkpoint)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        _one_fit.release()
    return template if rank == 0 else None


def _together(parts: list[tuple[Any, Any, Any]]) -> tuple[Any, NDArray[Any], NDArray[Any] | None]:
    """The partitions of a worker as one."""
    Xs, ys, weights = zip(*parts, strict=True)
    if hasattr(Xs[0], "iloc"):
        import pandas

        X: Any = pandas.concat(Xs)
    else:
        X = np.concatenate(Xs)
    weight = None if weights[0] is None else np.concatenate([np.asarray(w) for w in weights])
    return X, np.concatenate(ys), weight


def _proba(X: Any, model: GPClassifier) -> NDArray[np.float64]:
    return model.predict_proba(X) if len(X) else np.empty((0, len(model.classes_)))


def _proba_frame(X: Any, model: GPClassifier) -> Any:
    import pandas

    return pandas.DataFrame(_proba(X, model), columns=list(model.classes_.tolist()), index=X.index)
