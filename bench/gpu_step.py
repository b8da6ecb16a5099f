"""One training step on a GPU: right, how fast, and where its time goes.

python bench/gpu_step.py

Every part prints as it ends and is kept at once; a part that fails says so and the next one
starts. Whole fits are timed by bench/gpu.py.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from record import add_output, context, keep
from step import data
from torch.profiler import ProfilerActivity, profile

from conjugp._gp.posterior import State, initial_state
from conjugp._inference.fused import ClosedFormStep
from conjugp._inference.minibatch import ROUND
from conjugp._inference.moving import Moving
from conjugp._inference.rounds import RoundsOfSteps
from conjugp._inference.settings import Result, Settings
from conjugp._inference.steps import Batch, Batches, ReadableStep, Sizes
from conjugp._inference.train import train
from conjugp._numerics import expectations as numerics
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF
from conjugp.likelihoods import LogisticSoftmax

SHAPES = ((200, 512, 10, 784), (500, 1024, 10, 784), (200, 512, 10, 54))


def on(device: str, rows: Data, dtype: torch.dtype = torch.float32) -> Data:
    """The same rows elsewhere."""
    moved = (rows.X.to(device, dtype), rows.y.to(device), rows.weight.to(device, dtype))
    return Data(*moved, rows.n_classes)


SIZES = Sizes(left=1.0, rho=0.1, least=0.05, rate=0.01)


def about_to_begin(
    rows: Data, M: int, B: int, bound: str = "tight", **settings: Any
) -> tuple[State, Settings]:
    """A fit with everything learned."""
    D = rows.X.shape[1]
    kernel = RBF(torch.full((D,), D**0.5), 10.0)
    mean = rows.X.new_full((rows.n_classes,), -2.0)
    state = initial_state([kernel], rows.X[:M].clone(), mean)
    usual = {"learn_inducing": True, "batch_size": B, "learning_rate": 0.01}
    return state, Settings(LogisticSoftmax(), bound, **{**usual, **settings})


def fitted(rows: Data, *how: Any, **settings: Any) -> Result:
    """Such a fit."""
    state, cfg = about_to_begin(rows, *how, **settings)
    return train(state, rows, cfg, torch.Generator().manual_seed(0))


def scalars() -> dict[str, float]:
    """The largest errors of the expectations on the GPU against those of the CPU."""
    g = torch.Generator().manual_seed(0)
    m = torch.randn(20_000, generator=g).double() * 10 ** (
        torch.rand(20_000, generator=g).double() * 4 - 2
    )
    v = 10 ** (torch.rand(20_000, generator=g).double() * 9 - 6)
    here, there = numerics.logistic_moments(m, v), numerics.logistic_moments(m.cuda(), v.cuda())
    found = {
        name: float(((b.cpu() - a).abs() / (a.abs() + 1e-12)).max())
        for name, a, b in zip(here._fields, here, there, strict=True)
    }
    a, b = numerics.expected_log_sigmoid(m, v), numerics.expected_log_sigmoid(m.cuda(), v.cuda())
    return found | {"expected_log_sigmoid": float((b.cpu() - a).abs().max())}


def equal() -> dict[str, Any]:
    """Whole fits on both, in float64: how far apart they end."""
    found = {}
    for bound in LogisticSoftmax.bounds:
        rows = data(2100, 5, 8)
        ends = []
        for device in ("cpu", "cuda"):
            moved = on(device, rows, torch.float64)
            ends.append(fitted(moved, 40, 200, bound, max_epochs=12))
        a, b = ends
        far = max(abs(x / y - 1) for x, y in zip(a.history, b.history, strict=True))
        apart = (a.state.theta - b.state.theta.cpu()).abs().max()
        found[bound] = {"rounds": len(a.history), "elbo": far, "theta": float(apart)}
    return found


def rounds_of(M: int, B: int, C: int, D: int) -> tuple[RoundsOfSteps, Callable[[], Any]]:
    """Steps on the device and one whole round of them."""
    rows = on("cuda", data(40 * B, C, D))
    state, cfg = about_to_begin(rows, M, B)
    state.step = 5
    steps = RoundsOfSteps(ClosedFormStep(Moving(state, rows.total, cfg), B), rows, ROUND)
    batches = Batches(rows, B, torch.Generator().manual_seed(0))

    def round_() -> None:
        assert steps.round(batches, [SIZES] * ROUND) is not None, "a step failed"

    return steps, round_


def timed(work: Callable[[], Any], n: int, steps: int) -> float:
    """Median milliseconds of a step."""
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began) / steps)
    return median(times)


def speed(M: int, B: int, C: int, D: int) -> dict[str, Any]:
    """Milliseconds of a step: captured, launched one by one, readable; and of the parts."""
    steps, round_ = rounds_of(M, B, C, D)
    began = time.perf_counter()
    round_()
    found: dict[str, Any] = {"M": M, "B": B, "C": C, "D": D}
    found["first_round_s"] = time.perf_counter() - began
    found["captured_ms"] = timed(round_, 5, ROUND)
    rounds, one = steps._rounds, steps.one
    assert rounds is not None
    graphs, rounds._graphs = rounds._graphs, {}
    rounds._capture = lambda *_: None  # type: ignore[method-assign]
    found["launched_ms"] = timed(round_, 2, ROUND)
    rounds._graphs = graphs
    readable = ReadableStep(one.moving, steps.rows.group)
    batch = Batch(slice(0, B), steps.rows.rows(0, B), 40.0)
    found["readable_ms"] = timed(lambda: readable.take(batch, SIZES), 10, 1)
    P = one.moving.state.q.P.clone()
    eye = torch.eye(M, device="cuda")
    L = torch.linalg.cholesky(P)
    K = P[0] + eye
    parts = {
        "cholesky of P": lambda: torch.linalg.cholesky_ex(P),
        "inverse of its factor": lambda: torch.linalg.solve_triangular(
            L, eye.expand_as(L), upper=False
        ),
        "S": lambda: L.mT @ L,
        "cholesky of K": lambda: torch.linalg.cholesky_ex(K),
        "inverse of K's factor": lambda: torch.linalg.solve_triangular(L[0], eye, upper=False),
        "marginals": lambda: one.form._A[:B] @ P.view(C * M, M).T,
        "statistics": lambda: one.form._A[:B].T @ one.form._U[:B],
    }
    found["parts_ms"] = {name: graph_ms(work) for name, work in parts.items()}
    return found


def graph_ms(work: Callable[[], Any], n: int = 20) -> float:
    """Milliseconds of something, captured n times in a row."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            work()
    return timed(graph.replay, 5, n)


