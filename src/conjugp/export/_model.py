"""The whole predictive distribution as one ONNX model: X → latents → probabilities → labels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from conjugp._gp.covariance import NONE
from conjugp._gp.model import Model
from conjugp._inputs.inputs import Inputs
from conjugp.export import _columns as columns
from conjugp.export._graph import ML, ML_OPSET, OPSET, Scope, Trip, Value
from conjugp.export._integrals import lambda_integral, largest, log_sigmoid, normalised
from conjugp.export._kernels import diagonal, matrix
from conjugp.likelihoods import Heaviside, LogisticSoftmax, RobustMax

_PAIRS = 4096  # of row and class at a time, so that memory does not grow with the rows
_ROWS = 1024  # and at most so many rows
_IR_VERSION = 8
_TYPES = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}


def build(
    model: Model, inputs: Inputs, dtype: str, labels: NDArray, metadata: dict[str, str]
) -> ModelProto:
    """The model of a fitted classifier whose inputs and probabilities have this dtype."""
    kind, C = _TYPES[dtype], len(labels)
    scaling, encoder = inputs.scaling, inputs.encoder
    declare = helper.make_tensor_value_info
    if encoder is None:
        graph = Scope()
        X, given = graph.value("X"), [declare("X", kind, ["n", len(scaling.shift)])]
    else:
        names, types = columns.inputs(encoder), {"text": TensorProto.STRING}
        graph = Scope(taken=names.values())
        X = columns.cells(graph, encoder, names)
        of = encoder.kinds
        given = [declare(names[c], types.get(of[c], kind), ["n", 1]) for c in names]
    # Rows go in chunks of R; the last row fills the last chunk.
    n = graph.squeeze(graph.op("Slice", graph.op("Shape", X), np.array([0]), np.array([1])))
    most = np.array(max(1, min(_ROWS, _PAIRS // C)))
    R = graph.op("Max", graph.op("Min", n, most), np.array(1))
    trips = (n + (R - np.array(1))) / R
    last = n - np.array(1)

    def chunk(scope: Scope, i: Value, values: list[Value]) -> Trip:
        begin = scope.op("Mul", i, R)
        rows = scope.op("Min", scope.range(np.array(0), R) + begin, last)
        x = scope.cast(scope.op("Gather", X, rows, axis=0), "double")
        x = x if encoder is None else columns.features(scope, encoder, x)
        x = columns.scaled(scope, scaling, x)
        return None, [], [_probabilities(scope, model, x)]

    (stacked,) = graph.loop(trips, [], chunk, n_stacked=1)
    flat = graph.op("Reshape", stacked, np.array([-1, C]))
    end = graph.op("Reshape", n, np.array([1]))
    p = graph.op("Slice", flat, np.array([0]), end, np.array([0]))
    best = graph.op("ArgMax", p, axis=1, keepdims=0)
    graph.rename(graph.op("Gather", labels, best), "label")
    graph.rename(graph.op("Cast", p, to=kind), "probabilities")

    label = TensorProto.STRING if labels.dtype == object else TensorProto.INT64
    proto = graph.graph(
        given,
        [declare("label", label, ["n"]), declare("probabilities", kind, ["n", C])],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    if any(node.domain == ML for node in proto.node):
        opsets.append(helper.make_opsetid(ML, ML_OPSET))
    result = helper.make_model(
        proto,
        opset_imports=opsets,
        ir_version=_IR_VERSION,
        producer_name="conjugp",
        producer_version=metadata["conjugp_version"],
        doc_string=f"Gaussian process classification: {len(model.Z)} inducing points, {C} classes",
    )
    helper.set_model_props(result, metadata)
    return result


def _probabilities(scope: Scope, model: Model, x: Value) -> Value:
    """Rows x (R, D) in working units -> (R, C)."""
    scale, heat = float(model.calibration.variance_scale), float(model.calibration.temperature)
    m, v = _latent(scope, model, x, variance=scale > 0.0)
    v = None if v is None else v * scale
    likelihood, C = model.likelihood, model.n_classes
    if isinstance(likelihood, Heaviside | RobustMax):
        noise = likelihood.noise if isinstance(likelihood, Heaviside) else 0.0
        p = largest(scope, m, (m * 0.0 if v is None else v) + noise)
        if isinstance(likelihood, RobustMax):
            wrong = likelihood.epsilon / (C - 1)
            p = p * (1.0 - likelihood.epsilon - wrong) + wrong
    elif v is None:
        logistic = isinstance(likelihood, LogisticSoftmax)
        p = scope.op("Softmax", log_sigmoid(scope, m) if logistic else m, axis=1)
    else:
        softmax = not isinstance(likelihood, LogisticSoftmax)
        p = lambda_integral(scope, m, v, C, softmax)
    if heat != 1.0:
        log_p = scope.op("Log", p) / heat
        if model.shares is not None and heat > 1.0:
            log_p = log_p + (1.0 - 1.0 / heat) * model.shares.cpu().log().numpy()
        p = scope.op("Softmax", log_p, axis=1)
    return normalised(scope, p)


def _latent(scope: Scope, model: Model, x: Value, variance: bool) -> tuple[Value, Value | None]:
    """Mean and variance of q(f) at x, (R, C) each; no variance where there is none."""
    D = model.Z.shape[1]
    K = [matrix(scope, kernel, x, model.Z.cpu()) for kernel in model.kernels]
    alpha = model.alpha
    if len(K) == 1:
        m = K[0] @ alpha.T
    else:
        each = [k @ a[:, None] for k, a in zip(K, alpha, strict=True)]
        m = scope.op("Concat", *each, axis=1)
    m = m + model.mean
    if model.S.family == NONE or not variance:
        return m, None
    M = model.L_inv.shape[-1]
    parts = []
    for k, (kernel, kx) in enumerate(zip(model.kernels, K, strict=True)):
        if M < len(model.Z):
            kx = scope.op("Slice", kx, np.array([0]), np.array([M]), np.array([1]))
        A = kx @ model.L_inv[k].T
        prior = diagonal(scope, kernel, x, D)
        explained = scope.op("ReduceSumSquare", A, axes=[1], keepdims=1)
        residual = scope.op("Max", prior - explained, prior * 1e-6)
        parts.append(residual + _quadratic(scope, model, A, k))
    v = parts[0] if len(parts) == 1 else scope.op("Concat", *parts, axis=1)
    return m, v + m * 0.0  # one variance for all classes becomes one for each


def _quadratic(scope: Scope, model: Model, A: Value, k: int) -> Value:
    """diag(A S Aᵀ) for features A (R, M): (R, C or 1), or of class k alone with its own kernel."""
    R = model.S.R
    if model.S.family == "diagonal":
        return (A * A) @ R.square().T
    own = len(model.kernels) > 1
    if own or len(R) == 1:
        W = A @ (R[k] if own and len(R) > 1 else R[0]).T
        return scope.op("ReduceSumSquare", W, axes=[1], keepdims=1)
    W = A @ torch.transpose(R, 1, 2).contiguous()  # (C, R, M)
    return scope.op("Transpose", scope.op("ReduceSumSquare", W, axes=[2], keepdims=0), perm=[1, 0])
