"""Random small frames that are odd or damaged, and what a classifier makes of them.

`odd_case(seed)` draws one: a frame of some library whose columns hold anything at all, labels, and
the same frame damaged. `outcome` fits and predicts; it gives one of `ALLOWED`, or says what is
wrong.
"""

from __future__ import annotations

import datetime as dt
import io
import re
import tempfile
import traceback
import uuid
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

from conjugp import GPClassifier, load
from conjugp.kernels import RBF

Rng = np.random.Generator
ALLOWED = ("probabilities", "refused by fit", "refused by save", "refused by predict")
# An error of the library's own begins with an argument; of a column it says what it holds.
OWN = re.compile(r"(X|y|categorical|ignore|classes)\b")
OF_COLUMN = re.compile(r"X: the column .* (holds|held) ", re.DOTALL)
INTERNAL = re.compile(r"narwhals|float\(\)|int\(\)|codec|_libs|Traceback")


KNOWN_WARNINGS = (
    *("columns that say nothing", "A column-vector y"),
    *("X does not have valid feature names", "X has feature names"),
    "pandas.DataFrame with sparse columns",
)


class OddCase(NamedTuple):
    """A frame to fit, its labels, another frame to predict, and what is odd about them."""

    X: Any
    y: Any
    new: Any
    settings: dict[str, Any]
    description: str


def odd_case(seed: int) -> OddCase:
    """Case number `seed`, always the same one."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 5, 12, 24, 40, 60], p=[0.02, 0.08, 0.2, 0.3, 0.2, 0.2]))
    said: list[str] = []
    columns = [_column(rng, n, said) for _ in range(int(rng.integers(1, 6)))]
    if rng.random() < 0.7:
        columns.append(pd.Series(rng.normal(size=n)))
        said.append("normal")
    names = _names(rng, len(columns), said)
    y = _labels(rng, n, said)
    frame = _frame(columns, names)
    make = _library(rng, said)
    settings: dict[str, Any] = {"random_state": 0, "max_epochs": 2}
    if rng.random() < 0.7:
        settings |= {"kernel": RBF(1.5, 4.0), "learn_hyperparameters": False}
        settings |= {"temperature": None, "prior_mean": -0.7}
    if rng.random() < 0.15:
        settings["categorical"] = [int(rng.integers(len(columns)))]
        said.append("codes")
    refused = [j for j, kind in enumerate(said[: len(columns)]) if kind in REFUSED]
    if refused and rng.random() < 0.5:
        settings["ignore"] = refused
        said.append("refused ones ignored")
    said.append("then")
    damaged = frame.copy(deep=True)
    for _ in range(int(rng.integers(1, 3))):
        damaged = _damaged(rng, damaged, said)
    other = make if rng.random() < 0.8 else _library(rng, said)
    return OddCase(make(frame), y, other(damaged), settings, f"{n} rows: " + ", ".join(said))


def outcome(case: OddCase) -> str:
    """One of `ALLOWED`, or what is wrong."""
    clf = GPClassifier(**case.settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # whoever warns, of whatever
        for known in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", known)
        warnings.filterwarnings("ignore", category=_convergence())
        try:
            clf.fit(case.X, case.y)
        except Exception as error:
            kept = hasattr(clf, "classes_")
            return _judged(error, "refused by fit") if not kept else "a failed fit that is kept"
        try:
            p = clf.predict_proba(case.X)
        except Exception as error:
            return "on the rows of the fit: " + _judged(error, "an error")
        if wrong := _wrong(p, len(clf.classes_)):
            return wrong
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.conjugp"
            try:
                clf.save(path)
                read = load(path)
            except Exception as error:
                return _judged(error, "refused by save")
            if not np.array_equal(read.predict_proba(case.X), p):
                return "other probabilities from a file"
            try:
                new = clf.predict_proba(case.new)
            except Exception as error:
                return _judged(error, "refused by predict")
            if wrong := _wrong(new, len(clf.classes_)):
                return wrong
            if not np.array_equal(read.predict_proba(case.new), new):
                return "other probabilities of new rows from a file"
    return "probabilities"


def _convergence() -> type[Warning]:
    from sklearn.exceptions import ConvergenceWarning

    return ConvergenceWarning


def _wrong(p: np.ndarray, n_classes: int) -> str:
    if p.shape[1] != n_classes or not np.isfinite(p).all() or (p < 0).any():
        return "no probabilities"
    return "" if np.allclose(p.sum(axis=1), 1) else "rows that do not sum to one"


def _judged(error: Exception, allowed: str) -> str:
    said = str(error)
    good = type(error).__name__ in ("ValueError", "TypeError", "TableError")
    good = good and OWN.search(said) is not None and not INTERNAL.search(said)
    if said.startswith("X: the column"):
        good = good and OF_COLUMN.match(said) is not None
    return allowed if good else _place(error)


def _place(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"


# --- columns ----------------------------------------------------------------------------------


class _Nameless:
    """A value whose text, comparison and truth are errors."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __bool__ = __eq__ = __float__ = __str__  # type: ignore[assignment]
    __hash__ = object.__hash__


