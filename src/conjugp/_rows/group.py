"""Processes that fit one model together: a thin layer over torch.distributed.

Every collective has the timeout that the process group was made with, so a rank that is lost
becomes an error on the others.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_KEY = "conjugp/store"


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

    def same_tensor(self, x: Tensor) -> Tensor:
        """What rank 0 has, on this rank's device."""
        return x if self.size == 1 else self.same(x.cpu()).to(x)

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


@contextmanager
def joined(timeout: float = 300.0) -> Iterator[Group]:
    """The process group that torchrun, or another launcher, has started this process for.

    Made on entry and destroyed on exit: over NCCL where every process of the machine has a GPU,
    with gloo beside it. `timeout` is that of every message, in seconds. Without a launcher, or for
    one process, it is this process alone.

    torchrun keeps one key-value store for all restarts, in which ranks would find the addresses of
    those before them; so every start of rank 0 opens a store of its own.
    """
    from torch import distributed

    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        yield ALONE
        return
    enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.is_available() and distributed.is_nccl_available() and enough
    backends, limit = "cpu:gloo,cuda:nccl" if gpus else "gloo", timedelta(seconds=timeout)
    where: dict[str, Any] = {}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = {"store": _fresh_store(rank, timeout), "rank": rank, "world_size": size}
    distributed.init_process_group(backends, timeout=limit, **where)
    try:
        yield current()
    finally:
        distributed.destroy_process_group()


def _fresh_store(rank: int, timeout: float) -> Any:
    """A store that rank 0 has just opened, found by way of torchrun's."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    limit, address = timedelta(seconds=timeout), os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    common = TCPStore(address, port, is_master=False, timeout=limit)
    if rank == 0:
        with socket.create_connection((address, port), timeout) as connection:
            here = connection.getsockname()[0]  # where others can reach this machine
        store = TCPStore(here, 0, is_master=True, wait_for_workers=False, timeout=limit)
        common.set(_KEY, f"{here} {store.port}")
        return store
    ends = time.monotonic() + timeout
    while True:
        where, found = common.get(_KEY).decode().split()
        try:
            # An address that an earlier rank 0 has left answers no more.
            socket.create_connection((where, int(found)), 5).close()
            return TCPStore(where, int(found), is_master=False, timeout=limit)
        except OSError as error:
            if time.monotonic() > ends:
                raise RuntimeError(
                    f"rank {rank} could not reach rank 0 within {timeout:g} s ({error})"
                ) from error
            time.sleep(0.1)
