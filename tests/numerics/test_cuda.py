"""The C++ that GPUs run element by element, compiled for this machine, against `expectations`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import torch

from conjugp._numerics import cuda as launches
from conjugp._numerics import expectations as numerics
from conjugp.likelihoods._log_sum import QUICK, _window

# What CUDA's library has and C++'s does not; precise where the formulas use it.
SHIM = """
#include <cmath>
using namespace std;
template <typename T> T erfcx(T x) {
    if (x < 20) return exp(x * x) * erfc(x);
    const T y = 1 / (x * x);
    return 0.5641895835477563 / x
        * (1 - y / 2 * (1 - 3 * y / 2 * (1 - 5 * y / 2 * (1 - 7 * y / 2))));
}
"""
LOOP = """
extern "C" void run(int n, double* m, double* v, double* o) {
    for (int i = 0; i < n; ++i) {
        double* p = o + 7 * i;
        double s[3] = {0, 0, 0}, t[3];
        for (int lane = 0; lane < 32; ++lane) {
            moment_sums<double>(m[i], v[i], lane, t[0], t[1], t[2]);
            for (int j = 0; j < 3; ++j) s[j] += t[j];
            p[6] += log_sigmoid_sums<double>(m[i], v[i], lane);
        }
        logistic_moments<double>(
            m[i], v[i], s[0], s[1], s[2], p[0], p[1], p[2], p[3], p[4], p[5]
        );
    }
}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """m, v and what the compiled functions say, (7, n)."""
    folder = tmp_path_factory.mktemp("launches")
    source, library = folder / "k.cpp", folder / "k.so"
    source.write_text(SHIM + launches.MOMENT_SUMS + launches.MOMENTS + launches.LOG_SIGMOID + LOOP)
    compiler = shutil.which("c++")
    assert compiler is not None
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    rng = np.random.default_rng(0)
    m = np.concatenate([rng.standard_normal(3000) * 10 ** rng.uniform(-3, 4, 3000), np.zeros(50)])
    v = 10 ** rng.uniform(-8, 6, len(m))
    out = np.zeros((len(m), 7))
    pointers = (ctypes.c_void_p(x.ctypes.data) for x in (m, v, out))
    ctypes.CDLL(str(library)).run(len(m), *pointers)
    return torch.tensor(m), torch.tensor(v), torch.tensor(out).T


@pytest.mark.compiler
def test_moments(found):
    m, v, out = found
    expected = numerics.logistic_moments(m, v)
    for name, x, y in zip(expected._fields, out, expected, strict=False):
        # E[σ''] is a difference of the others.
        tol = (
            {"rtol": 0.0, "atol": 1e-12} if name == "curvature" else {"rtol": 1e-9, "atol": 1e-300}
        )
        torch.testing.assert_close(x, y, **tol)


@pytest.mark.compiler
def test_log_sigmoid(found):
    m, v, out = found
    torch.testing.assert_close(out[6], numerics.expected_log_sigmoid(m, v), rtol=1e-12, atol=1e-12)


@pytest.mark.compiler
def test_falls(tmp_path):
    """By the quick rule, whose nodes they have, to what float32 holds."""
    source, library = tmp_path / "k.cpp", tmp_path / "k.so"
    shim = (
        "#include <cmath>\nusing namespace std;\nfloat rsqrtf(float x) { return 1 / sqrtf(x); }\n"
    )
    loop = """
    extern "C" void run(int n, double* m, double* v, double* t, double* o) {
        for (int i = 0; i < n; ++i) falls<double>(m[i], v[i], t[i], o[3*i], o[3*i+1], o[3*i+2]);
    }
    """
    source.write_text(shim + launches.FALLS + loop)
    compiler = shutil.which("c++")
    assert compiler is not None
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    rng = np.random.default_rng(0)
    n = 3000
    v = 10 ** rng.uniform(-8, 4, n)
    m = rng.standard_normal(n) * 10 ** rng.uniform(-1, 4, n)
    t = np.maximum(rng.uniform(-6.0, 6.0, n) * (1.0 + np.sqrt(v)) - np.minimum(m, 0.0), -8.0)
    out = np.zeros((n, 3))
    pointers = (ctypes.c_void_p(x.ctypes.data) for x in (m, v, t, out))
    ctypes.CDLL(str(library)).run(n, *pointers)
    args = (torch.tensor(x).unsqueeze(-1) for x in (m, v, t))
    for found, expected in zip(out.T, _window(*args, QUICK), strict=True):
        assert float((torch.tensor(found) - expected.squeeze(-1)).abs().max()) < 1e-5


def test_names_are_found():
    """torch reads the name of a function out of its text."""
    from torch.cuda.jiterator import _CodeParser

    assert _CodeParser(launches.MOMENT_SUMS).function_name == "moment_sums"
    assert _CodeParser(launches.MOMENTS).function_name == "logistic_moments"
    assert _CodeParser(launches.LOG_SIGMOID).function_name == "log_sigmoid_sums"
    assert launches.LANES == 32  # as in the text
    assert not launches.serves(torch.zeros(1))


def test_tails_from_a_device_are_those_of_the_cpu(monkeypatch):
    g = torch.Generator().manual_seed(0)
    m = 20.0 * torch.randn(400, generator=g, dtype=torch.float64)
    v = torch.exp(2.0 * torch.randn(400, generator=g, dtype=torch.float64))
    m[0] = 0.0
    here, moments = numerics.logistic_tails(m, v), numerics.logistic_moments(m, v)
    monkeypatch.setattr(launches, "serves", lambda x: True)
    monkeypatch.setattr(launches, "logistic_moments", lambda m, v: moments)
    for a, b in zip(numerics.logistic_tails(m, v), here, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
