"""Fits beside other work: wall time with the library's threads, and with one thread for everything.

    python bench/threads.py            # CONJUGP_DATA for Letter, else rows like it

Twenty fits to 300 rows, and one to 15,000, by processes of their own: on the machine as it is and
beside as many busy processes as it has cores. One thread means OMP_NUM_THREADS=1; fits of both
kinds take turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from record import add_output, context, keep

SMALL, N_FITS = 300, 20
CASES = {"20 fits of 300 rows": "small", "a fit of 15,000 rows": "large"}
LIMIT = 1.5  # times one thread's seconds that small fits beside other work may take
BUSY = "while True: pass"


def work(case: str) -> float:
    """Seconds of the fits of one case."""
    import numpy as np

    from conjugp import GPClassifier

    if case == "small":
        rng = np.random.default_rng(0)
        X = rng.standard_normal((SMALL, 5))
        y = (X[:, :3] + 0.5 * rng.standard_normal((SMALL, 3))).argmax(1)
        n_fits = N_FITS
    else:
        X, y = letter()
        n_fits = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        for seed in range(n_fits):
            GPClassifier(random_state=seed).fit(X, y)
    return time.perf_counter() - began


def letter() -> tuple[Any, Any]:
    """The training rows of Letter, or as many of 26 clouds."""
    import numpy as np
    from data import MissingDataError, load

    try:
        found = load("letter")
        return found.X_train[:15_000], found.y_train[:15_000]
    except MissingDataError:
        rng = np.random.default_rng(0)
        y = rng.integers(26, size=15_000)
        return 2 * rng.standard_normal((26, 16))[y] + rng.standard_normal((15_000, 16)), y


@contextmanager
def beside(n: int) -> Iterator[None]:
    """n processes that never wait."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def alone(case: str, one_thread: bool) -> float:
    """The same in a process of its own."""
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {k: v for k, v in os.environ.items() if k not in limits}
    if one_thread:
        environment |= dict.fromkeys(limits, "1")
    command = [sys.executable, __file__, "--work", case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(case: str, n_busy: int, repeats: int) -> dict[str, Any]:
    """Medians of both in turn."""
    times: dict[str, list[float]] = {"as it is": [], "one thread": []}
    with beside(n_busy):
        for _ in range(repeats):
            for name, found in times.items():
                found.append(alone(case, name == "one thread"))
    mine, one = (median(found) for found in times.values())
    return {"seconds": times, "ratio": mine / one}


def main() -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", choices=list(CASES.values()), help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3)
    add_output(parser, "threads.json")
    arguments = parser.parse_args()
    if arguments.work:
        print(work(arguments.work))
        return 0
    cores, passed = context()["machine"]["cores"], True
    for title, case in CASES.items():
        found = {
            "quiet": measure(case, 0, arguments.repeats),
            "busy": measure(case, cores, arguments.repeats),
        }
        for where, one in found.items():
            print(f"{title}, {where}: {one['ratio']:.2f} times one thread, {one['seconds']}")
        if case == "small":
            passed = found["busy"]["ratio"] <= LIMIT
            found["passed"] = passed
        keep(arguments.output, title, {**context(), "busy processes": cores, **found})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
