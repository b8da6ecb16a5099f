"""Which rows a fit uses for what, what it reports, and what Ctrl-C leaves behind."""

from __future__ import annotations

import math
import pickle
import signal
import threading
import warnings
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning

import conjugp
from conjugp import FitOptions, GPClassifier
from conjugp._estimators.progress import ProgressBar
from conjugp._fit import fit as coupled_module
from conjugp._fit import kernel as kernel_module
from conjugp._fit import learn as learn_module
from conjugp._fit import weights as mean_module
from conjugp._fit.calibrate import unseen
from conjugp._fit.fit import estimated_elbo
from conjugp._fit.learn import kernel_rate
from conjugp._fit.plan import start_mean
from conjugp._fit.starts import largest_classes, only_classes
from conjugp._fit.weights import cache_bytes
from conjugp._gp.features import basis, features
from conjugp._gp.model import Model, coupled
from conjugp._gp.posterior import Posterior, initial_state, marginals, moments
from conjugp._gp.temperature import MORE, SCALES, VARIANCE_SCALES, fit_calibration
from conjugp._inference.settings import Progress
from conjugp._inference.svi import clamp
from conjugp._rows.dataset import Data, class_shares
from conjugp._rows.hold_out import FOLDS, folds
from conjugp.kernels import RBF, Matern52, Normalised
from conjugp.likelihoods import get_likelihood
from faces import decoupled, fitted_attributes, fixed, minibatch, regret, toy
from problems import labelled
from random_cases import allowed

X, y = toy(60)
quiet = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


class_counts = st.lists(st.integers(0, 40), min_size=2, max_size=8).filter(lambda c: sum(c) > 0)


# --- rows ----------------------------------------------------------------------------------------


