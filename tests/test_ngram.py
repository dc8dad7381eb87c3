"""What followed the last time the text ended as now."""

from __future__ import annotations

import numpy as np

from localspec.ngram import LONGEST, N, Suffixes


def test_nothing_is_proposed_for_a_text_that_never_ended_like_this() -> None:
    assert Suffixes().propose([1, 2, 3, 4, 5], 8) == ([], 0)
    assert Suffixes().propose([1, 2], 8) == ([], 0)
    assert Suffixes().propose([], 8) == ([], 0)


def test_the_continuation_of_the_latest_place_is_proposed() -> None:
    tokens = [1, 2, 3, 50, 51, 1, 2, 3, 60, 61, 1, 2, 3]
    assert Suffixes().propose(tokens, 4) == ([60, 61, 1, 2], N)
    assert Suffixes().propose(tokens, 0) == ([], 0)


def test_the_match_is_as_long_as_both_endings_agree() -> None:
    assert Suffixes().propose([9, 1, 2, 3, 4, 5, 70, 8, 1, 2, 3, 4, 5], 1) == ([70], 5)
    long = list(range(100, 140))
    assert Suffixes().propose([*long, 7, *long], 1) == ([7], LONGEST)


def test_a_circle_goes_on() -> None:
    assert Suffixes().propose([5, 6, 5, 6, 5, 6], 5) == ([5, 6, 5, 6, 5], 4)
    assert Suffixes().propose([4, 4, 4, 4], 3)[0] == [4, 4, 4]


def test_a_growing_text_is_taken_in_piece_by_piece() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, 300).tolist()
    growing = Suffixes()
    for n in range(0, 300, 7):
        assert growing.propose(tokens[:n], 6) == Suffixes().propose(tokens[:n], 6)
