"""Which rows are held out, and folds: always even shares of every class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from conjugp._rows.dataset import Data

MIN_HELD = 100  # held-out rows from which on classes too small for their share give one
MOST_HELD = 5000
FOLDS = 5


def held_per_class(counts: Tensor, share: float) -> Tensor:
    """How many rows of every class to hold out, (C,), of `counts` (C,).

    Every class gives the same share of its rows; one too small for a share gives none. Where
    nearly all are, one row each of the largest has to do.
    """
    n = int(counts.sum())
    share = min(share, MOST_HELD / n)
    given, wanted = (counts * share).floor().long(), int(share * n)
    missing = wanted - int(given.sum())
    if wanted >= MIN_HELD and missing > wanted // 2:
        able = ((given == 0) & (counts >= 3)).nonzero().squeeze(1)
        given[able[counts[able].argsort(descending=True, stable=True)][:missing]] = 1
    return given


def folds(data: Data) -> list[Tensor]:
    """Masks (N,) of folds with even shares of every class.

    Rows of rare classes are in them too: leaving them out would say that nothing is ever rare.
    Only of classes that are many copies of one or two rows would a fold take all. A handful of rows
    says nothing.
    """
    if data.n < FOLDS:
        return []
    # As many as that, for rows of this set, are copies of one.
    many = 3.0 * max(1.0, data.total / data.n)
    usable = ((data.counts >= 3) | (data.mass < many))[data.y]
    place = torch.empty_like(data.y)
    order = by_label(data.y, data.n_classes)
    place[order] = torch.arange(data.n, device=data.y.device)
    masks = [(place % FOLDS == k) & usable for k in range(FOLDS)]
    return [mask for mask in masks if mask.any() and not mask.all()]


def by_label(y: Tensor, n_classes: int) -> Tensor:
    """What puts labels in order, (N,); equal ones stay as they are."""
    if y.device.type != "cpu" or n_classes > 2**15:
        return torch.argsort(y, stable=True)
    # NumPy counts where numbers are this short.
    return torch.as_tensor(np.argsort(y.numpy().astype(np.int16), kind="stable"))


def class_rank(y: Tensor, n_classes: int) -> Tensor:
    """How many rows of the same class come before each row, (N,)."""
    order = by_label(y, n_classes)
    counts = torch.bincount(y, minlength=n_classes)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(y)
    rank[order] = torch.arange(len(y), device=y.device) - first[y[order]]
    return rank


def chosen_per_class(y: Tensor, wanted: Tensor, last: bool = False) -> Tensor:
    """Places, in order, of the first, or last, `wanted` (C,) rows of every class."""
    if last:
        return (class_rank(y.flip(0), len(wanted)).flip(0) < wanted[y]).nonzero().squeeze(1)
    return (class_rank(y, len(wanted)) < wanted[y]).nonzero().squeeze(1)