@given(class_counts, st.integers(0, 99))
def test_folds(counts, seed):
    data = labelled(counts, seed)
    masks = folds(data)
    assert len(masks) <= FOLDS and all(mask.any() for mask in masks)
    times = torch.stack(masks).sum(0) if masks else torch.zeros(len(data.y))
    for c, count in enumerate(counts):
        rows = data.y == c
        # Every row is predicted once, but for those of a class that is copies of one or two.
        copies = count < 3 and float(data.mass[c]) >= 3.0 * max(1.0, data.total / data.n)
        assert (times[rows] == (0 if copies or data.n < FOLDS else 1)).all()
        if count >= 3:
            assert all(int((rows & ~mask).sum()) >= count - -(-count // FOLDS) for mask in masks)


def test_what_only_a_fold_has_is_not_seen():
    X = torch.tensor([[1.0, 0.0, 5.0], [2.0, 0.0, 5.0], [3.0, 1.0, 5.0], [4.0, 9.0, 6.0]])
    data = Data(X, torch.tensor([0, 1, 0, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0]), 2)
    fold = torch.tensor([False, False, True, False])
    assert unseen(data, fold).tolist() == [[3.0, 0.0, 5.0]]
    # Rows without weight say nothing of a column; what others have is kept.
    fold = torch.tensor([True, False, False, False])
    assert unseen(data, fold).tolist() == [[1.0, 0.0, 5.0]]
    assert unseen(data, torch.tensor([True, True, True, True])).tolist() == X.tolist()


@pytest.mark.parametrize("n", [80, 250, 400])
def test_names_as_dummies(n):
    """A column for every row, as of a name; new rows have none of them, and no other row did."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n + 1000, 3))
    y = (x[:, 0] + 0.7 * rng.standard_normal(n + 1000) > 0.3).astype(int)
    A = np.hstack([x[:n], np.eye(n)])
    B = np.hstack([x[n:], np.zeros((1000, n))])
    clf = GPClassifier(random_state=0).fit(A, y[:n])
    p = clf.predict_proba(B)[np.arange(1000), y[n:]]
    share = (np.bincount(y[:n]) + 1) / (n + 2)
    assert -np.log(p).mean() <= allowed(-np.log(share)[y[n:]].mean())


def test_a_class_without_rows_in_folds_is_not_excluded():
    """Two copies of a row say how often it came, not what a fit without it would say."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((8, 2))
    y = np.array([0] * 6 + [1] * 2)
    weight = np.full(8, 100.0)
    assert GPClassifier(random_state=0).fit(X, y, weight).temperature_ >= 1.0


def test_largest_classes():
    data = labelled([3, 9, 1, 7])
    kept = largest_classes(data, 2)
    assert kept is not None and kept.tolist() == [1, 3]
    two = only_classes(data, kept)
    assert two.n_classes == 2 and torch.bincount(two.y).tolist() == [9, 7]
    at = two.X[:, 0].long()
    assert torch.equal(data.y[at], torch.tensor([1, 3])[two.y])
    assert torch.equal(data.weight[at], two.weight)
    assert largest_classes(data, 4) is None and only_classes(data, None) is data


@pytest.mark.parametrize(
    ("lengthscale", "n_features", "rate"),
    [((1.0,) * 200, 200, 0.5), ((1.0,) * 50, 50, 1.0), ((1.0, 1.0), 2, 2.0), (1.0, 200, 1.0)],
)
def test_kernels_of_many_lengthscales_move_less(lengthscale, n_features, rate):
    Z, mean = torch.zeros(3, n_features), torch.zeros(2)
    state = initial_state([RBF(lengthscale, 1.0)], Z, mean)
    assert kernel_rate(state) == pytest.approx(rate, rel=1e-12)


def test_cache_bytes():
    data = labelled([1, 1])
    assert cache_bytes(3, data) == 3 * 2**20 and cache_bytes(0, data) == 0
    assert cache_bytes("auto", data) > 0


def test_an_elbo_from_a_sample(monkeypatch):
    clf = fixed().fit(X, y)
    model = clf._fitted.model
    data = Data(torch.tensor(X), torch.tensor(y), torch.ones(60, dtype=torch.float64), 3)
    full = model.elbo(data)
    assert estimated_elbo(model, data) == pytest.approx(full, rel=1e-12)
    monkeypatch.setattr("conjugp._fit.fit.ELBO_ROWS", 30)
    expected = 2 * (model.elbo(data.rows(0, 30)) + model.kl()) - model.kl()
    assert estimated_elbo(model, data) == pytest.approx(expected, rel=1e-12)


# --- the temperature -----------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_the_temperature_is_bounded_and_shrunk(make):
    """Labels drawn at random, where a naive temperature would run away."""
    rng = np.random.default_rng(0)
    few = make(temperature="auto").fit(X[:9], y[:9])
    # Where they do not show that frequencies are worse it may be MORE times as high.
    assert 0.8 < few.temperature_ < 1.25 * (MORE if make is minibatch else 1.0)
    noisy = make(temperature="auto").fit(rng.standard_normal((80, 2)), np.arange(80) % 3)
    assert 1 / 8 <= noisy.temperature_ <= 8


def test_overconfidence_is_cooled_and_underconfidence_sharpened():
    rng = np.random.default_rng(1)
    A = rng.standard_normal((200, 2))
    noise = fixed(prior_mean=0.0, temperature="auto").fit(A, rng.integers(0, 2, 200))
    clear = fixed(prior_mean=0.0, temperature="auto").fit(A, (A[:, 0] > 0).astype(int))
    assert clear.temperature_ < 1.0 < noise.temperature_


def test_classes_too_rare_for_a_fold_leave_the_temperature_alone():
    clf = fixed(temperature="auto").fit(X[:4], [0, 0, 1, 1])
    assert clf.temperature_ == 1.0


# --- optima that tell nothing --------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["collapsed", "augmented"])
def test_the_better_of_two_optima(bound, monkeypatch):
    """With a kernel variance of 100 q starts in the corner; the informed optimum is higher."""
    A, b = load_wine(return_X_y=True)
    A = (A - A.mean(0)) / A.std(0)
    how = {"bound": bound, "learn_hyperparameters": False, "prior_mean": 0.0, "n_inducing": None}
    how |= {"covariance": "full", "temperature": None, "random_state": 0}

    def fit(variance: float) -> tuple[GPClassifier, float]:
        clf = GPClassifier(RBF(4.7, variance), **how).fit(A[::2], b[::2])
        p = clf.predict_proba(A[1::2])
        return clf, float(-np.log(p[np.arange(len(p)), b[1::2]]).mean())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf, loss = fit(100.0)
    assert loss < 0.25
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="says next to nothing"):
        patch.setattr(coupled_module, "better_optimum", lambda run, result, *_: result)
        corner, flat = fit(100.0)
    assert flat > 1.0 and clf.elbo_ > corner.elbo_ + 2.0
    # Where the corner is the higher one it stays, and says what it is.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with pytest.warns(UserWarning, match=f"bound='{bound}' says next to nothing.*'exact'"):
            assert fit(1e4)[1] > 1.0


def test_prior_means_start_at_the_shares_of_the_classes():
    """With one more row of each class; σ, or the softmax, of them are the shares."""
    data = labelled([30, 9, 1], 0)._replace(weight=torch.ones(40).double())
    shares = class_shares(data)
    torch.testing.assert_close(shares, torch.tensor([31.0, 10.0, 2.0]).double() / 43)
    for name in ("logistic-softmax", "softmax"):
        like = get_likelihood(name)
        mean = like.start_means(shares)
        torch.testing.assert_close(like.prob(mean[None])[0], shares)
    # Many rows teach their prior means themselves.
    like, spread = get_likelihood("softmax"), []
    for k in (1, 10, 500):
        many = labelled([30 * k, 9 * k, k], 0)
        many = many._replace(weight=torch.ones_like(many.weight))
        mean = start_mean("auto", many, like)
        spread.append(float(mean.max() - mean.min()))
        if k == 1:
            torch.testing.assert_close(mean, like.start_means(shares).to(mean))
    assert spread[0] > 2.5 and 1.5 < spread[1] < spread[0] and spread[2] < 0.1
    # Equal rows are one row here, of their weight; weights of no scale are none of many rows.
    light = data._replace(weight=torch.full((40,), 1e-3).double())
    torch.testing.assert_close(class_shares(light), shares)


# --- noise ---------------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize(
    ("n", "n_features", "n_classes"), [(50, 5, 25), (120, 3, 2), (100, 150, 2), (400, 4, 3)]
)
def test_labels_that_are_noise_are_told_so(n, n_features, n_classes):
    """Not more than 5 % and .02 nats above the shares of the training rows."""
    rng = np.random.default_rng(n)
    A, b = rng.standard_normal((n + 1000, n_features)), rng.integers(n_classes, size=n + 1000)
    clf = GPClassifier(random_state=0).fit(A[:n], b[:n])
    known = np.isin(b[n:], clf.classes_)
    p = clf.predict_proba(A[n:][known])
    label = np.searchsorted(clf.classes_, b[n:][known])
    count = np.bincount(np.searchsorted(clf.classes_, b[:n])) + 1.0
    base = -np.log((count / count.sum())[label]).mean()
    assert -np.log(p[np.arange(len(p)), label]).mean() < 1.05 * base + 0.02


