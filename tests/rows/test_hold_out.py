"""Places within classes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from conjugp._rows.hold_out import chosen_per_class, class_rank
from problems import labelled

class_counts = st.lists(st.integers(0, 40), min_size=2, max_size=8).filter(lambda c: sum(c) > 0)


@given(class_counts, st.integers(0, 99))
def test_class_rank(counts, seed):
    data = labelled(counts, seed)
    rank, seen = class_rank(data.y, data.n_classes).tolist(), [0] * len(counts)
    for i, label in enumerate(data.y.tolist()):
        assert rank[i] == seen[label]
        seen[label] += 1


@given(class_counts, st.integers(0, 99), st.lists(st.integers(0, 9), min_size=8, max_size=8))
def test_the_first_and_the_last_of_every_class(counts, seed, wanted):
    y = labelled(counts, seed).y
    some = torch.tensor(wanted[: len(counts)])
    for last in (False, True):
        chosen = chosen_per_class(y, some, last)
        assert (chosen.diff() > 0).all()
        for c, n in enumerate(some.tolist()):
            theirs = (y == c).nonzero().squeeze(1)
            expected = theirs[max(0, len(theirs) - n) :] if last else theirs[:n]
            assert torch.equal(chosen[y[chosen] == c], expected)
