"""Model files: a fitted classifier in one file, which cannot run code and is checked when read.

The header is JSON (docs/saving.md lists it), the rest arrays; `files` writes both at once or not
at all. What is read may come from a stranger: every shape, type and range is checked before there
is a model, and a file that fails any check raises `FileFormatError`.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from conjugp._estimators.arguments import check_device, check_parameters
from conjugp._fit.base import Fitted
from conjugp._fit.options import FitOptions, number, one_of, whole
from conjugp._fit.partial import Stream
from conjugp._gp.covariance import FAMILIES, NONE, Covariance
from conjugp._gp.model import Model
from conjugp._gp.posterior import Posterior
from conjugp._gp.state import State
from conjugp._gp.temperature import Calibration
from conjugp._inputs.scales import Scaling
from conjugp._persistence import files
from conjugp._persistence.codec import Decoder, Encoder, UnknownClassError
from conjugp._persistence.files import FileFormatError
from conjugp.kernels import KERNELS, Kernel
from conjugp.likelihoods import LIKELIHOODS, Likelihood

FORMAT = 1
KINDS = ("GPClassifier", "GibbsGPClassifier")
_STREAMS = {"variational": "vi", "ep": "ep"}  # as files have it, and as fits do
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_HEADER = {"kind", "format", "version", "params", "summary", "extra", "arguments", "fitted"}


class Saveable:
    """A classifier that can be written to a file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted classifier to a file, which ``conjugp.load`` reads.

        The file is safetensors with a JSON header and cannot run code. A file of that name is
        replaced at once or, should anything fail, left as it was. All that was fitted and all
        parameters are kept, except a callback in ``options``; a RandomState is kept as it stands.

        Parameters
        ----------
        path : path
            Where to write; ``.conjugp`` is the usual ending.
        """
        save(self, path)


def save(clf: Any, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
    """Write a fitted classifier, with any JSON-able data of the caller's own."""
    check_is_fitted(clf)
    kind = type(clf).__name__
    if kind not in KINDS or type(clf) is not _class(kind):
        raise TypeError(f"only {' and '.join(KINDS)} can be saved; got {type(clf)}")
    files.check_path("path", path)
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra must be a dict or None; got {extra!r}")
    _check_arguments(kind, clf.get_params(deep=False))
    encode = Encoder()
    arguments = {
        name: _encoded(encode, name, value) for name, value in clf.get_params(deep=False).items()
    }
    parts = _gp_parts(clf) if kind == "GPClassifier" else _gibbs_parts(clf)
    header = {
        "kind": kind,
        "format": FORMAT,
        "version": _version(),
        "params": {name: _shown(value) for name, value in clf.get_params(deep=False).items()},
        "summary": _summary(clf),
        "extra": _json("extra", extra or {}),
        "arguments": arguments,
        "fitted": {name: _encoded(encode, name, value) for name, value in parts.items()},
    }
    files.write(path, encode.arrays, header)