@pytest.mark.parametrize("weight", [1.0, 2.5, 3e5, 1e-5])
def test_a_lonely_row_is_in_a_fold_whatever_all_rows_weigh(weight):
    """Not one that weighs as much as many others: leaving that out is to forget what is known."""
    labels = torch.tensor([0] * 9 + [1])
    weights = torch.full((10,), weight, dtype=torch.float64)
    rows = Data(torch.arange(10.0)[:, None].double(), labels, weights, 2)
    assert sum(int(mask[-1]) for mask in folds(rows)) == 1
    heavy = rows._replace(weight=torch.cat([weights[:9], 1000 * weights[9:].clamp_min(1.0)]))
    assert not any(bool(mask[-1]) for mask in folds(heavy))


def test_more_dummies_than_rows():
    """A kernel of as many lengthscales as that is learned again without the fold's labels."""
    rng = np.random.default_rng(1)
    A = (rng.random((1100, 200)) < 0.05) * 1.0
    b = (A[:, :10].sum(1) + 0.3 * rng.standard_normal(1100) > 0.5).astype(int)
    clf = GPClassifier(random_state=0).fit(A[:100], b[:100])
    p = clf.predict_proba(A[100:])[np.arange(1000), b[100:]]
    share = (np.bincount(b[:100]) + 1) / 102
    assert -np.log(p).mean() < 1.05 * -np.log(share[b[100:]]).mean() + 0.02
    assert clf.temperature_ > 0.8


