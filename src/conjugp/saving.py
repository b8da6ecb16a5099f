"""Model files: `load` one, or read what it says of itself."""

from conjugp._persistence.model_file import load, read_info

__all__ = ["load", "read_info"]
