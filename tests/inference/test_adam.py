"""Adam against torch's own, and as it is taken apart for graphs."""

from __future__ import annotations

import pytest
import torch

from conjugp._inference.adam import Adam


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("in_parts", [False, True])
def test_adam_is_adam(dtype, in_parts):
    start = [normal(0, 30, 7, dtype=dtype), normal(1, 3, dtype=dtype)]
    mine = Adam([x.clone() for x in start], 0.8, 0.99)
    theirs = [x.clone().requires_grad_() for x in start]
    groups = [{"params": [x], "lr": rate} for x, rate in zip(theirs, (0.1, 0.2), strict=True)]
    optimiser = torch.optim.Adam(groups, betas=(0.8, 0.99))
    for i in range(20):
        # A gradient may be a view that is not contiguous.
        gradients = [normal(2 + i, 7, 30, dtype=dtype).T, normal(50 + i, 3, dtype=dtype)]
        for x, g in zip(theirs, gradients, strict=True):
            x.grad = g
        optimiser.step()
        if in_parts:
            lengths = [mine.corrected(rate, 1) for rate in (0.1, 0.2)]
            mine.count += 1
            mine.move(gradients, [tuple(map(torch.tensor, pair)) for pair in lengths])
        else:
            mine.descend(gradients, [0.1, 0.2])
    tol = 1e-13 if dtype == torch.float64 and not in_parts else 1e-5
    for a, b in zip(mine.tensors, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=tol, atol=tol)


def test_without_a_gradient_a_tensor_stays():
    adam = Adam([torch.ones(2), torch.ones(3)])
    adam.descend([None, torch.ones(3)], [0.1, 0.1])
    assert bool((adam.tensors[0] == 1).all()) and bool((adam.tensors[1] < 1).all())
