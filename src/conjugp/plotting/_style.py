"""What the displays share: axes, colours, names of features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from conjugp.metrics import ReliabilityCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people see apart whatever their colour vision.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A7B00")
GREY = "0.7"


class Display:
    """What is drawn somewhere."""

    ax_: Axes
    figure_: Figure

    def _axes(self, ax: Axes | None, size: tuple[float, float]) -> Axes:
        """The axes given, or those of a new figure; from now on where it was drawn."""
        if ax is None:
            # Imported only where something is drawn, so that `import conjugp` stays quick.
            from matplotlib import pyplot

            _, ax = pyplot.subplots(figsize=size, layout="constrained")
        self.ax_, self.figure_ = ax, ax.get_figure(root=True)  # type: ignore[assignment]
        return ax


def tidy(ax: Axes, grid: bool = True) -> None:
    """Two spines and a faint grid."""
    ax.spines[["top", "right"]].set_visible(False)
    if grid:
        ax.grid(color="0.92", lw=0.8)
        ax.set_axisbelow(True)


def diagonal(ax: Axes) -> None:
    """The line on which probabilities mean what they say."""
    ax.plot([0, 1], [0, 1], color="0.45", lw=1, ls=(0, (5, 4)), zorder=1)


def dots(ax: Axes, curve: ReliabilityCurve, size: tuple[int, int], color: Any, label: str) -> None:
    """A dot for every bin; small ones have few points, where a frequency is mostly noise."""
    area = size[0] + size[1] * np.sqrt(curve.count / curve.count.sum())
    look = {"color": color, "edgecolors": "white", "lw": 0.7, "zorder": 4}
    ax.scatter(curve.confidence, curve.accuracy, area, label=label, **look)


def class_colors(n: int) -> list[Any]:
    """A colour for each of n classes; from eight on they can only be told from their neighbours."""
    if n <= len(COLORS):
        return list(COLORS[:n])
    from matplotlib import colormaps

    return [colormaps["turbo"](x)[:3] for x in np.linspace(0.04, 0.96, n)]


def feature_names(estimator: Any, X: Any, n_features: int) -> NDArray[Any]:
    """What the features are called: by the frame, by the fit, or by their number."""
    found = getattr(X, "columns", getattr(estimator, "feature_names_in_", None))
    if found is not None and len(found) == n_features:
        return np.asarray([str(name) for name in found])
    return np.asarray([f"feature {i}" for i in range(n_features)])


def feature_pair(features: Sequence[int | str], names: NDArray[Any]) -> tuple[int, int]:
    """The places of two features, given by name or by place."""
    known = {str(name): i for i, name in enumerate(names)}
    places = [known.get(each, -1) if isinstance(each, str) else each for each in features]
    if len(set(places)) != 2 or not all(0 <= place < len(names) for place in places):
        shown = ", ".join(known) if len(known) <= 20 else f"{len(known)} features"
        raise ValueError(f"features must be two of {shown}, by name or place; got {features!r}")
    return places[0], places[1]


def numbers(name: str, X: Any) -> NDArray[np.float64]:
    """Rows as a matrix of finite numbers."""
    rows = np.asarray(X, dtype=np.float64)
    if rows.ndim != 2 or not len(rows) or not np.isfinite(rows).all():
        raise ValueError(f"{name} must be rows of finite numbers, got shape {rows.shape}")
    return rows
