"""GPyTorch's softmax SVGP as its documentation builds it: a peer that conjugp is timed against.

One whitened variational Gaussian per class, an ARD RBF kernel and inducing points shared by the
classes, a learned mean per class. Adam moves all of it, or natural gradients (NGD) the Gaussians
and Adam the rest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import gpytorch
import torch
from clock import LOOKS, SAVED, Clock, Warmup
from data import Split, Start, scaled
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import SoftmaxLikelihood
from gpytorch.means import ConstantMean
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    VariationalStrategy,
)
from linear_operator.utils.errors import NotPSDError
from record import scores
from torch import Tensor

_SAMPLES = 128  # draws behind a predicted probability, in pairs of opposite sign


# What is optimised -> how a Gaussian is parametrised.
GAUSSIANS = {
    "adam": CholeskyVariationalDistribution,
    "ngd": NaturalVariationalDistribution,
    "ngd, triangular": TrilNaturalVariationalDistribution,
}


class SVGP(gpytorch.models.ApproximateGP):
    """C latent functions on inducing points Z (M, D)."""

    def __init__(
        self,
        Z: Tensor,
        n_classes: int,
        lengthscale: float | Tensor,
        *,
        variance: float = 1.0,
        optimiser: str = "adam",
        learn_inducing: bool = True,
    ) -> None:
        batch = torch.Size([n_classes])
        inner = VariationalStrategy(
            self,
            Z,
            GAUSSIANS[optimiser](len(Z), batch_shape=batch),
            learn_inducing_locations=learn_inducing,
        )
        super().__init__(IndependentMultitaskVariationalStrategy(inner, num_tasks=n_classes))
        self.mean_module = ConstantMean(batch_shape=batch)
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=Z.shape[1]))
        self.covar_module.base_kernel.lengthscale = lengthscale
        self.covar_module.outputscale = variance

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(
    split: Split,
    start: Start,
    *,
    optimiser: str,
    inputs: str,
    kernel: str,
    batch_size: int,
    learning_rate: float,
    learn_inducing: bool,
    budget: float,
    first_step: float = 0.0,
    natural_step: float = 0.0,
    dtype: str = "float32",
    looks: Sequence[float] = LOOKS,
    device: str = "cpu",
) -> dict[str, Any]:
    """Train for `budget` seconds of training steps, looking at the test set now and then.

    `kernel` is where that starts, as in `scaled`. The size of
    natural-gradient steps grows from `first_step` to `natural_step`. After a step that fails the
    parameters of 20 to 40 steps before are put back, and steps become a tenth as long.
    """
    began = time.perf_counter()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    *arrays, variance = scaled(split, start, inputs, kernel)
    X, X_test, Z, lengths = (torch.as_tensor(a, dtype=torch.get_default_dtype()) for a in arrays)
    y = torch.as_tensor(split.y_train).long()
    C = int(y.max()) + 1
    model = SVGP(
        Z,
        C,
        lengths,
        variance=variance,
        optimiser=optimiser,
        learn_inducing=learn_inducing,
    ).to(device)
    X, X_test, y = X.to(device), X_test.to(device), y.to(device)
    likelihood = SoftmaxLikelihood(num_classes=C, mixing_weights=False)
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    if optimiser == "adam":
        natural, adam = None, torch.optim.Adam(model.parameters(), lr=learning_rate)
    else:
        natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(y), lr=0.1)
        adam = torch.optim.Adam(model.hyperparameters(), lr=learning_rate)
    setup = time.perf_counter() - began
    result: dict[str, Any] = {"setup_seconds": setup, "curve": [], "restarts": []}

    def step(rows: Tensor, size: float) -> None:
        model.zero_grad()
        loss = -elbo(model(X[rows]), y[rows])
        loss.backward()
        if not loss.isfinite():
            raise ValueError("the loss is not finite")
        if natural is not None:
            natural.param_groups[0]["lr"] = size
            natural.step()
        adam.step()

    clock, warmup = Clock(budget, looks), Warmup(first_step, natural_step)
    batches: list[Tensor] = []
    copies: list[Any] = []
    while not clock.over:
        if warmup.t % SAVED == 0 and natural is not None:
            copies = [*copies[-1:], deepcopy((model.state_dict(), adam.state_dict()))]
        if not batches:
            batches = list(torch.randperm(len(y)).to(device).split(batch_size))
        try:
            with clock:
                step(batches.pop(), warmup.size)
            warmup.t += 1
            if not clock.look():
                continue
            proba = predict_proba(model, X_test)
            found = scores(split.y_test, proba.cpu().numpy(), torch.arange(C).numpy())
            result["curve"].append({"seconds": clock.seconds, "steps": warmup.t, **found})
        except (RuntimeError, ValueError, NotPSDError) as error:
            said = f"{type(error).__name__}: {error}"[:200]
            again = {"seconds": clock.seconds, "steps": warmup.t, "natural_step": warmup.size}
            result["restarts"].append(again)
            if not copies or not warmup.failed():
                result["failure"] = said
                break
            copies = copies[:1]  # the later one may be on the way to the failure already
            model.load_state_dict(copies[0][0])
            adam.load_state_dict(deepcopy(copies[0][1]))
            model.train()
            warmup.t += 1
    return result


def predict_proba(model: SVGP, X: Tensor) -> Tensor:
    """Probabilities (n, C), the softmax averaged over draws from the latent marginals."""
    model.eval()
    generator = torch.Generator(X.device).manual_seed(0)
    parts = []
    with torch.no_grad():
        for x in X.split(2000):
            latent = model(x)
            mean, sd = latent.mean, latent.variance.sqrt()
            total = torch.zeros_like(mean, dtype=torch.float64)
            for _ in range(_SAMPLES // 2):
                noise = sd * torch.randn(
                    mean.shape, generator=generator, dtype=sd.dtype, device=sd.device
                )
                total += (mean + noise).softmax(-1) + (mean - noise).softmax(-1)
            parts.append(total / total.sum(-1, keepdim=True))
    model.train()
    return torch.cat(parts)
