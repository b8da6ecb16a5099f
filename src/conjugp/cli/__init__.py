"""The command line: from a table to a model, predictions, scores and a report.

Every command is a module of the same name; importing it here makes it known.
"""

from __future__ import annotations

from conjugp.cli import demo, evaluate, export, fit, info, predict, report
from conjugp.cli.app import app

__all__ = ["app", "demo", "evaluate", "export", "fit", "info", "main", "predict", "report"]


def main() -> None:
    """Run the command line."""
    app(prog_name="conjugp")
