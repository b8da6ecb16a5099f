"""What each choice of the coupled fit is worth: test NLL after few and after many steps.

python bench/optimiser.py              # four sets, on a GPU if there is one
python bench/optimiser.py shuttle

M = 200 inducing points, full covariances, batches of 1,024 rows. A variant differs from the
default in the one thing that its name says.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from data import load
from record import add_output, context, keep, scores

from conjugp import FitOptions, GPClassifier
from conjugp._fit import learn, starts
from conjugp._gp.posterior import State
from conjugp._inference.settings import Settings
from conjugp.kernels import RBF, Kernel

SETS = ("shuttle", "mnist", "fashion_mnist", "covtype")
STEPS = (50, 500)
BATCH = 1024


@dataclass(frozen=True)
class Variant:
    """What is done otherwise."""

    settings: dict[str, Any] = field(default_factory=dict)  # of the minibatch steps
    share: float | None = None  # of the user's units in those of the kernel; None: chosen
    length: float = starts.FIRST_LENGTH  # of the kernel at the start, in median distances
    points: str = ""  # k-means of all rows, in the kernel's lengthscales or in "working" units
    batch: int = BATCH
    kept: float | str = "auto"  # of the variance that inducing points leave


VARIANTS = {
    "default": Variant(),
    "all of the variance": Variant(kept=1.0),
    "a fifth of the variance": Variant(kept=0.2),
    "a fiftieth of the variance": Variant(kept=0.02),
    "momentum 0.9": Variant({"momentum": 0.9}),
    "kernels at Adam's rate": Variant({"kernel_rate": 1.0}),
    "hyperparameters at rest for five steps": Variant({"settled": 5}),
    "inducing points' rate like the rest's": Variant({"inducing_rate": 1.0}),
    "inducing points at rest": Variant({"learn_inducing": False}),
    "half the rates": Variant({"learning_rate": 0.05}),
    "twice the rates": Variant({"learning_rate": 0.2}),
    "features alike": Variant(share=0.0),
    "features half as in the user's units": Variant(share=0.5),
    "features as in the user's units": Variant(share=1.0),
    "start 0.35 long": Variant(length=0.35),
    "start 0.5 long": Variant(length=0.5),
    "start 1 long": Variant(length=1.0),
    "k-means of all classes together": Variant(points="kernel"),
    "the same in working units": Variant(points="working"),
    "as many rows in batches of 512": Variant(batch=512),
    "as many rows in batches of 2,048": Variant(batch=2048),
}


def patches(variant: Variant) -> list[Any]:
    """What does it."""
    train, first_kernel, first_points = learn.train, starts.first_kernel, starts.first_points

    def varied_train(state: State, data: Any, settings: Settings, *args: Any, **how: Any) -> Any:
        given = variant.settings if how["stage"] == "fit" else {}
        return train(state, data, replace(settings, **given), *args, **how)

    def varied_kernel(plan: Any, data: Any, scaling: Any) -> Kernel:
        if variant.share is None:
            return first_kernel(plan, data, scaling)
        scale, X = torch.as_tensor(scaling.scale), data.head(starts.ROWS).X
        lengths = starts.lengthscales(X, scale, variant.share)
        return RBF().filled(variant.length * lengths, starts.FIRST_VARIANCE)

    def varied_points(run: Any, kernel: Kernel, data: Any, n: int, by_class: bool) -> Any:
        if not variant.points:
            return first_points(run, kernel, data, n, by_class)
        metric = kernel if variant.points == "kernel" else RBF(1.0, 1.0)
        return first_points(run, metric, data, n, False)

    return [
        patch.object(learn, "train", varied_train),
        patch.object(starts, "first_kernel", varied_kernel),
        patch.object(starts, "first_points", varied_points),
        patch.object(starts, "FIRST_LENGTH", variant.length),
    ]


def nll(name: str, variant: Variant, n_steps: int, device: str) -> float:
    """Test NLL of a fit of so many steps of 1,024 rows."""
    split = load(name)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for one in patches(variant):
            stack.enter_context(one)
        warnings.simplefilter("ignore")  # fits cut short on purpose
        model = GPClassifier(
            n_inducing=200,
            covariance="full",
            batch_size=variant.batch,
            max_epochs=n_steps * BATCH / len(split.y_train),
            device=device,
            random_state=0,
            options=FitOptions(conditional_variance=variant.kept),
        )
        model.fit(split.X_train, split.y_train)
    return scores(split.y_test, model.predict_proba(split.X_test), model.classes_)["nll"]


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: NLL by set and number of steps, and the median ratio to the default's."""
    columns = [f"{name} {n}" for name in found for n in STEPS]
    lines = [f"| | {' | '.join(columns)} | median |", "|---|" + "--:|" * (len(columns) + 1)]
    for variant in VARIANTS:
        cells, ratios = [], []
        for by_variant in found.values():
            for n in map(str, STEPS):
                cells.append(f"{by_variant[variant][n]:.4f}")
                ratios.append(by_variant[variant][n] / by_variant["default"][n])
        lines.append(f"| {variant} | {' | '.join(cells)} | {statistics.median(ratios):.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Fit every variant on every set, keep all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help=f"{', '.join(SETS)} (all)")
    add_output(parser, "optimiser.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name in args.sets or SETS:
        found[name] = {
            variant: {str(n): nll(name, how, n, device) for n in STEPS}
            for variant, how in VARIANTS.items()
        }
        shared = {
            "momentum": 0.8,
            "inducing_rate": 0.5,
            "settled": 2,
            "conditional_variance": learn.LEAST_KEPT,
            "length": starts.FIRST_LENGTH,
        }
        entry = {"device": device, "default": shared, "nll": found[name]}
        keep(args.output, name, {**context(), **entry})
        print(name, found[name], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
