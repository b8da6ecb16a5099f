"""The experiments: the quadrature they stand on, their figures and tables, what is stored."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conjugp.kernels import RBF
from reference import wine_gibbs
from scripts import importing

ROOT = Path(__file__).parents[2]
NAMES = ("unaugmented", "wine")


@pytest.fixture(scope="module")
def modules():
    with importing() as script:
        yield {name: script(name) for name in NAMES}


@pytest.fixture(scope="module")
def wine(modules) -> ModuleType:
    return modules["wine"]


@pytest.fixture(scope="module")
def stored(wine) -> dict:
    return json.loads(wine.RESULTS.read_text(encoding="utf-8"))


# --- the expected log-likelihood ----------------------------------------------------------------

latents = st.lists(
    st.tuples(
        st.integers(0, 2), st.tuples(*[st.floats(-6, 6)] * 3), st.tuples(*[st.floats(0, 2)] * 3)
    ),
    min_size=1,
    max_size=4,
)


def tensors(rows: list) -> tuple[Tensor, Tensor, Tensor]:
    y, m, v = zip(*rows, strict=True)
    return torch.tensor(y), torch.tensor(m).double(), torch.tensor(v).double()


def expected_log_sum(m: np.ndarray, v: np.ndarray) -> float:
    """E[log Σσ(f_c)] = ∫ (e^−λ − ∏_c E[e^{−λσ(f_c)}]) dλ/λ, by trapezoids in log λ and in f."""
    z = np.linspace(-9, 9, 1201)
    w = np.exp(-0.5 * z * z)
    s = 1 / (1 + np.exp(-(m[:, None] + np.sqrt(v)[:, None] * z)))
    lam = np.exp(np.arange(-45, 16, 0.1))
    inner = np.exp(-lam[:, None, None] * s) @ (w / w.sum())  # (λ, C)
    return float((np.exp(-lam) - inner.prod(axis=1)).sum() * 0.1)


@settings(max_examples=20)
@given(latents)
def test_quadrature_against_a_one_dimensional_integral(modules, rows):
    y, m, v = tensors(rows)
    found = modules["unaugmented"].Unaugmented(n_nodes=32).site(y, m, v, "exact").bound
    z = np.linspace(-9, 9, 1201)
    w = np.exp(-0.5 * z * z)
    for i, k in enumerate(y.tolist()):
        f = float(m[i, k]) + np.sqrt(float(v[i, k])) * z
        first = -np.logaddexp(0, -f) @ (w / w.sum())
        expected = first - expected_log_sum(m[i].numpy(), v[i].numpy())
        assert float(found[i]) == pytest.approx(expected, abs=2e-6)


@settings(max_examples=20)
@given(latents)
def test_site_holds_the_derivatives(modules, rows):
    y, m, v = tensors(rows)
    v = v + 0.01
    likelihood = modules["unaugmented"].Unaugmented()
    site = likelihood.site(y, m, v, "exact")
    h = 1e-4
    for c in range(3):
        step = h * torch.eye(3, dtype=torch.float64)[c]
        at = [likelihood.site(y, *x, "exact").bound for x in ((m + step, v), (m - step, v))]
        d_mean = (at[0] - at[1]) / (2 * h)
        expected = (site.potential - site.precision * m)[:, c]
        torch.testing.assert_close(expected, d_mean, rtol=0, atol=1e-6)
        at = [likelihood.site(y, *x, "exact").bound for x in ((m, v + step), (m, v - step))]
        d_variance = (at[0] - at[1]) / (2 * h)
        torch.testing.assert_close(site.precision[:, c], -2 * d_variance, rtol=0, atol=1e-5)


def test_site_against_sampling(modules):
    """Value and both derivatives, the last from the definition of a second derivative's mean."""
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([0, 1, 2, 2])
    m, v, z = (
        torch.randn(n, 4, 3, generator=generator, dtype=torch.float64) for n in (1, 1, 200_000)
    )
    m, v = m[0], v[0].square() + 0.1
    likelihood = modules["unaugmented"].Unaugmented()
    site = likelihood.site(y, m, v, "exact")
    f = (m + v.sqrt() * z).requires_grad_()
    value = likelihood.log_prob(y, f)
    (slope,) = torch.autograd.grad(value.sum(), f)
    # Stein: E[z ∂log p] = sd · E[∂² log p].
    curvature = z * slope / v.sqrt()
    for found, draws in (
        (site.bound, value.detach()),
        (site.potential - site.precision * m, slope),
        (-site.precision, curvature),
    ):
        error = draws.std(0) / len(z) ** 0.5
        assert ((found - draws.mean(0)).abs() / error).max() < 4.5


