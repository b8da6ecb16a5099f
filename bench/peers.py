"""How much sooner conjugp reaches the test NLL of GPyTorch's softmax SVGP, in one run.

python bench/peers.py shuttle --budget 60
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from data import SPLITS, load
from numpy.typing import NDArray
from record import add_output, context, keep, scores

SETS = [name for name, n in SPLITS.items() if n == 1]
IMAGES = ("mnist", "fashion_mnist")  # bytes, which need no standardising

# The same size for both: M = 200 k-means points, the same ones, learned by both.
SAME_GPYTORCH = {"n_inducing": 200, "batch_size": 200, "learning_rate": 0.01}
SAME_CONJUGP = {"n_inducing": 200, "covariance": "full"}
EPOCHS = (0.1, 0.15, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5)

# Each at its own best: the best of these, and of the runs above.
BEST_GPYTORCH = [
    {"n_inducing": 200, "batch_size": 200, "learning_rate": 0.03},
    {"n_inducing": 500, "batch_size": 1024, "learning_rate": 0.03},
]
BEST_CONJUGP = [{}, {"n_inducing": 1000}]

CLOSE = 1.001  # GPyTorch has reached its best NLL when it is this near
WANTED = 10.0  # ratio of seconds

Run = dict[str, Any]


# --- contestants: each call of these is a process of its own --------------------------------------


def alone(contestant: Callable[..., Run], *arguments: Any) -> Run:
    """Call a contestant in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(contestant, *arguments).result()


def inducing_points(name: str, settings: dict[str, Any]) -> Run:
    """The points that conjugp with these settings starts from, in the units of the data."""
    from conjugp import FitOptions, GPClassifier

    split = load(name)

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    options = FitOptions(callback=stop, on_interrupt="return")
    settings = {**settings, "learn_inducing": False}
    model = GPClassifier(**settings, random_state=0, options=options)
    model.fit(split.X_train, split.y_train)
    return {"Z": model.inducing_points_}


def conjugp_fit(name: str, settings: dict[str, Any]) -> Run:
    """One complete fit; its seconds are all of `fit`, k-means and temperature included."""
    began = time.perf_counter()
    from conjugp import GPClassifier

    imported = time.perf_counter() - began
    split = load(name)
    model = GPClassifier(**settings, random_state=0)
    with warnings.catch_warnings():
        # Fits cut short on purpose warn that they are not converged.
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        model.fit(split.X_train, split.y_train)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    proba = model.predict_proba(split.X_test)
    return {
        "settings": settings,
        "seconds": seconds,
        **scores(split.y_test, proba, model.classes_),
        "temperature": model.temperature_,
        "predict_seconds": time.perf_counter() - began,
        "import_seconds": imported,
    }


def gpytorch_fit(
    name: str, Z: NDArray, settings: dict[str, Any], budget: float, goal: float
) -> Run:
    """One training run; its seconds are those of training steps alone, inducing points given."""
    began = time.perf_counter()
    import svgp

    imported = time.perf_counter() - began
    options = {key: value for key, value in settings.items() if key != "n_inducing"}
    run = svgp.train(load(name), Z, **options, budget=budget, goal=goal)
    return {"settings": settings, "import_seconds": imported, **run}


# --- the contest ----------------------------------------------------------------------------------


def best_nll(run: Run) -> float:
    """The lowest test NLL on a run's curve."""
    return min((point["nll"] for point in run["curve"]), default=math.inf)


def seconds_to(run: Run, nll: float) -> float:
    """When a run's curve first was at or below a test NLL; infinity if never."""
    return next((p["seconds"] for p in run["curve"] if p["nll"] <= nll), math.inf)


