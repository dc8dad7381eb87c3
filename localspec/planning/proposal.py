"""How one round shall go: what each choice would cost, and what of the pool or of an n-gram match pays best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localspec.engine.lattice import Lattice
from localspec.engine.paths import BestFirst, Chain, Draft, Expected, depths
from localspec.engine.plan import Drafting, chances
from localspec.engine.sampling import Sampler
from localspec.planning.ngram import NgramMatch

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bounds:
    """What the user rules: at most and at least so many tokens, and none less likely than `p_min` behind its parent."""

    most: int
    least: int = 0
    p_min: float = 0.0


@dataclass(frozen=True)
class Rules:
    """What holds for a whole answer."""

    drafting: Drafting
    bounds: Bounds
    sampler: Sampler


class Proposal(NamedTuple):
    """A round behind `position` tokens that may send up to `room`.

    `costs[n]` are the seconds of a round that sends n tokens, `draft_s` of them for drafting `n_slots`, and `alone[n]`
    those without the drafter. `match` is the n-gram match, `repeated` as much of it as would pay without the drafter.
    `calibration` [n_slots]: multipliers of predicted acceptance.
    """

    n_slots: int
    keeps_up: bool
    position: int
    room: int
    costs: Floats
    draft_s: float
    alone: Floats
    match: NgramMatch
    repeated: Chain
    calibration: Floats
    rules: Rules

    def select(self, lattice: Lattice | None) -> AutoChoice:
        """The tokens that pay best by `costs`: a part of the pool, or the n-gram draft."""
        if lattice is None:
            return AutoChoice(self, self.repeated)
        pool, gains = self._best(lattice)
        too_short = len(self.repeated.tokens) < min(self.rules.bounds.least, self.room)
        if too_short or rate(pool, self.costs) >= rate(self.repeated, self.costs):
            return AutoChoice(self, pool, _by_depth(pool), gains)
        return AutoChoice(self, self.repeated, None, gains)

    def _best(self, lattice: Lattice) -> tuple[Draft, Sequence[Floats]]:
        """The tree, or where there can be none the chain, that pays best; and, where a whole block was drafted, the
        expected accepted tokens [0 … n sent] of the best drafts from each number of slots."""
        rules = self.rules
        ratio = self.calibration[: len(lattice)]
        step = ratio / np.concatenate(([1.0], ratio[:-1]))  # of one slot, given the one before
        p = np.minimum(chances(lattice, self.position, rules.drafting, rules.sampler) * step[:, None, None], 1.0)
        p[p < rules.bounds.p_min] = 0.0
        blocks = range(1, self.n_slots + 1) if self.n_slots == rules.drafting.n_slots else ()
        if rules.drafting.max_leaves > 1:
            nodes = BestFirst(lattice, p, self.room, max_leaves=rules.drafting.max_leaves)
            tree = nodes.tree(size(nodes.gains(len(lattice)), self.costs, self.room, rules.bounds.least))
            return tree, [nodes.gains(n)[: self.room + 1] for n in blocks]
        chains = Expected(lattice, p)
        chain = chains.path(size(chains.gains, self.costs, self.room, rules.bounds.least))
        return chain, [chains.gains[: min(n, self.room) + 1] for n in blocks]


class AutoChoice(NamedTuple):
    """What `proposal` came to: the draft; for one from the pool the predicted accepted tokens at each depth; and the
    gains of fewer slots where a whole block was drafted."""

    proposal: Proposal
    draft: Draft
    promised: Floats | None = None
    gains: Sequence[Floats] = ()


def rate(draft: Draft, costs: Floats) -> float:
    """Expected tokens a second of a round that verifies `draft`."""
    return (1 + sum(draft.survival)) / float(costs[len(draft.tokens)])


def size(gains: Floats, costs: Floats, room: int, least: int) -> int:
    """How many tokens to send for the most tokens a second, where `gains[n]` of n are expected to be accepted."""
    least, most = min(least, room), min(len(gains) - 1, room)
    rates = (1 + gains[: most + 1]) / costs[: most + 1]
    return min(least, most) + int(rates[min(least, most) :].argmax())


def _by_depth(draft: Draft) -> Floats:
    """Summed probabilities of survival at each distance from the anchor, 1 first."""
    depth = np.array(depths(draft), np.intp)
    return np.bincount(depth - 1, weights=draft.survival).astype(np.float64) if len(depth) else np.zeros(0)
