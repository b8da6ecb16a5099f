"""Default fits never give out: random tables that are ugly in many ways, and all sets at hand.

    python bench/robust.py --cases 1000 --jobs 8

Of every case it asks that nothing is raised, that probabilities are such, and that their NLL on
test rows is at most 5 % and 0.02 nats above that of the classes' frequencies. The cases are those
of tests/random_cases.py. Where CONJUGP_DATA names a folder, all sets in it follow: `*.npz` files
as in bench/data.py and `tables/*.parquet`, each with up to 3,000 training rows, text one-hot.
Stopped and started again, it goes on with those that are left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from data import VARIABLE, one_hot, parts_of
from record import add_output, context, keep

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from random_cases import Case, allowed, base_nll, case, faults, nll

TRAIN_ROWS, TEST_ROWS = 3000, 5000


def examined(one: Case, seed: int) -> dict[str, Any]:
    """What a default fit makes of a case: scores, and what is wrong with them."""
    from conjugp import GPClassifier

    began, base = time.perf_counter(), base_nll(one)
    found: dict[str, Any] = {"description": one.description, "base": base}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", module="conjugp")  # as in the tests
            clf = GPClassifier(random_state=seed).fit(one.X_train, one.y_train, one.weight)
            p = clf.predict_proba(one.X_test)
        wrong = faults(p)
        found["nll"] = nll(one, p, clf.classes_)
        if not wrong and not found["nll"] <= allowed(base):
            wrong = [f"NLL {found['nll']:.4f}, frequencies {base:.4f}"]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        wrong = [f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"]
    return {**found, "wrong": "; ".join(wrong), "seconds": time.perf_counter() - began}


def work(name: str) -> dict[str, Any]:
    """One case by its name: a seed, or the path of a set."""
    seed = int(name) if name.isdigit() else 0
    return examined(case(seed) if name.isdigit() else from_file(Path(name)), seed)


# --- sets at hand -----------------------------------------------------------------------------


def from_file(path: Path) -> Case:
    """Some rows of a set to train on, and some to test on."""
    if path.suffix == ".parquet":
        X, y, test = parts_of(pd.read_parquet(path))
    else:
        with np.load(path) as file:
            parts = dict(file)
        test = None
        if "X" in parts:
            X, y = parts["X"], parts["y"]
        else:
            X, y = (np.concatenate([parts[f"{k}_train"], parts[f"{k}_test"]]) for k in "Xy")
            test = np.arange(len(y)) >= len(parts["y_train"])
    order = np.random.default_rng(0).permutation(len(y))
    if test is None:
        is_test = np.arange(len(y)) >= min(TRAIN_ROWS, round(0.7 * len(y)))
        train, held = order[~is_test], order[is_test]
    else:
        train, held = order[~test[order]][:TRAIN_ROWS], order[test[order]]
    held = held[np.isin(y[held], y[train])][:TEST_ROWS]
    A, B = one_hot(X, train, held) if path.suffix == ".parquet" else (X[train], X[held])
    y_train, n = y[train], len(train)
    said = f"{path.stem}: {n} x {A.shape[1]}, {len(np.unique(y_train))} classes"
    return Case(A.astype(float), y_train, B.astype(float), y[held], None, said)


def sets_at_hand() -> list[str]:
    """The paths of all sets in the user's folder."""
    folder = Path(os.environ.get(VARIABLE) or "/nowhere")
    found = [*folder.glob("*.npz"), *(folder / "tables").glob("*.parquet")]
    return [str(path) for path in sorted(found)]


# --- running ----------------------------------------------------------------------------------


def start_worker(threads: int) -> None:
    """Cores are shared among the workers, which end when they are told to."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def ran(names: Iterable[str], jobs: int, journal: Path) -> dict[str, dict[str, Any]]:
    """What came of all cases; those of an earlier run from its journal."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    lines = journal.read_text().splitlines(keepends=True) if journal.is_file() else []
    whole = [line for line in lines if line.endswith("}\n")]  # the last may be cut short
    journal.write_text("".join(whole))
    found = [json.loads(line) for line in whole]
    done = {one.pop("name"): one for one in found}
    names = list(names)
    left = [name for name in names if name not in done]
    threads = max(1, (os.cpu_count() or 1) // jobs)
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, spawn, start_worker, (threads,)) as pool,
        journal.open("a") as file,
    ):
        futures = {pool.submit(work, name): name for name in left}
        try:
            for n, future in enumerate(as_completed(futures), 1):
                name, one = futures[future], future.result()
                done[name] = one
                file.write(json.dumps({"name": name, **one}) + "\n")
                file.flush()
                if one["wrong"]:
                    print(f"{name} [{one['description']}]: {one['wrong']}", flush=True)
                if n % 100 == 0:
                    print(f"{n} of {len(left)}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise SystemExit(f"stopped; {journal} has {len(done)} cases") from None
    return {name: done[name] for name in names}


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is kept of all cases."""
    wrong = {
        Path(name).stem: f"{one['description']}: {one['wrong']}"
        for name, one in found.items()
        if one["wrong"]
    }
    gaps = sorted(one["nll"] - one["base"] for one in found.values() if "nll" in one)
    return {
        "cases": len(found),
        "passed": not wrong,
        "wrong": wrong,
        "seconds": sum(one["seconds"] for one in found.values()),
        "median_gain": -float(np.median(gaps)) if gaps else None,
    }


def main() -> int:
    """Run all cases, print and keep what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="random cases")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    add_output(parser, "robust.json")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.cases)
    parts = {"random": [str(seed) for seed in seeds], "sets": sets_at_hand()}
    journal, passed = arguments.output.with_suffix(".jsonl"), True
    for name, cases in parts.items():
        if not cases:
            continue
        found = summary(ran(cases, arguments.jobs, journal))
        keep(arguments.output, name, {**context(), **found})
        n = len(found["wrong"])
        print(f"{name}: {found['cases']} cases, {n} wrong, {found['seconds']:.0f} s of fits")
        passed &= found["passed"]
    journal.unlink()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
