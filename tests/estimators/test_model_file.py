"""Model files: what was fitted comes back to the last bit, and nothing else is ever loaded."""

from __future__ import annotations

import json
import resource
import signal
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError

import conjugp
from conjugp import FitOptions, GPClassifier, load
from conjugp import kernels as k
from conjugp._persistence import files
from conjugp._persistence.files import FileFormatError
from conjugp._persistence.model_file import read_info, save
from conjugp.likelihoods import Dirichlet, Heaviside, RobustMax
from faces import decoupled, fixed, minibatch, toy
from samplers import quick

DATA = Path(__file__).parents[1] / "formats"
sys.path.append(str(Path(__file__).parents[2] / "bench"))

from soak_kills import kill_saves  # noqa: E402
from soak_models import base_models, fuzz_models  # noqa: E402

from customs import Cauchy, Noisy  # noqa: E402

X, Y = toy()
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
NEW = np.random.default_rng(1).normal(size=(20, 2)) * 3


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.conjugp"


@pytest.fixture(scope="module")
def clf():
    return fixed(n_inducing=8).fit(X, Y)


def again(clf: Any, path: Path, **how: Any) -> Any:
    clf.save(path)
    return load(path, **how)


def assert_same(a: Any, b: Any) -> None:
    """Every attribute and parameter that can be compared, and every prediction, to the last bit."""
    assert type(a) is type(b) and vars(a).keys() == vars(b).keys()
    for name in (n for n in vars(a) if not n.startswith("_")):
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)
        elif not isinstance(x, np.random.RandomState | FitOptions):
            assert x == y or repr(x) == repr(y), name
    np.testing.assert_array_equal(a.predict_proba(NEW), b.predict_proba(NEW))
    for x, y in zip(a.predict_latent(NEW), b.predict_latent(NEW), strict=True):
        np.testing.assert_array_equal(x, y)
    draws = [c.sample_latent(NEW[:3], 4, random_state=1) for c in (a, b)]
    np.testing.assert_array_equal(*draws)


# --- there and back -------------------------------------------------------------------------------

CASES: dict[str, Any] = {
    "learned": lambda: minibatch(max_epochs=3),
    "kernels of the classes": lambda: fixed(n_inducing=5, shared_kernel=False),
    "full GP": lambda: fixed(n_inducing=None),
    "ep": lambda: fixed(likelihood=Heaviside(0.5), inference="ep", n_inducing=6),
    "mc-vi": lambda: fixed(likelihood="softmax", inference="mc-vi", n_inducing=6),
    "robust-max": lambda: fixed(likelihood=RobustMax(learn_epsilon=True), n_inducing=6),
    "dirichlet": lambda: decoupled(likelihood=Dirichlet(0.02)),
    "shared": lambda: decoupled(temperature="auto"),
    "diagonal": lambda: decoupled(covariance="diagonal"),
    "mode": lambda: decoupled(covariance="none"),
    "float32": lambda: decoupled(n_inducing=30, batch_size=500),
    "monte carlo": lambda: fixed(options=FitOptions(prediction="qmc", n_samples=64)),
    "search": lambda: GPClassifier(covariance="shared", n_inducing=20, random_state=0),
    "gibbs": lambda: quick(),
    "sparse gibbs": lambda: quick(n_inducing=5, inducing="random"),
    "sampled kernels": lambda: quick(hyperparameters="sample", prior_mean="auto", n_samples=5),
    "gibbs, a kernel each": lambda: quick(kernel=[k.RBF(1.0, 2.0), k.Matern52(), k.RBF()]),
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name, path):
    rows, labels = (X, Y) if name != "float32" else toy(1100)
    clf = CASES[name]().fit(rows, labels)
    assert_same(clf, again(clf, path))


