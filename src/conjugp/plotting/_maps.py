"""What a classifier says over a plane of two features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conjugp.plotting._style import Display, class_colors, feature_names, feature_pair, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIXED = ("proba", "latent")
UNCERTAINTIES = ("total", "aleatoric", "epistemic")
RESPONSES = (*MIXED, "variance", *UNCERTAINTIES)
LABELS = {
    "variance": "latent variance",
    "total": "total entropy (nats)",
    "aleatoric": "aleatoric part (nats)",
    "epistemic": "epistemic part (nats)",
}
RGB = ("#ff0000", "#00ff00", "#0000ff")


class PredictionMapDisplay(Display):
    """A map of probabilities, latent functions or uncertainty over two features.

    Make one with :meth:`from_estimator`, which also draws it.

    Parameters
    ----------
    first, second : array-like of shape (n,) and (m,)
        The grid.
    values : array-like of shape (m, n, n_classes) or (m, n)
        Probabilities, or latent means, of every class; or one number.
    response : str, default="proba"
        What the values are: see :meth:`from_estimator`.
    classes : array-like of shape (n_classes,), default=None
        Labels, for the legend.
    names : pair of str
        What the two features are called.

    Attributes
    ----------
    ax_, figure_ : matplotlib Axes and Figure
        Where it was drawn.
    """

    def __init__(
        self,
        first: ArrayLike,
        second: ArrayLike,
        values: ArrayLike,
        *,
        response: str = "proba",
        classes: ArrayLike | None = None,
        names: tuple[str, str] = ("first feature", "second feature"),
    ) -> None:
        self.first, self.second = np.asarray(first, float), np.asarray(second, float)
        self.values = np.asarray(values, float)
        self.response, self.names = response, names
        self.classes: NDArray[Any] | None = None if classes is None else np.asarray(classes)

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: ArrayLike | None = None,
        *,
        response: str = "proba",
        features: Sequence[int | str] = (0, 1),
        grid_resolution: int = 150,
        margin: float = 0.2,
        colors: Any = None,
        ax: Axes | None = None,
    ) -> PredictionMapDisplay:
        """Draw the map of a fitted classifier around the rows of X.

        Parameters
        ----------
        estimator : classifier
            Any with ``predict_proba`` for ``"proba"``; one of conjugp's for the others.
        X : array-like of shape (n_samples, n_features)
            Rows that say where to draw. Features beside the two are held at their medians.
        y : array-like of shape (n_samples,), default=None
            Labels of the rows; if given, rows are drawn as points.
        response : {"proba", "latent", "variance", "total", "aleatoric", "epistemic"}, \
                default="proba"
            ``"proba"`` mixes the colours of the classes by their probabilities, and fades to grey
            where these are even. ``"latent"`` lays them over each other on white, each as strong
            as σ of its latent mean: white where no class has evidence. The others are one number:
            latent variance, averaged over classes, and the parts of ``predict_uncertainty``.
        features : pair of int or str, default=(0, 1)
            Which two features, by place or name.
        grid_resolution : int, default=150
            Points in each direction.
        margin : float, default=0.2
            How far the map goes beyond the rows, as a share of their range.
        colors, ax
            As in :meth:`plot`.
        """
        if response not in RESPONSES:
            raise ValueError(f"response must be one of {RESPONSES}, got {response!r}")
        rows = numbers("X", X)
        names = feature_names(estimator, X, rows.shape[1])
        i, j = feature_pair(features, names)
        low, high = rows.min(axis=0), rows.max(axis=0)
        edge = margin * np.where(high > low, high - low, 1.0)
        first, second = (
            np.linspace(low[d] - edge[d], high[d] + edge[d], grid_resolution) for d in (i, j)
        )
        grid = np.tile(np.median(rows, axis=0), (grid_resolution**2, 1))
        grid[:, i], grid[:, j] = (a.ravel() for a in np.meshgrid(first, second))
        columns = getattr(X, "columns", None)
        # A frame for an estimator that knows features by name, of the kind that X is.
        frame = None if columns is None else type(X)(dict(zip(columns, grid.T, strict=True)))
        values = _values(estimator, grid if frame is None else frame, response)
        shape = (grid_resolution, grid_resolution)
        display = cls(
            first,
            second,
            values.reshape(*shape, -1) if response in MIXED else values.reshape(shape),
            response=response,
            classes=estimator.classes_,
            names=(names[i], names[j]),
        )
        display.plot(ax, colors=colors)
        if y is not None:
            display._draw_rows(rows[:, [i, j]], np.asarray(y), colors)
        return display

    def plot(self, ax: Axes | None = None, *, colors: Any = None) -> PredictionMapDisplay:
        """Draw the map.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; a new figure if None.
        colors : sequence of matplotlib colors, or "rgb", default=None
            Of the classes. ``"rgb"`` is the picture of the paper, for three classes: their
            probabilities, or σ of their latent means, are the red, green and blue of a point. For
            a map of one number, the name of a colour map.
        """
        ax = self._axes(ax, (6.2, 5.0))
        extent = (self.first[0], self.first[-1], self.second[0], self.second[-1])
        settings: dict[str, Any] = {"extent": extent, "origin": "lower", "aspect": "auto"}
        if self.response in MIXED:
            ax.imshow(self.image(colors), interpolation="bilinear", **settings)
            self._legend(colors)
        else:
            image = ax.imshow(self.values, cmap=colors or "cividis", **settings)
            self.figure_.colorbar(image, ax=ax, label=LABELS.get(self.response, self.response))
        ax.set(xlabel=self.names[0], ylabel=self.names[1])
        return self

    def image(self, colors: Any = None) -> NDArray[np.float64]:
        """Colours of the map, (m, n, 3), from 0 to 1; `colors` as in :meth:`plot`."""
        palette = self._palette(colors)
        proba = self.response == "proba"
        strength = self.values if proba else 0.5 * (1.0 + np.tanh(0.5 * self.values))
        if isinstance(colors, str):
            return np.clip(strength, 0.0, 1.0)
        if proba:
            p = np.maximum(strength, 1e-300)
            certain = 1.0 + (p * np.log(p)).sum(axis=-1, keepdims=True) / np.log(p.shape[-1])
            mixed = np.sqrt(np.clip(certain, 0.0, 1.0))
            return np.clip(mixed * (p @ palette) + (1.0 - mixed) * 0.93, 0.0, 1.0)
        return (1.0 - strength[..., None] * (1.0 - palette)).prod(axis=-2)

    def _palette(self, colors: Any) -> NDArray[np.float64]:
        from matplotlib.colors import to_rgb

        n = self.values.shape[-1]
        if isinstance(colors, str):
            if colors != "rgb":
                raise ValueError(f"colors must be 'rgb' or one for each class, got {colors!r}")
            colors = RGB
        given = class_colors(n) if colors is None else list(colors)
        if len(given) != n:
            raise ValueError(f"colors must be one for each of {n} classes, got {len(given)}")
        return np.array([to_rgb(color) for color in given])

    def _legend(self, colors: Any) -> None:
        from matplotlib.patches import Patch

        if self.classes is None or len(self.classes) > 10:
            return
        patches = [
            Patch(color=color, label=str(label))
            for color, label in zip(self._palette(colors), self.classes, strict=True)
        ]
        legend = self.ax_.legend(
            handles=patches, loc="upper right", framealpha=0.9, fontsize="small"
        )
        self.ax_.add_artist(legend)

    def _draw_rows(self, rows: NDArray[np.float64], y: NDArray[Any], colors: Any) -> None:
        classes = np.unique(y) if self.classes is None else self.classes
        mixed = self.response in MIXED
        palette = self._palette(colors) if mixed else class_colors(len(classes))
        edge = "0.15" if mixed else "white"
        for label, color in zip(classes, palette, strict=True):
            first, second = rows[y == label].T
            self.ax_.scatter(first, second, 14, color=color, edgecolors=edge, lw=0.5)
        self.ax_.set(xlim=self.first[[0, -1]], ylim=self.second[[0, -1]])


def _values(estimator: Any, grid: Any, response: str) -> NDArray[np.float64]:
    """What the estimator says about every point of the grid."""
    if response == "proba":
        return np.asarray(estimator.predict_proba(grid))
    if response in UNCERTAINTIES:
        return getattr(estimator.predict_uncertainty(grid), response)
    mean, variance = estimator.predict_latent(grid)
    return mean if response == "latent" else variance.mean(axis=1)
