"""Processes that fit together: `joined` sets them up as torchrun asks."""

from conjugp._rows.group import joined

__all__ = ["joined"]
