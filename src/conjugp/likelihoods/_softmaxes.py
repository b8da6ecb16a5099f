"""Likelihoods whose probabilities are a softmax, of the latents or of their log σ."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from conjugp.likelihoods._base import Likelihood
from conjugp.likelihoods._lambda_integral import lambda_entropy
from conjugp.likelihoods._many_classes import predictive


class SoftmaxLikelihood(Likelihood):
    """p(y = k | f) is e^f_k, or σ(f_k), over the sum of all; predictions are its integrals."""

    softmax: ClassVar[bool] = True  # of f, or else of log σ(f)

    def logits(self, f: Tensor) -> Tensor:
        """What the softmax is of, (..., B, C)."""
        return f if self.softmax else logsigmoid(f)

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """log p(y | f): y (B,), f (..., B, C) -> (..., B)."""
        log_p = torch.log_softmax(self.logits(f), -1)
        return log_p.gather(-1, y[:, None].expand(*f.shape[:-1], 1)).squeeze(-1)

    def prob(self, f: Tensor) -> Tensor:
        """p(· | f): (..., B, C) -> (..., B, C)."""
        return torch.softmax(self.logits(f), -1)

    def integral(self, m: Tensor, v: Tensor) -> Tensor:
        """E[p(· | f)] under N(m, v), one-dimensional: (B, C), float64 (P1, P8, L4)."""
        return predictive(m, v, self.softmax)

    def rough_integral(self, m: Tensor, v: Tensor) -> Tensor:
        """The same to four digits."""
        return predictive(m, v, self.softmax, rough=True)

    def expected_entropy(self, m: Tensor, v: Tensor) -> Tensor:
        """E[H[p(· | f)]] under N(m, v), one-dimensional: (B,), float64 (U3)."""
        return lambda_entropy(m, v, self.softmax)
