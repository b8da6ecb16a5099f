"""Draw the pictures of the documentation: ``python docs/make_images.py``. Two minutes."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB

from conjugp import GPClassifier, kernels
from conjugp.plotting import (
    ClassCalibrationDisplay,
    InducingDisplay,
    PredictionMapDisplay,
    RelevanceDisplay,
    ReliabilityDisplay,
    TrainingCurveDisplay,
)

IMAGES = Path(__file__).parent / "images"
COLORS = ("#2a6fbb", "#e07b39", "#3a9d5d")


def pinwheel(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three curved arms that overlap, in units nobody would have chosen: metres and millibars."""
    rng = np.random.default_rng(seed)
    y = rng.integers(3, size=n)
    radius = np.abs(1.2 + 0.55 * rng.standard_normal(n))
    angle = 2 * np.pi * y / 3 + 0.9 * radius + 0.5 * rng.standard_normal(n)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return x * (0.04, 250.0) + (0.0, 1000.0), y


def probability_map(ax: Axes, clf: GPClassifier, X: np.ndarray, y: np.ndarray) -> None:
    """Mix the colours of the classes by their probabilities; grey where the model cannot tell."""
    low, high = X.min(axis=0), X.max(axis=0)
    (x0, y0), (x1, y1) = low - 0.35 * (high - low), high + 0.35 * (high - low)
    first, second = np.linspace(x0, x1, 240), np.linspace(y0, y1, 240)
    grid = np.stack(np.meshgrid(first, second), axis=-1).reshape(-1, 2)
    p = clf.predict_proba(grid)
    entropy = -(p * np.log(np.maximum(p, 1e-12))).sum(axis=1) / np.log(p.shape[1])
    certain = (1 - entropy)[:, None] ** 0.8
    mixed = p @ np.array([to_rgb(c) for c in COLORS])
    rgb = certain * (0.25 + 0.75 * mixed) + (1 - certain) * 0.93
    ax.imshow(
        rgb.reshape(240, 240, 3).clip(0, 1),
        extent=(x0, x1, y0, y1),
        origin="lower",
        aspect="auto",
        interpolation="bilinear",
    )
    for label in range(3):
        ax.scatter(*X[y == label].T, 9, color=COLORS[label], edgecolors="white", lw=0.4)
    Z = clf.inducing_points_
    inside = (Z > (x0, y0)).all(axis=1) & (Z < (x1, y1)).all(axis=1)
    ax.scatter(*Z[inside].T, 46, color="black", marker="x", lw=1.5, label="inducing points")
    ax.set(xlim=(x0, x1), ylim=(y0, y1), xlabel="first feature", ylabel="second feature")
    ax.legend(loc="upper right", framealpha=0.9)


