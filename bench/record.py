"""What the benchmarks share: where and with what they ran, and how results are kept."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("conjugp", "torch", "scikit-learn", "numpy", "scipy", "gpytorch", "linear_operator")
PACKAGES += ("polyagamma", "numba", "arviz", "onnxruntime")


def context() -> dict[str, Any]:
    """Date, machine and versions: the part that every result has."""
    return {"date": date.today().isoformat(), "machine": machine(), "versions": versions()}


def machine() -> dict[str, Any]:
    """The processor, and how much of it this process may use."""
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu_model(), "cores": usable, "threads": torch.get_num_threads()}


def cpu_model() -> str:
    """The name of the processor as it gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python and those packages that are installed."""
    import conjugp

    found = {"python": platform.python_version(), "conjugp": conjugp.__version__}
    for name in PACKAGES:
        try:
            found.setdefault(name, version(name))
        except PackageNotFoundError:
            continue
    return found


def keep(path: Path, name: str, result: dict[str, Any]) -> None:
    """Put the result of one set into a file, beside those of the others."""
    kept = json.loads(path.read_text()) if path.is_file() else {"sets": {}}
    kept["sets"][name] = result
    kept["sets"] = dict(sorted(kept["sets"].items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(kept), indent=1) + "\n")


def check_sets(parser: argparse.ArgumentParser, given: list[str], known: Iterable[str]) -> None:
    """End with an error if a set is not one of those that are known."""
    unknown = [name for name in given if name not in known]
    if unknown:
        parser.error(f"unknown set {unknown[0]!r}; there are {', '.join(known)}")


def add_output(parser: argparse.ArgumentParser, file: str) -> None:
    """The option that sends results elsewhere, for a trial run."""
    parser.add_argument(
        "--output", type=Path, default=RESULTS / file, help="JSON file (default: %(default)s)"
    )


def scores(y: NDArray, proba: NDArray, classes: NDArray) -> dict[str, float]:
    """Error, NLL and calibration error (15 bins) of predicted probabilities."""
    from conjugp import metrics

    return {
        "error": float(np.mean(classes[proba.argmax(axis=1)] != y)),
        "nll": metrics.nll(y, proba, labels=classes),
        "ece": metrics.expected_calibration_error(y, proba, n_bins=15, labels=classes),
    }


def put_table(page: Path, table: str) -> None:
    """Replace the table of a page that has the same first line."""
    text = page.read_text(encoding="utf-8")
    head = re.escape(table.partition("\n")[0])
    new, n = re.subn(rf"^{head}\n(\|.*\n)*", lambda _: table + "\n", text, flags=re.M)
    if n != 1:
        raise ValueError(f"{page.name} must have one table with the first line of this: {table}")
    page.write_text(new, encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Five significant digits, null where not finite: what a benchmark can say."""
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
