"""Model files: `load` one, or read what it says of itself."""

from conjugp._persistence.model_file import load, read_info
from conjugp._persistence.model_file import save as save

__all__ = ["load", "read_info"]
