"""Counting what rounds did."""

from __future__ import annotations

import json

import pytest

from localspec.engine.stats import Round, Stats, total

ROUNDS = [
    Round([1, 2, 3], n_drafted=3, n_deep=3, n_accepted=2, draft_s=0.1, verify_s=0.5, inject_s=0.2, total_s=1.0),
    Round([4], n_drafted=3, n_deep=3, n_accepted=0, draft_s=0.1, verify_s=0.5, inject_s=0.2, total_s=1.0),
    Round([5, 6], n_drafted=1, n_deep=1, n_accepted=1, draft_s=0.1, verify_s=0.5, inject_s=0.2, total_s=1.0),
    Round([7], n_drafted=0, n_accepted=0, verify_s=0.5, total_s=1.0),
]


def folded(rounds: list[Round]) -> Stats:
    stats = Stats()
    for one in rounds:
        stats.add(one)
    return stats


def test_host_time_is_what_the_steps_leave() -> None:
    assert ROUNDS[0].host_s == pytest.approx(0.2)


def test_counters() -> None:
    stats = folded(ROUNDS)
    assert (stats.n_rounds, stats.predicted_n, stats.draft_n, stats.draft_n_accepted) == (4, 7, 7, 3)
    assert (stats.predicted_s, stats.verify_s) == (pytest.approx(4), pytest.approx(2))
    assert stats.draft_s == pytest.approx(0.3)
    assert stats.inject_s == pytest.approx(0.6)


def test_slots() -> None:
    stats = folded(ROUNDS)
    assert stats.drafted_per_slot == [3, 2, 2]
    assert stats.accepted_per_slot == [2, 1]
    assert stats.acceptance_per_slot == pytest.approx([2 / 3, 1 / 2, 0])


def test_derived_figures() -> None:
    stats = folded(ROUNDS)
    stats.prompt_n, stats.prompt_s = 20, 4.0
    assert stats.acceptance_length == pytest.approx(7 / 4)
    assert stats.accepted_share == pytest.approx(3 / 7)
    assert stats.predicted_per_second == pytest.approx(7 / 4)
    assert stats.prompt_per_second == pytest.approx(5)
    assert stats.host_share == pytest.approx(1 - 2.9 / 4)


def test_nothing_divides_by_zero() -> None:
    empty = Stats()
    assert empty.as_dict()["acceptance_length"] == 0
    assert empty.acceptance_per_slot == []
    assert total([]) == Stats()


def test_drafting_rests_only_where_nothing_was_gained() -> None:
    """N-gram drafts gain while the drafter rests: then that is what there is to say."""
    plain, ngrams = Round([1], 0, 0, total_s=0.1), Round([1, 2, 3], 2, 2, total_s=0.1)
    for rounds, rests in (([plain] * 50, True), ([plain] * 60 + [ngrams], True), ([plain, plain, ngrams], False)):
        stats = folded(rounds)
        stats.n_parked = sum(not one.n_drafted for one in rounds)
        assert stats.rests == rests
    assert not folded([plain] * 50).rests, "without a drafter nothing rests"


def test_merging_answers_equals_folding_all_their_rounds() -> None:
    for cut in range(len(ROUNDS) + 1):
        merged, whole = total([folded(ROUNDS[:cut]), folded(ROUNDS[cut:])]), folded(ROUNDS)
        assert merged.drafted_per_slot == whole.drafted_per_slot
        assert merged.accepted_per_slot == whole.accepted_per_slot
        assert merged.predicted_n == whole.predicted_n
        assert merged.predicted_s == pytest.approx(whole.predicted_s)


def test_merging_leaves_the_parts_alone() -> None:
    parts = [folded(ROUNDS[:1]), folded(ROUNDS[1:])]
    before = [part.as_dict() for part in parts]
    total(parts)
    assert [part.as_dict() for part in parts] == before


def test_as_dict_speaks_llama_cpps_names_and_is_json() -> None:
    figures = json.loads(json.dumps(folded(ROUNDS).as_dict()))
    assert {"prompt_n", "predicted_n", "predicted_per_second", "draft_n", "draft_n_accepted"} <= figures.keys()
    assert figures["draft_n_accepted"] == 3
