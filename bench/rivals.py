"""conjugp's softmax and robust-max against GPyTorch's and GPflow's: seconds to the same test NLL.

python bench/rivals.py shuttle --budget 60 --gpflow-python ~/gpflow/bin/python
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from data import load
from numpy.typing import NDArray
from peers import (
    CLOSE,
    IMAGES,
    SAME_CONJUGP,
    SETS,
    Run,
    alone,
    best_nll,
    conjugp_fit,
    gpytorch_fit,
    inducing_points,
    number,
    seconds_to,
)
from record import add_output, context, keep, scores

LOOKS = 12  # at the test set, each as long as many steps
SVGP = {"n_inducing": 200, "batch_size": 200, "learning_rate": 0.01, "n_looks": LOOKS}
PEERS: dict[tuple[str, str], dict[str, Any]] = {
    ("GPyTorch", "softmax"): {**SVGP, "shared": True},
    ("GPflow", "softmax"): {**SVGP, "first_gamma": 1e-3, "gamma": 0.1},
    ("GPflow", "robust-max"): {**SVGP, "first_gamma": 1e-6, "gamma": 0.1},
}
LIKELIHOODS = ("softmax", "robust-max")

# The peers' start, and the posterior predictive as it is: this is what counts.
SAME_START = {**SAME_CONJUGP, "temperature": None, "initial_variance": 1.0}
KINDS = {"same_start": SAME_START, "defaults": SAME_CONJUGP}
EPOCHS = (0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5)
WANTED = 1.0  # ratio of seconds


# --- contestants: each is a process of its own ----------------------------------------------------


def our_fit(name: str, settings: dict[str, Any]) -> Run:
    """One complete conjugp fit, where `initial_variance` is an option like any other setting."""
    from conjugp import FitOptions

    plain = dict(settings)
    if "initial_variance" in plain:
        plain["options"] = FitOptions(initial_variance=plain.pop("initial_variance"))
    return {**conjugp_fit(name, plain), "settings": settings}


def has_gpflow(python: str) -> bool:
    """Whether an interpreter is there and finds GPflow."""
    test = "import sys, importlib.util as u; sys.exit(u.find_spec('gpflow') is None)"
    try:
        return subprocess.run([python, "-c", test], check=False).returncode == 0
    except OSError:
        return False


def gpflow_fit(
    python: str, name: str, Z: NDArray, settings: dict[str, Any], likelihood: str, budget: float
) -> Run:
    """One training run; its seconds are those of training steps alone, inducing points given."""
    given = {key: value for key, value in settings.items() if key != "n_inducing"}
    with TemporaryDirectory() as folder:
        points, options, output = (Path(folder) / f for f in ("Z.npy", "settings.json", "run.npz"))
        np.save(points, Z)
        options.write_text(json.dumps({**given, "likelihood": likelihood, "budget": budget}))
        script = Path(__file__).with_name("gpflow_svgp.py")
        command = [python, str(script), name, str(points), str(options), str(output)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            return {"settings": settings, "curve": [], "failure": f"its process ended: {last}"}
        with np.load(output) as file:
            run, looks = json.loads(str(file["result"])), file["proba"]
    y = load(name).y_test
    for point, proba in zip(run["curve"], looks, strict=True):
        point.update(scores(y, proba, np.arange(proba.shape[1])))
    return {"settings": settings, **run}


# --- the contest ----------------------------------------------------------------------------------


def verdict(peer: Run, fits: list[Run]) -> Run:
    """The fastest fit at or below the peer's best NLL, and the ratio of seconds."""
    target = best_nll(peer)
    theirs = seconds_to(peer, CLOSE * target)
    ours = [fit for fit in fits if fit["nll"] <= target]
    fastest = min(ours, key=lambda fit: fit["seconds"], default=None)
    ratio = theirs / fastest["seconds"] if fastest else None
    return {
        "target_nll": target,
        "peer_seconds": theirs,
        "conjugp_settings": fastest and fastest["settings"],
        "conjugp_seconds": fastest and fastest["seconds"],
        "conjugp_nll": fastest and fastest["nll"],
        "ratio": ratio,
        "passed": ratio is not None and ratio >= WANTED,
    }