def overview() -> None:
    """The picture of the README."""
    X, y = pinwheel(600, 0)
    X_test, y_test = pinwheel(20_000, 1)
    clf = GPClassifier(n_inducing=30, max_epochs=500, random_state=0).fit(X, y)
    figure = Figure(figsize=(11.2, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    probability_map(left, clf, X, y)
    left.set_title("Class probabilities from 600 points; grey: cannot tell", loc="left")
    others = {
        "conjugp": clf,
        "random forest": RandomForestClassifier(random_state=0).fit(X, y),
        "scikit-learn's GP": GaussianProcessClassifier(1.0 * RBF(), random_state=0).fit(
            (X - X.mean(axis=0)) / X.std(axis=0), y
        ),
    }
    scaled = (X_test - X.mean(axis=0)) / X.std(axis=0)
    for (name, other), color in zip(others.items(), ("#111111", "#b5651d", "#7a5fb0"), strict=True):
        p = other.predict_proba(scaled if name == "scikit-learn's GP" else X_test)
        ReliabilityDisplay.from_predictions(y_test, p, name=name, ax=right, color=color)
    right.set_title("How often predictions are right, by confidence", loc="left")
    figure.savefig(IMAGES / "overview.png", dpi=130)


def uncertainty() -> None:
    """Images that are clear, doubtful, and no digits at all (docs/examples/uncertainty.md)."""
    X, y = load_digits(return_X_y=True)
    X_train, X_test, y_train, _ = train_test_split(X, y, train_size=600, stratify=y, random_state=0)
    kernel = kernels.RBF(25.0, 30.0)
    clf = GPClassifier(kernel, learn_hyperparameters=False, random_state=0).fit(X_train, y_train)
    order = clf.predict_proba(X_test).max(axis=1).argsort()
    rng = np.random.default_rng(0)
    shuffled = X_test[0][rng.permutation(64)]
    noise = rng.uniform(0, 16, 64)
    rows = {
        "clear": X_test[order[[-1, -200]]],
        "doubtful": X_test[order[[0, 3]]],
        "no digit": np.stack([shuffled, noise]),
    }
    figure = Figure(figsize=(11.2, 4.2), layout="constrained")
    axes = figure.subplots(2, 6)
    for i, (title, images) in enumerate(rows.items()):
        for j, image in enumerate(images):
            top, below = axes[:, 2 * i + j]
            p = clf.predict_proba(image[None])[0]
            top.imshow(image.reshape(8, 8), cmap="gray_r")
            top.set(xticks=[], yticks=[])
            top.set_title(title)
            below.bar(
                range(10), p, color=["#2a6fbb" if k == p.argmax() else "0.7" for k in range(10)]
            )
            below.set(ylim=(0, 1), xticks=range(10), yticks=(0, 0.5, 1))
            below.spines[["top", "right"]].set_visible(False)
            if 2 * i + j:
                below.set_yticklabels([])
    axes[1, 0].set_ylabel("probability")
    figure.savefig(IMAGES / "uncertainty.png", dpi=130)


def paper() -> None:
    """The paper's settings beside the defaults (docs/examples/paper.md)."""
    X, y = load_digits(return_X_y=True)
    X_train, X_test, y_train, y_test = train_test_split(
        X, y, train_size=600, stratify=y, random_state=0
    )
    figure = Figure(figsize=(5.6, 5.8), layout="constrained")
    ax = figure.subplots()
    runs = {
        "the paper's method": GPClassifier.paper(learning_rate=0.1, random_state=0),
        "the same, tight bound": GPClassifier.paper(
            bound="tight", learning_rate=0.1, random_state=0
        ),
        "defaults": GPClassifier(random_state=0),
    }
    for (name, clf), color in zip(runs.items(), ("#b5651d", "#7a5fb0", "#111111"), strict=True):
        p = clf.fit(X_train, y_train).predict_proba(X_test)
        ReliabilityDisplay.from_predictions(y_test, p, name=name, ax=ax, color=color, n_bins=10)
    ax.set_title("Digits, 600 images to train on", loc="left")
    figure.savefig(IMAGES / "paper.png", dpi=130)


def three_in_a_row(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on a line whose class comes and goes, never surely."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(0, 10, n))
    odds = np.exp(2 * np.cos(2 * np.pi * (x[:, None] / 6 - np.arange(3) / 3)))
    return x[:, None], np.array([rng.choice(3, p=row / row.sum()) for row in odds])


def corner() -> None:
    """What bounds make of a large kernel variance (docs/examples/paper.md)."""
    X, y = three_in_a_row(45, 0)
    grid = np.linspace(0, 10, 400)[:, None]
    figure = Figure(figsize=(11.2, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey="row")
    colors = {
        "exact": "#111111",
        "tight": COLORS[2],
        "collapsed": COLORS[0],
        "augmented": COLORS[1],
    }
    for (top, below), variance in zip(axes.T, (1.0, 10.0, 100.0), strict=True):
        for bound, color in colors.items():
            clf = GPClassifier(
                kernels.RBF(1.0, variance),
                bound=bound,
                n_inducing=None,
                batch_size=None,
                learn_hyperparameters=False,
                prior_mean=0.0,
                temperature=None,
                max_epochs=400,
            ).fit(X, y)
            style = {"color": color, "lw": 2.4 if bound == "exact" else 1.4}
            top.plot(grid, clf.predict_proba(grid)[:, 0], **style, label=bound)
            below.plot(grid, clf.predict_latent(grid)[0][:, 0], **style)
        top.axhline(1 / 3, color="0.6", lw=0.8, ls=":")
        below.axhline(0, color="0.6", lw=0.8, ls=":")
        for label, height in ((0, 1.04), (1, -0.04), (2, -0.04)):
            at = X[y == label, 0]
            top.plot(at, np.full(len(at), height), "|", ms=6, color="0.2" if label == 0 else "0.6")
        top.set_title(f"kernel variance {variance:g}", loc="left")
        below.set_xlabel("x")
    axes[0, 0].set_ylabel("probability of the first class")
    axes[1, 0].set_ylabel("mean of its latent")
    axes[0, 0].legend(loc="upper center", bbox_to_anchor=(0.45, 0.95), fontsize=9)
    figure.savefig(IMAGES / "corner.png", dpi=130)


def journeys(path: Path) -> None:
    """A table of made-up journeys, with text, an order and gaps."""
    rng = np.random.default_rng(0)
    n = 600
    size = rng.choice(["none", "bag", "trunk"], n, p=(0.5, 0.3, 0.2))
    city = rng.choice(["Bergen", "Lisboa", "Turin"], n)
    far, rain, age = rng.normal(size=(3, n))
    heavy = np.select([size == "bag", size == "trunk"], [1.0, 2.0], 0.0)
    merit = np.stack([
        2.6 * far + heavy - 0.5,
        0.8 * far + 1.2 * np.sin(2 * rain) + heavy * (city == "Turin"),
        1.2 - np.abs(far) - 1.6 * rain - heavy,
        1.0 - 2.2 * far - 0.4 * age - heavy,
    ])  # fmt: skip
    mode = np.array(["train", "bus", "bicycle", "on foot"])[
        (merit + 0.5 * rng.gumbel(size=merit.shape)).argmax(axis=0)
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["distance_km", "rain_mm", "age", "luggage", "city", "mode"])
        for i in range(n):
            years = "" if i % 40 == 7 else f"{40 + 12 * age[i]:.0f}"
            measured = f"{5 * np.exp(far[i]):.2f}", f"{2 * np.exp(rain[i]):.1f}", years
            writer.writerow([*measured, size[i], city[i], mode[i]])


def report() -> None:
    """The report of the command line in a real browser (docs/cli.md)."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        journeys(Path(folder) / "journeys.csv")
        options = [
            "--categorical",
            "onehot=city",
            "--categorical",
            "ordinal=luggage:none<bag<trunk",
        ]
        command = ["report", "journeys.csv", "--target", "mode", "--missing", "impute", *options]
        subprocess.run([sys.executable, "-m", "conjugp", *command], cwd=folder, check=True)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path, width, height, scheme in (
            (IMAGES / "report_desktop.png", 1280, 1100, "dark"),
            (IMAGES / "report_phone.png", 390, 1500, "light"),
        ):
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.goto((Path(folder) / "report.html").as_uri())
            page.screenshot(path=path)
        browser.close()


def displays() -> None:
    """The displays of conjugp.plotting (docs/examples/uncertainty.md)."""
    X, y = pinwheel(300, 0)
    clf = GPClassifier(n_inducing=25, random_state=0).fit(X, y)
    figure = Figure(figsize=(14.4, 8.6), layout="constrained")
    above, below = figure.subplots(2, 3)
    PredictionMapDisplay.from_estimator(clf, X, y, margin=0.35, ax=above[0])
    InducingDisplay.from_estimator(clf, X, ax=above[0])
    PredictionMapDisplay.from_estimator(
        clf, X, response="latent", colors="rgb", margin=0.35, ax=above[1]
    )
    PredictionMapDisplay.from_estimator(clf, X, y, response="epistemic", margin=0.35, ax=above[2])
    W, wine = load_wine(return_X_y=True, as_frame=True)
    fitted = GPClassifier(random_state=0).fit(W, wine)
    RelevanceDisplay.from_estimator(fitted, W, ax=below[0])
    TrainingCurveDisplay.from_estimator(fitted, ax=below[1])
    D, digits = load_digits(return_X_y=True)
    bayes = GaussianNB().fit(D[::4], digits[::4])
    ClassCalibrationDisplay.from_estimator(
        bayes, D[1::2], digits[1::2], n_bins=5, max_classes=4, ax=below[2]
    )
    titles = ("Probabilities", "Latent functions", "Epistemic part")
    titles += ("Relevance: Wine", "Training: Wine", "Calibration: digits, naive Bayes")
    for ax, title in zip((*above, *below), titles, strict=True):
        ax.set_title(title, loc="left")
    figure.savefig(IMAGES / "displays.png", dpi=110)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    # The paper's method takes 650 epochs to come to rest; what is left after 100 is small.
    warnings.simplefilter("ignore", ConvergenceWarning)
    for draw in (overview, uncertainty, paper, corner, displays, report):
        draw()
        print(f"{draw.__name__}.png")
