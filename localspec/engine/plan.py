"""What a round asks of a plan, and the plans that choose the same way in every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from localspec.engine.lattice import Lattice
from localspec.engine.paths import NOTHING, BestFirst, Draft, Expected, greedy, probabilities, sampled
from localspec.engine.sampling import Sampler
from localspec.engine.stats import Round

Floats = NDArray[np.float64]
Choose = Callable[[Lattice, int], Draft]


class Choice(Protocol):
    """What a round sends to verification, and whatever its plan wants to remember of how it was chosen."""

    @property
    def draft(self) -> Draft: ...


C = TypeVar("C", bound=Choice)
C_co = TypeVar("C_co", bound=Choice, covariant=True)


class Proposal(Protocol[C_co]):
    """How a round shall go, decided before anything is drafted."""

    @property
    def n_slots(self) -> int:
        """How many slots to draft; 0 for none."""

    @property
    def keeps_up(self) -> bool:
        """Whether the drafter is to take this round in; once it is not, it stays behind for the rest of the answer."""

    def select(self, lattice: Lattice | None) -> C_co:
        """What to verify, given what was drafted."""


class Plan(Protocol[C]):
    """What the loop asks in each round: a proposal, and in the end to learn from what became of its choice."""

    @property
    def is_parked(self) -> bool:
        """True while the drafter rests because it does not pay."""

    def propose(self, tokens: Sequence[int], room: int) -> Proposal[C]:
        """How to go on behind `tokens`, of which the last one is the anchor. At most `room` tokens can be verified."""

    def learn(self, choice: C, round: Round) -> None:
        """Take in what became of `choice`."""


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


@dataclass(frozen=True)
class FixedChoice:
    """A draft and no more."""

    draft: Draft


@dataclass(frozen=True)
class FixedProposal:
    """The draft that `choose` makes of the pool behind `index` tokens, `room` tokens of it at most."""

    n_slots: int
    index: int
    room: int
    choose: Choose
    keeps_up: bool = True

    def select(self, lattice: Lattice | None) -> FixedChoice:
        return FixedChoice(self.choose(lattice, self.index).head(self.room) if lattice else NOTHING)


class Fixed:
    """The same selection in every round, by the pool and the next token's number; without one, plain decoding."""

    is_parked = False

    def __init__(self, n_slots: int = 0, choose: Choose = lambda *_: NOTHING) -> None:
        self._n_slots, self._choose = n_slots, choose

    def propose(self, tokens: Sequence[int], room: int) -> FixedProposal:
        return FixedProposal(min(self._n_slots, room), len(tokens), room, self._choose)

    def learn(self, choice: FixedChoice, round: Round) -> None:
        """A fixed plan learns nothing."""


def selector(kind: str, n: int, drafting: Drafting, sampler: Sampler) -> Choose:
    """`n` tokens of the pool chosen by `kind`: "greedy", "expected", "tree" or "sampled"; greedily by any other,
    such as "auto" where nothing can be known of costs."""

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
