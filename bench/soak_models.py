"""Model files that were damaged or forged: each is refused, or gives the model it stands for.

Damaged: bytes of a file altered, cut, moved, repeated. Forged: the header or an array changed by
someone who knows the format, and every checksum made right again.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conjugp import FitOptions, GibbsGPClassifier, GPClassifier, load
from conjugp._persistence import files
from conjugp._persistence.files import FileFormatError
from conjugp.kernels import RBF, Linear, Matern52, Normalised

SLOW = 5.0  # seconds after which a load counts as hanging
# What no file may bring about while it is read.
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "subprocess.Popen", "socket.connect")


class Base(NamedTuple):
    """A model, its file, and what it predicts."""

    data: bytes
    rows: np.ndarray
    proba: np.ndarray


def rows_of(n: int, n_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One cloud of points per class."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % n_classes)
    return rng.normal(size=(n, 2)) + 2 * rng.normal(size=(n_classes, 2))[y], y


def classifiers() -> dict[str, Any]:
    """Small classifiers of every kind that a file can hold, unfitted."""
    rest: dict[str, Any] = {"learn_hyperparameters": False, "random_state": 0}
    few = FitOptions(n_covariance=4)
    return {
        "coupled": GPClassifier(n_inducing=6, max_epochs=5, random_state=0),
        "own kernels": GPClassifier(
            Normalised(RBF(1.0, 2.0)) + Linear(2.0, 1.0) * Matern52(1.0, 1.0),
            shared_kernel=False,
            n_inducing=4,
            class_weight="balanced",
            **rest,
        ),
        "decoupled": GPClassifier(
            RBF(1.5, 9.0), covariance="shared", n_inducing=8, options=few, **rest
        ),
        "point": GPClassifier(RBF(1.5, 9.0), covariance="none", n_inducing=8, **rest),
        "ep": GPClassifier(likelihood="heaviside", inference="ep", n_inducing=5, **rest),
        "stream": GPClassifier(n_inducing=5, random_state=np.random.RandomState(0)),
        "gibbs": GibbsGPClassifier(
            RBF(1.5, 4.0),
            hyperparameters="sample",
            n_inducing=4,
            random_state=0,
            **{"n_samples": 8, "n_warmup": 4, "n_chains": 2, "n_jobs": 1},
        ),
    }


def base_models(names: tuple[str, ...] | None = None) -> dict[str, Base]:
    """Fitted models and their files."""
    X, y = rows_of(40, 3)
    labels = np.array(["first", "second", "third"])[y]
    found = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, clf in classifiers().items():
            if names is not None and name not in names:
                continue
            if name == "stream":
                clf.partial_fit(X, labels, classes=np.unique(labels))
            else:
                clf.fit(X, labels)
            path = Path(folder) / "model"
            clf.save(path)
            found[name] = Base(path.read_bytes(), X[:5], clf.predict_proba(X[:5]))
    return found


# --- mutations ------------------------------------------------------------------------------------


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four accidents."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        n = len(out)
        if not n:
            break
        # Half of them near the front, where the header is.
        i = rng.randrange(n if rng.random() < 0.5 else min(n, 4096))
        j = min(n, i + rng.choice((1, 2, 8, 64, 1024)))
        match rng.randrange(8):
            case 0:
                out[i] ^= 1 << rng.randrange(8)
            case 1:
                out[i] = rng.randrange(256)
            case 2:
                del out[i:]
            case 3:
                del out[i:j]
            case 4:
                out[i:i] = rng.randbytes(j - i)
            case 5:
                out[i:j] = bytes(j - i)
            case 6:
                out[i:i] = out[i:j]
            case 7:
                k = rng.randrange(n)
                out[i:j], out[k : k + j - i] = out[k : k + j - i], out[i:j]
    return bytes(out)


def forged(data: bytes, rng: random.Random, path: Path) -> None:
    """Write the file anew with a few values changed and all checksums right."""
    path.write_bytes(data)
    arrays, header = files.read(path)
    header = copy.deepcopy(header)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.65:
            _change_header(header, rng)
        else:
            _change_array(arrays, rng)
    files.write(path, arrays, header)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every container and key of a tree."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    found = [(node, key) for key in keys]
    for key in keys:
        if isinstance(node[key], dict | list):
            found += _places(node[key])
    return found


def _change_header(header: Any, rng: random.Random) -> None:
    places = _places(header)
    node, key = rng.choice(places)
    values: list[Any] = [None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, -0.5, 1e-300, 1e308]
    values += ["", "0", "7T", "RBF", "os.system", "full", "none", "x" * 300, [], {}, [[]], [1.5]]
    values += [{"float": "nan"}, {"float": "inf"}, {"tensor": "0"}, {"array": "1"}, {"text": "0"}]
    values += [{"map": {}}, {"tuple": []}, {"objects": ["a", 1]}, {"object": "RBF", "fields": {}}]
    values += [{"tensor": "0", "device": "meta"}, {"dict": [[[], 1]]}, _deep(rng.randrange(200))]
    match rng.randrange(4):
        case 0 | 1:
            node[key] = rng.choice(values)
        case 2:
            other, there = rng.choice(places)
            node[key] = copy.deepcopy(other[there])
        case 3:
            del node[key]


def _deep(n: int) -> Any:
    out: Any = 0
    for _ in range(n):
        out = {"tuple": [out]}
    return out


def _change_array(arrays: dict[str, np.ndarray], rng: random.Random) -> None:
    name = rng.choice(list(arrays))
    x = arrays[name].copy()
    match rng.randrange(7):
        case 0 if x.size:
            value = rng.choice((np.nan, np.inf, -1e300, 1e30, 0.0, -1.0, 2.0**40))
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                x.reshape(-1)[rng.randrange(x.size)] = np.float64(value).astype(x.dtype)
            arrays[name] = x
        case 1:
            arrays[name] = x.reshape(-1)
        case 2:
            arrays[name] = x[: rng.randrange(len(x) + 1)] if x.ndim else x[None]
        case 3:
            kinds = (np.float16, np.float32, np.float64, np.int8, np.int64, np.uint32, np.bool_)
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                arrays[name] = x.astype(rng.choice(kinds))
        case 4:
            arrays[name] = arrays[rng.choice(list(arrays))]
        case 5:
            del arrays[name]
        case _:
            arrays[f"{name}T" if rng.random() < 0.5 else "new"] = x


# --- what becomes of them -------------------------------------------------------------------------


class Watch:
    """Notes what a file brings about while it is read; Python cannot take a hook away again."""

    def __init__(self) -> None:
        self.on, self.seen = False, Counter()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event.startswith(FORBIDDEN):
            self.seen[event] += 1


def outcome(path: Path, base: Base, same: bool) -> str:
    """ "refused", "loaded", or what went wrong; with `same` a model must predict as before."""
    try:
        clf = load(path)
    except FileFormatError:
        return "refused"
    except BaseException as error:
        return f"load raised {type(error).__name__}: {error}"
    try:
        proba = clf.predict_proba(base.rows[:, : clf.n_features_in_])
    except BaseException as error:
        # Other units may be written in a file, and then rows can be too far from those of the fit.
        if not same and isinstance(error, ValueError) and "overflows" in str(error):
            return "loaded"
        return f"predict_proba raised {type(error).__name__}: {error}"
    if not np.allclose(proba.sum(1), 1):
        return "probabilities do not sum to 1"
    return "loaded" if not same or np.array_equal(proba, base.proba) else "another model"


def fuzz_models(n: int, seed: int, models: dict[str, Base] | None = None) -> dict[str, Any]:
    """`n` damaged files and half as many forged ones; counts, and failures word for word."""
    models = models or base_models()
    watch = _watch()
    out: dict[str, Any] = {"base_models": {name: len(base.data) for name, base in models.items()}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        for kind, count in (("damaged", n), ("forged", n // 2)):
            out[kind] = _share(kind, count, seed, list(models.items()), path, watch)
        left = sorted(p.name for p in Path(folder).iterdir() if p != path)
    out["files_left"] = left
    out["forbidden_events"] = dict(watch.seen)
    out["passed"] = not (
        left or watch.seen or out["damaged"]["failures"] or out["forged"]["failures"]
    )
    return out


_watches: list[Watch] = []


def _watch() -> Watch:
    if not _watches:
        _watches.append(Watch())
    return _watches[0]


def _share(
    kind: str, n: int, seed: int, models: list[tuple[str, Base]], path: Path, watch: Watch
) -> dict[str, Any]:
    make: Callable[[Base, random.Random], None] = (
        (lambda base, rng: path.write_bytes(damaged(base.data, rng)) and None)
        if kind == "damaged"
        else (lambda base, rng: forged(base.data, rng, path))
    )
    counts, failures, longest = Counter(), [], 0.0
    for i in range(n):
        name, base = models[i % len(models)]
        rng = random.Random(f"{kind} {seed} {i}")
        make(base, rng)
        began = time.monotonic()
        watch.on = True
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = outcome(path, base, same=kind == "damaged")
        watch.on = False
        taken = time.monotonic() - began
        longest = max(longest, taken)
        if taken > SLOW:
            found = f"took {taken:.0f} seconds"
        if found not in ("refused", "loaded"):
            failures.append({"model": name, "number": i, "what": found[:300]})
            found = "failed"
        counts[found] += 1
    return {"n": n, **counts, "longest_seconds": round(longest, 3), "failures": failures[:20]}
