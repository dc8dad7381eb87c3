"""What a pass costs on this machine: seconds by width and by depth, corrected by what rounds really took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SETTLED_S = 0.05  # seconds of passes over one token, until they are as fast as ever again
ALL, OWN = 0.01, 0.04  # share of a pass's deviation that corrects all widths, and besides its own
OWN_SELDOM = 0.2  # the second share for a width that is seldom seen
EXCESS = 0.02  # weight of a round in the mean of their deviations
FAR = 2.5  # a pass that takes so many times what was expected was disturbed, or expected wrongly
N_SCALING = 8  # passes that set the scale of a model that was not measured
SLOPES, DRAFTS = {True: 0.05, False: 0.6}, {True: 0.25, False: 0.6}  # in passes over one token, by `on_gpu`


class CostModel:
    """Seconds of a pass: `verify[n]` for the target over n tokens, `draft[n]` for a block of n slots (index 0: 0).

    `verify` is with an empty KV cache; with `attention` = (a, b) a pass over n tokens takes a + b · n seconds more for
    each token in it. After a pass over several tokens some CPUs take a while until passes over one are as fast as
    before: `settle` seconds more, summed up. `learn` corrects the figures by what rounds really took, passes apart for
    texts of up to 512, 1,024, 2,048, … tokens. The next `n_scaling` passes set the scale of all figures. `excess` is
    what a whole round without the drafter takes on average, over its pass's figure: a little more, and more with noise.
    """

    def __init__(
        self,
        verify: Sequence[float],
        draft: Sequence[float],
        settle: float = 0.0,
        attention: tuple[float, float] = (0.0, 0.0),
        corrections: Mapping[str, Sequence[float]] | None = None,
        n_scaling: int = 0,
        excess: float = 1.0,
    ) -> None:
        self.verify, self.draft, self.settle = np.array(verify, np.float64), np.array(draft, np.float64), float(settle)
        a, b = self._attention = (float(attention[0]), float(attention[1]))
        self._deeper = a + b * np.arange(len(self.verify))  # seconds of a pass over n tokens per token in the cache
        self._corrections = {int(level): np.array(row, np.float64) for level, row in (corrections or {}).items()}
        self._n_scaling, self.excess = int(n_scaling), float(excess)

    @classmethod
    def prior(cls, draft_max: int, n_slots: int, *, on_gpu: bool) -> CostModel:
        """Before anything is measured: a pass grows evenly with its width, steeply on a CPU."""
        slope = SLOPES[on_gpu]
        verify = [0.0, *(1.0 + slope * np.arange(draft_max + 1))]
        return cls(verify, [0.0, *[DRAFTS[on_gpu]] * n_slots], n_scaling=N_SCALING)

    @property
    def most(self) -> int:
        """The longest draft it knows the cost of."""
        return len(self.verify) - 2

    @property
    def is_scaling(self) -> bool:
        """Whether its figures have no scale yet: they are right in relation to each other only."""
        return self._n_scaling > 0

    def at(self, depth: int) -> Floats:
        """`verify` with `depth` tokens in the KV cache."""
        return (self.verify + depth * self._deeper) * self._correction(depth)

    def learn(self, n: int, depth: int, seconds: float, own: float = OWN, *, drafted: bool = False) -> None:
        """A pass over `n` tokens took `seconds`. What is far off was disturbed, unless it comes again and again: it
        corrects its own width only, and by a bounded step. Passes of rounds that drafted, with the drafter's weights in
        the CPU's cache, say nothing about those over one token.
        """
        if n >= len(self.verify) or seconds <= 0:
            return
        if self._n_scaling:
            self._scale(seconds / float(self.verify[n]))
            return
        row = self._correction(depth)
        ratio = seconds / float((self.verify[n] + depth * self._deeper[n]) * row[n])
        if 1 / FAR < ratio < FAR:
            row[2 * drafted :] *= ratio**ALL
        row[n] *= clipped(ratio) ** own

    def learn_round(self, ratio: float) -> None:
        """A round without the drafter took `ratio` times what its pass should take."""
        self.excess += EXCESS * (clipped(ratio) - self.excess)

    def _scale(self, ratio: float) -> None:
        """Multiply all by the (geometric) mean of the first passes' ratios, one after the other."""
        share = 1 / (N_SCALING - self._n_scaling + 1)
        self.verify *= ratio**share
        self.draft *= ratio**share
        self._n_scaling -= 1

    def learn_draft(self, n_slots: int, seconds: float) -> None:
        """Drafting, selecting and injecting took `seconds` in a round, all that is not the target's pass."""
        self.draft *= clipped(seconds / float(self.draft[n_slots])) ** (ALL + OWN)

    def _correction(self, depth: int) -> Floats:
        """Factors for texts about as long; at first those for the longest shorter ones that are known."""
        level = max(0, (depth - 1).bit_length() - 9)
        if level not in self._corrections:
            below = [known for known in self._corrections if known < level]
            self._corrections[level] = (
                self._corrections[max(below)].copy() if below else np.ones(len(self.verify), np.float64)
            )
        return self._corrections[level]

    def to_json(self) -> dict[str, Any]:
        corrections = {str(level): row.tolist() for level, row in self._corrections.items()}
        costs = {"verify": self.verify.tolist(), "draft": self.draft.tolist(), "settle": self.settle}
        rest = {"attention": self._attention, "n_scaling": self._n_scaling, "excess": self.excess}
        return costs | rest | {"corrections": corrections}


def clipped(ratio: float) -> float:
    """A measured time by the expected one, as far as it counts."""
    return min(max(ratio, 1 / FAR), FAR)
