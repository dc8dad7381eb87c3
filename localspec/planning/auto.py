"""How much to draft, and from where, so that drafting never costs more than it brings on this machine.

A round that drafts k slots and verifies n tokens of them costs `draft[k] + verify[n + 1]` seconds and emits one token
plus those that are accepted. `Auto` maximises expected tokens a second over everything it could verify: a part of the
pool, what followed the last time the text ended as now, or nothing. How many slots pay is known from blocks drafted
before, now and then a whole one. Whether the drafter is asked at all is decided by what it has saved, see `parking`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localspec.engine.paths import NOTHING, Chain
from localspec.engine.plan import Drafting
from localspec.engine.sampling import Sampler
from localspec.engine.stats import Round
from localspec.planning.cost_model import OWN, OWN_SELDOM, SETTLED_S, Floats, clipped
from localspec.planning.ngram import NgramIndex, NgramMatch
from localspec.planning.profile import DECAY, AcceptanceCalibration, PairProfile
from localspec.planning.proposal import AutoChoice, Bounds, Proposal, Rules, rate, size


class Auto:
    """Whatever promises the most tokens a second, by predicted probabilities and what became of earlier predictions.

    One per answer; `profile` is what remains from answer to answer. Without `pool` the drafter is never asked.
    """

    def __init__(
        self, profile: PairProfile, drafting: Drafting, bounds: Bounds, sampler: Sampler, *, pool: bool = True
    ) -> None:
        self._profile, self._rules = profile, Rules(drafting, bounds, sampler)
        self._text = _Text()
        self._pool = pool  # whether the drafter keeps up with this answer
        self._calm_s = 0.0  # seconds of plain rounds since the last pass over several tokens

    @property
    def is_parked(self) -> bool:
        return self._profile.parking.is_resting and not self._rules.bounds.least

    def propose(self, tokens: Sequence[int], room: int) -> Proposal:
        costs, bounds, index = self._profile.costs, self._rules.bounds, len(tokens)
        room, free = min(room, bounds.most), room
        alone = costs.at(index)[1:]
        if self._calm_s and costs.settle:
            alone[1:] += costs.settle
        match = self._text.index.propose(tokens, room)
        repeated = self._repeat(match, alone, room) if match.tokens else NOTHING
        n_slots, seconds, draft_s = self._n_slots(repeated, alone, free), alone, 0.0
        if n_slots:
            draft_s = float(costs.draft[n_slots])
            seconds = draft_s + alone
            seconds[0] += costs.settle if self._calm_s else 0.0  # a block is a pass over several tokens, too
        calibration = self._profile.acceptance.ratio() if n_slots else NO_FLOATS
        return Proposal(
            n_slots, self._pool, index, room, seconds, draft_s, alone, match, repeated, calibration, self._rules
        )

    def _n_slots(self, repeated: Chain, alone: Floats, room: int) -> int:
        """How many slots to draft; none where the n-gram draft promises more, or the drafter rests."""
        profile, bounds = self._profile, self._rules.bounds
        if room < 1 or not self._pool:
            return 0
        is_asked = profile.parking.drafts and not (repeated.tokens and rate(repeated, alone) > profile.rate)
        if not is_asked and not bounds.least:
            return 0
        return min(max(profile.draft_length.n_slots, bounds.least), self._rules.drafting.n_slots, room)

    def _repeat(self, match: NgramMatch, alone: Floats, room: int) -> Chain:
        """As much of a match as pays without the drafter."""
        survival = (self._profile.ngrams.chances(match) * self._text.ratio).cumprod()
        n = size(np.concatenate(([0.0], survival.cumsum())), alone, room, self._rules.bounds.least)
        return Chain(match.tokens[:n], survival[:n].tolist())

    def learn(self, choice: AutoChoice, round: Round) -> None:
        proposal, profile = choice.proposal, self._profile
        profile.unmeasured_s += round.total_s
        if choice.gains:
            profile.draft_length.learn(choice.gains, profile.costs.draft, proposal.costs - proposal.draft_s)
        if choice.promised is not None:
            predicted = choice.promised / proposal.calibration[: len(choice.promised)]
            profile.acceptance.learn(predicted, round.n_accepted)
        taught = self._learn_costs(choice, round)
        self._account(choice, round, taught=taught)
        if proposal.match.tokens:
            self._text.learn(profile, proposal.match, round.tokens)

    def _learn_costs(self, choice: AutoChoice, round: Round) -> bool:
        """Correct the cost model; returns whether the round told what a plain one takes."""
        costs, proposal, n = self._profile.costs, choice.proposal, len(choice.draft.tokens)
        n_slots, is_settled = proposal.n_slots, self._calm_s > SETTLED_S
        if n_slots:
            costs.learn_draft(n_slots, round.total_s - round.verify_s)
        if n or (is_settled and not n_slots) or costs.is_scaling:
            own = OWN_SELDOM if self._profile.parking.is_control else OWN
            costs.learn(n + 1, proposal.position, round.verify_s, own, drafted=n_slots > 0)
        self._calm_s = 0.0 if n or n_slots else self._calm_s + round.verify_s
        return is_settled and not n and not n_slots

    def _account(self, choice: AutoChoice, round: Round, *, taught: bool) -> None:
        """Tell the parking what this round saved against the same text without the drafter."""
        proposal, profile = choice.proposal, self._profile
        plain_s, seconds = float(proposal.alone[0]), float(proposal.costs[len(choice.draft.tokens)])
        alone_s, alone_n = plain_s, 1.0
        if n_repeated := len(proposal.repeated.tokens):
            alone_s, alone_n = float(proposal.alone[n_repeated]), _n_alone(proposal.repeated, round.tokens)
        took = clipped(round.total_s / seconds)
        self._text.passed(alone_s / plain_s, alone_n)
        if not proposal.n_slots:
            profile.parking.passed(seconds / plain_s, taught=taught)
            profile.costs.learn_round(took)
        elif not self._rules.bounds.least:
            more = (len(round.tokens) - alone_n) * self._text.rounds_a_token
            saved = alone_s / plain_s + more - took * seconds / (plain_s * profile.costs.excess)
            profile.drafted(len(round.tokens), seconds, saved)
            self._pool = self._pool and not profile.parking.is_resting


class _Text:
    """What is known of one text: its n-grams, how well they predict it, and what it takes without the drafter."""

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._calibration = AcceptanceCalibration.fresh(1)  # beside the statistics of all texts
        self._rounds, self._tokens = PRIOR, PRIOR  # with n-gram drafts alone, with `DECAY`

    @property
    def ratio(self) -> float:
        """Multiplier of the probabilities that hold for all texts."""
        return min(float(self._calibration.ratio()[0]), 1.0)

    @property
    def rounds_a_token(self) -> float:
        """What a token takes without the drafter, in plain rounds."""
        return self._rounds / self._tokens

    def passed(self, n_rounds: float, n_tokens: float) -> None:
        """`n_tokens` take or would have taken as long as `n_rounds` plain rounds, without the drafter."""
        self._rounds = DECAY * self._rounds + n_rounds
        self._tokens = DECAY * self._tokens + n_tokens

    def learn(self, profile: PairProfile, match: NgramMatch, said: Sequence[int]) -> None:
        """Compare a match, sent or not, with what was said."""
        n_seen = min(len(match.tokens), len(said))
        n_right = _n_common(match.tokens, said)
        n_seen = min(n_right + 1, n_seen)
        for i, chance in enumerate(profile.ngrams.chances(match)[:n_seen]):
            self._calibration.learn(np.array([chance]), int(i < n_right))
        profile.ngrams.learn(match, n_right, n_seen)


PRIOR = 8.0  # rounds' worth of weight of a text's first rate, that of plain decoding
NO_FLOATS: Floats = np.zeros(0)


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _n_alone(repeated: Chain, said: Sequence[int]) -> float:
    """Tokens a round that sends `repeated` would have emitted where the text went on as `said`; behind its end as many
    as are expected."""
    n = _n_common(repeated.tokens, said)
    further = 0.0
    if n == len(said) < len(repeated.tokens):
        further = sum(repeated.survival[n:]) / repeated.survival[n - 1]
    return 1 + n + further
