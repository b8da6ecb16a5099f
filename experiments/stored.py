"""How experiments keep their results: JSON that shows in a diff what has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def save(path: Path, result: dict[str, Any], digits: int = 6) -> None:
    """JSON with so many digits, a line for every entry of the first two levels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for key, value in _plain(result, digits).items():
        text = _text(value)
        if isinstance(value, dict):
            inner = [f"  {_text(k)}: {_text(v)}" for k, v in value.items()]
            text = "{\n" + ",\n".join(inner) + "\n }"
        lines.append(f" {_text(key)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v, digits) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value.item() if isinstance(value, np.generic) else value
