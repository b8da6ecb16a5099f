"""How much sooner conjugp reaches the test NLL that other libraries reach in a budget.

python bench/compare.py shuttle --budget 60 --gpflow-python ~/gpflow/bin/python
python bench/compare.py shuttle --tune    # find the peers' settings anew
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from contestants import (
    Run,
    alone,
    conjugp_fit,
    first_state,
    gpflow_fit,
    gpytorch_fit,
    has_gpflow,
    sklearn_fit,
)
from data import SPLITS, MissingDataError, Start, load
from record import RESULTS, add_output, context, keep

SETS = [name for name, n in SPLITS.items() if n == 1]
IMAGES = ("mnist", "fashion_mnist")  # bytes, which need no standardising
# Where settings that were not looked for on a set are taken from.
SAME_AS = {
    "mnist": ("shuttle",),
    "fashion_mnist": ("mnist", "shuttle"),
    "covtype": ("shuttle",),
    "sensit": ("covtype", "shuttle"),
    "letter": ("shuttle",),
}

# Complete fits, longer and longer, until one is as good as the best peer.
CONJUGP = {"n_inducing": 200, "covariance": "full"}
EPOCHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 1.8, 2.1, 2.5, 3, 5)
# A pass over half a million rows is long.
FEW_EPOCHS = {"covtype": (0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.35, 0.5, 1)}
REPEATS = 3  # of a fit, for the median of its seconds
LONGER = (2, 5, 15)  # times the last of these lengths: one fit each, for where it goes from there

CLOSE = 1.001  # a peer has reached its best NLL when it is this near
WANTED, EASIER = 20.0, {"covtype": 12.0}  # ratios of seconds; with the softmax on some sets
WORSE = 1.1  # a peer whose NLL is best at the first look and ends so much higher has failed

SHORT = 1 / 4  # of the budget that a setting gets when it is tried
LAST_LOOKS = (0.5, 0.75, 1.0)  # at the test set in those runs


class Peer(NamedTuple):
    """A library and a method, and the settings that are tried one after the other."""

    label: str
    fit: Callable[..., Run]
    fixed: dict[str, Any]
    choices: dict[str, tuple[Any, ...]]  # the first of each is where the search starts


_LEARN = {"learn_inducing": (True, False)}
_BATCH = {"batch_size": (200, 1000)}
_NATURAL = {"learning_rate": (0.01, 0.03), "natural_step": (0.1, 0.02), **_LEARN}

PEERS = {
    "gpytorch-adam": Peer(
        "GPyTorch softmax, Adam",
        gpytorch_fit,
        {"optimiser": "adam"},
        {
            "learning_rate": (0.03, 0.01),
            **_BATCH,
            **_LEARN,
            "kernel": ("same", "unit"),
            "inputs": ("raw", "standardised"),
        },
    ),
    "gpytorch-ngd": Peer(
        "GPyTorch softmax, NGD",
        gpytorch_fit,
        {"optimiser": "ngd, triangular", "first_step": 1e-3, "kernel": "same"},
        {**_NATURAL, **_BATCH},
    ),
    "gpflow-softmax": Peer(
        "GPflow softmax, natural gradients",
        gpflow_fit,
        {"likelihood": "softmax", "first_step": 1e-3, "kernel": "same", "batch_size": 200},
        _NATURAL,
    ),
    "gpflow-robust-max": Peer(
        "GPflow robust-max, natural gradients",
        gpflow_fit,
        {"likelihood": "robust-max", "first_step": 1e-6, "kernel": "same", "batch_size": 200},
        _NATURAL,
    ),
    "scikit-learn": Peer("scikit-learn, exact, fewer rows", sklearn_fit, {"kernel": "unit"}, {}),
}


def best_nll(run: Run) -> float:
    """The lowest test NLL on a run's curve."""
    return min((point["nll"] for point in run["curve"]), default=math.inf)


def seconds_to(run: Run, nll: float) -> float:
    """When a run's curve came down to a test NLL; infinity if never.

    Between two looks at one training run it is taken to be straight, in favour of the peer.
    """
    before = None
    for point in run["curve"]:
        if point["nll"] <= nll:
            if before is None or "rows" in point or not math.isfinite(before["nll"]):
                return point["seconds"]
            share = (before["nll"] - nll) / (before["nll"] - point["nll"])
            return before["seconds"] + share * (point["seconds"] - before["seconds"])
        before = point
    return math.inf


def only_worse(run: Run) -> bool:
    """Whether a run was never as good again as at the first look at it."""
    first, *later = (point["nll"] for point in run["curve"])
    return bool(later) and min(later) > first and later[-1] >= WORSE * first


def wanted_of(name: str, key: str) -> float:
    """The ratio of seconds that is wanted against a peer on a set."""
    return WANTED if "robust-max" in key else EASIER.get(name, WANTED)