kernels = st.recursive(
    st.builds(
        lambda kind, length, variance: kind(length, variance),
        st.sampled_from([k.RBF, k.Matern12, k.Matern32, k.Matern52, k.Linear]),
        st.sampled_from([1.5, (0.7, 1.9)]),
        st.floats(0.5, 5.0),
    )
    | st.builds(k.RationalQuadratic, st.just(1.3), st.just(2.0), st.floats(0.5, 2.0)),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(k.Normalised, inner, st.sampled_from([None, (1.0, 2.5)])),
    ),
    max_leaves=3,
)
labels = st.sampled_from(
    [
        np.array([3, -1, 2**40]),
        np.array(["b", "ä", "long label, with 😀"]),
        np.array(["x", "yy", "z"], dtype=object),
        np.array([0.0, -2.0, 1e10]),
        np.array([0, 1, 2], dtype=np.int8),
        np.array([False, True, True]),
    ]
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kernel=kernels,
    names=labels,
    n_inducing=st.integers(1, 8),
    inducing=st.sampled_from(["kmeans", "random", X[:5], X[:5].tolist()]),
    prior_mean=st.sampled_from(["auto", -0.5, [0.1, 0.2, 0.3], np.array([0.0, 1.0, 2.0])]),
    covariance=st.sampled_from(["full", "shared", "diagonal", "none"]),
    seed=st.sampled_from([0, np.int64(3), None, "state"]),
    dtype=st.sampled_from(["float32", "float64"]),
    frame=st.booleans(),
)
def test_any_settings_there_and_back(
    path, kernel, names, n_inducing, inducing, prior_mean, covariance, seed, dtype, frame
):
    y = names[Y]
    C = len(np.unique(y))
    if np.ndim(prior_mean):
        prior_mean = prior_mean[:C]
    clf = GPClassifier(
        kernel,
        n_inducing=n_inducing,
        inducing=inducing,
        prior_mean=prior_mean,
        covariance=covariance,
        learn_hyperparameters=False,
        temperature=1.7,
        max_epochs=2,
        dtype=dtype,
        random_state=np.random.RandomState(3) if seed == "state" else seed,
        class_weight={label: 1.5 for label in np.unique(y)},
        options=FitOptions(n_covariance=3, callback=lambda p: None),
    )
    rows = pd.DataFrame(X, columns=["länge", "b"]) if frame else X
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf.fit(rows, y)
        found = again(clf, path)
        np.testing.assert_array_equal(clf.predict_proba(rows), found.predict_proba(rows))
        np.testing.assert_array_equal(clf.predict(rows), found.predict(rows))
    assert clf.kernel_ == found.kernel_ and clf.history_ == found.history_
    assert clf.classes_.dtype == found.classes_.dtype
    assert clf.elbo(rows, y) == found.elbo(rows, y)
    before, after = clf.get_params(deep=False), found.get_params(deep=False)
    for name, value in before.items():
        if name == "options":
            kept = {**value.get_params(), "callback": None}
            assert after[name].get_params() == kept
        elif name == "random_state" and seed == "state":
            assert after[name].randint(2**31) == value.randint(2**31)
        elif name in ("inducing", "prior_mean") and not isinstance(value, str | float):
            np.testing.assert_array_equal(after[name], value)
        else:
            assert after[name] == value, name


@pytest.mark.parametrize("changes", [{}, {"inference": "ep", "likelihood": "heaviside"}])
def test_streams_go_on(path, changes):
    a = GPClassifier(n_inducing=6, random_state=0, **changes)
    a.partial_fit(X[:30], Y[:30], classes=[0, 1, 2])
    b = again(a, path)
    for c in (a, b):
        c.partial_fit(X[30:], Y[30:]).calibrate(X, Y)
    assert_same(a, b)


def test_fits_go_on(path):
    for make in (
        lambda: fixed(warm_start=True, n_inducing=6),
        lambda: minibatch(warm_start=True, max_epochs=3),
    ):
        a = make().fit(X[:40], Y[:40])
        b = again(a, path)
        for c in (a, b):
            c.fit(X, Y)
            c.history_ = [{**report, "seconds": 0} for report in c.history_]
        assert_same(a, b)
        a.partial_fit(X[:9], Y[:9])
        b.partial_fit(X[:9], Y[:9])
        assert_same(a, b)


