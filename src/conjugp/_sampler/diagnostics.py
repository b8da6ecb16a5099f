"""Whether chains have mixed, by ArviZ: R-hat, effective sample sizes, and what to do about them."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from conjugp._sampler.prediction import SampledModel
from conjugp.kernels import Kernel

Array = NDArray[np.float64]

MAX_RHAT = 1.01
MIN_ESS = 100  # per chain
_MIN_DRAWS = 4  # of a chain, and twice that of a single one, for any of this to be defined
_LATENTS = 40  # latent values looked at, about: enough to see what has not mixed
_MEASURES = ("rhat", "ess_bulk", "ess_tail")


@dataclass(frozen=True)
class Diagnostics:
    """R-hat and effective sample sizes of every quantity, by groups."""

    each: dict[str, dict[str, Array]]
    n_chains: int
    n_draws: int  # of a chain

    @property
    def groups(self) -> dict[str, dict[str, float]]:
        """The worst of every group."""
        return {
            group: {m: float(x.max() if m == "rhat" else x.min()) for m, x in found.items()}
            for group, found in self.each.items()
        }

    @property
    def rhat(self) -> float:
        """The largest R-hat; NaN with too few draws."""
        return float(np.max([group["rhat"] for group in self.groups.values()]))

    @property
    def ess_bulk(self) -> float:
        """The smallest bulk effective sample size."""
        return float(np.min([group["ess_bulk"] for group in self.groups.values()]))

    @property
    def ess_tail(self) -> float:
        """The smallest tail effective sample size."""
        return float(np.min([group["ess_tail"] for group in self.groups.values()]))

    @property
    def converged(self) -> bool:
        """Whether the chains agree and hold enough independent draws."""
        enough = min(self.ess_bulk, self.ess_tail) >= MIN_ESS * self.n_chains
        return bool(enough and self.rhat <= MAX_RHAT)

    def advice(self) -> str:
        """What is wrong and what to do, in plain words."""
        if np.isnan(self.rhat):
            return (
                f"{self.n_draws} draws of a chain are too few to tell whether the chains have "
                "mixed. Raise n_samples"
            )
        if not self.rhat <= MAX_RHAT:
            worst = max(self.groups, key=lambda name: self.groups[name]["rhat"])
            labels = self.groups.get("log_likelihood_total", {"rhat": np.inf})["rhat"]
            fine = f"; of the log-likelihood it is {labels:.3f}" if labels < self.rhat else ""
            return (
                f"the chains have not mixed: R-hat of {worst} is {self.rhat:.3f}{fine}; it should "
                f"be at most {MAX_RHAT}, so they do not yet agree with each other. Raise n_warmup "
                "and n_samples; if that does not help, a smaller kernel variance mixes faster"
            )
        return (
            "the chains agree, but hold few independent draws: effective sample sizes are "
            f"{self.ess_bulk:.0f} (bulk) and {self.ess_tail:.0f} (tails) and should be at least "
            f"{MIN_ESS * self.n_chains}. Raise n_samples"
        )


def require_arviz() -> None:
    """Raise before any work if ArviZ is missing; importing it takes seconds."""
    if importlib.util.find_spec("arviz") is None:
        raise ImportError('GibbsGPClassifier needs arviz: pip install "conjugp[gibbs]"')


def _arviz() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the next major version, once a day
        import arviz
    return arviz


# --- what chains are judged by --------------------------------------------------------------------


def latents(model: SampledModel, points: NDArray[np.int64] | None = None) -> Array:
    """f at the inputs where the draws stand, or at some of them, (chain, draw, C, M)."""
    points = np.arange(len(model.Z)) if points is None else points
    n_chains, n, C = len(model.draws), len(model.draws[0].g), model.n_classes
    out = torch.empty(n_chains * n, C, len(points), dtype=torch.float64)
    with torch.no_grad():
        for theta, parts in model.groups:
            L = model.factor(theta)[:, points]
            for first, g in parts:
                for c in range(C):
                    f = model.mean[c] + g[:, c] @ L[c % len(L)].T
                    out[first : first + len(g), c] = f
    return out.numpy().reshape(n_chains, n, C, len(points))


def kernel_parameters(
    model: SampledModel, classes: NDArray[Any], scale: Array
) -> dict[str, tuple[Array, bool]]:
    """Kernel parameters in the user's units, and whether they have an axis of classes.

    (chain, draw), with an axis of C if every class has its own kernel, then one of D where a
    parameter has a value for every feature. Kernels of different kinds have names of their own.
    """
    kernels = model.target.kernels
    theta = model.stacked("theta")  # (chain, draw, K, T)
    found = [_values(k, theta[:, :, i], scale) for i, k in enumerate(kernels)]
    if len(found) == 1:
        return {name: (values, False) for name, values in found[0].items()}
    shapes = [{name: values.shape for name, values in one.items()} for one in found]
    if all(shape == shapes[0] for shape in shapes):
        return {name: (np.stack([one[name] for one in found], 2), True) for name in found[0]}
    return {
        f"{name}_{c}": (values, False)
        for c, one in zip(classes, found, strict=True)
        for name, values in one.items()
    }


def _values(kernel: Kernel, theta: Array, scale: Array) -> dict[str, Array]:
    """The parameters of one kernel from log parameters in working units (chain, draw, T)."""
    # Lengthscales are multiplied by the scales of the features, and nothing else changes.
    units = (kernel.to_units(scale).theta - kernel.theta).numpy()
    values = np.exp(theta[..., : len(units)] + units)
    shapes = [(leaf.name, leaf.shape) for leaf in kernel._leaves()]
    times, seen = Counter(name for name, _ in shapes), Counter()
    out, at = {}, 0
    for name, shape in shapes:
        seen[name] += 1
        size = math.prod(shape)
        label = name if times[name] == 1 else f"{name}_{seen[name]}"
        out[label] = values[..., at : at + size].reshape(*values.shape[:2], *shape)
        at += size
    return out


def quantities(
    model: SampledModel, classes: NDArray[Any] | None = None, scale: Array | None = None
) -> dict[str, dict[str, Array]]:
    """What chains are judged by: groups of named traces, each (chain, draw)."""
    target, C, M = model.target, model.n_classes, len(model.Z)
    classes = np.arange(C) if classes is None else classes
    points = np.unique(np.linspace(0, M - 1, max(1, _LATENTS // C)).astype(int))
    f = latents(model, points)
    found = {
        "log_likelihood_total": {"log likelihood": model.stacked("log_likelihood")},
        "f": {
            f"f[{classes[c]}, {j}]": f[:, :, c, i] for c in range(C) for i, j in enumerate(points)
        },
    }
    if target.kernel_scale:
        scale = np.ones(model.Z.shape[1]) if scale is None else scale
        traces = {}
        for name, (values, by_class) in kernel_parameters(model, classes, scale).items():
            for at in np.ndindex(values.shape[2:]):
                which = [str(classes[at[0]]), *map(str, at[1:])] if by_class else [*map(str, at)]
                traces[f"{name}[{', '.join(which)}]" if which else name] = values[(..., *at)]
        found["kernel"] = traces
    if target.mean_variance:
        mean = model.stacked("mean")
        found["prior_mean"] = {f"prior mean[{classes[c]}]": mean[:, :, c] for c in range(C)}
    return found


def diagnose(model: SampledModel) -> Diagnostics:
    """R-hat and effective sample sizes of every quantity."""
    each = {}
    for group, traces in quantities(model).items():
        rows = np.array([_measure(trace) for trace in traces.values()])
        each[group] = dict(zip(_MEASURES, rows.T, strict=True))
    return Diagnostics(each, len(model.draws), len(model.draws[0].g))


def _measure(trace: Array) -> tuple[float, float, float]:
    """R-hat, bulk and tail effective sample size of one trace (chain, draw)."""
    n = trace.shape[1]
    if n < _MIN_DRAWS * (1 + (len(trace) == 1)):
        return np.nan, np.nan, np.nan
    if (trace == trace[0, 0]).all():
        return 1.0, float(trace.size), float(trace.size)
    arviz = _arviz()
    # A single chain is compared with itself: its first half with its second.
    several = trace if len(trace) > 1 else trace[:, : n // 2 * 2].reshape(2, -1)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        rhat = float(arviz.rhat(several))
        bulk = float(arviz.ess(trace, method="bulk"))
        tail = float(arviz.ess(trace, method="tail", prob=(0.05, 0.95)))
    # Chains that each stand still at their own value: no variance within, all of it between.
    still = (trace == trace[:, :1]).all()
    return (np.inf, 1.0 * len(trace), 1.0 * len(trace)) if still else (rhat, bulk, tail)


def worst_traces(
    model: SampledModel,
    found: Diagnostics,
    n: int,
    classes: NDArray[Any] | None = None,
    scale: Array | None = None,
) -> dict[str, Array]:
    """The log-likelihood and the n - 1 other quantities of largest R-hat, each (chain, draw)."""
    groups = quantities(model, classes, scale)
    first = groups.pop("log_likelihood_total")
    names = [name for traces in groups.values() for name in traces]
    rhat = np.concatenate([found.each[group]["rhat"] for group in groups])
    traces = {name: trace for group in groups.values() for name, trace in group.items()}
    order = np.argsort(-np.nan_to_num(rhat, nan=np.inf), kind="stable")[: n - 1]
    return {**first, **{names[i]: traces[names[i]] for i in order}}


# --- ArviZ's own container ------------------------------------------------------------------------


def to_arviz(
    model: SampledModel,
    classes: NDArray[Any],
    scale: Array,
    features: NDArray[Any],
    inputs: Array,
    rows: NDArray[np.int64],
    with_log_likelihood: bool,
) -> Any:
    """All draws as InferenceData, or as a DataTree from ArviZ 1 on.

    `inputs` (M, D) are those of the draws in the user's units, `rows` (n,) which observation of
    the target every row of the user is.
    """
    target = model.target
    posterior: dict[str, Array] = {"f": latents(model)}
    dims = {"f": ["class", "point"], "y": ["row"], "X": ["point", "feature"]}
    if target.kernel_scale:
        for name, (values, by_class) in kernel_parameters(model, classes, scale).items():
            posterior[name] = values
            dims[name] = ["class"] * by_class + ["feature"] * (values.ndim - 2 - by_class)
    if target.mean_variance:
        posterior["prior_mean"] = model.stacked("mean")
        dims["prior_mean"] = ["class"]
    groups: dict[str, dict[str, Any]] = {
        "posterior": posterior,
        "sample_stats": {"log_likelihood_total": model.stacked("log_likelihood")},
        "observed_data": {"y": classes[target.data.y[rows]]},
        "constant_data": {"X": inputs},
    }
    if with_log_likelihood:
        groups["log_likelihood"] = {"y": log_likelihood(model)[:, :, rows]}
    coords = {
        "class": classes,
        "point": np.arange(len(inputs)),
        "row": np.arange(len(rows)),
        "feature": features,
    }
    arviz = _arviz()
    if int(arviz.__version__.split(".")[0]):
        return arviz.from_dict(groups, coords=coords, dims=dims)
    return arviz.from_dict(**groups, coords=coords, dims=dims)


def log_likelihood(model: SampledModel) -> Array:
    """log p(y_i | draw) of every observation, (chain, draw, N).

    In the sparse model the latent value at a row is integrated out given those at the inducing
    points: draws stand for those, and rows are independent given them.
    """
    data, X = model.target.data, torch.tensor(model.target.X)
    y = torch.tensor(data.y)
    index = torch.arange(len(y)) if data.index is None else torch.tensor(data.index)
    n_chains, n = len(model.draws), len(model.draws[0].g)
    if model.target.Z is None:
        f = torch.from_numpy(latents(model)).mT  # (chain, draw, U, C)
        return torch.stack([model.likelihood.log_prob(y, one[:, index]) for one in f]).numpy()
    out = torch.empty(n_chains * n, len(y), dtype=torch.float64)
    for rows, draws, m, v in model.given_draws(X[index]):
        v = v.unsqueeze(1).expand_as(m)
        p = model.likelihood.integral(m.flatten(0, 1), v.flatten(0, 1)).view_as(m)
        label = y[rows].view(-1, 1, 1).expand(-1, m.shape[1], 1)
        out[draws, rows] = p.gather(2, label)[:, :, 0].log().T
    return out.numpy().reshape(n_chains, n, len(y))
