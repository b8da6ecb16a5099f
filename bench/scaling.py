"""Ranks: the same model on 1, 2 and 4 processes and on three hosts, steps per second, and a model.

    python bench/scaling.py            # everything: results/scaling.json; hosts need root and ip
    python bench/scaling.py same       # the same model, and how far parameters are apart
    python bench/scaling.py speed      # seconds of a step, of 1, 2 and 4 ranks
    python bench/scaling.py network    # latency and bandwidth of sums over ranks, as gloo has them
    python bench/scaling.py device     # seconds of the parts of a step on this machine's GPU
    python bench/scaling.py model      # what the model says, from what was measured

Hosts are network namespaces with their own addresses, joined by a bridge; `tc` slows their links.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)  # numbers in a sum over ranks
SHAPE = {"M": 200, "C": 10, "B": 2048, "D": 20}  # of the step that is timed
STEPS = 12
LINK = "1gbit"  # the rate of slowed links
BRIDGE, HOSTS = "conjugpbr", ("conjugp0", "conjugp1", "conjugp2")


# --- what a rank does -----------------------------------------------------------------------------


def rank_main(task: str, output: str) -> None:
    """One rank of a group of the environment's size; rank 0 writes what it found."""
    import torch

    from conjugp._rows.group import current, joined

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with joined(timeout=120):
        group = current()
        found = {"same": models, "speed": seconds_of_step, "network": sums}[task](group)
        if group.rank == 0:
            Path(output).write_bytes(pickle.dumps(found))


def models(group: Any) -> dict[str, Any]:
    """Fits of three kinds to this rank's share of the same rows: what they end with."""
    from conjugp import GPClassifier

    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 1100)
    X = rng.normal(size=(1100, 3)) + 2 * np.eye(3)[y]
    grid = rng.normal(size=(100, 3))
    mini = {"n_inducing": 20, "batch_size": 128, "max_epochs": 4}
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "minibatch": (1100, {**mini, "dtype": "float64"}),
        "minibatch, float32": (1100, mini),
        "full batch": (150, {"max_epochs": 15}),
        "decoupled": (330, {}),
    }
    found = {}
    for name, (n, settings) in cases.items():
        mine = slice(group.rank, n, group.size)
        clf = GPClassifier(random_state=0, **settings).fit(X[mine], y[mine])
        theta = clf.kernel_.theta.numpy()  # type: ignore[union-attr]
        weights = clf._fitted.model.w.numpy()
        found[name] = {
            "parameters": [theta, clf.inducing_points_, clf.prior_mean_, weights],
            "proba": clf.predict_proba(grid),
        }
    return found


def seconds_of_step(group: Any, steps: int = STEPS, **shape: int) -> dict[str, float]:
    """Seconds of one minibatch step on B rows of all ranks together, and of its parts."""
    import torch

    from conjugp._gp.posterior import initial_state, moments
    from conjugp._inference import svi
    from conjugp._inference.moving import Moving, evaluated
    from conjugp._inference.settings import Settings
    from conjugp._inference.steps import Batch, ReadableStep, Sizes
    from conjugp._rows.dataset import Data
    from conjugp._rows.group import ALONE
    from conjugp._rows.on_ranks import OnRanks
    from conjugp.kernels import RBF
    from conjugp.likelihoods import LogisticSoftmax

    M, C, B, D = ({**SHAPE, **shape}[k] for k in "MCBD")
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    rng = torch.Generator().manual_seed(group.rank)
    n = B // group.size
    X, Z = torch.randn(n, D, generator=rng), torch.randn(M, D, generator=torch.Generator())
    y = torch.randint(0, C, (n,), generator=rng)
    keys = torch.randint(0, 2**58, (n,), generator=rng).sort().values.numpy()
    local = Data(X.to(device), y.to(device), torch.ones(n, device=device), C)
    data = OnRanks(local, keys, group)
    kernel = RBF(np.full(D, 5.0), 3.0)
    state = initial_state([kernel], Z.to(device), torch.zeros(C, device=device))
    settings = Settings(LogisticSoftmax(), "tight", batch_size=B)
    state.step = 10  # gradients are taken from the start
    moving, part = Moving(state, data.total, settings), data.rows(0, B)
    step, batch = ReadableStep(moving, group), Batch(slice(0, B), part, 1.0)
    sizes = Sizes(left=1.0, rho=0.05, least=0.05, rate=1e-4)

    def sync() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(work: Any, most: int = steps) -> float:
        with torch.no_grad():
            work()
            times = []
            for _ in range(most):
                began = sync()
                work()
                times.append(sync() - began)
        return float(np.median(times))

    whole = timed(lambda: step.take(batch, sizes))
    stats, few = evaluated(moving, part, moments(state.q), 1.0, False), local.rows(0, 1)
    found = {"step": whole, "no rows": timed(lambda: _alone(moving, few))}
    found["rows"] = timed(lambda: evaluated(moving, part, moments(state.q), 1.0, True))
    if group.size > 1:
        found["sum"] = timed(lambda: svi.pooled(stats, [], group))
    # Of one rank: the packing of a message alone.
    found["pack"] = timed(lambda: svi.pooled(stats, [], ALONE))
    return found


