"""A fitted classifier as an ONNX file, which predicts without PyTorch and without conjugp."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

import conjugp
from conjugp._estimators.classifier import GPClassifier
from conjugp._fit.options import FitOptions, one_of
from conjugp._gp.model import Model
from conjugp._persistence.files import check_path, replaced
from conjugp.likelihoods import Dirichlet, Heaviside, LogisticSoftmax, RobustMax, Softmax

__all__ = ["to_onnx"]

_LIKELIHOODS = (Dirichlet, Heaviside, LogisticSoftmax, RobustMax, Softmax)
_LARGEST = 2**31 - 2**20  # bytes: what a single ONNX file can hold


def to_onnx(
    clf: GPClassifier, path: str | os.PathLike[str], *, input_dtype: str = "float64"
) -> None:
    """Write a fitted classifier as an ONNX file.

    The graph takes ``X`` (n, n_features), any number of rows in the units of the training data,
    and gives ``label`` (n,), int64 or strings, and ``probabilities`` (n, n_classes): those of
    ``predict_proba`` to 1e-5. All arithmetic in it is float64. Needs ``pip install
    "conjugp[onnx]"`` to write; ONNX Runtime is enough to read.

    Of a fit to a table with text, categories, dates or gaps, the graph takes an input (n, 1) for
    each column that the model uses, by the column's name: numbers, dates as days since 1970-01-01
    in UTC, both with NaN for a gap, and all else as strings, with ``""`` for a gap. Numbers that
    are categories are strings too, 3.0 as ``"3"``.

    Parameters
    ----------
    clf : GPClassifier
        A fitted classifier with one of the library's kernels and likelihoods and with
        deterministic predictions, as is the default.
    path : str or path-like
        The file; one that is there is replaced when the new one is complete.
    input_dtype : {"float64", "float32"}, default="float64"
        What X is, or the numbers and dates of a table, and the probabilities as well. float32 is
        too coarse for features that are large beside their spread, such as years or coordinates;
        of today's dates it tells times that are three minutes apart.

    Examples
    --------
    >>> import onnxruntime
    >>> from sklearn.datasets import load_iris
    >>> from conjugp import GPClassifier
    >>> from conjugp.export import to_onnx
    >>> X, y = load_iris(return_X_y=True)
    >>> to_onnx(GPClassifier(random_state=0).fit(X, y), "iris.onnx")
    >>> label, proba = onnxruntime.InferenceSession("iris.onnx").run(None, {"X": X})
    """
    check_path("path", path)
    one_of("input_dtype", input_dtype, ("float64", "float32"))
    try:
        import onnx  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError('to_onnx needs onnx: pip install "conjugp[onnx]"') from error
    predictor = _exportable(clf)
    from conjugp.export._model import build

    labels = _labels(clf.classes_)
    metadata = _metadata(clf, predictor, labels)
    model = build(predictor, clf._inputs, input_dtype, labels, metadata)
    if model.ByteSize() > _LARGEST:
        raise ValueError(
            f"the model takes {model.ByteSize() / 1e9:.1f} GB, more than one ONNX file can hold; "
            'fit fewer inducing points or covariance="shared"'
        )
    with replaced(path) as temporary:
        temporary.write_bytes(model.SerializeToString())


def _exportable(clf: Any) -> Model:
    """What predicts for `clf`; an error unless it can be written as ONNX."""
    from conjugp.export._kernels import check_kernel

    if not isinstance(clf, GPClassifier):
        why = ": its predictions are averages over draws" if hasattr(clf, "to_arviz") else ""
        raise TypeError(f"clf must be a GPClassifier; got {type(clf).__name__}{why}")
    model = clf._predictor
    if not isinstance(model, Model):
        raise TypeError(f"clf: predictions of {type(model).__name__} are not exported")
    prediction = (clf.options or FitOptions()).prediction
    if prediction != "integral":
        raise ValueError(
            f"options.prediction={prediction!r} predicts from random draws, which ONNX does not "
            'repeat; set clf.options = FitOptions(prediction="integral") first'
        )
    if type(model.likelihood) not in _LIKELIHOODS:
        raise ValueError(
            f"the likelihood {type(model.likelihood).__name__} is not one of "
            "conjugp.likelihoods: it predicts from draws, which are not exported"
        )
    for kernel in model.kernels:
        check_kernel(kernel)
    return model


def _labels(classes: NDArray[Any]) -> NDArray[Any]:
    """Classes as ONNX has them: int64, or strings."""
    if classes.dtype.kind in "biuf":
        return classes.astype(np.int64)
    return np.array([str(c) for c in classes], dtype=object)


def _metadata(clf: GPClassifier, model: Model, labels: NDArray[Any]) -> dict[str, str]:
    """What the file says about itself."""
    found = {
        "conjugp_version": conjugp.__version__,
        "classes": json.dumps(labels.tolist()),
        "temperature": repr(float(model.calibration.temperature)),
        "variance_scale": repr(float(model.calibration.variance_scale)),
        "likelihood": model.likelihood.name,
        "kernel": str(clf.kernel_),
        "n_inducing": str(len(model.Z)),
    }
    if clf._inputs.names is not None:
        found["feature_names"] = json.dumps(clf._inputs.names)
    if clf._inputs.encoder is not None:
        found["columns"] = json.dumps(clf._inputs.encoder.kinds)
    return found
