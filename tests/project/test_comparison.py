"""The paper's two figures: they show the numbers of their files, and so does the page."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import importing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script():
    with importing() as script:
        yield script


def shown(ax) -> dict[str, np.ndarray]:
    """The points of every line in a panel."""
    return {line.get_label(): np.asarray(line.get_xydata()) for line in ax.lines}


def point(seconds: float, error: float, nll: float, **more) -> dict:
    return {"seconds": seconds, "error": error, "nll": nll, "ece": 0.01, **more}


def contest(compare, scale: float) -> dict:
    """One set with two peers, one of which has failed."""
    curve = [point(5.0, 0.2 * scale, 0.4 * scale), point(60.0, 0.1 * scale, 0.2 * scale)]
    # NLLs that are not finite are null in the file.
    broken = [point(3.0, 0.9, None)]
    fits = [point(s, 0.3 * scale / s, 0.4 * scale / s, settings={}) for s in (1.0, 2.0, 3.0)]
    peers = {
        "gpytorch-adam": {"settings": {"learn_inducing": True}, "curve": curve},
        "gpflow-softmax": {"settings": {"learn_inducing": False}, "curve": broken, "failure": "-"},
    }
    contests = {"gpytorch-adam": compare.verdict(peers["gpytorch-adam"], fits, 20.0)}
    return {"budget": 60.0, "peers": peers, "conjugp": fits, "contests": contests}


def test_the_comparison_shows_every_curve(script, tmp_path, monkeypatch):
    comparison, compare = script("numerical_comparison"), script("compare")
    sets = {"mnist": contest(compare, 1.0), "covtype": contest(compare, 2.0)}
    figure = comparison.figure(sets)
    panels = np.array(figure.axes).reshape(2, 2)
    for column, name in enumerate(sets):
        assert panels[0, column].get_title(loc="left") == comparison.TITLES[name]
        for row, measure in enumerate(("error", "nll")):
            ax = panels[row, column]
            assert ax.get_xscale() == ax.get_yscale() == "log"
            lines = shown(ax)
            runs = {compare.PEERS[k].label: v["curve"] for k, v in sets[name]["peers"].items()}
            runs["conjugp, complete fits"] = sets[name]["conjugp"]
            finite = {k: [p for p in v if p[measure] is not None] for k, v in runs.items()}
            assert lines.keys() == {label for label, points in finite.items() if points}
            for label, points in lines.items():
                expected = [(p["seconds"], p[measure]) for p in finite[label]]
                np.testing.assert_allclose(points, expected)
    source, page = tmp_path / "compare.json", tmp_path / "page.md"
    head = comparison.shown(sets).partition("\n")[0]
    source.write_text(json.dumps({"sets": sets}))
    page.write_text(f"above\n\n{head}\n|---|---|\n| old | old |\n\nbelow\n")
    arguments = ["--input", source, "--image", tmp_path / "a.png", "--page", page]
    monkeypatch.setattr(sys, "argv", ["numerical_comparison.py", *map(str, arguments)])
    comparison.main()
    lines = page.read_text().splitlines()
    assert lines[0] == "above" and lines[-1] == "below" and "old" not in page.read_text()
    adam, broken = (line for line in lines if line.startswith("| MNIST"))
    assert "| 0.2000 | 59.9 | 2.00 | 30.0 |" in adam and broken.endswith("| fails |")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_page_without_the_table_is_refused(script, tmp_path):
    script("numerical_comparison")
    page = tmp_path / "page.md"
    page.write_text("| set |\n|---|\n| a |\n")
    with pytest.raises(ValueError, match=r"page\.md must have one table"):
        script("record").put_table(page, "| other |\n|---|\n| b |")
    script("record").put_table(page, "| set |\n|---|\n| b |")
    assert page.read_text() == "| set |\n|---|\n| b |\n"


def test_the_page_shows_the_stored_comparison(script):
    comparison = script("numerical_comparison")
    sets = json.loads(comparison.COMPARE.read_text(encoding="utf-8"))["sets"]
    assert comparison.shown(sets) in comparison.PAGE.read_text(encoding="utf-8")


def test_inducing_points_from_fits_to_figure(script, tmp_path, monkeypatch):
    experiment = script("inducing_points")
    settings = []

    def fit(function, name, given):
        assert function is experiment.conjugp_fit and name == "shuttle"
        settings.append(given)
        M, shared = given["n_inducing"], given["shared_kernel"]
        return point(M * (1.0 if shared else 7.0), 0.1, 1 / M, settings=given)

    monkeypatch.setattr(experiment, "alone", fit)
    monkeypatch.setattr(experiment, "load", lambda _: None)
    output, image, page = (tmp_path / f"found.{kind}" for kind in ("json", "png", "md"))
    page.write_text((ROOT / "docs" / "comparison.md").read_text(encoding="utf-8"))
    arguments = ["inducing_points.py", "--output", str(output), "--image", str(image)]
    arguments += ["--page", str(page)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--sizes", "5", "20", "--epochs", "2"])
    experiment.main()
    assert [(s["n_inducing"], s["shared_kernel"]) for s in settings] == [
        (5, True),
        (5, False),
        (20, True),
        (20, False),
    ]
    assert all(s["covariance"] == "full" and s["max_epochs"] == 2 for s in settings)
    first = image.read_bytes()
    image.unlink()
    monkeypatch.setattr(sys, "argv", [*arguments, "--figure"])
    experiment.main()
    assert len(settings) == 4 and image.read_bytes() == first
    result = json.loads(output.read_text())["sets"]["shuttle"]
    left, right = experiment.figure(result).axes
    nll, seconds = ([np.asarray(line.get_xydata()) for line in ax.lines] for ax in (left, right))
    np.testing.assert_allclose(nll[0], [(5, 0.2), (20, 0.05)])
    np.testing.assert_allclose(seconds[0], [(5, 5), (20, 20)])
    np.testing.assert_allclose(seconds[1], [(5, 35), (20, 140)])
    assert "| 20 | 0.1000 | 0.0500 | 20.0 | 0.1000 | 0.0500 | 140.0 |" in experiment.table(result)
    assert experiment.table(result) in page.read_text()


def test_the_stored_inducing_points_are_those_of_the_page(script):
    experiment = script("inducing_points")
    result = json.loads(experiment.RESULTS.read_text(encoding="utf-8"))["sets"]["shuttle"]
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert experiment.table(result) in page
    for fits in result["fits"].values():
        assert [fit["settings"]["n_inducing"] for fit in fits] == list(experiment.SIZES)
        nll = [fit["nll"] for fit in fits]
        # More points are better, as far as a thousandth of a nat can tell.
        assert all(b < a + 1e-3 for a, b in itertools.pairwise(nll))
