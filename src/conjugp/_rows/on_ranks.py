"""Rows on several ranks as one data set, in the order that one process would put them in.

Rows are ordered by a hash of their content, so a stretch of positions is a range of hashes. Its
ends are found by counting, and every rank has the rows of a stretch that it holds: however rows
are dealt to ranks, batch t is the same rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conjugp._rows.dataset import Data, Dataset, Totals
from conjugp._rows.group import Group
from conjugp._rows.hold_out import chosen_per_class

_BITS = 59  # of the hash; one more says which rows are held out
_WAYS = 16  # parts that a range of hashes is divided into at a time
_ROUNDS = 15  # _WAYS ** _ROUNDS == 2 ** (_BITS + 1)
_MOST_CUTS = 2**17  # ends of stretches that are looked for together


def order_keys(row_hash: NDArray[np.uint64]) -> NDArray[np.int64]:
    """What orders the rows with these hashes."""
    return (row_hash >> np.uint64(64 - _BITS)).astype(np.int64)


class OnRanks(Dataset):
    """The rows of all ranks; `local` are those that are here, in the order of their `keys`."""

    def __init__(
        self, local: Data, keys: NDArray[np.int64], group: Group, cuts: dict[int, int] | None = None
    ) -> None:
        self.local, self.keys, self.group = local, keys, group
        self.n_classes, self.totals = local.n_classes, Totals(*(t.clone() for t in local.totals))
        group.sum(self.totals)
        self._n = int(self.counts.sum())
        # Of every position that was asked for, how many rows before it are here.
        self._cuts = {p: at for p, at in (cuts or {}).items() if p < self.n}
        self._cuts |= {0: 0, self.n: local.n}

    @property
    def n(self) -> int:
        return self._n

    @property
    def like(self) -> Tensor:
        return self.local.like

    def labels(self, start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        here = self._here(start, stop)
        return self.local.labels(here.start, here.stop)

    def rows(self, start: int, stop: int | None) -> Data:
        return self.local.take(self._here(start, stop))

    def take(self, index: slice | Tensor) -> Data:
        if not isinstance(index, slice):
            raise TypeError("rows on several ranks are taken by stretches")
        return self.rows(index.start or 0, index.stop)

    def shifted(self, origin: Tensor) -> OnRanks:
        return OnRanks(self.local.shifted(origin), self.keys, self.group, self._cuts)

    def _put_last(self, index: Tensor) -> OnRanks:
        stays = np.ones(self.local.n, dtype=bool)
        stays[index.cpu().numpy()] = False
        keys = np.concatenate([self.keys[stays], self.keys[~stays] + (1 << _BITS)])
        return OnRanks(self.local._put_last(index), keys, self.group)

    def _first(self, n: int) -> OnRanks:
        at = self._here(0, n).stop
        return OnRanks(self.local.rows(0, at), self.keys[:at], self.group, self._cuts)

    def _per_class(self, start: int, wanted: Tensor, last: bool = False) -> Tensor:
        """Of the rows here those among the first, or last, `wanted` (C,) of all ranks."""
        able = self.local._per_class(self._here(start, None).start, wanted, last)
        index = able.cpu().numpy()
        found = self.group.gather((self.keys[index], self.local.y[able].cpu().numpy()))
        keys, y = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(keys, kind="stable")
        chosen = np.zeros(len(y), dtype=bool)
        places = chosen_per_class(torch.as_tensor(y[order]), wanted.cpu(), last)
        chosen[order[places.numpy()]] = True
        before = sum(len(y) for _, y in found[: self.group.rank])
        mine = chosen[before : before + len(index)]
        return able[torch.as_tensor(mine, device=able.device)]

    def _everywhere(self, index: slice | Tensor) -> Data:
        """Some of the rows here and those of the other ranks, in the order of all."""
        part = self.local.take(index)
        keys = self.keys[index if isinstance(index, slice) else index.cpu().numpy()]
        columns = [column.cpu().numpy() for column in part[:3]]
        found = self.group.gather([keys, *columns])
        keys, *columns = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(keys, kind="stable")  # rows that are equal are in the order of ranks
        X, y, weight = (torch.as_tensor(c[order]).to(self.like.device) for c in columns)
        return Data(X, y, weight, self.n_classes)

    def _here(self, start: int, stop: int | None) -> slice:
        """Which of the rows here are in a stretch."""
        stop = self.n if stop is None else min(stop, self.n)
        if start not in self._cuts or stop not in self._cuts:
            # Stretches are asked for one after the other: their ends are found together.
            others = range(0, self.n, max(stop - start, -(-self.n // _MOST_CUTS), 1))
            wanted = {start, stop, *others} - self._cuts.keys()
            positions = np.array(sorted(wanted), dtype=np.int64)
            found = self._find(positions)
            self._cuts |= dict(zip(positions.tolist(), found.tolist(), strict=True))
        return slice(self._cuts[start], self._cuts[stop])

    def _find(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the rows before each of some positions are here."""
        # The largest key v with no more than p smaller ones: that of the row at p.
        low, width = np.zeros_like(positions), 1 << (_BITS + 1)
        before, here = np.zeros_like(positions), np.zeros_like(positions)
        for _ in range(_ROUNDS):
            width //= _WAYS
            ends = low[:, None] + width * np.arange(1, _WAYS)
            mine = np.searchsorted(self.keys, ends)
            counts = torch.as_tensor(mine)
            everywhere = counts.clone()
            self.group.sum([everywhere])
            part = (everywhere.numpy() <= positions[:, None]).sum(1)
            low += part * width
            moved = np.flatnonzero(part)
            before[moved] = everywhere.numpy()[moved, part[moved] - 1]
            here[moved] = mine[moved, part[moved] - 1]
        extra = positions - before  # rows of that very key that come before the position
        if extra.any():
            ties = np.searchsorted(self.keys, low, side="right") - here
            lower = self.group.gather(ties)[: self.group.rank]
            here += np.clip(extra - sum(lower, np.zeros_like(ties)), 0, ties)
        return here
