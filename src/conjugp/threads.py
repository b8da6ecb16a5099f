"""NumPy's work on blocks of rows, by as many threads as torch has."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

BLOCK = 1 << 17  # numbers worked on at a time: they stay in a processor's cache


def blocks(n: int, width: int) -> list[slice]:
    """n rows of `width` numbers in parts, which do not depend on the number of threads."""
    step = max(1, BLOCK // max(1, width))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def each(parts: list[slice], work: Callable[[slice], None]) -> None:
    """`work` on every part, in any order."""
    threads = min(torch.get_num_threads(), len(parts))
    if threads <= 1:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(threads, "blocks") as pool:
        for done in [pool.submit(work, part) for part in parts]:
            done.result()
