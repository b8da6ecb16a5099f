"""How a fit went, from the reports in ``history_``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from conjugp.plotting._style import COLORS, axes_for, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["TrainingCurveDisplay"]


class TrainingCurveDisplay:
    """The objective of a fit against time, a line for every stage.

    Make one with :meth:`from_estimator`, which also draws it.

    Parameters
    ----------
    history : sequence of dict
        Reports with ``stage``, ``value``, ``measure`` and ``seconds``.
    measure : str, default=None
        Which of the measures to draw; that of the last report if None.
    name : str, default=None
        What the legend calls the fit.

    Attributes
    ----------
    measures : list of str
        Those in the history.
    ax_, figure_ : matplotlib Axes and Figure
        Where it was drawn.
    """

    ax_: Axes
    figure_: Figure

    def __init__(
        self,
        history: Sequence[Mapping[str, Any]],
        *,
        measure: str | None = None,
        name: str | None = None,
    ) -> None:
        if not history:
            raise ValueError("history holds no reports: there is nothing to draw")
        self.history = list(history)
        self.measures = list(dict.fromkeys(str(one["measure"]) for one in self.history))
        self.measure = str(self.history[-1]["measure"]) if measure is None else measure
        if self.measure not in self.measures:
            raise ValueError(f"measure must be one of {self.measures}, got {measure!r}")
        self.name = name

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        measure: str | None = None,
        name: str | None = None,
        ax: Axes | None = None,
    ) -> TrainingCurveDisplay:
        """Draw the history of a fitted ``GPClassifier``.

        Parameters
        ----------
        estimator : GPClassifier
            A fitted classifier.
        measure, name
            As in the constructor.
        ax
            As in :meth:`plot`.
        """
        return cls(estimator.history_, measure=measure, name=name).plot(ax)

    @property
    def stages(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Seconds and values of every stage that has the measure."""
        found: dict[str, list[tuple[float, float]]] = {}
        for one in self.history:
            if one["measure"] == self.measure:
                report = float(one["seconds"]), float(one["value"])
                found.setdefault(str(one["stage"]), []).append(report)
        return {stage: tuple(np.array(reports).T) for stage, reports in found.items()}  # type: ignore[misc]

    def plot(self, ax: Axes | None = None) -> TrainingCurveDisplay:
        """Draw the curve.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; a new figure if None. To compare fits draw each on the ``ax_`` of the
            first.
        """
        self.ax_, self.figure_ = ax, _ = axes_for(ax, (6.4, 4.0))
        first = len(ax.get_lines())
        for i, (stage, (seconds, values)) in enumerate(self.stages.items()):
            color = COLORS[(first + i) % len(COLORS)]
            label = stage if self.name is None else f"{self.name}: {stage}"
            size = 5 if len(values) <= 40 else 0
            ax.plot(seconds, values, "o-", color=color, lw=1.6, ms=size, mec="white", label=label)
        ax.set(xlabel="seconds", ylabel=self.measure)
        low, high = _span([line.get_ydata() for line in ax.get_lines()])
        ax.set_ylim(low, high)
        ax.legend(frameon=False, loc="lower right")
        tidy(ax)
        return self


def _span(curves: list[Any]) -> tuple[float, float]:
    """Limits that show the ends of the curves: first values may be far below all others."""
    values = np.concatenate([np.asarray(c, dtype=float) for c in curves])
    top, ends = values.max(), min(float(np.asarray(c)[-1]) for c in curves)
    typical = float(np.quantile(values, 0.1))
    low = max(values.min(), min(typical, ends) - 0.5 * (top - min(typical, ends)))
    margin = 0.06 * (top - low) or 0.5
    return low - margin, top + margin