class _Deep(str):
    """Text of a class of its own."""


ODD: list[Any] = [
    None,
    pd.NA,
    pd.NaT,
    float("nan"),
    np.datetime64("NaT"),
    np.timedelta64("NaT"),
    Decimal("NaN"),
    Decimal("sNaN"),
    Decimal("Infinity"),
    Decimal("1.5"),
    Decimal("1e999"),
    Fraction(1, 3),
    Fraction(10**400, 7),
    True,
    np.bool_(False),
    7,
    2**70,
    -(10**400),
    10**5000,
    -0.3,
    np.float32(0.1),
    np.float16(2.0),
    np.longdouble("1e4000"),
    np.int8(3),
    np.uint64(2**64 - 1),
    float("inf"),
    -np.inf,
    1.7e308,
    5e-324,
    -0.0,
    "",
    "   ",
    "\t\n",
    "\ud800",
    "a\0b",
    "\0",
    "é",
    "\u2028x\u200b",
    "x" * 20_000,
    "nan",
    "(missing)",
    "(other)",
    "1e3",
    np.str_("level"),
    "2024-02-30",
    b"bytes",
    b"\xff",
    np.bytes_(b"x"),
    bytearray(b"x"),
    dt.date(2024, 2, 29),
    dt.date.min,
    dt.datetime.max,
    dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14))),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
    pd.Timestamp("2024-01-01", tz="Europe/Berlin"),
    np.datetime64("2024-01-01", "D"),
    np.datetime64(2**62, "s"),
    np.datetime64("99999-01-01", "D"),
    dt.time(12, 30),
    dt.timedelta(days=3),
    pd.Timedelta("1D"),
    np.timedelta64(3, "s"),
    pd.Period("2024-01", "M"),
    pd.Interval(0, 1),
    pd.DateOffset(1),
    1 + 2j,
    np.complex64(1),
    (1, 2),
    [1, "a"],
    {"a": 1},
    {1, 2},
    np.arange(3),
    np.array(3.0),
    pd.Series([1, 2]),
    pd.DataFrame({"a": [1]}),
    uuid.UUID(int=7),
    object,
    Exception("x"),
    range(3),
    slice(None),
    Ellipsis,
    _Nameless(),
    _Deep(),
]
# Beside numbers and text these make levels; many others are refused.
_LEVELS = (str, int, float, np.floating, np.bool_, Decimal, Fraction, type(None))
MILD = [one for one in ODD if isinstance(one, _LEVELS)]


def _cells(values: Any) -> pd.Series:
    """A column of objects, whatever they are."""
    out = np.empty(len(values), dtype=object)
    for i, v in enumerate(values):
        out[i] = v
    return pd.Series(out, dtype=object)


def _gappy(rng: Rng, values: list[Any], share: float = 0.2) -> list[Any]:
    gap = [None, float("nan"), pd.NA, pd.NaT][int(rng.integers(4))]
    return [gap if rng.random() < share else v for v in values]