def _alone(moving: Any, part: Any) -> None:
    """The part of a step that does not depend on the number of rows."""
    from conjugp._gp.posterior import kl, moments
    from conjugp._inference import svi
    from conjugp._inference.moving import evaluated

    q = moments(moving.state.q)
    stats = evaluated(moving, part, q, 1.0, True)
    float(stats.bound - kl(q))
    svi.update(moving.state.q, stats, 1.0, 0.05)


def sums(group: Any) -> list[dict[str, float]]:
    """Seconds of sums over ranks, by size."""
    import torch

    found = []
    for size in SIZES:
        x, times = torch.ones(size), []
        for _ in range(12 if size < 10**6 else 5):
            began = time.perf_counter()
            group.sum([x])
            times.append(time.perf_counter() - began)
        found.append({"numbers": size, "seconds": float(np.median(times[1:]))})
    return found


# --- ranks on this machine, and on hosts ----------------------------------------------------------


def on_ranks(task: str, size: int, hosts: bool = False) -> Any:
    """What rank 0 of so many ranks found; each in a network namespace if there are `hosts`."""
    with tempfile.TemporaryDirectory() as folder:
        output, processes = f"{folder}/found", []
        for rank in range(size):
            env = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)}
            env |= {"WORLD_SIZE": str(size), "LOCAL_RANK": "0" if hosts else str(rank)}
            env |= {"MASTER_ADDR": "10.77.0.1" if hosts else "127.0.0.1", "MASTER_PORT": "29577"}
            command = [sys.executable, __file__, "--rank", task, output]
            if hosts:
                env["GLOO_SOCKET_IFNAME"] = "eth0"
                command = ["ip", "netns", "exec", HOSTS[rank], *command]
            processes.append(subprocess.Popen(command, env=env))
        codes = [p.wait(timeout=600) for p in processes]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return pickle.loads(Path(output).read_bytes())


@contextmanager
def namespaces(rate: str | None = None) -> Iterator[None]:
    """Three hosts with addresses 10.77.0.1 to 3, their links slowed if asked for."""
    try:
        _ip(f"link add {BRIDGE} type bridge")
        _ip(f"link set {BRIDGE} up")
        for i, host in enumerate(HOSTS):
            _ip(f"netns add {host}")
            _ip(f"link add {host}v type veth peer name eth0 netns {host}")
            _ip(f"link set {host}v master {BRIDGE} up")
            _ip(f"-n {host} addr add 10.77.0.{i + 1}/24 dev eth0")
            _ip(f"-n {host} link set eth0 up")
            _ip(f"-n {host} link set lo up")
            if rate is not None:
                how = f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 400ms"
                subprocess.run(["ip", "netns", "exec", host, *how.split()], check=True)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", BRIDGE], stderr=subprocess.DEVNULL)


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)


# --- what is reported -----------------------------------------------------------------------------


def same_model() -> dict[str, Any]:
    """How far parameters and predictions of groups are from those of one process."""
    one = on_ranks("same", 1)
    groups = {f"{size} processes": on_ranks("same", size) for size in (2, 4)}
    with namespaces():
        groups["3 hosts"] = on_ranks("same", 3, hosts=True)
    found: dict[str, Any] = {}
    for name, group in groups.items():
        found[name] = {}
        for case, ours in group.items():
            pairs = zip(ours["parameters"], one[case]["parameters"], strict=True)
            apart = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
            proba = float(np.abs(ours["proba"] - one[case]["proba"]).max())
            single = case.endswith("float32")
            passed = proba < 1e-4 if single else apart < 1e-5
            found[name][case] = {"parameters": apart, "proba": proba, "passed": passed}
            print(name, case, found[name][case], flush=True)
    return found