def test_many_features_that_are_worth_the_same():
    """All lengthscales move together: each held by itself, they stay too short (.63 right)."""
    right = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        slope, A = rng.standard_normal(100), rng.standard_normal((3250, 100))
        b = (0.3 * A @ slope + rng.logistic(size=3250) > 0).astype(int)
        clf = GPClassifier(random_state=seed).fit(A[:250], b[:250])
        right.append(clf.score(A[250:], b[250:]))
    assert np.mean(right) > 0.66


# --- what is reported ----------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_history_and_callback(make):
    seen = []
    options = FitOptions(callback=seen.append, n_covariance=10)
    clf = make(options=options).fit(X, y)
    assert len(seen) == len(clf.history_) > 0
    for p, row in zip(seen, clf.history_, strict=True):
        assert (p.stage, p.epoch, p.value) == (row["stage"], row["epoch"], row["value"])
        assert np.isfinite(p.value)
    seconds = [row["seconds"] for row in clf.history_]
    assert seconds == sorted(seconds) and seconds[0] >= 0
    assert "fit" in {row["stage"] for row in clf.history_}
    assert isinstance(clf.n_iter_, int) and 1 <= clf.n_iter_ <= clf.max_epochs + 2
    assert isinstance(clf.converged_, bool) and isinstance(clf.elbo_, float)


def test_the_elbo_rises():
    clf = fixed(bound="collapsed", tol=1e-9).fit(X, y)
    # What follows looks for another optimum, and starts anew.
    values = [row["value"] for row in clf.history_ if row["stage"] == "fit"]
    assert len(values) > 2 and (np.diff(values) >= -1e-9 * abs(values[-1])).all()
    assert clf.elbo_ == pytest.approx(max(values[-1], clf.history_[-1]["value"]), rel=1e-9)


def test_a_bar_does_not_go_beyond_its_end(capsys):
    bar = ProgressBar(None, 1)
    for epoch in (1.0, 2.0, 10 / 3, 3.5):
        bar(Progress("fit", epoch, 10 / 3, -1.0))
    assert bar._bar.n == bar._bar.total == 3.33
    bar.close()
    assert "100%" in capsys.readouterr().err


@quiet
@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_verbose(make, capsys):
    make(verbose=0).fit(X, y)
    silent = capsys.readouterr()
    assert silent.out == "" and silent.err == ""
    make(verbose=1).fit(X, y)
    loud = capsys.readouterr()
    measure = "log posterior -" if make is decoupled else "ELBO -"
    assert loud.out == "" and measure in loud.err and "fit" in loud.err
    assert "epoch" in loud.err and "<" in loud.err  # how far, and how long it will take


@pytest.mark.parametrize("make", [fixed, minibatch, decoupled])
def test_too_few_epochs_warn(make):
    clf = make(max_epochs=1, tol=0.0, learn_hyperparameters=True)
    with pytest.warns(ConvergenceWarning, match="max_epochs=1"):
        clf.fit(X, y)
    assert not clf.converged_
    np.testing.assert_allclose(clf.predict_proba(X).sum(1), 1.0, atol=1e-12)