def breakdown(M: int, B: int, C: int, D: int) -> dict[str, Any]:
    """Kernels of a captured step, and what a round asks of the driver."""
    _, round_ = rounds_of(M, B, C, D)
    round_()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        round_()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for e in p.events():
        name = e.name
        if e.device_type == torch.autograd.DeviceType.CUDA:
            spent[name[:90]] += e.device_time / ROUND
            count[name[:90]] += 1
        elif name.startswith("cuda"):
            calls[name] += 1
    print(f"{sum(spent.values()):.0f} us in {sum(count.values()) / ROUND:.0f} kernels a step")
    for name, us in spent.most_common(30):
        print(f"  {us:7.1f} us {count[name] / ROUND:6.1f}  {name}")
    print("  calls in a round:", dict(calls.most_common(12)))
    copies = {n: c for n, c in count.items() if "Memcpy" in n}
    return {
        "kernels": sum(count.values()) / ROUND,
        "busy_us": sum(spent.values()),
        "top_us": dict(spent.most_common(25)),
        "calls_in_a_round": dict(calls),
        "copies_in_a_round": copies,
    }


def main() -> None:
    """All parts, each kept when it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_output(parser, "gpu_step.json")
    args = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {"scalars": scalars, "equal to the CPU": equal}
    for shape in SHAPES:
        parts[f"speed {shape}"] = lambda s=shape: speed(*s)
    for shape in SHAPES[:2]:
        parts[f"kernels {shape}"] = lambda s=shape: breakdown(*s)
    for name, part in parts.items():
        began = time.perf_counter()
        try:
            found = part()
            print(f"--- {name}, {time.perf_counter() - began:.1f} s: {found}", flush=True)
        except Exception:
            found = {"failed": traceback.format_exc()}
            print(f"--- {name} FAILED\n{found['failed']}", flush=True)
        gpu = torch.cuda.get_device_name()
        keep(args.output, name, {**context(), "gpu": gpu, "found": found})


if __name__ == "__main__":
    main()
