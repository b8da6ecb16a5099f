"""Tables as people have them: text, categories, dates and gaps, in frames of any kind."""

from __future__ import annotations

import datetime as dt
import tracemalloc
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.ensemble import BaggingClassifier, VotingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

from conjugp import GPClassifier, load
from conjugp._inputs.encoder import Encoder
from conjugp._inputs.frames import frame_of
from conjugp.conformal import ConformalClassifier
from conjugp.kernels import RBF
from faces import fixed

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

N = 120


def table(n: int = N, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Columns of many kinds with gaps, and labels that two of the categories tell."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 10, n),
            "city": rng.choice(["Aachen", "Bonn", "Celle"], n),
            "street": rng.choice([f"street {i}" for i in range(30)], n),
            "since": pd.Timestamp("2024-01-31") + pd.to_timedelta(rng.integers(0, 400, n), "D"),
            "member": rng.random(n) < 0.5,
            "code": rng.integers(0, 4, n),
            "ticket": [f"T{i:05d}" for i in range(n)],
        }
    )
    y = np.where((frame["city"] == "Bonn") ^ (frame["code"] == 2), "yes", "no")
    frame.loc[::7, "age"] = np.nan
    frame.loc[::9, "since"] = pd.NaT
    frame.loc[::11, "city"] = None
    return frame, y


def quick(**changes: object) -> GPClassifier:
    """A fit of everything that takes a fraction of a second."""
    return GPClassifier(random_state=0, categorical=["code"], max_epochs=20, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> GPClassifier:
    frame, y = table()
    with pytest.warns(UserWarning, match=r"left out: 'ticket' \(an identifier\)"):
        return quick().fit(frame, y)


def test_new_rows_are_told_by_their_categories(model):
    frame, _ = table(400, seed=1)
    # Of rows whose city is known: without it a third of the labels would be guesses.
    y = np.where((frame["city"] == "Bonn") ^ (frame["code"] == 2), "yes", "no")
    there = frame["city"].notna().to_numpy()
    assert model.score(frame[there], y[there]) > 0.97


def test_what_a_model_says_of_its_columns(model):
    frame, _ = table()
    assert model.n_features_in_ == 7
    assert list(model.feature_names_in_) == list(frame.columns)
    median = frame["age"].median()
    assert model.columns_ == {
        "age": f"a number, {median:.6g} and a feature of its own where it is missing",
        "city": "a category of 3 levels, (missing)",
        "street": "a category of 11 levels, (other), the classes' shares in 27 levels",
        "since": "a date, its place in the year, its place in the week",
        "member": "a category of 2 levels",
        "code": "a category of 4 levels",
        "ticket": "left out: an identifier",
    }
    tags = model.__sklearn_tags__().input_tags
    assert tags.allow_nan and tags.categorical


@pytest.mark.parametrize("kind", ["polars", "pyarrow", "objects"])
def test_it_does_not_matter_whose_table_it_is(kind, model):
    frame, y = table()
    made = {
        "polars": lambda f: pl.from_pandas(f),
        "pyarrow": lambda f: pa.Table.from_pandas(f),
        "objects": lambda f: f.to_numpy(dtype=object),
    }[kind]
    categorical = [5] if kind == "objects" else ["code"]
    with pytest.warns(UserWarning, match="left out"):
        other = quick().set_params(categorical=categorical).fit(made(frame), y)
    new, _ = table(30, seed=2)
    np.testing.assert_allclose(
        other.predict_proba(made(new)), model.predict_proba(new), rtol=0, atol=1e-9
    )


def test_columns_are_found_by_name_and_others_are_left_alone(model):
    new, _ = table(30, seed=2)
    p = model.predict_proba(new)
    np.testing.assert_array_equal(model.predict_proba(new[new.columns[::-1]]), p)
    np.testing.assert_array_equal(model.predict_proba(new.assign(other="x")), p)
    np.testing.assert_array_equal(model.predict_proba(new.drop(columns="ticket")), p)
    with pytest.raises(ValueError, match=r"X has not the column 'city', which the model was"):
        model.predict_proba(new.drop(columns="city"))
    with pytest.raises(ValueError, match="X has 6 features, but the model was fitted with 7"):
        model.predict_proba(new.to_numpy(dtype=object)[:, 1:])


def test_levels_and_gaps_that_the_fit_has_not_seen(model):
    new, _ = table(6, seed=3)
    new["street"] = "street of which nobody has heard"
    new.loc[0, "city"] = "Xanten"
    new["code"] = new["code"].astype(object)
    new.loc[1, "code"] = None
    new["member"] = new["member"].astype(object)
    new.loc[2, "member"] = None
    p = model.predict_proba(new)
    assert np.isfinite(p).all() and np.allclose(p.sum(axis=1), 1)


def test_files_keep_the_columns(model, tmp_path):
    new, _ = table(30, seed=2)
    model.save(tmp_path / "m.conjugp")
    other = load(tmp_path / "m.conjugp")
    np.testing.assert_array_equal(other.predict_proba(new), model.predict_proba(new))
    assert list(other.feature_names_in_) == list(new.columns)


def test_a_gap_says_something_itself():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    y = rng.random(300) < 0.5
    X[y, 1] = np.nan
    assert GPClassifier(random_state=0).fit(X[:150], y[:150]).score(X[150:], y[150:]) == 1.0


def test_a_gap_that_only_new_rows_have_is_the_mean_of_the_fit():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    clf = fixed().fit(X, X[:, 0] > 0)
    other = X.copy()
    other[:5, 1] = np.nan
    filled = np.where(np.isnan(other), X.mean(axis=0), other)
    np.testing.assert_allclose(clf.predict_proba(other), clf.predict_proba(filled), atol=1e-9)


def test_arrays_of_numbers_go_by_no_encoder():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    y = X[:, 0] > 0
    plain, objects = fixed().fit(X, y), pd.DataFrame(X.astype(object), columns=list("abc"))
    for other in (pd.DataFrame(X, columns=list("abc")), pl.DataFrame(X), X.astype(object), objects):
        clf = fixed().fit(other, y)
        assert clf.inducing_points_.shape[1] == 3
        np.testing.assert_array_equal(clf.predict_proba(other), plain.predict_proba(X))


def test_levels_of_a_column_share_a_lengthscale(model):
    lengths = np.asarray(model.kernel_.lengthscale)
    assert len(set(lengths.round(9))) < len(lengths)


def test_rows_in_another_order_give_the_same_model():
    frame, y = table()
    order = np.random.default_rng(5).permutation(N)
    found = []
    for rows in (np.arange(N), order):
        with pytest.warns(UserWarning, match="left out"):
            clf = quick().fit(frame.iloc[rows], y[rows])
        found.append(clf.predict_proba(frame))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-6)


