"""The command line: from a table to a model, predictions, scores and a report.

Every command is a module of the same name; importing it here makes it known.
"""

from __future__ import annotations

from conjugp.cli import _demo as demo
from conjugp.cli import _evaluate as evaluate
from conjugp.cli import _export as export
from conjugp.cli import _fit as fit
from conjugp.cli import _info as info
from conjugp.cli import _predict as predict
from conjugp.cli import _report as report
from conjugp.cli._app import app

__all__ = ["app", "demo", "evaluate", "export", "fit", "info", "main", "predict", "report"]


def main() -> None:
    """Run the command line."""
    app(prog_name="conjugp")