@pytest.mark.parametrize("load", [load_iris, load_wine])
def test_defaults_converge_in_silence(load):
    A, b = load(return_X_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf = GPClassifier(random_state=0).fit(A[::2], b[::2])
    assert clf.converged_ and clf.score(A[1::2], b[1::2]) > 0.9


# --- Ctrl-C --------------------------------------------------------------------------------------


class Stop:
    """Presses Ctrl-C at the n-th report of a stage."""

    def __init__(self, stage: str, n: int = 1) -> None:
        self.stage, self.n = stage, n

    def __call__(self, progress) -> None:
        if progress.stage == self.stage:
            self.n -= 1
            if self.n == 0:
                raise KeyboardInterrupt


def learning(**changes):
    return GPClassifier(random_state=0, max_epochs=20, **changes)


def searching(**changes):
    return GPClassifier(covariance="shared", n_inducing=20, max_epochs=3, random_state=0, **changes)


STAGES = [
    (fixed, "fit", 1),
    (fixed, "fit", 3),
    (learning, "fit", 1),
    (learning, "fit", 12),
    (minibatch, "fit", 1),
    (minibatch, "all rows", 1),
    (decoupled, "fit", 1),
    (decoupled, "fit", 4),
    (searching, "fit", 2),
]


@quiet
@pytest.mark.parametrize(("make", "stage", "n"), STAGES)
@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_ctrl_c_leaves_the_last_good_state(make, stage, n, on_interrupt):
    options = FitOptions(callback=Stop(stage, n), on_interrupt=on_interrupt, n_covariance=10)
    clf = make(options=options)
    if on_interrupt == "raise":
        with pytest.raises(KeyboardInterrupt):
            clf.fit(X, y)
    else:
        assert clf.fit(X, y) is clf
    p = clf.predict_proba(X)
    assert np.isfinite(p).all() and np.allclose(p.sum(1), 1.0, atol=1e-12)
    assert not clf.converged_ and np.isfinite(clf.elbo_) and len(clf.history_) >= n
    assert clf.n_features_in_ == 2 and clf.classes_.tolist() == [0, 1, 2]
    assert np.isfinite(clf.inducing_points_).all()
    assert fitted_attributes(clf) == fitted_attributes(fixed().fit(X, y))


@quiet
def test_the_later_the_better():
    """What is kept is the state at the interrupt, not the start."""
    elbos = []
    for n in (1, 4, 10):
        clf = learning(options=FitOptions(callback=Stop("fit", n), on_interrupt="return"))
        elbos.append(clf.fit(X, y).elbo_)
    assert elbos[0] < elbos[1] < elbos[2]


@pytest.mark.parametrize("stage", ["kernel", "search"])
@pytest.mark.parametrize("on_interrupt", ["raise", "return"])
def test_before_any_state_there_is_nothing_to_keep(stage, on_interrupt):
    clf = searching(options=FitOptions(callback=Stop(stage), on_interrupt=on_interrupt))
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X, y)
    assert fitted_attributes(clf) == []


@quiet
def test_an_old_fit_survives_an_early_ctrl_c():
    clf = searching(temperature=None).fit(X, y)
    expected = clf.predict_proba(X)
    clf.set_params(options=FitOptions(callback=Stop("kernel")))
    with pytest.raises(KeyboardInterrupt):
        clf.fit(np.hstack([X, X]), y)
    np.testing.assert_array_equal(clf.predict_proba(X), expected)


def test_ctrl_c_between_mean_and_covariance(monkeypatch):
    """No report comes from there, but the mean is good."""
    original, calls = mean_module.assemble, []

    def assemble(*args):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(mean_module, "assemble", assemble)
    clf = decoupled()
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X, y)
    assert regret(clf) < 0.3


@quiet
@pytest.mark.parametrize(("make", "n"), [(fixed, 3), (learning, 12), (decoupled, 4)])
def test_ctrl_c_leaves_the_number_of_passes(make, n):
    clf = make(options=FitOptions(callback=Stop("fit", n), on_interrupt="return")).fit(X, y)
    assert clf.n_iter_ == math.ceil(clf.history_[-1]["epoch"]) >= n


