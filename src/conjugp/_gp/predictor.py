"""What predictions are asked of: probabilities, latent functions, and what calibrates them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conjugp._gp.prediction import apply_temperature
from conjugp._gp.temperature import PLAIN, Calibration, fit_temperature
from conjugp._rows.dataset import Data
from conjugp.kernels import Kernel

if TYPE_CHECKING:
    from typing_extensions import Self


class Integration(NamedTuple):
    """How the latent functions are integrated out, where there is a choice (P5)."""

    method: str = "integral"
    n_samples: int = 1024
    seed: int = 0


EXACT = Integration()


class Predictive(NamedTuple):
    """Some rows under the posterior: their probabilities and E[H[p(y | f)]]."""

    proba: NDArray[np.float64]  # (n, C)
    expected_entropy: NDArray[np.float64]  # (n,)


class Predictor(ABC):
    """A posterior that answers for rows in working units, and its calibration."""

    Z: Tensor  # (M, D), where it stands; rows come in its dtype, on its device
    calibration: Calibration
    shares: Tensor | None  # of the classes (C,), for temperatures above 1

    @abstractmethod
    def prior(self) -> tuple[tuple[Kernel, ...], Tensor]:
        """One kernel or C, and the means (C,); where they were sampled, at the draws' mean."""

    @abstractmethod
    def latent(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the latent functions at X (n, D), both (n, C)."""

    @abstractmethod
    def sample(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of the latent functions at X (n, D): (n_samples, n, C)."""

    @abstractmethod
    def predictive(self, X: Tensor) -> Predictive:
        """The posterior predictive at X, not calibrated (P1, U2)."""

    @abstractmethod
    def untempered(self, X: Tensor, how: Integration = EXACT) -> Tensor:
        """Probabilities at X before the temperature, with the variance scale: (n, C), float64."""

    def proba(self, X: Tensor, how: Integration = EXACT) -> NDArray[np.float64]:
        """Calibrated probabilities at X: (n, C), rows sum to 1 (P6)."""
        temperature = self.calibration.temperature
        p = apply_temperature(self.untempered(X, how), temperature, self.shares).cpu().numpy()
        return p / p.sum(axis=1, keepdims=True)

    def is_finite(self) -> bool:
        """Whether all of its numbers are."""
        return True

    def elbo(self, data: Data) -> float:
        """The evidence lower bound with these rows as the data, where there is one (Q2)."""
        raise NotImplementedError(f"{type(self).__name__} has no evidence lower bound")

    def with_calibration(self, calibration: Calibration, shares: Tensor | None) -> Self:
        """The same posterior with that calibration."""
        new = copy(self)
        for name, value in (("calibration", calibration), ("shares", shares)):
            object.__setattr__(new, name, value)  # in frozen dataclasses too
        return new

    def calibrated(self, data: Data) -> Self:
        """The same posterior with the calibration that labelled rows ask for."""
        p = self.with_calibration(PLAIN, None).untempered(data.X)
        temperature, loss = fit_temperature(p, data.y, data.weight, self.shares)
        return self.with_calibration(Calibration(temperature, loss=loss), self.shares)


def entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of every row of probabilities, in nats: (n, C) -> (n,)."""
    return np.maximum(-(p * np.log(np.maximum(p, np.finfo(np.float64).tiny))).sum(axis=1), 0.0)
