"""Both classifiers in model files: their forms, and `save`."""

from __future__ import annotations

import inspect
import math
import os
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from conjugp._estimators.rows import set_inputs
from conjugp._fit.files import (
    DTYPES,
    fitted_parts,
    moved_model,
    moved_state,
    read_fitted,
    read_stream,
    stream_parts,
)
from conjugp._fit.options import FitOptions, check_device, check_parameters, one_of
from conjugp._inputs.encoder import Encoder
from conjugp._inputs.inputs import Inputs
from conjugp._inputs.kinds import PARTS
from conjugp._inputs.taming import Taming
from conjugp._persistence.model_file import Form, register, save
from conjugp._persistence.parts import Parts, random_state_parts, read_random_state
from conjugp.kernels import KERNELS, Kernel
from conjugp.kernels._columns import Columns
from conjugp.likelihoods import LIKELIHOODS, Likelihood


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


class _Classifier(Form):
    """What both have in common."""

    classes = (*KERNELS, Columns, *LIKELIHOODS.values(), Encoder, *PARTS, Taming)
    bases = (Kernel, Likelihood)

    def cls(self) -> type:
        import conjugp

        return getattr(conjugp, self.kind)  # the sampler's needs more packages

    @abstractmethod
    def check(self, arguments: dict[str, Any]) -> None:
        """Raise for an argument out of range."""

    def arguments(self, clf: Any) -> dict[str, Any]:
        given = clf.get_params(deep=False)
        self.check(given)
        out = {}
        for name, value in given.items():
            if isinstance(value, FitOptions):
                value = {"options": {**value.get_params(deep=False), "callback": None}}
            elif isinstance(value, np.random.RandomState):
                value = {"random state": random_state_parts(value)}
            elif name in ("categorical", "ignore") and not isinstance(value, str):
                plain = [x if isinstance(x, str) else int(x) for x in value]
                value = tuple(plain) if isinstance(value, tuple) else plain
            elif name in ("inducing", "prior_mean") and not isinstance(value, str | float | int):
                value = np.asarray(value)
            out[name] = value
        return out

    def unfitted(self, arguments: dict[str, Any]) -> Any:
        known = inspect.signature(self.cls()).parameters
        # Older files know fewer.
        given = {**{name: p.default for name, p in known.items()}, **arguments}
        for name, value in arguments.items():
            if isinstance(value, dict) and set(value) == {"options"}:
                if value["options"].get("callback") is not None:
                    raise ValueError("options: a callback cannot be saved")
                given[name] = FitOptions(**value["options"])
            elif isinstance(value, dict) and set(value) == {"random state"}:
                given[name] = read_random_state(Parts(value["random state"]))
        if set(given) != set(known):
            raise ValueError("the arguments of the constructor are not those of this class")
        self.check(given)
        return self.cls()(**given)

    def parts(self, clf: Any) -> dict[str, Any]:
        check_is_fitted(clf)
        return {"classes": clf.classes_, **clf._inputs.describe()}

    def summary(self, clf: Any) -> dict[str, Any]:
        kernel = clf.kernel_ if isinstance(clf.kernel_, list) else [clf.kernel_]
        described = clf._inputs.describe()
        return {
            "n_classes": len(clf.classes_),
            "n_features": described["n_features"],
            "feature_names": described["feature_names"],
            "columns": clf.columns_,
            "n_inducing": len(clf.inducing_points_),
            "kernel": "; ".join(map(repr, kernel[:3])) + ("; ..." if len(kernel) > 3 else ""),
            "n_iter": int(clf.n_iter_),
            "converged": bool(clf.converged_),
        }


