"""GPyTorch's softmax SVGP as its documentation builds it: the peer that conjugp is timed against.

One whitened variational Gaussian per class with a Cholesky factor of its covariance, an ARD RBF
kernel and inducing points shared by the classes and learned, a learned mean per class, Adam.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gpytorch
import torch
from data import Split, scaled
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import SoftmaxLikelihood
from gpytorch.means import ConstantMean
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    VariationalStrategy,
)
from numpy.typing import NDArray
from record import scores
from torch import Tensor

_SAMPLES = 128  # draws behind a predicted probability, in pairs of opposite sign


class SVGP(gpytorch.models.ApproximateGP):
    """C latent functions on inducing points Z (M, D)."""

    def __init__(self, Z: Tensor, n_classes: int, lengthscale: float, shared: bool) -> None:
        batch = torch.Size([n_classes])
        inner = VariationalStrategy(
            self,
            Z if shared else Z.repeat(n_classes, 1, 1),
            CholeskyVariationalDistribution(len(Z), batch_shape=batch),
            learn_inducing_locations=True,
        )
        super().__init__(IndependentMultitaskVariationalStrategy(inner, num_tasks=n_classes))
        kernel = {"batch_shape": torch.Size() if shared else batch}
        self.mean_module = ConstantMean(batch_shape=batch)
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=Z.shape[1], **kernel), **kernel)
        self.covar_module.base_kernel.lengthscale = lengthscale
        self.covar_module.outputscale = 1.0

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(
    split: Split,
    Z: NDArray,
    *,
    inputs: str,
    batch_size: int,
    learning_rate: float,
    shared: bool,
    budget: float,
    goal: float = -math.inf,
    n_looks: int = 30,
) -> dict[str, Any]:
    """Train for `budget` seconds or down to a test NLL of `goal`, looking at the test set.

    The clock runs during training steps only: neither the set-up nor the looks count.
    """
    began = time.perf_counter()
    torch.manual_seed(0)
    X, X_test, Z_ = (torch.as_tensor(a) for a in scaled(split, Z, inputs))
    y = torch.as_tensor(split.y_train).long()
    C = int(y.max()) + 1
    distances = torch.pdist(X[torch.randperm(len(X))[:1000]])
    model = SVGP(Z_, C, float(distances[distances > 0].median()), shared)
    likelihood = SoftmaxLikelihood(num_classes=C, mixing_weights=False)
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    adam = torch.optim.Adam(model.parameters(), lr=learning_rate)
    result: dict[str, Any] = {"setup_seconds": time.perf_counter() - began, "curve": []}

    clock, step, look = 0.0, 0, 1
    try:
        while True:
            order = torch.randperm(len(y))
            for rows in order.split(batch_size):
                started = time.perf_counter()
                adam.zero_grad()
                loss = -elbo(model(X[rows]), y[rows])
                loss.backward()
                adam.step()
                clock += time.perf_counter() - started
                step += 1
                if clock < budget * look / n_looks:
                    continue
                look = math.floor(n_looks * clock / budget) + 1
                proba = predict_proba(model, X_test)
                found = scores(split.y_test, proba.numpy(), torch.arange(C).numpy())
                result["curve"].append({"seconds": clock, "steps": step, **found})
                if clock >= budget or found["nll"] <= goal:
                    return result
    except (RuntimeError, ValueError) as error:
        # A step size too long for the model ends its run, not the benchmark.
        result["failure"] = f"{type(error).__name__}: {error}"[:200]
        return result


def predict_proba(model: SVGP, X: Tensor) -> Tensor:
    """Probabilities (n, C), the softmax averaged over draws from the latent marginals."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    parts = []
    with torch.no_grad():
        for x in X.split(2000):
            latent = model(x)
            mean, sd = latent.mean, latent.variance.sqrt()
            total = torch.zeros_like(mean, dtype=torch.float64)
            for _ in range(_SAMPLES // 2):
                noise = sd * torch.randn(mean.shape, generator=generator)
                total += (mean + noise).softmax(-1) + (mean - noise).softmax(-1)
            parts.append(total / total.sum(-1, keepdim=True))
    model.train()
    return torch.cat(parts)