def _dates(rng: Rng, n: int) -> pd.Series:
    return pd.Series(pd.Timestamp("2023-01-01") + pd.to_timedelta(rng.integers(0, 900, n), "D"))


def _texts(rng: Rng, n: int, levels: int = 3) -> list[str]:
    return [f"level {i}" for i in rng.integers(0, levels, n)]


def _salted(rng: Rng, n: int) -> pd.Series:
    """A column of one type with a few cells of others."""
    values, odd = _base(rng, n), ODD if rng.random() < 0.1 else MILD
    for _ in range(int(rng.integers(1, 4))):
        values[int(rng.integers(n))] = odd[int(rng.integers(len(odd)))]
    return _cells(values)


def _base(rng: Rng, n: int) -> list[Any]:
    makers: list[Callable[[], list[Any]]] = [
        lambda: rng.normal(size=n).tolist(),
        lambda: rng.integers(0, 5, n).tolist(),
        lambda: _texts(rng, n),
        lambda: (
            _dates(rng, n).dt.to_pydatetime().tolist()
            if hasattr(_dates(rng, 1).dt, "to_pydatetime")
            else list(_dates(rng, n))
        ),
        lambda: (rng.random(n) < 0.5).tolist(),
    ]
    values = list(makers[int(rng.integers(len(makers)))]())
    return _gappy(rng, values) if rng.random() < 0.4 else values


def _category(rng: Rng, n: int, levels: Any) -> pd.Series:
    codes = rng.integers(-1 if rng.random() < 0.5 else 0, len(levels), n)
    return pd.Series(
        pd.Categorical.from_codes(codes, categories=levels, ordered=bool(rng.random() < 0.5))
    )


