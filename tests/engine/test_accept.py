"""Whatever was drafted: matched, the very tokens of plain decoding; rejected and replaced, their distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from localspec.engine import accept
from localspec.engine.accept import rejection, sample_and_match
from localspec.engine.paths import NOTHING, Chain, Tree
from localspec.engine.sampling import Sampler, SamplingParams

N_VOCAB = 6


def logits(history: Sequence[int]) -> np.ndarray:
    """A toy language model: the last two tokens decide."""
    seed = [7, *history[-2:]]
    return (1.5 * np.random.default_rng(seed).standard_normal(N_VOCAB)).astype(np.float32)


def chain(tokens: list[int]) -> Chain:
    return Chain(tokens, [1.0] * len(tokens))


def plain(sampler: Sampler, n: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < n:
        tokens.append(sampler.choose(logits(tokens), tokens, len(tokens)))
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
        said, rows_kept = sample_and_match(
            rows, chain(draft), lambda row, said: sampler.choose(row, tokens + said, len(tokens + said))
        )
        assert rows_kept == list(range(len(said)))
        tokens.extend(said)
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


def joint(params: SamplingParams) -> dict[tuple[int, int], float]:
    """The exact probabilities of the first two tokens of plain decoding."""
    sampler, pairs = Sampler(params), {}
    for first, p in zip(*sampler.distribution(logits([]), []), strict=True):
        for second, q in zip(*sampler.distribution(logits([int(first)]), [int(first)]), strict=True):
            pairs[int(first), int(second)] = float(p * q)
    return pairs


def chi_square(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, int], float]) -> float:
    """How many standard deviations the statistic lies above its mean (Wilson and Hilferty 1931), rare pairs as one."""
    n = sum(seen.values())
    assert seen.keys() <= expected.keys()
    common = {pair for pair, p in expected.items() if n * p >= 5}
    groups = [(seen[pair], n * expected[pair]) for pair in common]
    rare = n * sum(p for pair, p in expected.items() if pair not in common)
    if rare >= 1:
        groups.append((sum(k for pair, k in seen.items() if pair not in common), rare))
    free = len(groups) - 1
    square = sum((k - m) ** 2 / m for k, m in groups)
    return ((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.97, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 3, "top_p": 1.0, "min_p": 0.0},
    {"temperature": 1.0, "top_k": 0, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.0, "top_p": 1.0, "repeat_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("quality", [0.2, 1.0])
def test_matched_tokens_follow_the_targets_distribution(quality: float) -> None:
    params = SamplingParams(**FILTERS[1])
    seen: Counter[tuple[int, ...]] = Counter()
    for trial in range(4000):
        said, _ = drafted(Sampler(SamplingParams(**FILTERS[1], seed=trial)), 2, quality, seed=trial, width=2)
        seen[tuple(said)] += 1
    assert chi_square(seen, joint(params)) < 3.7


def test_a_trees_tokens_follow_the_targets_distribution() -> None:
    params = SamplingParams(**FILTERS[1])
    seen: Counter[tuple[int, ...]] = Counter()
    first, second = logits([]).argsort()[::-1][:2].tolist()
    tree = Tree([first, int(logits([first]).argmax()), second], [-1, 0, -1], [0.5, 0.3, 0.4])
    rows = np.stack([logits(way) for way in ([], [first], [first, tree.tokens[1]], [second])])
    for trial in range(4000):
        sampler = Sampler(SamplingParams(**FILTERS[1], seed=trial))
        said, kept = sample_and_match(rows, tree, lambda row, said, s=sampler: s.choose(row, said, len(said)))
        assert len(kept) == len(said)
        if len(said) == 1:  # the next round begins with nothing drafted
            said.append(sampler.choose(logits(said), said, 1))
        seen[said[0], said[1]] += 1
    assert chi_square(seen, joint(params)) < 3.7


def drawn(sampler: Sampler, seed: int, width: int = 2) -> list[int]:
    """Two tokens by rejection, from a drafter whose q is a blurred p over four candidates of its own."""
    tokens: list[int] = []
    while len(tokens) < 2:
        draft, survival, q = [], [], []
        for slot in range(width):
            rng = np.random.default_rng([seed, slot])
            ids = rng.permutation(N_VOCAB)[:4].astype(np.int32)
            weights = sampler.weigh((logits(tokens + draft)[ids] + rng.standard_normal(4)).astype(np.float32))
            draft.append(int(ids[np.searchsorted(weights.cumsum(), sampler.draft.random() * weights.sum(), "right")]))
            survival.append(1.0)
            q.append((ids, weights))
        rows = np.stack([logits(tokens + draft[:k]) for k in range(width + 1)])
        said, kept = rejection(
            rows,
            Chain(draft, survival, q),
            lambda row, said, before=tuple(tokens): sampler.distribution(row, [*before, *said]),
            sampler,
        )
        assert kept == list(range(len(said)))
        assert said[:-1] == draft[: len(said) - 1]
        tokens += said
    return tokens[:2]


def rejected(params: dict[str, Any], n: int = 6000) -> float:
    sampler, seen = Sampler(SamplingParams(**params, seed=1)), Counter[tuple[int, ...]]()
    for _ in range(n):
        seen[tuple(drawn(sampler, seed=5))] += 1  # one and the same drafter: its bias, if it had one, adds up
    return chi_square(seen, joint(SamplingParams(**params)))


@pytest.mark.parametrize("params", FILTERS, ids=repr)
def test_rejection_leaves_the_targets_distribution(params: dict[str, Any]) -> None:
    assert rejected(params) < 3.7


def test_a_wrong_residual_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "_excess", lambda ids, p, candidates, q: p)
    assert rejected(FILTERS[0]) > 6


def test_shared_randomness_is_noticed() -> None:
    sampler = Sampler(SamplingParams(**FILTERS[0], seed=1))
    seen: Counter[tuple[int, ...]] = Counter()
    for trial in range(6000):
        sampler.draft = np.random.default_rng(trial)
        sampler.accept = np.random.default_rng(trial)
        seen[tuple(drawn(sampler, seed=5))] += 1
    assert chi_square(seen, joint(SamplingParams(**FILTERS[0]))) > 6


def test_rejection_accepts_more_than_matching() -> None:
    """With q close to p, min(1, p/q) nearly always accepts, while a match needs two draws to agree."""
    params = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    sampler, row = Sampler(params), logits([])
    ids = np.arange(N_VOCAB, dtype=np.int32)
    weights = sampler.weigh(row)
    n_rejection = n_match = 0
    for trial in range(1000):
        token = int(np.searchsorted(weights.cumsum(), sampler.draft.random(), "right"))
        path = Chain([token], [1.0], [(ids, weights)])
        n_rejection += len(rejection(np.stack([row, row]), path, sampler.distribution, sampler)[0]) - 1
        n_match += (
            len(
                sample_and_match(np.stack([row, row]), path, lambda row, said, t=trial: sampler.choose(row, said, t))[0]
            )
            - 1
        )
    assert n_rejection > 990
    assert n_match < 700


def test_a_token_the_target_would_never_say_is_rejected() -> None:
    params = SamplingParams(temperature=1.0, top_k=1, seed=0)
    sampler, row = Sampler(params), logits([])
    worst, best = int(row.argmin()), int(row.argmax())
    path = Chain([worst], [1.0], [(np.array([worst], np.int32), np.ones(1))])
    assert rejection(np.stack([row, row]), path, sampler.distribution, sampler) == ([best], [0])


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
    assert sample_and_match(ROWS, chain(draft), choose_argmax) == (emitted, list(range(len(emitted))))


def test_a_tree_is_followed_along_the_branch_that_was_said() -> None:
    """The target says 3, behind it 1, behind that 4; its wrong elder sister is not followed."""
    tree = Tree([5, 4, 3, 2, 1, 4], [-1, 0, -1, 2, 2, 4], [1.0] * 6)
    rows = np.eye(N_VOCAB, dtype=np.float32)[[3, 0, 0, 1, 0, 4, 2]]
    assert sample_and_match(rows, tree, choose_argmax) == ([3, 1, 4, 2], [0, 3, 5, 6])


def test_no_draft_is_plain_decoding() -> None:
    assert sample_and_match(ROWS[:1], NOTHING, choose_argmax) == ([3], [0])


def test_nothing_is_chosen_behind_the_first_wrong_token() -> None:
    calls: list[list[int]] = []

    def choose(row: np.ndarray, said: list[int]) -> int:
        calls.append(list(said))
        return int(row.argmax())

    sample_and_match(ROWS, chain([3, 5, 4]), choose)
    assert calls == [[], [3]]


# -- the target's own noise


def coupled(params: SamplingParams, blur: float, n: int = 3000) -> tuple[float, float, float]:
    """Shares of drafts that match: drawn apart from the target, drawn with its noise, and what rejection would keep."""
    row = logits([])
    apart = together = 0
    guess = (row + blur * np.random.default_rng(3).standard_normal(N_VOCAB)).astype(np.float32)
    ids = np.arange(N_VOCAB, dtype=np.int32)
    for seed in range(n):
        sampler = Sampler(SamplingParams(**(vars_of(params) | {"seed": seed})))
        said = sampler.choose(row, [], 0)
        weights = sampler.weigh(guess)
        apart += said == int(np.searchsorted(weights.cumsum(), sampler.draft.random() * weights.sum(), "right"))
        tilted = sampler.tilt(ids[None], guess[None, None].repeat(N_VOCAB, axis=1), 0)
        together += said == int(tilted[0, 0].argmax())
    sampler = Sampler(params)
    overlap = np.minimum(sampler.weigh(row), sampler.weigh(guess)).sum()
    return apart / n, together / n, float(overlap)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_a_draft_with_the_targets_noise_matches_nearly_as_often_as_rejection_accepts() -> None:
    params = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)
    apart, together, overlap = coupled(params, blur=0.5)
    assert together >= overlap / (2 - overlap) - 0.02  # (1 - TV) / (1 + TV), the bound of the paper
    assert together > apart + 0.2
    assert coupled(params, blur=0.0)[1] == 1.0


def test_noise_is_gumbel_and_fresh_at_every_place_token_and_seed() -> None:
    ids = np.arange(2000)
    one, two = (Sampler(SamplingParams(temperature=1.0, seed=seed)) for seed in (1, 2))
    noise = np.stack([one.noise(place, ids) for place in range(50)])
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.02)
    assert abs(np.corrcoef(noise)[np.triu_indices(50, 1)]).max() < 0.11
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(noise[7], two.noise(7, ids))[0, 1]) < 0.08
    assert np.array_equal(noise[7], one.noise(7, ids))
    assert np.array_equal(one.noise(np.array([[7], [8]]), ids[None]), noise[7:9])
