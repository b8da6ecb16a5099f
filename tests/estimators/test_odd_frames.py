"""Odd and damaged frames give probabilities, or an error that says what is wrong with them."""

from __future__ import annotations

import pytest

from odd_cases import ALLOWED, odd_case, outcome


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_odd_frames(first):
    """More of them by bench/odd_frames.py."""
    for seed in range(first, first + 10):
        case = odd_case(seed)
        assert outcome(case) in ALLOWED, f"{seed}: {case.description}"
