"""How a fit went, from the reports in ``history_``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from conjugp.plotting._style import COLORS, Display, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class TrainingCurveDisplay(Display):
    """The objective of a fit against time, a line for every stage.

    Stages that learn the kernel or choose one may report another measure, in another unit, than
    the last one: each has a panel of its own, in the order in which they came. Make one with
    :meth:`from_estimator`, which also draws it.

    Parameters
    ----------
    history : sequence of dict
        Reports with ``stage``, ``value``, ``measure`` and ``seconds``.
    measure : str, default=None
        The only measure to draw; all of them if None.
    name : str, default=None
        What the legend calls the fit.

    Attributes
    ----------
    measures : list of str
        Those in the history.
    axes_ : list of matplotlib Axes
        The panels, one for every measure drawn.
    ax_, figure_ : matplotlib Axes and Figure
        The last panel, or that of the `measure` given, and where it was drawn.
    """

    axes_: list[Axes]

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
        self._drawn = self.measures if measure is None else [self.measure]
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
        """Seconds and values of every stage that has the ``measure``."""
        return self._stages(self.measure)

    def _stages(self, measure: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for one in self.history:
            if one["measure"] == measure:
                report = float(one["seconds"]), float(one["value"])
                found.setdefault(str(one["stage"]), []).append(report)
        return {stage: tuple(np.array(reports).T) for stage, reports in found.items()}  # type: ignore[misc]

    def plot(self, ax: Axes | None = None) -> TrainingCurveDisplay:
        """Draw the curves, every measure in a panel.

        Parameters
        ----------
        ax : matplotlib Axes, default=None
            Where to draw; a new figure if None. Several panels share its place in the grid of its
            figure. To compare fits draw each on the ``ax_`` of the first.
        """
        size = (6.4 if len(self._drawn) == 1 else 4.0 * len(self._drawn), 4.0)
        panels = _panels(self._axes(ax, size), self._drawn, self.measure)
        for measure, panel in panels.items():
            self._draw(panel, measure)
        self.axes_, self.ax_ = list(panels.values()), panels.get(self.measure, self.ax_)
        return self

    def _draw(self, ax: Axes, measure: str) -> None:
        first = len(ax.get_lines())
        for i, (stage, (seconds, values)) in enumerate(self._stages(measure).items()):
            color = COLORS[(first + i) % len(COLORS)]
            label = stage if self.name is None else f"{self.name}: {stage}"
            size = 5 if len(values) <= 40 else 0
            ax.plot(seconds, values, "o-", color=color, lw=1.6, ms=size, mec="white", label=label)
        ax.set(xlabel="seconds", ylabel=measure)
        low, high = _span([line.get_ydata() for line in ax.get_lines()])
        ax.set_ylim(low, high)
        ax.legend(frameon=False, loc="best")
        tidy(ax)


def _panels(ax: Axes, measures: list[str], last: str) -> dict[str, Axes]:
    """A panel for every measure: those of an earlier fit on `ax`, or what `ax` is divided into."""
    figure, place = ax.get_figure(), ax.get_subplotspec()
    if figure is None or place is None:
        return {last: ax}
    grid = place.get_gridspec()
    beside = [(a.get_subplotspec(), a) for a in figure.axes]
    known = {a.get_label(): a for spec, a in beside if spec and spec.get_gridspec() is grid}
    found = {measure: known[measure] for measure in measures if measure in known}
    if found or len(measures) == 1:
        return found or {last: ax}
    panels, grid = {}, place.subgridspec(1, len(measures))
    for i, measure in enumerate(measures):
        panels[measure] = ax if measure == last else figure.add_subplot(grid[i])
        panels[measure].set_subplotspec(grid[i])
        panels[measure].set_label(measure)
        panels[measure].locator_params(axis="x", nbins=4)
    return panels


def _span(curves: list[Any]) -> tuple[float, float]:
    """Limits that show the ends of the curves: first values may be far below all others."""
    values = np.concatenate([np.asarray(c, dtype=float) for c in curves])
    top, ends = values.max(), min(float(np.asarray(c)[-1]) for c in curves)
    typical = float(np.quantile(values, 0.1))
    low = max(values.min(), min(typical, ends) - 0.5 * (top - min(typical, ends)))
    margin = 0.06 * (top - low) or 0.5
    return low - margin, top + margin
