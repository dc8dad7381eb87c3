"""What a round asks of a plan, and the plans that choose the same way in every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localspec.engine.lattice import Lattice
from localspec.engine.paths import NOTHING, BestFirst, Draft, Expected, greedy, probabilities, sampled
from localspec.engine.sampling import Sampler
from localspec.engine.stats import Round

Floats = NDArray[np.float64]
Choose = Callable[[Lattice, int], Draft]


class Plan(Protocol):
    """What the loop asks in each round: `begin`, then `select`, then `learn`."""

    @property
    def is_parked(self) -> bool:
        """True while the drafter rests because it does not pay."""

    def begin(self, tokens: Sequence[int], room: int) -> int:
        """How many slots to draft behind `tokens`; 0 for none. At most `room` tokens can be verified."""

    def select(self, lattice: Lattice | None) -> Draft:
        """What to verify, given what was drafted."""

    def learn(self, round: Round) -> None:
        """Take in what became of the round."""


@dataclass(frozen=True)
class Drafting:
    """What a pair can draft: slots of a block, the scores' temperature in each [n_slots], leaves of a tree (1: chains
    only), the most tokens one pass can verify besides the anchor, and tokens there are.
    """

    n_slots: int
    calibration: Floats
    max_leaves: int
    draft_max: int
    n_vocab: int


class Fixed:
    """The same selection in every round, by the pool and the next token's number; without one, plain decoding."""

    is_parked = False

    def __init__(self, n_slots: int = 0, choose: Choose = lambda *_: NOTHING) -> None:
        self._n_slots, self._choose, self._index = n_slots, choose, 0

    def begin(self, tokens: Sequence[int], room: int) -> int:
        self._index = len(tokens)
        return min(self._n_slots, room)

    def select(self, lattice: Lattice | None) -> Draft:
        return self._choose(lattice, self._index) if lattice else NOTHING

    def learn(self, round: Round) -> None:
        """A fixed plan learns nothing."""


def selector(kind: str, n: int, drafting: Drafting, sampler: Sampler) -> Choose:
    """`n` tokens of the pool chosen by `kind`: "greedy", "expected", "tree" or "sampled"."""

    def choose(lattice: Lattice, index: int) -> Draft:
        if kind == "sampled" and sampler.params.temperature > 0:
            return sampled(lattice, n, sampler.weigh, sampler.draft)
        p = chances(lattice, index, drafting, sampler)
        if kind == "tree":
            return BestFirst(lattice, p, n, max_leaves=drafting.max_leaves).tree(n)
        if kind == "expected":
            return Expected(lattice, p).path(min(n, len(lattice)))
        return greedy(lattice, p).head(n)

    return choose


def chances(lattice: Lattice, index: int, drafting: Drafting, sampler: Sampler) -> Floats:
    """P [n_slots, K, K] that the target will choose each candidate behind each other one, its noise being known."""
    tilted = Lattice(lattice.ids, sampler.tilt(lattice.ids, lattice.scores, index))
    return probabilities(tilted, drafting.calibration[: len(lattice)])