def test_streams_and_batches_take_frames():
    frame, y = table()
    frame = frame.drop(columns="ticket")
    parts = [(frame[i : i + 60], y[i : i + 60]) for i in (0, 60)]
    found = quick().fit_stream(parts)
    assert found.score(frame, y) > 0.9
    found = quick()
    for X, labels in parts:
        found.partial_fit(X, labels, classes=["no", "yes"])
    assert found.score(frame, y) > 0.7


def test_a_parquet_file_of_text_and_gaps(tmp_path):
    frame, y = table()
    frame.drop(columns="ticket").assign(label=y).to_parquet(tmp_path / "rows.parquet")
    found = quick().fit_stream(tmp_path / "rows.parquet", target="label")
    assert found.score(frame, y) > 0.9


def test_around_it_and_in_a_search():
    frame, y = table()
    frame = frame.drop(columns="ticket")
    sets = ConformalClassifier(quick(), random_state=0).fit(frame, y).predict_set(frame[:20])
    assert sets.any(axis=1).all()
    assert cross_val_score(quick(), frame, y, cv=3).mean() > 0.8


def test_what_is_left_out():
    frame, y = table()
    clf = quick(ignore=["ticket", "street", -2]).set_params(categorical="auto").fit(frame, y)
    new = frame.assign(street="x", code=0)
    np.testing.assert_array_equal(clf.predict_proba(new), clf.predict_proba(frame))
    frame["empty"] = None
    with pytest.warns(UserWarning, match=r"'empty' \(no values\)"):
        quick(ignore=["ticket"]).fit(frame, y)