def test_a_sampler_keeps_what_its_diagnosis_needs(path):
    a = quick(hyperparameters="sample").fit(X[:20], Y[:20])
    b = again(a, path)
    for x, y in zip(a.traces().items(), b.traces().items(), strict=True):
        assert x[0] == y[0]
        np.testing.assert_array_equal(x[1], y[1])
    left, right = (c.to_arviz().log_likelihood["y"].values for c in (a, b))
    np.testing.assert_array_equal(left, right)


def test_a_loaded_model_can_be_saved_again(clf, path):
    first = again(clf, path)
    arrays, header = files.read(path)
    first.save(path)
    found, found_header = files.read(path)
    assert found_header == header and found.keys() == arrays.keys()
    assert all(found[name].tobytes() == arrays[name].tobytes() for name in arrays)


def test_information_without_the_model(clf, path):
    save(clf, path, extra={"columns": ["a", "b"], "nested": {"x": [1, None]}})
    info = read_info(path)
    assert list(info) == ["kind", "format", "version", "params", "summary", "extra"]
    assert info["kind"] == "GPClassifier" and info["version"] == conjugp.__version__
    assert info["extra"] == {"columns": ["a", "b"], "nested": {"x": [1, None]}}
    assert info["params"]["kernel"] == repr(clf.kernel) and info["params"]["prior_mean"] == -0.7
    assert info["summary"]["n_classes"] == 3 and info["summary"]["kernel"] == repr(clf.kernel_)
    assert json.loads(json.dumps(info)) == info


# --- other devices, other precisions, classes of one's own --------------------------------------


@pytest.mark.parametrize("make", [lambda: fixed(n_inducing=6), decoupled])
def test_another_precision(make, path):
    clf = make().fit(X, Y)
    narrow = again(clf, path, dtype="float32", device="cpu")
    assert narrow._fitted.model.Z.dtype == narrow._fitted.state.q.P.dtype == torch.float32
    assert narrow.dtype == "float32" and narrow.device == "cpu"
    np.testing.assert_allclose(narrow.predict_proba(NEW), clf.predict_proba(NEW), atol=2e-5)
    wide = again(narrow, path, dtype="float64")
    assert wide._fitted.model.Z.dtype == torch.float64
    np.testing.assert_allclose(wide.predict_proba(NEW), narrow.predict_proba(NEW), atol=2e-5)


def test_a_model_of_a_gpu_that_is_not_here(clf, path):
    save(clf, path)
    arrays, header = files.read(path)
    header["summary"]["device"], header["arguments"]["device"] = "cuda:7", "cuda:7"
    files.write(path, arrays, header)
    if not torch.cuda.is_available():
        found = load(path)
        assert found.device == "cuda:7" and found._fitted.model.Z.device.type == "cpu"
        with pytest.raises(ValueError, match="finds no CUDA device"):
            load(path, device="cuda")


def test_what_cannot_be_asked_of_load(clf, path):
    clf.save(path)
    with pytest.raises(ValueError, match="dtype must be one of"):
        load(path, dtype="float16")
    with pytest.raises(ValueError, match="device must be"):
        load(path, device="nowhere")
    with pytest.raises(TypeError, match="custom must hold classes"):
        load(path, custom=[k.RBF(1.0, 1.0)])  # type: ignore[list-item]
    quick(n_samples=4, n_warmup=1).fit(X[:9], Y[:9]).save(path)
    with pytest.raises(ValueError, match="on the CPU in float64 alone"):
        load(path, dtype="float32")


