"""Files come back as they were written, and anything else is refused."""

from __future__ import annotations

import ast
import json
import os
import struct
import tracemalloc
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from conjugp._persistence import files
from conjugp._persistence.checkpoint import CHAINS, Checkpoint
from conjugp._persistence.files import FileFormatError, read, write

ROOM = Path(files.__file__).parent
ARRAYS = {
    "a": np.arange(12.0).reshape(3, 4),
    "empty": np.empty((0, 5)),
    "scalar": np.array(2.5),
    "counts": np.array([1, -2, 2**62]),
}
HEADER = {"kind": "test", "big": 2**127 + 1, "list": [1.5, None, "ω"]}

arrays = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    hnp.arrays(
        st.sampled_from([np.float64, np.float32, np.int64]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    max_size=4,
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


@settings(max_examples=40)
@given(arrays, plain)
def test_what_was_written_comes_back(tmp_path_factory, values, header):
    path = tmp_path_factory.mktemp("files") / "file"
    write(path, values, header)
    found, found_header = read(path)
    assert_same(found, values)
    assert found_header == header


def test_any_memory_layout(path):
    a = np.arange(24.0).reshape(4, 6)
    values = {"T": a.T, "part": a[::2, 1::2], "reversed": a[::-1]}
    write(path, values, None)
    assert_same(read(path)[0], values)


def test_other_programs_can_read_the_arrays(path):
    write(path, ARRAYS, HEADER)
    assert_same(load_file(path), ARRAYS)


def test_a_new_file_replaces_the_old_one_and_leaves_nothing_else(path):
    write(path, ARRAYS, HEADER)
    write(str(path), {"b": np.ones(2)}, {})
    assert_same(read(str(path))[0], {"b": np.ones(2)})
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_permissions_are_the_usual_ones(path):
    beside = path.with_name("beside")
    beside.touch()
    write(path, ARRAYS, HEADER)
    assert path.stat().st_mode == beside.stat().st_mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o664])
def test_the_permissions_of_a_file_that_is_replaced_stay(path, mode):
    """Also while it is written, so that nobody reads what is not for them."""
    path.touch()
    path.chmod(mode)
    with files.replaced(path) as temporary:
        temporary.write_bytes(b"new")
        assert temporary.stat().st_mode & 0o777 == mode | 0o600
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_goes_on_pointing_to_the_file(path, relative, there):
    folder = path.parent / "elsewhere"
    folder.mkdir()
    pointed = folder / "real"
    if there:
        write(pointed, {"b": np.ones(2)}, {})
        pointed.chmod(0o600)
    middle = path.with_name("middle")
    middle.symlink_to("elsewhere/real" if relative else pointed)
    path.symlink_to("middle" if relative else middle)
    files.check_path("path", path)
    write(path, ARRAYS, HEADER)
    assert path.is_symlink() and middle.is_symlink() and not pointed.is_symlink()
    assert_same(read(pointed)[0], ARRAYS)
    assert not there or pointed.stat().st_mode & 0o777 == 0o600
    (folder / f".real.{32 * 'a'}").touch()  # as of a process that was killed
    files.remove_leftovers(path)
    assert [p.name for p in folder.iterdir()] == ["real"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["elsewhere", "file", "middle"]


def test_the_ending_of_a_link_tells_the_format(path):
    link = path.with_name("picture.png")
    link.symlink_to(path)
    with files.replaced(link) as temporary:
        assert temporary.suffix == ".png"


def test_links_in_a_circle(path):
    other = path.with_name("other")
    other.symlink_to(path)
    path.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        write(path, ARRAYS, HEADER)
    assert path.is_symlink() and other.is_symlink()


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["Path.write_bytes", "os.fsync", "os.replace"])
def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch, step, error):
    write(path, ARRAYS, HEADER)

    def fail(*args):
        raise error

    with monkeypatch.context() as m:
        m.setattr(f"conjugp._persistence.files.{step}", fail)
        with pytest.raises(type(error)):
            write(path, {"b": np.ones(2)}, {})
    assert_same(read(path)[0], ARRAYS)
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_full_disk_is_said_once_until_there_was_room_again(path, monkeypatch):
    journal, room = Checkpoint(path, CHAINS, {}), iter([0, 0, 1, 0, 0, 0, 1, 1])
    wrote = [False] * 8

    def write(*args):
        if not next(room):
            raise OSError(f"no space left for {args}")
        wrote[i] = True

    monkeypatch.setattr(files, "write", write)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(8):
            journal.keep({"number": i})
    assert wrote == [False, False, True, False, False, False, True, True]
    assert ["'number': 0" in str(w.message) for w in caught] == [True, False]
    assert "'number': 3" in str(caught[1].message)


