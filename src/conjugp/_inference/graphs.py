"""Recording work on a GPU as a graph."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def recorded(work: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of work(), which runs once before: libraries set themselves up at their first use.

    Not by `torch.cuda.graph`: that collects garbage and empties the allocator's cache each time.
    """
    collects = gc.isenabled()
    with torch.cuda.device(device):
        graph, here, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            work()
            torch.cuda.synchronize()
            # An old graph that is collected meanwhile would spoil this one.
            gc.disable()
            try:
                graph.capture_begin(capture_error_mode="thread_local")
                work()
                graph.capture_end()
            finally:
                if collects:
                    gc.enable()
        here.wait_stream(side)
    return graph
