"""The benchmark's arithmetic on fakes: every way answers every prompt alike, and ratios come from one repeat."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import pair_of_fakes

from localspec.evaluation.bench import bench, oracle

PROMPTS = {"chat": ["ab", "ba"], "code": ["abc"]}


def test_every_way_answers_every_prompt_in_every_repeat() -> None:
    seen: Counter[str] = Counter()
    pair = pair_of_fakes()
    figures = bench(
        pair, PROMPTS, modes=["greedy"], repeats=2, max_tokens=6, each=lambda mode, stats: seen.update([mode])
    )
    assert seen == {"plain": 6, "greedy": 6}
    assert (figures["prompts"], figures["repeats"], figures["max_tokens"]) == (3, 2, 6)
    modes = figures["modes"]
    assert list(modes) == ["plain", "greedy"]
    assert modes["plain"]["ratio"] == 1
    assert set(modes["greedy"]["classes"]) == set(PROMPTS)
    assert modes["plain"]["draft_n"] == 0 < modes["greedy"]["draft_n"]
    assert modes["greedy"]["acceptance_length"] > modes["plain"]["acceptance_length"] == 1
    assert pair.keeper.calls["settle"] == 0  # only ways that plan ask for the machine's costs


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_made_up_drafts_are_right_as_often_as_asked(rate: float) -> None:
    figures = bench(pair_of_fakes(), PROMPTS, modes=["plain"], repeats=1, max_tokens=6, synthetic=rate)
    assert figures["modes"]["synthetic"]["accepted_share"] == pytest.approx(rate)


def test_no_walk_beats_the_best_path_of_the_pool() -> None:
    figures = oracle(pair_of_fakes(), PROMPTS["chat"], max_tokens=6)
    assert 1 < figures["acceptance_length"] <= figures["oracle_acceptance_length"]
