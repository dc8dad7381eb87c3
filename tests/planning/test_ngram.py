"""What followed the last time the text ended as now."""

from __future__ import annotations

import numpy as np

from localspec.planning.ngram import LONGEST, NO_MATCH, PRIOR, N, NgramIndex, NgramMatch, NgramStatistics


def test_nothing_is_proposed_for_a_text_that_never_ended_like_this() -> None:
    assert NgramIndex().propose([1, 2, 3, 4, 5], 8) == NO_MATCH
    assert NgramIndex().propose([1, 2], 8) == NO_MATCH
    assert NgramIndex().propose([], 8) == NO_MATCH


def test_the_continuation_of_an_earlier_place_is_proposed() -> None:
    tokens = [1, 2, 3, 60, 61, 1, 2, 3]
    assert NgramIndex().propose(tokens, 4) == NgramMatch([60, 61, 1, 2], N, 0)
    assert NgramIndex().propose(tokens, 0) == NO_MATCH


def test_the_latest_two_places_must_agree() -> None:
    tokens = [1, 2, 3, 60, 61, 80, 1, 2, 3, 60, 61, 70, 1, 2, 3]
    assert NgramIndex().propose(tokens, 4) == NgramMatch([60, 61], N, 2)
    assert NgramIndex().propose([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3], 4) == NO_MATCH
    assert NgramIndex().propose([1, 2, 3, 50, 51, *tokens], 4) == NgramMatch([60, 61], N, 2), "a third is not asked"


def test_the_match_is_as_long_as_both_endings_agree() -> None:
    assert NgramIndex().propose([9, 1, 2, 3, 4, 5, 70, 8, 1, 2, 3, 4, 5], 1) == NgramMatch([70], 5, 0)
    long = list(range(100, 140))
    assert NgramIndex().propose([*long, 7, *long], 1) == NgramMatch([7], LONGEST, 0)


def test_a_circle_goes_on() -> None:
    assert NgramIndex().propose([5, 6, 5, 6, 5, 6], 5) == NgramMatch([5, 6, 5, 6, 5], 4, 0)
    assert NgramIndex().propose([4, 4, 4, 4, 4], 3) == NgramMatch([4, 4, 4], 4, 3)


def test_probabilities_follow_what_was_seen_by_kind() -> None:
    statistics, match = NgramStatistics.fresh(), NgramMatch([1, 2, 3], 4, 1)
    first = statistics.chances(match)
    assert first[0] > first[2] > first[1], "agreed, then matched longer"
    for _ in range(2000):
        statistics.learn(match, 1, 2)
    now = statistics.chances(match)
    assert now[0] > 0.99
    assert now[1] < 0.01
    assert now[2] == first[2], "was never compared"
    assert statistics.tried.min() == PRIOR


def test_a_growing_text_is_taken_in_piece_by_piece() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, 300).tolist()
    growing = NgramIndex()
    for n in range(0, 300, 7):
        assert growing.propose(tokens[:n], 6) == NgramIndex().propose(tokens[:n], 6)
