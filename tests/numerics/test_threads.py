"""Work that threads share."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest
import torch

from conjugp import FitOptions, GPClassifier
from conjugp._numerics.linalg import inverse_factors
from conjugp._numerics.threads import FEW_ROWS, SMALL, for_rows, shared


@pytest.fixture(autouse=True)
def threads():
    """Three of torch's threads, and as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("n", "order"), [(1, 10), (7, 10), (1, 300), (2, 300), (11, 120)])
def test_every_matrix_is_worked_on_once(n, order):
    times = torch.zeros(n)
    used = set()

    def work(part: slice) -> None:
        times[part] += 1
        used.add((threading.get_ident(), torch.get_num_threads()))

    for _ in range(5):
        shared(n, order, work)
    assert times.tolist() == [5.0] * n
    alone = n * order**3 <= SMALL
    # Many small ones by this thread, one that is large by all threads of the library.
    assert {count for _, count in used} == {3 if n == 1 and not alone else 1}
    if alone or n == 1:
        assert {thread for thread, _ in used} == {threading.get_ident()}
    assert torch.get_num_threads() == 3


def test_matrices_are_dealt_to_threads():
    """Each waits until all three are there."""
    meeting = threading.Barrier(3, timeout=30)
    shared(3, 300, lambda part: (meeting.wait(), None)[1])


@pytest.mark.parametrize("bad", [0, 1, 4])
@pytest.mark.parametrize("order", [10, 300])
def test_errors_come_through(bad, order):
    def work(part: slice) -> None:
        if bad in range(5)[part]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared(5, order, work)
    assert torch.get_num_threads() == 3


def test_one_thread_does_it_all():
    torch.set_num_threads(1)
    parts: list[slice] = []
    shared(5, 300, parts.append)
    assert parts == [slice(5)]


def _in_child() -> None:
    shared(4, 300, lambda part: None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    """The pool of its parent has none that run there."""
    shared(4, 300, lambda part: None)
    child = multiprocessing.get_context("fork").Process(target=_in_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_a_pool_that_starts_nothing_any_more(monkeypatch):
    """As when the interpreter is about to end: this thread does it all."""

    class Closed:
        def submit(self, work):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr("conjugp._numerics.threads._pool", lambda *_: Closed())
    done: list[int] = []
    shared(4, 300, lambda part: done.append(part.start))
    assert done == [0, 1, 2, 3] and torch.get_num_threads() == 3


def test_tensors_of_inference_mode():
    """Written to by all threads, each of which has that mode to itself."""
    meeting = threading.Barrier(3, timeout=30)
    with torch.inference_mode():
        times = torch.zeros(3)

        def work(part: slice) -> None:
            meeting.wait()
            times[part] += 1

        shared(3, 300, work)
    assert times.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "order"), [(1, 40), (6, 40), (7, 150), (1, 300)])
def test_inverse_factors(n, order, dtype):
    A = torch.randn(n, order, order, dtype=dtype, generator=torch.Generator().manual_seed(0))
    P = torch.eye(order, dtype=dtype) + A @ A.mT / order
    P[n // 2, 3, 3] = -1.0 if n > 1 else P[n // 2, 3, 3]
    R, info = torch.empty_like(P), torch.empty(n, dtype=torch.int32)
    inverse_factors(P, R, info, torch.eye(order, dtype=dtype))
    assert info.bool().tolist() == [n > 1 and i == n // 2 for i in range(n)]
    good = info == 0
    expected = torch.tensor(np.linalg.inv(np.linalg.cholesky(P[good].double().numpy()))).to(dtype)
    tol = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(R[good], expected, rtol=tol, atol=tol)


# --- fits to few rows -----------------------------------------------------------------------------


def test_a_fit_to_few_rows_has_one_thread():
    """And leaves as many as there were: when it ends, fails or is interrupted."""
    seen = []

    def look(progress) -> None:
        seen.append(torch.get_num_threads())
        if len(seen) == 3:
            raise KeyboardInterrupt

    X, y = np.random.default_rng(0).standard_normal((60, 2)), np.arange(60) % 2
    options = FitOptions(callback=look, on_interrupt="return")
    GPClassifier(options=options, random_state=0).fit(X, y)
    assert set(seen) == {1} and torch.get_num_threads() == 3
    GPClassifier(options=options, random_state=0).fit(X, y)
    assert len(seen) > 3 and set(seen) == {1} and torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), for_rows(10):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3
    with for_rows(FEW_ROWS + 1):
        assert torch.get_num_threads() == 3


def test_fits_side_by_side_leave_the_threads_there_were():
    """Whichever ends last."""
    both, first = threading.Barrier(2), threading.Event()

    def work(wait: bool) -> None:
        with for_rows(10):
            both.wait(10)
            if wait:
                first.wait(10)

    others = [threading.Thread(target=work, args=(wait,)) for wait in (True, False)]
    for other in others:
        other.start()
    others[1].join(10)
    first.set()
    others[0].join(10)
    assert torch.get_num_threads() == 3
