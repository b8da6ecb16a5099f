"""The long runs: damaged and forged files, kills at random moments.

    python bench/soak.py                       # all, in full
    python bench/soak.py models --models 200   # one part, a share of it

Results go to results/soak.json. Everything is drawn from `--seed`, and a failure names the number
of its case.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time

from record import add_output, context, keep
from soak_kills import kill_fits, kill_saves
from soak_models import fuzz_models

PARTS = ("models", "fits", "saves", "tables")


def main() -> int:
    """Run the parts asked for, print and keep what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; all if none")
    parser.add_argument(
        "--models", type=int, default=10_000, help="damaged files, half as many forged"
    )
    parser.add_argument("--fits", type=int, default=60, help="kills of fits")
    parser.add_argument("--saves", type=int, default=200, help="kills of saves")
    parser.add_argument("--tables", type=int, default=2_000, help="damaged tables")
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser, "soak.json")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    run = {
        "models": lambda: fuzz_models(args.models, args.seed),
        "fits": lambda: kill_fits(args.fits, args.seed),
        "saves": lambda: kill_saves(args.saves, args.seed),
    }
    if importlib.util.find_spec("soak_tables") is not None:
        from soak_tables import fuzz_tables

        run["tables"] = lambda: fuzz_tables(args.tables, args.seed)
    passed = True
    for name in args.parts or run:
        began = time.monotonic()
        found = run[name]()
        found.setdefault("passed", True)
        found["seconds"] = round(time.monotonic() - began, 1)
        keep(args.output, name, {**context(), "seed": args.seed, **found})
        print(name, "passed" if found["passed"] else "FAILED", json.dumps(found))
        passed &= bool(found["passed"])
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
