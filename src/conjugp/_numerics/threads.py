"""Work on blocks of rows, or on many small matrices, by as many threads as torch has."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import lru_cache

import torch
from threadpoolctl import threadpool_limits

BLOCK = 1 << 17  # numbers worked on at a time: they stay in a processor's cache
FEW = 12  # blocks that one thread is done with before others have started
SMALL = 1 << 24  # likewise operations on matrices
FEW_ROWS = 20_000  # up to which a fit has one thread

_lock, _inside, _limits = threading.Lock(), 0, ExitStack()


@contextmanager
def one_thread() -> Iterator[None]:
    """For torch and other libraries; the order of a sum may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def for_rows(n: int) -> Iterator[None]:
    """One thread while a fit to few rows runs, and as many as before after the last such fit.

    Threads of OpenMP spin while they wait for each other. A fit to few rows is thousands of short
    operations, and where another process has one of the cores every one of them waits for a thread
    that does not run.
    """
    global _inside
    if n > FEW_ROWS:
        yield
        return
    with _lock:
        _inside += 1
        if _inside == 1:
            _limits.enter_context(one_thread())
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _limits.close()


def blocks(n: int, width: int, size: int | None = None) -> list[slice]:
    """n rows of `width` numbers in parts, which do not depend on the number of threads."""
    step = max(1, (size or BLOCK) // max(1, width))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def each(parts: list[slice], work: Callable[[Iterator[slice]], None]) -> None:
    """Let every thread `work` on those parts that no other has taken."""
    threads, rest = min(torch.get_num_threads(), len(parts)), iter(parts)
    if threads <= 1 or len(parts) <= FEW:
        work(rest)
        return
    with ThreadPoolExecutor(threads, "blocks") as pool:
        for done in [pool.submit(work, rest) for _ in range(threads)]:
            done.result()


def shared(n: int, order: int, work: Callable[[slice], None]) -> None:
    """Let every thread `work` on those of n matrices of an order that no other has taken.

    LAPACK has one thread for each. Left to itself it gives all threads to one small matrix after
    the other, where they wait for each other longer than they work.
    """
    threads, few = torch.get_num_threads(), n * order**3 <= SMALL
    if threads == 1 or (n == 1 and not few):
        work(slice(n))
        return
    others: list[Future[None]] = []
    try:
        torch.set_num_threads(1)
        if few:
            work(slice(n))
            return
        rest, inference = iter(range(n)), torch.is_inference_mode_enabled()

        def some() -> None:
            for i in rest:
                work(slice(i, i + 1))

        def other() -> None:
            # What the caller has set holds for all threads in some versions of torch only.
            if torch.get_num_threads() > 1:
                torch.set_num_threads(1)
            with torch.inference_mode(inference):
                some()

        try:
            pool = _pool(threads - 1, os.getpid())
            for _ in range(threads - 1):
                others.append(pool.submit(other))
        except RuntimeError:  # the interpreter is about to end, and starts nothing any more
            pass
        some()
    finally:
        wait(others)
        torch.set_num_threads(threads)
    for done in others:
        done.result()


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that are kept from call to call; those of another process stayed there."""
    return ThreadPoolExecutor(threads, "matrices")