@quiet
@pytest.mark.parametrize("make", [learning, decoupled])
def test_a_second_ctrl_c_does_not_lose_what_the_first_keeps(make, monkeypatch, request):
    """It comes while the ELBO of the last state is computed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    original = Model.elbo

    def impatient(model, rows):
        signal.raise_signal(signal.SIGINT)
        return original(model, rows)

    monkeypatch.setattr(Model, "elbo", impatient)
    clf = make(options=FitOptions(callback=Stop("fit", 4)))
    with pytest.raises(KeyboardInterrupt):
        clf.fit(X, y)
    assert regret(clf) < 1.0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@quiet
def test_ctrl_c_in_another_thread():
    """Signals belong to the main thread; the state is kept all the same."""
    clf = learning(options=FitOptions(callback=Stop("fit", 4), on_interrupt="return"))
    thread = threading.Thread(target=clf.fit, args=(X, y))
    thread.start()
    thread.join()
    assert clf.n_iter_ == clf.history_[-1]["epoch"] >= 4


@quiet
def test_an_interrupted_fit_can_be_used_like_any_other():
    options = FitOptions(callback=Stop("fit", 10), on_interrupt="return")
    clf = learning(options=options).fit(X, y)
    copy = pickle.loads(pickle.dumps(clf))
    np.testing.assert_array_equal(copy.predict_proba(X), clf.predict_proba(X))
    assert clf.calibrate(X, y).temperature_ > 0
    assert clf.sample_latent(X[:3], 2, random_state=0).shape == (2, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf.partial_fit(X, y)
    assert np.isfinite(clf.predict_proba(X)).all()
    assert regret(clf.set_params(options=None, warm_start=True).fit(X, y)) < 0.2


def test_a_stream_from_before_is_forgotten():
    clf = fixed().partial_fit(X, y, classes=[0, 1, 2])
    clf.set_params(options=FitOptions(callback=Stop("fit", 3), on_interrupt="return"))
    clf.fit(1000 * X[:, :1] + 5, y).set_params(options=None)
    before = clf.score(1000 * X[:, :1] + 5, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clf.partial_fit(1000 * X[:, :1] + 5, y)
    assert clf.score(1000 * X[:, :1] + 5, y) >= before - 0.1


def saved(clf: GPClassifier) -> GPClassifier:
    """Written to a file and read from it."""
    with TemporaryDirectory() as folder:
        clf.save(Path(folder) / "model")
        return conjugp.load(Path(folder) / "model")


def more(clf: GPClassifier) -> GPClassifier:
    """With rows that came later, for which a stream takes over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the fitted posterior is decoupled")
        return clf.partial_fit(X[:20], y[:20])


@quiet
@pytest.mark.parametrize(
    ("make", "scales"),
    [
        (lambda: decoupled(options=FitOptions()), VARIANCE_SCALES),
        (lambda: minibatch(options=FitOptions(conditional_variance=1.0)), (1.0,)),
        (minibatch, SCALES),
    ],
)
@pytest.mark.parametrize("after", [lambda clf: clf, lambda clf: clf.calibrate(X, y), saved, more])
def test_calibrate_knows_what_was_fitted(make, scales, after):
    """Decoupled, also where all its points carry the covariance; coupled, with less variance.

    Also the second time, after a file, and after more rows.
    """
    clf = make().fit(X, y)
    if after is more and scales == VARIANCE_SCALES:
        scales = (1.0,)  # a stream is coupled
    clf = after(clf).calibrate(X, y)
    m, v = clf.predict_latent(X)
    found = fit_calibration(
        clf._fitted.model.likelihood,
        torch.tensor(m),
        torch.tensor(v),
        torch.tensor(y),
        torch.ones(len(y)),
        scales,
    )
    assert clf.variance_scale_ == found.variance_scale
    assert clf.temperature_ == pytest.approx(found.temperature, rel=1e-3)


@quiet
@pytest.mark.parametrize("share", ["auto", 1.0])
def test_more_rows_with_the_share_of_the_fit(share):
    """What is reported is the ELBO of the last batch, scaled to all, whatever was raised."""
    clf = minibatch(options=FitOptions(conditional_variance=share)).fit(X, y)
    kept = clf._fitted.model.kept
    assert kept == pytest.approx(0.4 if share == "auto" else 1.0)
    clf.partial_fit(X[:20], y[:20])
    assert clf._fitted.model.kept == kept
    assert clf.history_[-1]["measure"] == ("ELBO" if kept == 1.0 else "relaxed ELBO")
    if kept < 1.0:
        kl = float(clf._fitted.model.kl())
        expected = (clf.elbo(X[:20], y[:20]) + kl) * 80 / 20 - kl
        assert clf.elbo_ == pytest.approx(expected, rel=1e-9)


