"""How often each class is true at each of its probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from conjugp.metrics import ReliabilityCurve, Strategy, curves_of_classes, mean_gap
from conjugp.plotting._style import GREY, Display, class_colors, diagonal, dots, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW = 10  # points in a bin from which on a line goes through it


class ClassCalibrationDisplay(Display):
    """Frequency against probability of each class; the worst calibrated in colour.

    Make one with :meth:`from_estimator` or :meth:`from_predictions`, which also draw it.

    Parameters
    ----------
    curves : sequence of ReliabilityCurve
        From :func:`conjugp.metrics.class_reliability_curves`.
    labels : array-like of shape (n_classes,)
        What the classes are called.

    Attributes
    ----------
    errors : ndarray of shape (n_classes,)
        Calibration error of each class.
    ax_, figure_ : matplotlib Axes and Figure
        Where it was drawn.
    """

    def __init__(self, curves: Sequence[ReliabilityCurve], labels: ArrayLike) -> None:
        self.curves = list(curves)
        self.labels: NDArray[Any] = np.asarray(labels)
        self.errors = np.array([mean_gap(curve) for curve in self.curves])

    @classmethod
    def from_estimator(
        cls, estimator: Any, X: Any, y: ArrayLike, **settings: Any
    ) -> ClassCalibrationDisplay:
        """Draw the curves of a fitted classifier on the points X with labels y.

        The other parameters are those of :meth:`from_predictions`.
        """
        p = estimator.predict_proba(X)
        return cls.from_predictions(y, p, labels=estimator.classes_, **settings)

    @classmethod
    def from_predictions(
        cls,
        y_true: ArrayLike,
        proba: ArrayLike,
        *,
        labels: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        n_bins: int = 10,
        strategy: Strategy = "uniform",
        max_classes: int = 6,
        ax: Axes | None = None,
    ) -> ClassCalibrationDisplay:
        """Draw the curves of predicted probabilities.

        Parameters
        ----------
        y_true, proba, labels, sample_weight, n_bins, strategy
            As in :func:`conjugp.metrics.class_reliability_curves`.
        max_classes, ax
            As in :meth:`plot`.
        """
        curves = curves_of_classes(y_true, proba, n_bins, strategy, labels, sample_weight)
        names = sorted(set(np.asarray(y_true).tolist())) if labels is None else labels
        return cls(curves, names).plot(ax, max_classes=max_classes)

    def plot(self, ax: Axes | None = None, *, max_classes: int = 6) -> ClassCalibrationDisplay:
        """Draw the frequencies, and lines through those of bins with ten points or more.

        Small dots off the lines are bins with fewer points, where a frequency is mostly noise.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; a new figure if None.
        max_classes : int, default=6
            Classes in colour, the worst calibrated first; the others are grey.
        """
        ax = self._axes(ax, (5.4, 5.2))
        worst = np.argsort(-self.errors, kind="stable")[:max_classes]
        colors = class_colors(len(self.curves))  # those that the classes have in other displays
        for c, curve in enumerate(self.curves):
            if c not in worst:
                x, y = _sure(curve)
                ax.plot(x, y, color=GREY, lw=0.8, alpha=0.6, zorder=2)
        for c in worst:
            curve, color = self.curves[c], colors[c]
            label = f"{self.labels[c]} (error {self.errors[c]:.3f})"
            x, y = _sure(curve)
            ax.plot(x, y, color=color, lw=1.4, alpha=0.8, zorder=3)
            dots(ax, curve, (6, 90), color, label)
        diagonal(ax)
        ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        ax.set(xlabel="probability of the class", ylabel="frequency of the class")
        ax.legend(frameon=False, loc="upper left")
        tidy(ax)
        return self


def _sure(curve: ReliabilityCurve) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probabilities and frequencies of the bins that hold more than a few points."""
    enough = curve.count >= _FEW
    return curve.confidence[enough], curve.accuracy[enough]