def test_classes_of_ones_own(path, monkeypatch):
    kernel = Cauchy(1.5, 2.0, power=1) + k.RBF(1.0, 1.0)
    clf = fixed(kernel=kernel, likelihood=Noisy(0.2), n_inducing=6).fit(X, Y)
    assert_same(clf, again(clf, path, custom=[Cauchy, Noisy]))
    with pytest.raises(FileFormatError, match=r"customs\.Cauchy.*custom=\[Cauchy\]"):
        load(path)
    with pytest.raises(FileFormatError, match=r"customs\.Noisy"):
        load(path, custom=[Cauchy])
    # A class that has moved to another module since is still the one that was given.
    monkeypatch.setattr(Cauchy, "__module__", "elsewhere.kernels")
    assert load(path, custom=[Cauchy, Noisy]).kernel == kernel


def test_a_file_cannot_name_what_is_to_be_imported(clf, path):
    clf.save(path)
    arrays, header = files.read(path)
    header["fitted"]["likelihood"] = {"object": "antigravity.Thing", "fields": {}}
    files.write(path, arrays, header)
    with pytest.raises(FileFormatError, match=r"antigravity\.Thing, which is not part of conjugp"):
        load(path)
    assert "antigravity" not in sys.modules


# --- what is refused ----------------------------------------------------------------------------


def test_only_fitted_classifiers_of_ours(path):
    with pytest.raises(NotFittedError):
        GPClassifier().save(path)

    class Own(GPClassifier):
        pass

    with pytest.raises(TypeError, match="only GPClassifier and GibbsGPClassifier"):
        Own(k.RBF(1.0, 1.0), learn_hyperparameters=False, n_inducing=3).fit(X, Y).save(path)
    assert not path.exists()


