"""Where the inducing points are among the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from conjugp.kernels import Normalised
from conjugp.plotting._style import (
    Display,
    class_colors,
    feature_names,
    feature_pair,
    numbers,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 3000  # rows that are drawn, at most
_MANY = 150  # inducing points that are drawn small


class InducingDisplay(Display):
    """Inducing points among rows, in two features or two principal components.

    Make one with :meth:`from_estimator`, which also draws it.

    Parameters
    ----------
    points : array-like of shape (m, 2)
        Inducing points.
    rows : array-like of shape (n, 2)
        Rows.
    y : array-like of shape (n,), default=None
        Labels of the rows, which colour them.
    names : pair of str
        What the two axes are called.

    Attributes
    ----------
    ax_, figure_ : matplotlib Axes and Figure
        Where it was drawn.
    """

    def __init__(
        self,
        points: ArrayLike,
        rows: ArrayLike,
        y: ArrayLike | None = None,
        *,
        names: tuple[str, str] = ("first feature", "second feature"),
    ) -> None:
        self.points, self.rows = np.asarray(points, float), np.asarray(rows, float)
        self.y: NDArray[Any] | None = None if y is None else np.asarray(y)
        self.names = names

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: ArrayLike | None = None,
        *,
        features: Sequence[int | str] | None = None,
        ax: Axes | None = None,
    ) -> InducingDisplay:
        """Draw the inducing points of a fitted classifier.

        Parameters
        ----------
        estimator : GPClassifier or GibbsGPClassifier
            A fitted classifier.
        X : array-like of shape (n_samples, n_features)
            Rows to draw beside them.
        y : array-like of shape (n_samples,), default=None
            Their labels.
        features : pair of int or str, default=None
            Which features to draw, by place or name. If None, both of two; otherwise the first two
            principal components of standardised rows, or with the kernel ``Normalised`` of their
            directions.
        ax
            As in :meth:`plot`.
        """
        rows, Z = numbers("X", X), np.asarray(estimator.inducing_points_, dtype=np.float64)
        names = feature_names(estimator, X, rows.shape[1])
        if features is None and rows.shape[1] == 2:
            features = (0, 1)
        if features is not None:
            i, j = feature_pair(features, names)
            pair = (names[i], names[j])
            return cls(Z[:, [i, j]], rows[:, [i, j]], y, names=pair).plot(ax)
        if rows.shape[1] < 2:
            raise ValueError("X must have at least two features")
        kernel, of = estimator.kernel_, ""
        if isinstance(kernel, Normalised):
            # Lengths mean nothing to it, and inducing points have others than rows.
            rows, Z = (kernel.directions(torch.tensor(A)).numpy() for A in (rows, Z))
            of = " of directions"
        center, scale = rows.mean(axis=0), rows.std(axis=0)
        scale[scale == 0] = 1.0
        _, _, axes = np.linalg.svd((rows - center) / scale, full_matrices=False)
        # The sign that makes the largest entry of a component positive: the same picture anywhere.
        largest = np.abs(axes[:2]).argmax(axis=1)
        axes = axes[:2] * np.sign(axes[[0, 1], largest])[:, None]
        points, shown = (((A - center) / scale) @ axes.T for A in (Z, rows))
        pair = (f"first principal component{of}", f"second principal component{of}")
        return cls(points, shown, y, names=pair).plot(ax)

    def plot(self, ax: Axes | None = None) -> InducingDisplay:
        """Draw points and rows.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; a new figure if None. On the ``ax_`` of a map only the points are drawn.
        """
        given = ax is not None and bool(ax.images)
        ax = self._axes(ax, (6.0, 5.2))
        if not given:
            self._draw_rows(ax)
            ax.set(xlabel=self.names[0], ylabel=self.names[1])
            tidy(ax)
        limits = ax.get_xlim(), ax.get_ylim()
        ax.scatter(
            self.points[:, 0],
            self.points[:, 1],
            36 if len(self.points) <= _MANY else 12,
            color="black",
            marker="x",
            lw=1.3 if len(self.points) <= _MANY else 0.7,
            zorder=5,
            label=f"{len(self.points)} inducing points",
        )
        if given:
            ax.set(xlim=limits[0], ylim=limits[1])
        ax.legend(loc="lower right" if given else "best", framealpha=0.9, fontsize="small")
        return self

    def _draw_rows(self, ax: Axes) -> None:
        keep = np.arange(len(self.rows))
        if len(keep) > _ROWS:
            keep = np.sort(np.random.default_rng(0).permutation(len(keep))[:_ROWS])
        if self.y is None:
            ax.scatter(self.rows[keep, 0], self.rows[keep, 1], 9, color="0.7", lw=0)
            return
        labels = np.unique(self.y)
        for label, color in zip(labels, class_colors(len(labels)), strict=True):
            own = keep[self.y[keep] == label]
            name = str(label) if len(labels) <= 6 else None
            x, y = self.rows[own].T
            ax.scatter(x, y, 12, color=color, alpha=0.7, lw=0, label=name)