@given(latents)
def test_no_bound_exceeds_it(modules, rows):
    y, m, v = tensors(rows)
    likelihood = modules["unaugmented"].Unaugmented(n_nodes=32)
    values = [likelihood.site(y, m, v, bound).bound for bound in likelihood.bounds]
    for higher, lower in itertools.pairwise(values):
        assert (higher >= lower - 1e-6).all()
    sure = likelihood.site(y, m, torch.zeros_like(v), "exact").bound
    torch.testing.assert_close(sure, likelihood.log_prob(y, m), rtol=1e-12, atol=1e-12)


# --- the Wine experiment ------------------------------------------------------------------------


def test_the_split_is_that_of_the_reference(wine):
    ours, theirs = wine.wine(), wine_gibbs.wine()
    for a, b in ((ours.X, theirs.X), (ours.y, theirs.y), (ours.X_test, theirs.X_test)):
        np.testing.assert_array_equal(a, b)
    assert ours.kernel == RBF(theirs.lengthscale, 1.0)


def test_measures(wine):
    truth = {
        "p": [[0.5, 0.5], [0.25, 0.75]],
        "mean": [[0.0, 0.0], [1.0, 1.0]],
        "variance": [[1.0, 2.0], [1.0, 4.0]],
    }
    found = {
        "p": [[0.75, 0.25], [0.5, 0.5]],
        "mean": [[2.0, 0.0], [1.0, 1.0]],
        "variance": [[0.5, 1.0], [2.0, 4.0]],
    }
    rows = wine.table({"y": [0, 1], "gibbs": truth, "methods": {"tight": found}})
    tight = rows["tight"]
    assert tight["mean_abs_dp"] == tight["max_abs_dp"] == 0.25
    assert tight["rmse_of_means"] == 1.0 and tight["variance_ratio"] == 1.0
    assert tight["accuracy"] == 0.5  # ties go to the first class
    assert tight["nll"] == pytest.approx(-0.5 * np.log(0.75 * 0.5))
    assert rows["gibbs"]["mean_abs_dp"] == 0 and rows["gibbs"]["accuracy"] == 1.0


def tiny(wine) -> dict:
    """A result of two methods on five points."""
    rng = np.random.default_rng(0)
    names = ("gibbs", "exact", "augmented")
    values = {name: {key: rng.uniform(0.1, 1, (5, 3)) for key in wine.COLUMNS} for name in names}
    return {"y": np.arange(5) % 3, "gibbs": values.pop("gibbs"), "methods": values}


