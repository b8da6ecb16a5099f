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

from conjugp._rows.dataset import (
    Data,
    class_rank,
    held_per_class,
    joined,
    rare_per_class,
    sample_size,
)
from conjugp._rows.group import Group

_BITS = 59  # of the hash; one more says which rows are held out
_WAYS = 16  # parts that a range of hashes is divided into at a time
_ROUNDS = 15  # _WAYS ** _ROUNDS == 2 ** (_BITS + 1)
_MOST_CUTS = 2**17  # ends of stretches that are looked for together


def order_keys(row_hash: NDArray[np.uint64]) -> NDArray[np.int64]:
    """What orders the rows with these hashes."""
    return (row_hash >> np.uint64(64 - _BITS)).astype(np.int64)


class Shards:
    """The rows of all ranks; `local` are those that are here, in the order of their `keys`."""

    def __init__(
        self,
        local: Data,
        keys: NDArray[np.int64],
        group: Group,
        cuts: dict[int, int] | None = None,
    ) -> None:
        self.local, self.keys, self.group = local, keys, group
        counts, mass = local.counts, local.mass
        total = local.weight.double().sum()
        group.sum([counts, mass, total])
        self.counts, self.mass, self.total = counts, mass, float(total)
        self.n, self.n_classes = int(counts.sum()), local.n_classes
        # Of every position that was asked for, how many rows before it are here.
        self._cuts = {p: at for p, at in (cuts or {}).items() if p < self.n}
        self._cuts |= {0: 0, self.n: local.n}

    @property
    def like(self) -> Tensor:
        """A tensor of the working precision on the working device, with D columns."""
        return self.local.like

    def rows(self, start: int, stop: int | None) -> Data:
        """The rows of a stretch that are here."""
        return self.local.rows(*self._stretch(start, stop))

    def expect(self, start: int, stop: int) -> None:
        """Nothing to prepare: the rows are in memory."""

    def labels(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Labels and weights of the same rows."""
        return self.local.labels(*self._stretch(start, stop))

    def take(self, index: slice | Tensor) -> Data:
        """The rows of a stretch that are here."""
        if not isinstance(index, slice):
            raise TypeError("rows on several ranks are taken by stretches")
        return self.rows(index.start or 0, index.stop)

    def _until(self, stop: int) -> Shards:
        """The rows before a position."""
        _, at = self._stretch(0, stop)
        return Shards(self.local.rows(0, at), self.keys[:at], self.group, self._cuts)

    def head(self, n: int) -> Data:
        """The first n rows, on every rank."""
        return self._gathered(slice(*self._stretch(0, min(n, self.n))))

    def sample(self) -> Data:
        """Rows that stand for all, every rare class with enough of them, on every rank."""
        n = sample_size(self)
        first = self.head(n)
        if n >= self.n:
            return first
        wanted = rare_per_class(self.counts, first.y)
        start, _ = self._stretch(n, None)
        y = self.local.y[start:]
        able = (class_rank(y, self.n_classes) < wanted[y]).nonzero().squeeze(1) + start
        rare = self._gathered(self._chosen(able, wanted, last=False))
        return joined([first, rare])

    def hold_out(self, share: float) -> tuple[Shards, Data, Shards]:
        """Rows to train on, rows held out, on every rank, and all of them in that order."""
        given = held_per_class(self, share)
        y = self.local.y
        able = class_rank(y.flip(0), self.n_classes).flip(0) < given[y]
        held = self._chosen(able.nonzero().squeeze(1), given, last=True)
        kept = torch.ones_like(y, dtype=torch.bool)
        kept[held] = False
        order = torch.cat([kept.nonzero().squeeze(1), held])
        keys = self.keys[order.cpu().numpy()]
        keys[len(order) - len(held) :] += 1 << _BITS
        data = Shards(self.local.take(order), keys, self.group)
        n = self.n - int(given.sum())
        train = data._until(n)
        return train, data._gathered(slice(*data._stretch(n, None))), data

    def shifted(self, origin: Tensor) -> Shards:
        """The same rows with `origin` (D,) added."""
        return Shards(self.local.shifted(origin), self.keys, self.group, self._cuts)

    def _chosen(self, able: Tensor, wanted: Tensor, last: bool) -> Tensor:
        """Of some of the rows here, those among the first, or last, `wanted` (C,) of all ranks."""
        index = able.cpu().numpy()
        found = self.group.gather((self.keys[index], self.local.y[able].cpu().numpy()))
        keys, y = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(keys, kind="stable")[:: -1 if last else 1]
        rank = class_rank(torch.as_tensor(y[order].copy()), self.n_classes)
        chosen = np.empty(len(y), dtype=bool)
        chosen[order] = (rank < wanted.cpu()[torch.as_tensor(y[order].copy())]).numpy()
        before = sum(len(y) for _, y in found[: self.group.rank])
        mine = chosen[before : before + len(index)]
        return able[torch.as_tensor(mine, device=able.device)]

    def _gathered(self, index: slice | Tensor) -> Data:
        """Some of the rows here and those of the other ranks, in the order of all."""
        part = self.local.take(index)
        keys = self.keys[index if isinstance(index, slice) else index.cpu().numpy()]
        columns = [column.cpu().numpy() for column in part[:3]]
        found = self.group.gather([keys, *columns])
        keys, *columns = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(keys, kind="stable")  # rows that are equal are in the order of ranks
        X, y, weight = (torch.as_tensor(c[order]).to(self.like.device) for c in columns)
        return Data(X, y, weight, self.n_classes)

    def _stretch(self, start: int, stop: int | None) -> tuple[int, int]:
        """Which of the rows here are in a stretch."""
        stop = self.n if stop is None else min(stop, self.n)
        if start not in self._cuts or stop not in self._cuts:
            # Stretches are asked for one after the other: their ends are found together.
            others = range(0, self.n, max(stop - start, -(-self.n // _MOST_CUTS), 1))
            wanted = {start, stop, *others} - self._cuts.keys()
            positions = np.array(sorted(wanted), dtype=np.int64)
            found = self._find(positions)
            self._cuts |= dict(zip(positions.tolist(), found.tolist(), strict=True))
        return self._cuts[start], self._cuts[stop]

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
