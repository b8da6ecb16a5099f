"""NumPy's work on blocks of rows, by as many threads as torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

BLOCK = 1 << 17  # numbers worked on at a time: they stay in a processor's cache
FEW = 12  # blocks that one thread is done with before others have started


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
