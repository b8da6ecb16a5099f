"""GPflow's SVGP, softmax or robust-max, by natural gradients: a peer that conjugp is timed against.

One whitened variational Gaussian per class moved by `NaturalGradient`, an ARD RBF kernel and
inducing points shared by the classes, and a mean per class, learned by Adam. It is a process of its
own, since GPflow may live in another environment than conjugp:

python bench/gpflow_svgp.py ROWS.npz SETTINGS.json RESULT.npz
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

# What GPflow 2.11 needs beside TensorFlow 2.16 and later.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import gpflow
import numpy as np
import tensorflow as tf
from clock import LOOKS, SAVED, Clock, Warmup
from data import KEYS, Split, Start, scaled
from gpflow.likelihoods import MultiClass, Softmax
from gpflow.optimizers import NaturalGradient
from numpy.typing import NDArray

ROWS = 2000  # predicted at a time
_SAMPLES = 128  # draws behind a predicted probability, in pairs of opposite sign


def build(
    Z: NDArray, n: int, n_classes: int, likelihood: str, lengths: NDArray, variance: float
) -> Any:
    """C latent functions on inducing points Z (M, D)."""
    kinds = {"softmax": Softmax, "robust-max": MultiClass}
    return gpflow.models.SVGP(
        kernel=gpflow.kernels.SquaredExponential(variance=variance, lengthscales=lengths),
        likelihood=kinds[likelihood](n_classes),
        inducing_variable=gpflow.inducing_variables.InducingPoints(Z),
        mean_function=gpflow.functions.Constant(np.zeros(n_classes)),
        num_latent_gps=n_classes,
        whiten=True,
        num_data=n,
    )


def train(
    split: Split,
    start: Start,
    *,
    likelihood: str,
    inputs: str,
    kernel: str,
    batch_size: int,
    learning_rate: float,
    first_step: float,
    natural_step: float,
    learn_inducing: bool,
    budget: float,
    looks: Sequence[float] = LOOKS,
) -> tuple[dict[str, Any], list[NDArray]]:
    """Train for `budget` seconds of training steps; the curve, and the probabilities on it.

    `kernel` is where that starts, as in `scaled`. The size of
    natural-gradient steps grows from `first_step` to `natural_step`: robust-max gives NaN where it
    starts much above 1e-6. After a step that ends in NaN the parameters of 20 to 40 steps before
    are put back, and steps become a tenth as long. The tracing of the step is part of the set-up.
    """
    began = time.perf_counter()
    tf.random.set_seed(0)
    rng = np.random.default_rng(0)
    *arrays, variance = scaled(split, start, inputs, kernel)
    X, X_test, Z, lengths = (a.astype(np.float64) for a in arrays)
    y = split.y_train.astype(np.int64)[:, None]
    C = int(y.max()) + 1
    model = build(Z, len(y), C, likelihood, lengths, variance)
    gpflow.set_trainable(model.inducing_variable, learn_inducing)
    q = [(model.q_mu, model.q_sqrt)]
    for parameter in q[0]:
        gpflow.set_trainable(parameter, False)  # moved by natural gradients, not by Adam
    size = tf.Variable(0.0, dtype=tf.float64)
    natural, adam = NaturalGradient(size), tf.keras.optimizers.legacy.Adam(learning_rate)

    @tf.function
    def step(x: Any, labels: Any) -> None:
        loss = model.training_loss_closure((x, labels), compile=False)
        natural.minimize(loss, q)
        adam.minimize(loss, model.trainable_variables)

    def variables() -> list[Any]:
        return [*model.variables, *adam.variables()]

    order = rng.permutation(len(y))
    predict_f = tf.function(model.predict_f)
    first = [variable.numpy() for variable in model.variables]
    step(X[order[:batch_size]], y[order[:batch_size]])  # traces it and fills caches
    for variable, value in zip(model.variables, first, strict=True):
        variable.assign(value)
    for variable in adam.variables():
        variable.assign(tf.zeros_like(variable))
    predict_f(X_test[:ROWS])
    setup = time.perf_counter() - began
    result: dict[str, Any] = {"setup_seconds": setup, "curve": [], "restarts": []}
    seen: list[NDArray] = []
    clock, warmup, i = Clock(budget, looks), Warmup(first_step, natural_step), 0
    copies: list[list[NDArray]] = []
    while not clock.over:
        if warmup.t % SAVED == 0:
            copies = [*copies[-1:], [variable.numpy() for variable in variables()]]
        rows, i = order[i : i + batch_size], i + batch_size
        if i + batch_size > len(y):  # whole batches only: another shape would be traced anew
            order, i = rng.permutation(len(y)), 0
        with clock:
            size.assign(warmup.size)
            try:
                step(X[rows], y[rows])
                ok = True
            except tf.errors.InvalidArgumentError:
                ok = False
        if not ok:
            again = {"seconds": clock.seconds, "steps": warmup.t, "natural_step": warmup.size}
            result["restarts"].append(again)
            if not warmup.failed():
                result["failure"] = "natural gradients give NaN however short they are"
                break
            copies = copies[:1]  # the later one may be on the way to the failure already
            for variable, value in zip(variables(), copies[0], strict=True):
                variable.assign(value)
        warmup.t += 1
        if clock.look():
            result["curve"].append({"seconds": clock.seconds, "steps": warmup.t})
            seen.append(predict_proba(predict_f, model.likelihood, X_test, likelihood))
    return result, seen


def predict_proba(predict_f: Any, quadrature: Any, X: NDArray, likelihood: str) -> NDArray:
    """Probabilities (n, C): robust-max by GPflow's quadrature, the softmax averaged over draws."""
    rng = np.random.default_rng(0)
    parts = []
    for i in range(0, len(X), ROWS):
        x = X[i : i + ROWS]
        mean, variance = (a.numpy() for a in predict_f(x))
        if likelihood == "robust-max":
            total = quadrature.predict_mean_and_var(x, mean, variance)[0].numpy()
        else:
            sd, total = np.sqrt(variance), np.zeros_like(mean)
            for _ in range(_SAMPLES // 2):
                noise = sd * rng.standard_normal(mean.shape)
                total += softmax(mean + noise) + softmax(mean - noise)
        parts.append(total / total.sum(axis=1, keepdims=True))
    return np.concatenate(parts)


def softmax(f: NDArray) -> NDArray:
    """Along the last axis."""
    e = np.exp(f - f.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def main() -> None:
    rows, given, output = sys.argv[1:]
    settings = json.loads(Path(given).read_text())
    imported = time.time() - settings.pop("called_at")
    with np.load(rows) as file:
        split = Split(*(file[key] for key in KEYS))
        start = Start(file["Z"], file["lengths"], float(file["variance"]))
    result, looks = train(split, start, **settings)
    packages = ("gpflow", "tensorflow", "tensorflow-probability", "tf_keras", "numpy")
    result["import_seconds"] = imported
    result["versions"] = {package: version(package) for package in packages}
    np.savez(output, result=json.dumps(result), proba=np.array(looks))


if __name__ == "__main__":
    main()
