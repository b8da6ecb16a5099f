"""Experiments and benchmarks, imported as they are when they run as scripts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
FOLDERS = [str(ROOT / "bench"), str(ROOT / "experiments")]


@contextmanager
def importing() -> Iterator[Callable[[str], ModuleType]]:
    """What imports an experiment by name; it and all that it imports are forgotten in the end."""
    before, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(ROOT / "experiments"))
    yield importlib.import_module
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and str(Path(file).parent) in FOLDERS:
            del sys.modules[name]
