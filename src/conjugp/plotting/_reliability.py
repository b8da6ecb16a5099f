"""How often predictions are right at each confidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from conjugp.metrics import ReliabilityCurve, Strategy, curve_of_prediction, mean_gap
from conjugp.plotting._style import Display, diagonal, dots, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HISTOGRAM = "confidence histogram"


class ReliabilityDisplay(Display):
    """A reliability diagram, in the manner of scikit-learn's displays.

    Make one with :meth:`from_estimator` or :meth:`from_predictions`, which also draw it.

    Parameters
    ----------
    curve : ReliabilityCurve
        From :func:`conjugp.metrics.reliability_curve`.
    name : str, default=None
        What the legend calls the predictions.

    Attributes
    ----------
    ax_, histogram_ax_ : matplotlib Axes
        The diagram and the histogram of confidences below it.
    figure_ : matplotlib Figure
        The figure they are in.
    """

    histogram_ax_: Axes

    def __init__(self, curve: ReliabilityCurve, *, name: str | None = None) -> None:
        self.curve = curve
        self.name = name

    @property
    def calibration_error(self) -> float:
        """The expected calibration error over the bins of the curve."""
        return mean_gap(self.curve)

    @classmethod
    def from_estimator(
        cls, estimator: Any, X: Any, y: ArrayLike, *, name: str | None = None, **settings: Any
    ) -> ReliabilityDisplay:
        """Draw the diagram of a fitted classifier on the points X with labels y.

        Any scikit-learn classifier with ``predict_proba`` will do; the other parameters are those
        of :meth:`from_predictions`.
        """
        name = type(estimator).__name__ if name is None else name
        p = estimator.predict_proba(X)
        return cls.from_predictions(y, p, labels=estimator.classes_, name=name, **settings)

    @classmethod
    def from_predictions(
        cls,
        y_true: ArrayLike,
        proba: ArrayLike,
        *,
        labels: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        n_bins: int = 15,
        strategy: Strategy = "uniform",
        name: str | None = None,
        ax: Axes | None = None,
        color: Any = None,
    ) -> ReliabilityDisplay:
        """Draw the diagram of predicted probabilities.

        Parameters
        ----------
        y_true, proba, labels, sample_weight, n_bins, strategy
            As in :func:`conjugp.metrics.reliability_curve`.
        name : str, default=None
            What the legend calls the predictions.
        ax, color
            As in :meth:`plot`.
        """
        curve = curve_of_prediction(y_true, proba, n_bins, strategy, labels, sample_weight)
        return cls(curve, name=name).plot(ax, color=color)

    def plot(self, ax: Axes | None = None, *, color: Any = None) -> ReliabilityDisplay:
        """Draw the diagram, with a histogram of the confidences below it.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; a new figure if None. To compare several predictions, draw each on the
            ``ax_`` of the first.
        color : matplotlib color, default=None
            The next of the colour cycle if None.
        """
        ax = self._axes(ax, (5.0, 5.6))
        self.histogram_ax_ = _histogram_below(ax)

        confidence, accuracy, count = self.curve
        error = f"ECE {self.calibration_error:.3f}"
        label = error if self.name is None else f"{self.name} ({error})"
        (line,) = ax.plot(confidence, accuracy, color=color, lw=1.2, alpha=0.6, zorder=3)
        color = line.get_color()
        ax.vlines(confidence, confidence, accuracy, color=color, lw=2, alpha=0.25, zorder=2)
        dots(ax, self.curve, (10, 130), color, label)
        self.histogram_ax_.vlines(confidence, 0, count / count.sum(), color=color, lw=5, alpha=0.7)
        ax.legend(loc="best", frameon=False)
        return self


def reliability_diagram(
    y_true: ArrayLike,
    proba: ArrayLike,
    *,
    labels: ArrayLike | None = None,
    n_bins: int = 15,
    ax: Axes | None = None,
    name: str | None = None,
) -> ReliabilityDisplay:
    """Draw accuracy against confidence; on the diagonal, probabilities mean what they say.

    Short for :meth:`ReliabilityDisplay.from_predictions`, which has all the parameters.
    """
    return ReliabilityDisplay.from_predictions(
        y_true, proba, labels=labels, n_bins=n_bins, ax=ax, name=name
    )


def _histogram_below(ax: Axes) -> Axes:
    """The axes for the histogram: those of an earlier diagram on `ax`, or new ones, dressed."""
    for other in ax.get_shared_x_axes().get_siblings(ax):
        if other.get_label() == HISTOGRAM:
            return other
    place = ax.get_subplotspec()
    if place is None:
        below = ax.inset_axes((0, -0.3, 1, 0.22), sharex=ax)
    else:
        # Shares the place of `ax`, so that any layout of the figure goes on working.
        upper, lower = place.subgridspec(2, 1, height_ratios=(4, 1), hspace=0.1)
        ax.set_subplotspec(upper)
        below = ax.figure.add_subplot(lower, sharex=ax)
    below.set_label(HISTOGRAM)
    diagonal(ax)
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), ylabel="accuracy")
    ax.tick_params(labelbottom=False)
    below.set(xlabel="confidence", ylabel="share", ylim=(0, 1))
    tidy(ax)
    tidy(below)
    return below
