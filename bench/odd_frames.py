"""Odd and damaged frames give probabilities or an error that says what is wrong with them.

    python bench/odd_frames.py --cases 1000

The cases are those of tests/odd_cases.py: columns that hold anything at all, of pandas,
polars, pyarrow or NumPy, odd names and labels. Each is fitted, predicted, written to a file and
read again, and then the same frame is predicted damaged. What is neither is printed with its seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from record import add_output, context, keep

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from odd_cases import ALLOWED, odd_case, outcome


def main() -> int:
    """Run all cases, print and keep what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    add_output(parser, "odd_frames.json")
    arguments = parser.parse_args()
    found, wrong, began = Counter[str](), {}, time.perf_counter()
    for seed in range(arguments.first, arguments.first + arguments.cases):
        case = odd_case(seed)
        came = outcome(case)
        if came in ALLOWED:
            found[came] += 1
        else:
            wrong[str(seed)] = f"{case.description}: {came}"
            print(f"{seed} [{case.description}]: {came}", flush=True)
    result = {
        "cases": arguments.cases,
        "outcomes": {name: found[name] for name in ALLOWED},
        "passed": not wrong,
        "wrong": wrong,
        "seconds": time.perf_counter() - began,
    }
    keep(arguments.output, "frames", {**context(), **result})
    said = ", ".join(f"{found[name]} {name}" for name in ALLOWED)
    print(f"{arguments.cases} cases: {said}, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
