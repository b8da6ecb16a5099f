"""ONNX files: probabilities in ONNX Runtime are those of predict_proba."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from conjugp import FitOptions, GibbsGPClassifier, GPClassifier
from conjugp._gp.covariance import family as family_of
from conjugp._gp.features import basis
from conjugp._gp.model import Model
from conjugp._gp.temperature import Calibration
from conjugp._inputs.inputs import Inputs, Scaling
from conjugp.export import _integrals, to_onnx
from conjugp.export._graph import OPSET, Scope
from conjugp.kernels import RBF, Kernel, Linear, Matern32, Normalised
from conjugp.likelihoods import Dirichlet, Heaviside, LogisticSoftmax, RobustMax, Softmax
from conjugp.likelihoods._lambda_integral import lambda_integral
from conjugp.likelihoods._orthant import largest

D, M = 3, 12
PRECISE = 1e-7  # what a float64 model is held to; asked for is 1e-5
SHIFT, SCALE = np.array([1e6, -3.0, 0.02]), np.array([1.0, 40.0, 1e-3])


def session(model: Any, optimised: bool = False) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        level = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def classifier(
    C: int = 3,
    kernel: Kernel | list[Kernel] | None = None,
    family: str = "full",
    likelihood: Any = LogisticSoftmax(),  # noqa: B008
    *,
    size: float = 3.0,
    temperature: float = 1.0,
    variance_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    n_covariance: int = M,
    seed: int = 0,
) -> GPClassifier:
    """A classifier that was never fitted: a random posterior in units as odd as any."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    given = kernel if isinstance(kernel, list) else [kernel or RBF((0.7, 1.3, 2.0), 4.0)]
    kernels = tuple(k.with_theta(k.theta.to(dtype)) for k in given)
    Z, w = normal(M, D), size * normal(C, M)
    L_inv = basis(tuple(given), Z[:n_covariance], None).L_inv
    full = basis(tuple(given), Z, None).L_inv
    S = torch.tril(0.3 * normal(C, n_covariance, n_covariance)) + 0.2 * torch.eye(n_covariance)
    R = {"full": S, "shared": S[:1], "diagonal": S.diagonal(dim1=1, dim2=2).abs()}
    R["none"] = torch.zeros(1, 0, 0)
    if family == "none":
        L_inv = L_inv[:, :0, :0]
    alpha = (full.mT @ w.unsqueeze(-1)).squeeze(-1)
    arrays = [x.to(dtype) for x in (Z, w, alpha, normal(C), L_inv)]
    covariance = family_of(family)(R[family].to(dtype))
    clf = GPClassifier(likelihood=likelihood)
    clf.classes_ = np.arange(C)
    shares = torch.arange(1.0, C + 1.0, dtype=torch.float64) / (C * (C + 1) / 2)
    model = Model(likelihood, likelihood.bounds[0], kernels, *arrays, covariance)
    model = model.with_calibration(Calibration(temperature, variance_scale), shares)
    clf._fitted = SimpleNamespace(model=model)  # type: ignore[assignment]
    clf._inputs = Inputs(Scaling(SHIFT, SCALE))
    clf.kernel_, clf.inducing_points_ = kernels[0], SHIFT + SCALE * Z.numpy()
    clf.n_features_in_, clf._prediction_seed = D, 0
    return clf