def speed() -> dict[str, Any]:
    """Points per second of 1, 2 and 4 ranks with one thread each, beside the ideal."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"shape": SHAPE, "cores": cores}
    for size in (1, 2, 4):
        parts = on_ranks("speed", size)
        found[str(size)] = {**parts, "points_per_second": SHAPE["B"] / parts["step"]}
        first = found["1"]
        fixed, rows = first["no rows"], first["step"] - first["no rows"]
        # Ranks beyond the cores take turns, with the part that all do as well.
        turns = max(1, size / cores)
        ideal = turns * (fixed + rows / size)
        found[str(size)]["ideal_points_per_second"] = SHAPE["B"] / ideal
        modelled = ideal + parts.get("sum", 0.0)
        found[str(size)]["modelled_step"] = modelled
        print(size, found[str(size)], flush=True)
    return found


def network() -> dict[str, Any]:
    """Sums over ranks here, on hosts, and on hosts with slow links; latency and bandwidth."""
    found = {}
    for size in (2, 4):
        found[f"{size} processes"] = _fitted(on_ranks("network", size), size)
    with namespaces():
        found["3 hosts"] = _fitted(on_ranks("network", 3, hosts=True), 3)
    with namespaces(LINK):
        slow = _fitted(on_ranks("network", 3, hosts=True), 3)
        step = on_ranks("speed", 3, hosts=True)
    found["3 hosts, slow links"] = {"link": LINK, **slow, "step": step}
    for name, one in found.items():
        print(name, {k: v for k, v in one.items() if k != "measured"}, flush=True)
    return found


def _fitted(measured: list[dict[str, float]], ranks: int) -> dict[str, Any]:
    """Latency and bandwidth of a ring that explain the times best, in relative error."""
    best = (np.inf, 0.0, 0.0)
    for latency in np.geomspace(1e-6, 1e-2, 81):
        for bandwidth in np.geomspace(1e7, 1e11, 81):
            times = [ring(4 * m["numbers"], ranks, latency, bandwidth) for m in measured]
            ratio = np.log([t / m["seconds"] for t, m in zip(times, measured, strict=True)])
            best = min(best, (float(np.abs(ratio).max()), latency, bandwidth))
    error, latency, bandwidth = best
    found = {"latency": latency, "bandwidth": bandwidth, "worst_factor": float(np.exp(error))}
    return {**found, "measured": measured}


def ring(n_bytes: float, ranks: int, latency: float, bandwidth: float) -> float:
    """Seconds of a ring all-reduce: 2(R - 1) messages of a share each."""
    return 2 * (ranks - 1) * (latency + n_bytes / ranks / bandwidth)


def message(M: int, C: int, D: int) -> float:
    """Bytes of a coupled step: h, half of P, gradients, in float32."""
    return 4.0 * (C * M * (M + 1) / 2 + C * M + M * D + C + D + 4)


def device() -> dict[str, Any]:
    """The parts of a step on one GPU, M = 1000 and C = 100."""
    from conjugp._rows.group import ALONE

    found = {}
    for B in (512, 2048, 8192):
        parts = seconds_of_step(ALONE, 5, M=1000, C=100, B=B, D=20)
        found[str(B)] = parts
        print(B, parts, flush=True)
    return found


def predictions(kept: dict[str, Any]) -> dict[str, Any]:
    """Points per second and hours an epoch for N = 1e9, M = 1000, C = 100."""
    N, M, C, D = 1e9, 1000, 100, 20
    gpu = kept["device"]["parts"]
    fixed = gpu["512"]["no rows"]
    per_row = (gpu["8192"]["step"] - gpu["2048"]["step"]) / (8192 - 2048)
    pack = gpu["8192"]["pack"]  # half of P into a message and back
    # Bandwidth in bytes a second by which each rank sends; seconds a message takes at least.
    places = {"1 GPU": (1, 0.0, 1.0), "8 GPUs in a node": (8, 10e-6, 200e9)}
    places |= {f"{n} nodes of 1 GPU": (n, 20e-6, 0.8 * 12.5e9) for n in (2, 4, 8, 16)}
    found: dict[str, Any] = {
        "seconds_without_rows": fixed,
        "seconds_of_a_row": per_row,
        "megabytes": message(M, C, D) / 1e6,
    }
    for name, (ranks, latency, bandwidth) in places.items():
        found[name] = {}
        for B in (8192, 65536):
            for local in (1, 10):
                sum_ = ring(message(M, C, D), ranks, latency, bandwidth)
                sum_ = (sum_ + pack) / local if ranks > 1 else 0.0
                step = fixed + per_row * B / ranks + sum_
                found[name][f"B={B}, local_steps={local}"] = {
                    "step": step,
                    "sum_share": sum_ / step,
                    "points_per_second": B / step,
                    "hours_an_epoch": N / (B / step) / 3600,
                    "efficiency": (fixed + per_row * B) / step / ranks,
                }
        print(name, found[name], flush=True)
    return found


def main() -> None:
    parts = ("same", "speed", "network", "device", "model")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--rank", nargs=2, metavar=("TASK", "OUTPUT"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.rank:
        rank_main(*args.rank)
        return
    from record import RESULTS, context, keep

    path = args.output or RESULTS / "scaling.json"
    kept = json.loads(path.read_text())["sets"]["ranks"] if path.is_file() else {}
    for part in args.parts or ("same", "speed", "network", "model"):
        if part == "device":
            import torch

            kept["device"] = {"name": torch.cuda.get_device_name(), "parts": device()}
        else:
            work = {"same": same_model, "speed": speed, "network": network}
            kept[part] = predictions(kept) if part == "model" else work[part]()
        if part in ("same", "speed", "network"):
            kept.update(context())
        keep(path, "ranks", kept)


if __name__ == "__main__":
    main()