def verdict(target: float, peer: Run, fits: list[Run]) -> Run:
    """Seconds of both to the target, and their ratio."""
    ours = [fit for fit in fits if fit["nll"] <= target]
    fastest = min(ours, key=lambda fit: fit["seconds"], default=None)
    theirs = seconds_to(peer, CLOSE * target)
    ratio = theirs / fastest["seconds"] if fastest else None
    return {
        "target_nll": target,
        "gpytorch_settings": peer["settings"],
        "gpytorch_seconds": theirs,
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
        self.points: dict[int, NDArray] = {}
        self.inputs = "standardised"
        self.tried: list[Run] = []

    def gpytorch(self, settings: dict[str, Any], budget: float, goal: float = -math.inf) -> Run:
        """One GPyTorch run on the inducing points that conjugp starts from."""
        M = settings["n_inducing"]
        if M not in self.points:
            found = alone(inducing_points, self.name, {**SAME_CONJUGP, "n_inducing": M})
            self.points[M] = found["Z"]
        settings = {"inputs": self.inputs, "shared": True, **settings}
        run = alone(gpytorch_fit, self.name, self.points[M], settings, budget, goal)
        failure = f", {run['failure']}" if "failure" in run else ""
        self.say(f"GPyTorch {settings}: NLL {best_nll(run):.4f} in {budget:g} s{failure}")
        return run

    def conjugp(self, settings: dict[str, Any]) -> Run:
        """One complete conjugp fit."""
        run = alone(conjugp_fit, self.name, settings)
        self.say(f"conjugp {settings}: NLL {run['nll']:.4f} in {run['seconds']:.2f} s")
        return run

    def choose_inputs(self) -> None:
        """Let GPyTorch have bytes divided by 255, or standardised, whichever suits it."""
        for inputs in ("raw", "standardised") if self.name in IMAGES else ():
            settings = {**SAME_GPYTORCH, "inputs": inputs}
            self.tried.append(self.gpytorch(settings, self.budget / 4))
        if self.tried:
            self.inputs = min(self.tried, key=best_nll)["settings"]["inputs"]

    def same_size(self, epochs: Iterable[float]) -> Run:
        """M = 200 for both: complete conjugp fits, longer and longer, until one is as good."""
        peer = self.gpytorch(SAME_GPYTORCH, self.budget)
        target, fits = best_nll(peer), []
        for n in epochs:
            fits.append(self.conjugp({**SAME_CONJUGP, "max_epochs": n}))
            if fits[-1]["nll"] <= target or fits[-1]["seconds"] > self.budget:
                break
        return {**verdict(target, peer, fits), "gpytorch": [peer], "conjugp": fits}

    def own_best(self, before: Run, epochs: Iterable[float]) -> Run:
        """The best GPyTorch setting within the budget against the fastest conjugp fit as good."""
        peers = before["gpytorch"] + [
            self.gpytorch(settings, self.budget)
            for settings in BEST_GPYTORCH
            if settings != SAME_GPYTORCH
        ]
        fits = [self.conjugp(settings) for settings in BEST_CONJUGP]
        peer = min(peers, key=best_nll)
        # Longer M = 200 fits, while they may still be the quickest to get there.
        tried = before["conjugp"][-1]
        for n in (n for n in epochs if n > tried["settings"]["max_epochs"]):
            reached = min([*before["conjugp"], *fits], key=lambda fit: fit["nll"])
            if tried["nll"] <= best_nll(peer) or tried["seconds"] > reached["seconds"]:
                break
            tried = self.conjugp({**SAME_CONJUGP, "max_epochs": n})
            fits.append(tried)
        found = verdict(best_nll(peer), peer, before["conjugp"] + fits)
        return {**found, "gpytorch": peers[1:], "conjugp": fits}

    def down_to_default(self, best: Run, times: float) -> Run:
        """How long the best GPyTorch setting needs for the NLL of conjugp's defaults, if ever."""
        default = next(fit for fit in best["conjugp"] if not fit["settings"])
        budget = times * default["seconds"]
        settings = best["gpytorch_settings"]
        peer = self.gpytorch(settings, budget, goal=default["nll"])
        reached = seconds_to(peer, default["nll"])
        return {
            "target_nll": default["nll"],
            "conjugp_seconds": default["seconds"],
            "gpytorch_settings": settings,
            "gpytorch_budget": budget,
            "gpytorch_best_nll": best_nll(peer),
            "reached": reached < math.inf,
            # Where it was not reached, the ratio is at least this.
            "ratio": min(reached, budget) / default["seconds"],
            "gpytorch": [peer],
        }


def table(name: str, result: dict[str, Any]) -> str:
    """Markdown: one line for each contest."""
    lines = [
        "| set | contest | test NLL to reach | GPyTorch s | conjugp s | ratio | |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    labels = {"same_size": "M = 200 for both", "own_best": "each at its own best"}
    for key, label in labels.items():
        r = result.get(key)
        if r is None:
            continue
        ours = "not reached" if r["conjugp_seconds"] is None else f"{r['conjugp_seconds']:.2f}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.1f}"
        cells = [name, label, f"{r['target_nll']:.4f}", f"{r['gpytorch_seconds']:.2f}", ours, ratio]
        lines.append("| " + " | ".join([*cells, "pass" if r["passed"] else "FAIL"]) + " |")
    r = result.get("down_to_default")
    if r is not None:
        sign = "" if r["reached"] else "> "
        theirs = f"{sign}{r['ratio'] * r['conjugp_seconds']:.1f}"
        cells = [name, "to the NLL of conjugp's defaults", f"{r['target_nll']:.4f}", theirs]
        cells += [f"{r['conjugp_seconds']:.2f}", f"{sign}{r['ratio']:.1f}", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(text: str) -> float:
    """A whole number where it is one."""
    value = float(text)
    return int(value) if value.is_integer() else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of GPyTorch (60)")
    parser.add_argument("--only-same", action="store_true", help="M = 200 for both, nothing else")
    parser.add_argument(
        "--longer",
        type=float,
        default=0.0,
        metavar="TIMES",
        help="also give GPyTorch this many times the seconds of conjugp's defaults (0: do not)",
    )
    parser.add_argument(
        "--epochs", type=number, nargs="+", default=EPOCHS, help="lengths of conjugp's M = 200 fits"
    )
    add_output(parser, "peers.json")
    arguments = parser.parse_args()
    contest = Contest(arguments.set, arguments.budget, lambda line: print(line, flush=True))
    contest.choose_inputs()
    result = {**context(), "budget": arguments.budget, "gpytorch_inputs": contest.inputs}
    result["inputs_tried"] = contest.tried
    result["same_size"] = contest.same_size(arguments.epochs)
    keep(arguments.output, arguments.set, result)
    if not arguments.only_same:
        result["own_best"] = contest.own_best(result["same_size"], arguments.epochs)
        keep(arguments.output, arguments.set, result)
        if arguments.longer:
            found = contest.down_to_default(result["own_best"], arguments.longer)
            result["down_to_default"] = found
            keep(arguments.output, arguments.set, result)
    print("\n" + table(arguments.set, result))


if __name__ == "__main__":
    main()
