"""NumPy's work on blocks of rows, by as many threads as torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

P = TypeVar("P")
R = TypeVar("R")

BLOCK = 1 << 17  # numbers worked on at a time: they stay in a processor's cache


def blocks(n: int, width: int) -> list[slice]:
    """n rows of `width` numbers in parts, which do not depend on the number of threads."""
    step = max(1, BLOCK // max(1, width))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def in_order(work: Callable[[P], R], parts: Sequence[P]) -> Iterator[R]:
    """`work` of every part, in the order of the parts."""
    threads = min(torch.get_num_threads(), len(parts))
    if threads <= 1:
        yield from map(work, parts)
        return
    with ThreadPoolExecutor(threads, "blocks") as pool:
        yield from pool.map(work, parts)