class Contest:
    """All runs on one data set."""

    def __init__(self, name: str, budget: float, say: Callable[[str], None] = print) -> None:
        self.name, self.budget, self.say = name, budget, say
        # Images as bytes divided by 255, as they are usually given.
        self.inputs = "raw" if name in IMAGES else "standardised"

    def peers(self, python: str) -> list[Run]:
        """Every peer's run on the inducing points that conjugp starts from."""
        without = {key: value for key, value in SAME_START.items() if key != "initial_variance"}
        Z = alone(inducing_points, self.name, without)["Z"]
        gpflow = has_gpflow(python)
        if not gpflow:
            self.say(
                f"{python} has no GPflow: its runs, and robust-max, are left out. "
                "bench/README.md says how to install it; name its interpreter by --gpflow-python."
            )
        runs = []
        for (library, likelihood), settings in PEERS.items():
            settings = {**settings, "inputs": self.inputs}
            if library == "GPyTorch":
                run = alone(gpytorch_fit, self.name, Z, settings, self.budget, -math.inf)
            elif gpflow:
                run = gpflow_fit(python, self.name, Z, settings, likelihood, self.budget)
            else:
                continue
            runs.append({"library": library, "likelihood": likelihood, **run})
            failure = f", {run['failure']}" if "failure" in run else ""
            nll = best_nll(run)
            self.say(f"{library} {likelihood}: NLL {nll:.4f} in {self.budget:g} s{failure}")
        return runs

    def fits(self, likelihood: str, start: Run, target: float, epochs: Iterable[float]) -> list:
        """Complete conjugp fits, longer and longer, until one is as good."""
        fits: list[Run] = []
        for n in epochs:
            settings = {"likelihood": likelihood, **start, "max_epochs": n}
            fits.append(alone(our_fit, self.name, settings))
            run = fits[-1]
            self.say(f"conjugp {settings}: NLL {run['nll']:.4f} in {run['seconds']:.2f} s")
            if run["nll"] <= target or run["seconds"] > self.budget:
                break
        return fits

    def run(self, python: str, epochs: Iterable[float]) -> dict[str, Any]:
        """The peers, then conjugp down to the lowest NLL of the peers of each likelihood."""
        peers = self.peers(python)
        result: dict[str, Any] = {"budget": self.budget, "inputs": self.inputs, "peers": peers}
        result.update({"conjugp": {kind: {} for kind in KINDS}, "contests": []})
        for likelihood in LIKELIHOODS:
            rivals = [p for p in peers if p["likelihood"] == likelihood and p["curve"]]
            if not rivals:
                continue
            target = min(best_nll(peer) for peer in rivals)
            for kind, start in KINDS.items():
                found = self.fits(likelihood, start, target, epochs)
                result["conjugp"][kind][likelihood] = found
            for peer in rivals:
                contest = {"library": peer["library"], "likelihood": likelihood}
                for kind in KINDS:
                    contest[kind] = verdict(peer, result["conjugp"][kind][likelihood])
                result["contests"].append(contest)
        return result


def table(name: str, result: dict[str, Any]) -> str:
    """Markdown: one line for each likelihood of each peer."""
    lines = [
        "| set | likelihood | peer | test NLL to reach | peer s | conjugp s | ratio | | "
        "conjugp's defaults s | ratio |",
        "|---|---|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for contest in result["contests"]:
        same = contest["same_start"]
        cells = [name, contest["likelihood"], contest["library"]]
        cells += [f"{same['target_nll']:.4f}", f"{same['peer_seconds']:.2f}", *ours(same)]
        cells += ["pass" if same["passed"] else "FAIL", *ours(contest["defaults"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ours(found: Run) -> list[str]:
    """Seconds and ratio as they stand in the table."""
    if found["ratio"] is None:
        return ["not reached", ""]
    return [f"{found['conjugp_seconds']:.2f}", f"{found['ratio']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each peer (60)")
    parser.add_argument(
        "--gpflow-python",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter of an environment with GPflow (default: this one)",
    )
    parser.add_argument(
        "--epochs", type=number, nargs="+", default=EPOCHS, help="lengths of conjugp's fits"
    )
    add_output(parser, "rivals.json")
    arguments = parser.parse_args()
    load(arguments.set)  # says what is missing before any work
    contest = Contest(arguments.set, arguments.budget, lambda line: print(line, flush=True))
    python = os.path.expanduser(arguments.gpflow_python)
    result = {**context(), **contest.run(python, arguments.epochs)}
    keep(arguments.output, arguments.set, result)
    print("\n" + table(arguments.set, result))


if __name__ == "__main__":
    main()
