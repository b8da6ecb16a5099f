"""Two processes with their own rows make the model of one process with all of them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What both ranks found, by scenario; rank 1 does not live to tell of the last one."""
    folder = tmp_path_factory.mktemp("ranks")
    here = Path(__file__).parents[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here)}
    env["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    command = [sys.executable, str(here / "ranks.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder)], env=env, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [p.communicate(timeout=300)[1] for p in processes]
    # Where the connection breaks under gloo's own thread, that ends the process instead, with its
    # message or as a thread that no one waits for.
    first, second = (p.returncode for p in processes)
    ended = "gloo" in errors[0] or "terminate called" in errors[0]
    assert (first == 0 or (first == -6 and ended)) and second == 9, "\n".join(errors)
    both: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.[01]")):
        both.setdefault(path.stem, []).append(pickle.loads(path.read_bytes()))
    if first:  # before or after it could tell of the loss
        both.setdefault("lost", [{"error": None}])
    return both


@pytest.mark.parametrize("work", ranks.SAME, ids=lambda work: work.__name__)
def test_the_model_of_one_process(found, work, tmp_path):
    """Parameters within 1e-5 in float64; in float32 predictions within 1e-4."""
    alone = work(0, 1, tmp_path)
    first, second = found[work.__name__]
    np.testing.assert_array_equal(first["classes"], alone["classes"])
    np.testing.assert_allclose(first["proba"], alone["proba"], atol=1e-4)
    if work is not ranks.single_precision:
        for name in ("theta", "Z", "mean", "proba", "elbo", "temperature"):
            scale = np.abs(alone[name]).max()
            np.testing.assert_allclose(first[name], alone[name], atol=1e-5 * scale, err_msg=name)
    for name in alone:
        np.testing.assert_array_equal(first[name], second[name])


def test_local_steps(found, tmp_path):
    """Both ranks have the same model, and it is not far from that of summing at every step."""
    first, second = found["local_steps"]
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    joint = ranks.fitted(1100, 0, 1, **ranks.LONGER)
    assert 0 < np.abs(first["proba"] - joint["proba"]).max() < 0.1
    assert abs(first["elbo"] - joint["elbo"]) < 0.05 * abs(joint["elbo"])


def test_not_in_the_group(found, tmp_path):
    for rank, one in enumerate(found["alone"]):
        expected = ranks.alone(rank, 2, tmp_path)
        np.testing.assert_allclose(one["proba"], expected["proba"], atol=1e-8)


def test_weights_of_another_scale(found, tmp_path):
    alone = ranks.weights_of_another_scale(0, 1, tmp_path)["said"]
    assert len(alone) == 1 and "averages 0.2333" in alone[0]
    assert [one["said"] for one in found["weights_of_another_scale"]] == [alone, []]


@pytest.mark.parametrize(
    "name, parts",
    [
        ("bad_shard", ["ValueError", "rank 1", "NaN", "row 17"]),
        ("other_parameters", ["ValueError", "max_epochs", "10", "11"]),
        ("other_labels", ["ValueError", "y must hold labels of one kind", "rank 1"]),
        ("other_width", ["ValueError", "3 features on rank 0 and 2 on rank 1"]),
        ("refused", ["ValueError", "class_batch=2", "process group"]),
        ("other_checkpoint", ["ValueError", "belongs to another fit"]),
    ],
)
def test_errors_are_the_same_on_all_ranks(found, name, parts):
    first, second = (one["error"] for one in found[name])
    assert first == second
    for part in parts:
        assert part in first


def test_a_lost_rank(found):
    """An error, or the end of the process: never a wait without end."""
    (first,) = found["lost"]
    told = first["error"]
    assert told is None or told.startswith("RuntimeError: rank 0 of 2 has lost the others")
