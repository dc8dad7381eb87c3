"""Sample and match: a drafter of any quality changes how many tokens a round gives, never which."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from localspec.accept import sample_and_match
from localspec.sampling import Sampler, SamplingParams, distribution

N_VOCAB = 6


def logits(history: Sequence[int]) -> np.ndarray:
    """A toy language model: the last two tokens decide."""
    seed = [7, *history[-2:]]
    return (1.5 * np.random.default_rng(seed).standard_normal(N_VOCAB)).astype(np.float32)


def plain(sampler: Sampler, n: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < n:
        tokens.append(sampler.choose(logits(tokens), tokens))
    return tokens


def drafted(sampler: Sampler, n: int, quality: float, seed: int, width: int = 4) -> tuple[list[int], int]:
    """`n` tokens and the rounds they took, with a drafter that names the likeliest token with probability `quality`."""
    tokens: list[int] = []
    rng, n_rounds = np.random.default_rng(seed), 0
    while len(tokens) < n:
        draft: list[int] = []
        for _ in range(width):
            likeliest = int(logits(tokens + draft).argmax())
            draft.append(likeliest if rng.random() < quality else int(rng.integers(N_VOCAB)))
        rows = np.stack([logits(tokens + draft[:k]) for k in range(width + 1)])
        tokens.extend(sample_and_match(rows, draft, lambda row, said: sampler.choose(row, tokens + said)))
        n_rounds += 1
    return tokens[:n], n_rounds


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.5, "penalty_last_n": 3},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 4, "min_p": 0.0, "top_p": 1.0},
    {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": 0.3},
]


@pytest.mark.parametrize("options", SETTINGS, ids=repr)
@pytest.mark.parametrize("quality", [0.0, 0.5, 0.9, 1.0])
def test_a_seed_gives_the_very_tokens_of_plain_decoding(options: dict[str, Any], quality: float) -> None:
    params = SamplingParams(seed=3, **options)
    said, _ = drafted(Sampler(params), 150, quality, seed=8)
    assert said == plain(Sampler(params), 150)


def test_a_better_drafter_needs_fewer_rounds() -> None:
    rounds = [drafted(Sampler(SamplingParams()), 200, quality, seed=1)[1] for quality in (0.0, 0.5, 1.0)]
    assert rounds[0] > rounds[1] > rounds[2] == 40


@pytest.mark.parametrize("quality", [0.2, 1.0])
def test_the_tokens_follow_the_targets_distribution(quality: float) -> None:
    """Over many seeds, the first two tokens (one accepted, one after it) have the exact joint probabilities."""
    params = SamplingParams(temperature=1.3, top_k=5, top_p=0.97, min_p=0.02)
    expected: dict[tuple[int, int], float] = {}
    for first, p in zip(*distribution(logits([]), params), strict=True):
        for second, q in zip(*distribution(logits([int(first)]), params), strict=True):
            expected[int(first), int(second)] = p * q
    n, seen = 4000, Counter[tuple[int, ...]]()
    sampler = Sampler(SamplingParams(temperature=1.3, top_k=5, top_p=0.97, min_p=0.02, seed=0))
    for trial in range(n):
        said, _ = drafted(sampler, 2, quality, seed=trial, width=2)
        seen[tuple(said)] += 1
    assert seen.keys() <= expected.keys()
    square = sum((seen[pair] - n * p) ** 2 / (n * p) for pair, p in expected.items())
    free = len(expected) - 1
    assert square < free * (1 - 2 / (9 * free) + 3.7 * math.sqrt(2 / (9 * free))) ** 3


def choose_argmax(row: np.ndarray, said: list[int]) -> int:
    return int(row.argmax())


ROWS = np.eye(N_VOCAB, dtype=np.float32)[[3, 1, 4, 2]]  # the target says 3 1 4 2


@pytest.mark.parametrize(
    ("draft", "emitted"),
    [
        ([3, 1, 4], [3, 1, 4, 2]),
        ([3, 1, 5], [3, 1, 4]),
        ([3, 5, 4], [3, 1]),
        ([5, 1, 4], [3]),
        ([1, 3, 4], [3]),
    ],
)
def test_the_longest_right_beginning_survives_and_one_more_token(draft: list[int], emitted: list[int]) -> None:
    assert sample_and_match(ROWS, draft, choose_argmax) == emitted


def test_no_draft_is_plain_decoding() -> None:
    assert sample_and_match(ROWS[:1], [], choose_argmax) == [3]


def test_nothing_is_chosen_behind_the_first_wrong_token() -> None:
    calls: list[list[int]] = []

    def choose(row: np.ndarray, said: list[int]) -> int:
        calls.append(list(said))
        return int(row.argmax())

    sample_and_match(ROWS, [3, 5, 4], choose)
    assert calls == [[], [3]]


def test_rows_and_draft_must_fit() -> None:
    with pytest.raises(ValueError, match="zip"):
        sample_and_match(ROWS[:2], [3, 1, 4], choose_argmax)