def verdict(peer: Run, fits: list[Run], wanted: float) -> Run:
    """The fastest fit at or below the peer's best NLL, and the ratio of seconds."""
    target = best_nll(peer)
    theirs = seconds_to(peer, CLOSE * target)
    ours = [fit for fit in fits if fit["nll"] <= target]
    fastest = min(ours, key=lambda fit: fit["seconds"], default=None)
    ratio = theirs / fastest["seconds"] if fastest else None
    return {
        "target_nll": target,
        "error": min((p["error"] for p in peer["curve"] if p["nll"] == target), default=None),
        "peer_seconds": theirs,
        "conjugp_settings": fastest and fastest["settings"],
        "conjugp_seconds": fastest and fastest["seconds"],
        "conjugp_nll": fastest and fastest["nll"],
        "ratio": ratio,
        "wanted": wanted,
        "only_worse": only_worse(peer),
        "passed": only_worse(peer) or (ratio is not None and ratio >= wanted),
    }


class Contest:
    """All runs on one data set."""

    def __init__(
        self, name: str, budget: float, python: str, say: Callable[[str], None] = print
    ) -> None:
        self.name, self.budget, self.python, self.say = name, budget, python, say
        self._start: Start | None = None

    @property
    def start(self) -> Start:
        """The inducing points and the kernel that all start from."""
        if self._start is None:
            self._start = alone(first_state, self.name, CONJUGP)
        return self._start

    def peer(self, key: str, settings: dict[str, Any], budget: float) -> Run:
        """One run of a peer."""
        peer = PEERS[key]
        if peer.fit is gpflow_fit:
            run = gpflow_fit(self.name, self.start, settings, budget, self.python)
        else:
            run = alone(peer.fit, self.name, self.start, settings, budget)
        failure = f", {run['failure']}" if "failure" in run else ""
        self.say(f"{peer.label} {settings}: NLL {best_nll(run):.4f} in {budget:g} s{failure}")
        return run

    def tune(self, key: str) -> Run:
        """A peer's best settings: one choice after the other, each by a short run's test NLL."""
        peer, runs = PEERS[key], []
        choices = dict(peer.choices)
        if self.name not in IMAGES:
            choices.pop("inputs", None)
        best, lowest = first_settings(key, self.name), math.inf
        for name, values in choices.items():
            for value in values[1:] if runs else values:
                tried = {**best, name: value}
                run = self.peer(key, {**tried, "looks": LAST_LOOKS}, SHORT * self.budget)
                runs.append({"settings": tried, **{k: run[k] for k in run if k != "settings"}})
                if best_nll(run) < lowest:
                    best, lowest = tried, best_nll(run)
        return {"settings": best, "nll": lowest, "runs": runs}

    def fits(self, target: float, epochs: Iterable[float]) -> list[Run]:
        """Complete conjugp fits, longer and longer, until one is as good."""
        fits: list[Run] = []
        for n in epochs:
            fits.append(self.conjugp(n, REPEATS))
            if fits[-1]["nll"] <= target or fits[-1]["seconds"] > self.budget:
                break
        return fits

    def longer(self, last: Run) -> list[Run]:
        """Fits of several times the length of the last one, as long as none outlasts the peers."""
        room = self.budget / last["seconds"]
        return [
            self.conjugp(factor * last["settings"]["max_epochs"], 1)
            for factor in LONGER
            if factor < room
        ]

    def conjugp(self, epochs: float, repeats: int) -> Run:
        """Complete fits of so many epochs, all alike but for their seconds."""
        settings = {**CONJUGP, "max_epochs": epochs}
        runs = [alone(conjugp_fit, self.name, settings) for _ in range(repeats)]
        each = [run["seconds"] for run in runs]
        run = {**runs[0], "seconds": statistics.median(each), "all_seconds": each}
        self.say(f"conjugp {epochs:g} epochs: NLL {run['nll']:.4f} in {run['seconds']:.2f} s")
        return run

    def run(self, settings: dict[str, dict[str, Any]], epochs: Iterable[float]) -> dict[str, Any]:
        """Every peer with its settings, then conjugp down to the lowest NLL of them all."""
        runs = {key: self.peer(key, settings[key], self.budget) for key in settings}
        fits = self.fits(min(map(best_nll, runs.values()), default=-math.inf), epochs)
        contests = {
            key: verdict(run, fits, wanted_of(self.name, key))
            for key, run in runs.items()
            if math.isfinite(best_nll(run))
        }
        fits += self.longer(fits[-1])
        return {"budget": self.budget, "peers": runs, "conjugp": fits, "contests": contests}


def usual_inputs(name: str) -> str:
    """Bytes divided by 255, or standardised."""
    return "raw" if name in IMAGES else "standardised"


def first_settings(key: str, name: str) -> dict[str, Any]:
    """Where the search for a peer's settings on a set starts."""
    peer = PEERS[key]
    first = {choice: values[0] for choice, values in peer.choices.items()}
    return {**peer.fixed, **first, "inputs": usual_inputs(name)}