def test_what_cannot_be_written_leaves_no_file(clf, path):
    with pytest.raises(TypeError, match="extra must be a dict"):
        save(clf, path, extra=[1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="extra must be plain"):
        save(clf, path, extra={"x": {1, 2}})
    with pytest.raises(ValueError, match="extra must be plain"):
        save(clf, path, extra={"x": float("nan")})
    with pytest.raises(ValueError, match=r"path.*there is no folder"):
        clf.save(path / "further")
    odd = np.random.RandomState(np.random.PCG64(1))
    with pytest.raises(TypeError, match="random_state: a RandomState of PCG64"):
        fixed(n_inducing=3, random_state=odd).fit(X, Y).save(path)
    with pytest.raises(ValueError, match="n_inducing must be a whole number"):
        fixed(n_inducing=3).fit(X, Y).set_params(n_inducing=-1).save(path)
    assert not list(path.parent.iterdir())


def test_other_files(clf, path):
    with pytest.raises(FileNotFoundError):
        load(path)
    path.write_bytes(b"\x80\x04\x95")  # how a pickle begins
    with pytest.raises(FileFormatError, match="damaged or not a conjugp file"):
        load(path)
    files.write(path, {}, {"kind": "gibbs checkpoint", "format": 1})
    with pytest.raises(FileFormatError, match="not a model file but a gibbs checkpoint"):
        load(path)
    files.write(path, {}, [1])
    with pytest.raises(FileFormatError, match="not a model file"):
        load(path)


@pytest.mark.parametrize("kind", ["fit checkpoint", "gibbs checkpoint"])
def test_a_large_file_of_another_kind_is_refused_by_its_header(path, kind, monkeypatch):
    files.write(path, {"a": np.ones(3)}, {"kind": kind, "format": 1})
    monkeypatch.setattr(files, "_sums", lambda arrays: pytest.fail("arrays were read"))
    for read in (load, read_info):
        with pytest.raises(FileFormatError, match=f"not a model file but a {kind}"):
            read(path)


def test_a_newer_format(clf, path):
    clf.save(path)
    arrays, header = files.read(path)
    files.write(path, arrays, {**header, "format": 2, "version": "9.9", "more": 1})
    for read in (load, read_info):
        with pytest.raises(FileFormatError, match=r"format 2.*conjugp 9\.9.*install a newer"):
            read(path)
    for odd in (0, True, "1", None, 1.0):
        files.write(path, arrays, {**header, "format": odd})
        with pytest.raises(FileFormatError, match="no format that is known"):
            load(path)


def raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_a_file_takes_no_more_memory_than_it_has(path):
    """Shapes that nothing stands behind, text that would be padded, nesting without end."""
    huge = {"0": {"dtype": "F64", "shape": [10**6, 10**6], "data_offsets": [0, 8 * 10**12]}}
    raw(path, json.dumps(huge).encode(), bytes(64))
    with pytest.raises(FileFormatError):
        load(path)
    nested = json.dumps({"__metadata__": {"conjugp": "[" * 100_000, "sum": "0"}}).encode()
    raw(path, nested)
    with pytest.raises(FileFormatError):
        load(path)
    raw(path, b"[" * 100_000)
    with pytest.raises(FileFormatError):
        load(path)


def test_a_seed_beyond_its_end_is_refused(path):
    """NumPy would read any memory from there."""
    fixed(n_inducing=3, random_state=np.random.RandomState(0)).fit(X, Y).save(path)
    arrays, header = files.read(path)
    header["arguments"]["random_state"]["map"]["random state"]["map"]["pos"] = 10**9
    files.write(path, arrays, header)
    with pytest.raises(FileFormatError, match="random_state is out of range"):
        load(path)


@pytest.fixture(scope="module")
def models():
    return base_models()


def test_damaged_and_forged_files(models):
    """A share of bench/soak.py, through the same functions."""
    found = fuzz_models(280, 1, models)
    assert found["passed"], found
    assert found["damaged"]["refused"] > 250 and found["forged"]["refused"] > 70


def test_every_truncation_is_refused(models, path):
    data = models["coupled"].data
    for n in range(0, len(data), 23):
        path.write_bytes(data[:n])
        with pytest.raises(FileFormatError):
            load(path)


# --- writing that fails ---------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_model(clf, path):
    clf.save(path)
    whole = path.read_bytes()
    larger = fixed(n_inducing=40).fit(X, Y)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (0, 1, len(whole) // 2, len(whole) + 1000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            try:
                with pytest.raises(OSError, match=r"could not be written|File too"):
                    larger.save(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert path.read_bytes() == whole
            assert [p.name for p in path.parent.iterdir()] == [path.name]
    finally:
        signal.signal(signal.SIGXFSZ, handler)


def test_killed_while_saving():
    found = kill_saves(4, 0)
    assert found["passed"], found


# --- older files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(DATA.glob("*.conjugp")), ids=lambda p: p.stem)
def test_files_of_every_format_load(file):
    form, name = file.stem.rsplit("-", 1)
    expected = json.loads((DATA / f"{form}.json").read_text())
    clf = load(file)
    proba = clf.predict_proba(np.array(expected["rows"]))
    np.testing.assert_allclose(proba, expected["proba"][name], atol=1e-6)
    assert clf.classes_.tolist() == ["a", "bb", "ccc"]
    assert read_info(file)["extra"] == {"made by": "make_models.py"}


def test_there_is_a_file_of_every_format():
    kinds = {path.stem.rsplit("-", 1)[1] for path in DATA.glob("format-1-*.conjugp")}
    assert kinds == {"coupled", "decoupled", "gibbs"}


def test_a_loaded_model_predicts_in_another_process(clf, path):
    clf.save(path)
    code = "import sys, conjugp, numpy; X = numpy.load(sys.argv[2])"
    code += "; print(conjugp.load(sys.argv[1]).predict_proba(X).tobytes().hex())"
    np.save(path.with_suffix(".npy"), NEW)
    argv = [sys.executable, "-c", code, str(path), str(path.with_suffix(".npy"))]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert out.strip() == clf.predict_proba(NEW).tobytes().hex()
