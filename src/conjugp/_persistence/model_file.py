"""Model files: a fitted classifier in one file, which cannot run code and is checked when read.

The header is JSON (docs/saving.md lists it), the rest arrays; `files` writes both at once or not
at all. How a classifier is taken apart and put together is told by the `Form` that it registers.
What is read may come from a stranger: every shape, type and range is checked before there is a
model, and a file that fails any check raises `FileFormatError`.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from numpy.typing import NDArray

from conjugp._persistence import files
from conjugp._persistence.codec import Decoder, Encoder, UnknownClassError
from conjugp._persistence.files import FileFormatError
from conjugp._persistence.parts import Parts

FORMAT = 1
_DICTS = ("params", "summary", "extra", "arguments", "fitted")
_HEADER = {"kind", "format", "version", *_DICTS}


class Form(ABC):
    """How classifiers of one kind are in files."""

    kind: ClassVar[str]
    classes: ClassVar[tuple[type, ...]]  # that may stand in its files
    bases: ClassVar[tuple[type, ...]]  # of the classes that a user may add

    @abstractmethod
    def cls(self) -> type:
        """The class, loaded when it is asked for."""

    @abstractmethod
    def arguments(self, clf: Any) -> dict[str, Any]:
        """The checked arguments of the constructor, as data that can be encoded."""

    @abstractmethod
    def unfitted(self, arguments: dict[str, Any]) -> Any:
        """A classifier with these arguments, checked."""

    @abstractmethod
    def parts(self, clf: Any) -> dict[str, Any]:
        """All fitted state, by the names of the format."""

    @abstractmethod
    def summary(self, clf: Any) -> dict[str, Any]:
        """Facts for whoever looks at the file; nothing is built from them but the device."""

    @abstractmethod
    def check_place(self, device: str | None, dtype: str | None) -> None:
        """Raise for a device or precision that these classifiers cannot have."""

    @abstractmethod
    def build(self, clf: Any, take: Parts, was: Any, device: str | None, dtype: str | None) -> None:
        """Set all fitted attributes, once every part has been checked.

        `was`: the device that the file tells of; `device`, `dtype`: those asked for.
        """


_forms: dict[str, Form] = {}


def register(form: Form) -> None:
    """Make a kind of classifier known to `save` and `load`."""
    _forms[form.kind] = form


def save(clf: Any, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
    """Write a fitted classifier, with any JSON-able data of the caller's own."""
    form = _forms.get(type(clf).__name__)
    if form is None or type(clf) is not form.cls():
        raise TypeError(f"only {' and '.join(_forms)} can be saved; got {type(clf)}")
    parts = form.parts(clf)
    files.check_path("path", path)
    if not isinstance(extra, dict | None):
        raise TypeError(f"extra must be a dict or None; got {extra!r}")
    encode = Encoder()
    arguments = _encoded(encode, form.arguments(clf))
    header = {
        "kind": form.kind,
        "format": FORMAT,
        "version": _version(),
        "params": {name: _shown(value) for name, value in clf.get_params(deep=False).items()},
        "summary": form.summary(clf),
        "extra": _json("extra", extra or {}),
        "arguments": arguments,
        "fitted": _encoded(encode, parts),
    }
    files.write(path, encode.arrays, header)


def read_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model file says about itself: kind, format, version, params, summary, extra."""
    header = _read(path)[1]
    return {
        name: header[name] for name in ("kind", "format", "version", "params", "summary", "extra")
    }


def load(
    path: str | os.PathLike[str],
    custom: Iterable[type] = (),
    device: str | None = None,
    dtype: str | None = None,
) -> Any:
    """Read a classifier that ``save`` has written.

    The file cannot run code, whoever it comes from. It is read as a whole or not at all.

    Parameters
    ----------
    path : path
        A model file.
    custom : iterable of classes, default=()
        Kernel and likelihood classes of your own that the model uses. They are found by name, under
        any module; a file never makes conjugp import anything.
    device : str or None, default=None
        Where the model is to be: a torch device, or ``None`` for the one it was on, the CPU if that
        is not there. A device given becomes the classifier's ``device``.
    dtype : {"float32", "float64"} or None, default=None
        Working precision; ``None`` keeps it. One given becomes the classifier's ``dtype``.

    Returns
    -------
    clf : GPClassifier or GibbsGPClassifier
        The fitted classifier. On the same device and in the same precision its probabilities are
        the same bits as before.

    Raises
    ------
    conjugp.files.FileFormatError
        If the file is truncated, altered, foreign, or of a newer format; or if it needs a class
        that is not in ``custom``.
    """
    arrays, header = _read(path)
    form, custom = _forms[header["kind"]], list(custom)
    for cls in custom:
        if not (isinstance(cls, type) and issubclass(cls, form.bases)):
            raise TypeError(f"custom must hold classes of kernels and likelihoods; got {cls!r}")
    form.check_place(device, dtype)
    decode = Decoder(arrays, form.classes, custom)
    try:
        arguments, parts = (
            {name: decode(plain) for name, plain in header[which].items()}
            for which in ("arguments", "fitted")
        )
        if decode.unused:
            raise ValueError(f"arrays that nothing refers to: {sorted(decode.unused)[:3]}")
        clf = form.unfitted(arguments)
        form.build(clf, Parts(parts), header["summary"].get("device"), device, dtype)
    except UnknownClassError as error:
        short = error.name.rpartition(".")[2]
        raise FileFormatError(
            f"{path} needs the class {error.name}, which is not part of conjugp: give it as "
            f"load(path, custom=[{short}])"
        ) from error
    except Exception as error:
        # Whatever a stranger's file trips over, it is the file that is wrong.
        raise FileFormatError(f"{path} holds no {form.kind} that can be used: {error}") from error
    return clf


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays and the header, of a known format and with all its keys."""
    return files.read(path, partial(_check_header, path))


def _check_header(path: str | os.PathLike[str], header: Any) -> None:
    """Raise unless a header is that of a model file."""
    kind = header.get("kind") if isinstance(header, dict) else None
    if not isinstance(kind, str) or kind not in _forms:
        raise FileFormatError(f"{path} is not a model file" + (f" but a {kind}" if kind else ""))
    found = header.get("format")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise FileFormatError(f"{path} has no format that is known")
    if found > FORMAT:
        raise FileFormatError(
            f"{path} has format {found} and was written by conjugp {header.get('version')}; this "
            f"version reads formats up to {FORMAT}: install a newer one"
        )
    if (
        set(header) != _HEADER
        or not isinstance(header["version"], str)
        or not all(isinstance(header[name], dict) for name in _DICTS)
    ):
        raise FileFormatError(f"{path} has a header that is not a model file's")


def _version() -> str:
    import conjugp

    return conjugp.__version__


def _encoded(encode: Encoder, values: dict[str, Any]) -> dict[str, Any]:
    """Named values as plain data."""
    out = {}
    for name, value in values.items():
        try:
            out[name] = encode(value)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from error
    return out


def _json(name: str, value: Any) -> Any:
    """The value as JSON would give it back."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be plain JSON data ({error})") from error


def _shown(value: Any) -> Any:
    """A parameter as people read it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return repr(value)
