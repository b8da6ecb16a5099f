"""The command line, as people call it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from matplotlib import image
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

import conjugp
from conjugp import cli
from conjugp.cli import _demo as demo
from conjugp.cli._output import check_output

NUMBER = re.compile(r"\d+\.\d+%?")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Call conjugp with some arguments in an empty folder; few rows, so that it is quick."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "N_TRAIN", 60)
    return lambda *arguments: CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def no_training(monkeypatch):
    def refuse(seed):
        raise AssertionError("got as far as the classifiers")

    monkeypatch.setattr(demo, "_classifiers", refuse)


def rows(output: str) -> dict[str, list[float]]:
    """The numbers in every line of the table, by the line's first words."""
    names = ("conjugp GPClassifier", "LogisticRegression", "GaussianProcessClassifier")
    lines = {name: line for line in output.splitlines() for name in names if name in line[:40]}
    return {
        name: [float(x.rstrip("%")) for x in NUMBER.findall(line)] for name, line in lines.items()
    }


def test_demo(run, tmp_path):
    result = run("demo")
    assert result.exit_code == 0, result.output
    table = rows(result.stdout)
    assert len(table) == 3
    for error, nll, brier, ece, seconds in table.values():
        # Sixty images are few, but guessing would be 90 %, 2.3 nats and a Brier score of 0.9.
        assert 0 < error < 40 and 0 < nll < 2 and 0 < brier < 0.8 and 0 < ece < 0.7
        assert 0 <= seconds < 60
    written = tmp_path / "conjugp-demo.png"
    assert f"written to {written}" in result.stdout.replace("\n", "")
    height, width, _ = image.imread(written).shape
    assert height > 600 and width > 600
    # Nobody looks on: no bars, and what is done is said out of the way of the table.
    assert "ELBO" not in result.output and "Fitting conjugp" in result.stderr


def test_the_seed_decides_and_a_replaced_file_is_named(run, monkeypatch, tmp_path):
    quick = {"LogisticRegression": LogisticRegression(max_iter=1000)}
    monkeypatch.setattr(demo, "_classifiers", lambda seed: quick)
    outputs = [run("demo", "--seed", seed, "--output", "picture.svg") for seed in "112"]
    assert all(result.exit_code == 0 for result in outputs)
    first, again, other = ([row[:4] for row in rows(r.stdout).values()] for r in outputs)
    assert first == again and first != other
    assert "in place of" not in outputs[0].stdout
    assert "in place of" in outputs[1].stdout
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize(
    ("path", "complaint", "code"),
    [
        ("no/such/folder/x.png", "No such file or directory", 3),
        ("a-folder.png", "Is a directory", 3),
        ("a-file/x.png", "Not a directory", 3),
        ("x.jpeg2", "must end in", 2),
        ("x", "must end in", 2),
    ],
)
def test_an_output_that_cannot_be_written(run, no_training, tmp_path, path, complaint, code):
    (tmp_path / "a-folder.png").mkdir()
    (tmp_path / "a-file").write_text("kept")
    result = run("demo", "--output", path)
    assert result.exit_code == code
    assert result.stdout == ""
    assert "--output" in result.stderr and complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_checking_the_output_changes_nothing(tmp_path):
    there, missing = tmp_path / "there.png", tmp_path / "missing.png"
    there.write_bytes(b"kept")
    assert check_output(there) and there.read_bytes() == b"kept"
    assert not check_output(missing) and not missing.exists()
    link = tmp_path / "link.png"
    link.symlink_to(missing)
    assert not check_output(link) and link.is_symlink() and not missing.exists()


@pytest.mark.parametrize("seed", ["-1", "half", str(2**31)])
def test_a_bad_seed_is_named(run, no_training, seed):
    result = run("demo", "--seed", seed)
    assert result.exit_code == 2 and "--seed" in result.stderr


def test_version_and_help(run):
    assert run("--version").stdout.strip() == conjugp.__version__
    assert "demo" in run("--help").stdout
    assert "--output" in run("demo", "--help").stdout


def test_python_m_conjugp():
    call = [sys.executable, "-m", "conjugp", "--version"]
    out = subprocess.run(call, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == conjugp.__version__
