"""Processes that fit one model together: a thin layer over torch.distributed.

Every collective has the timeout that the process group was made with, so a rank that is lost
becomes an error on the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Group:
    """All ranks of the default process group; alone, every operation costs nothing."""

    def __init__(self, rank: int = 0, size: int = 1, backends: str = "") -> None:
        self.rank, self.size = rank, size
        self.on_gpus = "nccl" in backends
        # Where tensors have to be; NCCL alone knows GPUs only.
        on_cpu = size == 1 or not self.on_gpus or "gloo" in backends
        self.device = torch.device("cpu") if on_cpu else own_gpu()

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, in place, by their sums over ranks: one message for each precision."""
        if self.size == 1:
            return
        from torch import distributed

        for dtype in dict.fromkeys(t.dtype for t in tensors):
            some = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.detach().reshape(-1) for t in some])
            if not (self.on_gpus and flat.is_cuda):
                flat = flat.to(self.device)
            self._call(lambda flat=flat: distributed.all_reduce(flat))
            for t, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
                t.detach().copy_(part.view_as(t))

    def gather(self, value: T) -> list[T]:
        """What every rank has, in the order of ranks."""
        if self.size == 1:
            return [value]
        from torch import distributed

        found: list[Any] = [None] * self.size
        self._call(lambda: distributed.all_gather_object(found, value))
        return found

    def same(self, value: T) -> T:
        """What rank 0 has."""
        if self.size == 1:
            return value
        from torch import distributed

        box: list[Any] = [value]
        # For NCCL it says by which GPU the bytes go.
        self._call(lambda: distributed.broadcast_object_list(box, device=self.device))
        return box[0]

    def all(self, work: Callable[[], T]) -> T:
        """work(), which talks to nobody; an error on one rank is an error on every rank."""
        if self.size == 1:
            return work()
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        kinds = (ValueError, TypeError, OSError)
        told = next((k.__name__ for k in kinds if isinstance(error, k)), "RuntimeError")
        found = self.gather(None if error is None else (told, str(error)))
        bad = [(rank, *one) for rank, one in enumerate(found) if one is not None]
        if bad:
            text = "; ".join(dict.fromkeys(f"rank {rank}: {message}" for rank, _, message in bad))
            if len(bad) == self.size and len({message for _, _, message in bad}) == 1:
                text = bad[0][2]  # all say the same: it is no matter of shards
            kind = {k.__name__: k for k in kinds}.get(bad[0][1], RuntimeError)
            raise kind(text) from error
        return result  # type: ignore[return-value]

    def _call(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} has lost the others: a rank has stopped, or has "
                f"not answered within the timeout of the process group ({error})"
            ) from error


ALONE = Group()


def current() -> Group:
    """The process group that this process is in; `ALONE` where there is none, or one of one."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return ALONE
    size = distributed.get_world_size()
    if size == 1:
        return ALONE
    backends = str(distributed.get_backend_config())  # such as "cpu:gloo,cuda:nccl"
    return Group(distributed.get_rank(), size, backends)


def own_gpu() -> torch.device:
    """The GPU of this process among those of its machine."""
    from torch import distributed

    rank = int(os.environ.get("LOCAL_RANK", distributed.get_rank()))
    return torch.device("cuda", rank % max(1, torch.cuda.device_count()))
