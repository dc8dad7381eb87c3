"""What a pass costs on this machine: seconds by width and by depth, corrected by what rounds really took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SETTLED_S = 0.05  # seconds of passes over one token, until they are as fast as ever again


class CostModel:
    """Seconds of a pass: `verify[n]` for the target over n tokens, `draft[n]` for a block of n slots (index 0: 0).

    `verify` is with nothing in memory; with `attention` = (a, b) a pass over n tokens takes a + b · n seconds more for
    each token there. After a pass over several tokens some CPUs take a while until passes over one are as fast as
    before: `settle` seconds more, summed up. `learn` corrects the figures by what rounds really took, passes apart for
    texts of up to 512, 1,024, 2,048, … tokens.
    """

    def __init__(
        self,
        verify: Sequence[float],
        draft: Sequence[float],
        settle: float = 0.0,
        attention: tuple[float, float] = (0.0, 0.0),
        corrections: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self.verify, self.draft, self.settle = np.array(verify, np.float64), np.array(draft, np.float64), float(settle)
        a, b = self._attention = (float(attention[0]), float(attention[1]))
        self._deeper = a + b * np.arange(len(self.verify))  # seconds of a pass over n tokens per token in memory
        self._corrections = {int(level): np.array(row, np.float64) for level, row in (corrections or {}).items()}

    @property
    def most(self) -> int:
        """The longest draft it knows the cost of."""
        return len(self.verify) - 2

    def at(self, depth: int) -> Floats:
        """`verify` with `depth` tokens in memory."""
        return (self.verify + depth * self._deeper) * self._correction(depth)

    def learn(self, n: int, depth: int, seconds: float) -> None:
        """A pass over `n` tokens took `seconds`. What is far off was disturbed and teaches nothing."""
        if n >= len(self.verify):
            return
        row = self._correction(depth)
        ratio = seconds / float((self.verify[n] + depth * self._deeper[n]) * row[n])
        if 0.4 < ratio < 2.5:
            row *= ratio**0.01
            row[n] *= ratio**0.04

    def learn_draft(self, n_slots: int, seconds: float) -> None:
        """Drafting, selecting and injecting took `seconds` in a round, all that is not the target's pass."""
        self.draft *= min(max(seconds / self.draft[n_slots], 0.4), 2.5) ** 0.05

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
        return costs | {"attention": self._attention, "corrections": corrections}
