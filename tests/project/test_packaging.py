"""What is declared for installers and the forge's checks says the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_oldest_dependencies_are_the_lower_bounds():
    """Of all that the tests need: everything but the extras of the benchmarks."""
    declared, _, _ = PYPROJECT.partition("\nbench = [")
    declared = declared.partition("\ndependencies = [")[2]
    bounds = dict(re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)', declared))
    text = (ROOT / ".ci" / "oldest.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    expected = {f"{n}=={v if '.' in v else f'{v}.0'}.*" for n, v in bounds.items()}
    assert len(bounds) > 30 and lines == sorted(expected)


def test_the_workflow_runs_the_oldest_and_the_newest_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    runs = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    oldest = re.findall(r'requires-python = ">=([\d.]+)"', PYPROJECT)
    named = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert oldest == [named[0]] and {run["python"] for run in runs} == {named[0], named[-1]}
    assert {run["dependencies"] for run in runs if run["python"] == named[0]} == {
        "oldest",
        "newest",
    }
