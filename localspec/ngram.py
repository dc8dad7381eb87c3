"""Where the text repeats itself: what followed the last time the same few tokens were said."""

from __future__ import annotations

from collections.abc import Sequence

N = 3  # tokens that must match at least
LONGEST = 16  # a longer match says no more
LAST, REACH = 4, 64  # a text repeats itself where its last 4 tokens occurred before among its last 64
FAR = REACH - LAST  # so two occurrences are at most that far apart


class Suffixes:
    """Every run of `N` tokens of one growing text, and where it ended last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # run -> index of the token behind it
        self._n_known = 0

    def propose(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to `most` tokens that followed the latest earlier place where `tokens` ended as now, and how many matched.

        `tokens` is the text of the last call, perhaps grown. The match is the longest common ending of both places,
        `N` … `LONGEST` tokens; ([], 0) if there is none.
        """
        for end in range(max(self._n_known, N), len(tokens)):  # the last run would find itself
            self._ends[tuple(tokens[end - N : end])] = end
        self._n_known = len(tokens)
        at = self._ends.get(tuple(tokens[-N:]))
        if at is None or most < 1:
            return [], 0
        matched = N
        while matched < min(LONGEST, at) and tokens[at - 1 - matched] == tokens[-1 - matched]:
            matched += 1
        period = len(tokens) - at  # a text that runs in a circle goes on around it
        return [tokens[at + i % period] for i in range(most)], matched


def repeats(tokens: Sequence[int]) -> bool:
    """Whether a text repeats itself at its end: the last 4 tokens occurred before among the last 64."""
    near = list(tokens[-REACH:])
    last = near[-LAST:]
    return len(last) == LAST and any(near[i : i + LAST] == last for i in range(len(near) - LAST))
