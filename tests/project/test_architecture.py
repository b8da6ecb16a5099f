"""The shape of the package: rooms that import one way, and names that say what is public."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import conjugp
from conjugp import kernels

SOURCE = Path(conjugp.__file__).parent
ROOT = Path(__file__).parents[2]

# All that users may import. docs/api.md lists the same.
PUBLIC = {
    "conjugp": [
        *("FitOptions", "GPClassifier", "__version__", "kernels", "likelihoods", "load", "metrics"),
    ],
    "conjugp.calibration": ["TemperatureScaled"],
    "conjugp.conformal": ["ConformalClassifier"],
    "conjugp.dask": ["fit", "predict_proba"],
    "conjugp.export": ["to_onnx"],
    "conjugp.files": ["FileFormatError"],
    "conjugp.group": ["joined"],
    "conjugp.kernels": [
        *("Kernel", "Lengths", "Linear", "Matern12", "Matern32", "Matern52", "Normalised"),
        *("Positive", "Product", "RBF", "RationalQuadratic", "Stationary", "Sum"),
    ],
    "conjugp.likelihoods": [
        *("Dirichlet", "Expectation", "Heaviside", "LIKELIHOODS", "Likelihood"),
        *("LogisticSoftmax", "RobustMax", "Site", "Softmax", "get_likelihood"),
    ],
    "conjugp.metrics": [
        *("Band", "BrierDecomposition", "ReliabilityCurve", "bootstrap_band", "brier"),
        *("brier_decomposition", "chance_band", "class_calibration_errors"),
        *("class_reliability_curves", "classwise_calibration_error"),
        *("expected_calibration_error", "maximum_calibration_error", "nll", "reliability_curve"),
        "sharpness",
    ],
    "conjugp.plotting": [
        *("ClassCalibrationDisplay", "InducingDisplay", "PredictionMapDisplay"),
        *("RelevanceDisplay", "ReliabilityDisplay", "TrainingCurveDisplay", "plot_ranks"),
        *("plot_trace", "reliability_diagram"),
    ],
    "conjugp.saving": ["load", "read_info"],
}

# Who may import what from outside; other outside packages are free to all.
ONLY_IN = {
    "sklearn": {"_estimators", "_fit", "calibration", "conformal", "dask", "cli", "export"},
    "matplotlib": {"plotting", "cli"},
    "typer": {"cli"},
    "rich": {"cli"},
    "onnx": {"export"},
}

FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
ROOMS = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file())


def room_of(path: Path) -> str:
    """The folder, or the module beside the folders, that a file belongs to."""
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


def inside(path: Path) -> set[str]:
    """The other rooms that a file imports from."""
    parts = [name.split(".") for name in imports_of(path)]
    return {p[1] for p in parts if p[0] == "conjugp" and len(p) > 1} - {room_of(path)}


def test_imports_between_rooms_point_one_way():
    graph: dict[str, set[str]] = {}
    for path in FILES:
        graph.setdefault(room_of(path), set()).update(inside(path))
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the rooms
    assert "likelihoods" not in graph["kernels"] and "kernels" not in graph["likelihoods"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_outside_packages_stay_in_their_rooms(path):
    outside = {name.split(".")[0] for name in imports_of(path)}
    for package, rooms in ONLY_IN.items():
        assert package not in outside or room_of(path) in rooms, f"{path.name} imports {package}"


def test_what_is_not_public_is_private_by_its_name():
    """A module whose whole name has no underscore in front is one that users may import."""
    names = {module.name for module in pkgutil.walk_packages([str(SOURCE)], "conjugp.")}
    open_ = {name for name in names if not any(part.startswith("_") for part in name.split("."))}
    assert open_ == PUBLIC.keys() - {"conjugp"} | {"conjugp.cli", "conjugp.cli.models"}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module])
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in PUBLIC[module]:
        assert hasattr(found, name)
        assert name.startswith("__") or re.search(rf"\b{name}\b", page), f"api.md: {name}"


def test_every_room_has_tests():
    tests = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert {room.lstrip("_") for room in ROOMS} <= tests


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


CODE, TEST = re.compile(r"`([\w.]+)`"), re.compile(r"`(?:(test_\w+\.py))?(?:::)?(test_\w+)?`")


def test_the_table_of_equations_names_what_there_is():
    """Section 7 of docs/math.md: every name in its code and test columns exists."""
    page = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.partition("## 7. Where it is")[2].splitlines()]
    files = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/test_*.py")}
    tests = {name for text in files.values() for name in re.findall(r"def (test_\w+)", text)}
    rows = [row for row in rows if len(row) == 3 and row[0] != "| tag"]
    assert len(rows) > 40
    for tag, code, test in rows:
        last: list[str] = []
        for name in CODE.findall(code):
            parts = name.lstrip(".").split(".")
            # A bare name is one of the module or class before it.
            options = [parts, *([*last[:i], *parts] for i in range(len(last), 0, -1))]
            found = next((p for p in options if _exists(p)), None)
            assert found is not None, f"{tag}: {name}"
            last = found[:-1]
        for file, name in TEST.findall(test):
            assert not file or file in files, f"{tag}: {file}"
            assert not name or (name in files[file] if file else name in tests), f"{tag}: {name}"


def _exists(parts: list[str]) -> bool:
    """Whether conjugp.<parts> is a module or something in one."""
    for n in range(len(parts), -1, -1):
        try:
            found = importlib.import_module(".".join(["conjugp", *parts[:n]]))
        except ModuleNotFoundError:
            continue
        for name in parts[n:]:
            if name in getattr(found, "__annotations__", {}) and not hasattr(found, name):
                return True
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False