@pytest.mark.parametrize(
    ("argument", "value", "match"),
    [
        ("categorical", "code", r"categorical must be 'auto' or a list of names or positions"),
        ("categorical", [1.5], r"categorical must be 'auto' or a list"),
        ("categorical", ["cod"], r"categorical: X has no column 'cod'; did you mean 'code'\?"),
        ("ignore", "code", r"ignore must be a list of names or positions"),
        ("ignore", [9], r"ignore: X has no column 9"),
    ],
)
def test_arguments(argument, value, match):
    frame, y = table()
    with pytest.raises(ValueError, match=match):
        GPClassifier(**{argument: value}).fit(frame, y)


def test_bad_columns_are_named_all_at_once():
    frame, y = table()
    frame["bad"] = [[1]] * N
    frame["worse"] = np.where(np.arange(N) == 3, np.inf, 1.0)
    with pytest.raises(TypeError, match=r"'worse' holds an infinite .* row 4.*'bad' holds a list"):
        GPClassifier().fit(frame[["worse", "bad", "age"]], y)
    twice = pd.concat([frame[["age", "city"]], frame[["age"]]], axis=1)
    with pytest.raises(ValueError, match="X has the column 'age' more than once"):
        GPClassifier().fit(twice, y)
    with pytest.raises(ValueError, match="X has no column to learn from: 'ticket'"):
        GPClassifier().fit(frame[["ticket"]], y)


def test_a_column_that_is_of_another_kind_later(model):
    new, _ = table(5)
    with pytest.raises(ValueError, match=r"the column 'age' held numbers .* and holds texts now"):
        model.predict(new.assign(age="old"))


# --- odd frames -------------------------------------------------------------------------------

CELLS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=4),
    st.text(alphabet="\ud800ab\0 ", max_size=3),
    st.dates(),
    st.datetimes(timezones=st.none() | st.just(dt.timezone.utc)),
    st.just(pd.NaT),
    st.just(pd.NA),
)
KINDS = st.sampled_from(["any", "text", "numbers", "dates"])


@st.composite
def columns(draw: st.DrawFn) -> list[object]:
    """A column of 24 cells, of one type or of any."""
    kind = draw(KINDS)
    cell = {
        "any": CELLS,
        "text": st.none() | st.text(max_size=2),
        "numbers": st.none() | st.floats(-1e300, 1e300) | st.integers(-(2**70), 2**70),
        "dates": st.none() | st.datetimes(),
    }[kind]
    return draw(st.lists(cell, min_size=24, max_size=24))


@given(st.lists(columns(), min_size=1, max_size=4))
def test_odd_frames_give_probabilities_or_a_documented_error(made):
    X = pd.DataFrame({f"c{i}": pd.Series(c, dtype=object) for i, c in enumerate(made)})
    y = np.arange(24) % 2
    clf = fixed(kernel=RBF(variance=4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            p = clf.fit(X, y).predict_proba(X)
        except (ValueError, TypeError) as error:
            assert "X" in str(error)
            assert not hasattr(clf, "classes_")
        else:
            assert np.isfinite(p).all() and np.allclose(p.sum(axis=1), 1)


def test_rows_of_no_weight_choose_nothing():
    frame, y = table()
    frame = frame.drop(columns="ticket")
    weight = (np.arange(N) % 3 > 0).astype(float)
    some = frame[weight > 0], y[weight > 0]
    found, alone = quick().fit(frame, y, weight), quick().fit(*some)
    assert found.columns_ == alone.columns_
    np.testing.assert_allclose(found.predict_proba(frame), alone.predict_proba(frame), atol=1e-9)


def test_levels_that_are_called_like_ours():
    rng = np.random.default_rng(0)
    names = ["(other)"] * 20 + ["(missing)"] * 20 + ["a"] * 20 + ["b", None]
    X = pd.DataFrame({"level": rng.permutation(names), "x": rng.normal(size=62)})
    clf = fixed().fit(X, X["level"] == "a")
    assert np.isfinite(clf.predict_proba(X)).all()
    assert clf._inputs.n_features == 1 + 3


def test_codes_named_by_an_array():
    rng = np.random.default_rng(0)
    X = rng.integers(0, 3, (60, 2)).astype(float)
    found = [fixed(categorical=c).fit(X, X[:, 0] == 1) for c in (np.array([0, 1]), [0, 1])]
    assert found[0].columns_ == found[1].columns_
    np.testing.assert_array_equal(*(clf.predict_proba(X) for clf in found))


def test_far_numbers_in_a_column_with_long_tails():
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"x": np.exp(4 * rng.normal(size=80)), "level": rng.choice(["a", "b"], 80)})
    clf = fixed().fit(X, X["level"] == "a")
    assert "long tails tamed" in clf.columns_["x"]
    p = clf.predict_proba(pd.DataFrame({"x": [1e9, 1e200, 1.7e308, -1.7e308], "level": "a"}))
    np.testing.assert_allclose(p[1:3], p[:1].repeat(2, axis=0), atol=1e-6)
    assert np.isfinite(p).all()