def tuned(path: Path, name: str, key: str) -> tuple[dict[str, Any], str | None]:
    """The best settings of a peer, and the set they were found on: this one or one like it.

    Where nobody has looked, those that a search would start from.
    """
    sets = json.loads(path.read_text())["sets"] if path.is_file() else {}
    settings = first_settings(key, name)
    for place in (name, *SAME_AS.get(name, ())):
        found = sets.get(place, {}).get("peers", {}).get(key)
        if found is not None:
            alike = usual_inputs(place) == usual_inputs(name)
            inputs = (found["settings"] if alike else settings)["inputs"]
            known = {k: v for k, v in found["settings"].items() if k in settings}
            return {**settings, **known, "inputs": inputs}, place
    return settings, None


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: one line for every peer on every set."""
    lines = [
        "| set | peer | inducing points | set-up s | error | NLL | peer s | conjugp s | ratio | |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, result in results.items():
        for key, run in result["peers"].items():
            cells = [name, PEERS[key].label, points_of(run["settings"])]
            setup = run.get("setup_seconds", 0.0) + run.get("import_seconds", 0.0)
            found = result["contests"].get(key)
            if found is None:
                lines.append("| " + " | ".join([*cells, "", "", "", "", "", "", "fails"]) + " |")
                continue
            cells += [f"{setup:.0f}", f"{found['error']:.4f}", f"{found['target_nll']:.4f}"]
            cells.append(f"{found['peer_seconds']:.1f}")
            if found["ratio"] is None:
                cells += ["not reached", ""]
            else:
                cells += [f"{found['conjugp_seconds']:.2f}", f"{found['ratio']:.1f}"]
            lines.append("| " + " | ".join([*cells, remark(run, found)]) + " |")
    return "\n".join(lines)


def points_of(settings: dict[str, Any]) -> str:
    """Whether a peer's inducing points are learned, as it stands in the table."""
    return {True: "learned", False: "fixed"}.get(settings.get("learn_inducing"), "none")  # type: ignore[arg-type]


def remark(run: Run, found: Run) -> str:
    """What else there is to say of a run."""
    said = [] if found["passed"] else [f"below {found['wanted']:g}"]
    if found["only_worse"]:
        said.append("fails: NLL best at first look")
    if run.get("restarts"):
        n = len(run["restarts"])
        said.append(f"{n} restart{'s' if n > 1 else ''} after NaN")
    if "failure" in run:
        said.append("failed")
    if "rows" in run["curve"][-1]:
        said.append(f"{run['curve'][-1]['rows']:,} rows")
    return ", ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+", choices=SETS, metavar="set", help=", ".join(SETS))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each peer (60)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="peer")
    parser.add_argument("--tune", action="store_true", help="find the peers' settings anew")
    parser.add_argument("--tuning", type=Path, default=RESULTS / "tuning.json")
    parser.add_argument(
        "--gpflow-python",
        default=os.environ.get("CONJUGP_GPFLOW_PYTHON", sys.executable),
        metavar="PYTHON",
        help="of an environment with GPflow (default: CONJUGP_GPFLOW_PYTHON, or this one)",
    )
    parser.add_argument("--epochs", type=float, nargs="+", help="lengths of conjugp's fits")
    add_output(parser, "compare.json")
    arguments = parser.parse_args()
    for name in arguments.sets:
        try:
            load(name)  # says what is missing before any work
        except MissingDataError as error:
            parser.error(str(error))
    python, peers = os.path.expanduser(arguments.gpflow_python), arguments.peers
    if not has_gpflow(python):
        print(
            f"{python} has no GPflow: its runs are left out. bench/README.md says how to install "
            "it; name its interpreter by --gpflow-python.",
            flush=True,
        )
        peers = [key for key in peers if PEERS[key].fit is not gpflow_fit]
    results = {}
    for name in arguments.sets:
        contest = Contest(name, arguments.budget, python, lambda line: print(line, flush=True))
        if arguments.tune:
            tune(contest, peers, arguments.tuning)
            continue
        epochs = arguments.epochs or FEW_EPOCHS.get(name, EPOCHS)
        chosen = {key: tuned(arguments.tuning, name, key) for key in peers}
        found = contest.run({key: settings for key, (settings, _) in chosen.items()}, epochs)
        found["tuned_on"] = {key: place for key, (_, place) in chosen.items()}
        results[name] = {**context(), **found}
        keep(arguments.output, name, results[name])
    if results:
        print("\n" + table(results))


def tune(contest: Contest, keys: Iterable[str], path: Path) -> None:
    """Tune peers on one set and keep what was found, beside that of the others."""
    kept = json.loads(path.read_text())["sets"] if path.is_file() else {}
    found = kept.get(contest.name, {}).get("peers", {})
    for key in keys:
        if PEERS[key].choices:
            found[key] = {"budget": SHORT * contest.budget, **contest.tune(key)}
            keep(path, contest.name, {**context(), "peers": found})


if __name__ == "__main__":
    main()
