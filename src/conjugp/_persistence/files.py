"""Arrays and plain data in one file: safetensors with a JSON header, written all at once or not.

Nothing here can run code that a file brings along, and a reader gets a whole file or an error.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import stat
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

_KEY, _SUM = "conjugp", "sum"


class FileFormatError(ValueError):
    """A file that is not what it should be: foreign, truncated, altered or too new."""


def check_path(name: str, path: str | os.PathLike[str]) -> None:
    """Raise unless a file can be written at `path`, calling the argument `name`."""
    try:
        path = Path(path)
    except TypeError as error:
        raise TypeError(f"{name} must be a path; got {path!r}") from error
    if path.is_dir():
        raise ValueError(f"{name}: {path} is a folder; give the path of a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{name}: {path} is a device or pipe; give the path of a file")
    path = target(path)
    if not path.parent.is_dir():
        raise ValueError(f"{name}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{name}: the folder {path.parent} cannot be written to")


def target(path: str | os.PathLike[str]) -> Path:
    """Where a file is that is written to at `path`: what a link there points to, or `path`."""
    path = Path(path)
    if not path.is_symlink():
        return path
    found = Path(os.path.realpath(path))
    if found.is_symlink():  # links that go round in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Remove what a process that was killed while it wrote to `path` has left beside it."""
    ending, path = re.escape(Path(path).suffix), target(path)
    pattern = re.escape(f".{path.name}.") + f"[0-9a-f]{{32}}({ending})?"
    for found in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if re.fullmatch(pattern, found.name):
            found.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], header: Any) -> None:
    """Write arrays and a JSON-able header; the file at `path` is the old one or the new one."""
    path = Path(path)
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    sums = _sums(whole)
    text = json.dumps({"header": header, "sums": sums}, allow_nan=False)
    metadata = {_KEY: text, _SUM: str(zlib.crc32(text.encode()))}
    # Not save_file: it has temporary files of its own, which a killed process would leave behind.
    content = save(whole, metadata)
    with replaced(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new, empty file to write to, which takes the place of `path` if all goes well.

    It has the permissions of the file that it replaces, and a link goes on pointing to it.
    """
    ending, path = Path(path).suffix, target(path)  # some writers tell the format from the ending
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{ending}")
    try:
        temporary.touch()
        mode = _mode(path) if path.exists() else _mode(temporary)
        # From now on, so that nobody else reads what is being written, but we can write it.
        _set_mode(temporary, mode | stat.S_IRUSR | stat.S_IWUSR)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        _set_mode(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _set_mode(path: Path, mode: int) -> None:
    if _mode(path) != mode:  # some file systems have one mode for all, and let nobody set it
        path.chmod(mode)


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as those that `write` makes do, whatever has become of the rest."""
    with open(path, "rb") as file:
        return f'"{_KEY}"'.encode() in file.read(256)


def read(
    path: str | os.PathLike[str], check: Callable[[Any], None] = lambda header: None
) -> tuple[dict[str, np.ndarray], Any]:
    """The arrays and the header of a file.

    `check` raises a FileFormatError for a header that is not wanted, before any array is read: a
    file of another kind may be larger than the memory.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if _KEY not in metadata:
                raise FileFormatError(f"{path} was not written by conjugp")
            text, names = metadata[_KEY], file.keys()
            found = json.loads(text)
            header, sums = found["header"], found["sums"]
            whole = str(zlib.crc32(text.encode())) == metadata[_SUM] and set(names) == set(sums)
            if whole:
                check(header)
                arrays = {name: file.get_tensor(name) for name in names}
                whole = _sums(arrays) == sums
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path} is damaged or not a conjugp file ({error})") from error
    if not whole:
        raise FileFormatError(f"{path} is damaged: its content is not what was written")
    return arrays, header


def _sums(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    def kind(array: np.ndarray) -> int:
        return zlib.crc32(f"{array.dtype} {array.shape}".encode())

    return {name: zlib.crc32(array.data, kind(array)) for name, array in arrays.items()}
