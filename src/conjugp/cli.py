"""The command line: ``conjugp demo`` compares GPClassifier with scikit-learn's own classifiers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

import conjugp
from conjugp import metrics
from conjugp.classifier import GPClassifier

N_TRAIN = 400  # of 1,797 digits: GaussianProcessClassifier's time grows as the cube of it
FORMATS = (".pdf", ".png", ".svg")

# Without markup, errors are plain lines that can be searched and piped.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Result(NamedTuple):
    """What one classifier did on the test rows."""

    name: str
    seconds: float
    classes: np.ndarray
    proba: np.ndarray  # (n, C)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(conjugp.__version__)
        raise typer.Exit()


@app.callback()
def _conjugp(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Calibrated multi-class Gaussian process classification."""


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option(help="Where to write the reliability diagram: .png, .pdf or .svg.")
    ] = Path("conjugp-demo.png"),
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Seed of the split and the fits.")
    ] = 0,
) -> None:
    """Classify handwritten digits beside two of scikit-learn's classifiers. Under a minute."""
    replaces = _check_output(output)
    X, y = load_digits(return_X_y=True)
    parts: Any = train_test_split(X, y, train_size=N_TRAIN, stratify=y, random_state=seed)
    X_train, X_test, y_train, y_test = parts
    typer.echo(
        f"Digits of scikit-learn: {len(X_train)} to train on, {len(X_test)} to test, "
        f"{X.shape[1]} pixels, {len(np.unique(y))} classes.\n"
        "conjugp takes the pixels as they are, scikit-learn's two classifiers get them scaled."
    )
    results = []
    # One thread each: as fair, and on matrices this small two threads mostly wait for each other.
    with threadpool_limits(1):
        for name, classifier in _classifiers(seed).items():
            typer.echo(f"Fitting {name} ...", err=True)
            began = time.perf_counter()
            classifier.fit(X_train, y_train)
            seconds = time.perf_counter() - began
            results.append(
                Result(name, seconds, classifier.classes_, classifier.predict_proba(X_test))
            )
    _print_table(results, y_test)
    _draw(results, y_test, output)
    typer.echo(
        f"Reliability diagram written to {output.resolve()}"
        + (", in place of the file that was there" if replaces else "")
    )


def main() -> None:
    """Run the command line."""
    app(prog_name="conjugp")


def _fail(message: str) -> typer.Exit:
    """Say what is wrong in one line; the caller raises what comes back."""
    typer.echo(f"conjugp: {message}", err=True)
    return typer.Exit(2)


def _check_output(path: Path) -> bool:
    """Whether there is such a file already; exits if it could not be written, before any work."""
    if path.suffix.lower() not in FORMATS:
        raise _fail(f"--output must end in {', '.join(FORMATS)}; got {str(path)!r}")
    existed = path.exists()
    try:
        with path.open("ab"):  # the only sure test, and it leaves a file as it is
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise _fail(f"--output {str(path)!r} cannot be written: {error.strerror}") from error
    return existed


def _classifiers(seed: int) -> dict[str, Any]:
    """The three, scikit-learn's with scaled inputs and the GP's kernel started where it can learn.

    conjugp comes first: it is what people are here for.
    """
    # With 64 scaled pixels distances are about 8 and more: from a lengthscale of 1, the default,
    # all kernel values are zero and nothing is learned.
    gp = GaussianProcessClassifier(1.0 * RBF(8.0), random_state=seed)
    return {
        "conjugp GPClassifier": GPClassifier(random_state=seed, verbose=1),
        "LogisticRegression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
        "GaussianProcessClassifier": make_pipeline(StandardScaler(), gp),
    }


def _print_table(results: list[Result], y: np.ndarray) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="Lower is better", title_justify="left")
    table.add_column("")
    for column in ("error", "NLL", "Brier", "ECE", "fit"):
        table.add_column(column, justify="right")
    for name, seconds, classes, p in results:
        error = (classes[p.argmax(axis=1)] != y).mean()
        scores = (
            f"{error:.2%}",
            f"{metrics.nll(y, p, labels=classes):.4f}",
            f"{metrics.brier(y, p, labels=classes):.4f}",
            f"{metrics.expected_calibration_error(y, p, labels=classes):.4f}",
            f"{seconds:.1f} s",
        )
        table.add_row(name, *scores)
    # At least this wide where the output is a file, so that no name is cut.
    console = Console()
    console.width = max(console.width, 80)
    console.print(table)


def _draw(results: list[Result], y: np.ndarray, output: Path) -> None:
    # Imported late, as it is slow; and a figure without pyplot needs no display.
    from matplotlib.figure import Figure

    from conjugp.plotting import ReliabilityDisplay

    figure = Figure(figsize=(6.4, 6.8), layout="constrained")
    ax = figure.subplots()
    for result in results:
        ReliabilityDisplay.from_predictions(
            y, result.proba, labels=result.classes, name=result.name, ax=ax
        )
    ax.set_title(
        f"Handwritten digits, {N_TRAIN} to train on and {len(y)} to test\n"
        "On the dashed line probabilities mean what they say; small dots are few images",
        loc="left",
        fontsize="medium",
    )
    figure.savefig(output, dpi=150)