@quiet
def test_rows_held_out_do_not_unsettle_the_posterior():
    """The stage on all rows takes short steps: its first does not throw q away."""
    clf = minibatch(temperature="auto").fit(X, y)
    stages = [(row["stage"], row["value"]) for row in clf.history_]
    last = [value for stage, value in stages if stage == "fit"][-1]
    after = [value for stage, value in stages if stage == "all rows"]
    assert all(value > last - 0.25 * abs(last) for value in after)


@quiet
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared_kernel": False},
        {"likelihood": "softmax"},
        {"batch_size": 100},
        {"options": FitOptions(conditional_variance=1.0)},
        {"options": FitOptions(conditional_variance=0.3)},
    ],
    ids=str,
)
def test_rows_held_out_are_taken_in_by_one_step(changes, monkeypatch):
    """q moves towards what these rows alone, scaled up, say of it; the temperature is that of q."""
    A, labels = toy(900, 3)
    weight = np.random.default_rng(0).uniform(0.5, 2.0, 900)
    seen = []
    taken_in = coupled_module.taken_in

    def spy(run, state, held, everything, settings):
        out = taken_in(run, state, held, everything, settings)
        before, after = deepcopy(state), deepcopy(out[0])
        seen.append((run.plan, settings, before, held, everything.total, after, out[1]))
        return out

    monkeypatch.setattr(coupled_module, "taken_in", spy)
    clf = minibatch(temperature="auto", max_epochs=3, **changes).fit(A, labels, weight)
    [(plan, settings, state, held, total, after, calibration)] = seen
    kept, like = settings.kept, settings.likelihood
    given = plan.options.conditional_variance
    assert kept == (0.05 if given == "auto" else given)
    assert 60 < held.n <= 90 and total == pytest.approx(weight.sum())
    model = coupled(state, like, settings.bound)
    m, v = model.latent(held.X)
    scales = (1.0,) if kept == 1.0 else SCALES
    shares = class_shares(Data(torch.tensor(A), torch.tensor(labels), torch.tensor(weight), 3))
    found = fit_calibration(like, m, v, held.y, held.weight, scales, shares)
    assert calibration.temperature == pytest.approx(found.temperature, rel=1e-4)
    assert calibration.variance_scale == found.variance_scale
    assert clf.temperature_ == calibration.temperature
    # Row by row and class by class (Q3, Q4, S2).
    rho = held.n / (held.n + 0.5 * settings.batch_size * state.step**0.6)
    assert 0.05 < rho < 0.5
    f = features(basis(state.kernels, state.Z, kept=kept), held.X)
    m, v, _ = marginals(moments(state.q), f)
    m = m + state.mean
    site = clamp(like.site(held.y, m, v, settings.bound), m, batch=True)
    scale = total / float(held.weight.sum())
    for c in range(3):
        F = f.A[c % len(f.A)]
        theta = scale * held.weight * site.precision[:, c]
        r = scale * held.weight * (site.potential[:, c] - site.precision[:, c] * state.mean[c])
        P = torch.eye(len(F), dtype=F.dtype) + sum(
            t * torch.outer(a, a) for t, a in zip(theta, F.T, strict=True)
        )
        h = (1 - rho) * state.q.h[c] + rho * (F @ r)
        torch.testing.assert_close(after.q.h[c], h, rtol=1e-6, atol=1e-8)
        P = (1 - rho) * state.q.P[c] + rho * P
        torch.testing.assert_close(after.q.P[c], P, rtol=1e-6, atol=1e-8)


