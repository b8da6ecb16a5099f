"""Work that threads share."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import torch

from conjugp.threads import SMALL, shared


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