def test_a_header_that_is_not_plain_writes_nothing(path):
    for header in ({"x": float("nan")}, {"x": object()}, {"x": np.float64("inf")}):
        with pytest.raises((TypeError, ValueError)):
            write(path, ARRAYS, header)
    assert not list(path.parent.iterdir())


def test_no_file(path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(path.parent)


def test_every_truncation_is_an_error(path):
    write(path, ARRAYS, HEADER)
    data = path.read_bytes()
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(FileFormatError, match="file"):
            read(path)


def test_every_altered_byte_is_an_error_or_changes_nothing(path):
    """Nothing changes where a character of the header is written in another way."""
    write(path, ARRAYS, HEADER)
    data = path.read_bytes()
    for i in range(len(data)):
        altered = bytearray(data)
        altered[i] ^= 0x10
        path.write_bytes(altered)
        try:
            found, header = read(path)
        except FileFormatError:
            continue
        assert header == HEADER
        assert_same(found, ARRAYS)


@pytest.mark.parametrize(
    "content", [b"", b"conjugp", b"\x80\x04.", os.urandom(200), b"\xff" * 64, b"{}" * 40]
)
def test_foreign_content(path, content):
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="damaged or not a conjugp file"):
        read(path)


def test_other_shapes_of_the_same_bytes_are_noticed(path):
    write(path, ARRAYS, HEADER)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"shape":[3,4]', b'"shape":[4,3]'))
    assert load_file(path)["a"].shape == (4, 3)
    with pytest.raises(FileFormatError, match="not what was written"):
        read(path)


@pytest.mark.parametrize("text", [None, "", "[1", "3", "{}", json.dumps({"header": 1})])
def test_safetensors_of_someone_else(path, text):
    save_file({"w": np.ones(3)}, path, None if text is None else {files._KEY: text})
    with pytest.raises(FileFormatError):
        read(path)


def test_paths_are_checked_by_name(path):
    files.check_path("checkpoint", path)
    files.check_path("checkpoint", str(path))
    with pytest.raises(ValueError, match=r"checkpoint.*is a folder"):
        files.check_path("checkpoint", path.parent)
    with pytest.raises(ValueError, match=r"checkpoint.*there is no folder"):
        files.check_path("checkpoint", path / "further" / "file")
    with pytest.raises(ValueError, match="is a device or pipe"):
        files.check_path("checkpoint", os.devnull)
    path.symlink_to("missing/file")
    with pytest.raises(ValueError, match=r"checkpoint.*there is no folder .*missing"):
        files.check_path("checkpoint", path)
    with pytest.raises(TypeError, match="checkpoint must be a path"):
        files.check_path("checkpoint", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["another kind", "altered header", "other arrays", "foreign"])
def test_a_large_file_that_is_not_wanted_is_refused_by_its_header(path, kind):
    """Nothing of the 2 GB that come after the header is read into memory."""

    def check(header):
        if header["kind"] != "test":
            raise FileFormatError("not a test")

    size = 2**31
    text = json.dumps(
        {"header": {"kind": "other"}, "sums": {} if kind == "other arrays" else {"a": 1}}
    )
    sum_of = zlib.crc32(text.encode()) + (kind == "altered header")
    metadata = {"made by": "others"}
    if kind != "foreign":
        metadata = {files._KEY: text, files._SUM: str(sum_of)}
    array = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    begin = json.dumps({"__metadata__": metadata, "a": array}).encode()
    path.write_bytes(struct.pack("<Q", len(begin)) + begin)
    os.truncate(path, 8 + len(begin) + size)  # a sparse file: it takes no room on the disk
    tracemalloc.start()
    with pytest.raises(FileFormatError):
        read(path, check)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.stem)
def test_files_know_none_of_the_classes_in_them(path):
    """Classes register: the room imports of conjugp only itself and the type of a group."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    ours = {n.module for n in nodes if n.module and n.module.startswith("conjugp.")}
    others = {name for name in ours if not name.startswith("conjugp._persistence")}
    assert others <= {"conjugp._rows.group"}