@quiet
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 0.06),
        ({"n_inducing": 40}, 0.3),
        ({"n_inducing": 4}, 0.05),
        ({"n_inducing": 200}, 1.0),
        ({"temperature": None}, 1.0),  # no one would mend the variances
        ({"temperature": 2.0}, 1.0),
        ({"learn_hyperparameters": False}, 1.0),
        ({"batch_size": None}, 1.0),
        ({"options": FitOptions(initial_variance=1.0)}, 1.0),
        ({"likelihood": "heaviside", "inference": "ep"}, 1.0),
        ({"likelihood": "robust-max"}, 1.0),
        ({"likelihood": "softmax"}, 0.06),
        ({"batch_size": None, "options": FitOptions(conditional_variance=0.4)}, 0.4),
        ({"temperature": None, "options": FitOptions(conditional_variance=0.4)}, 0.4),
    ],
    ids=str,
)
def test_how_much_variance_rows_are_fitted_with(changes, kept, monkeypatch):
    seen, train = [], learn_module.train

    def spy(state, data, settings, *args, **how):
        seen.append(settings.kept)
        return train(state, data, settings, *args, **how)

    monkeypatch.setattr(learn_module, "train", spy)
    A, labels = toy(400, 3)
    clf = minibatch(**{"temperature": "auto", "max_epochs": 2, **changes}).fit(A, labels)
    assert seen == pytest.approx([kept] * len(seen), rel=1e-12)
    if changes.get("inference") != "ep":
        measures = {one["measure"] for one in clf.history_}
        assert measures == {"ELBO" if kept == 1.0 else "relaxed ELBO"}
        # The ELBO is that of the model, which has all of its variance.
        assert clf.elbo_ == pytest.approx(clf.elbo(A, labels), rel=1e-4)


@quiet
def test_sites_that_overflow_are_not_taken_in(monkeypatch):
    monkeypatch.setattr(
        "conjugp._fit.held_out.svi.update", lambda q, *_: Posterior(q.h, q.P * np.inf)
    )
    clf = minibatch(temperature="auto", max_epochs=3).fit(*toy(900, 3))
    assert np.isfinite(clf.predict_proba(X)).all()


@quiet
def test_a_decoupled_full_batch_takes_enough_steps():
    assert decoupled(batch_size=None).fit(X, y).n_iter_ > 50


@quiet
@pytest.mark.parametrize(
    ("kernel", "grown"),
    [
        (None, True),
        (RBF(), True),
        (Normalised(RBF()), True),
        (RBF() + Matern52(), True),
        (RBF() * Matern52(), True),
        (RBF(variance=2.0) + Matern52(), True),
        (RBF(variance=2.0) * Matern52(), False),
        (RBF(variance=2.0), False),
        (RBF(1.0, 2.0), False),
    ],
    ids=str,
)
def test_a_variance_left_open_is_large_enough_for_the_mean(kernel, grown, monkeypatch):
    """What the small fit learned, all but the variance; that too where it was given."""
    seen, supple = [], kernel_module.supple

    def spy(plan, learned, rows):
        found = supple(plan, learned, rows)
        seen.append((learned, found, rows))
        return found

    monkeypatch.setattr(kernel_module, "supple", spy)
    A, labels = toy(350, 3)
    options = FitOptions(search=False, mean_variance=500.0)
    clf = GPClassifier(kernel=kernel, n_inducing=320, covariance="shared", options=options)
    clf.set_params(random_state=0).fit(A, labels)
    [(learned, found, rows)] = seen
    before, after = (float(k.diag(rows).mean()) for k in (learned, found))
    assert before < 300
    assert after == pytest.approx(500.0 if grown else before, rel=1e-5)
    if kernel is not None and str(kernel).startswith("RBF(variance=2) +"):
        (given, learned), (same, found) = learned.parts, found.parts
        torch.testing.assert_close(same.theta, given.theta, rtol=0, atol=1e-12)
    k_before, k_after = (k(rows[:9], rows[9:20]) for k in (learned, found))
    ratio = float((found.diag(rows) / learned.diag(rows)).mean())
    torch.testing.assert_close(k_after, k_before * ratio)
    assert float(clf.kernel_.diag(torch.as_tensor(A[:5])).mean()) == pytest.approx(after, rel=1e-5)