def inputs(n: int, seed: int = 1) -> np.ndarray:
    """Rows among the inducing points, at them, and far from all of them."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n, D)) * rng.choice([0.3, 1.0, 5.0], (n, 1))
    z[-1:] *= 1e4
    return SHIFT + SCALE * z


def compare(clf: GPClassifier, path: Any, X: np.ndarray, optimised: bool = False) -> float:
    """The largest difference of any probability; labels, sums and the file are checked too."""
    to_onnx(clf, path)
    onnx.checker.check_model(str(path), full_check=True)
    label, p = session(path, optimised).run(["label", "probabilities"], {"X": X})
    assert p.dtype == np.float64 and p.shape == (len(X), len(clf.classes_))
    assert np.all(p > 0)
    np.testing.assert_allclose(p.sum(axis=1), 1.0, atol=1e-12)
    expected = clf.predict_proba(X)
    sure = np.sort(expected, axis=1)[:, -2:] @ (-1.0, 1.0) > 1e-5
    np.testing.assert_array_equal(label[sure], clf.predict(X)[sure])
    return float(np.abs(p - expected).max())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


# --- the whole ------------------------------------------------------------------------------


def test_every_kernel(path, kernel):
    assert compare(classifier(kernel=kernel), path, inputs(20)) < PRECISE


@pytest.mark.parametrize("kind", [RBF, Matern32])
def test_a_feature_of_a_long_tail(path, kind):
    clf, X = classifier(kernel=kind((0.7, 1.3, 2e-7), 4.0)), inputs(20)
    clf.inducing_points_[5:] += SCALE * [0.0, 0.0, 1e4]
    model = clf._fitted.model
    model.Z[5:, 2] += 1e4
    X = np.concatenate([X, clf.inducing_points_[3:8] + 0.1 * SCALE * [1.0, 1.0, 1e-7]])
    assert compare(clf, path, X) < PRECISE


@pytest.mark.parametrize("variance_scale", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("family", ["full", "shared", "diagonal", "none"])
def test_every_covariance(path, family, variance_scale):
    clf = classifier(4, family=family, variance_scale=variance_scale, n_covariance=7)
    assert compare(clf, path, inputs(20)) < PRECISE


@pytest.mark.parametrize("family", ["full", "shared"])
def test_a_kernel_for_each_class(path, family):
    kernels: list[Kernel] = [RBF(0.5 + c, 2.0 + c) for c in range(4)]
    assert compare(classifier(4, kernels, family), path, inputs(20)) < PRECISE


@pytest.mark.parametrize(
    "likelihood",
    [LogisticSoftmax(), Softmax(), Dirichlet(), Heaviside(0.5), RobustMax(0.01)],
    ids=lambda likelihood: likelihood.name,
)
@pytest.mark.parametrize("family", ["full", "none"])
def test_every_likelihood(path, likelihood, family):
    clf = classifier(5, likelihood=likelihood, family=family)
    tolerance = 2e-6 if likelihood.name in ("heaviside", "robust-max") else PRECISE
    assert compare(clf, path, inputs(20)) < tolerance


@pytest.mark.parametrize("C", [2, 7, 10, 63, 64, 150])
@pytest.mark.parametrize("family", ["shared", "diagonal"])
def test_from_2_to_150_classes(path, C, family):
    """From 8 or 64 classes on predict_proba reads tables, which are good to 2.5e-6."""
    clf = classifier(C, family=family, size=4.0, temperature=0.7)
    assert compare(clf, path, inputs(40)) < (5e-6 if C >= 8 else PRECISE)


@pytest.mark.parametrize("temperature", [0.125, 0.6, 2.0, 8.0])
def test_temperatures(path, temperature):
    """At 8 the smallest probabilities count: 1e-24 becomes 1e-3."""
    clf = classifier(3, Linear(1.0, 9.0) + RBF(1.0, 2.0), temperature=temperature, size=6.0)
    assert clf.predict_proba(inputs(40)).min() < 1e-3
    assert compare(clf, path, inputs(40)) < PRECISE


@pytest.mark.parametrize("kernel", [RBF(1.0, 4.0), Normalised(RBF(1.0, 4.0)), Matern32(1.0, 4.0)])
def test_float32_models(path, kernel):
    clf = classifier(5, kernel, "shared", dtype=torch.float32)
    assert compare(clf, path, inputs(300)) < 1e-5
    assert compare(clf, path, inputs(300), optimised=True) < 1e-5


@pytest.mark.parametrize("n", [1, 819, 820, 1700])
def test_any_number_of_rows(path, n):
    """819 rows of 5 classes are one chunk."""
    clf = classifier(5)
    assert compare(clf, path, inputs(n)) < PRECISE


def test_a_row_does_not_depend_on_the_others(path):
    clf, X = classifier(3), inputs(30)
    to_onnx(clf, path)
    run = session(path).run
    together = run(["probabilities"], {"X": X})[0]
    alone = np.concatenate([run(["probabilities"], {"X": X[i : i + 1]})[0] for i in range(30)])
    np.testing.assert_allclose(alone, together, rtol=0, atol=1e-10)


def test_float32_inputs(path):
    """Cast before they are centred, so that no digit is lost that was there."""
    clf, X = classifier(3), inputs(30).astype(np.float32)
    to_onnx(clf, path, input_dtype="float32")
    onnx.checker.check_model(str(path), full_check=True)
    p = session(path).run(["probabilities"], {"X": X})[0]
    assert p.dtype == np.float32
    expected = clf.predict_proba(X.astype(np.float64))
    np.testing.assert_allclose(p, expected, rtol=0, atol=1e-6)


# --- fits -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted() -> GPClassifier:
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])
    with pytest.warns(ConvergenceWarning):
        return GPClassifier(n_inducing=20, max_epochs=3, random_state=0).fit(X, names[y])


def test_a_fit_with_its_file(path, fitted):
    X, _ = load_iris(return_X_y=True)
    assert compare(fitted, path, X, optimised=True) < 1e-6
    found = session(path)
    assert [i.name for i in found.get_inputs()] == ["X"]
    assert [o.name for o in found.get_outputs()] == ["label", "probabilities"]
    meta = found.get_modelmeta()
    assert meta.producer_name == "conjugp"
    about = meta.custom_metadata_map
    assert json.loads(about["classes"]) == ["setosa", "versicolor", "virginica"]
    assert float(about["temperature"]) == fitted.temperature_
    assert about["kernel"] == repr(fitted.kernel_)
    assert path.stat().st_size < 200_000


def test_a_decoupled_fit(path):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((330, 2)) * (1.0, 1e3)
    y = (X[:, 0] > 0) + 2 * (X[:, 1] > 0)
    settings = {"n_inducing": 310, "max_epochs": 1, "options": FitOptions(search=False)}
    clf = GPClassifier(RBF((1.0, 1e3), 5.0), covariance="shared", random_state=0, **settings)
    with pytest.warns(ConvergenceWarning):
        clf.fit(X, y)
    clf.variance_scale_ = 0.3
    assert compare(clf, path, X[:50]) < PRECISE


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (np.array([False, True]), [0, 1]),
        (np.array([1.0, 3.0]), [1, 3]),
        (np.array([-5, 2**40]), [-5, 2**40]),
        (np.array(["ä", "b c"]), ["ä", "b c"]),
        (np.array(["ja", "nein"], dtype=object), ["ja", "nein"]),
    ],
)
def test_labels(path, classes, expected):
    clf = classifier(2, RBF(1.0, 1.0), "none")
    clf.classes_ = classes
    to_onnx(clf, path)
    label, p = session(path).run(None, {"X": inputs(30)})
    assert set(label.tolist()) == set(expected)
    np.testing.assert_array_equal(label, np.array(expected)[p.argmax(axis=1)])


def test_constants_are_kept_once(path):
    """One more class costs its own weights and covariance, not another set of points."""
    sizes = []
    for C in (4, 5):
        to_onnx(classifier(C, [RBF(1.0 + c, 2.0) for c in range(C)]), path)
        sizes.append(path.stat().st_size)
    assert sizes[1] - sizes[0] < 8 * (2 * M * M + 2 * M + 3 * D) + 4000


# --- what is refused ------------------------------------------------------------------------


def test_what_cannot_be_exported(path):
    clf = classifier()
    clf.options = FitOptions(prediction="mc")
    with pytest.raises(ValueError, match=r"options.prediction='mc' predicts from random draws"):
        to_onnx(clf, path)

    class Own(RBF):
        pass

    with pytest.raises(ValueError, match="kernel Own is not one of"):
        to_onnx(classifier(kernel=Linear(1.0, 1.0) + Normalised(Own(1.0, 1.0))), path)

    class Likely(Softmax):
        pass

    with pytest.raises(ValueError, match="likelihood Likely is not one of"):
        to_onnx(classifier(likelihood=Likely()), path)
    with pytest.raises(TypeError, match="GibbsGPClassifier: its predictions are averages"):
        to_onnx(GibbsGPClassifier(), path)  # type: ignore[arg-type]
    with pytest.raises(NotFittedError):
        to_onnx(GPClassifier(), path)
    with pytest.raises(ValueError, match="input_dtype must be one of"):
        to_onnx(classifier(), path, input_dtype="float16")
    with pytest.raises(ValueError, match="path: there is no folder"):
        to_onnx(classifier(), path / "x.onnx")
    assert not path.exists()


def test_a_failure_leaves_the_old_file(path, monkeypatch):
    path.write_bytes(b"old")
    monkeypatch.setattr("conjugp.export._LARGEST", 10)
    with pytest.raises(ValueError, match="more than one ONNX file can hold"):
        to_onnx(classifier(), path)
    monkeypatch.undo()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        to_onnx(classifier(), path)
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]


def test_missing_onnx_is_named(path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ImportError, match=r'pip install "conjugp\[onnx\]"'):
        to_onnx(classifier(), path)


# --- the integrals --------------------------------------------------------------------------


def integral_session(integral: Any, C: int) -> onnxruntime.InferenceSession:
    scope = Scope()
    scope.rename(scope.op("Identity", integral(scope, scope.value("m"), scope.value("v"))), "p")
    declare = helper.make_tensor_value_info
    graph = scope.graph(
        [declare(name, TensorProto.DOUBLE, ["n", C]) for name in "mv"],
        [declare("p", TensorProto.DOUBLE, ["n", C])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    return session(model.SerializeToString())


C_INTEGRAL = 4
INTEGRALS = {
    "logistic-softmax": (
        lambda s, m, v: _integrals.lambda_integral(s, m, v, C_INTEGRAL, False),
        lambda_integral,
        1e-8,
    ),
    "softmax": (
        lambda s, m, v: _integrals.lambda_integral(s, m, v, C_INTEGRAL, True),
        lambda m, v: lambda_integral(m, v, softmax=True),
        1e-8,
    ),
    "largest": (_integrals.largest, largest, 2e-6),
}


@pytest.mark.parametrize("name", INTEGRALS)
@settings(max_examples=50)
@given(st.data())
def test_integrals(sessions, name, data):
    """Means from −1e4 to 1e4, variances from 1e-8 to 1e4, and within a row a factor of 1e6."""
    largest_v = 10.0 ** data.draw(st.floats(-2, 4))
    rows = st.lists(st.floats(-1, 1), min_size=C_INTEGRAL, max_size=C_INTEGRAL)
    m = np.array(data.draw(rows)) * 10.0 ** data.draw(st.floats(-2, 4))
    m += data.draw(st.sampled_from([0.0, -50.0, 30.0]))
    v = largest_v * 10.0 ** (-3.0 + 3.0 * np.array(data.draw(rows)))
    _, truth, tolerance = INTEGRALS[name]
    got = sessions[name].run(None, {"m": m[None], "v": v[None]})[0]
    expected = truth(torch.tensor(m)[None], torch.tensor(v)[None]).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def sessions() -> dict[str, onnxruntime.InferenceSession]:
    return {name: integral_session(make, C_INTEGRAL) for name, (make, _, _) in INTEGRALS.items()}


def test_nan_ends(sessions):
    """A mean that is no number has no probabilities, and the row beside it keeps its own."""
    for found in sessions.values():
        m = np.zeros((2, C_INTEGRAL))
        m[0] = np.nan
        p = found.run(None, {"m": m, "v": np.ones((2, C_INTEGRAL))})[0]
        assert np.isnan(p[0]).all()
        np.testing.assert_allclose(p[1], 1 / C_INTEGRAL, rtol=0, atol=1e-6)
