"""Pictures, in the manner of scikit-learn's displays.

Every display is made and drawn by ``from_estimator`` or ``from_predictions``, drawn again by
``plot(ax)``, and keeps where it was drawn in ``ax_`` and ``figure_``. matplotlib is imported when
something is drawn.
"""

from conjugp.plotting._chains import plot_ranks, plot_trace
from conjugp.plotting._class_calibration import ClassCalibrationDisplay
from conjugp.plotting._inducing import InducingDisplay
from conjugp.plotting._maps import PredictionMapDisplay
from conjugp.plotting._relevance import RelevanceDisplay
from conjugp.plotting._reliability import ReliabilityDisplay, reliability_diagram
from conjugp.plotting._training_curve import TrainingCurveDisplay

__all__ = [
    "ClassCalibrationDisplay",
    "InducingDisplay",
    "PredictionMapDisplay",
    "RelevanceDisplay",
    "ReliabilityDisplay",
    "TrainingCurveDisplay",
    "plot_ranks",
    "plot_trace",
    "reliability_diagram",
]