def read_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model file says about itself: kind, format, version, params, summary, extra."""
    header = _read(path)[1]
    return {name: header[name] for name in ("kind", "format", "version", "params", "summary")} | {
        "extra": header["extra"]
    }


def load(
    path: str | os.PathLike[str],
    custom: Iterable[type] = (),
    device: str | None = None,
    dtype: str | None = None,
) -> Any:
    """Read a classifier that ``save`` has written.

    The file cannot run code, whoever it comes from. It is read as a whole or not at all.

    Parameters
    ----------
    path : path
        A model file.
    custom : iterable of classes, default=()
        Kernel and likelihood classes of your own that the model uses. They are found by name, under
        any module; a file never makes conjugp import anything.
    device : str or None, default=None
        Where the model is to be: a torch device, or ``None`` for the one it was on, the CPU if that
        is not there. A device given becomes the classifier's ``device``.
    dtype : {"float32", "float64"} or None, default=None
        Working precision; ``None`` keeps it. One given becomes the classifier's ``dtype``.

    Returns
    -------
    clf : GPClassifier or GibbsGPClassifier
        The fitted classifier. On the same device and in the same precision its probabilities are
        the same bits as before.

    Raises
    ------
    conjugp._persistence.files.FileFormatError
        If the file is truncated, altered, foreign, or of a newer format; or if it needs a class
        that is not in ``custom``.
    """
    custom = list(custom)
    for cls in custom:
        if not (isinstance(cls, type) and issubclass(cls, Kernel | Likelihood)):
            raise TypeError(f"custom must hold classes of kernels and likelihoods; got {cls!r}")
    if dtype is not None:
        one_of("dtype", dtype, tuple(_DTYPES))
    if device is not None:
        check_device(device, 0)
    arrays, header = _read(path)
    kind = header["kind"]
    if kind != "GPClassifier" and (
        dtype not in (None, "float64") or device not in (None, "cpu", "auto")
    ):
        raise ValueError(f"device, dtype: a {kind} works on the CPU in float64 alone")
    decode = Decoder(arrays, [*KERNELS, *LIKELIHOODS.values()], custom)
    cls = _class(kind)
    try:
        arguments = _decoded(decode, header["arguments"])
        parts = _decoded(decode, header["fitted"])
        if decode.unused:
            raise ValueError(f"arrays that nothing refers to: {sorted(decode.unused)[:3]}")
        clf = _build_arguments(cls, arguments)
        if kind == "GPClassifier":
            _build_gp(clf, parts, _place(device, header["summary"]), dtype)
        else:
            _build_gibbs(clf, parts)
    except UnknownClassError as error:
        short = error.name.rpartition(".")[2]
        raise FileFormatError(
            f"{path} needs the class {error.name}, which is not part of conjugp: give it as "
            f"load(path, custom=[{short}])"
        ) from error
    except Exception as error:
        # Whatever a stranger's file trips over, it is the file that is wrong.
        raise FileFormatError(f"{path} holds no {kind} that can be used: {error}") from error
    if device is not None and kind == "GPClassifier":
        clf.device = device
    if dtype is not None and kind == "GPClassifier":
        clf.dtype = dtype
    return clf


# --- the header -----------------------------------------------------------------------------------


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays and the header, of a known format and with all its keys."""
    return files.read(path, partial(_check_header, path))


def _check_header(path: str | os.PathLike[str], header: Any) -> None:
    """Raise unless a header is that of a model file."""
    if not isinstance(header, dict) or header.get("kind") not in KINDS:
        what = header.get("kind") if isinstance(header, dict) else None
        raise FileFormatError(f"{path} is not a model file" + (f" but a {what}" if what else ""))
    found = header.get("format")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise FileFormatError(f"{path} has no format that is known")
    if found > FORMAT:
        raise FileFormatError(
            f"{path} has format {found} and was written by conjugp {header.get('version')}; this "
            f"version reads formats up to {FORMAT}: install a newer one"
        )
    dicts = ("params", "summary", "extra", "arguments", "fitted")
    if (
        set(header) != _HEADER
        or not isinstance(header["version"], str)
        or not all(isinstance(header[name], dict) for name in dicts)
    ):
        raise FileFormatError(f"{path} has a header that is not a model file's")


def _class(kind: str) -> Any:
    """The classifier of that name; the sampler's is loaded only when it is asked for."""
    import conjugp

    return getattr(conjugp, kind)


def _version() -> str:
    import conjugp

    return conjugp.__version__


def _json(name: str, value: Any) -> Any:
    """The value as JSON would give it back."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be plain JSON data ({error})") from error


def _shown(value: Any) -> Any:
    """A parameter as people read it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return repr(value)