def test_the_figure_shows_every_number_against_gibbs(wine, tmp_path):
    wine.save(tmp_path / "new" / "tiny.json", tiny(wine))
    result = json.loads((tmp_path / "new" / "tiny.json").read_text(encoding="utf-8"))
    figure = wine.figure(result)
    axes = np.array(figure.axes).reshape(2, 3)
    for row, method in zip(axes, ("exact", "augmented"), strict=True):
        assert row[0].get_ylabel() == wine.METHODS[method]
        for ax, name in zip(row, wine.COLUMNS, strict=True):
            shown = np.concatenate([np.asarray(dots.get_offsets()) for dots in ax.collections])
            x, y = (
                np.array(v[name]).T.ravel() for v in (result["gibbs"], result["methods"][method])
            )
            np.testing.assert_allclose(shown, np.stack([x, y], axis=1))
            (diagonal,) = ax.lines
            np.testing.assert_array_equal(diagonal.get_xdata(), diagonal.get_ydata())
            assert ax.get_xlim() == ax.get_ylim() == tuple(diagonal.get_xdata())
            assert shown.min() > ax.get_xlim()[0] and shown.max() < ax.get_xlim()[1]


@pytest.mark.slow
def test_everything_from_data_to_files(wine, tmp_path, monkeypatch):
    """The whole experiment on 24 rows and a few draws, and the figure again from its file."""
    whole = wine.wine

    def few(seed: int = 0, variance: float = 1.0):
        d = whole(seed, variance)
        return d._replace(X=d.X[:24], y=d.y[:24], X_test=d.X_test[:6], y_test=d.y_test[:6])

    monkeypatch.setattr(wine, "wine", few)
    monkeypatch.setattr(wine, "SPLIT_SAMPLES", 20)
    result, image = tmp_path / "wine.json", tmp_path / "wine.png"
    arguments = ["wine.py", "--output", str(result), "--image", str(image)]
    monkeypatch.setattr(
        sys, "argv", [*arguments, "--runs", "3", "--samples", "20", "--splits", "2"]
    )
    wine.main()
    kept = json.loads(result.read_text(encoding="utf-8"))
    assert kept["gibbs"]["p"] and np.shape(kept["gibbs"]["p_se"]) == (6, 3)
    assert [run["draws"] for run in kept["gibbs"]["runs"]] == [80] * 3
    assert set(kept["methods"]) == set(wine.METHODS)
    assert set(kept["variances"]["10"]["table"]) == {"gibbs", *wine.METHODS}
    # Even these few draws are near what no approximation is far from on so few rows.
    assert kept["table"]["exact"]["mean_abs_dp"] < 0.05
    first = image.read_bytes()
    image.unlink()
    monkeypatch.setattr(sys, "argv", [*arguments, "--figure"])
    wine.main()
    assert image.read_bytes() == first


# --- what is stored -----------------------------------------------------------------------------


def test_the_stored_table_follows_from_the_stored_numbers(wine, stored):
    for name, row in wine.table(stored).items():
        assert row == pytest.approx(stored["table"][name], rel=2e-4, abs=2e-6)


def test_the_stored_truth_is_true_enough(stored):
    truth = stored["gibbs"]
    assert np.mean(truth["p_se"]) < 4e-4
    assert max(run["rhat"] for run in truth["runs"]) < 1.01
    assert max(stored["quadrature"]["max_change"].values()) < 1e-6


def test_the_stored_truth_agrees_with_another_sampler(stored):
    other = json.loads(wine_gibbs.FILE.read_text(encoding="utf-8"))
    for name in ("p", "mean", "variance"):
        ours, theirs = np.array(stored["gibbs"][name]), np.array(other[name])
        error = np.hypot(stored["gibbs"][f"{name}_se"], other[f"{name}_se"])
        assert np.sqrt(np.square((ours - theirs) / error).mean()) < 2.0, name
        assert np.abs(ours - theirs).max() < 6 * error.max(), name


def test_the_page_shows_the_stored_tables(wine, stored):
    page = (ROOT / "docs" / "examples" / "exact.md").read_text(encoding="utf-8")
    assert wine.markdown(stored["table"]) in page


def test_the_stored_fits_are_what_the_library_gives(wine, stored):
    data = wine.wine()
    for bound in wine.METHODS:
        found = wine.variational(data, bound)
        for name in wine.COLUMNS:
            np.testing.assert_allclose(found[name], stored["methods"][bound][name], atol=2e-4)
