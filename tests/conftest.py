"""What the tests share: kernels that stand for every exported class, and small random data."""

from __future__ import annotations

import os
import shutil

# scikit-learn skips its array-API check unless this is set before SciPy is imported.
os.environ.setdefault("SCIPY_ARRAY_API", "1")
# Tests run side by side, one process per core: threads within them would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

import commands
from conjugp import kernels as k
from conjugp.kernels._columns import Columns

# Timings vary between machines, and the same examples every time keep a failure reproducible.
settings.register_profile("conjugp", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("conjugp")

ARD = (0.7, 1.3, 2.0)

# Every exported kernel class, on inputs with three features. The contract tests run over all.
KERNEL_CASES: dict[str, list[k.Kernel]] = {
    "RBF": [k.RBF(1.2, 1.7), k.RBF(ARD, 0.5)],
    "Matern12": [k.Matern12(1.2, 1.7), k.Matern12(ARD, 0.5)],
    "Matern32": [k.Matern32(1.2, 1.7), k.Matern32(ARD, 0.5)],
    "Matern52": [k.Matern52(1.2, 1.7), k.Matern52(ARD, 0.5)],
    "RationalQuadratic": [
        k.RationalQuadratic(1.2, 1.7, 0.6),
        k.RationalQuadratic(ARD, 0.5, alpha=3.0),
    ],
    "Linear": [k.Linear(1.2, 1.7), k.Linear(ARD, 0.5)],
    "Normalised": [
        k.Normalised(k.RBF(0.8, 1.7)),
        k.Normalised(k.Linear(1.2, 0.3) + k.Matern52(0.7, 1.0), units=ARD),
    ],
    "Sum": [k.RBF(ARD, 0.5) + k.Linear(1.2, 0.3) + k.Matern32(0.9, 1.1)],
    "Product": [
        k.RBF(ARD, 0.5) * k.Linear(1.2, 0.3),
        (k.RBF(1.0, 0.4) + k.Linear(ARD, 1.0)) * k.Matern52(2.0, 1.0),
    ],
}


@pytest.fixture
def kernel_cases() -> dict[str, list[k.Kernel]]:
    return KERNEL_CASES


# What is not exported keeps the same contract.
PRIVATE_CASES: list[k.Kernel] = [
    Columns(k.RBF((2.0, 0.7), 1.7), (1, 0)),
    Columns(k.RBF((0.7, 2.0), 0.5), (0, 2)) + Columns(k.Linear(1.3, 0.3), (1,)),
    (Columns(k.RBF(1.0, 0.4), (2, 0)) + k.Linear(ARD, 1.0)) * Columns(k.Matern52(2.0, 1.0), (1,)),
]


@pytest.fixture(
    params=[*(c for cases in KERNEL_CASES.values() for c in cases), *PRIVATE_CASES], ids=repr
)
def kernel(request: pytest.FixtureRequest) -> k.Kernel:
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def X() -> torch.Tensor:
    return torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def Z() -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wine.csv and wine.conjugp, fitted by the command line; look, do not touch."""
    folder = tmp_path_factory.mktemp("wine")
    commands.write_wine(folder)
    result = commands.conjugp(folder, "fit", "wine.csv", "--target", "label", "-o", "wine.conjugp")
    assert result.code == 0, result.err
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that lack their browser or compiler; where CI is set the browser's fail."""
    missing = [] if shutil.which("c++") else ["compiler"]
    if not (commands.find_browser() or os.environ.get("CI")):
        missing.append("browser")
    without = [item for item in items if any(map(item.get_closest_marker, missing))]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
