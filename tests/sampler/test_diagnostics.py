"""Diagnostics are ArviZ's, of the right numbers, in plain words; draws reach ArviZ whole."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.special import expit

from conjugp._sampler import diagnostics
from conjugp._sampler.diagnostics import (
    MAX_RHAT,
    Diagnostics,
    diagnose,
    kernel_parameters,
    latents,
    log_likelihood,
    quantities,
    to_arviz,
    worst_traces,
)
from conjugp._sampler.prediction import SampledModel
from conjugp.kernels import RBF, Linear, Matern52
from conjugp.likelihoods import LogisticSoftmax
from samplers import random_draws, target

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    import arviz

LIKELIHOOD = LogisticSoftmax()
KINDS = ("full", "sparse", "classes", "sampled", "sparse sampled", "classes sampled")
CLASSES = np.array(["ant", "bee", "cat"])
SCALE = np.array([10.0, 0.1])

# As in a fit: a change of units that differs between features makes every lengthscale a vector.
ARD = {
    "classes sampled": {
        "kernels": (RBF((1.0, 2.0), 3.0), Matern52((1.0, 1.5), 2.0), RBF((2.0, 0.7), 5.0))
    }
}


def model(kind: str, n_chains: int = 2, n: int = 30, **changes) -> SampledModel:
    t = replace(target(kind), **changes)
    return SampledModel(t, random_draws(t, n_chains, n), LIKELIHOOD)


def dense_latents(m: SampledModel) -> np.ndarray:
    t = m.target
    out = np.empty((len(m.draws), len(m.draws[0].g), 3, len(m.Z)))
    for i, d in enumerate(m.draws):
        for s, (g, theta) in enumerate(zip(d.g, d.theta, strict=True)):
            for c in range(3):
                k = c % len(t.kernels)
                K = (t.kernel(k, theta[k])(m.Z, m.Z) + t.mean_variance).numpy()
                K = K + 1e-6 * np.diag(K).mean() * np.eye(len(K))
                out[i, s, c] = t.mean[c] + np.linalg.cholesky(K) @ g[c]
    return out


# --- quantities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_latents(kind):
    m = model(kind)
    expected = dense_latents(m)
    assert_allclose(latents(m), expected, rtol=1e-9, atol=1e-12)
    points = np.array([3, 0])
    assert_allclose(latents(m, points), expected[..., points], rtol=1e-9, atol=1e-12)


def test_what_chains_are_judged_by():
    found = quantities(model("sampled"), CLASSES, SCALE)
    assert list(found) == ["log_likelihood_total", "f", "kernel", "prior_mean"]
    assert list(found["kernel"]) == ["lengthscale[0]", "lengthscale[1]", "variance"]
    assert list(found["prior_mean"]) == [f"prior mean[{c}]" for c in CLASSES]
    assert {"f[ant, 0]", "f[bee, 13]"} < found["f"].keys()
    assert all(x.shape == (2, 30) for traces in found.values() for x in traces.values())
    assert list(quantities(model("full"))) == ["log_likelihood_total", "f"]
    m = model("sampled")
    assert_allclose(found["f"]["f[bee, 13]"], latents(m)[:, :, 1, 13])
    assert_allclose(found["prior_mean"]["prior mean[cat]"][1], m.draws[1].mean[:, 2])


def test_many_classes_and_few_points_are_looked_at():
    t = target()
    wide = replace(
        t, data=replace(t.data, n_classes=60), mean=np.zeros(60), X=t.X, kernels=t.kernels
    )
    m = SampledModel(wide, random_draws(wide), LIKELIHOOD)
    assert len(quantities(m)["f"]) == 60
    few = replace(target("sparse"), Z=t.X[:1])
    m = SampledModel(few, random_draws(few), LIKELIHOOD)
    assert list(quantities(m)["f"]) == ["f[0, 0]", "f[1, 0]", "f[2, 0]"]


@pytest.mark.parametrize("kind", ["sampled", "classes sampled"])
def test_kernel_parameters_are_in_the_users_units(kind):
    """Against the kernel of every draw, changed to those units."""
    m = model(kind, **ARD.get(kind, {}))
    found = kernel_parameters(m, CLASSES, SCALE)
    for i, d in enumerate(m.draws):
        for s in (0, 7, 29):
            for k in range(len(m.target.kernels)):
                kernel = m.target.kernel(k, d.theta[s, k]).to_units(SCALE).frozen()
                for name, (values, by_class) in found.items():
                    assert by_class == (kind == "classes sampled")
                    value = values[i, s, k] if by_class else values[i, s]
                    assert_allclose(value, getattr(kernel, name), rtol=1e-12)


def test_parameters_of_sums_and_of_different_kernels_have_names_of_their_own():
    m = model("sampled", kernels=(RBF((1.0, 2.0), 3.0) + Linear((2.0, 1.0), 0.5) * RBF(1.0, 1.0),))
    found = kernel_parameters(m, CLASSES, np.full(2, 3.0))
    assert {name: values.shape[2:] for name, (values, _) in found.items()} == {
        "lengthscale_1": (2,),
        "variance_1": (),
        "lengthscale_2": (2,),
        "variance_2": (),
        "lengthscale_3": (),
        "variance_3": (),
    }
    expected = m.target.kernel(0, m.draws[1].theta[4, 0]).to_units(np.full(2, 3.0)).frozen()
    assert_allclose(found["lengthscale_2"][0][1, 4], expected.parts[1].parts[0].lengthscale)
    assert_allclose(found["lengthscale_3"][0][1, 4], expected.parts[1].parts[1].lengthscale)
    mixed = (RBF((1.0, 2.0), 3.0), RBF(1.0, 1.0) + RBF(2.0, 2.0), RBF(1.5, 1.0))
    found = kernel_parameters(model("classes sampled", kernels=mixed), CLASSES, np.ones(2))
    assert "lengthscale_ant" in found and "variance_2_bee" in found and "lengthscale_cat" in found
    assert not any(by_class for _, by_class in found.values())


@pytest.mark.parametrize("kind", ["full", "classes", "sampled"])
def test_log_likelihood_of_every_row(kind):
    m = model(kind, n=6)
    data = m.target.data
    s = expit(latents(m))[..., data.index]  # (chain, draw, C, N)
    expected = np.log(s[:, :, data.y, np.arange(len(data.y))] / s.sum(2))
    assert_allclose(log_likelihood(m), expected, rtol=1e-9)


def test_log_likelihood_of_the_sparse_model_integrates_over_the_latent_at_a_row():
    """Against Gauss-Hermite quadrature of the three latents of a row."""
    m = model("sparse", n=3)
    data, x = m.target.data, torch.tensor(m.target.X)
    kernel = m.target.kernels[0]
    K = kernel(m.Z, m.Z).numpy()
    L = np.linalg.cholesky(K + 1e-6 * np.diag(K).mean() * np.eye(5))
    A = np.linalg.solve(L, kernel(m.Z, x).numpy())
    sd = np.sqrt(kernel.diag(x).numpy() - np.square(A).sum(0))
    z, w = np.polynomial.hermite_e.hermegauss(40)
    grid = np.stack(np.meshgrid(z, z, z, indexing="ij"), -1).reshape(-1, 3)
    weight = np.einsum("i,j,k->ijk", w, w, w).reshape(-1)
    weight /= weight.sum()
    found = log_likelihood(m)
    assert found.shape == (2, 3, 16)
    for i, s, row in [(0, 0, 0), (1, 2, 5), (0, 1, 14), (1, 0, 15)]:
        at = data.index[row]
        f = m.target.mean + m.draws[i].g[s] @ A[:, at] + sd[at] * grid
        p = expit(f)[:, data.y[row]] / expit(f).sum(1)
        assert_allclose(found[i, s, row], np.log(weight @ p), rtol=1e-6)


# --- R-hat and effective sample sizes -----------------------------------------------------------


@pytest.mark.parametrize(("n_chains", "n"), [(4, 50), (2, 5), (3, 33)])
def test_measures_are_arvizs(n_chains, n):
    m = model("sampled", n_chains, n)
    found = diagnose(m)
    posterior = {
        "f": quantities(m)["f"],
        "kernel": quantities(m)["kernel"],
        "prior_mean": quantities(m)["prior_mean"],
    }
    for group, traces in posterior.items():
        data = arviz.convert_to_dataset({name: x for name, x in traces.items()})
        rhat, bulk = arviz.rhat(data), arviz.ess(data)
        tail = arviz.ess(data, method="tail", prob=(0.05, 0.95))  # defaults differ by version
        for i, name in enumerate(traces):
            assert_allclose(found.each[group]["rhat"][i], float(rhat[name]), rtol=1e-9)
            assert_allclose(found.each[group]["ess_bulk"][i], float(bulk[name]), rtol=1e-9)
            assert_allclose(found.each[group]["ess_tail"][i], float(tail[name]), rtol=1e-9)
        worst = found.groups[group]
        assert worst["rhat"] == found.each[group]["rhat"].max()
        assert worst["ess_bulk"] == found.each[group]["ess_bulk"].min()
    assert found.rhat == max(group["rhat"] for group in found.groups.values())
    assert found.ess_bulk == min(group["ess_bulk"] for group in found.groups.values())
    assert found.ess_tail == min(group["ess_tail"] for group in found.groups.values())


def shifted(shift: float, n: int = 400, n_chains: int = 4) -> Diagnostics:
    """Independent draws, with one chain somewhere else."""
    m = model("full", n_chains, n)
    m.draws[0].g[:] += shift
    return diagnose(m)


def test_independent_draws_are_found_good_and_a_stray_chain_is_not():
    good = shifted(0.0)
    assert good.rhat < 1.01 and good.ess_bulk > 800 and good.converged
    bad = shifted(2.0)
    assert bad.rhat > 1.2 and not bad.converged
    assert bad.groups["log_likelihood_total"]["rhat"] < 1.01
    assert "have not mixed: R-hat of f is" in bad.advice()
    likelihood = bad.groups["log_likelihood_total"]["rhat"]
    assert f"; of the log-likelihood it is {likelihood:.3f};" in bad.advice()
    assert f"at most {MAX_RHAT}" in bad.advice()
    assert "Raise n_warmup and n_samples" in bad.advice()


def test_a_single_chain_is_compared_with_itself():
    assert shifted(0.0, 2000, 1).converged
    m = model("full", 1, 500)
    m.draws[0].g[:] += np.linspace(0, 3, 500)[:, None, None]
    drifting = diagnose(m)
    assert drifting.rhat > 1.2 and "have not mixed" in drifting.advice()
    assert np.isfinite(diagnose(model("full", 1, 9)).rhat)


def test_few_independent_draws():
    found = shifted(0.0, 60)
    few = Diagnostics(
        {"f": {**found.each["f"], "rhat": np.ones_like(found.each["f"]["rhat"])}}, 4, 60
    )
    assert not few.converged
    assert "few independent draws" in few.advice() and "at least 400" in few.advice()
    assert "Raise n_samples" in few.advice()


@pytest.mark.parametrize(("n_chains", "n"), [(2, 1), (2, 3), (1, 1), (1, 7)])
def test_too_few_draws_to_tell(n_chains, n):
    found = diagnose(model("sampled", n_chains, n))
    assert np.isnan([found.rhat, found.ess_bulk, found.ess_tail]).all()
    assert not found.converged
    assert f"{n} draws of a chain are too few to tell" in found.advice()


def test_what_does_not_move():
    """A constant is known; chains that stand still, each elsewhere, have not mixed at all."""
    m = model("sampled", 2, 40)
    for d in m.draws:
        d.theta[:] = m.target.theta
    constant = diagnose(m)
    assert constant.groups["kernel"] == {"rhat": 1.0, "ess_bulk": 80.0, "ess_tail": 80.0}
    m.draws[1].theta[:] += 0.1
    stuck = diagnose(m)
    assert stuck.groups["kernel"]["rhat"] == np.inf and not stuck.converged
    assert "R-hat of kernel is inf" in stuck.advice()


def test_worst_traces():
    m = model("sampled", 4, 100)
    m.draws[0].theta[:, 0, 2] += 5.0  # the variance
    m.draws[1].mean[:, 1] += 3.0
    found = diagnose(m)
    traces = worst_traces(m, found, 3, CLASSES, SCALE)
    assert list(traces) == ["log likelihood", "variance", "prior mean[bee]"]
    assert_allclose(traces["variance"], np.exp([d.theta[:, 0, 2] for d in m.draws]))
    assert list(worst_traces(m, found, 1)) == ["log likelihood"]
    many = worst_traces(m, found, 1000)
    assert len(many) == sum(len(traces) for traces in quantities(m).values())
    assert len(worst_traces(model("full", 2, 2), diagnose(model("full", 2, 2)), 4)) == 4


# --- ArviZ --------------------------------------------------------------------------------------


def container(m: SampledModel, with_log_likelihood: bool = True):
    rows = np.array([4, 0, 15, 3, 4])
    features = np.array(["height", "width"])
    inputs = m.Z.numpy() * SCALE
    return rows, to_arviz(m, CLASSES, SCALE, features, inputs, rows, with_log_likelihood)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_reach_arviz(kind):
    m = model(kind, n=5, **ARD.get(kind, {}))
    rows, data = container(m)
    posterior = data["posterior"]
    assert posterior["f"].dims == ("chain", "draw", "class", "point")
    assert_allclose(posterior["f"].sel({"class": "bee", "point": 2}), latents(m)[:, :, 1, 2])
    total = data["sample_stats"]["log_likelihood_total"]
    assert_allclose(total, [d.log_likelihood for d in m.draws])
    y = data["log_likelihood"]["y"]
    assert y.dims == ("chain", "draw", "row")
    assert_allclose(y, log_likelihood(m)[:, :, rows])
    assert data["observed_data"]["y"].values.tolist() == CLASSES[m.target.data.y[rows]].tolist()
    assert_allclose(data["constant_data"]["X"].sel(feature="width"), m.Z[:, 1] * 0.1)
    names = {"f"}
    if m.target.kernel_scale:
        names |= {"lengthscale", "variance"}
        by_class = len(m.target.kernels) > 1
        axes = ("class",) if by_class else ()
        assert posterior["lengthscale"].dims == ("chain", "draw", *axes, "feature")
        assert posterior["variance"].dims == ("chain", "draw", *axes)
        found = posterior["lengthscale"].sel(chain=1, draw=3, feature="height")
        expected = np.exp(m.draws[1].theta[3, :, 0]) * SCALE[0]
        assert_allclose(found, expected if by_class else expected[0])
    if m.target.mean_variance:
        names |= {"prior_mean"}
        assert posterior["prior_mean"].dims == ("chain", "draw", "class")
    assert set(posterior.data_vars) == names


def test_without_the_log_likelihood():
    _, data = container(model("full", n=5), False)
    groups = data.groups() if callable(data.groups) else data.groups
    assert not any("log_likelihood" in group for group in groups)


def test_arviz_can_work_with_it():
    _, data = container(model("sampled", 4, 60))
    summary = arviz.summary(data, var_names=["variance", "prior_mean"])
    assert len(summary) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # draws from the prior are poor for this
        found = arviz.loo(data)
    assert np.isfinite(found.elpd_loo if hasattr(found, "elpd_loo") else found.elpd)


def test_arviz_is_imported_only_when_needed():
    modules = "conjugp._sampler.diagnostics, conjugp._estimators.gibbs_classifier"
    code = f"import sys, {modules}; sys.exit('arviz' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_api_of_both_major_versions(monkeypatch):
    """Version 1 takes the groups as one argument."""

    class Fake:
        __version__ = "1.3.0"

        @staticmethod
        def from_dict(groups, *, coords, dims):
            return groups, coords, dims

    monkeypatch.setattr(diagnostics, "_arviz", lambda: Fake)
    _, (groups, coords, dims) = container(model("full", n=5))
    assert {"posterior", "log_likelihood", "observed_data"} < groups.keys()
    assert list(coords["class"]) == list(CLASSES) and dims["f"] == ["class", "point"]


def test_a_missing_arviz_is_named(monkeypatch):
    monkeypatch.setattr(diagnostics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'needs arviz: pip install "conjugp\[gibbs\]"'):
        diagnostics.require_arviz()