def _encoded(encode: Encoder, name: str, value: Any) -> Any:
    """A named value as plain data."""
    if isinstance(value, FitOptions):
        value = {"options": {**value.get_params(deep=False), "callback": None}}
    elif isinstance(value, np.random.RandomState):
        value = {"random state": _random_state(value)}
    elif name in ("inducing", "prior_mean") and not isinstance(value, str | float | int):
        value = np.asarray(value)
    try:
        return encode(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error


def _random_state(value: np.random.RandomState) -> dict[str, Any]:
    """The state of the usual kind of generator, MT19937, with which scikit-learn works."""
    state: Any = value.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise TypeError(f"random_state: a RandomState of {state['bit_generator']} cannot be saved")
    return {**state["state"], "has_gauss": state["has_gauss"], "gauss": state["gauss"]}


def _with_random_state(found: Any) -> np.random.RandomState:
    take, out = _Parts(found), np.random.RandomState()
    state = {"key": take.array("key", np.uint32, 624), "pos": take.whole("pos", 0)}
    has_gauss, gauss = take.whole("has_gauss", 0), take.number("gauss")
    take.end()
    # NumPy does not look: beyond its end it would read any memory.
    if state["pos"] > 624 or has_gauss > 1:
        raise ValueError("random_state is out of range")
    out.set_state(
        {"bit_generator": "MT19937", "state": state, "has_gauss": has_gauss, "gauss": gauss}
    )
    return out


def _decoded(decode: Decoder, found: dict[str, Any]) -> dict[str, Any]:
    return {name: decode(plain) for name, plain in found.items()}


def _summary(clf: Any) -> dict[str, Any]:
    """Facts for whoever looks at the file; nothing is built from them but the device."""
    kernel = clf.kernel_ if isinstance(clf.kernel_, list) else [clf.kernel_]
    names = getattr(clf, "feature_names_in_", None)
    out: dict[str, Any] = {
        "n_classes": len(clf.classes_),
        "n_features": int(clf.n_features_in_),
        "feature_names": None if names is None else [str(name) for name in names],
        "n_inducing": len(clf.inducing_points_),
        "kernel": "; ".join(map(repr, kernel[:3])) + ("; ..." if len(kernel) > 3 else ""),
        "n_iter": int(clf.n_iter_),
        "converged": bool(clf.converged_),
    }
    if type(clf).__name__ == "GPClassifier":
        model = clf._fitted.model
        out |= {
            "likelihood": model.likelihood.name,
            "bound": model.bound,
            "covariance": model.S.family,
            "temperature": float(clf.temperature_),
            "elbo": float(clf.elbo_) if math.isfinite(clf.elbo_) else None,
            "dtype": str(model.Z.dtype).removeprefix("torch."),
            "device": str(model.Z.device),
            "weight_of_rows": float(clf._fitted.total),
        }
    else:
        out |= {
            "likelihood": "logistic-softmax",
            "n_chains": len(clf._model.draws),
            "n_draws": int(clf._model.n_draws),
            "rhat": float(clf.rhat_) if math.isfinite(clf.rhat_) else None,
            "dtype": "float64",
            "device": "cpu",
        }
    return out


# --- constructor arguments ------------------------------------------------------------------------


def _build_arguments(cls: Any, found: dict[str, Any]) -> Any:
    """An unfitted classifier."""
    for name, value in found.items():
        if isinstance(value, dict) and set(value) == {"options"}:
            if value["options"].get("callback") is not None:
                raise ValueError("options: a callback cannot be saved")
            found[name] = FitOptions(**value["options"])
        elif isinstance(value, dict) and set(value) == {"random state"}:
            found[name] = _with_random_state(value["random state"])
    if set(found) != set(inspect.signature(cls).parameters):
        raise ValueError("the arguments of the constructor are not those of this class")
    clf = cls(**found)
    _check_arguments(cls.__name__, found)
    return clf


def _check_arguments(kind: str, found: dict[str, Any]) -> None:
    """Raise for an argument out of range; a device need not be on this machine."""
    if kind == "GPClassifier":
        if found["device"] != "auto" and torch.device(found["device"]).type not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'auto', a CPU or a CUDA device: {found['device']!r}")
        check_parameters(_class(kind)(**{**found, "device": "cpu"}))
    else:
        _class(kind)(**found)._check()


# --- GPClassifier ---------------------------------------------------------------------------------


def _gp_parts(clf: Any) -> dict[str, Any]:
    """All fitted state, by the names of the format."""
    fitted: Fitted = clf._fitted
    model, stream = fitted.model, getattr(clf, "_stream", None)
    return {
        **_face_parts(clf),
        "likelihood": model.likelihood,
        "bound": model.bound,
        "kernels": list(model.kernels),
        "Z": model.Z,
        "w": model.w,
        "alpha": model.alpha,
        "mean": model.mean,
        "L_inv": model.L_inv,
        "family": model.S.family,
        "R": model.S.R,
        "state": None if fitted.state is None else _state_parts(fitted.state),
        "calibration": list(fitted.calibration),
        "temperature": clf.temperature_,
        "variance_scale": clf.variance_scale_,
        "elbo": fitted.elbo,
        "epochs": fitted.epochs,
        "converged": bool(fitted.converged),
        "total": fitted.total,
        "class_gap": fitted.class_gap,
        "kept": fitted.kept,
        "shares": fitted.shares,
        "history": fitted.history,
        "prediction_seed": clf._prediction_seed,
        "stream": None if stream is None else _stream_parts(stream),
    }


def _face_parts(clf: Any) -> dict[str, Any]:
    names = getattr(clf, "feature_names_in_", None)
    return {
        "classes": clf.classes_,
        "n_features": int(clf.n_features_in_),
        "feature_names": None if names is None else [str(name) for name in names],
        "shift": clf._scaling.shift,
        "scale": clf._scaling.scale,
    }


def _state_parts(s: State) -> dict[str, Any]:
    return {
        "template": s.template.frozen(),
        "theta": s.theta,
        "Z": s.Z,
        "mean": s.mean,
        "h": s.q.h,
        "P": s.q.P,
        "step": s.step,
    }


def _stream_parts(stream: Stream) -> dict[str, Any]:
    assert stream.state is not None
    names = {how: name for name, how in _STREAMS.items()}
    return {
        "kernel": None if stream.kernel is None else stream.kernel.frozen(),
        "limit": stream.limit,
        "likelihood": stream.likelihood,
        "bound": stream.bound,
        "trainer": names[stream.inference],
        "generator": stream.generator.get_state(),
        "seen": stream.seen,
        "epochs": stream.epochs,
        "state": _state_parts(stream.state),
        "history": stream.history,
    }


def _build_gp(clf: Any, p: dict[str, Any], device: torch.device, dtype: str | None) -> None:
    """Set all fitted attributes, once every part has been checked."""
    take = _Parts(p)
    classes, names, scaling = _face(take)
    fitted = _fitted(take, len(classes), len(scaling.scale))
    temperature, variance_scale = take.number("temperature", 0.0), take.number("variance_scale", 0)
    if not (temperature > 0.0 and variance_scale <= 1.0):
        raise ValueError("the temperature or the share of the variance is out of range")
    seed, stream = take.whole("prediction_seed", 0), take.any("stream")
    take.end()
    if stream is not None:
        stream = _stream(_Parts(stream), fitted.model)
        stream.kept = fitted.kept
    clf._keep(fitted, scaling, classes)
    # Attributes come from what was saved, and only then does it move.
    clf._fitted = _moved_fitted(fitted, device, dtype)
    _set_face(clf, len(scaling.scale), names)
    clf.temperature_, clf.variance_scale_ = temperature, variance_scale
    clf._prediction_seed = seed
    if stream is not None:
        stream.state = _moved_state(stream.state, device, dtype)
        clf._stream = stream


def _face(take: _Parts) -> tuple[NDArray[Any], list[str] | None, Scaling]:
    """Classes, names of the features and units."""
    classes, D = take.any("classes"), take.whole("n_features", 1)
    if not isinstance(classes, np.ndarray) or classes.ndim != 1 or len(classes) < 2:
        raise ValueError("classes must be a list of at least two labels")
    if classes.dtype.kind == "f" and not np.isfinite(classes).all():
        raise ValueError("classes must be finite")
    if not np.array_equal(np.unique(classes), classes):
        raise ValueError("classes must be sorted and distinct")
    names = take.any("feature_names")
    if names is not None and not (
        isinstance(names, list) and len(names) == D and all(isinstance(n, str) for n in names)
    ):
        raise ValueError("feature_names must be one text for each feature")
    shift, scale = (take.array(name, np.float64, D) for name in ("shift", "scale"))
    if not (scale > 0).all():
        raise ValueError("scale must be positive")
    return classes, names, Scaling(shift, scale)


def _set_face(clf: Any, n_features: int, names: list[str] | None) -> None:
    clf.n_features_in_ = n_features
    if names is not None:
        clf.feature_names_in_ = np.array(names, dtype=object)


def _fitted(take: _Parts, C: int, D: int) -> Fitted:
    """The model and how it came about."""
    likelihood, bound = take.object("likelihood", Likelihood), take.text("bound")
    likelihood.check_bound(bound)
    found = take.any("kernels")
    if not isinstance(found, list) or len(found) not in (1, C):
        raise ValueError(f"kernels must be one or {C}")
    Z = take.tensor("Z", None, None, D)
    dtype, M = Z.dtype, len(Z)
    if dtype not in _DTYPES.values() or not M:
        raise ValueError("Z must hold inducing points in float32 or float64")
    w, alpha = take.tensor("w", dtype, C, M), take.tensor("alpha", dtype, C, M)
    mean, L_inv = take.tensor("mean", dtype, C), take.tensor("L_inv", dtype, len(found), None, None)
    family, M_v = take.text("family"), L_inv.shape[1]
    one_of("family", family, (*FAMILIES, NONE))
    if L_inv.shape[2] != M_v or M_v > M or (M_v == 0) != (family == NONE):
        raise ValueError("L_inv is not a square matrix on some of the inducing points")
    if len(found) > 1 and family != "full":
        raise ValueError("one kernel per class needs full covariances")
    shape = {"full": (C, M_v, M_v), "diagonal": (C, M_v)}.get(family, (1, M_v, M_v))
    R = take.tensor("R", dtype, *shape)
    for kernel in found:
        _check_kernel(kernel, Z)
    model = Model(likelihood, bound, tuple(found), Z, w, alpha, mean, L_inv, Covariance(family, R))
    m, v = model.latent(Z[:2])
    if not (m.isfinite().all() and v.isfinite().all()):
        raise ValueError("the latent functions are not finite")
    state = take.any("state")
    calibration = take.any("calibration")
    if not isinstance(calibration, list) or len(calibration) != 3:
        raise ValueError("calibration must be three numbers")
    return Fitted(
        model,
        Calibration(*map(_real, calibration)),
        _real(take.any("elbo")),
        take.number("epochs", 0),
        take.flag("converged"),
        None if state is None else _state(_Parts(state), C, D, dtype),
        _history(take.any("history")),
        take.number("total", 0),
        take.number("class_gap"),
        take.share("kept"),
        shares=_shares(take, C),
    )


def _shares(take: _Parts, C: int) -> Tensor | None:
    """The classes' shares of the rows; older files have none."""
    if take.found.get("shares") is None:
        take.left.discard("shares")
        return None
    shares = take.tensor("shares", torch.float64, C)
    if not (bool((shares > 0).all()) and abs(float(shares.sum()) - 1.0) < 1e-6):
        raise ValueError("the shares of the classes are no shares")
    return shares


def _check_kernel(kernel: Any, Z: Tensor) -> None:
    """Raise unless it is a kernel of inputs like Z, with all its parameters."""
    if not isinstance(kernel, Kernel):
        raise ValueError(f"{kernel!r} is not a kernel")
    K, diagonal = kernel(Z[:1], Z[:1]), kernel.diag(Z[:1])
    if K.shape != (1, 1) or diagonal.shape != (1,) or not (K.isfinite().all() and diagonal >= 0):
        raise ValueError(f"{kernel!r} gives no covariance")


def _state(take: _Parts, C: int, D: int, dtype: torch.dtype) -> State:
    template = take.object("template", Kernel)
    theta = take.tensor("theta", dtype, None, template.n_theta)
    if len(theta) not in (1, C):
        raise ValueError("theta must be one row, or one for each class")
    Z, mean = take.tensor("Z", dtype, None, D), take.tensor("mean", dtype, C)
    h = take.tensor("h", dtype, C, None)
    M = h.shape[1]
    if not len(Z) or M not in (1, len(Z)):
        raise ValueError("the posterior does not stand on the inducing points")
    P, step = take.tensor("P", dtype, C, M, M), take.whole("step", 0)
    take.end()
    _check_kernel(template.with_theta(theta[0]), Z)
    return State(template, theta, Z, mean, Posterior(h, P), step)


def _stream(take: _Parts, model: Model) -> Stream:
    kernel, likelihood = take.any("kernel"), take.object("likelihood", Likelihood)
    if kernel is not None and not isinstance(kernel, Kernel):
        raise ValueError("the kernel of the stream is none")
    bound, trainer = take.text("bound"), take.text("trainer")
    likelihood.check_bound(bound)
    one_of("trainer", trainer, tuple(_STREAMS))
    stream = Stream(kernel, take.whole("limit", 1), likelihood, bound, 0, _STREAMS[trainer])
    generator = take.any("generator")
    if not isinstance(generator, Tensor) or generator.dtype != torch.uint8:
        raise ValueError("the state of the random numbers is none")
    stream.generator.set_state(generator)
    stream.seen, stream.epochs = take.number("seen", 0), take.whole("epochs", 0)
    C, D = model.n_classes, model.Z.shape[1]
    stream.state = _state(_Parts(take.any("state")), C, D, model.Z.dtype)
    stream.history = _history(take.any("history"))
    take.end()
    return stream


def _history(found: Any) -> list[dict[str, float | str]]:
    if not isinstance(found, list):
        raise ValueError("history must be a list")
    for report in found:
        plain = isinstance(report, dict) and all(
            isinstance(x, str | int | float) for x in report.values()
        )
        if not plain:
            raise ValueError("a report in the history is not one of numbers")
    return found


# --- GibbsGPClassifier ----------------------------------------------------------------------------


def _gibbs_parts(clf: Any) -> dict[str, Any]:
    model = clf._model
    t = model.target
    return {
        **_face_parts(clf),
        "y": t.data.y,
        "index": t.data.index,
        "X": t.X,
        "Z": t.Z,
        "kernels": list(t.kernels),
        "mean": t.mean,
        "augmentation": t.augmentation,
        "mean_variance": t.mean_variance,
        "kernel_scale": t.kernel_scale,
        "jitter": t.jitter,
        "seed": model.seed,
        "draws": [{name: getattr(d, name) for name in _DRAWS} for d in model.draws],
        "observations": clf._observation,
        "diagnostics": clf._diagnostics.each,
    }


_DRAWS = ("g", "log_likelihood", "theta", "mean")


def _build_gibbs(clf: Any, p: dict[str, Any]) -> None:
    """Set all fitted attributes, once every part has been checked."""
    from conjugp._sampler.chain import Draws, Target
    from conjugp._sampler.diagnostics import Diagnostics
    from conjugp._sampler.sweep import AUGMENTATIONS, Observations

    take = _Parts(p)
    classes, names, scaling = _face(take)
    C, D = len(classes), len(scaling.scale)
    X, Z = take.array("X", np.float64, None, D), take.any("Z")
    if Z is not None:
        Z = take.array("Z", np.float64, None, D)
    y, index = take.array("y", np.int64, None), take.any("index")
    points = X if Z is None else Z
    if not (len(X) and len(points) and len(y)) or y.min() < 0 or y.max() >= C:
        raise ValueError("labels are not among the classes, or there are no rows")
    if index is None:
        if len(y) != len(X):
            raise ValueError("rows and inputs do not go together")
    else:
        index = take.array("index", np.int64, len(y))
        if index.min() < 0 or index.max() >= len(X):
            raise ValueError("rows and inputs do not go together")
    observations = take.array("observations", np.int64, None)
    if len(observations) and (observations.min() < 0 or observations.max() >= len(y)):
        raise ValueError("observations and rows do not go together")
    found = take.any("kernels")
    if not isinstance(found, list) or len(found) not in (1, C):
        raise ValueError(f"kernels must be one or {C}")
    for kernel in found:
        _check_kernel(kernel, torch.tensor(points))
    one_of("augmentation", take.text("augmentation"), AUGMENTATIONS)
    jitter = take.any("jitter")
    target = Target(
        Observations(y, C, index),
        X,
        Z,
        tuple(found),
        take.array("mean", np.float64, C),
        take.text("augmentation"),
        take.number("mean_variance", 0),
        take.number("kernel_scale", 0),
        None if jitter is None else take.number("jitter", 0),
    )
    shapes = {"g": (C, len(points)), "theta": target.theta.shape, "mean": (C,)}
    draws: list[Draws] = []
    given = take.any("draws")
    if not isinstance(given, list) or not given:
        raise ValueError("there are no draws")
    for one in map(_Parts, given):
        n = len(draws[0].g) if draws else None
        g = one.array("g", np.float64, n, *shapes["g"])
        rest = (one.array(x, np.float64, len(g), *shapes.get(x, ())) for x in _DRAWS[1:])
        draws.append(Draws(g, *rest))
        one.end()
    if not len(draws[0].g):
        raise ValueError("there are no draws")
    seed = take.whole("seed", 0)
    each = _diagnostics(take.any("diagnostics"))
    take.end()
    diagnostics = Diagnostics(each, len(draws), len(draws[0].g))
    clf._keep((target, classes, scaling, observations), draws, seed, diagnostics)
    m, v = clf._model.latent(clf._model.Z[:2])
    if not (m.isfinite().all() and v.isfinite().all()):
        raise ValueError("the latent functions are not finite")
    _set_face(clf, D, names)


def _diagnostics(found: Any) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Groups of measures, NaN where there were too few draws."""
    if not isinstance(found, dict) or "log_likelihood_total" not in found or "f" not in found:
        raise ValueError("the diagnostics are not those of a sampler")
    for group in found.values():
        measures = _Parts(group)
        n = None
        for name in ("rhat", "ess_bulk", "ess_tail"):
            n = len(measures.array(name, np.float64, n, finite=False))
        if not n:
            raise ValueError("a group of the diagnostics is empty")
        measures.end()
    return found


# --- checking -------------------------------------------------------------------------------------


class _Parts:
    """Named parts, each of which must be what it is taken for; none may be left."""

    def __init__(self, found: Any) -> None:
        if not isinstance(found, dict):
            raise ValueError("a part is not what it should be")
        self.found, self.left = found, set(found)

    def any(self, name: str) -> Any:
        """The part, whatever it is."""
        if name not in self.found:
            raise ValueError(f"{name} is missing")
        self.left.discard(name)
        return self.found[name]

    def end(self) -> None:
        """Raise if there is more than was asked for."""
        if self.left:
            raise ValueError(f"unknown parts: {sorted(self.left)[:3]}")

    def number(self, name: str, low: float = -math.inf) -> float:
        """A finite number of at least `low`."""
        number(name, self.any(name), low)
        return self.found[name]

    def share(self, name: str) -> float:
        """A number in (0, 1]; 1 where an older file has none."""
        if name in self.found:
            number(name, self.any(name), 0, 1, exclusive=True)
        return self.found.get(name, 1.0)

    def whole(self, name: str, least: int) -> int:
        """A whole number of at least `least`."""
        whole(name, self.any(name), least)
        if self.found[name] >= 2**63:
            raise ValueError(f"{name} is too large")
        return self.found[name]

    def flag(self, name: str) -> bool:
        """Yes or no."""
        one_of(name, self.any(name), (True, False))
        return self.found[name]

    def text(self, name: str) -> str:
        """Text."""
        if not isinstance(self.any(name), str):
            raise ValueError(f"{name} must be text")
        return self.found[name]

    def object(self, name: str, cls: type) -> Any:
        """An object of that class."""
        if not isinstance(self.any(name), cls):
            raise ValueError(f"{name} must be a {cls.__name__}")
        return self.found[name]

    def array(
        self, name: str, dtype: type, *shape: int | None, finite: bool = True
    ) -> NDArray[Any]:
        """An array of that type and shape, None meaning any."""
        x = self.any(name)
        if not isinstance(x, np.ndarray) or x.dtype != dtype:
            raise ValueError(f"{name} must be an array of {np.dtype(dtype)}")
        _check_shape(name, x.shape, shape)
        if finite and not np.isfinite(x).all():
            raise ValueError(f"{name} holds numbers that are not finite")
        return x

    def tensor(self, name: str, dtype: torch.dtype | None, *shape: int | None) -> Tensor:
        """A finite tensor of that type and shape, None meaning any."""
        x = self.any(name)
        if not isinstance(x, Tensor) or (dtype is not None and x.dtype != dtype):
            raise ValueError(f"{name} must be a tensor of {dtype}")
        _check_shape(name, x.shape, shape)
        if not x.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")
        return x


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
    alike = len(found) == len(expected) and all(
        e is None or n == e for n, e in zip(found, expected, strict=True)
    )
    if not alike:
        raise ValueError(f"{name} has shape {tuple(found)}, not {expected}")


def _real(x: Any) -> float:
    """A number, finite or not."""
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise ValueError(f"{x!r} is not a number")
    return float(x)


# --- other devices and precisions -----------------------------------------------------------------


def _place(device: str | None, summary: dict[str, Any]) -> torch.device:
    """Where a model is to be: as asked, or where it was if that is here, or on the CPU."""
    if device not in (None, "auto"):
        return torch.device(device)
    was = summary.get("device")
    try:
        return check_device(was, 0) if isinstance(was, str) else torch.device("cpu")
    except ValueError:
        return torch.device("cpu")


def _moved_fitted(fitted: Fitted, device: torch.device, dtype: str | None) -> Fitted:
    m = fitted.model
    kind = m.Z.dtype if dtype is None else _DTYPES[dtype]
    if device.type == "cpu" and kind == m.Z.dtype:
        return fitted
    names = ("Z", "w", "alpha", "mean", "L_inv")
    tensors = {name: getattr(m, name).to(device=device, dtype=kind) for name in names}
    S = m.S._replace(R=m.S.R.to(device=device, dtype=kind))
    moved = tuple(_moved_kernel(k, device, kind) for k in m.kernels)
    state = None if fitted.state is None else _moved_state(fitted.state, device, dtype)
    return replace(fitted, model=replace(m, kernels=moved, S=S, **tensors), state=state)


def _moved_state(s: State | None, device: torch.device, dtype: str | None) -> State:
    assert s is not None
    kind = s.Z.dtype if dtype is None else _DTYPES[dtype]
    theta, Z, mean, h, P = (
        x.to(device=device, dtype=kind) for x in (s.theta, s.Z, s.mean, s.q.h, s.q.P)
    )
    return State(s.template, theta, Z, mean, Posterior(h, P), s.step)


def _moved_kernel(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> Kernel:
    def moved(name: str, value: Any) -> Any:
        return value.to(device=device, dtype=dtype) if isinstance(value, Tensor) else value

    return kernel._with_parameters(moved)
