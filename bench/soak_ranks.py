"""`kill -9` of a random rank at random moments of a fit that torchrun runs.

    python bench/soak_ranks.py --kills 20

torchrun starts all ranks again, they go on from the checkpoint, and the model is always the one
of a run that nobody disturbed, to the last bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 2
LIMIT = 300  # seconds that a run may take
FITS = ("minibatch", "decoupled")


def fitted(kind: str, rank: int, size: int, checkpoint: Path | None) -> bytes:
    """The bits of the model that a rank ends with: predictions and inducing points."""
    import warnings

    import numpy as np

    from conjugp import FitOptions, GPClassifier

    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 1100)
    X = rng.normal(size=(1100, 4)) + 1.5 * np.eye(4)[y]
    options = FitOptions(checkpoint_every=0.05, search=kind != "decoupled")
    how: dict[str, Any] = {"n_inducing": 30, "batch_size": 128, "max_epochs": 30, "tol": 0.0}
    if kind == "decoupled":
        how = {"n_inducing": 301}
    clf = GPClassifier(random_state=0, options=options, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf.fit(X[rank::size], y[rank::size], checkpoint=checkpoint)
    return clf.predict_proba(X[:200]).tobytes() + clf.inducing_points_.tobytes()


def worker(kind: str, folder: Path) -> None:
    """What every rank does: say that it is there, fit its rows, and write what came of it."""
    import torch

    from conjugp._rows.group import joined

    torch.set_num_threads(1)
    with joined(timeout=60) as group:
        again = os.environ["TORCHELASTIC_RESTART_COUNT"]
        (folder / f"pid.{group.rank}.{again}").write_text(str(os.getpid()))
        bits = fitted(kind, group.rank, group.size, folder / "fit.checkpoint")
    (folder / f"model.{group.rank}").write_bytes(bits)


def run(kind: str, folder: Path, kill_after: float | None, rng: random.Random) -> dict[str, Any]:
    """One run under torchrun; with `kill_after` a rank is killed so many seconds into the fit."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "3"]
    command += ["--monitor-interval", "0.1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, __file__, "--worker", kind, str(folder)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    victim, killed = rng.randrange(RANKS), False
    began = time.monotonic()
    pids = [folder / f"pid.{rank}.0" for rank in range(RANKS)]
    while not all(p.exists() and p.read_text() for p in pids) and process.poll() is None:
        time.sleep(0.02)
    started = time.monotonic()
    if kill_after is not None:
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            try:
                os.kill(int(pids[victim].read_text()), signal.SIGKILL)
                killed = True
            except ProcessLookupError:
                pass
    try:
        _, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise
    if process.returncode:
        raise RuntimeError(f"torchrun ended with {process.returncode}: {errors[-2000:]}")
    models = [(folder / f"model.{rank}").read_bytes() for rank in range(RANKS)]
    now = time.monotonic()
    found = {"victim": victim, "killed": killed, "restarts": len(list(folder.glob("pid.0.*"))) - 1}
    seconds = {"fit": round(now - started, 2), "all": round(now - began, 2)}
    return {**found, "seconds": seconds, "models": models}


def soak(kills: int, seed: int) -> dict[str, Any]:
    """Undisturbed runs, then one kill in each; how it went."""
    rng = random.Random(seed)
    runs, undisturbed = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in FITS[: max(1, min(len(FITS), kills))]:
            place = Path(folder, kind)
            place.mkdir()
            undisturbed[kind] = run(kind, place, None, rng)
            first, second = undisturbed[kind]["models"]
            assert first == second, "ranks ended with different models"
        while sum(r["killed"] for r in runs) < kills:
            kind = FITS[len(runs) % len(undisturbed)]
            place = Path(folder, str(len(runs)))
            place.mkdir()
            after = rng.uniform(0, undisturbed[kind]["seconds"]["fit"])
            found = run(kind, place, after, rng)
            models = found.pop("models")
            same = all(model == undisturbed[kind]["models"][0] for model in models)
            # A fit may have ended before its kill: it does not count as one.
            runs.append({"fit": kind, "after": round(after, 2), **found, "same": same})
            print(runs[-1], flush=True)
    return {
        "ranks": RANKS,
        "kills": sum(r["killed"] for r in runs),
        "finished": len(runs),
        "same_bits": sum(r["same"] for r in runs),
        "undisturbed_seconds": {k: v["seconds"] for k, v in undisturbed.items()},
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=2, metavar=("FIT", "FOLDER"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], Path(args.worker[1]))
        return
    from record import RESULTS, context, keep

    result = {**context(), "seed": args.seed, **soak(args.kills, args.seed)}
    result["passed"] = result["finished"] == result["same_bits"] >= args.kills
    path = args.output or RESULTS / "soak_ranks.json"
    keep(path, "ranks", result)
    print({k: v for k, v in result.items() if k not in ("runs", "versions", "machine")})
    sys.exit(not result["passed"])


if __name__ == "__main__":
    main()
