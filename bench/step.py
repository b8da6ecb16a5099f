"""Seconds of one training step beside those of its matrix products and factorisations alone.

python bench/step.py [--repeats 15] [--profile]
python bench/step.py --threads 1 --cpu-time   # on a machine that has other work

Steps of the coupled fit with full covariances and all hyperparameter gradients, float32: the
readable step, the fused one, and the products and factorisations of each, one after the other as
in a step, all in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from record import add_output, context, keep
from torch import Tensor

from conjugp._gp.posterior import initial_state
from conjugp._inference.fused import ClosedFormStep
from conjugp._inference.moving import Moving
from conjugp._inference.settings import Settings
from conjugp._inference.steps import Batch, ReadableStep, Sizes
from conjugp._numerics.threads import shared
from conjugp._rows.dataset import Data
from conjugp.kernels import RBF
from conjugp.likelihoods import LogisticSoftmax

SHAPES = ((200, 1024, 10), (500, 2048, 10), (200, 512, 7))
D = 784


def data(n: int, n_classes: int, n_features: int) -> Data:
    """Clouds that overlap, one for each class."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(n_classes, (n,), generator=g)
    centres = torch.randn(n_classes, n_features, generator=g)
    X = torch.randn(n, n_features, generator=g) + 0.3 * centres[y]
    return Data(X, y, torch.ones(n), n_classes)


def stepper(rows: Data, M: int, B: int, bound: str, *, fused: bool) -> Callable[[], Any]:
    """One step of a fit that is under way, batch after batch."""
    kernel = RBF(torch.full((rows.X.shape[1],), rows.X.shape[1] ** 0.5), 10.0)
    state = initial_state([kernel], rows.X[:M].clone(), torch.full((rows.n_classes,), -2.0))
    settings = Settings(LogisticSoftmax(), bound, learn_inducing=True, batch_size=B)
    moving = Moving(state, rows.total, settings)
    take = (ClosedFormStep(moving, B) if fused else ReadableStep(moving, rows.group)).take
    sizes = Sizes(left=1.0, rho=0.1, least=0.05, rate=0.01)
    n, at = len(rows.y), [0]

    def step() -> None:
        i = at[0] % (n // B) * B
        at[0] += 1
        take(Batch(slice(i, i + B), rows.rows(i, i + B), n / B), sizes)

    for _ in range(8):  # the first five leave the hyperparameters alone
        step()
    return step


def products(M: int, B: int, C: int, n_features: int, *, fused: bool) -> dict[str, Callable]:
    """The matrix products and factorisations of one step, each by itself."""

    def mm(*shape: int) -> Callable[[], Tensor]:
        n, k, m = shape
        left, right, out = torch.randn(n, k), torch.randn(k, m), torch.empty(n, m)
        return lambda: torch.mm(left, right, out=out)

    A = torch.randn(M, 2 * M)
    P = torch.eye(M) + (A @ A.T / M).expand(C, M, M).contiguous()
    L, eye = torch.linalg.cholesky(P), torch.eye(M).expand(C, M, M)
    R, S = torch.empty(C, M, M), torch.empty(C, M, M)

    def factorise(c: slice) -> None:
        found, _ = torch.linalg.cholesky_ex(P[c])
        torch.linalg.solve_triangular(found, eye[c], upper=False, out=R[c])

    ops: dict[str, Callable] = {
        "k(X, Z)": mm(B, n_features, M),
        "k(Z, Z)": mm(M, n_features, M),
        "A": mm(B, M, M),
        "marginals": mm(B, M, C * M),
        "statistics": mm(M, B, C * M),
        "means": mm(B, M, C),
        "h": mm(C, B, M),
        "gradient in k": mm(B, M, M),
        "gradient in L": mm(M, B, M),
        "gradient in K": mm(M, M, M),
        "gradient in K, second": mm(M, M, M),
        "gradient in Z": mm(M, B, n_features),
        "gradient in Z, of K": mm(M, M, n_features),
        "gradient in A, of m": mm(B, C, M),
    }
    ops["Cholesky of P, inverse"] = lambda: shared(C, M, factorise)
    if fused:
        ops["Cholesky of K, inverse"] = lambda: shared(1, M, factorise)
        ops["S"] = lambda: torch.bmm(L.mT, L, out=S)
        # The two sums over inducing points and over classes are a small product for every row.
        rows, U = torch.randn(B, 1, M), torch.randn(B, C, M)
        slopes, dA = torch.randn(B, 1, C), torch.empty(B, 1, M)
        ops["v"] = lambda: torch.bmm(rows, U.mT)
        ops["gradient in A"] = lambda: torch.bmm(slopes, U, out=dA)
    else:
        ops["Cholesky of K"] = lambda: torch.linalg.cholesky_ex(P[0])
        ops["its inverse, K"] = lambda: torch.linalg.solve_triangular(L[0], eye[0], upper=False)
        ops["gradient in A"] = mm(B, C * M, M)
    return ops


def measure(
    M: int, B: int, C: int, bound: str, repeats: int, now: Callable[[], float]
) -> dict[str, Any]:
    """Medians of alternating repeats, in milliseconds."""
    rows = data(4 * B, C, D)
    steps = {
        name: stepper(rows, M, B, bound, fused=name == "fused") for name in ("readable", "fused")
    }
    floors = {name: products(M, B, C, D, fused=name == "fused") for name in steps}
    times: dict[tuple[str, str], list[float]] = {}

    def clock(key: tuple[str, str], work: Callable[[], Any]) -> None:
        began = now()
        work()
        times.setdefault(key, []).append(1e3 * (now() - began))

    for i in range(repeats + 1):
        for name, step in steps.items():
            clock((name, "step"), step)
            for op, work in floors[name].items():
                clock((name, op), work)
        if i == 0:
            times.clear()
    found: dict[str, Any] = {"M": M, "B": B, "C": C, "D": D, "bound": bound}
    for name in steps:
        parts = {op: median(t) for (which, op), t in times.items() if which == name}
        step = parts.pop("step")
        floor = sum(parts.values())
        found[name] = {"ms": step, "floor_ms": floor, "ratio": step / floor, "parts_ms": parts}
    found["speed_up"] = found["readable"]["ms"] / found["fused"]["ms"]
    return found


def profile(M: int, B: int, C: int, bound: str) -> None:
    """Print where a fused step spends its time."""
    step = stepper(data(4 * B, C, D), M, B, bound, fused=True)
    with torch.profiler.profile() as p:
        for _ in range(10):
            step()
    print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def main() -> None:
    """Measure every shape, print a line each, keep all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bound", default="tight")
    parser.add_argument("--cpu-time", action="store_true", help="of this thread, not of the clock")
    parser.add_argument("--profile", action="store_true", help="where the time goes, and stop")
    add_output(parser, "step.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for M, B, C in SHAPES:
        if args.profile:
            profile(M, B, C, args.bound)
            continue
        now = time.thread_time if args.cpu_time else time.perf_counter
        found = measure(M, B, C, args.bound, args.repeats, now)
        for name in ("readable", "fused"):
            r = found[name]
            print(
                f"M={M} B={B} C={C} {name}: {r['ms']:.2f} ms, products {r['floor_ms']:.2f} ms, "
                f"ratio {r['ratio']:.2f}"
            )
        keep(args.output, f"M={M}, B={B}, C={C}", {**context(), **found})


if __name__ == "__main__":
    main()
