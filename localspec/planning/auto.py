"""How much to draft, and from where, so that drafting never costs more than it brings on this machine.

A round that drafts k slots and verifies n tokens of them costs `draft[k] + verify[n + 1]` seconds and emits one token
plus those that are accepted. `Auto` maximises expected tokens a second over everything it could verify: a part of the
pool, what followed the last time the text ended as now, or nothing. How many slots pay is known from blocks drafted
before, now and then a whole one. While the drafter does not pay it rests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localspec.engine.lattice import Lattice
from localspec.engine.paths import NOTHING, BestFirst, Chain, Draft, Expected, depths
from localspec.engine.plan import Drafting, chances
from localspec.engine.sampling import Sampler
from localspec.engine.stats import Round
from localspec.planning.cost_model import SETTLED_S
from localspec.planning.ngram import NO_MATCH, NgramIndex
from localspec.planning.profile import AcceptanceCalibration, PairProfile

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bounds:
    """What the user rules: at most and at least so many tokens, and none less likely than `p_min` behind its parent."""

    most: int
    least: int = 0
    p_min: float = 0.0


class Auto:
    """Whatever promises the most tokens a second, by the pool's probabilities and what became of earlier promises.

    One per answer; `profile` is what remains from answer to answer. Without `pool` the drafter is never asked.
    """

    def __init__(
        self, profile: PairProfile, drafting: Drafting, bounds: Bounds, sampler: Sampler, *, pool: bool = True
    ) -> None:
        self._pool = pool
        self._profile, self._drafting, self._bounds, self._sampler = profile, drafting, bounds, sampler
        self._ngrams = NgramIndex()
        self._ngram_calibration = AcceptanceCalibration.fresh(1)  # of this text, beside the statistics of all
        self._index, self._room = 0, 0
        self._cost = profile.costs.verify[1:]  # seconds of this round by how many tokens are sent
        self._n_slots = 0  # drafted this round
        self._calm_s = 0.0  # seconds of plain rounds since the last pass over several tokens
        self._match, self._repeated = NO_MATCH, NOTHING  # all that followed the last time, and as much of it as pays
        self._promised: Floats | None = None  # by depth, of what the pool sent this round
        self._sent: Draft = NOTHING

    @property
    def is_parked(self) -> bool:
        return self._profile.is_parked and not self._bounds.least

    def begin(self, tokens: Sequence[int], room: int) -> int:
        stairs = self._profile.costs
        self._index, self._room, self._n_slots = len(tokens), min(room, self._bounds.most), 0
        settle = stairs.settle if self._calm_s else 0.0
        self._cost = costs = stairs.at(self._index)[1:]
        self._match, self._repeated = self._ngrams.propose(tokens, self._room), NOTHING
        if self._match.tokens:
            self._cost = np.concatenate((costs[:1], settle + costs[1:]))
            self._repeated = self._repeat()
        rests = self.is_parked or self._rate(self._repeated) > self._profile.rate
        if self._room > 0 and self._pool and (not rests or self._bounds.least > 0):
            self._n_slots = min(
                max(self._profile.draft_length.take(), self._bounds.least), self._drafting.n_slots, room
            )
            self._cost = stairs.draft[self._n_slots] + settle + costs
        return self._n_slots

    def select(self, lattice: Lattice | None) -> Draft:
        self._promised, self._sent = None, self._repeated
        if lattice:
            pool = self._best(lattice)
            too_short = len(self._repeated.tokens) < min(self._bounds.least, self._room)
            if too_short or self._rate(pool) >= self._rate(self._repeated):
                self._promised, self._sent = _by_depth(pool), pool
        return self._sent

    def learn(self, round: Round) -> None:
        profile, n = self._profile, len(self._sent.tokens)
        if n or self._calm_s > SETTLED_S:
            profile.costs.learn(n + 1, self._index, round.verify_s)
        self._calm_s = 0.0 if n or self._n_slots else self._calm_s + round.verify_s
        if self._n_slots:
            profile.costs.learn_draft(self._n_slots, round.total_s - round.verify_s)
            plain_s = float(profile.costs.at(self._index)[1])
            profile.drafted(len(round.tokens), float(self._cost[n]), plain_s)
        elif profile.is_parked:
            profile.rested()
        if self._promised is not None:
            trust = profile.acceptance.ratio()[: len(self._promised)]
            profile.acceptance.learn(self._promised / trust, round.n_accepted)
        if self._match.tokens:
            self._listen(round.tokens)

    def _listen(self, said: Sequence[int]) -> None:
        """Sent or not: what was said tells whether the echo was right."""
        n_seen = min(len(self._match.tokens), len(said))
        n_right = next((i for i in range(n_seen) if self._match.tokens[i] != said[i]), n_seen)
        n_seen = min(n_right + 1, n_seen)
        for i, chance in enumerate(self._profile.ngrams.chances(self._match)[:n_seen]):
            self._ngram_calibration.learn(np.array([chance]), int(i < n_right))
        self._profile.ngrams.learn(self._match, n_right, n_seen)

    def _rate(self, draft: Draft) -> float:
        """Expected tokens a second of a round that verifies `draft`."""
        return (1 + sum(draft.survival)) / float(self._cost[len(draft.tokens)])

    def _size(self, gains: Floats) -> int:
        """How many tokens to send, where `gains[n]` are expected to be accepted of n."""
        least, most = min(self._bounds.least, self._room), min(len(gains) - 1, self._room)
        rates = (1 + gains[: most + 1]) / self._cost[: most + 1]
        return min(least, most) + int(rates[min(least, most) :].argmax())

    def _repeat(self) -> Chain:
        """As much as pays of what followed the last time the text ended as now."""
        chances = self._profile.ngrams.chances(self._match) * min(self._ngram_calibration.ratio()[0], 1.0)
        survival = chances.cumprod()
        n = self._size(np.concatenate(([0.0], survival.cumsum())))
        return Chain(self._match.tokens[:n], survival[:n].tolist())

    def _best(self, lattice: Lattice) -> Draft:
        """The tree, or where there can be none the chain, that pays best."""
        ratio = self._profile.acceptance.ratio()[: len(lattice)]
        step = ratio / np.concatenate(([1.0], ratio[:-1]))  # of one slot, given the one before
        p = np.minimum(chances(lattice, self._index, self._drafting, self._sampler) * step[:, None, None], 1.0)
        p[p < self._bounds.p_min] = 0.0
        if self._drafting.max_leaves > 1:
            nodes = BestFirst(lattice, p, self._room, max_leaves=self._drafting.max_leaves)
            self._compare(nodes.gains)
            return nodes.tree(self._size(nodes.gains(len(lattice))))
        chains = Expected(lattice, p)
        self._compare(lambda n_slots: chains.gains[: n_slots + 1])
        return chains.path(self._size(chains.gains))

    def _compare(self, gains: Callable[[int], Floats]) -> None:
        """Learn from a block drafted whole what fewer slots would have brought."""
        stairs, n_slots = self._profile.costs, self._n_slots
        if n_slots == self._drafting.n_slots:
            some = [gains(n)[: self._room + 1] for n in range(1, n_slots + 1)]
            self._profile.draft_length.learn(some, stairs.draft, self._cost - stairs.draft[n_slots])


def _by_depth(draft: Draft) -> Floats:
    """Summed probabilities of survival at each distance from the anchor, 1 first."""
    depth = np.array(depths(draft), np.intp)
    return np.bincount(depth - 1, weights=draft.survival).astype(np.float64) if len(depth) else np.zeros(0)
