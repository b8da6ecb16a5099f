"""The shape of the package: imports point one way, and what is exported is tested."""

from __future__ import annotations

import ast
import inspect
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import conjugp
from conjugp import kernels

SOURCE = Path(conjugp.__file__).parent

# Lowest first. A module may import from its own layer and those below it.
LAYERS = [
    {
        *("numerics", "parameters", "metrics", "rows", "options", "files", "face", "codec"),
        *("checkpoint", "posthoc", "launches", "group", "threads"),
    },
    {
        *("kernels", "likelihoods", "scaling", "plotting", "data", "deferred", "spool"),
        *("sources", "shards"),
    },
    {"features", "posterior", "covariance", "inducing"},
    {"inference", "prediction", "calibration", "conformal"},
    {
        *("training", "ep_training", "model", "decoupled", "joint", "search", "sampling"),
        *("sampled", "starts"),
    },
    {"plan", "checks", "progress", "chains", "diagnostics", "reading", "ranks"},
    {"fitting", "stream", "costs"},
    {"saving", "resuming"},
    {"classifier"},
    {"gibbs", "export", "dask"},
    {"cli", "__main__"},
]
LAYER = {module: i for i, layer in enumerate(LAYERS) for module in layer}

# Who may import what from outside; other outside packages are free to all.
ONLY_IN = {
    "sklearn": {
        *("classifier", "gibbs", "face", "checks", "ranks", "dask", "options", "saving", "cli"),
        *("posthoc", "calibration", "conformal"),
    },
    "matplotlib": {"plotting", "cli"},
    "typer": {"cli"},
    "rich": {"cli"},
    "onnx": {"export"},
}


def module_of(path: Path) -> str:
    """The module, or the sub-package as a whole, that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The full names of the modules that a file imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            if node.module == "conjugp":
                names |= {f"conjugp.{alias.name}" for alias in node.names}
            else:
                names.add(node.module or "")
    return names


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def inside(path: Path) -> set[str]:
    """The other modules of conjugp that a file imports."""
    parts = [name.split(".") for name in imports_of(path)]
    return {p[1] for p in parts if p[0] == "conjugp" and len(p) > 1} - {module_of(path)}


def test_every_module_has_a_layer():
    missing = {module_of(path) for path in FILES} - LAYER.keys()
    assert not missing, f"give {sorted(missing)} a place in LAYERS"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path):
    for other in inside(path):
        assert LAYER[other] <= LAYER[module_of(path)], f"{path.name} imports {other} from above"
    for package, allowed in ONLY_IN.items():
        if package in {name.split(".")[0] for name in imports_of(path)}:
            assert module_of(path) in allowed, f"{path.name} imports {package}"


def test_no_cycles():
    graph: dict[str, set[str]] = {}
    for path in FILES:
        graph.setdefault(module_of(path), set()).update(inside(path))
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert "likelihoods" not in graph["kernels"] and "kernels" not in graph["likelihoods"]


def test_every_exported_kernel_has_contract_tests(kernel_cases):
    exported = {
        name
        for name in kernels.__all__
        if inspect.isclass(cls := getattr(kernels, name)) and not inspect.isabstract(cls)
    }
    assert exported == kernel_cases.keys(), "add the new kernel to KERNEL_CASES in conftest.py"
    assert exported == {cls.__name__ for cls in kernels.KERNELS}, "add the new kernel to KERNELS"
    for name, cases in kernel_cases.items():
        assert cases and all(type(case).__name__ == name for case in cases)


def test_every_concrete_kernel_is_exported():
    for name, cls in inspect.getmembers(kernels, inspect.isclass):
        if issubclass(cls, kernels.Kernel) and not name.startswith("_"):
            assert name in kernels.__all__


def test_public_names_exist():
    for name in conjugp.__all__:
        assert hasattr(conjugp, name)
