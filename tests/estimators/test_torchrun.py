"""Under torchrun: the script of the documentation, the command line, and a rank that is killed."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from conjugp import load

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


def test_the_script_of_the_documentation(tmp_path):
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "train.py").write_text(script)
    done = torchrun("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    clf = load(tmp_path / "model.conjugp")
    assert clf.predict([[0, 0], [3, 0], [0, 3]]).tolist() == [0, 1, 2]


def test_the_command_line(tmp_path):
    """Row groups are shared, categories are those of all, and rank 0 writes and speaks."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 240)
    X = rng.normal(size=(240, 2)) + 3 * np.array([[0, 0], [1, 0], [0, 1]])[y]
    place = np.where(np.arange(240) < 120, "north", "south")
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "place": place, "kind": y})
    table.to_parquet(tmp_path / "rows.parquet", row_group_size=30)
    fit = ("-m", "conjugp", "fit", "rows.parquet", "--target", "kind", "-o", "m.conjugp")
    settings = ("--categorical", "onehot", "--max-epochs", "10", "--json")
    done = torchrun(*fit, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    told = json.loads(line)
    assert told["n_train"] + told["n_test"] == 240 and told["n_test"] == 48
    assert told["features"] == ["a", "b", "place=north", "place=south"]
    assert told["scores"]["error"] < 0.2
    assert list(load(tmp_path / "m.conjugp").feature_names_in_) == ["a", "b", "place"]


@pytest.mark.slow
def test_a_killed_rank(monkeypatch, tmp_path):
    """torchrun starts it again, and both ranks end with the model of one undisturbed process."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import soak_ranks

    found = soak_ranks.run("minibatch", tmp_path, 1.0, random.Random(0))
    assert found["killed"] and found["restarts"] == 1
    first, second = found["models"]
    assert first == second
    # The fit is in float32: probabilities, 200 rows of 4 classes, are those of one process.
    expected = np.frombuffer(soak_ranks.fitted("minibatch", 0, 1, None))[:800]
    np.testing.assert_allclose(np.frombuffer(first)[:800], expected, atol=1e-4)