def test_dates_where_there_was_text(model):
    new, _ = table(5)
    with pytest.raises(ValueError, match=r"the column 'city' held texts .* and holds dates now"):
        model.predict(new.assign(city=new["since"].fillna(pd.Timestamp("2024-01-01"))))


def test_what_is_ignored_may_hold_anything():
    frame, y = table()
    frame = frame.drop(columns="ticket")
    odd = frame.assign(bad=[[1]] * N)
    clf = quick(ignore=["bad"]).fit(odd, y)
    p = clf.predict_proba(odd)
    np.testing.assert_array_equal(clf.predict_proba(frame), p)
    plain = quick().fit(frame, y)
    np.testing.assert_array_equal(plain.predict_proba(frame), p)
    np.testing.assert_array_equal(plain.predict_proba(odd), p)  # a column that it does not know
    with pytest.raises(TypeError, match="'bad' holds a list in row 1"):
        quick().fit(odd, y)


def test_whole_numbers_that_floats_round():
    y = np.arange(24) % 2
    ids = 2**60 + np.arange(24)
    level = np.where(y, "a", "b")
    made = [
        pa.table({"id": ids, "level": level}),
        pl.DataFrame({"id": ids, "level": level}).with_columns(pl.col("id").cast(pl.Int128)),
        pd.DataFrame({"id": ids.astype(object), "level": level}),
    ]
    p = [fixed().fit(X, y).predict_proba(X) for X in made]
    np.testing.assert_array_equal(p[0], p[1])
    np.testing.assert_array_equal(p[0], p[2])


def test_dates_of_all_libraries_are_the_same_days():
    frame, y = table()
    frame = frame[["since", "city"]]
    zoned = frame.assign(since=frame["since"].dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"))
    p = fixed().fit(frame, y).predict_proba(frame)
    for X in (zoned, pl.from_pandas(zoned), pa.Table.from_pandas(zoned), zoned.astype(object)):
        np.testing.assert_array_equal(fixed().fit(X, y).predict_proba(X), p)
    far = pd.DataFrame({"since": np.array(["9999-12-31", "20000-01-01"], "M8[s]"), "city": "Bonn"})
    assert np.isfinite(fixed().fit(frame, y).predict_proba(far)).all()


def test_gaps_of_any_kind_in_new_rows_of_a_model_of_numbers():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    clf = fixed().fit(X, X[:, 0] > 0)
    other = X.copy()
    other[:5, 1] = np.nan
    p = clf.predict_proba(other)
    for gap in (None, pd.NA, pd.NaT):
        odd = other.astype(object)
        odd[:5, 1] = gap
        np.testing.assert_array_equal(clf.predict_proba(odd), p)
    frame = pd.DataFrame(X, columns=["a", "b"])
    named = fixed().fit(frame, X[:, 0] > 0)
    for wrong in (frame[["b", "a"]], frame[["b", "a"]].astype(object), frame.assign(c=None)):
        with pytest.raises(ValueError, match="feature names should match"):
            named.predict_proba(wrong)
    with pytest.raises(
        ValueError, match=r"^X: the column 'x1' held numbers.*such as 'a' in row 1$"
    ):
        clf.predict_proba(np.array([[1.0, "a"]], dtype=object))


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ([dt.date(2024, 1, 1), *["a"] * 23], r"'c' holds a date in row 1, but not dates alone"),
        ([*["a"] * 23, 10**400], r"'c' holds an infinite or too large number in row 24"),
        ([*[1.0] * 23, 10**400], r"'c' holds an infinite or too large number in row 24"),
        ([*[1.7e308] * 12, *[-1.7e308] * 12], r"'c' holds numbers too far apart"),
        ([dt.timedelta(1)] * 24, r"'c' holds a timedelta in row 1.*leave the column out"),
    ],
)
def test_columns_that_are_refused_are_named(column, match):
    X = pd.DataFrame({"c": pd.Series(column, dtype=object), "level": ["a", "b"] * 12})
    with pytest.raises((TypeError, ValueError), match=match):
        fixed().fit(X, np.arange(24) % 2)


