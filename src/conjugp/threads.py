"""Work on blocks of rows, or on many small matrices, by as many threads as torch has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache

import torch

BLOCK = 1 << 17  # numbers worked on at a time: they stay in a processor's cache
FEW = 12  # blocks that one thread is done with before others have started
SMALL = 1 << 24  # likewise operations on matrices


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
    torch.set_num_threads(1)  # which holds for all threads
    try:
        if few:
            work(slice(n))
            return
        rest, pool = iter(range(n)), _pool(threads - 1, os.getpid())

        def some() -> None:
            for i in rest:
                work(slice(i, i + 1))

        others = [pool.submit(some) for _ in range(threads - 1)]
        try:
            some()
        finally:
            wait(others)
        for other in others:
            other.result()
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads that are kept from call to call; those of another process stayed there."""
    return ThreadPoolExecutor(threads, "matrices")
