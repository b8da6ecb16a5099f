"""Small classification problems and the slow, plain formulas that the core is held against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from scipy.special import digamma
from torch import Tensor

from conjugp._gp.features import basis, features
from conjugp._gp.posterior import Posterior, State, initial_state, kl, moments
from conjugp._inference import svi
from conjugp._inference.full_batch import Sweep
from conjugp._inference.moving import Moving
from conjugp._inference.settings import Result, Settings
from conjugp._inference.steps import Batch, MinibatchStep, Sizes
from conjugp._inference.train import train
from conjugp._rows.dataset import Data
from conjugp.kernels import Kernel
from conjugp.likelihoods import LogisticSoftmax

BOUNDS = LogisticSoftmax.bounds
LIKELIHOOD = LogisticSoftmax()


def blobs(n: int, n_classes: int, *, gap: float = 1.5, n_features: int = 2, seed: int = 0) -> Data:
    """One Gaussian cloud for each class, in float64; the larger `gap`, the farther apart."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % n_classes)
    X = rng.standard_normal((n, n_features)) + gap * rng.standard_normal((n_classes, n_features))[y]
    return Data(torch.tensor(X), torch.tensor(y), torch.ones(n, dtype=torch.float64), n_classes)


def random_labels(n: int, n_classes: int, *, seed: int = 0) -> Data:
    """Labels that have nothing to do with the inputs."""
    data = blobs(n, n_classes, gap=0.0, seed=seed)
    return data._replace(y=data.y[torch.randperm(n, generator=generator(seed))])


@st.composite
def gaussians(
    draw, log_v: tuple[float, float], most: int = 6, size: float = 1e4
) -> tuple[list[float], np.ndarray]:
    """Means of a size and variances, powers of ten between two, of up to so many latent values."""
    n = draw(st.integers(2, most))
    m = draw(st.lists(st.floats(-size, size), min_size=n, max_size=n))
    return m, 10.0 ** np.array(draw(st.lists(st.floats(*log_v), min_size=n, max_size=n)))


@st.composite
def odd_data(draw):
    """Few rows, maybe equal ones, any labels, any weights, any scale of inputs."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    n, d, C = draw(st.integers(2, 14)), draw(st.integers(1, 3)), draw(st.integers(2, 4))
    X = 10.0 ** draw(st.integers(-3, 3)) * rng.standard_normal((n, d))
    if draw(st.booleans()):
        X[n // 2 :] = X[: n - n // 2]
    y = rng.integers(0, C, n)
    weight = 10.0 ** rng.uniform(-2, 2, n) if draw(st.booleans()) else np.ones(n)
    return Data(torch.tensor(X), torch.tensor(y), torch.tensor(weight), C)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_posterior(n_classes: int, n_inducing: int, seed: int = 0) -> Posterior:
    """Some h, and some P ⪰ I."""
    g = generator(seed)
    B = torch.randn(n_classes, n_inducing, n_inducing, dtype=torch.float64, generator=g)
    h = torch.randn(n_classes, n_inducing, dtype=torch.float64, generator=g)
    return Posterior(h, torch.eye(n_inducing, dtype=torch.float64) + 0.5 * B @ B.mT)


def fixed(bound: str, **changes: Any) -> Settings:
    """Settings of a fit of q alone that does not stop before `max_epochs` while it can rise."""
    quiet = {"learn_kernel": False, "learn_mean": False, "tol": -1.0}
    return Settings(LIKELIHOOD, bound, **{**quiet, **changes})


def start(
    data: Data,
    kernels: Kernel | list[Kernel],
    Z: Tensor | None = None,
    mean: Tensor | None = None,
) -> State:
    """The prior, with every row an inducing point unless Z is given."""
    kernels = [kernels] if isinstance(kernels, Kernel) else kernels
    mean = data.X.new_zeros(data.n_classes) if mean is None else mean
    return initial_state(kernels, data.X if Z is None else Z, mean.clone())


def fitted(
    data: Data,
    kernels: Kernel | list[Kernel],
    settings: Settings,
    Z: Tensor | None = None,
    mean: Tensor | None = None,
) -> Result:
    """A fit of `data` from the prior."""
    return train(start(data, kernels, Z, mean), data, settings, generator())


def sweep_of(state: State, data: Data, settings: Settings) -> Sweep:
    """Passes over all rows."""
    return Sweep(Moving(state, data.total, settings), data)


def take(step: MinibatchStep, part: Data, scale: float, rho: float, rate: float) -> float:
    """One step of these sizes; the ELBO before."""
    return step.take(Batch(slice(0, part.n), part, scale), Sizes(1.0, rho, 0.0, rate))


@torch.no_grad()
def elbo(state: State, data: Data, bound: str) -> float:
    """The ELBO of a state from its marginals."""
    f = features(basis(state.kernels, state.Z), data.X)
    q = moments(state.q)
    mean = state.mean.detach()
    s, _ = svi.evaluate(q, LIKELIHOOD, bound, f, data.y, mean, data.weight, False)
    return float(s.bound - kl(q))


def numpy_site(
    bound: str, Y: np.ndarray, m: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """γ and θ of the two augmented bounds at one-hot labels Y (N, C), as the text has them."""
    c = np.sqrt(m**2 + v)
    s = np.exp(-m / 2) / (2 * np.cosh(c / 2))
    n_classes = Y.shape[1]
    if bound == "collapsed":
        gamma = s / (n_classes - s.sum(1, keepdims=True))
    else:
        gamma = s
        for _ in range(2000):  # the fixed-point iteration, until it has long settled
            gamma = np.exp(digamma(1 + gamma.sum(1, keepdims=True))) * s / n_classes
    return gamma, (Y + gamma) * np.tanh(c / 2) / (2 * c)


def labelled(counts: list[int], seed: int = 0) -> Data:
    """Rows numbered from 0, shuffled labels, `counts` of every class."""
    labels = np.repeat(np.arange(len(counts)), counts)
    labels = np.random.default_rng(seed).permutation(labels)
    rows = torch.arange(len(labels), dtype=torch.float64).unsqueeze(1)
    weight = torch.linspace(1, 2, len(labels), dtype=torch.float64)
    return Data(rows, torch.tensor(labels), weight, len(counts))
