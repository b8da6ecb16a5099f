"""How much of a default fit is matrix products and factorisations.

python bench/default_fit.py            # MNIST
python bench/default_fit.py shuttle

Seconds of `GPClassifier().fit`, and in the same run those inside torch's products, factorisations
and triangular solves, as its profiler counts them on the main thread.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from data import load
from record import add_output, context, keep, scores

from conjugp import GPClassifier

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "addmv_", "dot", "vdot")
FACTORS = ("linalg_cholesky_ex", "linalg_solve_triangular", "cholesky_inverse", "_linalg_eigh")


def measure(name: str) -> dict[str, Any]:
    """A fit, and another one under the profiler, which makes it a little slower."""
    split = load(name)

    def fit() -> tuple[GPClassifier, float]:
        model = GPClassifier(random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            model.fit(split.X_train, split.y_train)
        return model, time.perf_counter() - began

    _, seconds = fit()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model, watched = fit()
    spent = {
        event.key.removeprefix("aten::"): 1e-6 * event.self_cpu_time_total
        for event in profiler.key_averages()
    }
    products = sum(spent.get(key, 0.0) for key in (*PRODUCTS, *FACTORS))
    most = dict(sorted(spent.items(), key=lambda item: -item[1])[:20])
    return {
        "seconds": seconds,
        "profiled_seconds": watched,
        "product_seconds": products,
        "ratio": watched / products,
        "spent": most,
        **scores(split.y_test, model.predict_proba(split.X_test), model.classes_),
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", default=["mnist"])
    add_output(parser, "default_fit.json")
    args = parser.parse_args()
    for name in args.sets:
        found = measure(name)
        keep(args.output, name, {**context(), **found})
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
