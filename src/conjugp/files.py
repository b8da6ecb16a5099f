"""What is wrong with a file that cannot be read."""

from conjugp._persistence.files import FileFormatError

__all__ = ["FileFormatError"]