class _GPForm(_Classifier):
    kind = "GPClassifier"

    def check(self, arguments: dict[str, Any]) -> None:
        """Raise for an argument out of range; a device need not be on this machine."""
        device = arguments["device"]
        if device != "auto" and torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'auto', a CPU or a CUDA device: {device!r}")
        check_parameters(self.cls()(**{**arguments, "device": "cpu"}))

    def parts(self, clf: Any) -> dict[str, Any]:
        common, stream = super().parts(clf), getattr(clf, "_stream", None)
        return {
            **common,
            **fitted_parts(clf._fitted),
            "prediction_seed": clf._prediction_seed,
            "stream": None if stream is None else stream_parts(stream),
        }

    def summary(self, clf: Any) -> dict[str, Any]:
        model = clf._fitted.model
        return {
            **super().summary(clf),
            "likelihood": model.likelihood.name,
            "bound": model.bound,
            "covariance": model.S.family,
            "temperature": float(clf.temperature_),
            "elbo": float(clf.elbo_) if math.isfinite(clf.elbo_) else None,
            "dtype": str(model.Z.dtype).removeprefix("torch."),
            "device": str(model.Z.device),
            "weight_of_rows": float(clf._fitted.total),
        }

    def check_place(self, device: str | None, dtype: str | None) -> None:
        if dtype is not None:
            one_of("dtype", dtype, tuple(DTYPES))
        if device is not None:
            check_device(device, 0)

    def build(self, clf: Any, take: Parts, was: Any, device: str | None, dtype: str | None) -> None:
        classes, inputs = _face(take)
        fitted = read_fitted(take, len(classes), inputs.n_features)
        seed, stream = take.whole("prediction_seed", 0), take.any("stream")
        take.end()
        if stream is not None:
            stream = read_stream(Parts(stream), fitted)
        clf._keep(fitted, inputs, classes)
        set_inputs(clf, inputs)
        clf._prediction_seed = seed
        # Attributes come from what was saved, and only then does it move.
        place, kind = _place(device, was), None if dtype is None else DTYPES[dtype]
        state = None if fitted.state is None else moved_state(fitted.state, place, kind)
        clf._fitted = replace(fitted, model=moved_model(fitted.model, place, kind), state=state)
        if stream is not None:
            assert stream.state is not None
            stream.state, clf._stream = moved_state(stream.state, place, kind), stream
        clf.device = clf.device if device is None else device
        clf.dtype = clf.dtype if dtype is None else dtype


class _GibbsForm(_Classifier):
    kind = "GibbsGPClassifier"

    def check(self, arguments: dict[str, Any]) -> None:
        from conjugp._estimators.problem import check_sampler

        check_sampler(self.cls()(**arguments))

    def parts(self, clf: Any) -> dict[str, Any]:
        from conjugp._sampler.files import model_parts

        return {
            **super().parts(clf),
            **model_parts(clf._model),
            "observations": clf._observation,
            "diagnostics": clf._diagnostics.each,
        }

    def summary(self, clf: Any) -> dict[str, Any]:
        return {
            **super().summary(clf),
            "likelihood": "logistic-softmax",
            "n_chains": len(clf._model.draws),
            "n_draws": int(clf._model.n_draws),
            "rhat": float(clf.rhat_) if math.isfinite(clf.rhat_) else None,
            "dtype": "float64",
            "device": "cpu",
        }

    def check_place(self, device: str | None, dtype: str | None) -> None:
        if dtype not in (None, "float64") or device not in (None, "cpu", "auto"):
            raise ValueError(f"device, dtype: a {self.kind} works on the CPU in float64 alone")

    def build(self, clf: Any, take: Parts, was: Any, device: str | None, dtype: str | None) -> None:
        from conjugp._sampler import files

        classes, inputs = _face(take)
        target = files.read_target(take, len(classes), inputs.n_features)
        observations = files.read_observations(take, target)
        draws, seed = files.read_draws(take, target), take.whole("seed", 0)
        diagnostics = files.read_diagnostics(take, draws)
        take.end()
        clf._keep((target, classes, inputs, observations), draws, seed, diagnostics)
        m, v = clf._model.latent(clf._model.Z[:2])
        if not (m.isfinite().all() and v.isfinite().all()):
            raise ValueError("the latent functions are not finite")
        set_inputs(clf, inputs)


def _face(take: Parts) -> tuple[NDArray[Any], Inputs]:
    """Classes, and what the columns are."""
    classes = take.any("classes")
    if not isinstance(classes, np.ndarray) or classes.ndim != 1 or len(classes) < 2:
        raise ValueError("classes must be a list of at least two labels")
    if classes.dtype.kind == "f" and not np.isfinite(classes).all():
        raise ValueError("classes must be finite")
    if not np.array_equal(np.unique(classes), classes):
        raise ValueError("classes must be sorted and distinct")
    return classes, Inputs.read(take)


def _place(device: str | None, was: Any) -> torch.device:
    """Where a model is to be: as asked, or where it was if that is here, or on the CPU."""
    if device not in (None, "auto"):
        return torch.device(device)
    try:
        return check_device(was, 0) if isinstance(was, str) else torch.device("cpu")
    except ValueError:
        return torch.device("cpu")


register(_GPForm())
register(_GibbsForm())