def test_frames_that_are_refused():
    frame, y = table(24)
    with pytest.raises(TypeError, match="X must be in memory, and is a LazyFrame"):
        fixed().fit(pl.from_pandas(frame).lazy(), y)
    with pytest.raises(ValueError, match="'since' must hold codes, not dates"):
        fixed(categorical=["since"]).fit(frame, y)
    clf = fixed(ignore=["ticket"]).fit(frame, y)
    with pytest.raises(ValueError, match="X: Found array with 0 sample"):
        clf.predict_proba(frame[:0])
    with pytest.raises(ValueError, match="y to be passed"):
        fixed().fit(frame, None)


def test_memory_does_not_grow_with_the_number_of_levels_or_their_length():
    rng = np.random.default_rng(0)
    n = 20_000
    y = rng.integers(0, 2, n)
    grown, D = [], []
    for k in (100, n // 2, n):
        levels = [f"level {i}" for i in range(k)]
        levels[0] = 100_000 * "x"
        X = pd.DataFrame({"level": pd.Series(levels * (n // k), dtype=object)})
        X["x"] = rng.normal(size=n)
        tracemalloc.start()
        encoder, features = Encoder.fit(frame_of(X), y, np.ones(n), ["0", "1"])
        encoder.rows(X)
        grown.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        D.append(features.shape[1])
    assert D == [4, 4, 1]
    assert grown[1] < 5 * grown[0] and grown[2] < 2 * grown[0]


def test_long_text_is_kept_in_files(tmp_path):
    X = pd.DataFrame({"note": [f"{300 * 'x'} {i % 20}" for i in range(80)]})
    clf = fixed().fit(X, np.arange(80) % 20 < 10)
    clf.save(tmp_path / "m.conjugp")
    np.testing.assert_array_equal(
        load(tmp_path / "m.conjugp").predict_proba(X), clf.predict_proba(X)
    )


def test_inducing_points_in_the_columns_of_the_table():
    frame, y = table()
    frame["size"] = pd.Categorical(
        np.array(["S", "M", "L"])[np.arange(N) % 3], ["S", "M", "L"], ordered=True
    )
    frame.loc[::13, "size"] = None
    frame["tail"] = np.exp(3 * np.random.default_rng(7).normal(size=N))
    frame = frame.drop(columns=["ticket", "street", "member"])
    clf = fixed(n_inducing=None, categorical=["code"]).fit(frame, y)  # every row is one
    found = pd.DataFrame(clf.inducing_columns_)
    assert list(found) == list(frame) and "tamed" in clf.columns_["tail"]
    numbers = ["age", "tail"]
    order = [f.sort_values("tail").reset_index(drop=True) for f in (found, frame)]
    np.testing.assert_allclose(*(f[numbers].to_numpy() for f in order), rtol=1e-6)
    for name in ("city", "since", "size"):
        a, b = (f[name].astype(object).where(f[name].notna(), None).tolist() for f in order)
        assert a == b
    assert order[0]["code"].tolist() == order[1]["code"].astype(str).tolist()
    assert len(clf.features_) == clf.inducing_points_.shape[1] == clf._inputs.n_features
    assert clf.features_[:2] == ["age", "age (missing)"]


def test_inducing_points_that_moved_are_rows_that_can_be_predicted(model):
    columns = model.inducing_columns_
    assert set(columns["city"]) <= {"Aachen", "Bonn", "Celle", None}
    assert set(columns["street"]) <= {*(f"street {i}" for i in range(30)), "(other)"}
    assert columns["since"].dtype == "M8[s]"
    assert "ticket" not in columns
    assert np.isfinite(model.predict_proba(pd.DataFrame(columns))).all()
    X = np.random.default_rng(0).normal(size=(30, 2))
    plain = fixed().fit(X, X[:, 0] > 0)
    assert plain.inducing_columns_ is None and plain.features_ is None


# --- beside other libraries -------------------------------------------------------------------


def test_rows_whose_columns_lost_their_types(model):
    frame, y = table(40, seed=4)
    p = model.predict_proba(frame)
    cells = frame.to_numpy(dtype=object)
    for X in (
        cells,
        cells.tolist(),
        frame.astype(object),
        pd.DataFrame(cells, columns=list(frame)),
    ):
        np.testing.assert_array_equal(model.predict_proba(X), p)
    sizes = pd.Categorical(
        np.array(["S", "M", "L"])[np.arange(40) % 3], ["S", "M", "L"], ordered=True
    )
    X = pd.DataFrame({"size": sizes, "n": pd.array([1, None] * 20, dtype="Int64")})
    clf = fixed().fit(X, y)
    for other in (X.astype(object), X.to_numpy(dtype=object), X.astype({"size": str})):
        np.testing.assert_array_equal(clf.predict_proba(other), clf.predict_proba(X))


def test_shap_explains_the_columns_of_a_table(model):
    import shap  # slow to import

    frame, _ = table(24, seed=5)
    frame = frame.drop(columns="ticket")
    clf = quick().fit(*(a[:60] for a in (table()[0].drop(columns="ticket"), table()[1])))
    X, p = frame[20:], clf.predict_proba(frame[20:])
    kernel = shap.KernelExplainer(clf.predict_proba, frame[:20])
    np.testing.assert_allclose(
        kernel.shap_values(X, silent=True).sum(axis=1) + kernel.expected_value, p, atol=1e-8
    )
    background = frame[:20].to_numpy(dtype=object)

    def masker(mask, row):
        rows = background.copy()
        rows[:, mask] = row[mask]
        return (rows,)

    found = shap.Explainer(clf.predict_proba, masker)(X.to_numpy(dtype=object))
    np.testing.assert_allclose(found.values.sum(axis=1) + found.base_values, p, atol=1e-8)


@pytest.fixture(scope="module")
def mixed() -> tuple[pd.DataFrame, np.ndarray]:
    """A frame with text, dates and gaps, and labels that are text."""
    frame, y = table()
    return frame.drop(columns=["ticket", "street"]), y.astype(object)


def light() -> GPClassifier:
    return fixed(categorical=["code"])


def test_what_scikit_learn_is_told(mixed):
    frame, y = mixed
    clf = light()
    tags = clf.__sklearn_tags__().input_tags
    assert tags.allow_nan and tags.categorical and tags.string
    other = clone(clf.fit(frame, y))
    assert other.categorical == ["code"] and not hasattr(other, "classes_")
    assert list(clf.feature_names_in_) == list(frame) and clf.n_features_in_ == frame.shape[1]
    by_position = fixed(categorical=[4]).fit(frame.to_numpy(dtype=object), y)
    assert not hasattr(by_position, "feature_names_in_")
    assert by_position.n_features_in_ == frame.shape[1]


def test_searches_folds_and_pipelines(mixed):
    frame, y = mixed
    assert cross_val_score(quick(), frame, y, cv=3, error_score="raise").mean() > 0.8
    search = GridSearchCV(
        make_pipeline(FunctionTransformer(), quick()),
        {"gpclassifier__ignore": [["age"], ["city"]]},
        cv=2,
        scoring="neg_log_loss",
        error_score="raise",
    ).fit(frame, y)
    assert search.best_params_["gpclassifier__ignore"] == ["age"]
    assert set(search.predict(frame[:9])) <= {"no", "yes"}
    # A pipeline that encodes a column itself gives the others as they come.
    encode = make_column_transformer(
        (OneHotEncoder(sparse_output=False), ["city"]), remainder="passthrough"
    ).set_output(transform="pandas")
    pipe = make_pipeline(encode, fixed(categorical=["remainder__code"])).fit(frame, y)
    assert np.isfinite(pipe.predict_proba(frame)).all()


def test_other_classifiers_around_one(mixed):
    frame, y = mixed
    for around in (
        CalibratedClassifierCV(light(), cv=2),
        CalibratedClassifierCV(FrozenEstimator(light().fit(frame, y))),
        BaggingClassifier(fixed(), 2, random_state=0),
        VotingClassifier([("a", light()), ("b", fixed())], voting="soft"),
    ):
        p = around.fit(frame, y).predict_proba(frame)
        assert np.isfinite(p).all() and np.allclose(p.sum(axis=1), 1)
        assert list(around.classes_) == ["no", "yes"]
