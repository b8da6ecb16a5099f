"""Kernels: the contract every exported kernel keeps, and each one against scikit-learn."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sklearn.base import BaseEstimator, clone
from sklearn.gaussian_process import kernels as sk

from conjugp.kernels import (
    RBF,
    Kernel,
    Lengths,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Normalised,
    Positive,
    Product,
    RationalQuadratic,
    Stationary,
    Sum,
)
from conjugp.kernels._columns import Columns
from conjugp.kernels._parameters import FREE

STATIONARY = [RBF, Matern12, Matern32, Matern52, RationalQuadratic]
ARD = [0.7, 1.3, 2.0]


def parts_of(kernel: Kernel) -> list[Kernel]:
    if isinstance(kernel, Normalised | Columns):
        return parts_of(kernel.kernel)
    return [p for part in getattr(kernel, "parts", ()) for p in parts_of(part)] or [kernel]


def seen_by(kernel: Kernel, n: int = 3) -> list[int]:
    """How many features every one of `parts_of` sees, of n."""
    inner = getattr(kernel, "parts", (kernel.kernel,) if hasattr(kernel, "kernel") else ())
    n = len(kernel.columns) if isinstance(kernel, Columns) else n
    return [m for part in inner for m in seen_by(part, n)] or [n]


# --- the contract -------------------------------------------------------------------------------


def test_shape_and_dtype(kernel, X, Z):
    assert kernel(X, Z).shape == (9, 5)
    assert kernel.diag(X).shape == (9,)
    for dtype in (torch.float32, torch.float64):
        assert kernel(X.to(dtype), Z.to(dtype)).dtype == dtype
        assert kernel.diag(X.to(dtype)).dtype == dtype


def test_diag_is_the_diagonal(kernel, X):
    assert_allclose(kernel.diag(X), kernel(X, X).diagonal(), rtol=1e-12)
    assert_allclose(kernel.diag(X), kernel(X, X.clone()).diagonal(), rtol=3e-7)


def test_symmetric_and_positive_semidefinite(kernel, X, Z):
    assert_allclose(kernel(X, Z), kernel(Z, X).T, rtol=1e-10, atol=1e-12)
    points = torch.cat([X, Z, X[:3]])
    assert torch.linalg.eigvalsh(kernel(points, points.clone())).min() > -1e-7
    assert torch.linalg.eigvalsh(kernel(X, X)).min() > -1e-12


@pytest.mark.parametrize("kind", [RBF, Matern12, Matern32, Matern52])
def test_distances_end_where_a_correlation_is_lost_beside_one(kind):
    far = torch.tensor([kind.farthest], dtype=torch.float64)
    left = float(kind(1.0, 1.0).of_distance(far.clone()))
    assert 1e-18 < left < np.finfo(np.float64).eps / 2
    X = torch.tensor([[0.0], [128.0]])
    value = kind(1.0, 1.0)(X[:1], X)[0]
    assert value[0] == 1 and float(value[1]) == pytest.approx(left, rel=1e-5)
    assert left > 1e15 * torch.finfo(torch.float32).tiny  # products with it are not subnormal


def test_rows_do_not_depend_on_one_another(kernel, X, Z):
    whole = kernel(X, Z)
    assert_allclose(kernel(X[2:3], Z), whole[2:3], rtol=1e-12, atol=1e-14)
    assert_allclose(kernel(X, Z[1:2]), whole[:, 1:2], rtol=1e-10, atol=1e-12)


def test_stationary_kernels_do_not_see_a_shift(kernel, X, Z):
    same = torch.allclose(kernel(X + 3.0, Z + 3.0), kernel(X, Z), rtol=1e-9)
    assert same == kernel.stationary
    constant = torch.allclose(kernel.diag(X), kernel.diag(X)[0], rtol=1e-12, atol=0.0)
    assert constant == (kernel.stationary or isinstance(kernel, Normalised))


def test_inputs_are_left_as_they_were(kernel, X, Z):
    before = X.clone(), Z.clone()
    kernel(X, Z), kernel(X, X), kernel.diag(X)
    assert torch.equal(X, before[0]) and torch.equal(Z, before[1])


def test_gradients_in_parameters_and_inputs(kernel, X, Z):
    theta = kernel.theta.requires_grad_()
    X, Z = X[:4].requires_grad_(), Z.requires_grad_()
    assert torch.autograd.gradcheck(lambda t, x, z: kernel.with_theta(t)(x, z), (theta, X, Z))
    assert torch.autograd.gradcheck(lambda t, x: kernel.with_theta(t).diag(x), (theta, X))
    assert torch.autograd.gradcheck(lambda t, x: kernel.with_theta(t)(x, x), (theta, X))


def test_gradients_in_parameters_alone(kernel, X, Z):
    theta = kernel.theta.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: kernel.with_theta(t)(X, Z), theta)


def test_gradients_in_one_input_alone(kernel, X, Z):
    theta, z = kernel.theta.requires_grad_(), Z.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t, z: kernel.with_theta(t)(X, z), (theta, z))
    assert torch.autograd.gradcheck(lambda t, z: kernel.with_theta(t)(z, X), (theta, z))
    assert torch.autograd.gradcheck(lambda z: kernel(z, X), z)


def test_gradients_where_points_coincide(kernel, Z):
    # The same points in another tensor must give the gradient that finite differences confirm
    # for kernel(Z, Z) above; differences themselves are noise at the kink of Matérn 1/2.
    jacobian = torch.autograd.functional.jacobian
    other = jacobian(lambda t: kernel.with_theta(t)(Z.clone(), Z), kernel.theta)
    assert_allclose(other, jacobian(lambda t: kernel.with_theta(t)(Z, Z), kernel.theta), atol=1e-7)
    for dtype in (torch.float32, torch.float64):
        x = Z.to(dtype).requires_grad_()
        z = Z.to(dtype).repeat(2, 1).requires_grad_()
        t = kernel.theta.to(dtype).requires_grad_()
        grads = torch.autograd.grad(kernel.with_theta(t)(x, z).sum(), (t, x, z))
        assert all(g.isfinite().all() for g in grads)


def test_theta_round_trip(kernel):
    theta = kernel.theta
    assert theta.dtype == torch.float64 and theta.shape == (kernel.n_theta,)
    assert_allclose(kernel.with_theta(theta).theta, theta, rtol=0, atol=1e-12)
    again = kernel.with_theta(theta).frozen()
    assert type(again) is type(kernel)
    assert_allclose(again.theta, theta, rtol=0, atol=1e-12)


def test_theta_keeps_graph_and_dtype(kernel):
    theta = kernel.theta.float().requires_grad_()
    new = kernel.with_theta(theta)
    assert new.theta.dtype == torch.float32
    (grad,) = torch.autograd.grad(new.theta.sum(), theta)
    assert_allclose(grad, torch.ones_like(theta), rtol=1e-6)


def test_theta_is_bounded(kernel, X, Z):
    for extreme in (-1e3, 1e3):
        far = kernel.with_theta(torch.full((kernel.n_theta,), extreme))
        assert far.theta.abs().max() == pytest.approx(30.0)
    with pytest.raises(ValueError, match="theta must have shape"):
        kernel.with_theta(torch.zeros(kernel.n_theta + 1))


def test_to_units(kernel, X, Z):
    scale = np.array([0.01, 3.0, 1e4])
    converted = kernel.to_units(scale)
    x, z = X * torch.tensor(scale), Z * torch.tensor(scale)
    assert_allclose(converted(x, z), kernel(X, Z), rtol=1e-10)
    assert_allclose(converted.diag(x), kernel.diag(X), rtol=1e-10)
    back = converted.to_units(1 / scale)
    assert_allclose(back(X, Z), kernel(X, Z), rtol=1e-10)
    assert torch.equal(kernel.to_units(torch.tensor(scale))(x, z), converted(x, z))


def test_to_units_keeps_isotropy_where_it_can(kernel, X, Z):
    constant = kernel.to_units(np.full(3, 2.5))
    assert_allclose(constant(2.5 * X, 2.5 * Z), kernel(X, Z), rtol=1e-10)
    for before, after in zip(parts_of(kernel), parts_of(constant), strict=True):
        assert np.shape(before.lengthscale) == np.shape(after.lengthscale)
    if not isinstance(kernel, Normalised):  # whose lengthscales are those of a sphere
        converted = kernel.to_units(np.array([1.0, 1.0, 2.0]))
        for part, n in zip(parts_of(converted), seen_by(kernel), strict=True):
            assert np.shape(part.lengthscale) == ((n,) if n > 1 else ())


def test_to_units_keeps_the_graph(kernel, X, Z):
    theta = kernel.theta.requires_grad_()
    scale = np.array([0.5, 2.0, 4.0])
    converted = kernel.with_theta(theta).to_units(scale)
    (grad,) = torch.autograd.grad(converted(X, Z).sum(), theta)
    direct = kernel.with_theta(theta)(X / torch.tensor(scale), Z / torch.tensor(scale))
    (expected,) = torch.autograd.grad(direct.sum(), theta)
    assert_allclose(grad, expected, rtol=1e-8, atol=1e-12)


def test_immutable(kernel):
    with pytest.raises(FrozenInstanceError):
        kernel.parts = ()
    for part in parts_of(kernel):
        with pytest.raises(FrozenInstanceError):
            part.lengthscale = 3.0
        if isinstance(part.lengthscale, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                part.lengthscale[0] = 3.0


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k)), copy.copy, Kernel.frozen]
)
def test_copies_are_equal_and_still_immutable(kernel, duplicate, X, Z):
    twin = duplicate(kernel)
    assert twin == kernel and hash(twin) == hash(kernel) and repr(twin) == repr(kernel)
    assert torch.equal(twin(X, Z), kernel(X, Z))
    test_immutable(twin)


def test_scikit_learn_clones_it(kernel):
    class Holder(BaseEstimator):
        def __init__(self, kernel=None):
            self.kernel = kernel

    assert clone(Holder(kernel)).kernel == kernel


def test_frozen_is_plain(kernel):
    theta = kernel.theta.float().requires_grad_()
    for part in parts_of(kernel.with_theta(theta).frozen()):
        assert isinstance(part.variance, float)
        assert isinstance(part.lengthscale, float | np.ndarray)


def test_different_kernels_differ(kernel):
    assert kernel != kernel.to_units(np.array([2.0, 2.0, 3.0]))
    assert kernel != RBF(99.0, 1.0)
    assert kernel != "kernel"


def test_repr_is_the_call(kernel):
    assert eval(repr(kernel)) == kernel


def test_filled_leaves_what_is_set(kernel):
    assert kernel.filled(torch.ones(3), 5.0) == kernel


# --- values -------------------------------------------------------------------------------------

SKLEARN = [
    (RBF, {}, lambda length: sk.RBF(length)),
    (Matern12, {}, lambda length: sk.Matern(length, nu=0.5)),
    (Matern32, {}, lambda length: sk.Matern(length, nu=1.5)),
    (Matern52, {}, lambda length: sk.Matern(length, nu=2.5)),
]


@pytest.mark.parametrize("lengthscale", [0.4, ARD], ids=["isotropic", "ard"])
@pytest.mark.parametrize(
    ("ours", "extra", "theirs"), SKLEARN, ids=lambda p: getattr(p, "__name__", "")
)
def test_against_scikit_learn(ours, extra, theirs, lengthscale, X, Z):
    kernel, reference = ours(lengthscale, 2.3, **extra), 2.3 * theirs(lengthscale)
    farthest = kernel.of_distance(torch.tensor(kernel.farthest, dtype=torch.float64))
    expected = np.maximum(reference(X.numpy(), Z.numpy()), 2.3 * float(farthest))
    assert_allclose(kernel(X, Z), expected, rtol=1e-12)
    assert_allclose(kernel.diag(X), reference.diag(X.numpy()), rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 20.0])
def test_rational_quadratic_against_scikit_learn(alpha, X, Z):
    reference = 2.3 * sk.RationalQuadratic(length_scale=0.8, alpha=alpha)
    kernel = RationalQuadratic(0.8, 2.3, alpha)
    assert_allclose(kernel(X, Z), reference(X.numpy(), Z.numpy()), rtol=1e-12)
    assert_allclose(kernel.diag(X), reference.diag(X.numpy()), rtol=1e-12)


def test_rational_quadratic_tends_to_rbf(X, Z):
    assert_allclose(RationalQuadratic(0.8, 1.0, 1e9)(X, Z), RBF(0.8, 1.0)(X, Z), rtol=1e-6)


def test_linear_against_scikit_learn(X, Z):
    reference = 2.3 * sk.DotProduct(sigma_0=0.0)
    scale = np.array(ARD)
    assert_allclose(
        Linear(ARD, 2.3)(X, Z), reference(X.numpy() / scale, Z.numpy() / scale), rtol=1e-12
    )
    assert_allclose(Linear(1.0, 2.3).diag(X), reference.diag(X.numpy()), rtol=1e-12)


def test_sum_and_product_are_sums_and_products(X, Z):
    a, b, c = RBF(0.5, 2.0), Linear(ARD, 0.3), Matern32(1.0, 1.5)
    assert_allclose((a + b * c)(X, Z), a(X, Z) + b(X, Z) * c(X, Z), rtol=1e-14)
    assert_allclose((a + b * c).diag(X), a.diag(X) + b.diag(X) * c.diag(X), rtol=1e-14)
    assert (a + b) + c == a + (b + c) == Sum((a, b, c))
    assert (a * b) * c == a * (b * c) == Product((a, b, c))
    assert not (a + b).stationary and (a * c).stationary


@pytest.mark.parametrize("lengthscale", [0.4, ARD], ids=["isotropic", "ard"])
@pytest.mark.parametrize("same", [False, True])
def test_fused_rbf_is_the_plain_one(lengthscale, same, X, Z):
    kernel = RBF(lengthscale, 2.3)

    def value_and_gradients(formula):
        theta, x, z = (t.clone().requires_grad_() for t in (kernel.theta, X, Z))
        K = formula(kernel.with_theta(theta), x, x if same else z)
        upstream = torch.linspace(-1, 2, K.numel(), dtype=K.dtype).reshape(K.shape)
        inputs = (theta, x) if same else (theta, x, z)
        return K.detach(), *torch.autograd.grad(K, inputs, upstream)

    fused, plain = value_and_gradients(RBF.__call__), value_and_gradients(Stationary.__call__)
    for ours, theirs in zip(fused, plain, strict=True):
        assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cls", STATIONARY)
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_float32_far_from_the_origin(cls, offset):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 20, generator=generator) + offset
    Z = torch.cat([torch.randn(30, 20, generator=generator) + offset, X[:5]])
    kernel = cls(math.sqrt(20), 1.0)
    # Matérn 1/2 alone has a kink where points meet: its error there is the root of the others'.
    atol = 3e-3 if cls is Matern12 else 3e-6
    assert_allclose(kernel(X, Z), kernel(X.double(), Z.double()), rtol=0, atol=atol)
    assert_allclose(kernel(X, X).diagonal(), kernel.diag(X), rtol=1e-7)


def long_tailed(n: int, seed: int = 0) -> torch.Tensor:
    """Rows with one feature of a long tail, one that is mostly zero, and pairs of them close by."""
    g = torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    g[:, 0] = torch.exp(5 * g[:, 0])
    g[:, 1] = torch.where(g[:, 1] > 1, 1e12, 0.0) + g[:, 1]
    return torch.cat([g, g + 0.3 * g.roll(1, 1).tanh()])


def by_differences(kernel: Stationary, X: torch.Tensor, Z: torch.Tensor) -> torch.Tensor:
    """The same kernel with every distance from a difference, in float64."""
    gap = (X.double()[:, None] - Z.double()) / kernel.parameter("lengthscale", X.double())
    r2 = gap.square().sum(2).clamp(1e-300, kernel.farthest)
    return kernel.of_distance(r2) * kernel.parameter("variance", X.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cls", STATIONARY)
def test_a_long_tail_costs_no_digits(cls, dtype):
    X = long_tailed(60).to(dtype)
    kernel = cls([0.7, 1.3, 2.0, 1.1, 0.9, 1.5], 1.5)
    # Matérn 1/2 alone has a kink where points meet: its error there is the root of the others'.
    atol = {torch.float32: 1e-6, torch.float64: 1e-7}[dtype] ** (0.5 if cls is Matern12 else 1)
    for Z in (X[:40].clone(), X):
        K = kernel(X, Z)
        assert K.dtype == dtype
        assert_allclose(K, by_differences(kernel, X, Z), rtol=0, atol=atol)
    assert_allclose(kernel(X, X).diagonal(), kernel.diag(X), rtol=1e-7)
    least = torch.linalg.eigvalsh(kernel(X.double(), X.double())).min()
    assert least > -1e-10


@pytest.mark.parametrize("cls", STATIONARY)
def test_a_long_tail_costs_gradients_no_digits(cls):
    wide = long_tailed(20)
    kernel = cls([0.7, 1.3, 2.0, 1.1, 0.9, 1.5], 1.5)

    def gradients(formula, dtype):
        theta = kernel.theta.to(dtype).requires_grad_()
        x, z = (t.float().to(dtype).requires_grad_() for t in (wide, wide[10:30] + 0.2))
        K = formula(kernel.with_theta(theta), x, z)
        upstream = torch.linspace(-1, 2, K.numel(), dtype=K.dtype).reshape(K.shape)
        return torch.autograd.grad(K, (theta, x, z), upstream)

    found = gradients(lambda k, x, z: k(x, z), torch.float32)
    expected = gradients(by_differences, torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        assert_allclose(ours, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("cls", [RBF, Matern52])
def test_far_points_on_one_side_cost_no_digits(cls):
    X, Z = long_tailed(60).float(), torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    kernel = cls([0.7, 1.3, 2.0, 1.1, 0.9, 1.5], 1.5)
    assert_allclose(kernel(X, Z), by_differences(kernel, X, Z), rtol=0, atol=3e-6)
    assert_allclose(kernel(Z, X), by_differences(kernel, Z, X), rtol=0, atol=3e-6)
    assert kernel(X[:0], Z).shape == (0, 9) and kernel(Z, X[:0]).shape == (9, 0)


@pytest.mark.parametrize("cls", STATIONARY)
@pytest.mark.parametrize("length", [1e-13, 1.0, 1e13])
def test_the_largest_rows_stay_finite_in_float32(cls, length):
    X = torch.tensor([[1e18, 0.0], [1e18, 1.0], [-1e18, 0.0], [0.0, 0.0], [1e-18, 1e-18]])
    theta = cls(length, 1.0).theta.float().requires_grad_()
    for Z in (X, X[3:], X[:3]):
        K = cls(length, 1.0).with_theta(theta)(X, Z)
        (grad,) = torch.autograd.grad(K.sum(), theta)
        assert K.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("cls", STATIONARY)
def test_extreme_parameters_stay_finite_in_float32(cls, X, Z):
    for length in (1e-13, 1e13):
        value = cls(length, 1.0)(X.float(), Z.float())
        assert value.isfinite().all() and (value >= 0).all() and (value <= 1).all()


@given(
    points=st.lists(
        st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=2), min_size=1, max_size=8
    ),
    lengthscale=st.lists(st.floats(0.1, 10), min_size=2, max_size=2),
    variance=st.floats(0.01, 100),
    cls=st.sampled_from(STATIONARY),
)
def test_stationary_properties(points, lengthscale, variance, cls):
    kernel = cls(lengthscale, variance)
    X = torch.tensor(points, dtype=torch.float64)
    K = kernel(X, X)
    assert (K >= 0).all() and (K <= variance * (1 + 1e-12)).all()
    assert (K.diagonal() - variance).abs().max() <= 1e-12 * variance
    assert torch.linalg.eigvalsh(K).min() >= -1e-6 * variance
    naive = ((X[:, None] - X[None]) / torch.tensor(lengthscale)).square().sum(-1)
    # k is monotone in the distance.
    closer = naive[:, :, None] + 1e-9 < naive[:, None, :]
    assert (K[:, :, None] >= K[:, None, :] - 1e-9 * variance)[closer].all()


@given(
    lengthscale=st.one_of(
        st.floats(1e-12, 1e12), st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=5)
    ),
    variance=st.floats(1e-12, 1e12),
)
def test_theta_round_trip_for_any_number(lengthscale, variance):
    kernel = RBF(lengthscale, variance)
    again = kernel.with_theta(kernel.theta)
    assert_allclose(again.theta, kernel.theta, rtol=0, atol=1e-12)
    assert_allclose(again.frozen().lengthscale, lengthscale, rtol=1e-12)
    assert_allclose(again.frozen().variance, variance, rtol=1e-12)


# --- from the data ------------------------------------------------------------------------------


def test_filled():
    length = torch.tensor([1.0, 2.0, 3.0])
    assert RBF().filled(length, 4.0) == RBF([1, 2, 3], 4)
    assert RBF(0.5).filled(length, 4.0) == RBF(0.5, 4)
    assert RBF(variance=2).filled(length, 4.0) == RBF([1, 2, 3], 2)
    assert RationalQuadratic().filled(length, 4.0) == RationalQuadratic([1, 2, 3], 4, 1)
    assert (RBF(1) + Linear(1)).filled(length, 4.0) == RBF(1, 2) + Linear(1, 2)
    assert (RBF(1) * Linear(1) * RBF(2)).filled(length, 4.0) == RBF(1, 4) * Linear(1, 1) * RBF(2, 1)
    nested = (RBF(1) + RBF(2) * RBF(3)) * RBF(4)
    assert nested.filled(length, 4.0) == (RBF(1, 2) + RBF(2, 2) * RBF(3, 1)) * RBF(4, 1)
    assert RBF().to_units(np.ones(3)) == RBF()


def test_unfilled_kernels_say_so(X):
    for use in (lambda k: k(X, X), lambda k: k.diag(X), lambda k: k.theta, lambda k: k.n_theta):
        with pytest.raises(ValueError, match="RBF: variance"):
            use(RBF(1.0))
    with pytest.raises(ValueError, match="RBF: lengthscale"):
        RBF(variance=1.0)(X, X)
    with pytest.raises(ValueError, match="RationalQuadratic: alpha cannot"):
        RationalQuadratic(alpha=None).filled(torch.ones(3), 1.0)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1.0, np.nan, np.inf, [1.0, -1.0], torch.tensor([0.0])])
def test_parameters_must_be_positive(bad):
    with pytest.raises(ValueError, match="Matern32: lengthscale must be positive"):
        Matern32(lengthscale=bad)


def test_bad_parameters_are_named(X):
    with pytest.raises(ValueError, match="RBF: variance must be positive"):
        RBF(1.0, variance=-2.0)
    with pytest.raises(ValueError, match="RBF: variance must be one number"):
        RBF(1.0, variance=[1.0, 2.0])
    with pytest.raises(ValueError, match="RBF: lengthscale must be a number or a vector"):
        RBF([[1.0]])
    for empty in ([], ()):
        with pytest.raises(ValueError, match="RBF: lengthscale must be a number or a vector"):
            RBF(empty)
    with pytest.raises(TypeError, match="Linear: lengthscale must be a number, got 'long'"):
        Linear("long")
    with pytest.raises(ValueError, match="RBF: lengthscale has 2 values, but X has 3 features"):
        RBF([1.0, 2.0], 1.0)(X, X)
    with pytest.raises(ValueError, match="RationalQuadratic: alpha must be positive"):
        RationalQuadratic(alpha=-1.0)
    with pytest.raises(ValueError, match="scale has 2 values"):
        RBF(ARD, 1.0).to_units(np.ones(2))
    with pytest.raises(ValueError, match="scale must be"):
        RBF(1.0, 1.0).to_units(np.array([1.0, 0.0]))
    for parts in ((), [RBF()], (RBF(), 1.0), RBF()):
        with pytest.raises(TypeError, match="Sum: parts"):
            Sum(parts)
    with pytest.raises(TypeError, match="unsupported operand"):
        RBF() + 1.0
    with pytest.raises(TypeError, match="unsupported operand"):
        2.0 * RBF()


def test_repr():
    assert repr(RBF()) == "RBF()"
    assert repr(RBF(1, 2.5)) == "RBF(lengthscale=1, variance=2.5)"
    long = repr(RBF(np.linspace(1, 30, 784), 1.0))
    assert long == "RBF(lengthscale=[1, 1.037, ..., 29.96, 30], variance=1)"
    assert (
        repr(RBF(1) * (RBF(2) + Linear())) == "RBF(lengthscale=1) * (RBF(lengthscale=2) + Linear())"
    )


# --- a kernel of one's own ----------------------------------------------------------------------


@dataclass(frozen=True)
class Polynomial(Kernel):
    lengthscale: Lengths = None
    variance: Positive = None
    degree: int = field(default=2, metadata={"fixed": True})

    def __call__(self, X, Z):
        products = (X / self.parameter("lengthscale", X).square()) @ Z.T
        return self.parameter("variance", X) * (1 + products).pow(self.degree)

    def diag(self, X):
        squares = (X / self.parameter("lengthscale", X)).square().sum(1)
        return self.parameter("variance", X) * (1 + squares).pow(self.degree)


@dataclass(frozen=True)
class Cauchy(Stationary):
    lengthscale: Lengths = None
    variance: Positive = None

    def of_distance(self, r2):
        return 1 / (1 + r2)


CONTRACT = [
    test_shape_and_dtype,
    test_diag_is_the_diagonal,
    test_symmetric_and_positive_semidefinite,
    test_gradients_in_parameters_and_inputs,
    test_to_units,
]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "own",
    [Polynomial(ARD, 1.5), Polynomial(1.2, 1.5, 3), Cauchy(ARD, 1.5), Cauchy(1.0, 2.0) * RBF(1, 1)],
    ids=repr,
)
def test_own_kernel_keeps_the_contract(check, own, X, Z):
    names = check.__code__.co_varnames[: check.__code__.co_argcount]
    check(**{name: {"kernel": own, "X": X, "Z": Z}[name] for name in names})


@pytest.mark.parametrize("own", [Polynomial(), Cauchy()], ids=repr)
def test_own_kernel_inherits_the_rest(own):
    filled = own.filled(torch.tensor(ARD), 2.0)
    assert filled.n_theta == 4
    test_theta_round_trip(filled)
    assert filled == pickle.loads(pickle.dumps(filled)) == copy.deepcopy(filled)
    assert repr(filled).startswith(f"{type(own).__name__}(lengthscale=[0.7, 1.3, 2], variance=2")
    with pytest.raises(ValueError, match="variance must be positive"):
        type(own)(1.0, -1.0)
    with pytest.raises(FrozenInstanceError):
        own.variance = 2.0


def test_fixed_fields_are_not_learned():
    kernel = Polynomial(1.0, 2.0, 5).with_theta(torch.zeros(2))
    assert kernel.degree == 5 and kernel.frozen() == Polynomial(1.0, 1.0, 5)


def test_a_kernel_may_hold_another(X, Z):
    @dataclass(frozen=True)
    class Warped(Kernel):
        inner: Kernel

        def __call__(self, X, Z):
            return self.inner(X.tanh(), Z.tanh())

        def diag(self, X):
            return self.inner.diag(X.tanh())

    kernel = Warped(RBF()).filled(torch.tensor(ARD), 2.0)
    assert kernel.inner == RBF(torch.tensor(ARD), 2.0) and kernel.n_theta == 4
    test_gradients_in_parameters_and_inputs(kernel, X, Z)


@dataclass(frozen=True)
class Embedded(Kernel):
    """A kernel of rows times weights of any sign."""

    kernel: Kernel
    weights: Any = field(metadata={"transform": FREE})

    def __call__(self, X, Z):
        W = self.parameter("weights", X)
        return self.kernel(X @ W, Z @ W)

    def diag(self, X):
        return self.kernel.diag(X @ self.parameter("weights", X))


def test_leaves_need_not_be_positive(X, Z):
    weights = np.array([[0.5, -1.0], [-0.2, 0.0], [2.0, 0.3]])
    kernel = Embedded(RBF((0.7, 1.3)), weights).filled(torch.ones(2), 3.0)
    logs = np.log([0.7, 1.3, 3.0])
    assert_allclose(kernel.theta, [*logs, *weights.ravel()], rtol=1e-15)
    assert [(leaf.name, leaf.shape) for leaf in kernel._leaves()] == [
        ("lengthscale", (2,)),
        ("variance", ()),
        ("weights", (3, 2)),
    ]
    moved = kernel.with_theta(-kernel.theta)
    assert_allclose(moved.weights, -weights)
    assert_allclose(moved.kernel.theta, -logs)
    test_gradients_in_parameters_and_inputs(kernel, X, Z)
    # Lengthscales have a common part in the prior, weights have none.
    d = torch.linspace(-1.0, 2.0, 9, dtype=torch.float64)
    slope = kernel.prior_slope(d, torch.ones_like(d))
    assert torch.equal(slope[2:], d[2:]) and not torch.isclose(slope[:2], d[:2]).any()
    frozen = kernel.with_theta(kernel.theta.float()).frozen()
    assert frozen == pickle.loads(pickle.dumps(frozen)) == copy.deepcopy(frozen)
    assert frozen != moved.frozen() and hash(frozen) == hash(copy.deepcopy(frozen))
    with pytest.raises(ValueError, match="Embedded: weights must be finite"):
        Embedded(RBF(), [np.nan])


# --- directions ---------------------------------------------------------------------------------


def test_normalised_sees_directions_alone(X, Z):
    kernel = Normalised(RBF(0.6, 2.0))
    K = kernel(X, Z)
    unit = [A / A.norm(dim=1, keepdim=True) for A in (X, Z)]
    cosine = unit[0] @ unit[1].T
    # |x/|x| - z/|z||² = 2 - 2cos.
    assert_allclose(K, 2.0 * torch.exp(-(1 - cosine) / 0.6**2), rtol=1e-10)
    lengths = torch.linspace(0.01, 100, len(X)).double().unsqueeze(1)
    assert_allclose(kernel(X * lengths, Z), K, rtol=1e-10)


def test_normalised_of_zero_is_finite():
    kernel, X = Normalised(RBF(0.6, 2.0)), torch.zeros(2, 3, dtype=torch.float64)
    X[1, 0] = 1e-200
    # The origin is at distance 1 from every direction.
    far = 2.0 * math.exp(-0.5 / 0.6**2)
    assert_allclose(kernel(X, X), [[2.0, far], [far, 2.0]], rtol=1e-12)


def test_normalised_keeps_the_units_in_which_lengths_are_measured(X, Z):
    kernel = Normalised(RBF(0.6, 2.0), units=(1.0, 5.0, 0.2))
    scale = torch.tensor([2.0, 0.3, 7.0], dtype=torch.float64)
    changed = kernel.to_units(scale)
    assert_allclose(changed(X * scale, Z * scale), kernel(X, Z), rtol=1e-10)
    assert_allclose(changed.to_units(1 / scale).units, kernel.units, rtol=1e-12)
    assert Normalised(RBF(0.6, 2.0), units=(3.0, 3.0, 3.0)) == Normalised(RBF(0.6, 2.0))
    assert isinstance(kernel.kernel, RBF) and kernel.kernel.lengthscale == 0.6


def test_normalised_takes_units_of_any_size():
    X = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    expected = Normalised(RBF(0.7, 1.0), [1.0, 2.0])(X, X.flip(0))
    for scale in (1e300, 1e-300):
        found = Normalised(RBF(0.7, 1.0), [scale, 2 * scale])(X, X.flip(0))
        assert_allclose(found, expected, rtol=1e-6)


def test_normalised_fills_one_lengthscale_for_the_sphere():
    filled = Normalised(RBF()).filled(torch.full((3,), 40.0).double(), 5.0)
    assert filled.frozen() == Normalised(RBF(1.0, 5.0))


@pytest.mark.parametrize("units", [(1.0, -1.0), (0.0, 1.0), ((1.0, 2.0),), (1.0, math.inf)])
def test_normalised_refuses_bad_units(units):
    with pytest.raises(ValueError, match="units must be a vector of positive"):
        Normalised(RBF(), units=units)


def test_normalised_refuses_what_is_no_kernel():
    with pytest.raises(TypeError, match="kernel must be a kernel"):
        Normalised(3.0)  # type: ignore[arg-type]


def test_the_prior_on_parameters_lets_many_of_one_move_together():
    """The slope is that of −log N(d; 0, I + 11ᵀ) for the numbers of each parameter."""
    kernel = RBF(np.ones(5), 2.0) + RBF(1.0, 1.0)
    moved = torch.randn(3, kernel.n_theta, dtype=torch.float64, requires_grad=True)
    loss = moved.new_zeros(())
    for d, common in zip(moved.split([5, 1, 1, 1], 1), (1.0, 0.0, 0.0, 0.0), strict=True):
        n = d.shape[1]
        covariance = torch.eye(n, dtype=torch.float64) + common * torch.ones(n, n)
        prior = torch.distributions.MultivariateNormal(d.new_zeros(n), covariance)
        loss = loss - prior.log_prob(d).sum()
    (expected,) = torch.autograd.grad(loss, moved)
    torch.testing.assert_close(kernel.prior_slope(moved.detach(), torch.ones_like(moved)), expected)


def test_numbers_of_which_data_say_nothing_change_no_other():
    d = torch.tensor([0.3, -1.2, 0.5, 0.9, 0.1], dtype=torch.float64)
    told = torch.tensor([1.0, -2.0, 0.0, 1e-30, 1.0], dtype=torch.float64)
    slope = RBF(np.ones(4), 1.0).prior_slope(d, told)
    some = told != 0
    alone = RBF(np.ones(3), 1.0).prior_slope(d[some], told[some])
    assert slope[~some].tolist() == [0.0] and slope[some].tolist() == alone.tolist()


@pytest.mark.parametrize(
    ("kernel", "places"),
    [
        (RBF((1.0, 2.0, 3.0, 4.0), 2.0), [0, 1, 1, 3, 4]),
        (RBF((1.0,) * 4, 1.0) + Linear((1.0,) * 4, 1.0), [0, 1, 1, 3, 4, 5, 6, 6, 8, 9]),
        (RBF(1.0, 1.0) * Matern32((1.0,) * 4, 1.0), [0, 1, 2, 3, 3, 5, 6]),
        (Normalised(RBF((1.0,) * 4, 1.0)), [0, 1, 1, 3, 4]),
        (Columns(RBF((1.0, 1.0, 1.0), 1.0), (1, 2, 3)), [0, 0, 2, 3]),
        (Columns(RBF((1.0, 1.0), 1.0), (0, 3)), None),
        (RBF(1.0, 1.0), None),
    ],
)
def test_features_of_a_group_share_their_lengthscale(kernel, places):
    found = kernel.shared((0, 7, 7, 3))
    assert (None if found is None else found.tolist()) == places