COLUMNS: dict[str, Callable[[Rng, int], pd.Series]] = {
    "salted": _salted,
    "salted too": _salted,
    "of one odd kind": lambda rng, n: _cells([ODD[int(rng.integers(len(ODD)))]] * n),
    "anything": lambda rng, n: _cells([ODD[int(rng.integers(len(ODD)))] for _ in range(n)]),
    "numbers and text": lambda rng, n: _cells(
        [float(v) if v > 0 else f"{v:.1f}" for v in rng.normal(size=n)]
    ),
    "truths among numbers": lambda rng, n: _cells(
        [v if v else bool(v) for v in rng.integers(0, 3, n).tolist()]
    ),
    "dates among text": lambda rng, n: _cells(
        [d.date() if rng.random() < 0.5 else str(d) for d in _dates(rng, n)]
    ),
    "dates and times": lambda rng, n: _cells(
        [d.date() if rng.random() < 0.5 else d for d in _dates(rng, n)]
    ),
    "zones": lambda rng, n: _dates(rng, n).dt.tz_localize("UTC").dt.tz_convert("Asia/Kolkata"),
    "many zones": lambda rng, n: _cells(
        [
            d.tz_localize("UTC").tz_convert(z).to_pydatetime()
            for d, z in zip(_dates(rng, n), rng.choice(["Asia/Tokyo", "UTC"], n), strict=True)
        ]
    ),
    "some zones": lambda rng, n: _cells(
        [d.tz_localize("UTC") if rng.random() < 0.5 else d for d in _dates(rng, n)]
    ),
    "far dates": lambda rng, n: pd.Series(
        rng.integers(-4000, 9000, n).astype("datetime64[Y]").astype("datetime64[s]")
    ),
    "dates": lambda rng, n: _dates(rng, n).mask(rng.random(n) < 0.3),
    "times of day": lambda rng, n: _cells([dt.time(int(h)) for h in rng.integers(0, 24, n)]),
    "timedeltas": lambda rng, n: pd.Series(pd.to_timedelta(rng.integers(0, 99, n), "h")),
    "periods": lambda rng, n: pd.Series(
        pd.PeriodIndex.from_ordinals(rng.integers(0, 9, n), freq="M")
    ),
    "intervals": lambda rng, n: pd.Series(pd.cut(rng.normal(size=n), [-9, 0, 1, 9])),
    "bare intervals": lambda rng, n: pd.Series(
        pd.arrays.IntervalArray.from_arrays(np.zeros(n), rng.integers(1, 4, n).astype(float))
    ),
    "complex": lambda rng, n: pd.Series(rng.normal(size=n) + 1j),
    "complex of no imaginary part": lambda rng, n: pd.Series(rng.normal(size=n).astype(complex)),
    "sparse": lambda rng, n: pd.Series(
        pd.arrays.SparseArray(np.where(rng.random(n) < 0.7, 0.0, rng.normal(size=n)))
    ),
    "sparse gaps": lambda rng, n: pd.Series(
        pd.arrays.SparseArray(np.where(rng.random(n) < 0.7, np.nan, rng.normal(size=n)))
    ),
    "sparse truths": lambda rng, n: pd.Series(pd.arrays.SparseArray(rng.random(n) < 0.3)),
    "huge": lambda rng, n: _cells([int(v) * 2**62 for v in rng.integers(-9, 9, n)]),
    "too huge": lambda rng, n: _cells([int(v) * 10**350 for v in rng.integers(-9, 9, n)]),
    "uint64": lambda rng, n: pd.Series(rng.integers(2**60, 2**64, n, dtype=np.uint64)),
    "infinite": lambda rng, n: pd.Series(np.where(rng.random(n) < 0.1, np.inf, 1.0)),
    "large": lambda rng, n: pd.Series(rng.normal(size=n) * 1e300),
    "largest": lambda rng, n: pd.Series(rng.choice([-1.79e308, 1.79e308], n)),
    "small": lambda rng, n: pd.Series(rng.normal(size=n) * 1e-310),
    "long tails": lambda rng, n: pd.Series(np.exp(30 * rng.normal(size=n))),
    "float16": lambda rng, n: pd.Series(rng.normal(size=n).astype(np.float16)),
    "longdouble": lambda rng, n: pd.Series(rng.normal(size=n).astype(np.longdouble)),
    "constant": lambda rng, n: pd.Series(np.full(n, 3.0)),
    "one level": lambda rng, n: _cells(["a"] * n),
    "one date": lambda rng, n: pd.Series([pd.Timestamp("2024-02-29")] * n),
    "one and gaps": lambda rng, n: _cells(_gappy(rng, ["a"] * n, 0.5)),
    "missing": lambda rng, n: _cells([None] * n),
    "missing numbers": lambda rng, n: pd.Series(np.full(n, np.nan)),
    "missing dates": lambda rng, n: pd.Series([pd.NaT] * n),
    "missing text": lambda rng, n: pd.Series([pd.NA] * n, dtype="string"),
    "spaces": lambda rng, n: _cells(rng.choice(["", " ", "\t", "\u00a0", "a", " a "], n).tolist()),
    "zeros of text": lambda rng, n: _cells(rng.choice(["a", "a\0", "\0", "b"], n).tolist()),
    "surrogates": lambda rng, n: _cells(rng.choice(["a", "b"], n).astype(object) + "\ud800"),
    "long text": lambda rng, n: _cells(["x" * 5000 + t for t in _texts(rng, n)]),
    "many levels": lambda rng, n: _cells(_texts(rng, n, max(2, n // 2))),
    "odd levels": lambda rng, n: _cells(
        [
            rng.choice(["\ud800", "é\0", "a", ""]) + str(i)
            for i in rng.integers(0, max(2, n // 2), n)
        ]
    ),
    "an identifier": lambda rng, n: _cells([f"id {i}" for i in range(n)]),
    "category": lambda rng, n: _category(rng, n, ["c", "a", "b", "never"]),
    "category of numbers": lambda rng, n: _category(rng, n, [3.0, 1.0, 2.5]),
    "category of whole numbers": lambda rng, n: _category(rng, n, [30, 10, 20]),
    "category of dates": lambda rng, n: _category(rng, n, pd.date_range("2024", periods=4)),
    "category of truths": lambda rng, n: _category(rng, n, [True, False]),
    "category of tuples": lambda rng, n: _category(
        rng, n, pd.Index([(1, 2), (3,)], tupleize_cols=False)
    ),
    "category of anything": lambda rng, n: _category(
        rng, n, pd.Index(["a", 1, 2.5, b"b"], dtype=object)
    ),
    "category of twins": lambda rng, n: _category(
        rng, n, pd.Index(["1", 1, "a", "a "], dtype=object)
    ),
    "category of spaces": lambda rng, n: _category(rng, n, ["", " ", "a"]),
    "empty category": lambda rng, n: pd.Series(pd.Categorical([None] * n)),
    "Int64": lambda rng, n: pd.Series(
        _gappy_na(rng, rng.integers(0, 9, n).tolist()), dtype="Int64"
    ),
    "Float32": lambda rng, n: pd.Series(
        _gappy_na(rng, rng.normal(size=n).tolist()), dtype="Float32"
    ),
    "boolean": lambda rng, n: pd.Series(
        _gappy_na(rng, (rng.random(n) < 0.5).tolist()), dtype="boolean"
    ),
    "string": lambda rng, n: pd.Series(_gappy_na(rng, _texts(rng, n)), dtype="string"),
    "arrow text": lambda rng, n: pd.Series(_gappy_na(rng, _texts(rng, n)), dtype="string[pyarrow]"),
    "arrow numbers": lambda rng, n: pd.Series(
        _gappy_na(rng, rng.integers(0, 9, n).tolist()), dtype="int64[pyarrow]"
    ),
    "arrow decimals": lambda rng, n: pd.Series(
        [Decimal(int(v)) / 4 for v in rng.integers(0, 9, n)],
        dtype=pd.ArrowDtype(pa.decimal128(9, 2)),
    ),
    "arrow times": lambda rng, n: pd.Series(
        [dt.time(int(h)) for h in rng.integers(0, 24, n)], dtype=pd.ArrowDtype(pa.time64("us"))
    ),
    "arrow dates": lambda rng, n: pd.Series(
        [d.date() for d in _dates(rng, n)], dtype=pd.ArrowDtype(pa.date32())
    ),
    "arrow stamps": lambda rng, n: pd.Series(
        list(_dates(rng, n)), dtype=pd.ArrowDtype(pa.timestamp("s", "UTC"))
    ),
    "arrow durations": lambda rng, n: pd.Series(
        pd.to_timedelta(rng.integers(0, 99, n), "h"), dtype=pd.ArrowDtype(pa.duration("s"))
    ),
    "arrow lists": lambda rng, n: pd.Series([[1]] * n, dtype=pd.ArrowDtype(pa.list_(pa.int64()))),
    "arrow bytes": lambda rng, n: pd.Series([b"a"] * n, dtype=pd.ArrowDtype(pa.binary())),
    "arrow nulls": lambda rng, n: pd.Series([None] * n, dtype=pd.ArrowDtype(pa.null())),
    "decimals": lambda rng, n: _cells(
        _gappy(rng, [Decimal(int(v)) / 3 for v in rng.integers(0, 99, n)])
    ),
    "fractions": lambda rng, n: _cells([Fraction(int(v), 7) for v in rng.integers(0, 99, n)]),
    "bytes": lambda rng, n: _cells([t.encode() for t in _texts(rng, n)]),
    "normal": lambda rng, n: pd.Series(rng.normal(size=n)),
    "normal and gaps": lambda rng, n: pd.Series(_gappy(rng, rng.normal(size=n).tolist())),
    "text": lambda rng, n: pd.Series(_texts(rng, n)),
    "text and gaps": lambda rng, n: pd.Series(_gappy(rng, _texts(rng, n))),
    "truths": lambda rng, n: pd.Series(rng.random(n) < 0.5),
}


REFUSED = {
    *("of one odd kind", "anything", "dates among text", "times of day", "timedeltas", "periods"),
    *("bare intervals", "complex", "complex of no imaginary part", "infinite", "too huge", "bytes"),
    *("arrow times", "arrow durations", "arrow lists", "arrow bytes", "category of tuples"),
}


def _gappy_na(rng: Rng, values: list[Any]) -> list[Any]:
    return [pd.NA if rng.random() < 0.2 else v for v in values]


def _column(rng: Rng, n: int, said: list[str]) -> pd.Series:
    # Of columns that are refused there are few, or nothing else would be seen.
    hopeless = bool(rng.random() < 0.06)
    kinds = [kind for kind in COLUMNS if (kind in REFUSED) == hopeless]
    kind = kinds[int(rng.integers(len(kinds)))]
    said.append(kind)
    return COLUMNS[kind](rng, n)


# --- names, labels, libraries, damage -----------------------------------------------------------


def _names(rng: Rng, n: int, said: list[str]) -> Any:
    plain = [f"c{i}" for i in range(n)]
    kinds: dict[str, Callable[[], Any]] = {
        "whole numbers": lambda: list(range(n)),
        "numbers": lambda: [i + 0.5 for i in range(n)],
        "names twice": lambda: ["c"] * n,
        "an empty name": lambda: ["", *plain[1:]],
        "mixed names": lambda: pd.Index(
            [[1, "1 ", None, 2.5, (1, 2), True][i % 6] for i in range(n)],
            dtype=object,
            tupleize_cols=False,
        ),
        "numbers and their text": lambda: pd.Index([1, "1", *plain[2:]][:n], dtype=object),
        "levels of names": lambda: pd.MultiIndex.from_tuples([("a", i) for i in range(n)]),
        "levels of names twice": lambda: pd.MultiIndex.from_tuples([("a", 0) for _ in range(n)]),
        "dates": lambda: pd.date_range("2024", periods=n),
        "missing names": lambda: pd.Index([None, *plain[1:]], dtype=object),
        "surrogates in names": lambda: pd.Index(["\ud800", *plain[1:]], dtype=object),
        "long names": lambda: ["x" * 3000 + c for c in plain],
        "names like ours": lambda: (["c=a", "c", "c (missing)", "c: share of 1", *plain])[:n],
        "categories for names": lambda: pd.CategoricalIndex(plain),
    }
    if rng.random() < 0.7:
        return plain
    kind = list(kinds)[int(rng.integers(len(kinds)))]
    said.append("named by " + kind)
    return kinds[kind]()


def _labels(rng: Rng, n: int, said: list[str]) -> Any:
    codes = np.arange(n) % int(rng.integers(2, 4))
    rng.shuffle(codes)
    kinds: dict[str, Callable[[], Any]] = {
        "labels": lambda: codes,
        "text": lambda: np.array(["no", "yes", "maybe"])[codes],
        "text of objects": lambda: np.array(["no", "yes", "maybe"], dtype=object)[codes],
        "list": lambda: codes.tolist(),
        "category": lambda: pd.Series(pd.Categorical.from_codes(codes, ["z", "b", "a", "never"])),
        "truths": lambda: codes == 0,
        "string": lambda: pd.Series(np.array(["no", "yes", "maybe"])[codes], dtype="string"),
        "Int64": lambda: pd.Series(codes, dtype="Int64"),
        "boolean": lambda: pd.Series(codes == 0, dtype="boolean"),
        "polars": lambda: pl.Series("y", codes),
        "polars text": lambda: pl.Series("y", [f"{c}" for c in codes]),
        "polars categories": lambda: pl.Series("y", [f"{c}" for c in codes]).cast(pl.Categorical),
        "arrow": lambda: pa.array(codes),
        "arrow text": lambda: pa.chunked_array([pa.array([f"{c}" for c in codes])]),
        "arrow dictionary": lambda: pa.array([f"{c}" for c in codes]).dictionary_encode(),
        "frame": lambda: pd.DataFrame({"y": codes}),
        "a gap": lambda: pd.Series([None, *codes[1:].tolist()], dtype="Int64"),
        "a gap in text": lambda: _cells([None, *(f"{c}" for c in codes[1:])]),
        "a gap in numbers": lambda: np.array([np.nan, *codes[1:]]),
        "a gap in categories": lambda: pd.Series(
            pd.Categorical.from_codes([-1, *codes[1:].tolist()], ["z", "b", "a"])
        ),
        "mixed": lambda: _cells([c if c else "none" for c in codes.tolist()]),
        "fractions": lambda: codes + 0.5,
        "floats": lambda: codes.astype(float),
        "decimals": lambda: _cells([Decimal(int(c)) for c in codes]),
        "dates": lambda: np.datetime64("2024-01-01") + codes,
        "stamps": lambda: pd.Series(pd.Timestamp("2024") + pd.to_timedelta(codes, "D")),
        "bytes": lambda: np.array([b"no", b"yes", b"maybe"])[codes],
        "tuples": lambda: _cells([(1, int(c)) for c in codes]),
        "lists": lambda: [[int(c), 1] for c in codes],
        "odd text": lambda: np.array(["", " ", "\ud800"], dtype=object)[codes],
        "long text": lambda: np.array(["x" * 5000, "y", "z"], dtype=object)[codes],
        "huge": lambda: _cells([int(c) * 10**30 for c in codes]),
        "complex": lambda: codes + 1j,
        "one class": lambda: np.zeros(n),
        "too few": lambda: codes[:-1],
        "none": lambda: None,
        "a word": lambda: "y",
        "intervals": lambda: pd.Series(pd.cut(codes, [-1, 0, 5])),
    }
    names = list(kinds)
    kind = names[int(rng.integers(15 if rng.random() < 0.8 else len(names)))]
    said.append("y: " + kind)
    return kinds[kind]()


def _frame(columns: list[pd.Series], names: Any) -> pd.DataFrame:
    rows = columns[0].index
    frame = pd.concat([c.set_axis(range(len(rows))) for c in columns], axis=1)
    frame.columns = names
    return frame.set_axis(rows, axis=0)


def _objects(frame: pd.DataFrame) -> np.ndarray:
    out = np.empty(frame.shape, dtype=object)
    for j in range(frame.shape[1]):
        for i, v in enumerate(frame.iloc[:, j].tolist()):
            out[i, j] = v
    return out


def _plain(name: Any) -> str:
    """The name as UTF-8 can have it."""
    return str(name).encode(errors="replace").decode()


def _to_polars(frame: pd.DataFrame) -> pl.DataFrame:
    made: dict[str, pl.Series] = {}
    for j in range(frame.shape[1]):
        name, column = _plain(frame.columns[j]), frame.iloc[:, j]
        try:
            made[name] = pl.Series(name, pl.from_pandas(column))
        except Exception:
            made[name] = pl.Series(name, column.tolist(), dtype=pl.Object)
    return pl.DataFrame(made)


def _to_arrow(frame: pd.DataFrame) -> pa.Table:
    made, names = [], []
    for j in range(frame.shape[1]):
        column = frame.iloc[:, j]
        try:
            array = pa.array(column, from_pandas=True)
        except Exception:
            array = pa.array([_plain(v) if isinstance(v, str) else None for v in column])
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        half = len(array) // 2
        made.append(pa.chunked_array([array[:half], array[half:]], type=array.type))
        names.append(_plain(frame.columns[j]))
    return pa.table(made, names=names)


LIBRARIES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "pandas": lambda frame: frame,
    "polars": _to_polars,
    "arrow": _to_arrow,
    "objects": _objects,
    "lists": lambda frame: _objects(frame).tolist(),
    "arrow in pandas": lambda frame: (
        _to_arrow(frame).to_pandas(types_mapper=pd.ArrowDtype)
        if len(set(map(str, frame.columns))) == frame.shape[1]
        else frame
    ),
}


def _library(rng: Rng, said: list[str]) -> Callable[[pd.DataFrame], Any]:
    names = list(LIBRARIES)
    name = names[int(rng.choice(len(names), p=[0.5, 0.12, 0.12, 0.12, 0.07, 0.07]))]
    said.append(name)
    return LIBRARIES[name]


def _with(frame: pd.DataFrame, j: int, column: pd.Series) -> pd.DataFrame:
    """The frame with another column at place j."""
    columns = [frame.iloc[:, k] for k in range(frame.shape[1])]
    columns[j] = column.set_axis(frame.index)
    return _frame(columns, frame.columns)


def _salt(rng: Rng, frame: pd.DataFrame, j: int) -> pd.DataFrame:
    values, odd = frame.iloc[:, j].tolist(), ODD if rng.random() < 0.3 else MILD
    for _ in range(int(rng.integers(1, 4))):
        values[int(rng.integers(len(values)))] = odd[int(rng.integers(len(odd)))]
    return _with(frame, j, _cells(values))


def _reordered(frame: pd.DataFrame, j: int) -> pd.DataFrame:
    column = frame.iloc[:, j]
    if not isinstance(column.dtype, pd.CategoricalDtype):
        return frame
    levels = column.cat.categories[::-1]
    return _with(frame, j, column.cat.reorder_categories(levels, ordered=True))


def _as(frame: pd.DataFrame, j: int, dtype: Any) -> pd.DataFrame:
    try:
        return _with(frame, j, frame.iloc[:, j].astype(dtype))
    except Exception:
        return frame


def _text_file(frame: pd.DataFrame) -> pd.DataFrame:
    try:
        return pd.read_csv(io.StringIO(frame.to_csv(index=False)))
    except Exception:
        return frame


DAMAGE: dict[str, Callable[[Rng, pd.DataFrame, int], pd.DataFrame]] = {
    "nothing": lambda rng, f, j: f,
    "other cells": _salt,
    "other cells too": _salt,
    "another column": lambda rng, f, j: _with(f, j, _column(rng, len(f), [])),
    "another column too": lambda rng, f, j: _with(f, j, _column(rng, len(f), [])),
    "missing column": lambda rng, f, j: _with(f, j, _cells([None] * len(f))),
    "column dropped": lambda rng, f, j: f.iloc[:, [k for k in range(f.shape[1]) if k != j]],
    "column twice": lambda rng, f, j: f.iloc[:, [*range(f.shape[1]), j]],
    "column in front": lambda rng, f, j: _frame(
        [pd.Series(["x"] * len(f), index=f.index), *(f.iloc[:, k] for k in range(f.shape[1]))],
        pd.Index(["new", *f.columns.tolist()], dtype=object, tupleize_cols=False),
    ),
    "columns reversed": lambda rng, f, j: f.iloc[:, ::-1],
    "no rows": lambda rng, f, j: f.iloc[:0],
    "one row": lambda rng, f, j: f.iloc[:1],
    "rows twice": lambda rng, f, j: f.iloc[[0] * len(f)],
    "index twice": lambda rng, f, j: f.set_axis([0] * len(f), axis=0),
    "no columns": lambda rng, f, j: f.iloc[:, :0],
    "objects": lambda rng, f, j: f.astype(object),
    "text": lambda rng, f, j: _as(f, j, str),
    "a category": lambda rng, f, j: _as(f, j, "category"),
    "levels reversed": lambda rng, f, j: _reordered(f, j),
    "from a file": lambda rng, f, j: _text_file(f),
    "names as text": lambda rng, f, j: f.set_axis(
        pd.Index([str(c) for c in f.columns], dtype=object), axis=1
    ),
    "other names": lambda rng, f, j: f.set_axis(range(f.shape[1]), axis=1),
}


def _damaged(rng: Rng, frame: pd.DataFrame, said: list[str]) -> pd.DataFrame:
    if not frame.shape[0] or not frame.shape[1]:
        return frame
    names = list(DAMAGE)
    name = names[int(rng.integers(len(names)))]
    said.append(name)
    return DAMAGE[name](rng, frame, int(rng.integers(frame.shape[1])))
