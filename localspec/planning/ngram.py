"""N-gram drafts (prompt lookup): what followed the last time the same few tokens occurred, and how likely that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

N = 3  # tokens that must match at least
LONGEST = 16  # a longer match says no more
LAST, REACH = 4, 64  # a text repeats itself where its last 4 tokens occurred before among its last 64
FAR = REACH - LAST  # so two occurrences are at most that far apart

DECAY = 0.997  # weight of the past per token seen: a half-life of 231
PRIOR = 30.0  # tokens' worth of weight of the probabilities below


class NgramMatch(NamedTuple):
    """`tokens` followed an earlier place that ends as the text does now: its last `matched` tokens are the same there.

    The first `agreed` of them also followed the place before that one.
    """

    tokens: list[int]
    matched: int
    agreed: int

    @property
    def kinds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each token, those before it being right: whether two places agree on it, and how many match by then."""
        n = np.arange(len(self.tokens))
        return (n < self.agreed).astype(np.int64), np.minimum(self.matched + n, LONGEST)


NO_MATCH = NgramMatch([], 0, 0)


class NgramIndex:
    """Every run of `N` tokens of one growing text, and where it ended the last two times."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}  # run -> indices of the token behind it; 0: never
        self._n_known = 0

    def propose(self, tokens: Sequence[int], most: int) -> NgramMatch:
        """Up to `most` tokens that followed the latest earlier place where `tokens` ended as now.

        `tokens` is the text of the last call, perhaps grown. The match is the longest common ending of both places,
        `N` … `LONGEST` tokens. It ends where the latest two places went on differently: the later is seldom right.
        """
        for end in range(max(self._n_known, N), len(tokens)):  # the last run would find itself
            run = tuple(tokens[end - N : end])
            self._ends[run] = end, self._ends.get(run, (0, 0))[0]
        self._n_known = len(tokens)
        at, before = self._ends.get(tuple(tokens[-N:]), (0, 0))
        if not at or most < 1:
            return NO_MATCH
        matched = N
        while matched < min(LONGEST, at) and tokens[at - 1 - matched] == tokens[-1 - matched]:
            matched += 1
        latest = _onward(tokens, at, most)
        if not before:
            return NgramMatch(latest, matched, 0)
        earlier = _onward(tokens, before, most)
        agreed = next((i for i, (a, b) in enumerate(zip(latest, earlier, strict=True)) if a != b), most)
        return NgramMatch(latest[:agreed], matched, agreed) if agreed else NO_MATCH


class NgramStatistics:
    """How often the tokens of matches were right, by `NgramMatch.kinds`: sums [2, LONGEST + 1] over the tokens seen.

    The first values are those of the default target on MT-Bench and HumanEval (benchmarks/ngrams.py).
    """

    def __init__(self, right: Floats, tried: Floats) -> None:
        self.right, self.tried = right, tried

    @classmethod
    def fresh(cls) -> NgramStatistics:
        few = N / np.maximum(np.arange(LONGEST + 1), N)
        return cls(PRIOR * np.stack([1 - 0.33 * few**0.8, 1 - 0.1 * few**1.5]), np.full((2, LONGEST + 1), PRIOR))

    def chances(self, match: NgramMatch) -> Floats:
        """Probability of each token of a match, those before it being right."""
        kinds = match.kinds
        return self.right[kinds] / self.tried[kinds]

    def learn(self, match: NgramMatch, n_right: int, n_seen: int) -> None:
        """The first `n_right` tokens of a match were right; `n_seen` have been compared: one more, or all."""
        agreed, lengths = match.kinds
        for i in range(n_seen):
            kind = agreed[i], lengths[i]
            self.right[kind] = DECAY * self.right[kind] + (i < n_right)
            self.tried[kind] = DECAY * self.tried[kind] + 1


def repeats(tokens: Sequence[int]) -> bool:
    """Whether a text repeats itself at its end: the last 4 tokens occurred before among the last 64."""
    near = list(tokens[-REACH:])
    last = near[-LAST:]
    return len(last) == LAST and any(near[i : i + LAST] == last for i in range(len(near) - LAST))


def _onward(tokens: Sequence[int], at: int, n: int) -> list[int]:
    """The `n` tokens from index `at` on; behind the end the text is taken to go on periodically."""
    period = len(tokens) - at
    return [tokens[at + i % period] for i in range(n)]
